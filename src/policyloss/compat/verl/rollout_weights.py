"""The importance weights, rejection masks and metrics of verl's rollout correction, on `[B, T]`
tensors (see `rollout_correction`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.arguments import at_least, drop_in
from policyloss.compat.verl import rollout_metrics as measures
from policyloss.compat.verl.aggregation import EPSILON
from policyloss.compat.verl.rollout_metrics import Means
from policyloss.compat.verl.rollout_thresholds import (
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    Rule,
    rejection_rules,
    weight_bounds,
)
from policyloss.errors import InputError, SpecError
from policyloss.functional.correction import importance_weight, within
from policyloss.functional.kl import estimate
from policyloss.functional.masking import bound, fill

SAFETY_BOUND = 20.0
Metrics = dict[str, float]
# How each level of a weight reduces the logarithms of the tokens' weights.
LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}


def report(prefix: str, statistics: dict[str, Tensor]) -> Metrics:
    """Statistics as Python floats, under verl's names."""
    return {f"{prefix}{name}": float(value) for name, value in statistics.items()}


def means_of(response_mask: Tensor) -> Means:
    """verl's means over the valid tokens, of which there must be one."""
    if not response_mask.any():
        raise InputError("response_mask has no valid token; at least one is needed.")
    return Means.of(response_mask, EPSILON)


@drop_in
@torch.no_grad()
def compute_rollout_correction_weights(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_is: str = "token",
    rollout_is_threshold: str | float = 2.0,
    rollout_is_batch_normalize: bool = False,
    *,
    release: str | None = None,
) -> tuple[Tensor, Metrics]:
    """Importance weights `[B, T]`, 0 at masked positions, and their metrics.

    A weight is `exp(log_ratio)` of the "token", or the product of these over the "sequence". One
    threshold truncates it, and "lower_upper" makes it 0 outside of the two bounds;
    `rollout_is_batch_normalize` then divides by the mean (over the ranks, where `torch.distributed`
    is initialised).
    """
    check_choice("rollout_is", rollout_is, ("token", "sequence"), SpecError)
    low, high = weight_bounds(rollout_is_threshold, release)
    means = means_of(response_mask)
    log_weight = means.reduced(means.filled(log_ratio), LEVELS[rollout_is])
    raw = means.filled(importance_weight(log_weight, SAFETY_BOUND))
    weights = measures.bounded_weight(raw, low, high)
    metrics = compute_is_metrics(
        # Before 0.8.0 verl measured the weights before it truncated them.
        weights if at_least(release, "0.8.0") else raw,
        raw,
        log_weight if rollout_is == "token" else log_weight[:, :1],
        response_mask,
        rollout_is,
        high,
        low,
        release=release,
    )
    if low is not None:
        outside = measures.rejected_tokens(within(raw, low, high), means)
        metrics["rollout_is_oob_ratio"] = float(outside)
    if rollout_is_batch_normalize:
        # The first release averaged empty rows too, and on each rank alone.
        is_first, dist = not at_least(release, "0.7.0"), torch.distributed
        alone = is_first or not (dist.is_available() and dist.is_initialized())
        over, group = f"{rollout_is}s", None if alone else dist.group.WORLD
        weights, factor = measures.normalised(
            weights, means, over, empty_sequences=is_first, least=EPSILON, group=group
        )
        metrics["rollout_is_batch_norm_factor"] = float(factor)
    return weights, metrics


@drop_in
@torch.no_grad()
def compute_is_metrics(
    rollout_is_weights: Tensor,
    raw_rollout_is_weights: Tensor,
    log_ratio_for_metrics: Tensor,
    response_mask: Tensor,
    rollout_is: str,
    rollout_is_threshold: float,
    rollout_is_threshold_lower: float | None = None,
    *,
    release: str | None = None,
) -> Metrics:
    """Statistics of the applied weights, and how many raw weights lie outside the bounds. The
    default of the lower bound is 1/upper. Up to 0.8.0 the applied weights decided which sequences
    lie outside; before 0.8.0 the spread was that of weights clamped to both bounds (and
    `rollout_is_weights` were the raw ones).
    """
    means = means_of(response_mask)
    low, high = measures.reciprocal_band(rollout_is_threshold, rollout_is_threshold_lower)
    if rollout_is == "sequence":
        limits = measures.sequence_weight_limits(log_ratio_for_metrics, low, high, SAFETY_BOUND)
    else:
        limits = measures.token_weight_limits(
            rollout_is_weights, raw_rollout_is_weights, means, low, high
        )
    least = 0.0 if at_least(release, "0.8.0") else low
    statistics = {**limits, **measures.weight_spread(rollout_is_weights, means, least, high)}
    if rollout_is_weights.dim() > 1:
        judged = raw_rollout_is_weights if at_least(release, "0.9.0") else rollout_is_weights
        statistics |= measures.weights_by_sequence(rollout_is_weights, judged, means, low, high)
    return report("rollout_is_", statistics)


