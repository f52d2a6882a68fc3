"""The `correction` slot: the rollout engine is not the trainer. Each is called with `Tokens` and returns a `Corrected`.

Several in a tuple compose: weights multiply, and a token is kept if all keep it. Weights are `exp(old_logp - rollout_logp)` at a
level: "token"; "geomean", the sequence's geometric mean; "product", the sequence's whole likelihood ratio. All are detached.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError, SpecError
from policyloss.functional import correction, kl
from policyloss.functional.collectives import all_sum
from policyloss.functional.masking import fill
from policyloss.slots import checks
from policyloss.tokens import Tokens

Level = Literal["token", "geomean", "product"]
LEVELS = ("token", "geomean", "product")


class Corrected(NamedTuple):
    """What a correction says of each token: a weight on the policy term (None: 1) and whether to keep it (None: all)."""

    weight: Tensor | None = None
    keep: Tensor | None = None


def _at_level(t: Tokens, level: str) -> Tensor:
    return _reduced(t, t.log_weight(), {"token": "token", "geomean": "mean", "product": "sum"}[level])


def _reduced(t: Tokens, x: Tensor, reduce: str) -> Tensor:
    """`correction.reduced`; the sum and the count of a mean cross context-parallel ranks in one all-reduce."""
    if reduce == "mean":
        return t.sequences.expand(t.sequence_mean(x))
    return correction.reduced(x, reduce, t.mask, None, t.sequences)


@dataclass(frozen=True)
class Truncate:
    """TIS: the weight is `clamp(w, low, high)`. Nothing is rejected."""

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    high: float
    low: float = 0.0
    level: Level = "token"
    log_clamp: float | None = 20.0

    def __post_init__(self) -> None:
        checks.number(self, "high", above=0, hint="math.inf is no truncation.")
        checks.number(self, "low", least=0)
        checks.interval(self, "low", "high")
        checks.choice(self, "level", LEVELS)
        checks.number(self, "log_clamp", above=0, optional=True)

    def __call__(self, t: Tokens) -> Corrected:
        w = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        return Corrected(w.clamp(min=self.low, max=self.high))


@dataclass(frozen=True)
class Band:
    """IcePop: the weight is `w` where `low <= w <= high`; elsewhere the token is rejected."""

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    low: float
    high: float
    level: Level = "token"
    log_clamp: float | None = 20.0

    def __post_init__(self) -> None:
        checks.number(self, "low", least=0)
        checks.number(self, "high", above=0)
        checks.interval(self, "low", "high")
        checks.choice(self, "level", LEVELS)
        checks.number(self, "log_clamp", above=0, optional=True)

    def __call__(self, t: Tokens) -> Corrected:
        w = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        return Corrected(w, correction.within(w, self.low, self.high))


@dataclass(frozen=True)
class SequenceMask:
    """seq-mask-TIS: a sequence whose ratio (`level`) leaves [low, high] is rejected; tokens of the others keep a weight.

    weight="token": the raw token weight (NeMo-RL, OpenRLHF); "sequence": the sequence's own ratio (TRL); None: 1, mask only.
    """

    reads_logp: ClassVar[bool] = False
    low: float
    high: float
    level: Literal["geomean", "product"] = "geomean"
    weight: Literal["token", "sequence"] | None = "token"
    log_clamp: float | None = 20.0

    @property
    def weighs(self) -> bool:
        """Whether the weight is more than a mask."""
        return self.weight is not None

    def __post_init__(self) -> None:
        checks.number(self, "low", least=0)
        checks.number(self, "high", above=0)
        checks.interval(self, "low", "high")
        checks.choice(self, "level", ("geomean", "product"))
        if self.weight is not None:
            checks.choice(self, "weight", ("token", "sequence"))
        checks.number(self, "log_clamp", above=0, optional=True)

    def __call__(self, t: Tokens) -> Corrected:
        ratio = correction.importance_weight(_at_level(t, self.level), self.log_clamp)
        keep = correction.within(ratio, self.low, self.high)
        if self.weight is None:
            return Corrected(correction.nan_where_undecided(ratio), keep)
        weight = correction.importance_weight(t.log_weight(), self.log_clamp) if self.weight == "token" else ratio
        return Corrected(weight, keep)


@dataclass(frozen=True)
class DivergenceMask:
    """Reject where rollout and old policy disagree on the probability of a token: a divergence outside [low, high].

    divergence: of the choice "this token or another" — "kl" `p·log(p/q) + (1−p)·log((1−p)/(1−q))` in nats, or "tv" `|p−q|`, with
    p = exp(rollout_logp), q = exp(old_logp), both held in [floor, 1−floor]. level: each "token", or a whole "sequence" by the mean
    over its valid tokens. low: None, as a divergence is never negative (0.0 would reject what rounding puts below it). The others
    keep a weight: "token", the raw `exp(old_logp − rollout_logp)` (OpenRLHF); None: 1, mask only.
    """

    reads_logp: ClassVar[bool] = False
    divergence: Literal["kl", "tv"]
    high: float
    low: float | None = None
    level: Literal["token", "sequence"] = "token"
    weight: Literal["token"] | None = "token"
    floor: float = 1e-6
    log_clamp: float | None = 20.0

    @property
    def weighs(self) -> bool:
        """Whether the weight is more than a mask."""
        return self.weight is not None

    def __post_init__(self) -> None:
        checks.choice(self, "divergence", ("kl", "tv"))
        checks.number(self, "high", least=0)
        checks.number(self, "low", optional=True)
        checks.interval(self, "low", "high")
        checks.choice(self, "level", ("token", "sequence"))
        if self.weight is not None:
            checks.choice(self, "weight", ("token",))
        checks.number(self, "floor", above=0)
        if self.floor >= 0.5:
            raise SpecError(f"DivergenceMask.floor is the smallest probability, below 0.5, got {self.floor!r}.")
        checks.number(self, "log_clamp", above=0, optional=True)

    def __call__(self, t: Tokens) -> Corrected:
        each = kl.binary_divergence(t.anchor_logp("old"), t.anchor_logp("rollout"), self.divergence, self.floor)
        stat = _reduced(t, each, "token" if self.level == "token" else "mean")
        keep = correction.within(stat, self.low, self.high)
        if self.weight is None:
            return Corrected(correction.nan_where_undecided(stat), keep)
        return Corrected(correction.importance_weight(t.log_weight(), self.log_clamp), keep)


@dataclass(frozen=True)
class Reject:
    """Reject by an estimate of KL(rollout‖old): k1 = −d, k2 = ½d², k3 = eᵈ−1−d, with d = old_logp − rollout_logp.

    reduce: per "token", or the "sum", "mean" or "max" over the sequence. Kept where `low <= estimate <= high` (None: no bound);
    the bounds are on the estimate itself, in nats.
    """

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    estimator: Literal["k1", "k2", "k3"]
    reduce: Literal["token", "sum", "mean", "max"] = "token"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        checks.choice(self, "estimator", ("k1", "k2", "k3"))
        checks.choice(self, "reduce", ("token", "sum", "mean", "max"))
        checks.number(self, "low", optional=True)
        checks.number(self, "high", optional=True)
        checks.interval(self, "low", "high")
        if self.low is None and self.high is None:
            raise SpecError("Reject needs a bound: give low=, high= or both.")

    def __call__(self, t: Tokens) -> Corrected:
        estimate = kl.estimate(t.log_weight(), self.estimator)
        stat = _reduced(t, estimate, self.reduce)
        return Corrected(correction.nan_where_undecided(stat), correction.within(stat, self.low, self.high))


@dataclass(frozen=True)
class Veto:
    """Reject a whole sequence if any of its tokens has a weight below `low` or above `high`: one impossible token spoils it."""

    reads_logp: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    low: float | None = 1e-4
    high: float | None = None

    def __post_init__(self) -> None:
        checks.number(self, "low", above=0, optional=True)
        checks.number(self, "high", above=0, optional=True)
        checks.interval(self, "low", "high")
        if self.low is None and self.high is None:
            raise SpecError("Veto needs a bound: give low=, high= or both.")

    def __call__(self, t: Tokens) -> Corrected:
        log_w = t.log_weight()
        low = None if self.low is None else math.log(self.low)
        high = None if self.high is None else math.log(self.high)
        bad = ~correction.within(log_w, low, high)
        keep = ~correction.any_in_sequence(bad & t.mask, t.sequences)
        return Corrected(correction.nan_where_undecided(log_w), keep)


@dataclass(frozen=True)
class OPSM:
    """Off-policy sequence masking (DeepSeek-V3.2): reject tokens with A < 0 in sequences where `mean(source_logp - logp) > delta`.

    source: whose log-probabilities the drift is measured from, "old" or "rollout".
    """

    reads_logp: ClassVar[bool] = True
    reach: ClassVar[str] = "sequence"
    weighs: ClassVar[bool] = False
    delta: float
    source: Literal["old", "rollout"] = "old"

    def __post_init__(self) -> None:
        checks.number(self, "delta", least=0)
        checks.choice(self, "source", ("old", "rollout"))

    def __call__(self, t: Tokens) -> Corrected:
        drift = t.sequences.expand(t.sequence_mean(-t.log_ratio_to(self.source).detach()))
        keep = ~((t.advantages < 0) & (drift > self.delta))
        return Corrected(correction.nan_where_undecided(drift), keep)


@dataclass(frozen=True)
class SelfNormalise:
    """Divide the weights by their mean over the step: over its tokens, or over its sequences (each sequence's mean weight).

    Applied after all other corrections, wherever it stands in the tuple. With rejected="keep" a rejected token enters the mean with
    weight 0; otherwise it has left the mask, and the mean is over the survivors.
    """

    reads_logp: ClassVar[bool] = False
    statistics_names: ClassVar[tuple[str, ...]] = ("weight_mean",)
    over: Literal["tokens", "sequences"] = "tokens"

    def __post_init__(self) -> None:
        checks.choice(self, "over", ("tokens", "sequences"))

    def statistics(self, t: Tokens, weight: Tensor, group: Any = None) -> dict[str, Tensor]:
        """The batch-wide mean weight."""
        if self.over == "tokens":
            pair = torch.stack([t.sequences.sum(weight).sum(), t.lengths.sum()])
        else:
            pair = torch.stack([t.sequence_mean(weight).sum(), (t.lengths > 0).sum().to(t.dtype)])
        total, n = all_sum(pair, group).unbind()
        return {"weight_mean": total / n.clamp(min=1)}


class Combined(NamedTuple):
    """All corrections together: the weight on the policy term, the tokens kept, and each one's own verdict by name."""

    weight: Tensor | None
    keep: Tensor | None
    verdicts: dict[str, Tensor]
    statistics: dict[str, Tensor]


def combine(corrections: tuple[Any, ...], t: Tokens) -> Combined:
    """Apply every correction of a spec to `t`, but for `SelfNormalise`, which comes after rejected tokens have left the mask."""
    weight: Tensor | None = None
    keep: Tensor | None = None
    verdicts: dict[str, Tensor] = {}
    for i, part in enumerate(c for c in corrections if not isinstance(c, SelfNormalise)):
        said = part(t)
        if not isinstance(said, Corrected):
            raise InputError(f"a correction must return policyloss.Corrected(weight, keep), got {type(said).__name__}.")
        if said.weight is not None:
            weight = said.weight if weight is None else weight * said.weight
        if said.keep is not None:
            keep = said.keep if keep is None else keep & said.keep
            name = type(part).__name__ if isinstance(part, VARIANTS) else getattr(part, "__name__", "custom")
            verdicts[name if name not in verdicts else f"{name}_{i}"] = said.keep
    if keep is not None:
        # A rejected token has weight 0: its policy term vanishes, but a NaN in it, or in its weight, does not.
        weight = torch.ones_like(t.advantages) if weight is None else weight
        weight = torch.where(keep | weight.isnan(), weight, 0)
    return Combined(weight, keep, verdicts, {})


def self_normalised(corrections: tuple[Any, ...], corrected: Combined, t: Tokens, group: Any = None) -> Combined:
    """Divide the weight by its mean over `t` (the tokens that still count) if the corrections say so."""
    weight = corrected.weight
    for part in corrections:
        if isinstance(part, SelfNormalise) and weight is not None:
            weight = fill(weight, t.mask)
            statistics = part.statistics(t, weight, group) if t.known is None else t.known
            weight = weight / statistics["weight_mean"].to(t.dtype).clamp(min=torch.finfo(t.dtype).tiny)
            corrected = corrected._replace(weight=weight, statistics=statistics)
    return corrected


VARIANTS = (Truncate, Band, SequenceMask, DivergenceMask, Reject, Veto, OPSM, SelfNormalise)
