"""The `correction` slot: corrections for the difference between rollout engine and trainer.

A correction is called with `Tokens` and returns a `Corrected`.

A tuple may hold several corrections: their weights are multiplied, and a token is kept if all of
them keep it. A weight is `exp(old_logp - rollout_logp)` at a level: "token"; "geomean", the
geometric mean over the sequence; "turn", that over the token's turn (an unbroken run of the mask,
see `SegmentRatio`); "product", the likelihood ratio of the whole sequence. Weights carry no
gradient. `reads` of a part names the tensors that it reads, old_logp and rollout_logp by default.
`combine` applies all corrections of a spec.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError, SpecError
from policyloss.functional import correction, kl
from policyloss.functional.aggregate import check_alignment
from policyloss.functional.context_parallel import turns
from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import accumulator_dtype, fill
from policyloss.parts.validate import (
    Finite,
    LowerBound,
    NotNegative,
    Part,
    Positive,
    bounds,
    not_below,
)
from policyloss.parts.wording import bounds_in_words, interval_in_words, number, spoken
from policyloss.tokens import Tokens

Level = Literal["token", "turn", "geomean", "product"]
# The name of each level in a sentence.
LEVELS = {
    "token": "token's",
    "turn": "turn's geometric-mean",
    "geomean": "sequence's geometric-mean",
    "product": "sequence's product",
}


class Corrected(NamedTuple):
    """The result of a correction for each token.

    weight: the factor of the policy term (None: 1). keep: whether the token is kept (None: all
    tokens are).
    """

    weight: Tensor | None = None
    keep: Tensor | None = None


def _weight_sentence(level: str) -> str:
    return f"the policy term is weighted by the {LEVELS[level]} exp(old_logp - rollout_logp)"


def _at_level(t: Tokens, level: str) -> Tensor:
    if level == "turn":
        runs = turns(t.sequences, t.mask, t.positions, t.turn_ids)
        total, length = runs.sums(t.log_weight(), t.mask)
        return runs.expand(total / length.clamp(min=1))
    reduce = {"token": "token", "geomean": "mean", "product": "sum"}[level]
    return _reduce_over_ranks(t, t.log_weight(), reduce)


def _reduce_over_ranks(t: Tokens, x: Tensor, reduce: str) -> Tensor:
    """`correction.reduced` over context-parallel ranks; a mean is one all-reduce."""
    if reduce == "mean":
        return t.sequences.expand(t.sequence_mean(x))
    return correction.reduced(x, reduce, t.mask, None, t.sequences)


@dataclass(frozen=True)
class Truncate(Part):
    """Truncated importance sampling (TIS): multiply the policy loss by `clamp(w, low, high)`.

    w is the importance weight `e^(old_logp − rollout_logp)`; no token is rejected. level,
    log_clamp: as in `Band`.
    """

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    high: Annotated[float, bounds(above=0, hint="math.inf is no truncation."), not_below("low")]
    low: LowerBound = 0.0
    level: Level = "token"
    log_clamp: Positive | None = 20.0

    def __call__(self, t: Tokens) -> Corrected:
        w = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        return Corrected(w.clamp(min=self.low, max=self.high))

    @property
    def traits(self) -> tuple[str, ...]:
        return ("untruncated",) if math.isinf(self.high) else ()

    def sentence(self) -> str:
        if math.isinf(self.high):
            return f"{_weight_sentence(self.level)}, whatever its size"
        return f"{_weight_sentence(self.level)}, kept {interval_in_words(self.low, self.high)}"


@dataclass(frozen=True)
class Band(Part):
    """IcePop: multiply the policy term by the importance weight `w = e^(old_logp − rollout_logp)`,
    and reject the token unless `low <= w <= high` (see `LossSpec.rejected`).

    level: "token": w of the token itself; "geomean" or "product": one w per sequence, the geometric
    mean or the product of its tokens' weights; "turn": one w per turn, the geometric mean of its
    tokens. log_clamp: log w is clamped to ±log_clamp; None: no clamp.
    """

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    low: LowerBound
    high: Annotated[Positive, not_below("low")]
    level: Level = "token"
    log_clamp: Positive | None = 20.0

    def __call__(self, t: Tokens) -> Corrected:
        w = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        return Corrected(w, correction.within(w, self.low, self.high))

    def sentence(self) -> str:
        within = interval_in_words(self.low, self.high)
        return f"{_weight_sentence(self.level)}, and rejected unless that is {within}"


@dataclass(frozen=True)
class SequenceMask(Part):
    """seq-mask-TIS: reject a sequence if its ratio old / rollout is outside [low, high].

    The ratio of a token is exp(old_logp − rollout_logp). level: the sequence's ratio is the
    geometric mean or the product of its tokens' ratios. log_clamp: the logarithms of both ratios,
    the sequence's and the token's, are clamped to ±log_clamp; None: no clamp.

    weight: the factor of the policy term in the kept sequences. "token": the token's own ratio, not
    clamped to [low, high] (NeMo-RL, OpenRLHF); "sequence": the sequence's ratio (TRL); None: 1.
    """

    reads_logp: ClassVar[bool] = False
    low: LowerBound
    high: Annotated[Positive, not_below("low")]
    level: Literal["geomean", "product"] = "geomean"
    weight: Literal["token", "sequence"] | None = "token"
    log_clamp: Positive | None = 20.0

    @property
    def weighs(self) -> bool:
        """Whether the policy term of kept tokens is multiplied by a weight."""
        return self.weight is not None

    def __call__(self, t: Tokens) -> Corrected:
        w = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        keep = correction.within(w, self.low, self.high)
        if self.weight is None:
            return Corrected(correction.nan_where_undecided(w), keep)
        if self.weight == "token":
            return Corrected(correction.importance_weight(t.log_weight(), self.log_clamp), keep)
        return Corrected(w, keep)

    def sentence(self) -> str:
        weights = {
            "token": "its tokens keep their own weight",
            "sequence": "its tokens get that weight",
            None: "it counts fully",
        }
        level, within = LEVELS[self.level].split(" ")[1], interval_in_words(self.low, self.high)
        test = f"its {level} weight is {within}"
        return f"a sequence is rejected unless {test}; else {weights[self.weight]}"


@dataclass(frozen=True)
class DivergenceMask(Part):
    """Reject a token if the divergence between rollout and old policy is outside [low, high]:
    its policy term is 0, and `LossSpec.rejected` decides whether it counts in the mean.

    divergence: it compares the policies' distributions over two outcomes, "this token" and "any
    other token". "kl" is `p·log(p/q) + (1−p)·log((1−p)/(1−q))` in nats, "tv" is `|p−q|`, with p
    = exp(rollout_logp) and q = exp(old_logp), both clamped to [floor, 1−floor]. level: "token"
    decides for each token; "sequence" decides for a whole sequence, by the mean over its valid
    tokens. direction: "forward" is KL(p‖q); "both" is the larger of KL(p‖q) and KL(q‖p) (KPop);
    "tv" is the same in both directions. low: None (no bound) by default, because a divergence is
    never negative, and low=0.0 would reject a token whose divergence rounds to below 0. weight: the
    factor that multiplies the policy term of each kept token. "token": `exp(old_logp −
    rollout_logp)` (OpenRLHF), its logarithm clamped to ±log_clamp; None: 1.
    """

    reads_logp: ClassVar[bool] = False
    divergence: Literal["kl", "tv"]
    high: Annotated[NotNegative, not_below("low")]
    low: Finite | None = None
    level: Literal["token", "sequence"] = "token"
    weight: Literal["token"] | None = "token"
    floor: Annotated[float, bounds(above=0, below=0.5)] = 1e-6  # the smallest probability
    log_clamp: Positive | None = 20.0
    direction: Literal["forward", "both"] = "forward"

    @property
    def weighs(self) -> bool:
        """Whether the policy term of kept tokens is multiplied by a weight."""
        return self.weight is not None

    def __call__(self, t: Tokens) -> Corrected:
        old, rollout = t.anchor_logp("old"), t.anchor_logp("rollout")
        each = kl.binary_divergence(old, rollout, self.divergence, self.floor)
        if self.direction == "both":
            back = kl.binary_divergence(rollout, old, self.divergence, self.floor)
            each = torch.maximum(each, back)
        stat = _reduce_over_ranks(t, each, "token" if self.level == "token" else "mean")
        keep = correction.within(stat, self.low, self.high)
        if self.weight is None:
            return Corrected(correction.nan_where_undecided(stat), keep)
        return Corrected(correction.importance_weight(t.log_weight(), self.log_clamp), keep)

    def sentence(self) -> str:
        measure = "binary KL" if self.divergence == "kl" else "change"
        way = "rollout to old" if self.direction == "forward" else "either way"
        measure = f"the {measure} of its probability, {way},"
        what, test = "a token", measure
        if self.level == "sequence":
            what, test = "a sequence", f"the mean over its tokens of {measure}"
        nats = " nats" if self.divergence == "kl" else ""
        weighted = "it is weighted by exp(old_logp - rollout_logp)"
        weight = weighted if self.weight else "it counts fully"
        within = " and ".join(bounds_in_words(self.low, self.high))
        return f"{what} is rejected unless {test} is {within}{nats}; else {weight}"


@dataclass(frozen=True)
class Reject(Part):
    """Reject by an estimate of KL(rollout‖old), with d = old_logp − rollout_logp.

    estimator: k1 = −d, k2 = ½d², k3 = eᵈ−1−d.
    reduce: "token" tests the estimate of each token; "sum", "mean" and "max" test the sum, mean or
    maximum of the sequence's estimates, and keep or reject the whole sequence. A token is kept if
    `low <= estimate <= high` (None: no bound); the bounds are in nats.
    """

    reads_logp: ClassVar[bool] = False
    estimator: Literal["k1", "k2", "k3"]
    reduce: Literal["token", "sum", "mean", "max"] = "token"
    low: Finite | None = None
    high: Annotated[Finite, not_below("low")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise SpecError("Reject needs a bound: give low=, high= or both.")

    def __call__(self, t: Tokens) -> Corrected:
        estimate = kl.estimate(t.log_weight(), self.estimator)
        stat = _reduce_over_ranks(t, estimate, self.reduce)
        return Corrected(
            correction.nan_where_undecided(stat), correction.within(stat, self.low, self.high)
        )

    def sentence(self) -> str:
        over = {
            "token": "of the token",
            "sum": "summed over the sequence",
            "mean": "averaged over the sequence",
            "max": "at the sequence's worst token",
        }[self.reduce]
        within = " and ".join(bounds_in_words(self.low, self.high))
        estimate = f"{self.estimator}, estimating KL(rollout, old) {over}"
        return f"rejected unless {estimate}, is {within} nats"


@dataclass(frozen=True)
class Veto(Part):
    """Reject a sequence if the ratio `exp(old_logp − rollout_logp)` of any of its tokens is below
    `low` or above `high` (None: no bound).
    """

    reads_logp: ClassVar[bool] = False
    low: Annotated[float, bounds(above=0, finite=True)] | None = 1e-4
    high: Annotated[Positive, not_below("low")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is None and self.high is None:
            raise SpecError("Veto needs a bound: give low=, high= or both.")

    def __call__(self, t: Tokens) -> Corrected:
        log_w = t.log_weight()
        low = None if self.low is None else math.log(self.low)
        high = None if self.high is None else math.log(self.high)
        bad = ~correction.within(log_w, low, high)
        keep = ~correction.any_in_sequence(bad & t.mask, t.sequences)
        return Corrected(correction.nan_where_undecided(log_w), keep)

    def formula(self, anchor: str) -> list[tuple[str, str]]:
        """The condition for keeping a sequence, as text; the code compares logarithms."""
        bad = [f"exp(log_weight) < {number(self.low)}"] if self.low is not None else []
        bad += [f"exp(log_weight) > {number(self.high)}"] if self.high is not None else []
        either = bad[0] if len(bad) == 1 else " | ".join(f"({test})" for test in bad)
        return [("keep", f"~seq_any({either})")]

    def sentence(self) -> str:
        outside = " or ".join(bounds_in_words(self.low, self.high, ("below", "above")))
        return f"a sequence is rejected if any token's exp(old_logp - rollout_logp) is {outside}"


@dataclass(frozen=True)
class MomentBudget(Part):
    """M2PO: reject tokens with the largest `d²` until the mean `d²` of the rest is below `budget`.

    d = old_logp − rollout_logp. The mean covers the kept tokens of the whole step, on all ranks.
    Tokens with equal d² are all kept or all rejected. Source: arXiv 2510.01161.
    """

    reads_logp: ClassVar[bool] = False
    statistics_names: ClassVar[tuple[str, ...]] = ("moment_bound",)
    budget: Annotated[float, bounds(above=0, finite=True)] = 0.04

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The threshold: tokens with d² at or above it are rejected; inf rejects none."""
        groups = (t.sequences.cp_group, group)
        bound = correction.budget_bound(t.log_weight() ** 2, t.mask, self.budget, *groups)
        return {"moment_bound": bound}

    def __call__(self, t: Tokens) -> Corrected:
        moment = t.log_weight() ** 2
        keep = ~(moment >= t.batch_statistics(self)["moment_bound"].to(t.dtype))
        return Corrected(correction.nan_where_undecided(moment), keep)

    def formula(self, anchor: str) -> list[tuple[str, str]]:
        """The condition on which a token is kept."""
        return [("keep", f"log_weight ** 2 < budget_bound(log_weight ** 2, {number(self.budget)})")]

    def sentence(self) -> str:
        rest = f"the mean over the step's other tokens is below {spoken(self.budget)}"
        squares = "those with the largest squared old_logp - rollout_logp"
        return f"tokens are rejected, {squares} first, until {rest}"


