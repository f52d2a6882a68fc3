"""Aggregation, `loss = Σ_t weight_t · loss_t`. Weights depend on the mask and on counts only."""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.exact import exact_total, is_exact, total
from policyloss.functional.segments import Sequences


def reciprocal(count: Tensor | float, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`1 / count`, and 1 where the count is 0: an empty batch has weight one and sum zero.

    The result is on the device of `like`, in `dtype` (by default that of `like`).
    """
    dtype = like.dtype if dtype is None else dtype
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), device=like.device, dtype=dtype)
    x = count.to(like.device, dtype)
    return torch.where(x == 0, 1, 1 / x)


def per_sequence_mean(lengths: Tensor, sequences: Sequences) -> Tensor:
    """Weights `1 / length`, token-shaped: with them, sums over tokens are means of sequences."""
    return sequences.expand(reciprocal(lengths, lengths))


def check_alignment(rule: str, x: Tensor, tokens: Tensor) -> None:
    """Raise if `x` would be broadcast along the wrong axis: `[B]` has one number per row."""
    if x.dim() not in (0, tokens.dim()):
        shape = tuple(tokens.shape)
        raise InputError(
            f"{rule}, shape {shape}; got shape {tuple(x.shape)}. Give numbers per sequence to each "
            "token by t.sequences.expand(…)."
        )


def weighted_total(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The two factors of `Σ weight·x`: a total and a 0-dim scale.

    One weight for all tokens becomes the scale; weights per token are multiplied into the total.
    """
    check_alignment("an aggregation must return one weight, or one per token", weight, x)
    if is_exact():
        return exact_total(_products(x, weight)).to(x.dtype), x.new_ones(())
    return (x.sum(), weight) if weight.dim() == 0 else ((x * weight).sum(), x.new_ones(()))


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """`Σ weight·x`. `x` must be 0 at masked positions (see `fill`)."""
    sums, scale = weighted_total(x, weight)
    return sums * scale


def step_share(x: Tensor, weight: Tensor, loss: Tensor, dp_size: float) -> Tensor:
    """What `loss = Σ weight·x` adds to the loss of the step: `loss / dp_size`, a sum to be merged.

    0-dim; in the exact mode limbs `[3]`.
    """
    if is_exact():
        return total(_products(x, weight) / dp_size)
    return loss.detach() / dp_size


def _products(x: Tensor, weight: Tensor) -> Tensor:
    return x.to(torch.float64) * weight.to(torch.float64)
