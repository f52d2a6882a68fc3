"""Sequences whose tokens lie on several ranks: turns that cross ranks, and scans over time.

A position is the index of a token in its whole sequence; the ranks may hold tokens in any order.
Only the positions of *valid* tokens are read; padding and masked tokens may have any position, and
masked tokens may be absent. A position at which no rank has a valid token counts as masked. Two
valid tokens of a sequence at one position are an error.

Legend: `x` token-shaped (`[B, T]` or `[N]`), n valid tokens on this rank, M on all ranks, S
sequences (the same on every rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_like
from policyloss.errors import InputError
from policyloss.functional.collectives import gather_rows
from policyloss.functional.segments import Sequences


def turns(
    sequences: Sequences, mask: Tensor, positions: Tensor | None, turn_ids: Tensor | None = None
) -> Sequences | _SortedTurns:
    """The R turns: the valid tokens of a sequence with one of `turn_ids`; without ids, the runs of
    `mask`, which are neighbouring tokens, or tokens at consecutive `positions`.

    Positions are read only if the sequences have a context-parallel group, and no turn_ids.
    """
    if turn_ids is not None:
        return _turns_by_id(sequences, mask, turn_ids)
    if sequences.cp_group is None:
        return sequences.runs(mask)
    return _turns_across(sequences, mask, checked_positions(positions, mask, "a turn"))


def checked_positions(positions: Tensor | None, tokens: Tensor, reader: str) -> Tensor:
    """`positions`, or an error unless they are one integer per token. reader: who needs them."""
    if positions is None:
        raise InputError(
            f"{reader} depends on the order of tokens, and with cp_group they lie on several "
            "ranks: pass positions=, each token's place in its whole sequence."
        )
    place = "give each token's place in its whole sequence"
    check_like("positions", positions, ("tokens", tokens), "integer", place)
    return positions


@dataclass(frozen=True)
class _SortedTurns:
    """Turns whose tokens are not neighbours, or lie on several ranks.

    runs: over this rank's tokens, sorted by turn; masked tokens are in a run of their own. order:
    the permutation that sorts the tokens. back: its inverse.
    """

    runs: Sequences
    order: Tensor
    back: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor, count: int, mask: Tensor, cp_group: Any) -> _SortedTurns:
        """From the turn of each token, flat; `count` for masked tokens."""
        ordered, order = torch.sort(ids, stable=True)
        offsets = torch.searchsorted(ordered, torch.arange(count + 2, device=ids.device))
        runs = Sequences((mask.numel(),), offsets, ordered, cp_group)
        return cls(runs, order, _inverse(order), tuple(mask.shape))

    def sums(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Token-shaped → `[R]` each, over all ranks; `xs` must be 0 at masked tokens."""
        return self.runs.sums(*(x.reshape(-1)[self.order] for x in xs))

    def expand(self, s: Tensor) -> Tensor:
        """`[R]` → token-shaped."""
        return self.runs.expand(s)[self.back].view(self.shape)


class _Spans(NamedTuple):
    """Intervals of positions without a gap, from `first` to `last` of a `sequence`.

    span_of: the interval that each item is in.
    """

    span_of: Tensor
    sequence: Tensor
    first: Tensor
    last: Tensor


def _joined_spans(sequence: Tensor, first: Tensor, last: Tensor) -> _Spans:
    """Join intervals where one begins right after another ends."""
    order = _order_by_position(sequence, first)
    sequence, first, last = sequence[order], first[order], last[order]
    begins, ends = (torch.ones_like(order, dtype=torch.bool) for _ in range(2))
    begins[1:] = (sequence[1:] != sequence[:-1]) | (first[1:] != last[:-1] + 1)
    ends[:-1] = begins[1:]
    return _Spans(
        (begins.cumsum(0) - 1)[_inverse(order)], sequence[begins], first[begins], last[ends]
    )


def _turns_by_id(sequences: Sequences, mask: Tensor, turn_ids: Tensor) -> _SortedTurns:
    """The valid tokens of each sequence with one id, over all ranks of the context-parallel group.

    On one rank the shapes do not depend on the data, and nothing is read back to the host.
    """
    n = mask.numel()
    if sequences.cp_group is not None:
        at, sequence, turn = _valid_tokens(sequences, mask, turn_ids)
        pairs, here = torch.unique(torch.stack([sequence, turn]), dim=1, return_inverse=True)
        gathered, this_rank = gather_rows(
            list(pairs), sequences.cp_group, sequences=sequences.count
        )
        pairs, ids = torch.unique(torch.stack(gathered), dim=1, return_inverse=True)
        count = pairs.shape[1]
        every = torch.full((n,), count, device=mask.device)
        every.index_copy_(0, at, ids[this_rank][here])
        return _SortedTurns.of(every, count, mask, sequences.cp_group)
    place = torch.arange(n, device=mask.device)
    sequence = place // max(sequences.shape[-1], 1) if sequences.ids is None else sequences.ids
    turn = torch.where(mask, turn_ids, -1).reshape(-1)
    order = _order_by_position(sequence, turn)
    changes = (sequence[order].diff() != 0) | (turn[order].diff() != 0)
    numbers = torch.nn.functional.pad(changes.to(torch.int64), (1, 0))[:n].cumsum(0)
    ids = torch.empty_like(numbers).scatter(0, order, numbers)
    return _SortedTurns.of(ids, n, mask, None)


