"""verl's rollout correction under verl's names: importance weights, rejection masks and their
metrics, on `[B, T]` tensors.

`log_ratio` is log(π_train / π_rollout). Metrics are Python floats under verl's names. `release`
says which release's numbers to return where verl changed them (None: the current release). A NaN at
a valid token is kept and shows, where verl silently drops the token.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.compat.arguments import drop_in
from policyloss.compat.releases import at_least
from policyloss.compat.verl.aggregation import EPSILON
from policyloss.compat.verl.rollout_by_weight import rejection_by_weight
from policyloss.compat.verl.rollout_metrics import (
    Means,
    bounded_weight,
    normalised,
    outside_share,
    policy_gap,
    reciprocal_band,
    rejected_sequences,
    rejected_tokens,
    rejection_statistics,
    sequence_weight_limits,
    token_weight_limits,
    vetoed,
    weight_spread,
    weights_by_sequence,
)
from policyloss.compat.verl.rollout_thresholds import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    Rule,
    rejection_rules,
    weight_bounds,
)
from policyloss.errors import InputError, SpecError, unknown_name
from policyloss.functional.correction import importance_weight, within
from policyloss.functional.kl import estimate
from policyloss.functional.masking import bound, difference, fill

__all__ = [
    "SAFETY_BOUND",
    "SUPPORTED_ROLLOUT_RS_OPTIONS",
    "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
    "TensorBatch",
    "apply_bypass_mode",
    "compute_is_metrics",
    "compute_offpolicy_metrics",
    "compute_rollout_corr_metrics_from_logprobs",
    "compute_rollout_correction_and_add_to_batch",
    "compute_rollout_correction_and_rejection_mask",
    "compute_rollout_correction_weights",
    "compute_rollout_rejection_mask",
    "compute_rs_metrics",
]

SAFETY_BOUND = 20.0
Metrics = dict[str, float]
# For verl's name of each level: how the logarithms of the weights are reduced, and what the batch
# normalisation averages over.
LEVELS = {"token": ("token", "tokens"), "sequence": ("sum", "sequences")}


@dataclass
class TensorBatch:
    """What stands for `verl.DataProto` without verl: tensors by name, and `union`."""

    batch: dict[str, Tensor]

    def union(self, other: TensorBatch) -> TensorBatch:
        """Add the tensors of the other batch."""
        self.batch.update(other.batch)
        return self


def _data_proto(tensors: dict[str, Tensor]) -> Any:
    """verl's `DataProto` of these tensors, or the stand-in for it."""
    try:
        protocol = import_module("verl.protocol")
    except ImportError:
        return TensorBatch(tensors)
    return protocol.DataProto.from_dict(tensors=tensors)


def _report(prefix: str, statistics: dict[str, Tensor]) -> Metrics:
    return {f"{prefix}{name}": float(value) for name, value in statistics.items()}


def _means(response_mask: Tensor) -> Means:
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
    if not isinstance(rollout_is, str) or rollout_is not in LEVELS:
        raise SpecError(unknown_name("rollout_is", rollout_is, LEVELS))
    low, high = weight_bounds(rollout_is_threshold, release)
    level, over = LEVELS[rollout_is]
    means = _means(response_mask)
    log_weight = means.reduced(means.filled(log_ratio), level)
    raw = means.filled(importance_weight(log_weight, SAFETY_BOUND))
    weights = bounded_weight(raw, low, high)
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
        metrics["rollout_is_oob_ratio"] = float(outside_share(raw, means, low, high))
    if rollout_is_batch_normalize:
        # The first release averaged empty rows too, and on each rank alone.
        is_first = not at_least(release, "0.7.0")
        group = None if is_first else _world()
        weights, factor = normalised(
            weights, means, over, empty_sequences=is_first, least=EPSILON, group=group
        )
        metrics["rollout_is_batch_norm_factor"] = float(factor)
    return weights, metrics


