"""Supports: the vocabulary entries that a sampler's top-p or top-k kept, token by token.

A sampler with top-p or top-k draws from the softmax over the entries that it kept. The
log-probability of that draw is normalised over the kept entries alone. With the same support, so is
the log-probability of the policy in training: other entries have probability 0 and no gradient.
Legend: N tokens, K kept entries of all tokens together, R rows of a window.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description, fits_kind
from policyloss.errors import InputError
from policyloss.head.softmax_rows import ABSENT

SupportArgument = tuple[Tensor, Tensor]


class KeptEntries(NamedTuple):
    """The row `[K]` and the column of the logits `[K]` of every kept entry of some rows."""

    rows: Tensor
    columns: Tensor

    def restrict(self, z: Tensor, start: int = 0) -> None:
        """Replace every other logit of z `[R, V]` by `ABSENT`, so that its exponential is 0.

        start: the vocabulary entry of the first column of z.
        """
        columns = self.columns - start
        here = (columns >= 0) & (columns < z.shape[1])
        place = self.rows[here], columns[here]
        values = z[place]
        z.fill_(ABSENT)
        z[place] = values


class Support(NamedTuple):
    """Kept entries: `ids[offsets[i]:offsets[i+1]]` of token i. `[K]`, `[N+1]`, int64."""

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, support: Any, tokens: Tensor) -> Support | None:
        """The argument `support`, for `tokens` (one id each); all but the values of ids is checked.

        This waits for the device that the offsets are on.
        """
        if support is None:
            return None
        if not isinstance(support, (tuple, list)) or len(support) != 2:
            raise InputError(
                f"support must be a pair (ids, offsets) of tensors, got {description(support)}."
            )
        for name, x in zip(("support ids", "support offsets"), support, strict=True):
            if not isinstance(x, Tensor) or not fits_kind(x, "integer") or x.dim() != 1:
                raise InputError(f"{name} must be a 1-D tensor of integers, got {description(x)}.")
            check_tensor(name, x, "integer", ("ids", tokens))
        ids, offsets = (x.to(torch.int64) for x in support)
        n = tokens.numel()
        rises = offsets.shape[0] == n + 1 and bool(
            (offsets[0] == 0) & (offsets[-1] == ids.shape[0]) & (offsets.diff() >= 0).all()
        )
        if not rises:
            raise InputError(
                f"support offsets must be {n + 1} numbers, one more than there are tokens, that "
                f"rise from 0 to the number of kept entries ({ids.shape[0]}); got "
                f"{offsets.shape[0]} numbers: {offsets[:8].tolist()}…"
            )
        return cls(ids, offsets)

    def of_rows(self, index: Tensor | slice, first: int) -> KeptEntries:
        """The kept entries of the tokens at `index`. first: this rank's first vocabulary entry."""
        starts, lengths = self.offsets[:-1][index], self.offsets.diff()[index]
        rows = torch.repeat_interleave(lengths)
        before = lengths.cumsum(0) - lengths
        place = torch.arange(rows.shape[0], device=rows.device) + (starts - before)[rows]
        return KeptEntries(rows, self.ids[place] - first)

    def faults(self, ids: Tensor, valid: Tensor | None, size: int) -> Tensor:
        """Count the tokens outside their own support, and the support's ids outside the vocabulary.

        ids, valid: the flattened token ids and their mask. size: the size of the vocabulary.
        Returns two integers on the device, `[2]`.
        """
        at = torch.repeat_interleave(self.offsets.diff(), output_size=self.ids.shape[0])
        hits = torch.zeros_like(ids).index_add_(0, at, (self.ids == ids[at]).to(torch.int64))
        outside = hits == 0 if valid is None else valid & (hits == 0)
        return torch.stack([outside.sum(), ((self.ids < 0) | (self.ids >= size)).sum()])
