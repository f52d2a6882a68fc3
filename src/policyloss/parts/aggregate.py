"""The `aggregate` slot: how are the tokens averaged?

Each part is called with a `Layout` and returns the weight of each token.
`loss = Σ_t weight_t · loss_t`, and a weight depends only on the mask and on the totals of the step,
so the losses of the micro-batches add up to the same loss however the batch is split. The two
`Local…` parts depend on the split; they are here because published runs used them.
divides_by: "tokens" or "sequences", the count in `Totals` that a weight divides by, if it divides
by one of these two.

Legend: N valid tokens and B non-empty sequences *of the whole step*, L_i valid tokens of sequence
i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.aggregate import per_sequence_mean, reciprocal
from policyloss.functional.context_parallel import turns
from policyloss.functional.segments import group_sum
from policyloss.parts.validate import Part, bounds
from policyloss.parts.wording import number, spoken
from policyloss.tokens import Layout
from policyloss.totals import GroupTokens

_HINT = "it is the constant length that sums are divided by."
Horizon: TypeAlias = Annotated[float, bounds(above=0, finite=True, hint=_HINT)]


def known_horizon(part: _OverHorizon) -> float:
    """The constant that sums are divided by; raise if it is not set."""
    if part.horizon is None:
        name = type(part).__name__
        raise InputError(
            f"{name} divides by a horizon, which is not set: it is the generation budget of your "
            "run, in tokens (max_completion_length, max_response_length, --max-new-tokens). Set "
            f"it with spec.with_horizon(tokens), or give {name}(tokens)."
        )
    return part.horizon


class _Average:
    """Base of the averages.

    words: the average in a sentence. average: the average of `{x}` in a formula.
    """

    words: ClassVar[str]
    average: ClassVar[str]

    def sentence(self) -> str:
        return self.words

    def averaged(self, x: str) -> str:
        return self.average.format(x=x)


@dataclass(frozen=True)
class _OverHorizon(_Average, Part):
    """Base of the sums that are divided by a constant."""

    horizon: Horizon | None = None

    def sentence(self) -> str:
        h = self.horizon
        constant = "a constant that is not set yet" if h is None else f"the constant {spoken(h)}"
        return self.words.format(constant=constant)

    def averaged(self, x: str) -> str:
        horizon = "horizon" if self.horizon is None else number(self.horizon)
        return self.average.format(x=x, horizon=horizon)


@dataclass(frozen=True)
class TokenMean(_Average):
    """Every token counts the same: `1 / N` for N valid tokens in the step (DAPO)."""

    divides_by: ClassVar[str] = "tokens"
    words = "every token of the step counts the same"
    average = "sum({x}) / N"

    def __call__(self, t: Layout) -> Tensor:
        totals = t.totals
        return reciprocal(totals.tokens, t.mask, t.dtype, totals.dp_size)


class _Factored(_Average):
    """The weights of a token and of all tokens are computed apart, and multiplied here."""

    def factors(self, t: Layout) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __call__(self, t: Layout) -> Tensor:
        per_token, shared = self.factors(t)
        return per_token * shared


@dataclass(frozen=True)
class SeqMeanTokenMean(_Factored):
    """GRPO: the mean over the step's B sequences of their token means: `1 / (B·L_i)` per token."""

    divides_by: ClassVar[str] = "sequences"
    words = "every sequence counts the same, each as the mean of its tokens"
    average = "sum({x} / L) / B"

    def factors(self, t: Layout) -> tuple[Tensor, Tensor]:
        """The two factors of a token's weight: `1 / L_i`, and `1 / B`, common to all tokens."""
        shared = reciprocal(t.totals.sequences, t.lengths, times=t.totals.dp_size)
        return per_sequence_mean(t.lengths, t.sequences), shared


@dataclass(frozen=True)
class SeqMeanTokenSum(_Average):
    """The mean over the step's B sequences of their token sums: `1 / B` per token."""

    divides_by: ClassVar[str] = "sequences"
    words = "every sequence as the sum of its tokens, mean over sequences"
    average = "sum({x}) / B"

    def __call__(self, t: Layout) -> Tensor:
        totals = t.totals
        return reciprocal(totals.sequences, t.mask, t.dtype, totals.dp_size)


