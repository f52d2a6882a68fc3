"""The gradients of hidden states, weight and bias from the derivatives of all rows.

`dZ = row_gradient(logits, dlogp, dentropy)`, then `dhidden = dZ @ weight`,
`dweight = dZ.T @ hidden`, `dbias = dZ.sum(0)`. `plans.KINDS` lists the routine of each plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from policyloss.head.head import Derivatives, Head, HeadRows, Index, half_scale, windows
from policyloss.head.matmul import Room, add_product, product, rounded_product
from policyloss.head.softmax_rows import Statistics, row_gradient, target_gradient
from policyloss.head.teacher.comparison import Compared, Comparison
from policyloss.head.teacher.rows import Entries, PairStatistics
from policyloss.head.tiles import tree
from policyloss.records import Record

if TYPE_CHECKING:
    from policyloss.head.plans import Plan


class GradientTypes(NamedTuple):
    """The dtypes of the gradients that are needed; None for a gradient that is not."""

    hidden: torch.dtype | None
    weight: torch.dtype | None
    bias: torch.dtype | None

    @classmethod
    def of(cls, *tensors: Tensor | None) -> GradientTypes:
        """The dtype of each tensor that records a gradient; None for the others."""
        on = torch.is_grad_enabled()
        return cls(
            *(x.dtype if on and x is not None and x.requires_grad else None for x in tensors)
        )


def _times(derivatives: Derivatives, scale: float) -> list[Tensor | None]:
    return [None if d is None else d * scale for d in derivatives]


class HeadGradients(NamedTuple):
    """Gradients of hidden states `[R, D]`, weight `[V, D]` and bias `[V]`; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


@dataclass(frozen=True)
class BackwardInputs:
    """The inputs of a routine that computes gradients in a backward. index: the R rows to
    differentiate, None for all; statistics, derivatives and divergences are of all rows. stash: the
    probabilities and the slopes of the divergence, `[R, V]` each, if kept.
    """

    head: Head
    wanted: GradientTypes
    index: Tensor | None
    statistics: Statistics
    derivatives: Derivatives
    plan: Plan
    stash: tuple[Tensor | None, Tensor | None]
    comparison: Comparison | None
    divergences: PairStatistics | Entries | None

    def select(self) -> tuple[HeadRows, Statistics, list[Tensor | None]]:
        """The rows at `index`, their statistics and their derivatives."""
        at = slice(None) if self.index is None else self.index
        derivatives = [None if d is None else d[at] for d in self.derivatives]
        return self.head.rows(at), self.statistics.of_rows(at), derivatives

    def teacher_columns(self) -> Callable[[slice], Compared] | None:
        """The comparison of the rows at `index` for given columns; None without a teacher."""
        comparison, divergences = self.comparison, self.divergences
        if comparison is None or divergences is None:
            return None
        at = slice(None) if self.index is None else self.index
        numbers = type(divergences)(*(x[at] for x in divergences))
        room = comparison.room(numbers.divergence.shape[0], self.plan.columns)
        is_full, first = isinstance(numbers, PairStatistics), self.head.vocabulary.first

        def compare(c: slice) -> Compared:
            teacher = comparison.teacher_rows(at, room, c) if is_full else None
            return Compared(comparison.measure, numbers, teacher, first + c.start)

        return compare


def gradients_by_columns(inputs: BackwardInputs) -> HeadGradients:
    """Compute the logits again, for all rows and some vocabulary entries at a time.

    This uses the least memory of all plans: the gradient of an entry is one product. Only `dhidden`
    is summed, in float32.
    """
    head, wanted, columns = inputs.head, inputs.wanted, inputs.plan.columns
    teacher = inputs.teacher_columns()
    rows, s, derivatives = inputs.select()
    x, w = rows.hidden, head.weight
    scale = half_scale(x.dtype, *derivatives)
    derivatives = _times(derivatives, scale)
    room = head.room(x.shape[0], columns)
    dhidden = None if wanted.hidden is None else torch.zeros_like(x, dtype=head.dtype)
    dweight = None if wanted.weight is None else torch.empty_like(w, dtype=wanted.weight)
    dbias = None if wanted.bias is None else w.new_empty(w.shape[0], dtype=wanted.bias)
    for c in windows(w.shape[0], columns):
        z = room.logits(x.shape[0], c.stop - c.start)
        product(x, w[c].t(), z)
        if rows.kept is not None:
            rows.kept.restrict(z, c.start)
        part = rows.of_columns(c)
        if teacher is not None:
            part = part._replace(compared=teacher(c))
        dz = part.dlogits(z, room, s, derivatives)
        if dhidden is not None:
            add_product(dhidden, dz, w[c], 1 / scale)
        if dweight is not None:
            rounded_product(dz.t(), x, dweight[c], 1 / scale)
        if dbias is not None:
            dbias[c] = column_sum(dz, head.dtype, scale)
    if dhidden is not None:
        dhidden = head.vocabulary.sum_shares(dhidden).to(wanted.hidden)
    return HeadGradients(dhidden, dweight, dbias)