def _world() -> Any:
    """The group of all ranks where there are any."""
    distributed = torch.distributed
    return (
        distributed.group.WORLD
        if distributed.is_available() and distributed.is_initialized()
        else None
    )


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
    means = _means(response_mask)
    low, high = reciprocal_band(rollout_is_threshold, rollout_is_threshold_lower)
    if rollout_is == "sequence":
        limits = sequence_weight_limits(log_ratio_for_metrics, low, high, SAFETY_BOUND)
    else:
        limits = token_weight_limits(rollout_is_weights, raw_rollout_is_weights, means, low, high)
    least = 0.0 if at_least(release, "0.8.0") else low
    statistics = {**limits, **weight_spread(rollout_is_weights, means, least, high)}
    if rollout_is_weights.dim() > 1:
        judged = raw_rollout_is_weights if at_least(release, "0.9.0") else rollout_is_weights
        statistics |= weights_by_sequence(rollout_is_weights, judged, means, low, high)
    return _report("rollout_is_", statistics)


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
        low, high = reciprocal_band(float(rollout_rs_threshold), rollout_rs_threshold_lower)
        return rejection_by_weight(
            log_ratio, _means(response_mask), rollout_rs, low, high, SAFETY_BOUND
        )
    _refuse_from_071("rollout_rs_threshold_lower", rollout_rs_threshold_lower, release)
    if log_ratio.shape[0] == 0 and isinstance(rollout_rs, str) and rollout_rs_threshold is not None:
        return response_mask, {}
    rules = rejection_rules(rollout_rs, rollout_rs_threshold, release)
    means = _means(response_mask)
    log_weight = bound(means.filled(log_ratio), SAFETY_BOUND)
    kept = means.valid
    metrics: Metrics = {}
    for rule in rules:
        keep, rule_metrics = _apply(rule, log_weight, means, response_mask)
        kept = kept & keep
        metrics |= rule_metrics
    metrics["rollout_rs_masked_fraction"] = float(rejected_tokens(kept, means, log_weight.dtype))
    metrics["rollout_rs_seq_masked_fraction"] = float(rejected_sequences(kept, means))
    return fill(response_mask, kept).to(response_mask.dtype), metrics


def _apply(
    rule: Rule, log_weight: Tensor, means: Means, response_mask: Tensor
) -> tuple[Tensor, Metrics]:
    """Which tokens one rule keeps, and its metrics."""
    stat = means.reduced(
        estimate(log_weight, rule.estimator, as_written="exp(d) - 1 - d"), rule.reduce
    )
    keep = within(stat, rule.low, rule.high)
    by_token = rule.option in TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    metrics = compute_rs_metrics(
        rule.option,
        stat,
        response_mask,
        means.nonempty,
        level="token" if by_token else "sequence",
        per_sequence_values=None if by_token else stat[:, 0],
        rollout_rs_threshold=rule.high,
        rollout_rs_threshold_lower=0.0 if rule.low is None else rule.low,
        apply_lower_threshold=rule.low is not None,
    )
    dtype = log_weight.dtype
    metrics[f"rollout_rs_{rule.option}_masked_fraction"] = float(
        rejected_tokens(keep, means, dtype)
    )
    metrics[f"rollout_rs_{rule.option}_seq_masked_fraction"] = float(
        rejected_sequences(keep, means, "nonempty", dtype)
    )
    return keep, metrics


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
    statistics = rejection_statistics(
        rs_statistic,
        values.squeeze(-1) if values is not None and values.dim() > 1 else values,
        seq_valid_mask,
        _means(response_mask),
        rollout_rs_threshold_lower if apply_lower_threshold else None,
        rollout_rs_threshold,
        by_sequence=level == "sequence",
    )
    return _report(f"rollout_rs_{option_name}_", statistics)