@dataclass(frozen=True)
class SeqMeanTokenSumNorm(_OverHorizon):
    """Dr.GRPO: the mean over B sequences of (token sum / constant): `1 / (B·horizon)` per token.

    horizon: your generation budget in tokens. None means that it is not set yet; set it with
    `LossSpec.with_horizon` before the loss is computed.
    """

    divides_by: ClassVar[str] = "sequences"
    words = "token sums over {constant}, mean over sequences"
    average = "sum({x}) / (B * {horizon})"

    def __call__(self, t: Layout) -> Tensor:
        totals = t.totals
        return reciprocal(totals.sequences, t.mask, t.dtype, totals.dp_size / known_horizon(self))


@dataclass(frozen=True)
class TokenSum(_Average):
    """The plain sum: `1` per token."""

    words = "the plain sum over all tokens"
    average = "sum({x})"

    def __call__(self, t: Layout) -> Tensor:
        return torch.full((), float(t.totals.dp_size), device=t.mask.device, dtype=t.dtype)


@dataclass(frozen=True)
class TokenSumNorm(_OverHorizon):
    """Legacy: the sum over all tokens, divided by `horizon`, without a mean over sequences.

    ROLL and Trinity use it.
    horizon: the longest allowed completion, in tokens; None: set later with
    `LossSpec.with_horizon`.
    """

    words = "token sums over {constant}, not averaged over sequences"
    average = "sum({x}) / {horizon}"

    def __call__(self, t: Layout) -> Tensor:
        scale = t.totals.dp_size / known_horizon(self)
        return torch.full((), scale, device=t.mask.device, dtype=t.dtype)


@dataclass(frozen=True)
class PromptMean(_Average):
    """The mean over the G prompts of the mean over the N_g tokens of each: `1 / (G·N_g)`.

    It reads group_ids.
    """

    words = "every prompt counts the same, each as the mean over all tokens of its group"
    average = "sum({x} / N_group) / G"

    def __call__(self, t: Layout) -> Tensor:
        totals = t.totals
        if t.group_ids is None:
            raise InputError(
                "PromptMean reads group_ids, which is missing; pass group_ids= (one integer per "
                "sequence)."
            )
        groups = totals.groups
        if groups is None:
            raise InputError(
                "PromptMean needs the groups of the whole step: make totals with "
                "Totals.count(mask, group_ids=…), or give Totals(groups=the number of groups) if "
                "no group is split between calls."
            )
        if isinstance(groups, GroupTokens):
            n_g = _tokens_of_group(groups, t.group_ids, t.dtype)
            group_count: Tensor | int | float = (groups.tokens > 0).sum()
        else:
            n_g, group_count = group_sum(t.counts, t.group_ids), groups
        each = reciprocal(group_count, t.lengths, times=totals.dp_size)
        return t.sequences.expand(reciprocal(n_g, t.lengths) * each)


