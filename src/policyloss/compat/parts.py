"""Parts, counts and shares that several frameworks' drop-ins compute alike, and ColossalChat's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.functional.segments import Sequences
from policyloss.inputs import Inputs
from policyloss.parts import validate
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.data import framework_part
from policyloss.parts.wording import number
from policyloss.records import Record, Stat
from policyloss.tokens import Layout, Tokens

EPSILON = 1e-8  # verl, OpenRLHF and ColossalChat add it to a count before dividing by it


@framework_part("aggregate", "parts")
@dataclass(frozen=True)
class GuardedSeqMeanTokenMean(SeqMeanTokenMean):
    """`SeqMeanTokenMean` with `epsilon` added to every length: `1 / (B·(L_i + epsilon))`.

    verl, OpenRLHF and ColossalChat compute it so.
    """

    epsilon: float

    def __post_init__(self) -> None:
        validate.check_field(self, "epsilon", above=0, finite=True)

    def __call__(self, t: Layout) -> Tensor:
        return super().__call__(t.with_lengths(t.lengths + self.epsilon))

    def averaged(self, x: str) -> str:
        """The mean of the per-token expression `x`, as `explain` prints it."""
        return f"sum({x} / (L + {number(self.epsilon)})) / B"


def sample_mean(mask_dtype: torch.dtype) -> SeqMeanTokenMean:
    """The mean over samples of their token means, as in OpenRLHF and ColossalChat.

    These add an epsilon to a count in the mask's precision, where it changes only a float64 count.
    """
    return GuardedSeqMeanTokenMean(EPSILON) if mask_dtype == torch.float64 else SeqMeanTokenMean()


def mask_or_all(mask: Tensor | None, like: Tensor) -> Tensor:
    """`mask`, or a mask of all positions if it is None."""
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def guard(mask: Tensor) -> float:
    """The number that `mask.sum() + 1e-8` adds to a count.

    For a float64 mask it is 1e-8. The count of any other mask (bool, integer, float32) is float32,
    where n + 1e-8 is n; the guard then only keeps 0/0 from being NaN, as 1e-30 does.
    """
    return 1e-8 if mask.dtype == torch.float64 else 1e-30


def as_share(x: Tensor, mask: Tensor) -> Tensor:
    """`x` in the dtype of a framework's share of tokens: float64 if the mask is, else float32."""
    return x.to(torch.float64 if mask.dtype == torch.float64 else torch.float32)


def as_count(x: Any) -> Any:
    """A count as a Python number; a tensor is returned unchanged, to avoid reading the device."""
    return x if isinstance(x, Tensor) or not hasattr(x, "item") else x.item()


def union_share(*shares: Record) -> Stat:
    """The share of the union of disjoint sets, such as clipped above and clipped below."""
    stats = [s for s in shares if isinstance(s, Stat)]
    return Stat(sum((s.sum for s in stats), torch.zeros_like(stats[0].sum)), stats[0].count)


def guarded_mean(record: Record, epsilon: float) -> Tensor:
    """`sum / (count + epsilon)` of a mean, which is 0 instead of NaN if nothing counts. 0-dim."""
    assert isinstance(record, Stat)
    total, count = record.numbers
    return total / (count + epsilon)


@dataclass(frozen=True, eq=False)
class GivenKL:
    """`beta` times a token-shaped penalty, which may carry a gradient."""

    kl: Tensor
    beta: float

    def __call__(self, t: Tokens) -> Tensor:
        return self.beta * self.kl.to(t.dtype)


def ratio_mean_and_max(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and maximum of the ratio over all positions; a masked one has ratio 1."""
    tokens = Inputs(
        logp=log_probs.detach(), advantages=advantages, mask=mask, old_logp=old_log_probs
    ).tokens()
    ratio = tokens.log_ratio_to("old").exp()
    return ratio.mean(), ratio.max()


def denominator(average: Any, mask: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """The number of tokens, or of sequences with a trained token, that `average` divides by."""
    lengths = Sequences.of(mask, cu_seqlens, called="mask").sum(mask)
    return lengths.sum() if average.divides_by == "tokens" else lengths.count_nonzero()


def slopes(reduction: Callable[[Tensor], Tensor], rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The factor of each number in an engine's sum over the joined `rows`, in the shapes of `rows`.

    reduction: the engine's sum, which is linear in its numbers.
    """
    numbers = torch.ones_like(torch.cat(list(rows))).detach().requires_grad_()
    with torch.enable_grad():
        (factors,) = torch.autograd.grad(reduction(numbers), numbers)
    return torch.split(factors, [len(row) for row in rows])
