"""verl's rejection up to 0.7.0: by the weight of a token, a sequence, or its geometric mean."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.compat.verl.rollout_metrics import (
    Means,
    rejected_sequences,
    rejected_tokens,
    sequence_weight_limits,
    token_weight_limits,
    weight_spread,
    weights_by_sequence,
)
from policyloss.errors import SpecError, unknown_name
from policyloss.functional.correction import importance_weight, within
from policyloss.functional.masking import fill

# How each level reduces the logarithms of the weights.
LEVELS = {"token": "token", "sequence": "sum", "geometric": "mean"}


def rejection_by_weight(
    log_ratio: Tensor, means: Means, rollout_rs: str, low: float, high: float, log_clamp: float
) -> tuple[Tensor, dict[str, float]]:
    """The mask, float as in verl, 0 outside [low, high]; and the metrics of weights and mask."""
    if not isinstance(rollout_rs, str) or rollout_rs not in LEVELS:
        raise SpecError(unknown_name("rollout_rs", rollout_rs, LEVELS))
    log_weight = means.reduced(means.filled(log_ratio), LEVELS[rollout_rs])
    weight = importance_weight(log_weight, log_clamp)
    keep = within(weight, low, high)
    if rollout_rs == "token":
        limits = token_weight_limits(weight, weight, means, low, high)
    else:
        limits = sequence_weight_limits(log_weight[:, :1], low, high, log_clamp)
    metrics = {
        **limits,
        **weight_spread(weight, means, low, high),
        **weights_by_sequence(weight, weight, means, low, high),
        "masked_fraction": rejected_tokens(keep, means),
        "seq_masked_fraction": rejected_sequences(
            keep, means if rollout_rs == "token" else means.everywhere
        ),
    }
    mask = fill(means.mask, keep, torch.promote_types(means.mask.dtype, torch.float32))
    return mask, {f"rollout_rs_{name}": float(value) for name, value in metrics.items()}
