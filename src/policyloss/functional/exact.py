"""The exact mode: equal inputs give equal bits, however a batch is split, padded or packed.

Floating-point addition depends on its order, so a sum over tokens depends on the layout. Here each
number is split into three multiples of fixed powers of two, its limbs. Sums of limbs are exact in
float64 in any order, so they are the same however a step is split; only their result is rounded.

`arithmetic()` returns the functions of the current mode: `Arithmetic` sums in torch's order,
`_ExactArithmetic` by limbs.

Legend: `[..., 3]` limbs, float64: multiples of 1, 2⁻³⁰ and 2⁻⁶⁰.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import replace
from functools import wraps
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from policyloss.arguments import check_flag
from policyloss.functional.collectives import all_max, all_sum
from policyloss.functional.masking import accumulator_dtype

if TYPE_CHECKING:
    from policyloss.functional.segments import Sequences

# Every limb of a number but the first is at most half of the quantum before it, so at most 2²⁹
# quanta. Sums of 2²⁴ of them fit into the 53 bits of a float64; so do sums of the first limbs up to
# 9e15.
QUANTA = (1.0, 2.0**-30, 2.0**-60)
F = TypeVar("F", bound=Callable[..., Any])


def limbs(x: Tensor) -> Tensor:
    """The limbs of each number, `[...]` → `[..., 3]`.

    Digits below 2⁻⁶¹ are rounded. The limbs of a number that is not finite are NaN.
    """
    rest, parts = x.to(torch.float64), []
    for quantum in QUANTA:
        part = (rest / quantum).round() * quantum
        parts.append(part)
        rest = rest - part
    return torch.stack(parts, -1)


def fold(x: Tensor) -> Tensor:
    """The numbers that limbs stand for, `[..., 3]` → `[...]`."""
    high, middle, low = x.unbind(-1)
    return (high + middle) + low


def as_limbs(x: Tensor) -> Tensor:
    """A 0-dim number as limbs `[3]`, without splitting it. Limbs are returned unchanged."""
    return x if x.dim() else torch.stack([x, torch.zeros_like(x), torch.zeros_like(x)])


def add(a: Tensor, b: Tensor) -> Tensor:
    """`a + b`, each a 0-dim number or limbs."""
    return a + b if a.dim() == b.dim() else as_limbs(a) + as_limbs(b)


def unit_of(top: Tensor) -> Tensor:
    """The power of two by which numbers of at most this size become smaller than 2²⁸.

    Measured in it, a sum keeps its digits however small or large its numbers are, and stays exact:
    2²⁴ numbers sum up to less than 2⁵³. It is 1 where `top` is 0 or not finite.
    `[...]` → `[...]`, float64.
    """
    wide = top.to(torch.float64)
    has_size = wide.isfinite() & (wide != 0)
    exponent = torch.frexp(torch.where(has_size, wide, 1)).exponent
    one = torch.ones_like(wide)
    # A float64 must hold the unit and its inverse.
    unit = torch.ldexp(one, (exponent - 28).clamp(-1000, 1000))
    return torch.where(has_size, unit, one)


def exact_sum(x: Tensor, *groups: Any) -> Tensor:
    """`Σ x` over this rank and the ranks of every group, 0-dim, float64, without a gradient.

    The result has the same bits for every layout of the same numbers.
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
    return fold(sums) * unit


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


def _exact_sequence_sum(x: Tensor, sequences: Sequences, group: Any) -> Tensor:
    """The sum of each sequence `[S]`, over the ranks of `group`, rounded once."""
    unit = unit_of(replace(sequences, cp_group=group).max(x.abs()))
    parts = limbs(x.to(torch.float64) / sequences.spread(unit))
    if sequences.offsets is None:
        sums = parts.sum(-2)
    else:
        how: Any = {"offsets": sequences.offsets, "axis": 0, "unsafe": True, "initial": 0}
        sums = torch.segment_reduce(parts.reshape(-1, parts.shape[-1]), "sum", **how)
    return (fold(all_sum(sums, group)) * unit).to(x.dtype)


