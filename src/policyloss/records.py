"""A metric as a record of sums or extremes, which merges over micro-batches and ranks; nothing is
divided before its value is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from policyloss.arguments import description, is_compiling
from policyloss.errors import InputError, InputTypeError
from policyloss.functional.exact import QUANTA, add, fold
from policyloss.functional.masking import accumulator_dtype

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Record:
    """A metric as sufficient statistics: 0-dim tensors, and the value that they stand for.

    Records of one kind merge by one operation. In the exact mode a sum is limbs `[3]`.
    """

    op: ClassVar[str] = "sum"

    def __post_init__(self) -> None:
        if is_compiling():  # a compiler traces only records of the loss
            return
        device = None
        for name, part in self.__dict__.items():
            dense = isinstance(part, Tensor) and part.layout == torch.strided
            real = dense and not part.is_complex() and part.shape in ((), (len(QUANTA),))
            if not real or part.device != (device or part.device):
                what = f"a tensor that holds one real number, got {description(part)}"
                raise InputError(f"{type(self).__name__}.{name} must be {what}.")
            device = part.device

    @property
    def value(self) -> Tensor:
        """The metric, as a 0-dim tensor on the device. NaN where nothing was counted."""
        raise AssertionError("each kind of record defines its value")  # pragma: no cover

    @property
    def wide(self) -> tuple[Tensor, ...]:
        """The parts in a dtype wide enough for exact counts and for quotients of integers."""
        return tuple(p.to(accumulator_dtype(p.device)) for p in self.parts)

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        """The parts as 0-dim numbers, wide as in `wide`."""
        return tuple(fold(p) if p.dim() else p for p in self.wide)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that merge."""
        return tuple(getattr(self, f.name) for f in fields(self))

    @classmethod
    def nothing(cls, device: torch.device, dtype: torch.dtype) -> Record:
        """The record of no token. Merging it changes nothing."""
        empty = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[cls.op]
        return cls(*(torch.full((), empty, device=device, dtype=dtype) for _ in fields(cls)))

    def merge(self, other: Record) -> Record:
        """Merge two records. Sums are in float64, so long runs do not lose counts."""
        if type(self) is not type(other):
            kinds = f"{type(self).__name__} with {type(other).__name__}"
            raise InputTypeError(f"cannot merge {kinds}; keep records of two kinds apart.")
        combine = _COMBINE[self.op]
        return type(self)(*(combine(a, b) for a, b in zip(self.wide, other.wide, strict=True)))

    def __float__(self) -> float:
        return float(self.value)

    def item(self) -> float:
        """The value as a Python float (one host sync)."""
        return float(self)


@dataclass(frozen=True)
class Stat(Record):
    """A metric that is a mean, `sum / count`; merging adds up both."""

    sum: Tensor
    count: Tensor

    @property
    def value(self) -> Tensor:
        total, count = self.numbers
        return total / count


@dataclass(frozen=True)
class Sum(Record):
    """A total: counts of tokens, and the loss itself."""

    total: Tensor

    @property
    def value(self) -> Tensor:
        return fold(self.total) if self.total.dim() else self.total


@dataclass(frozen=True)
class Invalid(Sum):
    """A count of certain mistakes, taken without waiting; `Metrics.compute` raises unless 0."""


@dataclass(frozen=True)
class Max(Record):
    """A maximum; −inf stands for "nothing seen" and reads as NaN."""

    op: ClassVar[str] = "max"
    highest: Tensor

    @property
    def value(self) -> Tensor:
        return torch.where(self.highest == float("-inf"), float("nan"), self.highest)


@dataclass(frozen=True)
class Min(Record):
    """A minimum; +inf stands for "nothing seen" and reads as NaN."""

    op: ClassVar[str] = "min"
    lowest: Tensor

    @property
    def value(self) -> Tensor:
        return torch.where(self.lowest == float("inf"), float("nan"), self.lowest)


@dataclass(frozen=True)
class EffectiveSampleSize(Record):
    """Kish's effective sample size as a fraction, `(Σw)² / (n·Σw²)`; 1 if all weights are equal."""

    weights: Tensor
    squares: Tensor
    count: Tensor

    @property
    def value(self) -> Tensor:
        weights, squares, count = self.numbers
        return weights**2 / (count * squares)


@dataclass(frozen=True)
class ExplainedVariance(Record):
    """`1 − Var(target − prediction) / Var(target)`, from raw moments summed in float64.

    NaN if the target does not vary.
    """

    count: Tensor
    error: Tensor
    error_squares: Tensor
    target: Tensor
    target_squares: Tensor

    @property
    def value(self) -> Tensor:
        count, error, error_squares, target, target_squares = self.numbers

        def variance(total: Tensor, squares: Tensor) -> Tensor:
            return squares / count - (total / count) ** 2

        spread = variance(target, target_squares)
        # No more than the rounding of the moments.
        constant = spread <= 8 * torch.finfo(spread.dtype).eps * target_squares / count
        return torch.where(constant, torch.nan, 1 - variance(error, error_squares) / spread)


KINDS: dict[str, type[Record]] = {
    kind.__name__: kind
    for kind in (Stat, Sum, Invalid, Max, Min, EffectiveSampleSize, ExplainedVariance)
}