def _tokens_of_group(groups: GroupTokens, group_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The step's tokens of each sequence's group; NaN for a group that was not counted."""
    if groups.ids.numel() == 0:
        return torch.full_like(group_ids, torch.nan, dtype=dtype)
    place = torch.searchsorted(groups.ids, group_ids.contiguous())
    place = place.clamp(max=groups.ids.shape[0] - 1)
    return torch.where(groups.ids[place] == group_ids, groups.tokens[place].to(dtype), torch.nan)


@dataclass(frozen=True)
class TurnMean(_Factored):
    """The mean over sequences of the mean over their turns of the mean over each turn's tokens:
    token weight `1 / (B·K_i·L_k)` for B sequences, K_i turns in sequence i, L_k tokens in turn k.

    A turn is a run of valid tokens or, with `turn_ids`, a sequence's valid tokens of equal id. Pass
    each token's agent number as `turn_ids` to weight the agents of a sequence equally.
    """

    divides_by: ClassVar[str] = "sequences"
    words = "every sequence counts the same, its turns alike, each as the mean of its tokens"
    average = "sum({x} / (K * L_turn)) / B"

    def factors(self, t: Layout) -> tuple[Tensor, Tensor]:
        """`1 / (K_i·L_k)` of each token, and `1 / B`, which all tokens share."""
        runs = turns(t.sequences, t.mask, t.positions, t.turn_ids)
        (lengths,) = runs.sums(t.mask)
        per_token = t.fill(runs.expand(reciprocal(lengths, lengths, t.dtype)))
        # The shares of the tokens of a turn add up to 1.
        number = t.sequences.sum(per_token).round()
        shared = reciprocal(t.totals.sequences, number, times=t.totals.dp_size)
        return per_token * per_sequence_mean(number, t.sequences), shared


@dataclass(frozen=True)
class WeightMean(_Average):
    """The weighted mean over tokens: `w / W` for a token of weight w.

    W is the sum of the argument `weights` over the valid tokens of the step.
    """

    words = "every token counts by its weight, as a share of all weights of the step"
    average = "sum(weights * {x}) / W"

    def __call__(self, t: Layout) -> Tensor:
        totals = t.totals
        if t.weights is None:
            raise InputError("WeightMean reads weights, which is missing; pass weights=.")
        if totals.weights is None:
            raise InputError(
                "WeightMean needs the sum of the weights of the whole step: make totals with "
                "Totals.count(mask, weights=…)."
            )
        return reciprocal(totals.weights, t.mask, t.dtype, totals.dp_size)


@dataclass(frozen=True)
class LengthWeighted(_Average):
    """LUSPO: the mean over the step's B sequences of (token mean · length): `1 / B` per token.

    The same average as `SeqMeanTokenSum`, in LUSPO's terms.
    """

    divides_by: ClassVar[str] = "sequences"
    words = "every sequence as its mean times its length, mean over sequences"
    average = "sum(L * ({x} / L)) / B"

    def __call__(self, t: Layout) -> Tensor:
        return SeqMeanTokenSum()(t)

    def note_beside(self, other: object) -> str:
        """A remark if `other` is an average with the same weights, else ""."""
        same = (
            "LengthWeighted and SeqMeanTokenSum give every token the same weight: a mean times its "
            "length is a sum."
        )
        return same if isinstance(other, SeqMeanTokenSum) else ""


@dataclass(frozen=True)
class LocalTokenMean(_Average):
    """Legacy: the mean over the tokens of *one micro-batch* (TRL `bnpo`), so the split matters."""

    words = "every token of this call counts the same, whatever the step holds"
    average = "sum({x}) / n"

    def __call__(self, t: Layout) -> Tensor:
        return reciprocal(t.counts.sum(), t.lengths)


@dataclass(frozen=True)
class LocalSeqMeanTokenMean(_Factored):
    """Legacy: the mean over the sequences of *one micro-batch* of their token means (TRL `grpo`).

    It depends on how a step is split into calls of `policy_loss`.
    """

    words = "every sequence of this call counts the same, each as the mean of its tokens"
    average = "sum({x} / L) / b"

    def factors(self, t: Layout) -> tuple[Tensor, Tensor]:
        """The two factors of a token's weight: `1 / L_i`, and `1 / b` with b sequences here."""
        shared = reciprocal((t.counts > 0).sum(), t.lengths)
        return per_sequence_mean(t.lengths, t.sequences), shared


VARIANTS = (
    TokenMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenSum,
    TokenSumNorm,
    PromptMean,
    TurnMean,
    WeightMean,
    LengthWeighted,
    LocalTokenMean,
    LocalSeqMeanTokenMean,
)


def weight_factors(part: Any, t: Layout) -> tuple[Tensor, Tensor | None]:
    """The weights of an aggregation, and the factor that all tokens share, or None.

    The factor may depend on a count of this call; the sum over tokens need not wait for it.
    """
    return (
        part.factors(t)
        if type(part) in VARIANTS and isinstance(part, _Factored)
        else (part(t), None)
    )
