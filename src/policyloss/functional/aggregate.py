"""Aggregation, `loss = Σ_t weight_t · loss_t`. Weights depend on the mask and on counts only."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.exact import arithmetic
from policyloss.functional.segments import Sequences


def reciprocal(
    count: Tensor | float, like: Tensor, dtype: torch.dtype | None = None, times: float = 1
) -> Tensor:
    """`times / count`, and `times` where the count is 0: a sum over no tokens then stays 0.

    The result is on the device of `like`, in `dtype` (by default that of `like`).
    """
    dtype = like.dtype if dtype is None else dtype
    if isinstance(count, Tensor):
        x = count.to(like.device, dtype)
        x = x + (x == 0)
    else:
        x = torch.full((), float(count) or 1.0, device=like.device, dtype=dtype)
    inverse = x.reciprocal()
    return inverse if isinstance(times, int) and times == 1 else times * inverse


def per_sequence_mean(lengths: Tensor, sequences: Sequences) -> Tensor:
    """Weights `1 / length` for each token: the weighted sum of a sequence is then its mean."""
    return sequences.expand(reciprocal(lengths, lengths))


def check_alignment(rule: str, x: Tensor, tokens: Tensor) -> None:
    """Raise if `x` would be broadcast along the wrong axis: `[B]` has one number per row."""
    if x.dim() not in (0, tokens.dim()):
        shape = tuple(tokens.shape)
        raise InputError(
            f"{rule}, shape {shape}; got shape {tuple(x.shape)}. Give numbers per sequence to each "
            "token by t.sequences.expand(…)."
        )


def weighted_total(
    x: Tensor, weight: Tensor, shared: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The two factors of `Σ weight·x·shared`: a total, and a 0-dim scale if there is one.

    A weight that is one number for all tokens becomes the scale. Weights per token are multiplied
    into the total, and `shared` (0-dim), their common factor, becomes the scale.
    """
    check_alignment("an aggregation must return one weight, or one per token", weight, x)
    return arithmetic().weighted_total(x, weight, shared)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """`Σ weight·x`. `x` must be 0 at masked positions (see `fill`)."""
    sums, scale = weighted_total(x, weight)
    return sums if scale is None else sums * scale
