"""Means and shares of tokens as verl computes them, with 1e-8 added to the count."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.masking import accumulator_dtype
from policyloss.functional.stats import beyond


def masked_mean(x: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """`Σ x / (n + epsilon)` over the n valid tokens, in x's dtype (flags count as 0 and 1, in the
    widest). 0-dim.
    """
    x = x.to(accumulator_dtype(x.device)) if x.dtype == torch.bool else x
    return torch.where(mask, x, 0).sum() / (mask.sum().to(x.dtype) + epsilon)


def outside_by_sign(
    log_ratio: Tensor,
    eps_low: float,
    eps_high: float,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The shares of valid tokens outside [-eps_low, eps_high] with A > 0, and with A < 0. epsilon:
    as in `masked_mean`.
    """
    outside = beyond(log_ratio, (-eps_low, eps_high))
    return masked_mean(outside & (advantages > 0), mask, epsilon), masked_mean(
        outside & (advantages < 0), mask, epsilon
    )