@dataclass(frozen=True)
class OPSM(Part):
    """Off-policy sequence masking (DeepSeek-V3.2): reject tokens with A < 0 of drifted sequences.

    A sequence has drifted if `mean(source_logp - logp) > delta`, over its valid tokens.
    source: the policy from which the drift is measured, "old" or "rollout".
    """

    reads_logp: ClassVar[bool] = True
    reach: ClassVar[str] = "sequence"
    delta: NotNegative
    source: Literal["old", "rollout"] = "old"

    @property
    def reads(self) -> tuple[str, ...]:
        """The argument of `policy_loss` with the log-probabilities of `source`."""
        return (f"{self.source}_logp",)

    def __call__(self, t: Tokens) -> Corrected:
        drift = t.sequences.expand(t.sequence_mean(-t.log_ratio_to(self.source).detach()))
        keep = ~((t.advantages < 0) & (drift > self.delta))
        return Corrected(correction.nan_where_undecided(drift), keep)

    def sentence(self) -> str:
        drifted = f"in sequences where mean({self.source}_logp - logp) exceeds {spoken(self.delta)}"
        return f"tokens with negative advantage are rejected {drifted}"


@dataclass(frozen=True)
class Stale(Part):
    """Reject tokens older than `max_age`, and multiply the policy term of others by `decay^age`.

    The age of a token is the number of updates since the policy that sampled it (the argument
    `ages` of `policy_loss`). max_age: math.inf rejects no token (xtuner: max_token_staleness).
    decay: with 1, age does not change the weight (Flux: staleness_decay, 0.99).
    """

    reads_logp: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ("ages",)
    max_age: Annotated[float, bounds(least=0, hint="math.inf rejects no token.")]
    decay: Annotated[float, bounds(above=0, most=1)] = 1.0

    def __call__(self, t: Tokens) -> Corrected:
        weight = None if self.decay == 1 else torch.pow(self.decay, t.ages)
        if math.isinf(self.max_age):
            return Corrected(weight)
        return Corrected(weight, correction.within(t.ages, None, self.max_age))

    def sentence(self) -> str:
        faded = f"the policy term is weighted by {spoken(self.decay)} to the power of its age"
        old = f"tokens sampled more than {spoken(self.max_age)} updates ago are rejected"
        kinds = [] if math.isinf(self.max_age) else [old]
        kinds += [] if self.decay == 1 else [faded]
        return "; ".join(kinds) or "tokens of every age count fully"


