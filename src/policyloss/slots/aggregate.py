"""The `aggregate` slot: how is it averaged? Each is called with `Tokens` (totals set) and returns the weight of each token.

`loss = Σ_t weight_t · loss_t`, and a weight depends only on the mask and on the totals of the step, so the loss is additive over
any partition of the batch. The two `Local…` ones break that on purpose, because published runs used them; their names say so.
divides_by: the count of the step that a weight divides by, if it is one of `Totals.tokens` and
`Totals.sequences`.

Legend: N valid tokens and B non-empty sequences *of the whole step*, L_i valid tokens of sequence i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.aggregate import per_sequence_mean, reciprocal
from policyloss.functional.segments import group_sum
from policyloss.slots import checks
from policyloss.tokens import Tokens
from policyloss.totals import GroupTokens, Totals


def _totals(t: Tokens) -> Totals:
    assert t.totals is not None, "totals are resolved before the aggregation"
    return t.totals


@dataclass(frozen=True)
class TokenMean:
    """Every token counts the same: `1 / N` (DAPO)."""

    divides_by: ClassVar[str] = "tokens"

    def __call__(self, t: Tokens) -> Tensor:
        totals = _totals(t)
        return totals.dp_size * reciprocal(totals.tokens, t.advantages)


@dataclass(frozen=True)
class SeqMeanTokenMean:
    """Every sequence counts the same, each the mean of its tokens: `1 / (B·(L_i + epsilon))` (GRPO).

    epsilon: 0 is the mean; verl and OpenRLHF add 1e-8 to every length, which their drop-ins keep.
    """

    divides_by: ClassVar[str] = "sequences"
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        checks.number(self, "epsilon", least=0, finite=True)

    def __call__(self, t: Tokens) -> Tensor:
        totals = _totals(t)
        return per_sequence_mean(t.lengths, t.sequences, self.epsilon) * (totals.dp_size * reciprocal(totals.sequences, t.lengths))


@dataclass(frozen=True)
class SeqMeanTokenSum:
    """Each sequence the sum of its tokens, mean over sequences: `1 / B`."""

    divides_by: ClassVar[str] = "sequences"

    def __call__(self, t: Tokens) -> Tensor:
        totals = _totals(t)
        return totals.dp_size * reciprocal(totals.sequences, t.advantages)


@dataclass(frozen=True)
class SeqMeanTokenSumNorm:
    """Dr.GRPO: token sum over a constant, mean over sequences: `1 / (B·horizon)`. horizon: your generation budget in tokens."""

    divides_by: ClassVar[str] = "sequences"
    horizon: float

    def __post_init__(self) -> None:
        checks.number(self, "horizon", above=0, finite=True, hint="it is the constant length that sums are divided by.")

    def __call__(self, t: Tokens) -> Tensor:
        totals = _totals(t)
        return (totals.dp_size / self.horizon) * reciprocal(totals.sequences, t.advantages)


@dataclass(frozen=True)
class TokenSum:
    """The plain sum: `1` per token."""

    def __call__(self, t: Tokens) -> Tensor:
        return torch.full((), float(_totals(t).dp_size), device=t.mask.device, dtype=t.dtype)


@dataclass(frozen=True)
class TokenSumNorm:
    """Legacy: the sum over a constant with no mean over sequences, `1 / horizon` (verl up to 0.7.0, ROLL, Trinity)."""

    horizon: float

    def __post_init__(self) -> None:
        checks.number(self, "horizon", above=0, finite=True, hint="it is the constant that the sum is divided by.")

    def __call__(self, t: Tokens) -> Tensor:
        return torch.full((), _totals(t).dp_size / self.horizon, device=t.mask.device, dtype=t.dtype)


@dataclass(frozen=True)
class PromptMean:
    """Every prompt counts the same, each the mean over all tokens of its group: `1 / (G·N_g)`. Reads group_ids."""

    def __call__(self, t: Tokens) -> Tensor:
        totals = _totals(t)
        if t.group_ids is None:
            raise InputError("PromptMean reads group_ids, which was not given; pass group_ids= (one integer per sequence).")
        groups = totals.groups
        if groups is None:
            raise InputError(
                "PromptMean needs the groups of the whole step: make totals with Totals.count(mask, group_ids=…), or give "
                "Totals(groups=the number of groups) if no group is split between calls."
            )
        if isinstance(groups, GroupTokens):
            n_g = _tokens_of_group(groups, t.group_ids)
            number: Tensor | int | float = (groups.tokens > 0).sum()
        else:
            n_g, number = group_sum(t.lengths, t.group_ids), groups
        each = totals.dp_size * reciprocal(number, t.lengths)
        return t.sequences.expand(reciprocal(n_g, t.lengths) * each)


def _tokens_of_group(groups: GroupTokens, group_ids: Tensor) -> Tensor:
    """The step's tokens of each sequence's group; NaN, which shows in the loss, for a group that was not counted."""
    if groups.ids.numel() == 0:
        return torch.full_like(group_ids, torch.nan, dtype=groups.tokens.dtype)
    place = torch.searchsorted(groups.ids, group_ids.contiguous()).clamp(max=groups.ids.shape[0] - 1)
    return torch.where(groups.ids[place] == group_ids, groups.tokens[place], torch.nan)


@dataclass(frozen=True)
class LengthWeighted:
    """LUSPO: a sequence's mean times its length, mean over sequences: `L_i / (B·L_i)`, which is `SeqMeanTokenSum`'s weight."""

    divides_by: ClassVar[str] = "sequences"

    def __call__(self, t: Tokens) -> Tensor:
        return SeqMeanTokenSum()(t)


@dataclass(frozen=True)
class LocalTokenMean:
    """Legacy: mean over the tokens *of this call*, whatever totals say. Depends on how the batch is cut (TRL `bnpo`)."""

    def __call__(self, t: Tokens) -> Tensor:
        return reciprocal(t.lengths.sum(), t.lengths)


@dataclass(frozen=True)
class LocalSeqMeanTokenMean:
    """Legacy: mean over the sequences *of this call* of their token means. Depends on how the batch is cut (TRL `grpo`)."""

    def __call__(self, t: Tokens) -> Tensor:
        return per_sequence_mean(t.lengths, t.sequences) * reciprocal((t.lengths > 0).sum(), t.lengths)


VARIANTS = (
    TokenMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenSum,
    TokenSumNorm,
    PromptMean,
    LengthWeighted,
    LocalTokenMean,
    LocalSeqMeanTokenMean,
)
