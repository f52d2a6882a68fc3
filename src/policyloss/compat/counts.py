"""Counts and shares as frameworks treat them: a 1e-8 that guards a count, dtypes, types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputTypeError
from policyloss.records import Record, Stat


def guard(mask: Tensor) -> float:
    """What `mask.sum() + 1e-8` adds to a count.

    In float64 it adds 1e-8. The count of any other mask — bool, integer, float32 — becomes float32,
    in which n + 1e-8 is n: there the guard only keeps 0/0 from being NaN, as 1e-30 does.
    """
    return 1e-8 if mask.dtype == torch.float64 else 1e-30


def share(x: Tensor, mask: Tensor) -> Tensor:
    """A share of tokens in a framework's dtype: flags are float32, so the share is float64 only if
    the mask is.
    """
    return x.to(torch.float64 if mask.dtype == torch.float64 else torch.float32)


def number(x: Any) -> Any:
    """A count: a tensor as it is, a Python number or a numpy scalar as a Python number."""
    return x if isinstance(x, Tensor) or not hasattr(x, "item") else x.item()


def together(*shares: Record) -> Stat:
    """The share of the union of disjoint sets, such as clipped above and clipped below."""
    stats = [s for s in shares if isinstance(s, Stat)]
    if len(stats) < len(shares) or not stats:
        raise InputTypeError(
            "together adds shares (Stat), got "
            f"{', '.join(type(s).__name__ for s in shares) or 'nothing'}"
        )
    return Stat(sum((s.sum for s in stats), torch.zeros_like(stats[0].sum)), stats[0].count)


def guarded_mean(record: Record, epsilon: float) -> Tensor:
    """`sum / (count + epsilon)` of a mean, so that the mean of nothing is 0 and not NaN. 0-dim."""
    assert isinstance(record, Stat)
    total, count = record.numbers
    return total / (count + epsilon)