class _ExactSequenceSum(torch.autograd.Function):
    """The exact sum of each sequence. Its adjoint gives each token the gradient of its sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return _exact_sequence_sum(x, sequences, sequences.cp_group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        sequences = ctx.sequences
        # Every rank's loss reads the sum, so gradients are summed over ranks, too.
        return sequences.spread(all_sum(grads[0], sequences.cp_group)), None


class _ExactSpread(torch.autograd.Function):
    """`Sequences.spread` with an exact sum on this rank as its adjoint."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, sequences: Sequences) -> Tensor:
        ctx.sequences = sequences
        return sequences.spread(s)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _exact_sequence_sum(grads[0], ctx.sequences, None), None


class Arithmetic:
    """Sums in the order that torch chooses."""

    is_exact: ClassVar[bool] = False

    def total(
        self, x: Tensor, start: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """`start + Σ x`, in `dtype`: 0-dim, or limbs `[3]`, which records merge."""
        sums = x.sum(dtype=dtype)
        return sums if start is None else sums + start

    def totals_over(
        self, groups: Sequence[Any], *xs: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        """The sums of `xs` over this rank and the ranks of every group, 0-dim each, in `dtype`."""
        sums = torch.stack([self.total(x, dtype=dtype) for x in xs])
        for group in groups:
            sums = all_sum(sums, group)
        return sums.unbind()

    def scaled_totals_over(self, groups: Sequence[Any], *xs: Tensor) -> tuple[Tensor, ...]:
        """`totals_over` for numbers of any size; may take one more collective for each of `xs`."""
        return self.totals_over(groups, *xs)

    def weighted_total(
        self, x: Tensor, weight: Tensor, shared: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See `functional.aggregate.weighted_total`."""
        return (x.sum(), weight) if weight.dim() == 0 else ((x * weight).sum(), shared)

    def step_share(
        self, x: Tensor, weight: Tensor, shared: Tensor | None, loss: Tensor, dp_size: float
    ) -> Tensor:
        """The part of the step's loss that this call adds: `loss / dp_size`.

        loss: `Σ weight·x·shared`. The result is 0-dim, or limbs `[3]`, which records merge.
        """
        loss = loss.detach()
        return loss if isinstance(dp_size, int) and dp_size == 1 else loss / dp_size

    def sequence_sum(self, x: Tensor, sequences: Sequences) -> Tensor:
        """See `Sequences.sum`."""
        return sequences.across(sequences.sum_here(x))

    def sequence_sums(self, xs: Sequence[Tensor], sequences: Sequences) -> tuple[Tensor, ...]:
        """See `Sequences.sums`."""
        here = [sequences.sum_here(x) for x in xs]
        if sequences.cp_group is None:
            return tuple(here)
        together = sequences.across(torch.stack([s.to(accumulator_dtype(s.device)) for s in here]))
        return tuple(total.to(s.dtype) for total, s in zip(together.unbind(), here, strict=True))

    def expand(self, s: Tensor, sequences: Sequences) -> Tensor:
        """`Sequences.expand` of numbers that carry a gradient."""
        return sequences.spread(s)

    def record_sum(self, sums: Tensor) -> Tensor:
        """A record's sum from its limbs `[3]`: 0-dim, or the limbs in the exact mode."""
        return fold(sums)

    def sigmoid(self, x: Tensor) -> Tensor:
        """`1 / (1 + e⁻ˣ)`."""
        return torch.sigmoid(x)


class _ExactArithmetic(Arithmetic):
    """Sums by limbs: the same bits for every layout of the same numbers."""

    is_exact: ClassVar[bool] = True

    def total(
        self, x: Tensor, start: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        sums = limbs(x.detach().reshape(-1)).sum(0)
        return sums if start is None else sums + as_limbs(start.to(torch.float64))

    def totals_over(
        self, groups: Sequence[Any], *xs: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, ...]:
        return tuple(map(fold, super().totals_over(groups, *xs)))

    def scaled_totals_over(self, groups: Sequence[Any], *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(exact_sum(x, *groups) for x in xs)

    def weighted_total(
        self, x: Tensor, weight: Tensor, shared: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return exact_total(_products(x, weight, shared)).to(x.dtype), None

    def step_share(
        self, x: Tensor, weight: Tensor, shared: Tensor | None, loss: Tensor, dp_size: float
    ) -> Tensor:
        return self.total(_products(x, weight, shared) / dp_size)

    def sequence_sum(self, x: Tensor, sequences: Sequences) -> Tensor:
        if not x.is_floating_point():
            return super().sequence_sum(x, sequences)
        sums: Tensor = _ExactSequenceSum.apply(x, sequences)  # type: ignore[no-untyped-call]
        return sums

    def sequence_sums(self, xs: Sequence[Tensor], sequences: Sequences) -> tuple[Tensor, ...]:
        return tuple(self.sequence_sum(x, sequences) for x in xs)

    def expand(self, s: Tensor, sequences: Sequences) -> Tensor:
        spread: Tensor = _ExactSpread.apply(s, sequences)  # type: ignore[no-untyped-call]
        return spread

    def record_sum(self, sums: Tensor) -> Tensor:
        return sums

    def sigmoid(self, x: Tensor) -> Tensor:
        # torch.sigmoid has other bits at the end of a tensor, on a CPU.
        return 1 / (1 + torch.exp(-x))


def _products(x: Tensor, weight: Tensor, shared: Tensor | None) -> Tensor:
    weight = weight if shared is None else weight * shared
    return x.to(torch.float64) * weight.to(torch.float64)


_ORDINARY, _EXACT = Arithmetic(), _ExactArithmetic()


class _Mode:
    arithmetic: Arithmetic = _ORDINARY
    open_blocks: list[_Block] = []  # noqa: RUF012, of the process
    lock = Lock()


def arithmetic() -> Arithmetic:
    """The sums of the current mode."""
    return _Mode.arithmetic


class _Block(ContextDecorator):
    """A context of `exact`. The context that began last decides; threads may end in any order."""

    def __init__(self, on: bool) -> None:
        self.arithmetic = _EXACT if on else _ORDINARY

    def __enter__(self) -> None:
        with _Mode.lock:
            _Mode.open_blocks.append(self)
            _Mode.arithmetic = self.arithmetic

    def __exit__(self, *error: object) -> None:
        with _Mode.lock:
            blocks = _Mode.open_blocks
            del blocks[max(i for i, block in enumerate(blocks) if block is self)]
            _Mode.arithmetic = blocks[-1].arithmetic if blocks else _ORDINARY


def exact(on: bool = True) -> _Block:
    """Within this context equal inputs give equal bits: `with policyloss.exact(): …`.

    The log-probability, entropy and gradient of a token do not depend on the other tokens. The loss
    and metrics of a step do not depend on its split into micro-batches, on padding or packing, or
    on the number of processes. `docs/bits.md` lists the guarantees, the cost, and the exceptions.
    on: False turns the mode off within the context. The mode applies to all threads of the process,
    like torch's deterministic algorithms; if several contexts are open, in any threads, the one
    entered last decides. A backward runs in the mode of its forward. `@policyloss.exact()` above a
    function runs each call of that function in such a context.
    """
    check_flag("on", on)
    return _Block(on)


def is_exact() -> bool:
    """Whether the exact mode is on."""
    return _Mode.arithmetic.is_exact


def must_stay_eager() -> bool:
    """Whether a compiler traces a call in the exact mode. Its choice of kernels and of the order of
    sums would make the bits depend on the shape.
    """
    return torch.compiler.is_compiling() and is_exact()


def stays_eager(function: F) -> F:
    """`function`, which no compiler traces in the exact mode."""

    @wraps(function)
    def eager(*args: Any, **kwargs: Any) -> Any:
        if must_stay_eager():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return cast(F, eager)
