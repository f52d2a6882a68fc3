"""Products of fixed shapes, and sums in a fixed order: the head in the exact mode.

A library of matrix products chooses the order of a sum by the shape, and on a CPU also by the
address at which a row begins. In a product of one shape with aligned rows, a row has the same bits
at every index, whatever the other rows are; that is checked once for each shape. So rows are
multiplied in aligned tiles of one size, the last one filled up with zeros.
The vocabulary is split into parts. A sum over the vocabulary is taken within the parts and then
over the parts, in one tree; so ranks that hold whole parts get the bits of one rank.

Legend: R rows, D hidden size, V vocabulary entries of this rank, P parts of the whole vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.collectives import all_gather
from policyloss.functional.masking import compute_dtype
from policyloss.head.matmul import CPU_BYTES, Room, product
from policyloss.head.softmax_rows import Partials, Scaling, kernels_for, row_partials
from policyloss.head.vocab_parallel import Vocabulary

# Parts of a vocabulary: a power of two, and the largest number of ranks that may share it.
PARTS = 8
# Parts begin at multiples of this, so that the rows of each are aligned in memory.
ALIGNED = 16
# Rows of a tile. Fewer cost speed, more cost memory, and work where a call has few rows. On a CPU
# they are a multiple of BLOCK: libraries of products compute rows in blocks of 4 to 48, and the
# rows of an incomplete block at the end of a tile have other bits (MKL with AVX2).
GPU_ROWS, CPU_ROWS, BLOCK = 2048, 384, 48

# Cache: does one matmul give the same bits as tiled ones, per shape?
_CHECKED: dict[tuple[object, ...], bool] = {}


class Tiles(NamedTuple):
    """The shapes of a head's products in the exact mode.

    rows: of a tile. borders: of the parts of the vocabulary over all ranks, `[P + 1]` rising
    numbers (a small vocabulary has fewer parts). parts: on this rank, as slices of its entries.
    at_once: whether one product computes the logits of all parts, with the bits of separate
    products.
    """

    rows: int
    borders: Tensor
    parts: tuple[slice, ...]
    at_once: bool = False

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, vocabulary: Vocabulary) -> Tiles:
        """The tiles of a head in the exact mode. They do not depend on the rows."""
        if x.dtype == torch.float16:
            raise InputError(
                "exact() cannot multiply float16, because its gradients are scaled by numbers of a "
                "complete window; use bfloat16 or float32."
            )
        if vocabulary.group is not None:
            _check_shards(vocabulary)
        rows = GPU_ROWS
        if x.device.type == "cpu":
            fit = CPU_BYTES // (compute_dtype(x).itemsize * vocabulary.size)
            rows = min(max(fit // BLOCK * BLOCK, BLOCK), CPU_ROWS)
        tiles = cls.of_vocabulary(vocabulary, weight)._replace(rows=rows)
        return tiles._replace(at_once=tiles._check_products(x, weight))

    @classmethod
    def of_vocabulary(cls, vocabulary: Vocabulary, entries: Tensor) -> Tiles:
        """The parts of a vocabulary, without tiles of rows. entries: this rank's, `[V, …]`."""
        size, first = vocabulary.size, vocabulary.first
        borders = {size * i // PARTS // ALIGNED * ALIGNED for i in range(PARTS)} | {size}
        rising = tuple(sorted(borders))
        spans, stop = itertools.pairwise(rising), first + entries.shape[0]
        parts = tuple(slice(a - first, b - first) for a, b in spans if first <= a < stop)
        return cls(0, torch.tensor(rising, device=entries.device), parts)

    def _check_products(self, x: Tensor, weight: Tensor) -> bool:
        """Whether one product may compute the logits of all parts; tried once for each shape.

        Raises unless a row has the same bits at every index of products of these shapes.
        """
        if x.is_meta or not self.parts:
            return False
        sizes = tuple(c.stop - c.start for c in self.parts)
        how = (torch.get_num_threads(), torch.get_float32_matmul_precision())
        key = (x.device, x.dtype, self.rows, weight.shape, weight.stride(), sizes, *how)
        if key not in _CHECKED:
            # Not the weight itself, which may be all zeros or NaN: then every product looks the
            # same.
            trial = _trial_numbers(torch.empty_like(weight))
            for size in set(sizes):
                self._check_places(x, trial[self.parts[sizes.index(size)]])
            _CHECKED[key] = self._same_at_once(x, trial)
        return _CHECKED[key]

    def _check_places(self, x: Tensor, w: Tensor) -> None:
        for other in (w.t(), w):
            rows = _trial_numbers(_tile(self.rows, other.shape[0], x, x.dtype))
            here, next_place = (
                _tile(self.rows, other.shape[1], x, compute_dtype(x)) for _ in range(2)
            )
            self.product(rows, other, here)
            self.product(rows.roll(1, 0), other, next_place)
            if not torch.equal(next_place, here.roll(1, 0)):
                raise InputError(
                    f"exact() cannot hold here: in a product of {self.rows} rows by "
                    f"{tuple(other.shape)} in {x.dtype} on {x.device}, the bits of a row depend on "
                    "its place."
                )

    def _same_at_once(self, x: Tensor, weight: Tensor) -> bool:
        """Whether the logits of a tile have the same bits by one product and part by part."""
        tile = _trial_numbers(_tile(self.rows, x.shape[1], x, x.dtype))
        out = _tile(self.rows, weight.shape[0], x, compute_dtype(x))
        self.product(tile, weight.t(), out)
        for c in self.parts:
            part = _tile(self.rows, c.stop - c.start, x, out.dtype)
            self.product(tile, weight[c].t(), part)
            if not torch.equal(part, out[:, c]):
                return False
        return True

    def full(self, n: int) -> int:
        """The number of rows of the tiles that hold n rows."""
        return -(-n // self.rows) * self.rows

    def _of_rows(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The rows of x in aligned tiles, and where they lie; the last is filled up with zeros."""
        n = x.shape[0]
        for start in range(0, n, self.rows):
            at = slice(start, min(start + self.rows, n))
            tile = x[at]
            if tile.shape[0] < self.rows or not _is_aligned(tile):
                tile = _tile(self.rows, x.shape[1], x, x.dtype)
                tile[: at.stop - start] = x[at]
                tile[at.stop - start :] = 0
            yield at, tile

    def product(self, x: Tensor, other: Tensor, out: Tensor) -> None:
        """`out = x @ other`, a tile of rows at a time. `[R, K]`, `[K, M]` → `[full(R), M]`.

        The rows of `out` are aligned. x may also have `full(R)` rows: then its last tile is not
        copied either, if the rows are aligned. Rows beyond R do not count.
        """
        for at, tile in self._of_rows(x):
            _multiply(tile, other, out[at.start : at.start + self.rows])

    def logits(self, x: Tensor, weight: Tensor, z: Tensor) -> None:
        """`z = x @ weight.T`. `[R, D]`, `[V, D]` → `[full(R), V]`, as in `product`."""
        for c in (slice(0, weight.shape[0]),) if self.at_once else self.parts:
            self.product(x, weight[c].t(), z[:, c])

    def hidden_gradient(self, dz: Tensor, weight: Tensor, out: Tensor) -> None:
        """`out = dz @ weight`, summed in float32 and rounded once. `[R, V]`, `[V, D]` → `[R, D]`.

        dz may have `full(R)` rows, as in `product`. On several ranks `out` is this rank's share.
        """
        dtype = compute_dtype(dz)
        for at, tile in self._of_rows(dz):

            def share(i: int, tile: Tensor = tile) -> Tensor:
                c = self.parts[i]
                part = _tile(self.rows, weight.shape[1], dz, dtype)
                _multiply(tile[:, c], weight[c], part)
                return part

            rows = out[at]
            rows.copy_(tree(share, 0, len(self.parts))[: rows.shape[0]])

    def merge(self, table: Tensor, ids: Tensor, vocabulary: Vocabulary) -> Partials:
        """Merge the partials of this rank's parts into partials of complete rows.

        table: the result of `partials`. ids: `[R]`, counted from this rank's first entry.
        """
        if vocabulary.group is not None:
            table = torch.cat(all_gather(table, vocabulary.group))
        maxima, sums, targets = table[:, 0], table[:, 1], table[:, 2]
        top = maxima.amax(0)
        # A part in which all entries are −inf has sum 0 and counts for nothing.
        distance = torch.where(maxima == -torch.inf, 0, maxima - top)
        shrink = distance.exp()
        borders, of_vocabulary = self.borders.unsqueeze(-1), ids + vocabulary.first
        here = (of_vocabulary >= borders[:-1]) & (of_vocabulary < borders[1:])
        target = torch.where(here, targets + distance, 0).sum(0)
        moment = None
        if table.shape[1] > 3:
            moment = _tree_of((table[:, 3] + distance * sums) * shrink)
        return Partials(top, _tree_of(sums * shrink), moment, target)

    def partials(self, z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool) -> Tensor:
        """Maximum, sum, target and, with `entropy`, moment of each part of each row.

        z: `[R, V]`. ids: `[R]`, counted from this rank's first. → `[P, 3 or 4, R]`.
        """
        first, count = self.parts[0], len(self.parts)
        size = first.stop - first.start
        # A lone row counts as contiguous whatever its stride; a kernel is compiled for the stride.
        follow = z.stride() == (z.shape[1], 1)
        as_rows = count > 1 and follow and size * count == z.shape[1] and scaling.bias is None
        if as_rows and kernels_for(z, scaling) is not None:
            # A kernel computes each row by itself, so it can take the parts as rows.
            starts = torch.arange(0, z.shape[1], size, device=z.device)
            of_rows = scaling.repeat_rows(count)
            ids = (ids.unsqueeze(-1) - starts).view(-1)
            p = row_partials(z.view(-1, size), ids, of_rows, entropy)
            return _stack(p).view(-1, z.shape[0], count).movedim(-1, 0)
        cuts = ((c, scaling.of_columns(c)) for c in self.parts)
        parts = [row_partials(z[:, c], ids - c.start, of_c, entropy) for c, of_c in cuts]
        return torch.stack([_stack(p) for p in parts])

    def sum_shares(self, x: Tensor, vocabulary: Vocabulary) -> Tensor:
        """The shares of all ranks together."""
        if vocabulary.group is None:
            return x
        return _tree_of(torch.stack(all_gather(x, vocabulary.group)))


def _check_shards(vocabulary: Vocabulary) -> None:
    """Raise unless every rank holds whole parts. All ranks read the same numbers, so all raise."""
    ranks = dist.get_world_size(vocabulary.group)
    if (
        PARTS % ranks
        or vocabulary.size % (PARTS * ALIGNED)
        or vocabulary.largest * ranks != vocabulary.size
    ):
        raise InputError(
            f"exact() cuts a vocabulary into {PARTS} equal parts, of which every rank must hold as "
            f"many, but {vocabulary.size} entries lie on {ranks} ranks, {vocabulary.largest} on "
            f"one of them; use 1, 2, 4 or 8 ranks with equal shards of a vocabulary that is a "
            f"multiple of {PARTS * ALIGNED}."
        )


def _multiply(tile: Tensor, other: Tensor, out: Tensor) -> None:
    """`out = tile @ other`; a row has the same bits at every index."""
    # In MKL with SSE4.2, 2 or 3 columns that are not contiguous depend on the place.
    product(tile, other.contiguous() if other.shape[1] < 4 else other, out)


def _trial_numbers(out: Tensor) -> Tensor:
    """Fill `out` with numbers for which the order of a sum of products changes its rounding."""
    rows, columns = (torch.arange(1, n + 1, device=out.device) for n in out.shape)
    return torch.outer(rows.sin().to(out.dtype), columns.cos().to(out.dtype), out=out)


def _tile(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory `[rows, columns]`, its rows aligned like rows of logits."""
    return Room(rows, columns, like, dtype).logits(rows, columns)


def _is_aligned(x: Tensor) -> bool:
    """Whether a library reads the rows of x in place, each starting at a multiple of 64 bytes."""
    step = x.stride(0)
    starts = (x.data_ptr(), step * x.element_size())
    return x.stride(1) == 1 and step >= x.shape[1] and all(start % 64 == 0 for start in starts)


def tree(term: Callable[[int], Tensor], first: int, count: int) -> Tensor:
    """`Σ term(i)` for `count` numbers from `first` on, by halves: the order follows from i alone.

    The terms are overwritten.
    """
    if count == 1:
        return term(first)
    half = (count + 1) // 2
    return tree(term, first, half).add_(tree(term, first + half, count - half))


def _tree_of(x: Tensor) -> Tensor:
    """`tree` of the rows of a stack `[P, ...]`, which are not overwritten."""
    if x.shape[0] & (x.shape[0] - 1):
        return tree(lambda i: x[i].clone(), 0, x.shape[0])
    while x.shape[0] > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def _stack(p: Partials) -> Tensor:
    return torch.stack([x for x in (p.max, p.sum, p.target, p.moment) if x is not None])
