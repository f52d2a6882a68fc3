"""A right call of every public function, and what to put in the place of each of its arguments (see
test_arguments.py).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import policyloss as pl
from policyloss.compat import colossalai, openrlhf, trl, verl
from policyloss.compat.trl.parts import RolloutProduct
from policyloss.functional.segments import Sequences, group_sum

B, T, S = 3, 4, 3
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()
LOGP = -(0.2 + torch.arange(12.0).view(B, T) / 10)
OLD = LOGP - 0.1
IDS = torch.tensor([0, 0, 1])
TURNS = torch.tensor([[0, 0, 1, -1], [0, 1, -1, -1], [0, 1, 1, 2]])
PER_SEQUENCE = torch.tensor([1.0, -1.0, 0.5])
LENGTHS = torch.tensor([3, 2, 4])
CU = torch.tensor([0, 3, 5, 9])
PACK = LOGP[MASK]
HIDDEN, WEIGHT = (
    torch.linspace(-1, 1, B * T * 5).view(B, T, 5),
    torch.linspace(-1, 1, 35).view(7, 5),
)
TOKEN_IDS = torch.arange(12).view(B, T) % 7
TRUST_WITH_ALL = pl.LossSpec(
    pl.TokenRatio(), pl.Clip(0.2, 0.28), correction=pl.Truncate(2.0), kl=pl.KL("k3", 0.1)
)

Case = tuple[Callable[..., Any], dict[str, Any]]


def loss_arguments(**more: Any) -> dict[str, Any]:
    tensors = {
        "logp": LOGP,
        "old_logp": OLD,
        "advantages": PER_SEQUENCE,
        "mask": MASK,
        "rollout_logp": OLD - 0.1,
    }
    return {
        "spec": TRUST_WITH_ALL,
        **tensors,
        "ref_logp": OLD,
        "entropy": -OLD,
        "group_ids": IDS,
        "totals": None,
        **more,
    }


def packed_arguments() -> dict[str, Any]:
    same = dict.fromkeys(("logp", "old_logp", "rollout_logp", "ref_logp"), PACK)
    return {
        "spec": TRUST_WITH_ALL,
        **same,
        "advantages": PER_SEQUENCE,
        "mask": PACK < 0,
        "cu_seqlens": CU,
    }


def _compiled_call(**arguments: Any) -> Any:
    """Without the compiler, which takes seconds and refuses nothing by itself."""
    with mock.patch("torch.compile", lambda function, **_: function):
        return pl.compiled_loss(pl.preset("ppo"))(**arguments)


def _step(**micro: Any) -> Any:
    step = pl.accumulate(pl.preset("ppo"), [micro])
    for one in step:
        one.loss(LOGP)
    return step.reduce_metrics().compute()


LIBRARY: dict[str, Case] = {
    "policy_loss": (
        pl.policy_loss,
        loss_arguments(positions=TOKEN_IDS, cu_seqlens=None, cp_group=None),
    ),
    "policy_loss packed": (pl.policy_loss, packed_arguments()),
    "measure": (
        pl.measure,
        loss_arguments(group=None, cp_group=None, dp_size=None) | {"totals": ...},
    ),
    "value_loss": (
        pl.value_loss,
        {
            "values": LOGP,
            "returns": OLD,
            "old_values": LOGP,
            "mask": MASK,
            "clip": 0.2,
            "kind": "mse",
            "huber_delta": 1.0,
            "boundary": "pass",
            "aggregate": None,
            "group_ids": IDS,
            "totals": None,
            "cp_group": None,
        },
    ),
    "policy_loss, a mixture": (
        pl.policy_loss,
        {
            "spec": pl.Mixture({"rl": "ppo", "ce": pl.Stream("reinforce", 0.5, "demo", 1.0)}),
            "logp": LOGP,
            "old_logp": OLD,
            "advantages": PER_SEQUENCE,
            "mask": MASK,
            "extras": {"demo": MASK},
            "entropy": -LOGP,
        },
    ),
    "preference_loss": (
        pl.preference_loss,
        {
            "spec": "dpo",
            "logp": LOGP[:2],
            "ref_logp": OLD[:2],
            "mask": MASK[:2],
            "totals": None,
            "cp_group": None,
        },
    ),
    "aggregate_tokens": (
        pl.aggregate_tokens,
        {
            "x": LOGP,
            "mask": MASK,
            "aggregate": pl.TokenMean(),
            "group_ids": IDS,
            "totals": None,
            "cp_group": None,
        },
    ),
    "gae": (
        pl.gae,
        {
            "rewards": PER_SEQUENCE,
            "values": LOGP,
            "mask": MASK,
            "gamma": 0.9,
            "lam": 0.9,
            "last_values": PER_SEQUENCE,
        },
    ),
    "gae packed": (
        pl.gae,
        {
            "rewards": PER_SEQUENCE,
            "values": PACK,
            "mask": PACK < 0,
            "cu_seqlens": CU,
            "positions": None,
        },
    ),
    "group_advantages": (
        pl.group_advantages,
        {
            "rewards": PER_SEQUENCE,
            "group_ids": IDS,
            "center": "mean",
            "scale": "std",
            "eps": 1e-6,
            "ddof": 1,
            "weights": PER_SEQUENCE.abs(),
            "single": "zero",
            "group": None,
        },
    ),
    "whiten": (
        pl.whiten,
        {"x": LOGP, "mask": MASK, "mean": True, "group": None, "eps": 1e-8, "cp_group": None},
    ),
    "logprobs": (
        pl.logprobs,
        {
            "logits": torch.randn(B, T, 7),
            "ids": TOKEN_IDS,
            "temperature": 1.0,
            "mask": MASK,
            "softcap": 3.0,
        },
    ),
    "logprobs, a temperature per token": (
        pl.logprobs,
        {"logits": torch.randn(B, T, 7), "ids": TOKEN_IDS, "temperature": torch.ones(B, T)},
    ),
    "linear_logprobs": (
        pl.linear_logprobs,
        {
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "ids": TOKEN_IDS,
            "bias": torch.zeros(7),
            "temperature": 1.0,
            "mask": MASK,
            "plan": "auto",
            "softcap": 3.0,
            "vocab_group": None,
        },
    ),
    "linear_divergence": (
        pl.linear_divergence,
        {
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "teacher": pl.Teacher(HIDDEN, WEIGHT),
            "kind": "jsd",
            "beta": 0.5,
            "rest": "entry",
            "top": "union",
            "k": 3,
            "mask": MASK,
            "bias": torch.zeros(7),
            "temperature": 1.0,
            "softcap": 3.0,
            "vocab_group": None,
            "plan": "auto",
        },
    ),
    "divergence": (
        pl.divergence,
        {
            "logits": torch.randn(B, T, 7),
            "teacher": torch.randn(B, T, 7),
            "kind": "reverse",
            "mask": MASK,
            "temperature": 1.0,
            "softcap": 3.0,
        },
    ),
    "Teacher": (
        lambda **fields: pl.linear_divergence(HIDDEN, WEIGHT, pl.Teacher(**fields), kind="forward"),
        {
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "bias": torch.zeros(7),
            "temperature": 1.0,
            "softcap": 3.0,
        },
    ),
    "TopK": (
        lambda **fields: pl.linear_divergence(HIDDEN, WEIGHT, pl.TopK(**fields), kind="forward"),
        {
            "ids": torch.tensor([1, 4]).expand(B, T, 2),
            "logp": torch.full((B, T, 2), -2.0),
        },
    ),
    "linear_policy_loss": (
        pl.linear_policy_loss,
        {
            "spec": pl.preset("ppo"),
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "ids": TOKEN_IDS,
            "old_logp": OLD,
            "advantages": PER_SEQUENCE,
            "mask": MASK,
            "ref_logp": OLD,
            "rollout_logp": OLD,
            "group_ids": IDS,
            "totals": None,
            "plan": "auto",
        },
    ),
    "explain_plan": (
        pl.explain_plan,
        {
            "spec": pl.preset("ppo"),
            "hidden": HIDDEN,
            "weight": WEIGHT,
            "ids": TOKEN_IDS,
            "old_logp": OLD,
            "advantages": PER_SEQUENCE,
            "mask": MASK,
        },
    ),
    "explain_path": (
        pl.explain_path,
        loss_arguments(positions=TOKEN_IDS, cu_seqlens=None, cp_group=None),
    ),
    "bits_check": (
        pl.bits_check,
        {
            "fn": lambda xs: [torch.ones(3) for _ in xs],
            "sequences": [*TOKEN_IDS],
            "against": None,
        },
    ),
    "compiled_loss": (_compiled_call, {k: v for k, v in loss_arguments().items() if k != "spec"}),
    "compiled_loss packed": (
        _compiled_call,
        {k: v for k, v in packed_arguments().items() if k != "spec"},
    ),
    "compiled_loss, its spec": (pl.compiled_loss, {"spec": pl.preset("ppo")}),
    "accumulate": (
        pl.accumulate,
        {
            "spec": pl.preset("ppo"),
            "micro_batches": [{"mask": MASK}],
            "group": None,
            "cp_group": None,
        },
    ),
    "accumulate, a micro-batch": (
        _step,
        {"mask": MASK, "old_logp": OLD, "advantages": PER_SEQUENCE, "group_ids": IDS},
    ),
    "Totals": (
        pl.Totals,
        {
            "tokens": 9,
            "sequences": 3,
            "groups": 2,
            "dp_size": 1,
            "statistics": {"a": torch.ones(())},
            "streams": {"rl": pl.Totals(9, 3)},
        },
    ),
    "Totals.count": (
        pl.Totals.count,
        {
            "mask": MASK,
            "cu_seqlens": None,
            "group_ids": IDS,
            "group": None,
            "cp_group": None,
            "dp_size": None,
        },
    ),
    "Totals.count packed": (
        pl.Totals.count,
        {"mask": PACK < 0, "cu_seqlens": CU, "group_ids": IDS},
    ),
    "Totals.of_call": (pl.Totals.of_call, {"mask": MASK, "dp_size": 1}),
    "GroupTokens": (pl.GroupTokens, {"ids": torch.arange(2), "tokens": torch.ones(2)}),
    "Metrics": (pl.Metrics, {"records": {"a": pl.Stat(torch.ones(()), torch.ones(()))}}),
    "Mismatch.of": (
        pl.Mismatch.of,
        {"old_logp": OLD, "rollout_logp": LOGP, "mask": MASK, "ages": TURNS, "positions": TURNS}
        | {"bands": ((0.5, 2.0),), "cu_seqlens": None, "cp_group": None},
    ),
    "AdaptiveKL": (pl.AdaptiveKL, {"coef": 0.1, "target": 1.0, "horizon": 100.0}),
    "AdaptiveEntropy": (
        pl.AdaptiveEntropy,
        {"coef": 0.1, "target": 1.0, "delta": 0.1, "least": 0.0, "most": 1.0, "entropy": None},
    ),
    "Stat": (pl.Stat, {"sum": torch.ones(()), "count": torch.ones(())}),
    "preset": (pl.preset, {"name": "ppo"}),
    "explain": (pl.explain, {"spec": pl.preset("ppo")}),
    "diff": (pl.diff, {"a": "ppo", "b": "dapo"}),
    "check_loss": (pl.check_loss, {"base": ..., "seed": ..., "loss": "reinforce"}),
    "LossSpec": (pl.LossSpec, {f.name: f.default for f in dataclasses.fields(pl.LossSpec)}),
    "LossSpec.from_dict": (pl.LossSpec.from_dict, {"data": pl.preset("ppo").to_dict()}),
    "Stream": (pl.Stream, {"loss": "ppo", "weight": 0.5, "mask": "demo", "advantage": 1.0}),
    "Mixture": (pl.Mixture, {"streams": {"rl": "ppo", "ce": pl.Stream("reinforce", 0.5)}}),
    "Mixture.from_dict": (pl.Mixture.from_dict, {"data": pl.Mixture({"rl": "ppo"}).to_dict()}),
    "Sequences.of": (Sequences.of, {"tokens": PACK, "cu_seqlens": CU, "cp_group": None}),
    "group_sum": (group_sum, {"x": PER_SEQUENCE, "group_ids": IDS}),
}

_GROUP = {"rewards": PER_SEQUENCE, "group_ids": IDS, "group": None}
ADVANTAGES: dict[str, Case] = {
    "grpo": (pl.advantage.grpo, {**_GROUP, "eps": 1e-6, "ddof": 1, "single": "zero"}),
    "dr_grpo": (pl.advantage.dr_grpo, {**_GROUP, "single": "zero"}),
    "rloo": (pl.advantage.rloo, {**_GROUP, "single": "zero"}),
    "grpo_loo": (pl.advantage.grpo_loo, {**_GROUP, "eps": 1e-6}),
    "opd": (
        pl.advantage.opd,
        {
            "teacher_logp": LOGP,
            "old_logp": OLD,
            "coef": 0.5,
            "base": PER_SEQUENCE,
            "mask": MASK,
            "cu_seqlens": None,
        },
    ),
    "iw_opd": (
        pl.advantage.iw_opd,
        {"teacher_logp": LOGP, "old_logp": OLD, "mask": MASK, "gamma": 0.5, "coef": 0.5},
    ),
    "prefix_weights": (
        pl.advantage.prefix_weights,
        {"advantages": LOGP, "mask": MASK, "gamma": 0.5, "cu_seqlens": None},
    ),
    "centered_kl": (
        pl.advantage.centered_kl,
        {"old_logp": OLD, "ref_logp": LOGP, "mask": MASK, "coef": 0.5, "group": None},
    ),
    "kl_in_reward": (
        pl.advantage.kl_in_reward,
        {
            "rewards": PER_SEQUENCE,
            "old_logp": OLD,
            "ref_logp": LOGP,
            "mask": MASK,
            "coef": 0.5,
            "estimator": "k3",
        },
    ),
    "reinforce_pp": (
        pl.advantage.reinforce_pp,
        {
            "rewards": PER_SEQUENCE,
            "mask": MASK,
            "gamma": 1.0,
            "cu_seqlens": None,
            "group": None,
            "eps": 1e-8,
            "cp_group": None,
        },
    ),
    "reinforce_pp_baseline": (
        pl.advantage.reinforce_pp_baseline,
        {**_GROUP, "lengths": LENGTHS, "single": "zero", "eps": 1e-8},
    ),
    "remax": (pl.advantage.remax, {"rewards": PER_SEQUENCE, "baseline_rewards": PER_SEQUENCE}),
    "opo": (pl.advantage.opo, {**_GROUP, "lengths": LENGTHS, "single": "zero"}),
    "gpg": (pl.advantage.gpg, {**_GROUP, "f_norm": 1.0, "valid": "nonzero", "single": "zero"}),
    "gdpo": (
        pl.advantage.gdpo,
        {
            **_GROUP,
            "rewards": torch.randn(S, 2),
            "weights": [1.0, 2.0],
            "lengths": LENGTHS,
            "scale": "std",
            "eps": 1e-6,
            "ddof": 1,
            "single": "zero",
        },
    ),
    "maxrl": (pl.advantage.maxrl, {**_GROUP, "eps": 1e-6, "single": "zero"}),
    "passk_max_gap": (
        pl.advantage.passk_max_gap,
        {**_GROUP, "scale": "std", "eps": 1e-6, "ddof": 1},
    ),
    "passk_combinatorial": (
        pl.advantage.passk_combinatorial,
        {**_GROUP, "k": 2, "scale": "std", "eps": 1e-6},
    ),
    "optimal_token_baseline": (
        pl.advantage.optimal_token_baseline,
        {
            "rewards": PER_SEQUENCE,
            "group_ids": IDS,
            "mask": MASK,
            "old_logp": OLD,
            "sum_pi_squared": OLD.exp(),
            "weights": OLD.exp(),
            "zero_tail": True,
            "bridge": True,
            "eps": 1e-8,
            "group": None,
            "cp_group": None,
        },
    ),
    "discounted_returns": (
        pl.advantage.discounted_returns,
        {"rewards": LOGP, "mask": MASK, "gamma": 1.0, "cp_group": None},
    ),
    "turn_returns": (pl.advantage.turn_returns, {"rewards": LOGP, "turn_ids": TURNS, "gamma": 1.0}),
    "turn_gae": (
        pl.advantage.turn_gae,
        {"rewards": LOGP, "values": OLD, "turn_ids": TURNS, "gamma": 0.9, "lam": 0.8},
    ),
    "turn_loo": (
        pl.advantage.turn_loo,
        {"rewards": LOGP, "turn_ids": TURNS, "group_ids": IDS, "gamma": 1.0, "group": None},
    ),
    "mt_grpo": (
        pl.advantage.mt_grpo,
        {"rewards": LOGP, "outcomes": PER_SEQUENCE, "turn_ids": TURNS, "group_ids": IDS}
        | {"coef": 1.0, "scale": "std", "eps": 1e-6, "group": None},
    ),
    "gigpo": (
        pl.advantage.gigpo,
        {"rewards": LOGP, "turn_ids": TURNS, "state_ids": TURNS, "group_ids": IDS}
        | {"gamma": 1.0, "omega": 1.0, "scale": None, "eps": 1e-6, "group": None},
    ),
    "asymre": (pl.advantage.asymre, {**_GROUP, "shift": -0.1, "single": "zero"}),
    "flash_reinforce": (pl.advantage.flash_reinforce, {"rewards": PER_SEQUENCE, "group": None}),
    "prpo": (
        pl.advantage.prpo,
        {"rewards": PER_SEQUENCE, "eps": 1e-6, "ddof": 0, "group": None},
    ),
    "hierarchical_grpo": (
        pl.advantage.hierarchical_grpo,
        {**_GROUP, "episode_ids": IDS, "role_ids": IDS, "episode_roles": IDS},
    ),
    "rlsd": (
        pl.advantage.rlsd,
        {"teacher_logp": LOGP, "old_logp": OLD, "base": PER_SEQUENCE, "coef": 0.5, "eps": 0.2}
        | {"mask": MASK, "cu_seqlens": None},
    ),
    "soft_overlong": (
        pl.advantage.soft_overlong,
        {"lengths": LENGTHS, "limit": 9.0, "buffer": 2.0, "coef": 1.0},
    ),
    "mask_truncated": (
        pl.advantage.mask_truncated,
        {"mask": MASK, "truncated": PER_SEQUENCE > 0, "cu_seqlens": None},
    ),
    "top_entropy_mask": (
        pl.advantage.top_entropy_mask,
        {"entropy": -OLD, "mask": MASK, "share": 0.2, "group": None, "cp_group": None},
    ),
    "adaptive_lam": (pl.advantage.adaptive_lam, {"lengths": PER_SEQUENCE + 40, "alpha": 0.05}),
    "estimator": (pl.advantage.estimator, {"name": "grpo"}),
}

PARTS: dict[str, Case] = {
    type(part).__name__: (
        type(part),
        {f.name: getattr(part, f.name) for f in dataclasses.fields(part)},
    )
    for part in (
        *(
            pl.TokenRatio(),
            pl.SequenceRatio(),
            pl.SequenceProduct(),
            RolloutProduct(),
            pl.SegmentRatio(),
            pl.MixedRatio("arithmetic"),
        ),
        *(
            pl.Clip(0.2, 0.28, 3.0),
            pl.TwoSidedClip(4.0),
            pl.DetachedClip(0.8, 1.2),
            pl.SoftGate(),
            pl.FutureKL(),
            pl.GammaWeight(),
        ),
        *(
            pl.ProbabilityBand("tv", 0.1, 0.2),
            pl.GeometricClip(0.4, 0.4),
            pl.Quadratic(0.1),
            pl.Regression(0.1),
            pl.TaperedNegative(),
            pl.Unbounded(),
        ),
        pl.BySign(pl.Unbounded(), pl.Clip(0.2)),
        *(
            pl.CovClip(),
            pl.CovKL(),
            pl.Truncate(2.0),
            pl.Band(0.5, 2.0),
            pl.SequenceMask(0.5, 2.0),
            pl.Reject("k1", "token", 0.1),
        ),
        *(
            pl.Veto(),
            pl.MomentBudget(),
            pl.OPSM(0.1),
            pl.Stale(2.0),
            pl.TruncateRatio(2.0),
            pl.SelfNormalise(),
            pl.DivergenceMask("kl", 0.1),
            pl.KL("k3", 0.1),
            pl.Divergence("jsd", 0.1, weight="ratio", weight_max=2.0, top="student", k=3),
        ),
        *(pl.SeqMeanTokenMean(), pl.SeqMeanTokenSumNorm(8.0), pl.TokenSumNorm(8.0)),
    )
    if dataclasses.fields(part)
}

CONFIG = SimpleNamespace(
    clip_ratio=0.2,
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
    tau_pos=1.0,
    tau_neg=1.05,
    gamma=1.0,
    global_batch_info={},
    policy_loss=SimpleNamespace(
        clip_cov_ratio=0.5,
        clip_cov_lb=0.0,
        clip_cov_ub=5.0,
        kl_cov_ratio=0.5,
        ppo_kl_coef=1.0,
        dro_beta=0.1,
    ),
)
_POLICY = {"old_log_prob": OLD, "log_prob": LOGP, "advantages": OLD, "response_mask": MASK}
_OUTCOME = {
    "token_level_rewards": LOGP,
    "response_mask": MASK,
    "index": ["a", "a", "b"],
    "config": CONFIG,
}
_WITH_PI = {
    "old_log_probs": OLD,
    "sum_pi_squared": OLD.exp(),
    "rollout_is_weights": OLD.exp(),
    "handle_zero_tail": True,
}
_COUNTS = {"dp_size": 1, "batch_num_tokens": 9, "global_batch_size": 3}


def _verl_advantage(name: str) -> Case:
    function = getattr(verl, name)
    arguments: dict[str, Any] = dict(_OUTCOME)
    if "gae" in name:
        return function, {
            "token_level_rewards": LOGP,
            "values": OLD,
            "response_mask": MASK,
            "gamma": 0.9,
            "lam": 0.9,
        }
    if name.endswith("plus_plus_outcome_advantage") or "remax" in name:
        del arguments["index"]
    if "remax" in name:
        arguments["reward_baselines"] = PER_SEQUENCE
    if "optimal_token" in name:
        return function, {
            **{k: v for k, v in arguments.items() if k != "config"},
            **_WITH_PI,
            "epsilon": 1e-8,
        }
    if "passk" in name:
        arguments["index"] = ["a", "a", "a"]
    return function, arguments


VERL: dict[str, Case] = {
    **{f.__name__: _verl_advantage(f.__name__) for f in verl.ADVANTAGE_ESTIMATORS.values()},
    **{
        f.__name__: (
            f,
            {
                **_POLICY,
                "loss_agg_mode": "token-mean",
                "config": CONFIG,
                "rollout_is_weights": OLD.exp(),
            },
        )
        for name, f in verl.POLICY_LOSSES.items()
        if name not in ("bypass_mode",)
    },
    "compute_policy_loss": (
        verl.compute_policy_loss,
        {
            **_POLICY,
            "cliprange": 0.2,
            "clip_ratio_c": 3.0,
            "loss_agg_mode": "token-mean",
            "log_clamp": 20.0,
        },
    ),
    "agg_loss": (
        verl.agg_loss,
        {"loss_mat": LOGP, "loss_mask": MASK, "loss_agg_mode": "token-mean", **_COUNTS},
    ),
    "compute_value_loss": (
        verl.compute_value_loss,
        {
            "vpreds": LOGP,
            "returns": OLD,
            "values": OLD,
            "response_mask": MASK,
            "cliprange_value": 0.2,
            **_COUNTS,
        },
    ),
    "kl_penalty": (verl.kl_penalty, {"logprob": LOGP, "ref_logprob": OLD, "kl_penalty": "k3"}),
    "compute_rollout_correction_weights": (
        verl.compute_rollout_correction_weights,
        {
            "log_ratio": LOGP - OLD,
            "response_mask": MASK,
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
        },
    ),
    "compute_rollout_rejection_mask": (
        verl.compute_rollout_rejection_mask,
        {
            "log_ratio": LOGP - OLD,
            "response_mask": MASK,
            "rollout_rs": "token_k1",
            "rollout_rs_threshold": "0.5_2.0",
        },
    ),
    "compute_rollout_correction_and_rejection_mask": (
        verl.compute_rollout_correction_and_rejection_mask,
        {
            "old_log_prob": OLD,
            "rollout_log_prob": LOGP,
            "response_mask": MASK,
            "rollout_is": "token",
        },
    ),
    "compute_offpolicy_metrics": (
        verl.compute_offpolicy_metrics,
        {"old_log_prob": OLD, "rollout_log_prob": LOGP, "response_mask": MASK},
    ),
}

_LOSS = {"log_probs": LOGP, "old_log_probs": OLD, "advantages": OLD, "action_mask": MASK}
OTHERS: dict[str, Case] = {
    "openrlhf.PolicyLoss": (openrlhf.PolicyLoss(), {**_LOSS, **_COUNTS}),
    "openrlhf.PolicyLoss with a correction": (
        openrlhf.PolicyLoss(is_correction_level="token"),
        {**_LOSS, "rollout_log_probs": OLD},
    ),
    "openrlhf.PolicyLoss()": (
        openrlhf.PolicyLoss,
        {
            "clip_eps_low": 0.2,
            "clip_eps_high": 0.2,
            "dual_clip": 3.0,
            "token_level_loss": True,
            "policy_loss_type": "ppo",
        },
    ),
    "openrlhf.ValueLoss": (
        openrlhf.ValueLoss(0.2),
        {"values": LOGP, "old_values": OLD, "returns": OLD, "action_mask": MASK, **_COUNTS},
    ),
    "openrlhf.ValueLoss()": (openrlhf.ValueLoss, {"clip_eps": 0.2, "token_level_loss": True}),
    "openrlhf.aggregate_loss": (
        openrlhf.losses.aggregate_loss,
        {"loss": LOGP, "loss_mask": MASK, **_COUNTS},
    ),
    "openrlhf.compute_approx_kl": (
        openrlhf.losses.compute_approx_kl,
        {
            "log_probs": LOGP,
            "log_probs_base": OLD,
            "log_probs_old": OLD,
            "kl_estimator": "k3",
            "unbiased_gradient": True,
        },
    ),
    "colossalai.PolicyLoss": (
        colossalai.PolicyLoss(),
        {**_LOSS, "per_token_kl": OLD.abs(), "loss_mask": torch.ones(B)},
    ),
    "colossalai.PolicyLoss by tokens": (
        colossalai.PolicyLoss(loss_variation="token_level"),
        {**_LOSS, "per_token_kl": OLD.abs(), "total_effective_tokens_in_batch": 9.0},
    ),
    "colossalai.PolicyLoss()": (
        colossalai.PolicyLoss,
        {"clip_eps_low": 0.2, "clip_eps_high": 0.2, "beta": 0.1},
    ),
    "colossalai.models.PolicyLoss": (colossalai.models.PolicyLoss(), _LOSS),
    "colossalai.models.ValueLoss": (
        colossalai.models.ValueLoss(),
        {"values": LOGP, "old_values": OLD, "advantage": OLD, "action_mask": MASK},
    ),
    "trl.batch_loss": (
        lambda spec, logp, totals, **inputs: trl.batch_loss(spec, logp, inputs, totals=totals),
        {
            "spec": pl.preset("ppo"),
            "logp": LOGP,
            "totals": "local",
            "old_per_token_logps": OLD,
            "advantages": PER_SEQUENCE,
            "completion_mask": MASK,
            "sampling_per_token_logps": OLD,
            "ref_per_token_logps": OLD,
        },
    ),
}

CASES: dict[str, Case] = {
    name: (function, {k: v for k, v in arguments.items() if v is not ...})
    for name, (function, arguments) in {**LIBRARY, **ADVANTAGES, **PARTS, **VERL, **OTHERS}.items()
}

# How an error names an argument that is a preset's name.
BY_MEANING = "unknown preset"
PLAIN: dict[str, Any] = {
    "None": None,
    "a string": "no such thing",
    "huge": 10**400,
    "more digits than print": 10**5000,
    "nan": float("nan"),
    "inf": float("inf"),
    "negative": -1,
    "zero": 0,
    "True": True,
    "a complex number": 1 + 2j,
    "an empty list": [],
    "a list": [1.0, 2.0],
    "a dict": {},
    "an object": object(),
    "a class": pl.Clip,
}
# What no argument that was a tensor may be.
NEVER_A_TENSOR = {
    "a string",
    "huge",
    "more digits than print",
    "nan",
    "a complex number",
    "a dict",
    "an object",
    "a class",
}
NEVER_RIGHT = {"complex", "on another device", "sparse"}
# What only disagrees with another argument: the error may name that one.
DISAGREES = {
    "no rows",
    "a row less",
    "another dimension",
    "a dimension less",
    "one number",
    "on another device",
}


def spoiled(x: Tensor) -> dict[str, Tensor]:
    """Tensors in the place of `x`."""
    return {
        "complex": x.to(torch.complex64),
        "flags": x.bool(),
        "integers": x.to(torch.int64),
        "float64": x.to(torch.float64),
        "on another device": x.to("meta"),
        "sparse": x.to_sparse(),
        "no rows": x[:0] if x.dim() else x[None][:0],
        "a row less": x[:-1] if x.dim() else x[None],
        "another dimension": x[None, None],
        "a dimension less": x.sum(0) if x.dim() else x.expand(2),
        "one number": x.sum(),
        "all nan": torch.full(x.shape, float("nan")),
        "all huge": torch.full(x.shape, 3e38),
        "negative": -x.to(torch.float32),
        "minus 100": torch.full(x.shape, -100),
    }


def outcome(function: Any, arguments: dict[str, Any], names: Iterable[str] = ()) -> str:
    """The result of a call: "result", an error of ours that names one of `names` or does not,
    or another error.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**arguments)
    except pl.PolicyLossError as error:
        return "named" if any(name in str(error) for name in names) else f"unnamed: {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}".splitlines()[0]
    return "result"


def problems_of(function: Callable[..., Any], arguments: dict[str, Any]) -> list[str]:
    """Every argument spoiled in every way that gives neither a result nor an error of ours that
    names the argument.
    """
    assert outcome(function, arguments) == "result", "the call itself must be right"
    wrong = []
    alone = sum(isinstance(x, torch.Tensor) for x in arguments.values()) == 1
    for spoilt, right in arguments.items():
        is_tensor = isinstance(right, torch.Tensor)
        for what, value in {**PLAIN, **(spoiled(right) if is_tensor else {})}.items():
            seen = outcome(
                function,
                {**arguments, spoilt: value},
                [BY_MEANING, *(arguments if what in DISAGREES else [spoilt])],
            )
            never = (
                is_tensor
                and what in NEVER_A_TENSOR | NEVER_RIGHT
                and not (alone and what == "on another device")
            )
            if not (seen == "named" or (seen == "result" and not never)):
                wrong.append(f"{spoilt} = {what}: {seen}")
    return wrong