@drop_in
@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
    *,
    rollout_rs_threshold_lower: float | None = None,
    release: str | None = None,
) -> tuple[Tensor, Metrics]:
    """`response_mask` without the tokens that any option rejects, and the metrics of each option
    and of all together.

    Up to 0.7.0 `rollout_rs` was "token", "sequence" or "geometric" and the bounds were on the
    weight: with such a `release`, pass them as `rollout_rs_threshold` and
    `rollout_rs_threshold_lower` (None: the reciprocal).
    """
    if not at_least(release, "0.7.1"):
        if rollout_rs_threshold is None:
            raise SpecError(f"rollout_rs_threshold must be given with rollout_rs={rollout_rs!r}.")
        low, high = measures.reciprocal_band(
            float(rollout_rs_threshold), rollout_rs_threshold_lower
        )
        return _rejection_by_weight(log_ratio, means_of(response_mask), rollout_rs, low, high)
    refuse_from_071("rollout_rs_threshold_lower", rollout_rs_threshold_lower, release)
    if log_ratio.shape[0] == 0 and isinstance(rollout_rs, str) and rollout_rs_threshold is not None:
        return response_mask, {}
    rules = rejection_rules(rollout_rs, rollout_rs_threshold, release)
    means = means_of(response_mask)
    log_weight = bound(means.filled(log_ratio), SAFETY_BOUND)
    kept = means.valid
    metrics: Metrics = {}
    for rule in rules:
        keep, rule_metrics = _apply(rule, log_weight, means)
        kept = kept & keep
        metrics |= rule_metrics
    shares = {
        "masked_fraction": measures.rejected_tokens(kept, means, log_weight.dtype),
        "seq_masked_fraction": measures.rejected_sequences(kept, means),
    }
    metrics |= report("rollout_rs_", shares)
    return fill(response_mask, kept).to(response_mask.dtype), metrics


def _rejection_by_weight(
    log_ratio: Tensor, means: Means, rollout_rs: str, low: float, high: float
) -> tuple[Tensor, Metrics]:
    """The rejection of releases up to 0.7.0, by the weight of a token, a sequence, or its geometric
    mean: the mask, float as in verl, 0 outside [low, high]; and the metrics of weights and mask.
    """
    check_choice("rollout_rs", rollout_rs, LEVELS, SpecError)
    log_weight = means.reduced(means.filled(log_ratio), LEVELS[rollout_rs])
    weight = importance_weight(log_weight, SAFETY_BOUND)
    keep = within(weight, low, high)
    if rollout_rs == "token":
        judged, limits = means, measures.token_weight_limits(weight, weight, means, low, high)
    else:
        judged = means.everywhere
        limits = measures.sequence_weight_limits(log_weight[:, :1], low, high, SAFETY_BOUND)
    metrics = {
        **limits,
        **measures.weight_spread(weight, means, low, high),
        **measures.weights_by_sequence(weight, weight, means, low, high),
        "masked_fraction": measures.rejected_tokens(keep, means),
        "seq_masked_fraction": measures.rejected_sequences(keep, judged),
    }
    mask = fill(means.mask, keep, torch.promote_types(means.mask.dtype, torch.float32))
    return mask, report("rollout_rs_", metrics)


def _apply(rule: Rule, log_weight: Tensor, means: Means) -> tuple[Tensor, Metrics]:
    """Which tokens one rule keeps, and its metrics."""
    stat = means.reduced(
        estimate(log_weight, rule.estimator, as_written="exp(d) - 1 - d"), rule.reduce
    )
    keep = within(stat, rule.low, rule.high)
    by_token = rule.option in TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    of_sequence, dtype = None if by_token else stat[:, 0], log_weight.dtype
    statistics = {
        **measures.rejection_statistics(
            stat, of_sequence, means.nonempty, means, rule.low, rule.high, by_sequence=not by_token
        ),
        "masked_fraction": measures.rejected_tokens(keep, means, dtype),
        "seq_masked_fraction": measures.rejected_sequences(keep, means, "nonempty", dtype),
    }
    return keep, report(f"rollout_rs_{rule.option}_", statistics)


@drop_in
@torch.no_grad()
def compute_rs_metrics(
    option_name: str,
    rs_statistic: Tensor,
    response_mask: Tensor,
    seq_valid_mask: Tensor,
    *,
    level: str,
    per_sequence_values: Tensor | None,
    rollout_rs_threshold: float,
    rollout_rs_threshold_lower: float,
    apply_lower_threshold: bool,
) -> Metrics:
    """Statistics of the number that one option rejects by."""
    values = per_sequence_values
    statistics = measures.rejection_statistics(
        rs_statistic,
        values.squeeze(-1) if values is not None and values.dim() > 1 else values,
        seq_valid_mask,
        means_of(response_mask),
        rollout_rs_threshold_lower if apply_lower_threshold else None,
        rollout_rs_threshold,
        by_sequence=level == "sequence",
    )
    return report(f"rollout_rs_{option_name}_", statistics)


def refuse_from_071(name: str, value: Any, release: str | None) -> None:
    """Raise if an argument was passed that verl has no more."""
    if value is not None:
        raise SpecError(
            f'{name}={value!r} left verl with 0.7.1; pass release="0.7.0" for its meaning (got '
            f"release={release!r})."
        )


def veto(
    mask: Tensor, log_ratio: Tensor, means: Means, threshold: float | None
) -> tuple[Tensor, Metrics]:
    """The mask after the veto of releases up to 0.7.0, and its two metrics."""
    vetoed_shares = dict.fromkeys(("sequences", "tokens"), 0.0)
    if threshold is not None:
        if threshold <= 0:
            raise SpecError(f"rollout_token_veto_threshold must be positive, got {threshold!r}.")
        keep, shares = measures.vetoed(log_ratio, means, threshold)
        mask = fill(mask, keep, torch.promote_types(mask.dtype, torch.float32))
        vetoed_shares = report("", shares)
    return mask, {
        "rollout_is_veto_fraction": vetoed_shares["sequences"],
        "rollout_is_catastrophic_token_fraction": vetoed_shares["tokens"],
    }
