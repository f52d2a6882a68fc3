"""verl's options as a loss: the ratio and the trust region of each `loss_mode`, and the `LossSpec`
of a complete configuration (`spec_from_config`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policyloss.arguments import check_choice
from policyloss.catalogue import find_preset
from policyloss.compat.verl.aggregation import AGG_MODES, kl_part
from policyloss.compat.verl.rollout_thresholds import rejection_rules, weight_bounds
from policyloss.compat.verl.settings import (
    MODES,
    PREFIX,
    check_dual,
    clip_range,
    either,
    policy_options,
    read_field,
    read_number,
    with_horizon_of,
)
from policyloss.errors import SpecError
from policyloss.parts import trust
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.correction import Band, Reject, SelfNormalise, Truncate
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.spec import LossSpec

UNCLAMPED = TokenRatio(log_clamp=None)


def _ppo(actor: Any) -> LossSpec:
    dual = check_dual(read_field(actor, "clip_ratio_c", 3.0))
    return LossSpec(trust=trust.Clip(*clip_range(actor), dual))


def _probability_band(divergence: Any) -> Callable[[Any], LossSpec]:
    def spec(actor: Any) -> LossSpec:
        cap = read_field(actor, "clip_ratio_c", 20.0)
        return LossSpec(trust=trust.ProbabilityBand(divergence, *clip_range(actor), cap=cap))

    return spec


def _gspo(actor: Any) -> LossSpec:
    ratio = SequenceRatio(grad="token", log_clamp=(None, 10.0))
    return LossSpec(ratio, trust.Clip(*clip_range(actor)))


def _sapo(actor: Any) -> LossSpec:
    return LossSpec(trust=trust.SoftGate(*(read_number(actor, n) for n in ("tau_pos", "tau_neg"))))


def _clip_cov(actor: Any) -> LossSpec:
    defaults = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    return LossSpec(UNCLAMPED, trust.CovClip(*clip_range(actor), *_numbers(actor, defaults)))


def _kl_cov(actor: Any) -> LossSpec:
    return LossSpec(
        UNCLAMPED, trust.CovKL(*_numbers(actor, {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0}))
    )


def _numbers(actor: Any, defaults: dict[str, float]) -> list[Any]:
    """These options of `actor.policy_loss`, in this order."""
    options = policy_options(actor)
    return [either(read_field(options, name), default) for name, default in defaults.items()]


def _dro(actor: Any) -> LossSpec:
    beta = read_field(policy_options(actor), "dro_beta")
    if beta is None or beta <= 0:
        raise SpecError(f"policy_loss.dro_beta must be a positive number for DRO, got {beta!r}.")
    return LossSpec(UNCLAMPED, trust.Quadratic(beta))


# By loss_mode: the ratio and the trust region that the options of the actor choose.
SPECS: dict[str, Callable[[Any], LossSpec]] = {
    "vanilla": _ppo,
    "dppo_tv": _probability_band("tv"),
    "dppo_kl": _probability_band("kl"),
    "gspo": _gspo,
    "sapo": _sapo,
    "gpg": lambda actor: LossSpec(trust=trust.Unbounded("logp")),
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
    "geo_mean": lambda actor: LossSpec(UNCLAMPED, trust.GeometricClip(*clip_range(actor))),
    "dro": _dro,
    "cispo": lambda actor: LossSpec(trust=trust.DetachedClip.around_one(*clip_range(actor))),
}
# The losses that verl averages over sequences, whatever loss_agg_mode is.
SEQUENCE_MEANS = ("sapo", "geo_mean")


def spec_from_config(config: Any) -> LossSpec:
    """The loss of the complete configuration of a verl run, the argument of verl's main function:
    the policy term, verl's KL and entropy terms, and its rollout correction.

    The KL in the reward is not part of it. An error names a combination that a LossSpec cannot
    express.
    """
    actor = read_field(read_field(config, "actor_rollout_ref"), "actor")
    rollout = either(read_field(read_field(config, "algorithm"), "rollout_correction"), {})
    mode = str(read_field(policy_options(actor), "loss_mode", "vanilla"))
    if mode.startswith(PREFIX):
        name = mode.removeprefix(PREFIX)
        return with_horizon_of(actor, name, find_preset(name).spec)
    check_choice("policy_loss.loss_mode", mode, SPECS, SpecError)
    if read_field(rollout, "bypass_mode", False):
        raise SpecError(
            "algorithm.rollout_correction.bypass_mode=true weighs by the current policy; use a "
            "loss with TokenRatio(anchor='rollout') instead."
        )
    kl = None
    if read_field(actor, "use_kl_loss", False):
        part = kl_part(read_field(actor, "kl_loss_type", "low_var_kl"))
        kl = replace(part, coef=read_number(actor, "kl_loss_coef"))
    return SPECS[mode](actor).replace(
        kl=kl,
        entropy_coef=read_field(actor, "entropy_coeff", 0.0),
        aggregate=SeqMeanTokenMean() if mode in SEQUENCE_MEANS else _average(actor),
        **_correction(rollout),
    )


def _average(actor: Any) -> Any:
    agg_mode = read_field(actor, "loss_agg_mode", "token-mean")
    check_choice("actor.loss_agg_mode", agg_mode, AGG_MODES, SpecError)
    part: Any = next(part for part, name in MODES.items() if name == agg_mode)
    horizon = read_field(actor, "loss_scale_factor")
    return part(horizon) if agg_mode == "seq-mean-token-sum-norm" else part()


def _correction(rollout: Any) -> dict[str, Any]:
    """`algorithm.rollout_correction` as the slots `correction` and `rejected`."""
    parts: list[Any] = []
    level, rules = read_field(rollout, "rollout_is"), read_field(rollout, "rollout_rs")
    if level is not None:
        check_choice("rollout_is", level, ("token", "sequence"), SpecError)
        low, high = weight_bounds(read_field(rollout, "rollout_is_threshold", 2.0))
        of: Any = "token" if level == "token" else "product"
        parts.append(Truncate(high, level=of) if low is None else Band(low, high, level=of))
        if read_field(rollout, "rollout_is_batch_normalize", False):
            parts.append(SelfNormalise("tokens" if level == "token" else "sequences"))
    if rules is None:
        return {"correction": parts}
    if any(isinstance(part, Band) for part in parts):
        raise SpecError(
            "rollout_rs takes tokens out of the average, a rollout_is_threshold with two bounds "
            "leaves them in it, and a LossSpec has one rule for both; use one of them."
        )
    for rule in rejection_rules(rules, read_field(rollout, "rollout_rs_threshold")):
        make: Any = Reject
        parts.append(make(rule.estimator, rule.reduce, rule.low, rule.high))
    return {"correction": parts, "rejected": "renormalise"}