@dataclass(frozen=True)
class TruncateRatio(Part):
    """Multiply each token by `clamp(ρ, low, high)/ρ`, ρ the ratio of current to rollout policy.

    ρ = exp(logp − rollout_logp), without gradient, its logarithm clamped to ±20. Use it with the
    ratio `TokenRatio(anchor="rollout")` if the parameters of the old policy are gone, so that
    old_logp cannot be computed (asynchronous training): the gradient of a token is then weighted by
    `clamp(ρ, low, high)`. `Truncate` bounds the ratio of old to rollout policy instead.
    """

    reads_logp: ClassVar[bool] = True
    reach: ClassVar[str] = "token"
    weighs: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("rollout_logp",)
    high: Annotated[float, bounds(above=0), not_below("low")]
    low: LowerBound = 0.0

    def __call__(self, t: Tokens) -> Corrected:
        log_ratio = t.log_ratio_to("rollout").detach()
        return Corrected(correction.truncation_share(log_ratio, self.low, self.high))

    def sentence(self) -> str:
        within = interval_in_words(self.low, self.high)
        return f"the policy term is scaled as if exp(logp - rollout_logp) were {within}"


@dataclass(frozen=True)
class SelfNormalise(Part):
    """Divide the weights of the other corrections by their mean over the step.

    The step is one optimizer step: all micro-batches on all ranks (see `measure`). over: "tokens"
    averages the weights of all tokens; "sequences" averages the mean weight of each sequence.
    `SelfNormalise` comes after all other corrections, wherever it is in the tuple. If the spec has
    rejected="keep", a rejected token enters the mean with weight 0; otherwise the mask excludes it,
    and the mean covers the kept tokens.
    """

    reads_logp: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]] = ()
    statistics_names: ClassVar[tuple[str, ...]] = ("weight_mean",)
    over: Literal["tokens", "sequences"] = "tokens"

    def statistics(self, t: Tokens, weight: Tensor, group: Any = None) -> dict[str, Tensor]:
        """The mean weight over the step."""
        wide = accumulator_dtype(weight.device)
        if self.over == "tokens":
            each, counted = t.sequences.sum(weight), t.counts
        else:
            each, counted = t.sequence_mean(weight), t.counts > 0
        weights, n = arithmetic().totals_over((group,), each, counted, dtype=wide)
        return {"weight_mean": weights / n.clamp(min=1)}

    def sentence(self) -> str:
        return f"the weights are divided by their mean over the step's {self.over}"

    def weight_formula(self, weight: str) -> str:
        """The weight after all corrections, as a formula."""
        mean = f"token_mean({weight})" if self.over == "tokens" else f"(sum({weight} / L) / B)"
        return f"where({weight} > 0, {weight} / {mean}, 0)"


