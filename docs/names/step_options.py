"""Options outside of the policy loss: rollout correction, value loss, advantages. See `options`."""

from __future__ import annotations

from docs.names.called import Argument, Option, Row, trl

_RS = "algorithm.rollout_correction."

STEP_OPTIONS: dict[str, tuple[Row, ...]] = {
    "Rollout engine ≠ trainer": (
        Row(
            "importance weights, and their level",
            (
                "`LossSpec(correction=…)`:",
                Argument("Truncate", "level", "token"),
                Argument("Band", "level", "token"),
            ),
            (
                Option(f"{_RS}rollout_is", None),
                Argument("compute_rollout_correction_weights", "rollout_is", "token"),
                '`"sequence"`: the product',
            ),
            (
                Option("--algo.advantage.is_correction_level", "off"),
                Argument("PolicyLoss", "is_correction_level", "off"),
                "up to 0.11.1: `PolicyLoss(enable_vllm_is_correction=False)`",
            ),
            trl(
                use_vllm=False,
                vllm_importance_sampling_correction=True,
                vllm_importance_sampling_mode="sequence_mask",
            ),
        ),
        Row(
            "truncate or mask",
            ("`Truncate`, `Band`, `SequenceMask`",),
            ("one threshold truncates, `low_high` masks",),
            (
                Option("--algo.advantage.is_correction_mode", "mask"),
                Argument("PolicyLoss", "is_correction_mode", "mask"),
                "up to 0.11.1: `PolicyLoss(vllm_is_correction_type='tis')`",
            ),
            ("by the mode's second word",),
        ),
        Row(
            "the bounded quantity",
            ("the weight; or `DivergenceMask`, `Reject`",),
            ("the weight",),
            (
                Option("--algo.advantage.is_correction_gating", "ratio"),
                Argument("PolicyLoss", "is_correction_gating", "ratio"),
            ),
            ("the weight",),
        ),
        Row(
            "bounds of the weight",
            (
                Argument("Truncate", "high"),
                Argument("Truncate", "low", 0.0),
                Argument("Band", "low"),
                Argument("Band", "high"),
            ),
            (
                Option(f"{_RS}rollout_is_threshold", 2.0),
                Argument("compute_rollout_correction_weights", "rollout_is_threshold", 2.0),
            ),
            (
                Option("--algo.advantage.is_correction_threshold", [0.5, 5.0]),
                Argument("PolicyLoss", "is_correction_threshold", (0.5, 5.0)),
                "up to 0.11.1: `PolicyLoss(vllm_is_truncated_threshold=None)`",
            ),
            trl(
                "the last one: an older name of the first",
                vllm_importance_sampling_clip_max=3.0,
                vllm_importance_sampling_clip_min=None,
                vllm_importance_sampling_cap=None,
            ),
        ),
        Row(
            "weights divided by their mean",
            (Argument("SelfNormalise", "over", "tokens"),),
            (
                Option(f"{_RS}rollout_is_batch_normalize", False),
                Argument("compute_rollout_correction_weights", "rollout_is_batch_normalize", False),
            ),
        ),
        Row(
            "rejection",
            (Argument("Reject", "estimator"), Argument("Reject", "reduce", "token")),
            (
                Option(f"{_RS}rollout_rs", None),
                Argument("compute_rollout_rejection_mask", "rollout_rs", "token_k1"),
            ),
        ),
        Row(
            "bounds of the rejection",
            (Argument("Reject", "low", None), Argument("Reject", "high", None), "in nats"),
            (
                Option(f"{_RS}rollout_rs_threshold", None),
                Argument("compute_rollout_rejection_mask", "rollout_rs_threshold", None),
                "k1: ratios π_rollout/π_train",
            ),
        ),
        Row(
            "effect of a rejected token on the denominator",
            (Argument("LossSpec", "rejected", "keep"),),
            (
                (
                    "`rollout_rs` takes it out before the tokens are counted, bypass mode after; a "
                    "weight of 0 stays in it"
                ),
            ),
            ("stays in it",),
            ("stays in it",),
        ),
        Row(
            "the ratio to the engine itself",
            (Argument("TokenRatio", "anchor", "old"), '`"rollout"`'),
            (Option(f"{_RS}bypass_mode", False), Option(f"{_RS}loss_type", "ppo_clip")),
            ("`gspo` with a correction on",),
        ),
        Row(
            "off-policy sequences with A < 0 dropped",
            (Argument("OPSM", "delta"), Argument("OPSM", "source", "old")),
            trl=trl("against the engine where there is one", off_policy_mask_threshold=None),
        ),
    ),
    "Value loss": (
        Row(
            "value clip",
            (Argument("value_loss", "clip", 0.2),),
            (
                Option("critic.cliprange_value", 0.5),
                Argument("compute_value_loss", "cliprange_value"),
            ),
            (Option("--critic.value_clip", 0.5), Argument("ValueLoss", "clip_eps", None)),
            colossalchat=(Argument("models.ValueLoss", "clip_eps", 0.2),),
        ),
    ),
    "Advantages": (
        Row(
            "which estimator",
            ("`pl.gae`, or a function of `pl.advantage`",),
            (Option("algorithm.adv_estimator", "gae"),),
            (Option("--algo.advantage.estimator", "gae"),),
            ("the group's mean and standard deviation",),
            (Argument("PolicyLoss", "adv", "GRPO"), "not read by the loss"),
        ),
        Row(
            "discount, and GAE's λ",
            (Argument("gae", "gamma", 1.0), Argument("gae", "lam", 1.0)),
            (Option("algorithm.gamma", 1.0), Option("algorithm.lam", 1.0)),
            (Option("--algo.advantage.gamma", 1), Option("--algo.advantage.lambd", 1)),
        ),
        Row(
            "division by the standard deviation",
            ("`advantage.grpo` divides, `advantage.dr_grpo` does not",),
            (
                Option("algorithm.norm_adv_by_std_in_grpo", True),
                Argument("compute_grpo_outcome_advantage", "norm_adv_by_std_in_grpo", True),
            ),
            (
                "`group_norm` divides, `dr_grpo` does not;",
                Option("--algo.advantage.no_std_norm", False),
                "for the other estimators",
            ),
            trl('`"none"`: not; `"batch"`: the batch\'s', scale_rewards="group"),
            ("always",),
        ),
        Row(
            "added to the standard deviation",
            (Argument("advantage.grpo", "eps", 1e-6),),
            (Argument("compute_grpo_outcome_advantage", "epsilon", 1e-6),),
            ("1e-9",),
            ("1e-4",),
            ("1e-4",),
        ),
    ),
}
