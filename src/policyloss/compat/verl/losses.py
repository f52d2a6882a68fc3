"""verl's policy losses (verl/trainer/ppo/core_algos.py) under verl's names. Each is a spec of this
library with verl's counts, and reports verl's metrics.

All take `(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights)`, the fields of `LossCall`, with `[B, T]` tensors and verl's `ActorConfig` (or
any object with its attributes), and return `(loss, metrics)`. `release` selects the numbers of an
older release where verl changed them (None: the current release).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.arguments import drop_in, drop_in_of
from policyloss.compat.parts import as_share, guard, union_share
from policyloss.compat.verl.aggregation import aggregation, mean
from policyloss.compat.verl.parts import (
    GeometricMeanWeight,
    LocalCovClip,
    LocalCovKL,
    MeanAdvantageGeometricClip,
    masked_mean,
    outside_by_sign,
)
from policyloss.compat.verl.rollout_correction import (
    compute_rollout_correction_and_rejection_mask,
    correction_options,
)
from policyloss.compat.verl.settings import (
    OLDEST,
    SPECS,
    UNCLAMPED,
    check_dual,
    clip_range,
    either,
    policy_options,
    read_field,
    since,
)
from policyloss.errors import InputError, SpecError
from policyloss.functional import bound, compute_dtype, difference, estimate
from policyloss.loss import LossOutput, policy_loss
from policyloss.parts import trust
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.correction import GivenWeight
from policyloss.parts.ratio import TokenRatio
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask
from policyloss.totals import Totals

__all__ = [
    "POLICY_LOSSES",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
]


LossResult = tuple[Tensor, dict[str, Any]]
CLIPPED = ("upper", "lower")  # the limits of PPO's clip, without the dual clip


@dataclass(frozen=True)
class LossCall:
    """The arguments of a policy loss, in verl's order, and the steps that all losses share."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str = "token-mean"
    config: Any = None
    rollout_is_weights: Tensor | None = None
    release: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        since(self.release, OLDEST)

    def loss(self, spec: LossSpec) -> LossOutput:
        """The result of `spec` with verl's aggregation and counts and the weights of this call."""
        info = either(read_field(self.config, "global_batch_info"), {})
        part, totals = aggregation(self.loss_agg_mode, self.response_mask, **info)
        spec = spec.replace(aggregate=part)
        if self.rollout_is_weights is not None:
            spec = spec.replace(correction=GivenWeight(self.rollout_is_weights))
        return self.loss_of(spec, totals)

    def loss_of(self, spec: LossSpec, totals: Totals) -> LossOutput:
        """The result of `spec`, which has an aggregation and a correction, on these tensors."""
        tensors = (self.log_prob, self.old_log_prob, self.advantages, self.response_mask)
        return policy_loss(spec, *tensors, totals=totals)

    def result(
        self,
        spec: LossSpec,
        clipped: Sequence[str] | None = None,
        lower: Sequence[str] | None = None,
        drift: str = "k1",
    ) -> LossResult:
        """The loss of `spec` and verl's metrics.

        clipped, lower: the limits whose shares add up to `pg_clipfrac` and to `pg_clipfrac_lower`
        (see `share`); None if this loss does not report the metric. drift: the estimator of
        `ppo_kl`, with the log-ratios clamped as in `spec`.
        """
        out = self.loss(spec)
        log_clamp = spec.ratio.log_clamp if isinstance(spec.ratio, TokenRatio) else None
        shares = [x if x is None else self.share(out, x) for x in (clipped, lower)]
        return out.loss, self.report(shares[0], shares[1], self.drift(log_clamp, drift))

    def share(self, out: LossOutput, limits: Sequence[str]) -> Tensor:
        """The share of tokens at these limits of the trust region, 0-dim; 0 for no limit.

        limits: names of limits, such as "upper" and "dual".
        """
        records = [out.metrics[f"clip_fraction_{limit}"] for limit in limits]
        if not records:
            return self.log_prob.new_zeros(())
        return mean(union_share(*records), self.response_mask)

    @property
    def log_ratio(self) -> Tensor:
        """`log_prob - old_log_prob`, 0 at masked positions, without gradient."""
        new, old = self.log_prob.detach(), self.old_log_prob.detach()
        return difference(new, old, as_mask(self.response_mask, new), compute_dtype(new, old))

    def drift(self, log_clamp: Any = None, estimator: str = "k1") -> Tensor:
        """verl's `ppo_kl`, 0-dim: the mean over valid tokens of an estimate from the log-ratio.

        log_clamp: the clamp of the log-ratio, as in `TokenRatio`.
        """
        valid = as_mask(self.response_mask, self.log_prob)
        estimates = estimate(bound(self.log_ratio, log_clamp), estimator)
        return masked_mean(estimates, valid, guard(self.response_mask))

    def report(self, clipped: Tensor | None, lower: Tensor | None, kl: Tensor) -> dict[str, Any]:
        """verl's metrics under its names, as Python floats; those with value None are left out."""
        metrics = {
            "actor/pg_clipfrac": clipped,
            "actor/ppo_kl": kl,
            "actor/pg_clipfrac_lower": lower,
        }
        return {name: float(value) for name, value in metrics.items() if value is not None}


