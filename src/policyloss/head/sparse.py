"""The plan "sparse": an unbiased estimate of the head's gradient from a few entries of each row.

A policy is sure of most tokens, so a row of dlogits is a handful of numbers and a long tail. An
entry with `p ≥ eps` is kept, and so is the entry of the row's id. A tail entry is kept with
probability `p/eps`, at `eps/p` times its value, so that its expectation is its value. The variance
of a row is at most `eps · Σ_tail d²/p`: with d = c·p, `c² · eps · (mass of the tail)`. A row with
more than `MOST` kept entries is multiplied completely, as in "one_pass".

Legend: R rows, V vocabulary entries, K = `MOST`, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from policyloss.functional.masking import compute_dtype
from policyloss.head.backward import BackwardInputs, GradientSums, GradientTypes, HeadGradients
from policyloss.head.head import Derivatives, Head, HeadRows, Index, half_scale, windows
from policyloss.head.matmul import Room
from policyloss.head.softmax_rows import (
    Scaling,
    Statistics,
    blocks,
    kernels_for,
    rescale,
    row_gradient,
)
from policyloss.head.validate import read_later
from policyloss.records import Record, Stat

if TYPE_CHECKING:
    from policyloss.head.plans import Plan

MOST = 128
# Numbers of a hidden state that identify its token.
IDENTITY = 256
# Entries of a row that are looked at together, in plain PyTorch.
TILE = 128
# A bag with more entries would keep one program of the kernel busy while the others are done.
LONG = 512


class Sampled(NamedTuple):
    """The kept entries of R rows, `[R, K]` each, with the value 0 where a row has fewer. dense:
    the rows with more, whose values are 0. variance: Σ of the variances of all values. read_count:
    returns the number of dense rows.
    """

    columns: Tensor
    values: Tensor
    dense: Tensor
    variance: Tensor
    read_count: Callable[[], int]


class Bags(NamedTuple):
    """Entries in bags: each bag is a stretch of `members` and `weights` `[E]`.

    at, starts, counts: the place of each bag in the result, its first entry and its number of
    entries. long: how many bags have more than `LONG` entries.
    """

    members: Tensor
    weights: Tensor
    at: Tensor
    starts: Tensor
    counts: Tensor
    long: int

    @classmethod
    def of(cls, keys: Tensor, members: Tensor, weights: Tensor) -> Bags:
        """One bag for each key; equal keys are neighbours, and the place of a bag is its key."""
        at, counts = torch.unique_consecutive(keys, return_counts=True)
        long = int((counts > LONG).sum())
        return cls(members, weights, at, counts.cumsum(0) - counts, counts, long)


def draw_offsets(hidden: Tensor, ids: Tensor, seed: int) -> Tensor:
    """A number in [0, 1) for each row, from the bits of its hidden state, its id and `seed`.

    It does not depend on the row's place, so every cut of a batch draws the same entries.
    `[R]`, float32.
    """
    hidden = hidden[:, :IDENTITY].contiguous()
    types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = hidden.view(types[hidden.element_size()]).to(torch.int64)
    odd = 2 * torch.arange(1, bits.shape[1] + 1, device=bits.device) + 1
    # Integers wrap around. The multipliers are those of splitmix64.
    x = (bits * (odd * -7046029254386353131)).sum(1)
    x += ids * odd[0] + torch.full_like(x, seed) * -4658895280553007687
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)


def choose_columns(
    z: Tensor, ids: Tensor, s: Statistics, scaling: Scaling, offsets: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The columns `[R, K]` of the kept entries of each row, and how many there are `[R]`.

    Systematic sampling: with the running sum S of `p/eps` over the tail, beginning at the row's
    offset, an entry is kept where `⌊S⌋` steps. Columns after the last kept one are −1. A row with
    more than K entries has a larger count and some of its columns.
    """
    fused = kernels_for(z, scaling, "policyloss.head.sparse_kernels")
    if fused is not None:
        chosen: tuple[Tensor, Tensor] = fused.choose_columns(z, ids, s, scaling, offsets, eps)
        return chosen
    columns = z.new_full((z.shape[0], MOST + 1), -1, dtype=torch.int64)
    counts = z.new_zeros(z.shape[0], dtype=torch.int64)
    for b in blocks(z):
        row, column = _choose_of_block(
            rescale(z[b], scaling.of_rows(b)), ids[b], s.lse[b] + math.log(eps), offsets[b]
        )
        counts[b] = torch.bincount(row, minlength=counts[b].shape[0])
        place = torch.arange(row.shape[0], device=z.device) - (counts[b].cumsum(0) - counts[b])[row]
        columns[b][row, place.clamp_(max=MOST)] = column
    return columns[:, :MOST], counts


