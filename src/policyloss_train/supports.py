"""What each token of a completion was drawn from: the entries that top-p and top-k kept.

A pair (ids int32 `[K]`, offsets int64 `[L+1]`), as `policyloss.logprobs` takes it as `support`:
token t was drawn from `ids[offsets[t]:offsets[t+1]]`. It is ragged, because masks `[L, V]` of a
vocabulary of 150,000 entries would be a thousand times as large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.head.support import Support

Pair = tuple[Tensor, Tensor]


def first_tokens(support: Pair, n: int) -> Pair:
    """The support of the first n tokens, in memory of its own."""
    ids, offsets = support
    return ids[: int(offsets[n])].clone(), offsets[: n + 1].clone()


def problem_of(support: Any, tokens: Tensor, vocabulary: int) -> str | None:
    """What is wrong with a pair that is said to be the support of `tokens` `[L]`; None if nothing
    is.
    """
    try:
        pair = Support.of(support, tokens)
    except InputError as error:
        return str(error)
    if pair is None:
        return None
    outside, unknown = pair.faults(tokens, None, vocabulary).tolist()
    if unknown:
        return f"its support has {unknown} ids that are not below {vocabulary}"
    return f"{outside} tokens are not in their own support" if outside else None


class Kept:
    """Collects the supports of a batch while it is sampled: row and id of every entry."""

    def __init__(self, rows: int) -> None:
        self._count = rows
        self._rows: list[Tensor] = []
        self._ids: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def add(self, rows: Tensor, kept: Tensor) -> None:
        """The next token of some rows. kept: what it was drawn from, bool `[len(rows), V]`."""
        place, ids = kept.nonzero(as_tuple=True)
        self._rows.append(rows[place])
        self._ids.append(ids.to(torch.int32))
        sizes = torch.zeros(self._count, dtype=torch.int64, device=kept.device)
        self._sizes.append(sizes.index_copy(0, rows, kept.sum(-1)))

    def pairs(self) -> list[Pair] | list[None]:
        """The support of each row, on the CPU; None for all if every token could be drawn."""
        if not self._ids:
            return [None] * self._count
        # Entries lie token after token; a stable sort by row leaves those of a row in that order.
        ids = torch.cat(self._ids)[torch.cat(self._rows).argsort(stable=True)].cpu()
        sizes = torch.stack(self._sizes, 1).cpu()
        offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
        return [*zip(torch.split(ids, sizes.sum(1).tolist()), offsets, strict=True)]
