"""Loss terms that share hidden states: trajectories with common prefixes, trained as one tree.

A term is a hidden state and the id that it predicts. Terms with the same hidden state, id and
temperature have the same log-probability and entropy, so they are one row of the head, and the
derivative of the loss by that row is the sum over its terms. A tree has one such row per token that
is predicted: a hidden state where branches part is one row per branch.

Legend: N hidden states, M terms, R distinct rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_like, check_tensor
from policyloss.errors import InputError
from policyloss.functional.segments import Sequences
from policyloss.head.head import Index
from policyloss.head.support import Support
from policyloss.head.validate import check_mask, inverse_temperature


class Terms(NamedTuple):
    """Terms, sorted by the row that they read.

    order: the index of each sorted term in the call, `[M]`. rows: the sorted terms as segments, one
    per row.
    """

    order: Tensor
    rows: Sequences

    def expand(self, x: Tensor) -> Tensor:
        """Assign to each term the number of its row. `[R]` → `[M]`; carries the gradient."""
        by_row = self.rows.expand(x)
        return torch.empty_like(by_row).scatter(0, self.order, by_row)

    def any(self, flags: Tensor) -> Tensor:
        """Whether a term of the row has its flag set. `[M]` → `[R]`, bool."""
        return self.rows.sum(flags[self.order]) > 0

    def first(self, x: Tensor) -> Tensor:
        """The first term's number of each row. `[M]` → `[R]`."""
        assert self.rows.offsets is not None
        return x[self.order[self.rows.offsets[:-1]]]

    def of_rows(self, at: Index) -> Terms:
        """The terms of some rows, in the order of these rows."""
        assert self.rows.offsets is not None
        offsets = self.rows.offsets
        # The terms of rows, as the kept entries of tokens, are lists that lie end to end.
        members = Support(self.order, offsets).of_rows(at, 0)
        bounds = torch.nn.functional.pad(offsets.diff()[at], (1, 0)).cumsum(0)
        shape = tuple(members.rows.shape)
        return Terms(members.columns, Sequences(shape, bounds, members.rows))


def distinct_rows(
    index: Any, hidden: Tensor, ids: Any, temperature: float | Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, float | Tensor, Tensor | None, Terms]:
    """hidden `[R, D]` (with a gradient to the caller's), ids, temperature (if it is no number) and
    mask `[R]` of the distinct rows of terms, checked, and the terms that read them.

    index: the hidden state of each term, in the shape of ids, which counts over all hidden states
    `[..., D]`. Masked terms share one row, which is not computed; their index may be any number.
    Reads the number of rows back to the host.
    """
    check_tensor("ids", ids, "integer", ("hidden", hidden))
    check_like("index", index, ("ids", ids), "integer", "give the hidden state of each id")
    inverse_temperature(temperature, tuple(ids.shape), hidden)  # raises if it does not fit
    states = hidden.reshape(-1, hidden.shape[-1])
    valid, flat = check_mask(mask, ids), ids.reshape(-1).to(torch.int64)
    state = index.reshape(-1).to(torch.int64)
    state = state if valid is None else torch.where(valid, state, 0)
    outside = (state < 0) | (state >= states.shape[0])
    if bool(outside.any()):
        place = int(outside.to(torch.uint8).argmax())
        raise InputError(
            f"index holds {int(state[place])} at position {place} (counted over all terms), but "
            f"hidden has {states.shape[0]} hidden states, 0 to {states.shape[0] - 1}. Terms that "
            "are padding must be False in mask."
        )
    key, per_term = _number_pairs(state, flat), None
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        per_term = temperature.reshape(-1)
        key = _number_pairs(key, per_term)
    key = key if valid is None else torch.where(valid, key, -1)
    _, row_of_term, counts = torch.unique(key, return_inverse=True, return_counts=True)
    order, bounds = row_of_term.argsort(stable=True), torch.nn.functional.pad(counts, (1, 0))
    terms = Terms(order, Sequences(tuple(order.shape), bounds.cumsum(0), row_of_term[order]))
    state = terms.first(state)
    return (
        # The adjoint of either adds up rows in a fixed order, but only on its own device.
        states[state] if states.is_cuda else states.index_select(0, state),
        terms.first(flat),
        temperature if per_term is None else terms.first(per_term),
        None if valid is None else terms.first(valid),
        terms,
    )


def _number_pairs(a: Tensor, b: Tensor) -> Tensor:
    """A number for each pair, equal for equal pairs. `[M]`, `[M]` → `[M]`."""
    ranks: list[Tensor] = [torch.unique(x, return_inverse=True)[1] for x in (a, b)]
    return ranks[0] * a.shape[0] + ranks[1]