def _choose_of_block(
    scaled: Tensor, ids: Tensor, unit: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Row and column of each kept entry, in order. unit: the scaled logit with p = eps, `[R]`.

    Only the sums of tiles are made of all entries; tiles without a kept entry are not looked at.
    """
    rows, width = scaled.shape
    q = scaled.new_zeros(rows, -(-width // TILE) * TILE)  # p/eps, 0 after the last column
    torch.sub(scaled, unit[:, None], out=q[:, :width]).exp_()
    large = q >= 1
    here = ((ids >= 0) & (ids < width)).nonzero().squeeze(-1)
    large[here, ids[here]] = True
    tiles, large = q.masked_fill_(large, 0).view(rows, -1, TILE), large.view(rows, -1, TILE)
    ends = tiles.sum(2, dtype=torch.float64).cumsum(1).add_(offsets[:, None])
    starts = torch.cat([offsets[:, None].double(), ends[:, :-1]], 1)
    row, tile = (large.any(2) | (ends.floor() != starts.floor())).nonzero(as_tuple=True)
    start = starts[row, tile, None]
    after = tiles[row, tile].cumsum(1) + start
    after[:, -1] = ends[row, tile]  # as it is rounded there
    kept = large[row, tile] | (after.floor_().diff(dim=1, prepend=start.floor()) != 0)
    entry, column = kept.nonzero(as_tuple=True)
    return row[entry], tile[entry] * TILE + column


def sample_entries(
    z: Tensor,
    rows: HeadRows,
    s: Statistics,
    derivatives: Derivatives,
    offsets: Tensor,
    eps: float,
) -> Sampled:
    """The kept entries of each row of logits z."""
    dlogp, dentropy = derivatives[0], derivatives[1]
    assert dlogp is not None
    columns, counts = choose_columns(z, rows.ids, s, rows.scaling, offsets, eps)
    dense = (counts > MOST) | ~s.lse.isfinite()
    read_count = read_later(dense.sum())  # early: the host waits for it
    there, scaling = columns.clamp(min=0), rows.scaling._replace(bias=None)
    logits = z.gather(1, there)
    if rows.scaling.bias is not None:
        logits += rows.scaling.bias[there]
    is_id = columns == rows.ids[:, None]
    place = torch.where(is_id.any(1), is_id.to(torch.uint8).argmax(1), -1)
    values = torch.empty_like(logits, dtype=s.lse.dtype)
    row_gradient(logits, values, place, s, dlogp, dentropy, scaling)
    share = ((rescale(logits, scaling) - s.lse[:, None]).exp_() / eps).clamp_(max=1)
    share = share.masked_fill_(is_id, 1)
    values = torch.where((columns >= 0) & ~dense[:, None], values / share, 0)
    variance = (values.square() * (1 - share)).nansum()
    return Sampled(columns, values, dense, variance, read_count)


def add_weighted_sums(out: Tensor, table: Tensor, bags: Bags) -> None:
    """`out[at] += Σ weights·table[members]` over the entries of each bag."""
    if not bags.at.numel():
        return
    fused = kernels_for(table, Scaling(), "policyloss.head.sparse_kernels")
    if fused is not None:
        fused.add_weighted_sums(out, table, bags)
        return
    scale = half_scale(table.dtype, bags.weights)
    weights = (bags.weights * scale).to(table.dtype)
    sums = embedding_bag(bags.members, table, bags.starts, mode="sum", per_sample_weights=weights)
    out.index_add_(0, bags.at, (sums.to(compute_dtype(sums)) / scale).to(out.dtype))


class SparseSums(GradientSums):
    """Accumulates the gradients of windows from the kept entries of their rows."""

    def __init__(self, head: Head, wanted: GradientTypes, gathered: int, plan: Plan) -> None:
        super().__init__(head, wanted, gathered)
        self.eps, self.offsets = plan.eps, draw_offsets(head.hidden, head.ids, plan.seed)
        self.dense_rows = 0
        self.sampled: list[tuple[Tensor, Sampled]] = []  # with the places of the rows

    def add(
        self,
        at: Index,
        rows: HeadRows,
        z: Tensor,
        room: Room,
        s: Statistics,
        derivatives: Derivatives,
    ) -> None:
        """Add one window with the logits z."""
        sampled = sample_entries(z, rows, s, derivatives, self.offsets[at], self.eps)
        everywhere = torch.arange(self.head.ids.shape[0], device=z.device)[at]
        self.sampled.append((everywhere, sampled))
        order = sampled.dense.to(torch.uint8).argsort(descending=True, stable=True)
        # Gathered before the host waits for the count, because the device waits for the host then.
        rows, s, everywhere = rows.of_rows(order), s.of_rows(order), everywhere[order]
        is_dense = sampled.dense[order]
        moved = [None if d is None else torch.where(is_dense, d[order], 0) for d in derivatives]
        count = sampled.read_count()
        if count:
            self.dense_rows += count
            # Products of a multiple of 8 rows are faster: sparse rows with derivative 0 fill up.
            full = slice(-(-count // 8) * 8)
            part = [None if d is None else d[full] for d in moved]
            of_rows = (rows.of_rows(full), z, room, s.of_rows(full), part, order[full])
            self._add_rows(everywhere[full], *of_rows)

    def gradients(self) -> HeadGradients:
        """The gradients of all windows together."""
        if not self.sampled:  # no row has a gradient
            return super().gradients()
        # The host waits for the numbers of entries here, and does the rest while the device
        # multiplies the dense rows.
        by_row, bags = self._sort_entries()
        self.all_gathered = self.weight is None
        self._flush()
        if self.hidden is not None:
            add_weighted_sums(self.hidden, self.head.weight, by_row)
        complete = super().gradients()
        if complete.weight is not None:
            add_weighted_sums(complete.weight, self.head.hidden, bags)
        if complete.bias is not None:
            ones = bags.weights.new_ones(self.head.ids.shape[0], 1)
            add_weighted_sums(complete.bias[:, None], ones, bags)
        return complete

    def _sort_entries(self) -> tuple[Bags, Bags]:
        """The kept entries of all windows by row, each row with a bag, and by column."""
        everywhere = torch.cat([at for at, _ in self.sampled])
        columns, values = (
            torch.cat([getattr(x, name) for _, x in self.sampled]) for name in ("columns", "values")
        )
        is_kept = values != 0
        row, place = is_kept.nonzero(as_tuple=True)
        rows, columns, values = everywhere[row], columns[row, place], values[row, place]
        counts = is_kept.sum(1)
        by_row = Bags(columns, values, everywhere, counts.cumsum(0) - counts, counts, 0)
        order = columns.argsort(stable=True)
        return by_row, Bags.of(columns[order], rows[order], values[order])

    def records(self) -> dict[str, Record]:
        """Kept entries per row, the share of dense rows, and the variance that the draw adds as a
        share of the squared norm of the sparse rows.
        """
        sampled = [x for _, x in self.sampled]
        if not sampled:
            return {}
        squares = torch.stack([x.values.square().nansum() for x in sampled]).sum()
        rows = torch.full_like(squares, sum(x.dense.shape[0] for x in sampled))
        kept = torch.stack([(x.values != 0).sum() for x in sampled]).sum()
        return {
            "sparse_entries": Stat(kept.to(rows.dtype), rows),
            "sparse_dense_rows": Stat(torch.full_like(rows, self.dense_rows), rows),
            "sparse_noise": Stat(torch.stack([x.variance for x in sampled]).sum(), squares),
        }


def gradients_by_sampling(inputs: BackwardInputs) -> HeadGradients:
    """Compute the logits again, some rows at a time, and sample their gradient."""
    head, index, s = inputs.head, inputs.index, inputs.statistics
    live = head.ids.shape[0] if index is None else index.shape[0]
    sums = SparseSums(head, inputs.wanted, 0, inputs.plan)
    room = head.room(min(inputs.plan.rows, live))
    for window in windows(live, inputs.plan.rows):
        at = window if index is None else index[window]
        rows = head.rows(at)
        of_window = [None if d is None else d[at] for d in inputs.derivatives]
        sums.add(at, rows, head.logits(rows, room), room, s.of_rows(at), of_window)
    gradients = sums.gradients()
    if index is not None and gradients.hidden is not None:
        gradients = gradients._replace(hidden=gradients.hidden[index])
    return gradients