@drop_in
@torch.no_grad()
def compute_rollout_correction_and_rejection_mask(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
    *,
    rollout_rs_threshold_lower: float | None = None,
    rollout_token_veto_threshold: float | None = None,
    release: str | None = None,
) -> tuple[Any, Tensor, Metrics]:
    """Weights (a `DataProto` with "rollout_is_weights", or None), the mask after rejection, and all
    metrics under "rollout_corr/".

    Without verl the weights come in a `TensorBatch`, which has the same `.batch`.
    `rollout_rs_threshold_lower` and `rollout_token_veto_threshold` belong to releases up to 0.7.0,
    whose veto rejects a sequence with a token of smaller weight.
    """
    means = _means(response_mask)
    for name, x in (("rollout_log_prob", rollout_log_prob), ("response_mask", response_mask)):
        if x.shape != old_log_prob.shape:
            raise InputError(
                f"{name} has shape {tuple(x.shape)} but old_log_prob has "
                f"{tuple(old_log_prob.shape)}."
            )
    dtype = torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype)
    log_ratio = difference(old_log_prob, rollout_log_prob, means.valid, dtype)
    weights, metrics, mask = None, Metrics(), response_mask.clone()
    if rollout_is is not None and rollout_is_threshold is not None:
        weights, new_metrics = compute_rollout_correction_weights(
            log_ratio,
            response_mask,
            rollout_is,
            rollout_is_threshold,
            rollout_is_batch_normalize,
            release=release,
        )
        metrics |= new_metrics
    if rollout_rs is not None:
        mask, new_metrics = compute_rollout_rejection_mask(
            log_ratio,
            response_mask,
            rollout_rs,
            rollout_rs_threshold,
            rollout_rs_threshold_lower=rollout_rs_threshold_lower,
            release=release,
        )
        metrics |= new_metrics
    if at_least(release, "0.7.1"):
        _refuse_from_071("rollout_token_veto_threshold", rollout_token_veto_threshold, release)
    else:
        mask, new_metrics = _veto(mask, log_ratio, means, rollout_token_veto_threshold)
        metrics |= new_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    proto = None if weights is None else _data_proto({"rollout_is_weights": weights})
    return proto, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _refuse_from_071(name: str, value: Any, release: str | None) -> None:
    if value is not None:
        raise SpecError(
            f'{name}={value!r} left verl with 0.7.1; pass release="0.7.0" for its meaning (got '
            f"release={release!r})."
        )


def _veto(
    mask: Tensor, log_ratio: Tensor, means: Means, threshold: float | None
) -> tuple[Tensor, Metrics]:
    """The mask after the veto of releases up to 0.7.0, and its two metrics."""
    vetoed_shares = dict.fromkeys(("sequences", "tokens"), 0.0)
    if threshold is not None:
        if threshold <= 0:
            raise SpecError(f"rollout_token_veto_threshold must be positive, got {threshold!r}.")
        keep, shares = vetoed(log_ratio, means, threshold)
        mask = fill(mask, keep, torch.promote_types(mask.dtype, torch.float32))
        vetoed_shares = _report("", shares)
    return mask, {
        "rollout_is_veto_fraction": vetoed_shares["sequences"],
        "rollout_is_catastrophic_token_fraction": vetoed_shares["tokens"],
    }


@drop_in
@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """`rollout_metrics.policy_gap` of trainer and rollout engine, without prefix."""
    return _report(
        "", policy_gap(old_log_prob, rollout_log_prob, _means(response_mask), SAFETY_BOUND)
    )


@drop_in
def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """`compute_offpolicy_metrics` of the current policy, under "rollout_corr/"."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


@drop_in
def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any, *, release: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Correct a `DataProto` (or `TensorBatch`) as the config says: change its response_mask, and
    add rollout_is_weights if the config asks for them.
    """
    defaults = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    if not at_least(release, "0.7.1"):
        defaults |= {"rollout_rs_threshold_lower": None, "rollout_token_veto_threshold": None}
    tensors = batch.batch
    weights, tensors["response_mask"], metrics = compute_rollout_correction_and_rejection_mask(
        tensors["old_log_probs"],
        tensors["rollout_log_probs"],
        tensors["response_mask"],
        **{name: rollout_corr_config.get(name, default) for name, default in defaults.items()},
        release=release,
    )
    return (batch if weights is None else batch.union(weights)), metrics


@drop_in
def apply_bypass_mode(
    batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None
) -> None:
    """Make the rollout policy the old one, in the batch, and set loss_mode to "bypass_mode"."""
    if "rollout_log_probs" not in batch.batch:
        raise InputError(
            "bypass mode needs rollout_log_probs in the batch; configure the rollout with "
            "calculate_log_probs=true."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    with _open(policy_loss_config):
        policy_loss_config["rollout_correction"] = rollout_corr_config
        policy_loss_config["loss_mode"] = "bypass_mode"


def _open(config: Any) -> Any:
    """A context in which new keys may be set, for which an OmegaConf node must be opened."""
    try:
        omegaconf = import_module("omegaconf")
    except ImportError:
        return nullcontext()
    return omegaconf.open_dict(config) if omegaconf.OmegaConf.is_config(config) else nullcontext()
