"""One call of a verl policy loss: its arguments, the spec it runs, and the numbers that verl
reports.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, TypeVar

import torch
from torch import Tensor

from policyloss.arguments import check_scalar
from policyloss.compat.counts import guard, together
from policyloss.compat.verl.aggregation import aggregation, mean
from policyloss.compat.verl.counts import masked_mean
from policyloss.errors import InputError, SpecError
from policyloss.functional import bound, compute_dtype, difference, estimate
from policyloss.loss import LossOutput, policy_loss
from policyloss.parts.precomputed import GivenWeight
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask

_MISSING = object()


def read(config: Any, name: str, default: Any = None) -> Any:
    """A field of a verl config, which is a dataclass, an OmegaConf node or a mapping; `default` if
    it is missing.
    """
    if config is None:
        raise InputError(
            "config was not given; pass verl's ActorConfig, or an object with its attributes."
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
    dual = float(clip_ratio_c)
    if not dual > 1:
        raise SpecError(
            "clip_ratio_c must be greater than 1 (the largest ratio where A < 0), got "
            f"{clip_ratio_c!r}."
        )
    return dual


def drift(
    old: Tensor, new: Tensor, mask: Tensor, log_clamp: float | None, estimator: str = "k1"
) -> Tensor:
    """verl's `ppo_kl`: the mean over valid tokens of an estimate from the (clamped) log-ratio,
    0-dim.
    """
    with torch.no_grad():
        valid = as_mask(mask, new)
        log_ratio = bound(difference(new, old, valid, compute_dtype(old, new)), log_clamp)
        return masked_mean(estimate(log_ratio, estimator), valid, guard(mask))


def clipped(out: LossOutput, mask: Tensor) -> Tensor:
    """verl's `pg_clipfrac`: the share of tokens that the clip limits, without the dual clip."""
    return mean(
        together(out.metrics["clip_fraction_upper"], out.metrics["clip_fraction_lower"]), mask
    )


@dataclass(frozen=True)
class Call:
    """The arguments of one call, and what is done with them."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: Any
    rollout_is_weights: Tensor | None
    release: str | None

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
        return policy_loss(
            spec,
            self.log_prob,
            self.old_log_prob,
            self.advantages,
            self.response_mask,
            totals=totals,
        )

    @property
    def valid(self) -> Tensor:
        """The mask as bool."""
        return as_mask(self.response_mask, self.log_prob)

    @property
    def log_ratio(self) -> Tensor:
        """`log_prob - old_log_prob`, 0 at masked positions, without gradient."""
        new, old = self.log_prob.detach(), self.old_log_prob.detach()
        return difference(new, old, self.valid, compute_dtype(new, old))

    def drift(self, log_clamp: float | None, estimator: str = "k1") -> Tensor:
        """`ppo_kl` of this call (see `drift`)."""
        return drift(self.old_log_prob, self.log_prob, self.response_mask, log_clamp, estimator)

    def report(
        self, clip_fraction: Tensor | float | None, kl: Tensor, lower: Tensor | float | None = None
    ) -> dict[str, float]:
        """verl's metrics under its names, as Python floats; None means that this loss does not
        report the metric.
        """
        metrics = {
            "actor/pg_clipfrac": clip_fraction,
            "actor/ppo_kl": kl,
            "actor/pg_clipfrac_lower": lower,
        }
        return {name: float(value) for name, value in metrics.items() if value is not None}


DropIn = TypeVar("DropIn", bound=Callable[..., Any])


def named_like(body: Callable[..., Any], drop_in: DropIn) -> DropIn:
    """`drop_in` under the name and docstring of `body`, which it calls; `inspect` shows the
    signature of `drop_in`, which is verl's.
    """
    signature = inspect.signature(drop_in)
    update_wrapper(drop_in, body, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    # Without it, inspect would follow __wrapped__ to the signature of `body`.
    drop_in.__signature__ = signature  # type: ignore[attr-defined]
    return drop_in
