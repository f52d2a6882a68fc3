"""The name of each option in each framework, and its default there, as data.

Read from verl 0.9.1 (the configuration files it ships), OpenRLHF 0.11.2, TRL 1.16.0 and
ColossalChat as of 0.5.0. Tests compare every argument with the signature of its drop-in, and
`make conformance` every option with the framework itself.
"""

from __future__ import annotations

from docs.names.called import Argument, Option, Row, trl
from docs.names.step_options import STEP_OPTIONS

_BATCH_COUNTS = ("dp_size", 1), ("batch_num_tokens", None), ("global_batch_size", None)

OPTIONS: dict[str, tuple[Row, ...]] = {
    "Tensors": (
        Row(
            "log-probabilities of the trained policy",
            (Argument("policy_loss", "logp"),),
            (Argument("compute_policy_loss", "log_prob"),),
            (Argument("PolicyLoss.forward", "log_probs"),),
            ("`per_token_logps`",),
            (Argument("PolicyLoss.forward", "log_probs"),),
        ),
        Row(
            "… of the trainer when the batch was frozen",
            (Argument("policy_loss", "old_logp"),),
            (Argument("compute_policy_loss", "old_log_prob"),),
            (Argument("PolicyLoss.forward", "old_log_probs"),),
            ("`old_per_token_logps`",),
            (Argument("PolicyLoss.forward", "old_log_probs"),),
        ),
        Row(
            "… of the inference engine",
            (Argument("policy_loss", "rollout_logp", None),),
            (Argument("compute_rollout_correction_and_rejection_mask", "rollout_log_prob"),),
            (Argument("PolicyLoss.forward", "rollout_log_probs", None),),
            ("`sampling_per_token_logps`",),
        ),
        Row(
            "… of the reference model",
            (Argument("policy_loss", "ref_logp", None),),
            (Argument("kl_penalty", "ref_logprob"),),
            (Argument("compute_approx_kl", "log_probs_base"),),
            ("`ref_per_token_logps`",),
            ("the penalty itself:", Argument("PolicyLoss.forward", "per_token_kl")),
        ),
        Row(
            "the tokens to train on",
            (Argument("policy_loss", "mask"),),
            (Argument("compute_policy_loss", "response_mask"),),
            (Argument("PolicyLoss.forward", "action_mask", None),),
            ("`completion_mask` and `tool_mask`",),
            (
                Argument("PolicyLoss.forward", "action_mask", None),
                Argument("PolicyLoss.forward", "loss_mask", None),
            ),
        ),
    ),
    "Ratio and trust region": (
        Row(
            "which loss",
            ("`preset(name)`, or the part in `LossSpec(trust=…)`",),
            (Option("actor.policy_loss.loss_mode", "vanilla"),),
            (
                Option("--actor.policy_loss_type", "ppo"),
                Argument("PolicyLoss", "policy_loss_type", "ppo"),
            ),
            trl("also chooses the average", loss_type="dapo"),
            ("one surrogate",),
        ),
        Row(
            "which ratio",
            ("`TokenRatio()`, `SequenceRatio()`, …",),
            ("by `loss_mode`",),
            ("by `policy_loss_type`",),
            trl(importance_sampling_level="token"),
        ),
        Row(
            "lower clip, a distance from 1",
            (Argument("Clip", "eps_low"),),
            (
                Option("actor.clip_ratio_low", 0.2),
                Argument("compute_policy_loss", "cliprange_low", None),
            ),
            (
                Option("--actor.eps_clip_low_high", None),
                Argument("PolicyLoss", "clip_eps_low", 0.2),
            ),
            trl(epsilon=0.2),
            (
                Argument("PolicyLoss", "clip_eps_low", 0.2),
                Argument("models.PolicyLoss", "clip_eps", 0.2),
            ),
        ),
        Row(
            "upper clip, a distance from 1",
            (Argument("Clip", "eps_high", None),),
            (
                Option("actor.clip_ratio_high", 0.2),
                Argument("compute_policy_loss", "cliprange_high", None),
            ),
            (
                Option("--actor.eps_clip_low_high", None),
                Argument("PolicyLoss", "clip_eps_high", 0.2),
            ),
            trl("None: `epsilon`; with `cispo` a ratio, not a distance", epsilon_high=None),
            (Argument("PolicyLoss", "clip_eps_high", 0.2),),
        ),
        Row(
            "both clips at once",
            (),
            (Option("actor.clip_ratio", 0.2), Argument("compute_policy_loss", "cliprange", None)),
            (Option("--actor.eps_clip", 0.2),),
        ),
        Row(
            "dual clip: the largest ratio where A < 0",
            (Argument("Clip", "dual", None),),
            (
                Option("actor.clip_ratio_c", 3.0),
                Argument("compute_policy_loss", "clip_ratio_c", 3.0),
                "cannot be turned off",
            ),
            (Option("--actor.dual_clip", None), Argument("PolicyLoss", "dual_clip", None)),
        ),
        Row(
            "the largest ratio, for either sign of A",
            (Argument("TwoSidedClip", "delta"),),
            trl=trl(delta=None),
            colossalchat=("10 in the older loss",),
        ),
        Row(
            "clamp of the log-ratio",
            (
                Argument("TokenRatio", "log_clamp", 20.0),
                Argument("SequenceRatio", "log_clamp", 20.0),
            ),
            ("±20; GSPO at most 10; none in `clip_cov`, `kl_cov`, `geo_mean`, `dro`",),
            ("±20; none with `gspo`",),
            ("none; ±20 a token with `vespo`",),
            ("none",),
        ),
        Row(
            "SAPO's temperatures",
            (Argument("SoftGate", "tau_positive", 1.0), Argument("SoftGate", "tau_negative", 1.05)),
            (Option("actor.tau_pos", 1.0), Option("actor.tau_neg", 1.05)),
            trl=trl(sapo_temperature_pos=1.0, sapo_temperature_neg=1.05),
        ),
        Row(
            "VESPO's weight",
            tuple(
                Argument("GammaWeight", name, default)
                for name, default in (
                    ("k_positive", 2.0),
                    ("lambda_positive", 3.0),
                    ("k_negative", 3.0),
                    ("lambda_negative", 2.0),
                )
            ),
            trl=trl(vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0),
        ),
        Row(
            "Clip-Cov's share of tokens and its window",
            (
                Argument("CovClip", "fraction", 2e-4),
                Argument("CovClip", "cov_low", 1.0),
                Argument("CovClip", "cov_high", 5.0),
            ),
            (
                Option("actor.policy_loss.clip_cov_ratio", 2e-4),
                Option("actor.policy_loss.clip_cov_lb", 1.0),
                Option("actor.policy_loss.clip_cov_ub", 5.0),
            ),
        ),
        Row(
            "KL-Cov's share of tokens and its coefficient",
            (Argument("CovKL", "fraction", 2e-4), Argument("CovKL", "coef", 1.0)),
            (
                Option("actor.policy_loss.kl_cov_ratio", 2e-4),
                Option("actor.policy_loss.ppo_kl_coef", 0.1),
            ),
        ),
        Row(
            "DRO's pull to the old policy",
            (Argument("Quadratic", "beta"),),
            (Option("actor.policy_loss.dro_beta", None), "must be set"),
        ),
    ),
    "Average": (
        Row(
            "which average",
            ("the part in `LossSpec(aggregate=…)`: `TokenMean()`",),
            (
                Option("actor.loss_agg_mode", "token-mean"),
                Argument("compute_policy_loss", "loss_agg_mode", "token-mean"),
            ),
            (
                Option("--actor.loss_agg_mode", "token-mean"),
                Argument("PolicyLoss", "token_level_loss", True),
            ),
            ("by `loss_type`",),
            (Argument("PolicyLoss", "loss_variation", "sample_level"),),
        ),
        Row(
            "Dr. GRPO's constant length",
            (
                Argument("SeqMeanTokenSumNorm", "horizon", None),
                "must be set: `spec.with_horizon(tokens)`",
            ),
            (
                Option("actor.loss_scale_factor", None),
                Argument("agg_loss", "loss_scale_factor", None),
                "None: the padded width",
            ),
            trl=trl(max_completion_length=512),
        ),
        Row(
            "counts of the whole step",
            (
                Argument("Totals", "tokens"),
                Argument("Totals", "sequences"),
                Argument("Totals", "dp_size", 1),
            ),
            tuple(Argument("agg_loss", name, default) for name, default in _BATCH_COUNTS),
            tuple(Argument("PolicyLoss.forward", name, default) for name, default in _BATCH_COUNTS),
            ("`num_items_in_batch`, made by the trainer",),
            (Argument("PolicyLoss.forward", "total_effective_tokens_in_batch", None),),
        ),
    ),
    "KL and entropy": (
        Row(
            "a KL term in the loss",
            (Argument("LossSpec", "kl", None),),
            (Option("actor.use_kl_loss", False),),
            (Option("--algo.kl.use_loss", False), "False: in the reward"),
            ("where `beta` is not 0",),
            ("where `beta` is not 0",),
        ),
        Row(
            "its coefficient",
            (Argument("KL", "coef"),),
            (Option("actor.kl_loss_coef", 0.001),),
            (Option("--algo.kl.init_coef", 0.01),),
            trl(beta=0.0),
            (Argument("PolicyLoss", "beta", 0.01),),
        ),
        Row(
            "its estimator",
            (Argument("KL", "estimator"),),
            (Option("actor.kl_loss_type", "low_var_kl"), Argument("kl_penalty", "kl_penalty")),
            (
                Option("--algo.kl.estimator", "k1"),
                Argument("compute_approx_kl", "kl_estimator", "k1"),
            ),
            ("k3",),
            ("k3, made by the trainer",),
        ),
        Row(
            "its gradient, where not the estimator's own",
            (Argument("KL", "grad", "value"),),
            ('a "+" behind the estimator: k2\'s',),
            (
                Option("--algo.kl.unbiased_gradient", False),
                Argument("compute_approx_kl", "unbiased_gradient", False),
            ),
        ),
        Row(
            "its weight by the ratio",
            (Argument("KL", "weight", None),),
            openrlhf=("with `unbiased_gradient`, at most 10 and without gradient",),
            trl=trl(use_bias_correction_kl=True),
        ),
        Row(
            "its clamps",
            (Argument("KL", "clamp", 20.0), Argument("KL", "value_clamp", None)),
            ("k3: ±20 and ±10; others none",),
            ("every estimate ±10",),
            ("none",),
            ("none",),
        ),
        Row(
            "KL in the reward instead",
            ("subtract it from the rewards",),
            (
                Option("algorithm.use_kl_in_reward", False),
                Option("algorithm.kl_penalty", "kl"),
                Option("algorithm.kl_ctrl.kl_coef", 0.001),
            ),
            ("unless `--algo.kl.use_loss`",),
        ),
        Row(
            "entropy bonus",
            (Argument("LossSpec", "entropy_coef", 0.0),),
            (Option("actor.entropy_coeff", 0),),
            (Option("--actor.entropy_coef", None),),
            trl(
                "always a mean over the micro-batch's tokens",
                entropy_coef=0.0,
                use_adaptive_entropy=False,
            ),
        ),
        Row(
            "only the tokens of highest entropy",
            ("`advantage.top_entropy_mask(share=0.2)`, of the whole step",),
            trl=trl("the share, of each micro-batch", top_entropy_quantile=1.0),
        ),
        Row(
            "an entropy bonus that follows a target",
            (
                Argument("AdaptiveEntropy", "target", 0.2),
                Argument("AdaptiveEntropy", "delta", 0.005),
                Argument("AdaptiveEntropy", "least", 0.0),
                Argument("AdaptiveEntropy", "most", 1.0),
            ),
            trl=(
                "`entropy_target=0.2`, `entropy_coef_delta=0.005`",
                "`entropy_coef_min=0.0`, `entropy_coef_max=1.0`",
            ),
        ),
        Row(
            "a KL coefficient that follows a target",
            (
                Argument("AdaptiveKL", "target"),
                Argument("AdaptiveKL", "horizon", 10_000.0),
            ),
            (
                Option("algorithm.kl_ctrl.target_kl", 0.1),
                Option("algorithm.kl_ctrl.horizon", 10000),
            ),
            (Option("--algo.kl.target", None), Option("--algo.kl.horizon", 10000)),
        ),
    ),
    **STEP_OPTIONS,
}
