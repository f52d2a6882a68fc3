"""The head: logits of any rows of hidden states, their statistics, and windows of rows.

Legend: N tokens (rows of hidden), D hidden size, V vocabulary entries of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from policyloss.functional.masking import compute_dtype
from policyloss.head.matmul import Room, product, sums_half_in_float32
from policyloss.head.softmax_rows import (
    Partials,
    Scaling,
    Statistics,
    concatenate,
    row_gradient,
    row_partials,
    row_statistics,
)
from policyloss.head.support import KeptEntries, Support
from policyloss.head.tiles import Tiles
from policyloss.head.vocab_parallel import Vocabulary

if TYPE_CHECKING:
    from policyloss.head.teacher.comparison import Compared
    from policyloss.head.terms import Terms

Index = Tensor | slice
# d loss / d (logp, entropy, divergence), `[R]` each; the divergence only with a teacher.
Derivatives = Sequence[Tensor | None]


class LogProbs(NamedTuple):
    """The `logp` of each token's id, and the `entropy` of each token's distribution (None if it was
    not computed).
    """

    logp: Tensor
    entropy: Tensor | None


@dataclass(frozen=True)
class Head:
    """`log_softmax((hidden @ weight.T + bias) / temperature)`, which can be computed for any rows.

    hidden: `[N, D]` and weight: `[V, D]` have the same type. ids: `[N]`, in the vocabulary of all
    ranks. inverse_temperature: a number or `[N]`. support: the vocabulary entries that each token
    was drawn from; None for all. tiles: the shapes of the products in the exact mode, else None.
    terms: the loss terms that read each row; None if each row has one, its token.
    """

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    bias: Tensor | None
    inverse_temperature: float | Tensor
    softcap: float | None
    vocabulary: Vocabulary
    support: Support | None = None
    tiles: Tiles | None = None
    terms: Terms | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of logits and statistics: float32, or float64 if the hidden states are."""
        return compute_dtype(self.hidden)

    def row_flags(self, flags: Tensor) -> Tensor:
        """Which rows a flagged term reads. Flat, one per term → `[N]`, bool."""
        return flags if self.terms is None else self.terms.any(flags)

    def of_terms(self, x: Tensor) -> Tensor:
        """One number per term, flat, of one per row `[N]`; carries the gradient."""
        return x if self.terms is None else self.terms.expand(x)

    def scaling(self, index: Index) -> Scaling:
        """The scaling of the logits of these rows."""
        t = self.inverse_temperature
        rate = t[index] if isinstance(t, Tensor) else t
        return Scaling(rate, self.softcap, self.bias, self.support is not None)

    def room(self, rows: int, columns: int | None = None) -> Room:
        """Memory for the logits of `rows` rows; in the exact mode, of complete tiles of rows."""
        rows = rows if self.tiles is None else self.tiles.full(rows)
        columns = self.weight.shape[0] if columns is None else columns
        return Room(rows, columns, self.hidden, self.dtype)

    def rows(self, index: Index) -> HeadRows:
        """The rows at `index`."""
        first = self.vocabulary.first
        ids = self.ids[index]
        kept = None if self.support is None else self.support.of_rows(index, first)
        return HeadRows(
            self.hidden[index], ids - first if first else ids, self.scaling(index), kept
        )

    def forward(
        self, rows: HeadRows, room: Room, entropy: bool = True
    ) -> tuple[Tensor, Statistics]:
        """The logits of `rows`, in `room`, and their statistics."""
        z = self.logits(rows, room)
        p = self.window_partials(rows, z, entropy)
        return z, row_statistics(p if isinstance(p, Partials) else self.merge([(rows.ids, p)]))

    def window_partials(self, rows: HeadRows, z: Tensor, entropy: bool) -> Partials | Tensor:
        """The numbers of one window from which, with its ids, `merge` computes partials."""
        if self.tiles is not None:
            return self.tiles.partials(z, rows.ids, rows.scaling, entropy)
        partials = row_partials(z, rows.ids, rows.scaling, entropy)
        return self.vocabulary.merge(partials, rows.ids, z.shape[1])

    def merge(self, windows: Sequence[tuple[Tensor, Partials | Tensor]]) -> Partials:
        """The partials of all windows.

        Merging once launches fewer kernels than merging per window.
        """
        tiles = self.tiles
        if tiles is None:
            return concatenate([p for _, p in windows if isinstance(p, Partials)])
        tables = [table for _, table in windows if isinstance(table, Tensor)]
        ids = torch.cat([ids for ids, _ in windows])
        return tiles.merge(torch.cat(tables, -1), ids, self.vocabulary)

    def logits(self, rows: HeadRows, room: Room) -> Tensor:
        """The logits of `rows`, in `room`."""
        n, columns = rows.hidden.shape[0], self.weight.shape[0]
        z = room.logits(n, columns)
        if self.tiles is None:
            product(rows.hidden, self.weight.t(), z)
        else:
            self.tiles.logits(rows.hidden, self.weight, room.logits(self.tiles.full(n), columns))
        if rows.kept is not None:
            rows.kept.restrict(z)
        return z


