"""Masking and precision, on which all other computations rely.

A masked position is *replaced* (`torch.where`) before anything is computed from it, never
multiplied by zero: `0 * nan` is `nan`, and the gradient of `exp` at garbage is garbage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.arguments import is_compiling

LogClamp = float | tuple[float | None, float | None] | None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of `tensors` is float64, else float32: half precision is always upcast."""
    for x in tensors:
        if x is not None and x.dtype == torch.float64:
            return torch.float64
    return torch.float32


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on the one backend (MPS) that has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def shared_zero(like: Tensor, dtype: torch.dtype) -> Tensor | float:
    """A 0 for `fill` on the device of `like`: one tensor for a whole call.

    (`torch.where` makes a tensor of a number each time. For a compiler it is a constant.)
    """
    if is_compiling() or not isinstance(like, Tensor):
        return 0
    return torch.zeros((), dtype=dtype, device=like.device)


def fill(
    x: Tensor, mask: Tensor, dtype: torch.dtype | None = None, zero: Tensor | float = 0
) -> Tensor:
    """`x` where `mask`, exactly 0 elsewhere, whatever `x` holds there (NaN and inf included).

    zero: the 0 to fill with; pass a `shared_zero` of the result's dtype to reuse it.
    """
    return torch.where(mask, x if dtype is None else x.to(dtype), zero)


def difference(
    a: Tensor, b: Tensor, mask: Tensor, dtype: torch.dtype, zero: Tensor | float = 0
) -> Tensor:
    """`a - b` where `mask`, 0 elsewhere; both are cast to `dtype` first. zero: as in `fill`."""
    return torch.where(mask, a.to(dtype) - b.to(dtype), zero)


def bound(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """Clamp a log-ratio to ±limit, or to [low, high] if limit is a pair; None: no clamp."""
    if limit is None:
        return log_ratio
    low, high = (-limit, limit) if isinstance(limit, (int, float)) else limit
    return log_ratio if low is None and high is None else log_ratio.clamp(min=low, max=high)


def where_equal(a: Tensor, b: Tensor) -> Tensor:
    """1 where `a` equals `b`, else 0, in the dtype of `a`; a NaN equals nothing."""
    if is_compiling():
        return (a == b).to(a.dtype)
    return torch.eq(a, b, out=torch.empty_like(a))  # no flags in between


def can_be_read(x: Tensor) -> bool:
    """Whether `x` can be read without a wait: it is on a CPU, and no compiler traces the call."""
    return x.device.type == "cpu" and not is_compiling()


def holds(condition: Tensor) -> bool:
    """Whether a 0-dim condition is true, for a tensor that `can_be_read`."""
    try:
        torch._assert_async(condition)
    except RuntimeError:
        return False
    return True


# Statistics, as sums over the valid tokens of tensors that are 0 at masked ones: no gradient, no
# sync with the host.


def count(flags: Tensor) -> Tensor:
    """The number of `flags` that are True; for numbers, the number that are not 0.

    (`flags.sum()` would copy them to int64 first; a compiler sums int32 lanes best.)
    """
    if is_compiling():
        return (flags if flags.dtype == torch.bool else flags != 0).sum(dtype=torch.int32)
    return torch.count_nonzero(flags)


def extremes(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of the valid tokens; (−inf, inf) without a valid token."""
    if x.numel() == 0:
        return x.new_full((), -torch.inf), x.new_full((), torch.inf)
    return torch.where(mask, x, -torch.inf).amax(), torch.where(mask, x, torch.inf).amin()


def nonfinite(x: Tensor) -> Tensor:
    """The number of entries of `x` that are NaN or infinite: `x - x` is 0 for all others."""
    return count(x - x)


def outside_clamp(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """A flag where a log-ratio lies outside its clamp; False for NaN."""
    if isinstance(limit, (int, float)):
        return log_ratio.abs() > limit
    return (log_ratio - bound(log_ratio, limit)).abs() > 0
