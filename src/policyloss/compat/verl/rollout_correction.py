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

from policyloss.compat.arguments import at_least, drop_in
from policyloss.compat.verl.rollout_metrics import policy_gap
from policyloss.compat.verl.rollout_thresholds import (
    SUPPORTED_ROLLOUT_RS_OPTIONS,
    TOKEN_LEVEL_ROLLOUT_RS_OPTIONS,
)
from policyloss.compat.verl.rollout_weights import (
    SAFETY_BOUND,
    Metrics,
    compute_is_metrics,
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
    compute_rs_metrics,
    means_of,
    refuse_from_071,
    report,
    veto,
)
from policyloss.compat.verl.settings import read
from policyloss.errors import InputError
from policyloss.functional.masking import difference

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
    means = means_of(response_mask)
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
        refuse_from_071("rollout_token_veto_threshold", rollout_token_veto_threshold, release)
    else:
        mask, new_metrics = veto(mask, log_ratio, means, rollout_token_veto_threshold)
        metrics |= new_metrics
    metrics |= compute_offpolicy_metrics(old_log_prob, rollout_log_prob, response_mask)
    proto = None if weights is None else _data_proto({"rollout_is_weights": weights})
    return proto, mask, {f"rollout_corr/{name}": value for name, value in metrics.items()}


@drop_in
@torch.no_grad()
def compute_offpolicy_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, Any]:
    """`rollout_metrics.policy_gap` of trainer and rollout engine, without prefix."""
    return report(
        "", policy_gap(old_log_prob, rollout_log_prob, means_of(response_mask), SAFETY_BOUND)
    )


@drop_in
def compute_rollout_corr_metrics_from_logprobs(
    log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor
) -> Metrics:
    """`compute_offpolicy_metrics` of the current policy, under "rollout_corr/"."""
    metrics = compute_offpolicy_metrics(log_prob, rollout_log_prob, response_mask)
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def correction_options(config: Any, release: str | None) -> dict[str, Any]:
    """The options of `compute_rollout_correction_and_rejection_mask` in a config of `release`."""
    defaults = {
        "rollout_is": None,
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": False,
        "rollout_rs": None,
        "rollout_rs_threshold": None,
    }
    if not at_least(release, "0.7.1"):
        defaults |= {"rollout_rs_threshold_lower": None, "rollout_token_veto_threshold": None}
    options = {name: read(config, name, default) for name, default in defaults.items()}
    return {**options, "release": release}


@drop_in
def compute_rollout_correction_and_add_to_batch(
    batch: Any, rollout_corr_config: Any, *, release: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Correct a `DataProto` (or `TensorBatch`) as the config says: change its response_mask, and
    add rollout_is_weights if the config asks for them.
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
