"""Rollout corrections: the inference engine's log-probabilities differ from the trainer's.

These are pure functions; their results carry no gradient.

Legend: `log_weight` = old_logp − rollout_logp, token-shaped, 0 at masked positions; a weight is
`exp` of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import accumulator_dtype, bound
from policyloss.functional.segments import Sequences


def importance_weight(log_weight: Tensor, log_clamp: float | None) -> Tensor:
    """`exp(log_weight)`, first clamped to ±log_clamp so that it stays finite; None: no clamp."""
    return bound(log_weight, log_clamp).exp()


def truncation_share(log_ratio: Tensor, low: float, high: float) -> Tensor:
    """`clamp(ρ, low, high) / ρ` with ρ = exp(log_ratio), whose logarithm is held within ±20."""
    ratio = importance_weight(log_ratio, 20.0)
    return ratio.clamp(min=low, max=high) / ratio


def within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """True where low ≤ x ≤ high (None: no bound) or x is NaN, so that NaN reaches the loss."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep = keep & ~(x < low)
    if high is not None:
        keep = keep & ~(x > high)
    return keep


def nan_where_undecided(x: Tensor) -> Tensor:
    """The weight of tokens that were tested by `x`: 1, but NaN where `x` is NaN.

    A token with NaN can be neither kept nor dropped, so the loss must become NaN.
    """
    return torch.where(x.isnan(), x, 1)


def reduced(
    x: Tensor, reduce: str, mask: Tensor, lengths: Tensor | None, sequences: Sequences
) -> Tensor:
    """`x`, or its sum, mean or maximum over each sequence's valid tokens, repeated at each token.

    reduce: "token" (`x` itself), "sum", "mean" or "max". lengths: the number of valid tokens of
    each sequence, `[S]`, which only "mean" reads.
    """
    if reduce == "token":
        return x
    if reduce == "max":
        return sequences.expand(sequences.max(torch.where(mask, x, float("-inf"))))
    total = sequences.sum(x)
    if reduce == "sum":
        return sequences.expand(total)
    if lengths is None:
        raise InputError(
            f"reduce={reduce!r} divides by lengths, which was not given; pass the valid tokens of "
            "each sequence."
        )
    return sequences.expand(total / lengths.clamp(min=1))


def any_in_sequence(hit: Tensor, sequences: Sequences) -> Tensor:
    """True at every token of a sequence in which `hit` is True anywhere."""
    return sequences.expand(sequences.sum(hit)) > 0


def budget_bound(x: Tensor, mask: Tensor, budget: float, *groups: Any) -> Tensor:
    """The largest bound such that the numbers below it have a mean below `budget`, 0-dim.

    x: not negative, token-shaped; the valid tokens of all ranks of every group count. inf if all of
    them fit; 0, below which there is no number, if the smallest does not.
    The bound is searched by bisection over the floats, so no token travels between ranks.
    """
    bits = {torch.float32: torch.int32, torch.float64: torch.int64}[x.dtype]
    # The bits of floats that are not negative have the order of the floats.
    low = torch.zeros((), dtype=bits, device=x.device)
    high = torch.full((), torch.inf, dtype=x.dtype, device=x.device).view(bits) + 1
    for _ in range(torch.iinfo(bits).bits - 1):
        middle = low + (high - low) // 2
        below = mask & (x < middle.view(x.dtype))
        terms = (torch.where(below, x, 0), below)
        total, count = arithmetic().totals_over(groups, *terms, dtype=accumulator_dtype(x.device))
        fits = (total < budget * count) | (count == 0)
        low, high = torch.where(fits, middle, low), torch.where(fits, high, middle)
    return low.view(x.dtype)
