"""Means and shares of tokens as verl computes them, with 1e-8 added to the count."""

from __future__ import annotations

from typing import Any

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


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] / ctx.ranks, None


def share_of_gradient(x: Tensor, ranks: int) -> Tensor:
    """`x`, whose gradient is divided by the number of ranks: where each rank computes the complete
    gradient and the framework adds them up.
    """
    share: Tensor = _Share.apply(x, ranks)  # type: ignore[no-untyped-call]
    return share
