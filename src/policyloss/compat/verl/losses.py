"""verl's policy losses under verl's names: each is a spec, verl's counts, and the numbers that verl
reports.

All take `(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config,
rollout_is_weights)` with `[B, T]` tensors and verl's `ActorConfig` (or anything with its
attributes), and return `(loss, metrics)`. `release` says which release's meaning to keep where verl
changed one (None: the current release). The signature is that of `Call`, of which a loss is a
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.arguments import at_least, drop_in, drop_in_of
from policyloss.compat.parts import guard, share, union_share
from policyloss.compat.verl import parts
from policyloss.compat.verl.aggregation import aggregation, mean
from policyloss.compat.verl.parts import masked_mean, outside_by_sign
from policyloss.compat.verl.rollout_correction import (
    compute_rollout_correction_and_rejection_mask,
    correction_options,
)
from policyloss.compat.verl.settings import (
    check_dual,
    clip_range,
    either,
    number_of,
    policy_options,
    read,
)
from policyloss.errors import InputError, SpecError
from policyloss.functional import bound, compute_dtype, difference, estimate
from policyloss.loss import LossOutput, policy_loss
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.precomputed import GivenWeight
from policyloss.parts.ratio import SequenceRatio, TokenRatio
from policyloss.parts.trust import (
    Clip,
    CovClip,
    CovKL,
    DetachedClip,
    GeometricClip,
    ProbabilityBand,
    Quadratic,
    SoftGate,
    Unbounded,
)
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
class Call:
    """The arguments of one call, in verl's order, and what is done with them."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str = "token-mean"
    config: Any = None
    rollout_is_weights: Tensor | None = None
    release: str | None = field(default=None, kw_only=True)

    def loss(self, spec: LossSpec) -> LossOutput:
        """The result of `spec` with verl's aggregation, its global batch info, and the weights of
        this call.
        """
        info = either(read(self.config, "global_batch_info"), {})
        part, totals = aggregation(
            self.loss_agg_mode, self.response_mask, **info, release=self.release
        )
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
        """The loss of `spec`, and verl's metrics of it.

        clipped, lower: the limits whose shares add up to `pg_clipfrac` and to `pg_clipfrac_lower`
        (see `share`); None means that this loss does not report the metric. drift: the estimator
        of `ppo_kl`, whose log-ratios are clamped as those of `spec`.
        """
        out = self.loss(spec)
        log_clamp = spec.ratio.log_clamp if isinstance(spec.ratio, TokenRatio) else None
        shares = [x if x is None else self.share(out, x) for x in (clipped, lower)]
        return out.loss, self.report(shares[0], shares[1], self.drift(log_clamp, drift))

    def share(self, out: LossOutput, limits: Sequence[str]) -> Tensor:
        """The share of tokens that these limits of the trust region ("upper", "dual") bind; of no
        limit, 0. 0-dim.
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
        """verl's `ppo_kl`: the mean over valid tokens of an estimate from the (clamped) log-ratio,
        0-dim.
        """
        valid = as_mask(self.response_mask, self.log_prob)
        estimates = estimate(bound(self.log_ratio, log_clamp), estimator)
        return masked_mean(estimates, valid, guard(self.response_mask))

    def report(self, clipped: Tensor | None, lower: Tensor | None, kl: Tensor) -> dict[str, Any]:
        """verl's metrics under its names, as Python floats; those that are None are left out."""
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
    release: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """verl's `compute_policy_loss`: PPO with dual clip,
    `(pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)`, all 0-dim tensors.

    log_clamp: the bound of the log-ratio's size (verl: 20; 10 in some published copies; None for no
    bound).
    """
    low, high = either(cliprange_low, cliprange), either(cliprange_high, cliprange)
    if low is None or high is None:
        raise InputError(
            "cliprange was not given; pass cliprange=, or both cliprange_low= and cliprange_high=."
        )
    call = Call(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, {}, release=release
    )
    trust = Clip(float(low), float(high), check_dual(clip_ratio_c))
    out = call.loss(LossSpec(ratio=TokenRatio(log_clamp=log_clamp), trust=trust))
    clipped, lower = call.share(out, CLIPPED), call.share(out, ("dual",))
    return out.loss, clipped, call.drift(log_clamp), lower


@dataclass(frozen=True)
class SequenceMeanCall(Call):
    """A call whose default is the mean over sequences."""

    loss_agg_mode: str = "seq-mean-token-mean"


def _ppo(call: Call) -> LossResult:
    dual = check_dual(read(call.config, "clip_ratio_c", 3.0))
    return call.result(LossSpec(trust=Clip(*clip_range(call.config), dual)), CLIPPED, ("dual",))


@drop_in_of(Call)
def compute_policy_loss_vanilla(call: Call) -> LossResult:
    """PPO: `Clip(clip_ratio_low, clip_ratio_high, dual=clip_ratio_c)`."""
    return _ppo(call)


def _probability_band(call: Call, divergence: Literal["tv", "kl"]) -> LossResult:
    cap = read(call.config, "clip_ratio_c", 20.0)
    band = ProbabilityBand(divergence, *clip_range(call.config), cap=cap)
    return call.result(LossSpec(trust=band), CLIPPED, ("dual",))


@drop_in_of(Call)
def compute_policy_loss_dppo_tv(call: Call) -> LossResult:
    """DPPO, total variation: `ProbabilityBand("tv", clip_ratio_low, …, cap=clip_ratio_c)`."""
    return _probability_band(call, "tv")


@drop_in_of(Call)
def compute_policy_loss_dppo_kl(call: Call) -> LossResult:
    """DPPO, binary KL: `ProbabilityBand("kl", clip_ratio_low, …, cap=clip_ratio_c)`."""
    return _probability_band(call, "kl")


