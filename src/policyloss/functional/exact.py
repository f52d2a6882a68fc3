"""The mode in which equal inputs give equal bits, however a batch is cut, padded, packed or spread.

Floating-point addition depends on its order, so a sum over tokens depends on the layout. Here each
number is split into three multiples of fixed powers of two, its limbs. Sums of limbs are exact in
float64, whatever their order, so they are the same for every cut of a step; what is rounded is
their result.

Legend: `[..., 3]` limbs, float64: multiples of 1, 2⁻³⁰ and 2⁻⁶⁰.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from functools import wraps
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from policyloss.arguments import check_flag
from policyloss.functional.collectives import all_max, all_sum

# The limbs of one number but the first are at most half of the quantum before, 2²⁹ of their own.
# Sums of 2²⁴ of them fit into the 53 bits of a float64; so do those of the first up to 9e15.
QUANTA = (1.0, 2.0**-30, 2.0**-60)
F = TypeVar("F", bound=Callable[..., Any])


class _Mode:
    exact = False
    open_blocks: list[_Block] = []  # noqa: RUF012, of the process
    lock = Lock()


class _Block(ContextDecorator):
    """The block that began last decides; threads may leave theirs in any order."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __enter__(self) -> None:
        with _Mode.lock:
            _Mode.open_blocks.append(self)
            _Mode.exact = self.on

    def __exit__(self, *error: object) -> None:
        with _Mode.lock:
            blocks = _Mode.open_blocks
            del blocks[max(i for i, block in enumerate(blocks) if block is self)]
            _Mode.exact = blocks[-1].on if blocks else False


def exact(on: bool = True) -> _Block:
    """Within this context equal inputs give equal bits: `with policyloss.exact(): …`.

    The log-probability, entropy and gradient of a token do not depend on the tokens beside it, and
    the loss and metrics of a step do not depend on how it was cut into calls, padded or packed, or
    spread over processes. `docs/bits.md` says what is promised, what it costs, and what is not.
    The mode belongs to the process, like torch's deterministic algorithms; of the blocks that are
    open, in any thread, the one that began last decides. A backward keeps the mode of its forward.
    `@policyloss.exact()` above a function puts its calls into such a block.
    """
    check_flag("on", on)
    return _Block(on)


def is_exact() -> bool:
    """Whether the mode is on."""
    return _Mode.exact


def stays_eager(function: F) -> F:
    """`function`, which in the exact mode no compiler traces.

    A compiler chooses kernels and the order of sums by itself, and the bits would follow from the
    shape.
    """

    @wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if is_exact() and torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return cast(F, eager)


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


def unit_of(top: Tensor) -> Tensor:
    """The power of two by which numbers of at most this size become smaller than 2²⁸.

    Measured in it, a sum over numbers that are all there keeps its digits, however small or large
    they are, and stays exact: 2²⁴ numbers sum up to less than 2⁵³. It is 1 where `top` is 0 or not
    finite. `[...]` → `[...]`, float64.
    """
    wide = top.to(torch.float64)
    has_size = wide.isfinite() & (wide != 0)
    exponent = torch.frexp(torch.where(has_size, wide, 1)).exponent
    one = torch.ones_like(wide)
    # Within what a float64 can hold, and its inverse, too.
    unit = torch.ldexp(one, (exponent - 28).clamp(-1000, 1000))
    return torch.where(has_size, unit, one)


def exact_sum(x: Tensor, *groups: Any) -> Tensor:
    """`Σ x` over this rank and those of every group, 0-dim, float64, without a gradient.

    The same bits for every layout of the same numbers.
    """
    flat = x.detach().reshape(-1).to(torch.float64)
    top = flat.abs().amax() if flat.numel() else flat.sum()
    shared = [group for group in groups if group is not None]
    for group in shared:
        top = all_max(top, group)
    unit = unit_of(top)
    sums = limbs(flat / unit).sum(0)
    for group in shared:
        sums = all_sum(sums, group)
    return folded(sums) * unit


class _ExactTotal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return exact_sum(x).to(x.dtype)

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
