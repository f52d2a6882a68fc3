"""What is measured of a loss, as sums over the valid tokens. No gradients, no host sync.

Legend: everything token-shaped is 0 where `mask` is False.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count(flags: Tensor) -> Tensor:
    """How many of `flags` are True. (`flags.sum()` would copy them to int64 first; a compiler sums int32 lanes best.)"""
    return flags.sum(dtype=torch.int32) if torch.compiler.is_compiling() else torch.count_nonzero(flags)


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of the valid tokens; (−inf, inf) if there are none."""
    if x.numel() == 0:
        return x.new_full((), -torch.inf), x.new_full((), torch.inf)
    return torch.where(mask, x, -torch.inf).amax(), torch.where(mask, x, torch.inf).amin()


def k3(log_ratio: Tensor) -> Tensor:
    """`eᵈ − 1 − d` per token: non-negative, low variance, precise for small d."""
    return torch.expm1(log_ratio) - log_ratio


def nonfinite(x: Tensor) -> Tensor:
    """Where `x` is NaN or infinite: there and only there `x - x` is not 0."""
    return (x - x) != 0