@drop_in_of(SequenceMeanCall)
def compute_policy_loss_gspo(call: Call) -> LossResult:
    """GSPO with a gradient per token: `SequenceRatio(grad="token")`, clipped. Up to 0.9.0 always
    "seq-mean-token-mean".
    """
    if not at_least(call.release, "0.9.1"):
        call = replace(call, loss_agg_mode="seq-mean-token-mean")
    ratio = SequenceRatio(grad="token", log_clamp=(None, 10.0))
    return call.result(LossSpec(ratio, Clip(*clip_range(call.config))), CLIPPED, ())


@drop_in_of(SequenceMeanCall)
def compute_policy_loss_sapo(call: Call) -> LossResult:
    """SAPO: `SoftGate(tau_pos, tau_neg)`. verl averages it by "seq-mean-token-mean" whatever
    `loss_agg_mode` says.
    """
    call = replace(call, loss_agg_mode="seq-mean-token-mean")
    # verl holds them in the dtype of the advantages.
    taus = (
        float(torch.as_tensor(number_of(call.config, name), dtype=call.advantages.dtype))
        for name in ("tau_pos", "tau_neg")
    )
    return call.result(LossSpec(trust=SoftGate(*taus)), (), ())


@drop_in_of(Call)
def compute_policy_loss_gpg(call: Call) -> LossResult:
    """GPG: `-A·logp`, no ratio. verl reports nothing."""
    return call.loss(LossSpec(trust=Unbounded("logp"))).loss, {}


@drop_in_of(Call)
def compute_policy_loss_clip_cov(call: Call) -> LossResult:
    """Clip-Cov over this micro-batch, drawn with torch's generator: `LocalCovClip`. `pg_clipfrac`
    is the share dropped.
    """
    defaults = {"clip_cov_ratio": 0.0002, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    part = CovClip(*clip_range(call.config), *_options(call, defaults))
    trust = parts.LocalCovClip(part, guard(call.response_mask))
    return call.result(LossSpec(TokenRatio(log_clamp=None), trust), ("dropped",))


@drop_in_of(Call)
def compute_policy_loss_kl_cov(call: Call) -> LossResult:
    """KL-Cov over this micro-batch: `LocalCovKL`. `ppo_kl` is the mean of |log-ratio| here."""
    part = CovKL(*_options(call, {"kl_cov_ratio": 0.0002, "ppo_kl_coef": 1.0}))
    return call.result(LossSpec(TokenRatio(log_clamp=None), parts.LocalCovKL(part)), drift="abs")


def _options(call: Call, defaults: dict[str, float]) -> list[Any]:
    """The options that only one loss reads, in this order."""
    options = policy_options(call.config)
    return [either(read(options, name), default) for name, default in defaults.items()]


@drop_in_of(Call)
def compute_policy_loss_geo_mean(call: Call) -> LossResult:
    """GMPO: `GeometricClip`, the mean over all rows of this call, with or without valid tokens; no
    other mode, no global counts.

    `pg_clipfrac` and `pg_clipfrac_lower` are the shares outside the band with A > 0 and with A < 0.
    """
    band, epsilon = clip_range(call.config), guard(call.response_mask)
    trust = parts.MeanAdvantageGeometricClip(GeometricClip(*band), epsilon)
    spec = LossSpec(TokenRatio(log_clamp=None), trust, aggregate=SeqMeanTokenMean())
    if call.rollout_is_weights is not None:
        weight = parts.GeometricMeanWeight(call.rollout_is_weights, floor=1e-10, epsilon=epsilon)
        spec = spec.replace(correction=weight)
    out = call.loss_of(spec, Totals(0, call.response_mask.shape[0]))
    mask = as_mask(call.response_mask, call.log_prob)
    outside = outside_by_sign(call.log_ratio, *band, call.advantages.detach(), mask, epsilon)
    positive, negative = (share(x, call.response_mask) for x in outside)
    return out.loss, call.report(positive, negative, call.drift())


@drop_in_of(Call)
def compute_policy_loss_dro(call: Call) -> LossResult:
    """DRO: `Quadratic(dro_beta)`."""
    beta = read(policy_options(call.config), "dro_beta")
    if beta is None or beta <= 0:
        raise SpecError(f"policy_loss.dro_beta must be a positive number for DRO, got {beta!r}.")
    return call.result(LossSpec(TokenRatio(log_clamp=None), Quadratic(beta)))


@drop_in_of(Call)
def compute_policy_loss_cispo(call: Call) -> LossResult:
    """CISPO: `DetachedClip` around one. `pg_clipfrac` is the share outside the band, whatever the
    sign of the advantage.
    """
    band = DetachedClip.around_one(*clip_range(call.config))
    return call.result(LossSpec(trust=band), CLIPPED, ())


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
    return _reinforce(Call(*tensors, loss_agg_mode, **options))


def _reinforce(call: Call) -> LossResult:
    return call.result(LossSpec(TokenRatio(log_clamp=None), Unbounded("logp")))


@drop_in_of(Call)
def compute_policy_loss_bypass_mode(call: Call) -> LossResult:
    """The old policy is the rollout policy; `policy_loss.rollout_correction` sets the weights, the
    rejection and the loss. `loss_type` "ppo_clip" is the vanilla loss on the surviving tokens,
    without weights; "reinforce" is the REINFORCE loss with weights.
    """
    options = read(policy_options(call.config), "rollout_correction")
    if options is None:
        raise SpecError(
            'policy_loss.rollout_correction is missing; loss_mode "bypass_mode" reads its settings '
            "from there."
        )
    loss_type = read(options, "loss_type", "ppo_clip")
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
