"""The next token of each row: the rule that draws it from the logits, and its support, the tokens
that top-p and top-k keep.

A recorded support is a pair (ids int32 `[K]`, offsets int64 `[L+1]`), as `policyloss.logprobs`
takes it: token t was drawn from `ids[offsets[t]:offsets[t+1]]`. The ids are ragged, because a mask
`[L, V]` for a vocabulary of 150,000 entries would be a thousand times as large.

Shapes: B rows, V vocabulary entries, L tokens of a completion, K kept entries of all L tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.head.support import Support


@dataclass(frozen=True)
class Rule:
    """The rule by which the next token is chosen from the logits.

    processed: normalise log-probabilities over the `support`, not over all tokens.
    """

    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    processed: bool = False

    def check(self) -> None:
        """Raise for numbers out of range."""
        # Much smaller temperatures are 0 in float32.
        if self.temperature != 0 and not 1e-30 <= self.temperature < math.inf:
            raise InputError(
                f"temperature is {self.temperature}; give a finite number >= 1e-30, or 0 for the "
                "likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number in (0, 1]; 1 turns it off.")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(
                f"top_k is {self.top_k}; give a whole number >= 1, or 0 to turn it off."
            )


class Drawn(NamedTuple):
    """token: int64 `[B]`. logp: its log-probability, `[B]`. kept: the tokens from which it was
    drawn, bool `[B, V]`; None means all tokens.
    """

    token: Tensor
    logp: Tensor
    kept: Tensor | None = None


def draw(logits: Tensor, uniform: Tensor, rule: Rule) -> Drawn:
    """The next token of each row. logits: `[B, V]`. uniform: `[B]`.

    token = min{v : Σ_{w ≤ v} p_w > uniform · Σ_w p_w},
    p = softmax(logits / temperature) on its `support`, 0 elsewhere.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A tiny temperature must not overflow: the largest logit becomes 0 before the division.
    scaled = (logits - logits.amax(-1, keepdim=True)) / (rule.temperature or 1.0)
    logp, kept = scaled.log_softmax(-1), None
    if rule.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        p = logp.exp()
        if rule.top_p < 1 or rule.top_k:
            kept = support(p, rule.top_p, rule.top_k)
            p = p.where(kept, 0.0)
            if rule.processed:
                logp = scaled.where(kept, -math.inf).log_softmax(-1)
        # Summed in the order of token ids, not of probability, so that rounding that swaps two
        # nearly equal tokens changes no sample.
        cdf = p.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
        # With NaN logits, the index is beyond the last token; the sampler reports them.
        token.clamp_(max=logits.shape[-1] - 1)
    return Drawn(token.squeeze(-1), logp.gather(-1, token).squeeze(-1), kept)


def support(p: Tensor, top_p: float, top_k: int) -> Tensor:
    """The tokens that may be drawn: bool `[B, V]`, at least one in each row. Of equally likely
    tokens, lower ids are kept first.

    First keep the `top_k` likeliest tokens (0: all). Of these, keep the fewest, likeliest first,
    that hold at least the share `top_p` of their mass.
    """
    ranked = p.topk(min(top_k or p.shape[-1], p.shape[-1])).values
    above = ranked.cumsum(-1, dtype=torch.float64)
    if top_p < 1:
        count = (above - ranked < top_p * above[:, -1:]).sum(-1, keepdim=True).clamp_(min=1)
    else:
        count = torch.full_like(ranked[:, :1], ranked.shape[-1], dtype=torch.int64)
    least = ranked.gather(-1, count - 1)
    likelier, equal = p > least, p == least
    return likelier | (equal & (equal.cumsum(-1) <= count - likelier.sum(-1, keepdim=True)))


Pair = tuple[Tensor, Tensor]


def first_tokens(support: Pair, n: int) -> Pair:
    """A copy of the support of the first n tokens."""
    ids, offsets = support
    return ids[: int(offsets[n])].clone(), offsets[: n + 1].clone()


def problem_of(support: Any, tokens: Tensor, vocabulary: int) -> str | None:
    """The problem of a support of `tokens` `[L]`, in words; None if it is valid or missing."""
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
        """Add the next token of some rows. kept: its support, bool `[len(rows), V]`."""
        place, ids = kept.nonzero(as_tuple=True)
        self._rows.append(rows[place])
        self._ids.append(ids.to(torch.int32))
        sizes = torch.zeros(self._count, dtype=torch.int64, device=kept.device)
        self._sizes.append(sizes.index_copy(0, rows, kept.sum(-1)))

    def pairs(self) -> list[Pair] | list[None]:
        """The support of each row, on the CPU; None for each if every token could be drawn."""
        if not self._ids:
            return [None] * self._count
        # Entries are in token order; a stable sort by row keeps that order within each row.
        ids = torch.cat(self._ids)[torch.cat(self._rows).argsort(stable=True)].cpu()
        sizes = torch.stack(self._sizes, 1).cpu()
        offsets = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))
        return [*zip(torch.split(ids, sizes.sum(1).tolist()), offsets, strict=True)]
