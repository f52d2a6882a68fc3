"""The mode in which equal inputs give equal bits, however a batch is cut, padded, packed or spread.

Floating-point addition depends on its order, so a sum over tokens depends on the layout. Here each
number is split into three multiples of fixed powers of two, its limbs. Sums of limbs are exact in
float64, whatever their order, so they are the same for every cut of a step; what is rounded is
their result.

Legend: `[..., 3]` limbs, float64: multiples of 1, 2⁻³⁰ and 2⁻⁶⁰.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# The limbs of one number but the first are at most half of the quantum before, 2²⁹ of their own.
# Sums of 2²⁴ of them fit into the 53 bits of a float64; so do those of the first up to 9e15.
QUANTA = (1.0, 2.0**-30, 2.0**-60)


class _Mode:
    exact = False


@contextmanager
def exact(on: bool = True) -> Iterator[None]:
    """Within this context equal inputs give equal bits: `with policyloss.exact(): …`.

    The log-probability, entropy and gradient of a token do not depend on the tokens beside it, and
    the loss and metrics of a step do not depend on how it was cut into calls, padded or packed, or
    spread over processes. `docs/bits.md` says what is promised, what it costs, and what is not.
    The mode belongs to the process, like torch's deterministic algorithms. A backward keeps the
    mode of its forward.
    """
    before = _Mode.exact
    _Mode.exact = on
    try:
        yield
    finally:
        _Mode.exact = before


def is_exact() -> bool:
    """Whether the mode is on."""
    return _Mode.exact


def limbs(x: Tensor) -> Tensor:
    """The limbs of each number, `[...]` → `[..., 3]`.

    Below 2⁻⁶¹ they round. A number that is not finite gives NaN.
    """
    rest, parts = x.to(torch.float64), []
    for quantum in QUANTA:
        part = (rest / quantum).round() * quantum
        parts.append(part)
        rest = rest - part
    return torch.stack(parts, -1)


def folded(x: Tensor) -> Tensor:
    """The numbers that limbs stand for, `[..., 3]` → `[...]`."""
    high, middle, low = x.unbind(-1)
    return (high + middle) + low


def as_limbs(x: Tensor) -> Tensor:
    """A 0-dim number as limbs `[3]` without splitting it; limbs as they are."""
    return x if x.dim() else torch.stack([x, torch.zeros_like(x), torch.zeros_like(x)])


def added(a: Tensor, b: Tensor) -> Tensor:
    """`a + b`, each a 0-dim number or limbs."""
    return a + b if a.dim() == b.dim() else as_limbs(a) + as_limbs(b)


def total(x: Tensor, start: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """`start + Σ x`, in `dtype`: 0-dim, but limbs `[3]` in the exact mode."""
    if not is_exact():
        sums = x.sum(dtype=dtype)
        return sums if start is None else sums + start
    sums = limbs(x.detach().reshape(-1)).sum(0)
    return sums if start is None else sums + as_limbs(start.to(torch.float64))


class _ExactTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return folded(limbs(x.reshape(-1)).sum(0)).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return grads[0].to(ctx.dtype).expand(ctx.shape)


def exact_total(x: Tensor) -> Tensor:
    """`Σ x`, 0-dim, with its gradient: the same bits for every layout of the same numbers."""
    out: Tensor = _ExactTotal.apply(x)  # type: ignore[no-untyped-call]
    return out


def sigmoid(x: Tensor) -> Tensor:
    """`1 / (1 + e⁻ˣ)`. torch's own has other bits at the end of a tensor, on a CPU."""
    return 1 / (1 + torch.exp(-x)) if is_exact() else torch.sigmoid(x)