VARIANTS = (
    *(Truncate, Band, SequenceMask, DivergenceMask, Reject, Veto, MomentBudget, OPSM, Stale),
    *(TruncateRatio, SelfNormalise),
)


class Combined(NamedTuple):
    """All corrections together.

    weight: the factor of the policy term. keep: the tokens that no correction rejects. verdicts:
    the tokens that each correction keeps, by its name. statistics: the batch-wide numbers used.
    """

    weight: Tensor | None
    keep: Tensor | None
    verdicts: dict[str, Tensor]
    statistics: dict[str, Tensor]


def combine(corrections: tuple[Any, ...], t: Tokens, group: Any = None) -> Combined:
    """Apply every correction of a spec to `t`.

    group: the ranks that share batch-wide numbers. `SelfNormalise` is left out: it is applied after
    rejected tokens have left the mask.
    """
    weight: Tensor | None = None
    keep: Tensor | None = None
    verdicts: dict[str, Tensor] = {}
    statistics: dict[str, Tensor] = {}
    for i, part in enumerate(c for c in corrections if not isinstance(c, SelfNormalise)):
        if t.measured is None and hasattr(part, "statistics"):
            statistics |= part.statistics(t, group)
        verdict = part(t.replace(measured=statistics) if statistics else t)
        if not isinstance(verdict, Corrected):
            raise InputError(
                "a correction must return policyloss.Corrected(weight, keep), got "
                f"{type(verdict).__name__}."
            )
        for x in verdict:
            if x is not None:
                check_alignment(
                    "a correction must return one weight and one verdict per token", x, t.mask
                )
        if verdict.weight is not None:
            weight = verdict.weight if weight is None else weight * verdict.weight
        if verdict.keep is not None:
            keep = verdict.keep if keep is None else keep & verdict.keep
            name = correction_name(part)
            verdicts[name if name not in verdicts else f"{name}_{i}"] = verdict.keep
    if keep is not None:
        # A rejected token has weight 0: its policy term vanishes, but a NaN in it, or in its
        # weight, does not.
        weight = torch.ones_like(t.advantages) if weight is None else weight
        weight = torch.where(keep | weight.isnan(), weight, 0)
    return Combined(weight, keep, verdicts, statistics)