@drop_in
def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    *,
    log_clamp: float | None = 20.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """PPO with dual clip: `(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)`, all 0-dim.

    log_clamp: the largest absolute log-ratio (verl: 20, some published copies: 10, None: no limit).
    """
    low, high = either(cliprange_low, cliprange), either(cliprange_high, cliprange)
    if low is None or high is None:
        raise InputError(
            "cliprange was not given; pass cliprange=, or both cliprange_low= and cliprange_high=."
        )
    call = LossCall(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, {})
    clip = trust.Clip(float(low), float(high), check_dual(clip_ratio_c))
    out = call.loss(LossSpec(TokenRatio(log_clamp=log_clamp), clip))
    clipped, lower = call.share(out, CLIPPED), call.share(out, ("dual",))
    return out.loss, clipped, call.drift(log_clamp), lower


@dataclass(frozen=True)
class SequenceMeanCall(LossCall):
    """The arguments of a loss with the mean over sequences as its default."""

    loss_agg_mode: str = "seq-mean-token-mean"


def _ppo(call: LossCall) -> LossResult:
    return call.result(SPECS["vanilla"](call.config), CLIPPED, ("dual",))


@drop_in_of(LossCall)
def compute_policy_loss_vanilla(call: LossCall) -> LossResult:
    """PPO: `Clip(clip_ratio_low, clip_ratio_high, dual=clip_ratio_c)`."""
    return _ppo(call)


@drop_in_of(LossCall)
def compute_policy_loss_dppo_tv(call: LossCall) -> LossResult:
    """DPPO, total variation: `ProbabilityBand("tv", clip_ratio_low, …, cap=clip_ratio_c)`."""
    return call.result(SPECS["dppo_tv"](call.config), CLIPPED, ("dual",))


@drop_in_of(LossCall)
def compute_policy_loss_dppo_kl(call: LossCall) -> LossResult:
    """DPPO, binary KL: `ProbabilityBand("kl", clip_ratio_low, …, cap=clip_ratio_c)`."""
    return call.result(SPECS["dppo_kl"](call.config), CLIPPED, ("dual",))


@drop_in_of(SequenceMeanCall)
def compute_policy_loss_gspo(call: LossCall) -> LossResult:
    """GSPO with a gradient per token: `SequenceRatio(grad="token")`, clipped. Up to 0.9.0 the
    average is always "seq-mean-token-mean".
    """
    if not since(call.release, "0.9.1"):
        call = replace(call, loss_agg_mode="seq-mean-token-mean")
    return call.result(SPECS["gspo"](call.config), CLIPPED, ())


@drop_in_of(SequenceMeanCall)
def compute_policy_loss_sapo(call: LossCall) -> LossResult:
    """SAPO: `SoftGate(tau_pos, tau_neg)`. As in verl, `loss_agg_mode` has no effect: the average is
    "seq-mean-token-mean".
    """
    call = replace(call, loss_agg_mode="seq-mean-token-mean")
    spec = SPECS["sapo"](call.config)
    taus = (spec.trust.tau_positive, spec.trust.tau_negative)
    # verl rounds them to the dtype of the advantages.
    rounded = (float(torch.as_tensor(tau, dtype=call.advantages.dtype)) for tau in taus)
    return call.result(spec.replace(trust=trust.SoftGate(*rounded)), (), ())


@drop_in_of(LossCall)
def compute_policy_loss_gpg(call: LossCall) -> LossResult:
    """GPG: `-A·logp`, without a ratio. verl reports no metrics."""
    return call.loss(SPECS["gpg"](call.config)).loss, {}


@drop_in_of(LossCall)
def compute_policy_loss_clip_cov(call: LossCall) -> LossResult:
    """Clip-Cov over this micro-batch (`LocalCovClip`); torch's generator draws the dropped tokens.
    `pg_clipfrac` is their share.
    """
    spec = SPECS["clip_cov"](call.config)
    local = LocalCovClip(spec.trust, guard(call.response_mask))
    return call.result(spec.replace(trust=local), ("dropped",))


@drop_in_of(LossCall)
def compute_policy_loss_kl_cov(call: LossCall) -> LossResult:
    """KL-Cov over this micro-batch (`LocalCovKL`). `ppo_kl` is the mean of |log-ratio|."""
    spec = SPECS["kl_cov"](call.config)
    return call.result(spec.replace(trust=LocalCovKL(spec.trust)), drift="abs")


