"""Completions that are too long or were cut, and tokens of high entropy. Legend: S sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.advantage.groups import shared_groups
from policyloss.arguments import check_number, check_tensor, description
from policyloss.errors import InputError
from policyloss.functional.collectives import gather_rows
from policyloss.functional.exact import stays_eager
from policyloss.functional.masking import accumulator_dtype, compute_dtype
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask


@torch.no_grad()
def soft_overlong(lengths: Tensor, limit: float, buffer: float, coef: float = 1.0) -> Tensor:
    """`−coef·clip((L − (limit − buffer)) / buffer, 0, 1)`: a penalty to add to the rewards, `[S]`.

    Up to `limit − buffer` tokens are free; from there the penalty falls linearly to −coef at
    `limit`, and stays there.
    lengths: `[S]`, the tokens of each completion.
    Source: DAPO, arXiv 2503.14476, equation 13; the overlong buffer of verl, OpenRLHF and AReaL
    (verl's and AReaL's penalty goes on falling beyond `limit`).
    """
    check_tensor("lengths", lengths)
    check_number("buffer", buffer, above=0, finite=True)
    check_number("limit", limit, least=buffer, finite=True)
    check_number("coef", coef, least=0, finite=True)
    excess = (lengths.to(compute_dtype(lengths)) - (limit - buffer)) / buffer
    return -coef * excess.clamp(0, 1)


@torch.no_grad()
def mask_truncated(mask: Tensor, truncated: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """`mask` without the sequences that were cut at the token limit; bool.

    Pass this mask to `Totals.count`, not the original mask: otherwise the average still divides by
    the tokens of the cut sequences.
    mask: `[B, T]`, or packed `[N]` with `cu_seqlens`. truncated: `[S]` flags.
    Source: DAPO's overlong filtering; TRL's mask_truncated_completions.
    """
    sequences = Sequences.of(mask, cu_seqlens, called="mask")
    check_tensor("truncated", truncated, like=("mask", mask))
    if truncated.shape != (shape := (sequences.count,)):
        got = description(truncated)
        raise InputError(f"truncated must have one flag per sequence, {shape}, got {got}.")
    return as_mask(mask, mask, like_called="mask") & ~sequences.spread(truncated.bool())


@stays_eager
@torch.no_grad()
def top_entropy_mask(
    entropy: Tensor,
    mask: Tensor,
    share: float = 0.2,
    *,
    group: Any = None,
    cp_group: Any = None,
) -> Tensor:
    """A bool mask of the valid tokens with the highest entropies, `share` of all valid tokens.

    A token is kept if its entropy is at least the `1 − share` quantile of the whole step. So pass
    all micro-batches in one call; `group` and `cp_group` include other ranks, as in `whiten`. With
    the result `keep`,
    `torch.where(keep, advantages, 0)` drops the policy term of the other tokens, which still count
    in the average of the loss.
    entropy, mask: any shape, the same for both.
    Source: arXiv 2506.01939; TRL's top_entropy_quantile (there per micro-batch).
    """
    check_tensor("entropy", entropy, "float")
    check_number("share", share, above=0, most=1)
    valid = as_mask(mask, entropy, like_called="entropy")
    wide = entropy.detach().to(accumulator_dtype(entropy.device))
    values = wide[valid]
    for ranks in shared_groups(group, cp_group):
        (values,), _ = gather_rows([values], ranks)
    if values.numel() == 0:
        return valid
    # torch.quantile refuses more than 16 million numbers.
    ordered, place = values.sort().values, (1 - share) * (values.numel() - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, values.numel() - 1)]
    return valid & (wide >= torch.lerp(low, high, place - int(place)))