def correction_name(part: Any) -> str:
    """The name of a correction in the metrics."""
    ours = isinstance(part, VARIANTS)
    return type(part).__name__ if ours else getattr(part, "__name__", "custom")


def self_normalised(
    corrections: tuple[Any, ...], corrected: Combined, t: Tokens, group: Any = None
) -> Combined:
    """Divide the weight by its mean over the tokens of `t`, if the spec has a `SelfNormalise`."""
    weight = corrected.weight
    for part in corrections:
        if isinstance(part, SelfNormalise) and weight is not None:
            weight = fill(weight, t.mask)
            statistics = part.statistics(t, weight, group) if t.measured is None else t.measured
            mean = statistics["weight_mean"].to(t.dtype)
            weight = weight / mean.clamp(min=torch.finfo(t.dtype).tiny)
            statistics = {**corrected.statistics, **statistics}
            corrected = corrected._replace(weight=weight, statistics=statistics)
    return corrected


@dataclass(frozen=True, eq=False)
class GivenWeight:
    """A correction that multiplies the policy term by this weight, token-shaped and detached.

    It is a callable, not data: a spec that holds one belongs to one batch and cannot be written as
    JSON.
    """

    weighs: ClassVar[bool] = True
    weight: Tensor

    def __call__(self, t: Tokens) -> Corrected:
        return Corrected(self.weight.detach().to(t.dtype))