def gradients_in_parts(inputs: BackwardInputs) -> HeadGradients:
    """Compute the gradients in the exact mode, one part of the vocabulary at a time.

    Each product has the shape that it has in the other plans: a tile of rows by a part.
    """
    head, wanted, index, s = inputs.head, inputs.wanted, inputs.index, inputs.statistics
    tiles, w = head.tiles, head.weight
    assert tiles is not None
    live = head.ids.shape[0] if index is None else index.shape[0]
    largest = max(c.stop - c.start for c in tiles.parts)
    all_windows = windows(live, inputs.plan.rows * (w.shape[0] // largest), tiles)
    room = head.room(max((at.stop - at.start for at in all_windows), default=0), largest)
    # Sums over ranks or windows are rounded at the end.
    wide = (head.vocabulary.group is not None, len(all_windows) > 1, True)
    kinds = zip(wanted, wide, strict=True)
    sums = GradientTypes(*(head.dtype if dtype and is_wide else dtype for dtype, is_wide in kinds))
    dhidden = dweight = None
    if sums.hidden is not None:
        dhidden = head.hidden.new_empty(live, w.shape[1], dtype=sums.hidden)
    if sums.weight is not None:
        # The first window writes all of it.
        dweight = (torch.empty_like if all_windows else torch.zeros_like)(w, dtype=sums.weight)
    dbias = None if sums.bias is None else w.new_zeros(w.shape[0], dtype=sums.bias)

    def add(window: slice) -> None:
        at = window if index is None else index[window]
        of_rows, here = head.rows(at), s.of_rows(at)
        of_window = [None if d is None else d[at] for d in inputs.derivatives]
        x, n = of_rows.hidden, window.stop - window.start

        def share(i: int) -> Tensor:
            """Add the share of part i to weight and bias; return that of `dhidden`."""
            c, rows_of_tiles = tiles.parts[i], tiles.full(n)
            columns = c.stop - c.start
            z = room.logits(n, columns)
            tiles.product(x, w[c].t(), room.logits(rows_of_tiles, columns))
            if of_rows.kept is not None:
                of_rows.kept.restrict(z, c.start)
            dz = of_rows.of_columns(c).dlogits(z, room, here, of_window)
            if dweight is not None and window.start > 0:
                add_product(dweight[c], dz.t(), x)
            elif dweight is not None:
                rounded_product(dz.t(), x, dweight[c])
            if dbias is not None:
                dbias[c] += column_sum(dz, head.dtype, 1.0)
            out = head.room(n, x.shape[1]).logits(rows_of_tiles, x.shape[1])
            if dhidden is not None:
                tiles.product(room.gradient(rows_of_tiles, columns, dz.dtype), w[c], out)
            return out

        if dhidden is not None:
            dhidden[window] = tree(share, 0, len(tiles.parts))[:n].to(dhidden.dtype)
        else:
            for i in range(len(tiles.parts)):
                share(i)

    for window in all_windows:
        add(window)
    if dhidden is not None:
        dhidden = tiles.sum_shares(dhidden, head.vocabulary)
    results = zip((dhidden, dweight, dbias), wanted, strict=True)
    return HeadGradients(*(None if x is None else x.to(dtype) for x, dtype in results))


def column_sum(dz: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`Σ_rows dz / scale`. `[R, V]` → `[V]`."""
    return dz.sum(0, dtype=dtype).div_(scale)


class GradientSums:
    """Accumulates the gradients of windows that come one after another.

    gathered: how many rows of dlogits are kept until they are multiplied together; with 0, each
    window is multiplied at once, and its dlogits take the place of its logits. all_gathered: all
    rows are gathered, so that each gradient is one product and is rounded once; otherwise weight
    and bias are summed in float32.
    """

    def __init__(
        self, head: Head, wanted: GradientTypes, gathered: int = 0, all_gathered: bool = False
    ) -> None:
        self.head, self.wanted, self.all_gathered = head, wanted, all_gathered
        x, w = head.hidden, head.weight
        # Round at the end if ranks are still to be summed, or if the scaled loss may overflow
        # float16.
        wide = head.vocabulary.group is not None or wanted.hidden == torch.float16
        self.hidden: Tensor | None = None
        if wanted.hidden is not None:
            self.hidden = torch.zeros_like(x, dtype=head.dtype if wide else wanted.hidden)
        # Allocated with the first product: the last logits may be freed by then.
        self.weight: Tensor | None = None
        self.bias = None if wanted.bias is None else w.new_zeros(w.shape[0], dtype=head.dtype)
        self.kept = Room(gathered, w.shape[0], w, w.dtype) if gathered else None
        self.places: list[Index] = []
        self.filled = 0

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
        self._add_rows(at, rows, z, room, s, derivatives, None)

    def _add_rows(
        self,
        at: Index,
        rows: HeadRows,
        z: Tensor,
        room: Room,
        s: Statistics,
        derivatives: Derivatives,
        source: Tensor | None,
    ) -> None:
        """Add the gradient of rows with the logits `z[source]`; a source of None means all of z.

        The gradient is multiplied at once, or later together with the gradients of other windows.
        """
        if self.kept is None:
            z = z if source is None else z[source]
            scale = half_scale(rows.hidden.dtype, *derivatives)
            if scale != 1:
                derivatives = _times(derivatives, scale)
            dz = rows.dlogits(z, room, s, derivatives)
            if self.head.tiles is not None:  # with the unused rows of the last tile
                dz = room.gradient(self.head.tiles.full(z.shape[0]), z.shape[1], dz.dtype)
            self._multiply(at, rows.hidden, dz, scale)
            return
        n, capacity = rows.ids.shape[0], self.kept.memory.shape[0]
        if self.filled + n > capacity:
            self._flush()
        out = self.kept.logits(capacity, z.shape[1])[self.filled : self.filled + n]
        rows.write_gradient(z, out, s, derivatives, source)
        self.places.append(at)
        self.filled += n

    def _flush(self) -> None:
        if self.kept is not None and self.filled:
            at = _one_index(self.places, self.head.ids)
            dz = self.kept.logits(self.filled, self.head.weight.shape[0])
            self._multiply(at, self.head.hidden[at], dz, 1.0)
            self.places, self.filled = [], 0

    def _multiply(self, at: Index, x: Tensor, dz: Tensor, scale: float) -> None:
        """Multiply the gradient of the logits of x; dz may have more rows, which do not count."""
        w, tiles = self.head.weight, self.head.tiles
        if self.hidden is not None:
            in_place = isinstance(at, slice)
            part = self.hidden[at] if in_place else torch.empty_like(x, dtype=self.hidden.dtype)
            if tiles is None:
                rounded_product(dz, w, part, 1 / scale)
            else:
                tiles.hidden_gradient(dz, w, part)
            if not in_place:
                self.hidden[at] = part
        dz = dz[: x.shape[0]]
        if self.wanted.weight is not None:
            if self.weight is None:
                dtype = self.wanted.weight if self.all_gathered else self.head.dtype
                self.weight = torch.empty_like(w, dtype=dtype)
                rounded_product(dz.t(), x, self.weight, 1 / scale)
            else:
                add_product(self.weight, dz.t(), x, 1 / scale)
        if self.bias is not None:
            self.bias += column_sum(dz, self.head.dtype, scale)

    def records(self) -> dict[str, Record]:
        """The metrics of the sums themselves."""
        return {}

    def gradients(self) -> HeadGradients:
        """The gradients of all windows together."""
        self._flush()
        if self.weight is None and self.wanted.weight is not None:
            self.weight = torch.zeros_like(self.head.weight, dtype=self.wanted.weight)
        vocabulary, tiles, hidden = self.head.vocabulary, self.head.tiles, self.hidden
        if hidden is not None and tiles is not None:
            hidden = tiles.sum_shares(hidden, vocabulary)
        elif hidden is not None:
            hidden = vocabulary.sum_shares(hidden)
        return HeadGradients(hidden, self.weight, self.bias)


def _one_index(places: list[Index], ids: Tensor) -> Index:
    """The rows of several windows as one index.

    It is a slice if each window begins where the one before it ends, otherwise an index tensor on
    the device of `ids`.
    """
    slices = [at for at in places if isinstance(at, slice)]
    if len(slices) == len(places) and all(a.stop == b.start for a, b in itertools.pairwise(slices)):
        return slice(slices[0].start, slices[-1].stop)
    everywhere = torch.arange(ids.shape[0], device=ids.device)
    return torch.cat([everywhere[at] for at in places])


def keep_probabilities(z: Tensor, out: Tensor, rows: HeadRows, s: Statistics) -> None:
    """Write `p / temperature` to `out` in its type.

    This is the gradient of −logp, except at the target. Rounded probabilities are as good as a
    rounded gradient. Rounded logits would not be: an error of 0.1 in a logit is 10 % of p.
    """
    nowhere, one = torch.full_like(rows.ids, -1), torch.ones_like(s.lse)
    row_gradient(z, out, nowhere, s, -one, None, rows.scaling)


def gradients_from_stash(inputs: BackwardInputs) -> HeadGradients:
    """The gradients from the stash of the forward.

    The gradient of the logits overwrites the probabilities. Forward and backward together take
    three matmuls, plus those of the teacher.
    """
    head, wanted = inputs.head, inputs.wanted
    rows, s, derivatives = inputs.select()
    x, w = rows.hidden, head.weight
    scale = half_scale(x.dtype, *derivatives)
    dlogp, dentropy, ddivergence = (*_times(derivatives, scale), None)[:3]
    probabilities, slopes = inputs.stash
    # The gradient of the logits is `of_rows[:, None] * stash`. Scaling the hidden states is
    # cheaper than another read and write of the stash.
    of_rows: Tensor | None = None
    if probabilities is not None and (dlogp is not None or dentropy is not None):
        stash = probabilities
        _probabilities_to_gradients(stash, rows, s, dlogp, dentropy)
        if slopes is not None and ddivergence is not None:
            stash.add_(slopes.mul_(ddivergence.unsqueeze(-1)))
    else:
        assert slopes is not None
        assert ddivergence is not None
        stash, of_rows = slopes, ddivergence
    dhidden = dweight = dbias = None
    if wanted.hidden is not None:
        alone = head.vocabulary.group is None
        dhidden = torch.empty_like(x, dtype=wanted.hidden if alone else head.dtype)
        rounded_product(stash, w, dhidden, 1 / scale)
        dhidden = _times_rows(head.vocabulary.sum_shares(dhidden), of_rows).to(wanted.hidden)
    if wanted.weight is not None:
        dweight = torch.empty_like(w, dtype=wanted.weight)
        rounded_product(stash.t(), _times_rows(x, of_rows), dweight, 1 / scale)
    if wanted.bias is not None:
        dbias = column_sum(_times_rows(stash, of_rows), head.dtype, scale).to(wanted.bias)
    return HeadGradients(dhidden, dweight, dbias)


def _times_rows(x: Tensor, of_rows: Tensor | None) -> Tensor:
    """Each row of x times its number, rounded once; x itself if `of_rows` is None."""
    return x if of_rows is None else (x * of_rows.unsqueeze(-1)).to(x.dtype)


def _probabilities_to_gradients(
    stash: Tensor, rows: HeadRows, s: Statistics, dlogp: Tensor | None, dentropy: Tensor | None
) -> None:
    """Turn the kept probabilities of all rows, q = p/temperature, into dz, in place.

    The entry of each row's id comes from its exact log-probability.
    """
    dlogp = torch.zeros_like(s.lse) if dlogp is None else dlogp
    t = rows.scaling.inverse_temperature
    rate = t if isinstance(t, Tensor) else torch.full_like(s.lse, t)
    spread = s.spread(dentropy)
    target = target_gradient(s.logp, dlogp, spread) * rate
    here = (rows.ids >= 0) & (rows.ids < stash.shape[1])
    columns = torch.where(here, rows.ids, 0)
    for b in windows(stash.shape[0], 256):
        q, slope = stash[b], dlogp[b].unsqueeze(-1)
        if spread is None:
            q.mul_(-slope)
        else:
            entropy, dentropy = spread
            log_p = (q.to(s.lse.dtype) / rate[b].unsqueeze(-1)).log_().clamp_(min=-1e4)
            of_entropy = -dentropy[b].unsqueeze(-1)
            q.mul_(log_p.add_(entropy[b].unsqueeze(-1)).mul_(of_entropy).sub_(slope))
        column, exact = columns[b].unsqueeze(-1), target[b].to(q.dtype).unsqueeze(-1)
        q.scatter_(1, column, torch.where(here[b].unsqueeze(-1), exact, q.gather(1, column)))
