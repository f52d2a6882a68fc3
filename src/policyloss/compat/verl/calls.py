"""One call of a verl policy loss: its arguments, the spec it runs, and the numbers that verl
reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from policyloss.arguments import check_number, check_scalar
from policyloss.compat.parts import guard, union_share
from policyloss.compat.verl.aggregation import aggregation, mean
from policyloss.compat.verl.counts import masked_mean
from policyloss.errors import InputError, SpecError
from policyloss.functional import bound, compute_dtype, difference, estimate
from policyloss.loss import LossOutput, policy_loss
from policyloss.parts.precomputed import GivenWeight
from policyloss.parts.ratio import TokenRatio
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask
from policyloss.totals import Totals

LossResult = tuple[Tensor, dict[str, Any]]
CLIPPED = ("upper", "lower")  # the limits of PPO's clip, without the dual clip
_MISSING = object()


def read(config: Any, name: str, default: Any = None) -> Any:
    """A field of a verl config, which is a dataclass, an OmegaConf node or a mapping; `default` if
    it is missing.
    """
    if config is None:
        raise InputError(
            "config was not given; pass verl's ActorConfig (for advantages, its AlgoConfig), or an "
            "object with its attributes."
        )
    value = getattr(config, name, _MISSING)
    if value is _MISSING and hasattr(config, "get"):
        value = config.get(name, _MISSING)
    return default if value is _MISSING else value


def number_of(config: Any, name: str, called: str = "config", default: Any = None) -> float:
    """A field of a verl config that must be a number. called: what the config is called."""
    value = read(config, name, default)
    if value is None:
        raise InputError(f"{called}.{name} is missing; it must be a number.")
    check_scalar(f"{called}.{name}", value)
    return float(value)


def either(value: Any, default: Any) -> Any:
    """`value`, or `default` where it is None."""
    return default if value is None else value


def policy_options(config: Any) -> Any:
    """`config.policy_loss`, which holds the options that only one loss reads."""
    options = read(config, "policy_loss")
    if options is None:
        raise InputError("config.policy_loss is missing; this loss reads its settings from there.")
    return options


def clip_range(config: Any) -> tuple[float, float]:
    """`clip_ratio_low` and `clip_ratio_high`, each falling back to `clip_ratio`."""
    both = read(config, "clip_ratio")
    low = either(read(config, "clip_ratio_low"), both)
    high = either(read(config, "clip_ratio_high"), both)
    if low is None or high is None:
        raise InputError(
            "config.clip_ratio is missing; give it, or both clip_ratio_low and clip_ratio_high."
        )
    check_scalar("config.clip_ratio_low", low)
    check_scalar("config.clip_ratio_high", high)
    return float(low), float(high)


def check_dual(clip_ratio_c: float) -> float:
    """verl's dual clip is always on, and must lie above 1."""
    check_scalar("clip_ratio_c", clip_ratio_c)
    hint = "It is the largest ratio where A < 0."
    return check_number("clip_ratio_c", float(clip_ratio_c), above=1, error=SpecError, hint=hint)


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
