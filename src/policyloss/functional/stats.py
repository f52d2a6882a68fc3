"""Statistics of a loss, as sums over the valid tokens. No gradients, no host sync.

Legend: everything token-shaped is 0 where `mask` is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.arguments import is_compiling
from policyloss.functional.masking import bound
from policyloss.functional.ratio import LogClamp


def count(flags: Tensor) -> Tensor:
    """How many of `flags` are True, or of numbers not 0.

    (`flags.sum()` would copy them to int64 first; a compiler sums int32 lanes best.)
    """
    if is_compiling():
        return (flags if flags.dtype == torch.bool else flags != 0).sum(dtype=torch.int32)
    return torch.count_nonzero(flags)


def neither_0_nor_1(mask: Tensor) -> Tensor:
    """How many entries are neither 0 nor 1: only those make `m·(1 − m)` zero. 0-dim."""
    return count(mask * (1 - mask) != 0)


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of the valid tokens; (−inf, inf) if there are none."""
    if x.numel() == 0:
        return x.new_full((), -torch.inf), x.new_full((), torch.inf)
    return torch.where(mask, x, -torch.inf).amax(), torch.where(mask, x, torch.inf).amin()


def nonfinite(x: Tensor) -> Tensor:
    """How many of `x` are NaN or infinite: only for these is `x - x` not 0."""
    return count(x - x)


def beyond(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """Where a log-ratio lies outside its clamp (bool); NaN does not."""
    if isinstance(limit, (int, float)):
        return log_ratio.abs() > limit
    return (log_ratio - bound(log_ratio, limit)).abs() > 0
