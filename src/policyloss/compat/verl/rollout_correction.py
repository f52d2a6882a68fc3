"""verl's rollout correction (verl/trainer/ppo/rollout_corr_helper.py) under verl's names:
importance weights, rejection masks and their metrics, on `[B, T]` tensors.

`log_ratio` is log(π_train / π_rollout). Metrics are Python floats under verl's names. `release`
selects the numbers of an older release (None: the current one). A NaN at a valid token stays a NaN,
where verl silently drops the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.arguments import drop_in
from policyloss.compat.parts import EPSILON
from policyloss.compat.verl import rollout_metrics as measures
from policyloss.compat.verl.rollout_metrics import Means, policy_gap
from policyloss.compat.verl.rollout_thresholds import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
    RejectionRule,
    reciprocal_band,
    rejection_rules,
    weight_bounds,
)
from policyloss.compat.verl.settings import read_field, since
from policyloss.errors import InputError, SpecError
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
# How each level of a weight reduces the log-weights of the tokens.
LEVELS = {"token": "token", "sequence": "sum"}


def report(prefix: str, statistics: Mapping[str, Tensor | float]) -> Metrics:
    """Statistics as Python floats, under verl's names."""
    return {f"{prefix}{name}": float(value) for name, value in statistics.items()}


def means_of(response_mask: Tensor) -> Means:
    """verl's means over the valid tokens; an error without a valid token."""
    if not response_mask.any():
        raise InputError("response_mask has no valid token; at least one is needed.")
    return Means(response_mask, EPSILON)


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

    A weight is `exp(log_ratio)` of the "token", or the product of these over the "sequence". A
    single threshold truncates it; with "lower_upper" it is 0 outside of the two bounds.
    `rollout_is_batch_normalize` then divides by the mean (over all ranks if `torch.distributed` is
    initialised).
    """
    check_choice("rollout_is", rollout_is, LEVELS, SpecError)
    low, high = weight_bounds(rollout_is_threshold)
    means = means_of(response_mask)
    log_weight = means.reduce(means.fill(log_ratio), LEVELS[rollout_is])
    raw = means.fill(importance_weight(log_weight, SAFETY_BOUND))
    weights = measures.bounded_weight(raw, low, high)
    of_metrics = log_weight if rollout_is == "token" else log_weight[:, :1]
    tensors = (weights, raw, of_metrics, response_mask)
    metrics = compute_is_metrics(*tensors, rollout_is, high, low, release=release)
    if low is not None:
        outside = measures.rejected_tokens(within(raw, low, high), means)
        metrics["rollout_is_oob_ratio"] = float(outside)
    if rollout_is_batch_normalize:
        dist = torch.distributed
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        weights, factor = measures.normalise(weights, means, f"{rollout_is}s", group)
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
    """Statistics of the applied weights, and the shares of raw weights outside the bounds (the
    default lower bound is 1/upper).

    In 0.8.0 the applied weights decided which sequences lie outside.
    """
    means = means_of(response_mask)
    low, high = reciprocal_band(rollout_is_threshold, rollout_is_threshold_lower)
    if rollout_is == "sequence":
        limits = measures.sequence_weight_limits(log_ratio_for_metrics, low, high, SAFETY_BOUND)
    else:
        limits = measures.token_weight_limits(
            rollout_is_weights, raw_rollout_is_weights, means, low, high
        )
    statistics = {**limits, **measures.weight_spread(rollout_is_weights, means, high)}
    if rollout_is_weights.dim() > 1:
        judged = raw_rollout_is_weights if since(release, "0.9.0") else rollout_is_weights
        applied, compared = (means.of_sequences(x) for x in (rollout_is_weights, judged))
        statistics |= measures.of_each_sequence(applied, compared, low, high, center=1.0)
    return report("rollout_is_", statistics)


@drop_in
@torch.no_grad()
def compute_rollout_rejection_mask(
    log_ratio: Tensor,
    response_mask: Tensor,
    rollout_rs: str = "token_k1",
    rollout_rs_threshold: str | float | None = None,
    *,
    release: str | None = None,
) -> tuple[Tensor, Metrics]:
    """`response_mask` without the tokens that any option rejects, with the metrics of each option
    and of all options together.
    """
    if log_ratio.shape[0] == 0 and isinstance(rollout_rs, str) and rollout_rs_threshold is not None:
        return response_mask, {}
    rules = rejection_rules(rollout_rs, rollout_rs_threshold, since(release, "0.9.0"))
    means = means_of(response_mask)
    log_weight = bound(means.fill(log_ratio), SAFETY_BOUND)
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


def _apply(rule: RejectionRule, log_weight: Tensor, means: Means) -> tuple[Tensor, Metrics]:
    """The tokens that one rule keeps, and its metrics."""
    estimates = estimate(log_weight, rule.estimator, as_written="exp(d) - 1 - d")
    stat, dtype = means.reduce(estimates, rule.reduce), log_weight.dtype
    keep = within(stat, rule.low, rule.high)
    by_sequence = rule.option not in TOKEN_LEVEL_ROLLOUT_RS_OPTIONS
    of_sequence, nonempty = stat[:, 0] if by_sequence else None, means.nonempty
    statistics = {
        **measures.rejection_statistics(
            stat, of_sequence, nonempty, means, rule.low, rule.high, by_sequence=by_sequence
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
    """Statistics of the number that one option compares with its bounds."""
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


@dataclass
class TensorBatch:
    """Stands in for `verl.DataProto` where verl is not installed: tensors by name, and `union`."""

    batch: dict[str, Tensor]

    def union(self, other: TensorBatch) -> TensorBatch:
        """Add the tensors of the other batch."""
        self.batch.update(other.batch)
        return self


def _data_proto(tensors: dict[str, Tensor]) -> Any:
    """These tensors as verl's `DataProto`, or as a `TensorBatch` without verl."""
    try:
        protocol = import_module("verl.protocol")
    except ImportError:
        return TensorBatch(tensors)
    return protocol.DataProto.from_dict(tensors=tensors)


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
    release: str | None = None,
) -> tuple[Any, Tensor, Metrics]:
    """The weights (a `DataProto` with "rollout_is_weights", or None), the mask after rejection, and
    all metrics under "rollout_corr/".

    Where verl is not installed, the weights come in a `TensorBatch` with the same `.batch`.
    """
    means = means_of(response_mask)
    dtype = torch.promote_types(old_log_prob.dtype, rollout_log_prob.dtype)
    log_ratio = difference(old_log_prob, rollout_log_prob, means.valid, dtype)
    weights, metrics, mask = None, Metrics(), response_mask.clone()
    if rollout_is is not None and rollout_is_threshold is not None:
        options = (rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
        weights, new_metrics = compute_rollout_correction_weights(
            log_ratio, response_mask, *options, release=release
        )
        metrics |= new_metrics
    if rollout_rs is not None:
        mask, new_metrics = compute_rollout_rejection_mask(
            log_ratio, response_mask, rollout_rs, rollout_rs_threshold, release=release
        )
        metrics |= new_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    proto = None if weights is None else _data_proto({"rollout_is_weights": weights})
    return proto, mask, report("rollout_corr/", metrics)


@drop_in
@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """Perplexities and divergences of trainer and rollout engine (`rollout_metrics.policy_gap`)."""
    means = means_of(response_mask)
    return report("", policy_gap(old_log_prob, rollout_log_prob, means, SAFETY_BOUND))


@drop_in
def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """`compute_offpolicy_metrics` of the current policy, with the prefix "rollout_corr/"."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return report("rollout_corr/", metrics)


def correction_options(config: Any, release: str | None) -> dict[str, Any]:
    """The arguments of `compute_rollout_correction_and_rejection_mask` from a config of verl."""
    defaults = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    options = {name: read_field(config, name, default) for name, default in defaults.items()}
    return {**options, "release": release}


@drop_in
def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any, *, release: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Apply the config to a `DataProto` (or `TensorBatch`): change its response_mask, and add
    rollout_is_weights if `rollout_is` is set.
    """
    tensors = batch.batch
    weights, tensors["response_mask"], metrics = compute_rollout_correction_and_rejection_mask(
        tensors["old_log_probs"],
        tensors["rollout_log_probs"],
        tensors["response_mask"],
        **correction_options(rollout_corr_config, release),
    )
    return (batch if weights is None else batch.union(weights)), metrics


@drop_in
def apply_bypass_mode(
    batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None
) -> None:
    """Use the rollout policy as the old policy of the batch, and set loss_mode "bypass_mode"."""
    if "rollout_log_probs" not in batch.batch:
        raise InputError(
            "bypass mode needs rollout_log_probs in the batch; set calculate_log_probs=true for "
            "the rollout."
        )
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    with _open(policy_loss_config):
        policy_loss_config["rollout_correction"] = rollout_corr_config
        policy_loss_config["loss_mode"] = "bypass_mode"


def _open(config: Any) -> Any:
    """A context that allows new keys: OmegaConf refuses them unless its node is opened."""
    try:
        omegaconf = import_module("omegaconf")
    except ImportError:
        return nullcontext()
    return omegaconf.open_dict(config) if omegaconf.OmegaConf.is_config(config) else nullcontext()
