"""The metrics of `policy_loss`: each is a record that adds up over micro-batches and ranks.

The weights of a call (`weights=`) enter the metric `loss` alone.

Legend: Σ over the valid tokens, n their number, lr = logp − old_logp (before any clamp), r = the
ratio slot's ratio before its clamp, w = the corrections' weight. `docs/metrics.md` has the formula
of each metric.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from policyloss.arguments import description
from policyloss.errors import InputError
from policyloss.functional.exact import arithmetic
from policyloss.functional.kl import k3
from policyloss.functional.masking import count, extremes, fill, nonfinite, outside_clamp
from policyloss.metrics import Metrics
from policyloss.parts.correction import Combined
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import VARIANTS, Surrogate
from policyloss.records import EffectiveSampleSize, Invalid, Max, Min, Record, Stat, Sum
from policyloss.spec import LossSpec
from policyloss.tokens import LOGP_ARGUMENTS, Tokens

# No log-probability lies above this. Half precision rounds those near 0 by less.
POSITIVE = 0.1

MetricsLevel = Literal["all", "basic", "none"]
LEVELS = get_args(MetricsLevel)
_LOGPROBS = ("logp", *LOGP_ARGUMENTS.values())
# The kind of each record and its parts: each a number, or a function that computes it from sums.
_Records = dict[str, tuple[Any, ...]]


def check_level(metrics: Any) -> None:
    """Raise unless `metrics` is the name of a level."""
    if not isinstance(metrics, str) or metrics not in LEVELS:
        raise InputError(f'metrics must be "all", "basic" or "none", got {description(metrics)}.')


class MeasuredCall(NamedTuple):
    """One call of a loss, as its metrics are computed from it.

    before: the tokens before rejection. t: the tokens after it; the same unless rejected tokens
    leave the mask. share: the part of the step's loss that this call adds.
    """

    before: Tokens
    t: Tokens
    corrected: Combined
    surrogate: Surrogate
    kl: Tensor | None
    token_loss: Tensor
    share: Tensor


def policy_metrics(spec: LossSpec, call: MeasuredCall, level: MetricsLevel = "all") -> Metrics:
    """Measure one call, under `torch.no_grad()`.

    level: as `metrics` of `policy_loss`. Certain mistakes (`Invalid`) are counted at every level.

    Sums over tokens are taken at once. Numbers derived from the sums are computed when a metric is
    read, or at once if the call is compiled or recorded.
    """
    t, total, everything = call.t, arithmetic().total, level == "all"
    # Whether the ratio slot's log-ratio is `logp − old_logp` of each token.
    drift = isinstance(spec.ratio, TokenRatio) and spec.ratio.anchor == "old"
    records: _Records = {}
    if level != "none":
        n = t.count
        records["loss"] = (Sum, call.share)
        records["tokens"] = (Sum, n)
        if everything:
            records["advantage_mean"] = (Stat, total(t.advantages), n)
            _logprobs(records, call, drift)
            records["beyond_totals"] = (Sum, _beyond_totals(spec, t))
    for name, number in t.invalid.items():
        records[name] = (Invalid, number)
    if level != "none":
        _clipping(records, spec, call, everything)
        _ratios(records, spec, t, drift, everything)
    if everything:
        if t.has("old_logp") and t.has("rollout_logp"):
            before = call.before
            d, valid = before.log_weight(), before.count
            mismatch = total(d)
            records["kl_rollout_k1"] = (Stat, lambda: -mismatch, valid)
            records["kl_rollout_k3"] = (Stat, total(k3(d)), valid)
            records["rollout_logp_difference_max"] = (Max, extremes(d.abs(), before.mask)[0])
        if t.has("ages"):
            ages, mask = call.before.ages, call.before.mask
            records["age_mean"] = (Stat, total(ages), call.before.count)
            records["age_max"] = (Max, extremes(ages, mask)[0])
        if spec.correction:
            _corrections(records, call)
        if call.kl is not None:
            records["kl_ref"] = (Stat, total(fill(call.kl, t.mask, zero=t.zero)), n)
        if t.has("entropy"):
            records["entropy"] = (Stat, total(t.entropy), n)
        if t.has("divergence"):
            records["divergence"] = (Stat, total(t.divergence), n)

    def all_records() -> dict[str, Record]:
        return {
            name: kind(*(part() if callable(part) else part for part in parts))
            for name, (kind, *parts) in records.items()
        }

    return Metrics.of_call(all_records, t.mask)


def _logprobs(records: _Records, call: MeasuredCall, drift: bool) -> None:
    """Count tokens with NaN, infinite or impossible inputs, even if a clamp hides them."""
    t = call.t
    logprobs = [x for name in _LOGPROBS if (x := t.raw.get(name)) is not None]
    # A sum is finite if and only if its terms are, for numbers of this size.
    finite, rest = call.token_loss, logprobs
    if t.raw_log_ratio is not None and drift and t.mask is call.before.mask:
        finite = finite + t.raw_log_ratio
        rest = logprobs[2:]  # it holds logp and old_logp
    if rest:
        finite = fill(reduce(torch.add, rest, finite), call.before.mask, zero=t.zero)
    records["nonfinite_tokens"] = (Sum, nonfinite(finite))
    # A NaN is not the larger of two numbers here.
    largest = fill(reduce(torch.fmax, logprobs), t.mask, zero=t.zero)
    records["positive_logp_tokens"] = (Sum, count(largest > POSITIVE))
    not_zero = count(largest)
    records["zero_logp_tokens"] = (Sum, lambda: t.count - not_zero)


def _beyond_totals(spec: LossSpec, t: Tokens) -> Callable[[], Tensor]:
    """A function that returns how many tokens or sequences this call has beyond the step's count.

    It returns 0 where the call is the whole step, or holds one rank's share of its sequences.
    """
    n, divisor = t.count, getattr(spec.aggregate, "divides_by", None)
    if t.step == "local" or divisor is None or t.sequences.cp_group is not None:
        return lambda: torch.zeros_like(n)
    here = n if divisor == "tokens" else count(t.lengths > 0)
    of_step = getattr(t.step, divisor)

    def excess() -> Tensor:
        most = of_step.to(here.device).reshape(()) if isinstance(of_step, Tensor) else of_step
        return (here - most).clamp(min=0)

    return excess


def _clipping(records: _Records, spec: LossSpec, call: MeasuredCall, everything: bool) -> None:
    n, (_, *flags) = call.t.count, call.surrogate
    # A part of the library flags a token at most once, and no masked one; a user's may do anything.
    ours = type(spec.trust) in VARIANTS
    taken, counts = [], []
    for name, flag in zip(Surrogate._fields[1:], flags, strict=True):
        if flag is None:
            continue
        taken.append(flag if ours else flag & call.t.mask)
        if everything or name == "dual":
            counts.append(count(taken[-1]))
            records[f"clip_fraction_{name}"] = (Stat, counts[-1], n)
    if taken and ours and everything:
        records["clip_fraction"] = (Stat, lambda: reduce(torch.add, counts), n)
    elif taken:
        records["clip_fraction"] = (Stat, count(reduce(torch.bitwise_or, taken)), n)


def _ratios(records: _Records, spec: LossSpec, t: Tokens, drift: bool, everything: bool) -> None:
    """The ratio before its clamp, and the drift from the old policy, often the same numbers."""
    total, n, raw, growth = arithmetic().total, t.count, t.raw_log_ratio, None
    if raw is not None and everything:
        # A token's is 0 where masked already.
        raw = raw if isinstance(spec.ratio, TokenRatio) else fill(raw, t.mask, zero=t.zero)
        growth = torch.expm1(raw)
        high, low = extremes(raw, t.mask)
        records["ratio_mean"] = (Stat, total(growth, n), n)
        records["ratio_max"] = (Max, lambda: torch.where(high == -torch.inf, high, high.exp()))
        records["ratio_min"] = (Min, lambda: torch.where(low == torch.inf, low, low.exp()))
        if t.log_clamp is not None:
            records["clamped_tokens"] = (Sum, count(outside_clamp(raw, t.log_clamp)))
    if t.has("old_logp"):
        if raw is None or not drift:
            raw, growth = t.log_ratio_to("old"), None
        log_ratios = total(raw)
        records["kl_old_k1"] = (Stat, lambda: -log_ratios, n)
        if everything:
            growth = torch.expm1(raw) if growth is None else growth
            records["kl_old_k3"] = (Stat, total(growth - raw), n)


def _corrections(records: _Records, call: MeasuredCall) -> None:
    before, corrected, total = call.before, call.corrected, arithmetic().total
    n = before.count
    kept = before.mask if corrected.keep is None else before.mask & corrected.keep
    if corrected.weight is not None:
        w = fill(corrected.weight, kept, zero=before.zero)
        weights = total(w)
        records["correction_weight_mean"] = (Stat, weights, n)
        records["correction_weight_max"] = (Max, extremes(w, kept)[0])
        records["effective_sample_size"] = (EffectiveSampleSize, weights, total(w * w), n)
    for name, keep in corrected.verdicts.items():
        records[f"rejected_fraction/{name}"] = (Stat, count(before.mask & ~keep), n)
    if corrected.keep is not None:
        records["rejected_fraction"] = (Stat, count(before.mask & ~corrected.keep), n)