@drop_in_of(LossCall)
def compute_policy_loss_geo_mean(call: LossCall) -> LossResult:
    """GMPO: `GeometricClip`, averaged over all rows of this call, empty ones included, whatever
    `loss_agg_mode` and the global counts are.

    `pg_clipfrac` and `pg_clipfrac_lower` are the shares outside the band with A > 0 and with A < 0.
    """
    band, epsilon = clip_range(call.config), guard(call.response_mask)
    spec = SPECS["geo_mean"](call.config).replace(aggregate=SeqMeanTokenMean())
    spec = spec.replace(trust=MeanAdvantageGeometricClip(spec.trust, epsilon))
    if call.rollout_is_weights is not None:
        weight = GeometricMeanWeight(call.rollout_is_weights, floor=1e-10, epsilon=epsilon)
        spec = spec.replace(correction=weight)
    out = call.loss_of(spec, Totals(0, call.response_mask.shape[0]))
    mask = as_mask(call.response_mask, call.log_prob)
    outside = outside_by_sign(call.log_ratio, *band, call.advantages.detach(), mask, epsilon)
    positive, negative = (as_share(x, call.response_mask) for x in outside)
    return out.loss, call.report(positive, negative, call.drift())


@drop_in_of(LossCall)
def compute_policy_loss_dro(call: LossCall) -> LossResult:
    """verl's DRO (direct reward optimisation): `Quadratic(dro_beta)`, with `dro_beta` from
    `config.policy_loss`.
    """
    return call.result(SPECS["dro"](call.config))


@drop_in_of(LossCall)
def compute_policy_loss_cispo(call: LossCall) -> LossResult:
    """CISPO: `DetachedClip` around one. `pg_clipfrac` is the share outside the band, for advantages
    of either sign.
    """
    return call.result(SPECS["cispo"](call.config), CLIPPED, ())


@drop_in
def compute_policy_loss_reinforce(
    rollout_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
    *,
    release: str | None = None,
) -> LossResult:
    """REINFORCE: `-w·A·logp` with weights w. `ppo_kl` is the drift from the rollout policy."""
    options = {"config": config, "rollout_is_weights": rollout_is_weights, "release": release}
    tensors = (rollout_log_prob, log_prob, advantages, response_mask)
    return _reinforce(LossCall(*tensors, loss_agg_mode, **options))


def _reinforce(call: LossCall) -> LossResult:
    return call.result(LossSpec(UNCLAMPED, trust.Unbounded("logp")))


@drop_in_of(LossCall)
def compute_policy_loss_bypass_mode(call: LossCall) -> LossResult:
    """A loss with the rollout policy as the old policy; `policy_loss.rollout_correction` sets the
    weights, the rejection and the loss. Its `loss_type` "ppo_clip" is the vanilla loss without
    weights on the tokens that are not rejected; "reinforce" is the REINFORCE loss with weights.
    """
    options = read_field(policy_options(call.config), "rollout_correction")
    if options is None:
        raise SpecError(
            'policy_loss.rollout_correction is missing; loss_mode "bypass_mode" reads its settings '
            "from there."
        )
    loss_type = read_field(options, "loss_type", "ppo_clip")
    losses = {"ppo_clip": _ppo, "reinforce": _reinforce}
    check_choice("rollout_correction.loss_type", loss_type, losses, SpecError)
    tensors = (call.log_prob.detach(), call.old_log_prob, call.response_mask)
    proto, mask, metrics = compute_rollout_correction_and_rejection_mask(
        *tensors, **correction_options(options, call.release)
    )
    weighted = proto is not None and loss_type == "reinforce"
    weights = proto.batch["rollout_is_weights"] if weighted else None
    loss, reported = losses[loss_type](
        replace(call, response_mask=mask, rollout_is_weights=weights)
    )
    return loss, {**reported, **metrics}


POLICY_LOSSES: dict[str, Callable[..., LossResult]] = {
    "vanilla": compute_policy_loss_vanilla,
    "dppo_tv": compute_policy_loss_dppo_tv,
    "dppo_kl": compute_policy_loss_dppo_kl,
    "gspo": compute_policy_loss_gspo,
    "sapo": compute_policy_loss_sapo,
    "gpg": compute_policy_loss_gpg,
    "clip_cov": compute_policy_loss_clip_cov,
    "kl_cov": compute_policy_loss_kl_cov,
    "geo_mean": compute_policy_loss_geo_mean,
    "dro": compute_policy_loss_dro,
    "cispo": compute_policy_loss_cispo,
    "bypass_mode": compute_policy_loss_bypass_mode,
}
