"""What is measured of a loss, as sums over the valid tokens. No gradients, no host sync.

Legend: everything token-shaped is 0 where `mask` is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.masking import accumulator_dtype, bound
from policyloss.functional.ratio import LogClamp


def count(flags: Tensor) -> Tensor:
    """How many of `flags` are True. (`flags.sum()` would copy them to int64 first; a compiler sums int32 lanes best.)"""
    return flags.sum(dtype=torch.int32) if torch.compiler.is_compiling() else torch.count_nonzero(flags)


def neither_0_nor_1(mask: Tensor) -> Tensor:
    """How many entries of a mask are something else, 0-dim: there and only there `m·(1 − m)` is not
    0, whatever the dtype.
    """
    return count(mask * (1 - mask) != 0)


def masked_mean(x: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """`Σ x / (n + epsilon)` over the n valid tokens, in x's dtype (flags count as 0 and 1, in the widest). 0-dim."""
    x = x.to(accumulator_dtype(x.device)) if x.dtype == torch.bool else x
    return torch.where(mask, x, 0).sum() / (mask.sum().to(x.dtype) + epsilon)


def outside_by_sign(
    log_ratio: Tensor, eps_low: float, eps_high: float, advantages: Tensor, mask: Tensor, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The shares of valid tokens outside [-eps_low, eps_high] with A > 0, and with A < 0. epsilon: as in `masked_mean`."""
    outside = beyond(log_ratio, (-eps_low, eps_high))
    return masked_mean(outside & (advantages > 0), mask, epsilon), masked_mean(outside & (advantages < 0), mask, epsilon)


def mean_or_zero(total: Tensor, n: Tensor) -> Tensor:
    """`total / n` of a sum and its count, wide enough not to be rounded; 0 where nothing was counted. 0-dim."""
    wide = accumulator_dtype(total.device)
    return total.to(wide) / n.to(wide).clamp(min=1)


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of the valid tokens; (−inf, inf) if there are none."""
    if x.numel() == 0:
        return x.new_full((), -torch.inf), x.new_full((), torch.inf)
    return torch.where(mask, x, -torch.inf).amax(), torch.where(mask, x, torch.inf).amin()


def nonfinite(x: Tensor) -> Tensor:
    """How many of `x` are NaN or infinite: there and only there `x - x` is not 0."""
    return count((x - x) != 0) if torch.compiler.is_compiling() else torch.count_nonzero(x - x)


def beyond(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """Where a log-ratio lies outside its clamp (bool); NaN does not."""
    if isinstance(limit, (int, float)):
        return log_ratio.abs() > limit
    return (log_ratio - bound(log_ratio, limit)).abs() > 0
