"""What TRL's trainer computes beside its loss: the counts of a step from one micro-batch, tokens
without a score, and the terms of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.masking import accumulator_dtype


def tokens_in(mask: Tensor, calls: int = 1, ranks: int = 1) -> Tensor:
    """The tokens of a step of `calls` micro-batches on `ranks` ranks, if each has as many as `mask`
    (at least 1). 0-dim.
    """
    return mask.sum().clamp(min=1).to(accumulator_dtype(mask.device)) * calls * ranks


def rows_in(mask: Tensor, calls: int = 1, ranks: int = 1) -> int:
    """Rows of such a step, empty ones included. mask: padded `[B, T]`."""
    return mask.shape[0] * calls * ranks


def tokens_of_window(items: Tensor, ranks: int, calls: int, generated: int) -> Tensor:
    """Tokens of one accumulation window over all ranks, from those of a generation batch:
    `max(items, 1)·calls / generated`. 0-dim.

    items: valid tokens of the generation batch over all ranks. It is cut into `generated`
    micro-batches per rank, of which `calls` are accumulated into one step. The share of one rank is
    rounded to float32, as TRL computes it, then counted for all of them.
    """
    share = items.clamp(min=1.0) / ranks * calls / generated
    return share.to(accumulator_dtype(items.device)) * ranks


def where_scored(logp: Tensor, instead: Tensor) -> Tensor:
    """`logp`, or `instead` where the engine reported NaN for a token. Token-shaped."""
    return torch.where(logp.isnan(), instead.to(logp.dtype), logp)


def exchanged(total: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A sum with one of its terms replaced: `total − old + new`. `old` is the value that `total`
    contains, without its gradient.
    """
    return total + (new - old.detach())


def likelihood_loss(
    logp: Tensor, mask: Tensor, items: Tensor | int | None, aux: Tensor | None, coef: float
) -> Tensor:
    """The loss that TRL's fused head returns: `−Σ logp / items`, the router loss added. items: by
    default the tokens of `mask`.
    """
    count = mask.sum().clamp(min=1) if items is None else items
    loss = -logp.sum() / count
    return loss if aux is None else loss + coef * aux


def last(x: Tensor, count: int) -> Tensor:
    """The last `count` entries of each row. `[B, T, …]` → `[B, count, …]`"""
    return x[:, x.shape[1] - count :]


def at_the_end(x: Tensor, like: Tensor) -> Tensor:
    """`x` at the end of rows as long as those of `like`, 0 before. `[B, n]` → `[B, T]`"""
    return torch.nn.functional.pad(x, (like.shape[1] - x.shape[1], 0))