def _turns_across(sequences: Sequences, mask: Tensor, positions: Tensor) -> _SortedTurns:
    """The turns over all ranks of the context-parallel group. Each rank joins its tokens to
    intervals; only the ends of these travel, and every rank joins them once more.
    """
    at, sequence, position = _valid_tokens(sequences, mask, positions)
    here = _joined_spans(sequence, position, position)
    columns = [here.sequence, here.first, here.last]
    ends, this_rank = gather_rows(columns, sequences.cp_group, sequences=sequences.count)
    spans = _joined_spans(*ends)
    _refuse_overlap(spans.sequence, spans.first, spans.last)
    count = spans.first.shape[0]
    ids = torch.full((mask.numel(),), count, device=mask.device).index_copy_(
        0, at, spans.span_of[this_rank][here.span_of]
    )
    return _SortedTurns.of(ids, count, mask, sequences.cp_group)


@dataclass(frozen=True)
class WholeSequences:
    """The valid tokens of all ranks as one pack, sequence after sequence in the order of positions.

    columns: the gathered tensors, `[M]` each. mask: all True, `[M]`. cu_seqlens: `[S+1]`. at,
    place: the indices of this rank's n valid tokens, among its own tokens (flat) and in the pack.
    """

    columns: list[Tensor]
    mask: Tensor
    cu_seqlens: Tensor
    at: Tensor
    place: Tensor
    shape: tuple[int, ...]

    @classmethod
    @torch.no_grad()
    def of(
        cls, sequences: Sequences, mask: Tensor, positions: Tensor, *xs: Tensor
    ) -> WholeSequences:
        """Bring the valid tokens of `xs` together from all context-parallel ranks."""
        at, sequence, position = _valid_tokens(sequences, mask, positions)
        values = [x.reshape(-1)[at] for x in xs]
        rows = [sequence, position, *values]
        columns, this_rank = gather_rows(rows, sequences.cp_group, sequences=sequences.count)
        order = _order_by_position(columns[0], columns[1])
        sequence, position = columns[0][order], columns[1][order]
        _refuse_overlap(sequence, position, position)
        each = torch.arange(sequences.count + 1, device=at.device)
        cu_seqlens = torch.searchsorted(sequence, each)
        valid = torch.ones_like(order, dtype=torch.bool)
        place = _inverse(order)[this_rank]
        return cls([x[order] for x in columns[2:]], valid, cu_seqlens, at, place, sequences.shape)

    @property
    def inside(self) -> Tensor:
        """Where the rows of `padded` hold a token. `[S, longest]`, bool."""
        lengths = self.cu_seqlens.diff()
        return torch.arange(
            int(lengths.max()) if len(lengths) else 0, device=lengths.device
        ) < lengths.unsqueeze(1)

    def padded(self, x: Tensor) -> Tensor:
        """`x` `[M]` as rows `[S, longest]`, 0 in the padding."""
        inside = self.inside
        return x.new_zeros(inside.shape).masked_scatter(inside, x)

    def on_this_rank(self, x: Tensor) -> Tensor:
        """The tokens of `x` `[M]` that this rank holds, token-shaped, 0 at masked ones."""
        tokens = x.new_zeros(self.shape)
        tokens.view(-1)[self.at] = x[self.place]
        return tokens


def _valid_tokens(
    sequences: Sequences, mask: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the valid tokens are (flat), and the sequence and position of each; `[n]` each."""
    at = mask.reshape(-1).nonzero().squeeze(-1)
    sequence = at // max(sequences.shape[-1], 1) if sequences.ids is None else sequences.ids[at]
    return at, sequence, positions.reshape(-1)[at].to(torch.int64)


def _order_by_position(sequence: Tensor, position: Tensor) -> Tensor:
    """The permutation that sorts tokens by sequence, then by position."""
    by_position = position.argsort(stable=True)
    return by_position[sequence[by_position].argsort(stable=True)]


def _inverse(order: Tensor) -> Tensor:
    """The inverse of the permutation `order`."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).index_copy_(0, order, places)


def _refuse_overlap(sequence: Tensor, first: Tensor, last: Tensor) -> None:
    """Raise if sorted intervals share a position. All ranks pass the same ones, so all raise."""
    twice = (sequence[1:] == sequence[:-1]) & (first[1:] <= last[:-1])
    if twice.any():
        i = int(twice.nonzero()[0]) + 1
        raise InputError(
            f"position {int(first[i])} of sequence {int(sequence[i])} belongs to two valid tokens "
            "on the ranks of cp_group; positions count the tokens of the whole sequence, not "
            "those of a rank's shard."
        )