class HeadRows(NamedTuple):
    """Some rows of a head.

    hidden: `[R, D]`. ids: `[R]`, counted from this rank's first entry. scaling: the scaling of the
    rows' logits. kept: the entries that the rows are normalised over; None for all. compared: the
    comparison with the rows' teacher; None without one.
    """

    hidden: Tensor
    ids: Tensor
    scaling: Scaling
    kept: KeptEntries | None = None
    compared: Compared | None = None

    def of_rows(self, rows: Index) -> HeadRows:
        """Some of the rows, without a teacher; their logits are already computed."""
        assert self.compared is None
        return HeadRows(self.hidden[rows], self.ids[rows], self.scaling.of_rows(rows))

    def of_columns(self, columns: slice) -> HeadRows:
        """The same rows and some vocabulary entries, without a teacher."""
        return HeadRows(self.hidden, self.ids - columns.start, self.scaling.of_columns(columns))

    def dlogits(self, z: Tensor, room: Room, s: Statistics, derivatives: Derivatives) -> Tensor:
        """The gradient of the logits z, in the type of hidden, written over z."""
        out = room.gradient(z.shape[0], z.shape[1], self.hidden.dtype)
        self.write_gradient(z, out, s, derivatives)
        return out

    def write_gradient(
        self,
        z: Tensor,
        out: Tensor,
        s: Statistics,
        derivatives: Derivatives,
        source: Tensor | None = None,
    ) -> None:
        """Write the gradient of the logits z to `out`, which may share the memory of z.

        source: for each of the rows, the row of z that holds its logits; None if they are the same.
        """
        dlogp, dentropy, *ddivergence = derivatives
        if self.compared is not None and ddivergence[0] is not None:
            self.compared.write_gradient(z, out, self, s, derivatives)
            return
        assert dlogp is not None
        row_gradient(z, out, self.ids, s, dlogp, dentropy, self.scaling, source)


def windows(n: int, rows: int, tiles: Tiles | None = None) -> list[slice]:
    """Split n rows into as few windows of at most `rows` rows as possible, of about equal size.

    With tiles, all windows but the last hold full tiles if `rows` is a multiple of `tiles.rows`.
    """
    count = -(-n // rows)
    step = -(-n // count) if count else 1
    unit = 128 if tiles is None else tiles.rows
    step = min(rows, -(-step // unit) * unit) if step > unit else step
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def operand_dtype(hidden: Tensor) -> torch.dtype | None:
    """The type autocast would multiply in, or None outside of autocast."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return None


def operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands of the products, without gradient: hidden as `[N, D]`, weight and bias.

    Hidden and weight are in autocast's type, and in float32 if the device (a CPU) has no product of
    half-precision matrices with a float32 result.
    """
    x = hidden.detach().reshape(-1, hidden.shape[-1])
    w = weight.detach()
    b = None if bias is None else bias.detach()
    cast = operand_dtype(hidden)
    if cast is not None:
        x, w = x.to(cast), w.to(cast)
    if not sums_half_in_float32(x):
        x, w = x.to(compute_dtype(x)), w.to(compute_dtype(w))
    return x, w, b


def half_scale(dtype: torch.dtype, *derivatives: Tensor | None) -> float:
    """A power of two that brings derivatives near 1, for float16; 1 for other types.

    The 1/N of a mean would vanish below the smallest number of float16. This reads a number back to
    the host.
    """
    if dtype != torch.float16:
        return 1.0
    there = [d for d in derivatives if d is not None and d.numel()]
    top = max((float(d.abs().max()) for d in there), default=0.0)
    return 2.0 ** -math.frexp(top)[1] if 0 < top < math.inf else 1.0
