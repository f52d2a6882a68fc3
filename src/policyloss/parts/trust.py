"""The `trust` slot: how is a step limited?

Each part is called with `Tokens` (log_ratio and ratio set) and returns a `Surrogate`.
reach: the tokens, "token", "sequence" or "batch", on whose log-probabilities the slope of a token's
loss depends, apart from batch-wide numbers (see `LossSpec.reach`). follows_advantage: whether the
loss is a multiple of the advantage, and so is 0 where the advantage is 0. `sentence` describes the
part in words, `slopes` the tokens with a zero gradient. `explain` derives the part's formula from
its code, or reads it from `formula`.
The clips are in `trust_clips`. This module has the trust regions that weight a token smoothly
instead of cutting it off, the ones that choose tokens of the whole step, and the ones without a
bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from policyloss.errors import SpecError, safe_repr
from policyloss.functional import trust
from policyloss.functional.collectives import kth_largest, least_of_largest, reaches_threshold
from policyloss.functional.recurrence import future_sum
from policyloss.functional.trust import step_covariance, step_means
from policyloss.parts.trust_clips import Clip as Clip
from policyloss.parts.trust_clips import DetachedClip as DetachedClip
from policyloss.parts.trust_clips import GeometricClip as GeometricClip
from policyloss.parts.trust_clips import (
    LowerDistance,
    TrustPart,
    UpperDistance,
    bounds_of_clip,
    clipped_surrogate,
)
from policyloss.parts.trust_clips import ProbabilityBand as ProbabilityBand
from policyloss.parts.trust_clips import Surrogate as Surrogate
from policyloss.parts.trust_clips import TwoSidedClip as TwoSidedClip
from policyloss.parts.validate import LowerBound, Positive, Real, bounds, not_below
from policyloss.parts.wording import (
    ANCHORS,
    NO_ADVANTAGE,
    Condition,
    Slopes,
    interval_in_words,
    number,
    spoken,
)
from policyloss.tokens import Tokens

_MEANS = ("advantage_mean", "logp_mean", "advantage_rounding", "logp_rounding")

_COVARIANCE = ("cov", "(advantages - token_mean(advantages)) * (logp - token_mean(logp))")


def _is_seed(owner: CovClip, field: str) -> None:
    if not isinstance(owner.seed, int) or owner.seed >= 2**31:
        raise SpecError(
            f"{type(owner).__name__}.{field} must be an integer below 2**31, got {owner.seed!r}."
        )


Fraction: TypeAlias = Annotated[float, bounds(above=0, most=1, hint="It is a share of the tokens.")]
_FinitePositive: TypeAlias = Annotated[float, bounds(above=0, finite=True)]
_FiniteNotNegative: TypeAlias = Annotated[float, bounds(least=0, finite=True)]


@dataclass(frozen=True)
class Unbounded(TrustPart):
    """No limit on a change of the policy.

    form="ratio": `-A·r` (importance sampling). The other forms read no ratio. Two have REINFORCE's
    gradient: "logp": `-A·logp` (GPG; with A = 1 the cross-entropy), and "current":
    `-A·exp(logp - sg[logp])`, where sg stops the gradient, so the value is `-A` (UP-GRPO). Two
    more scale that gradient, with p = exp(logp): "probability": `-A·sg[p]·logp` (DFT), and
    "uncertainty": `-A·sg[p·(1 - p)]·logp` (CHORD).
    """

    form: Literal["ratio", "logp", "current", "probability", "uncertainty"] = "ratio"

    def __call__(self, t: Tokens) -> Surrogate:
        if self.form == "current":
            return Surrogate(-t.advantages * t.log_ratio_to("current").exp())
        if self.form in ("probability", "uncertainty"):
            p = t.logp.detach().exp()
            weight = p if self.form == "probability" else p * (1 - p)
            return Surrogate(-t.advantages * weight * t.logp)
        return Surrogate(-t.advantages * (t.ratio if self.form == "ratio" else t.logp))

    @property
    def reads_ratio(self) -> bool:
        """Whether the loss uses the probability ratio r."""
        return self.form == "ratio"

    def sentence(self) -> str:
        if self.form == "ratio":
            return "no limit: the ratio times the advantage"
        if self.form == "logp":
            return "no ratio and no limit: logp times the advantage"
        if self.form == "current":
            return (
                "no limit: the ratio to the current policy itself, exactly 1, times the advantage"
            )
        p = "p" if self.form == "probability" else "p(1 - p)"
        return f"no ratio and no limit: logp times the advantage and the stopped {p} of the token"

    def slopes(self) -> tuple[Slopes, ...]:
        if self.form == "ratio":
            return (Slopes(through_ratio=(NO_ADVANTAGE,)),)
        certain = (Condition("logp == 0", "the token is certain"),)
        also = certain if self.form == "uncertainty" else ()
        return (Slopes(through_logp=(NO_ADVANTAGE, *also)),)


@dataclass(frozen=True)
class SoftGate(TrustPart):
    """SAPO: `-A·(4/τ)·sigmoid(τ·(r-1))`, τ = tau_positive where A > 0, tau_negative elsewhere."""

    tau_positive: _FinitePositive = 1.0
    tau_negative: _FinitePositive = 1.05

    def __call__(self, t: Tokens) -> Surrogate:
        loss = trust.soft_gated(t.ratio, t.advantages, self.tau_positive, self.tau_negative)
        return Surrogate(loss)

    def sentence(self) -> str:
        positive, negative = spoken(self.tau_positive), spoken(self.tau_negative)
        taus = f"{positive} where the advantage is positive, {negative} elsewhere"
        return f"a sigmoid of the ratio fades the gradient out on both sides, at temperature {taus}"

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_ratio=(NO_ADVANTAGE,)),)


@dataclass(frozen=True)
class FutureKL(TrustPart):
    """FIPO: PPO's clip times a detached weight from the log-ratios of this and later tokens.

    The weight is `clip(exp(f), weight_min, weight_max)`, where `f_t = d_t + γ·f_{t+1}` over the
    valid tokens of the sequence, d is the log-ratio, and `γ = 2^(-1/half_life)`, half_life in
    tokens. Where A < 0 and r > safe_ratio, this weight is clipped again, to [0.8, 1]. The ratio r
    must be a `TokenRatio`. With `cp_group`, pass `positions` too. Source: arXiv 2603.19835.
    """

    reach: ClassVar[str] = "sequence"
    token_ratio: ClassVar[str] = "sums the log-ratios of tokens"
    eps_low: LowerDistance = 0.2
    eps_high: UpperDistance = 0.2
    half_life: Positive = 32.0
    weight_min: LowerBound = 1.0
    weight_max: Annotated[_FinitePositive, not_below("weight_min")] = 1.2
    safe_ratio: Positive = 4.0

    @property
    def gamma(self) -> float:
        """The discount γ per token."""
        return float(2 ** (-1 / self.half_life))

    def __call__(self, t: Tokens) -> Surrogate:
        d, surrogate = t.log_ratio.detach(), clipped_surrogate(t, self.eps_low, self.eps_high)
        future = future_sum(d, self.gamma, t.mask, t.sequences, t.positions)
        bounds = (self.weight_min, self.weight_max, self.safe_ratio)
        weight = trust.influence(future, t.ratio, t.advantages, *bounds)
        return surrogate._replace(loss=surrogate.loss * weight)

    def formula(self, anchor: str) -> list[tuple[str, Any]]:
        """The formula's lines for `explain`: name, and expression or part."""
        low, high = number(self.weight_min), number(self.weight_max)
        risky = f"(advantages < 0) & (ratio > {number(self.safe_ratio)})"
        return [
            ("future", f"future_sum(log_ratio, 2 ** (-1 / {number(self.half_life)}))"),
            ("influence", f"clip(exp(future), {low}, {high})"),
            ("clipped", Clip(self.eps_low, self.eps_high)),
            ("surrogate", f"clipped * where({risky}, clip(influence, 0.8, 1), influence)"),
        ]

    def sentence(self) -> str:
        clip = Clip(self.eps_low, self.eps_high).sentence()
        later = f"the ratios of this and later tokens (half-life {spoken(self.half_life)} tokens)"
        band = interval_in_words(self.weight_min, self.weight_max)
        risky = "within [0.8, 1] where the advantage is negative and the ratio above "
        weight = f"the loss is weighted by the product of {later}, kept {band}"
        return f"{clip}; {weight}, and {risky}{spoken(self.safe_ratio)}"

    def slopes(self) -> tuple[Slopes, ...]:
        return Clip(self.eps_low, self.eps_high).slopes()


@dataclass(frozen=True)
class GammaWeight(TrustPart):
    """VESPO: `-sg[φ(r)]·A·logp`, `φ(r) = e^λ·r^k·e^(-λr)`; (k, λ) by the sign of A.

    sg stops the gradient. Use it with the ratio `SequenceProduct`.
    """

    k_positive: _FiniteNotNegative = 2.0
    lambda_positive: _FinitePositive = 3.0
    k_negative: _FiniteNotNegative = 3.0
    lambda_negative: _FinitePositive = 2.0

    def __call__(self, t: Tokens) -> Surrogate:
        positive = (self.k_positive, self.lambda_positive)
        negative = (self.k_negative, self.lambda_negative)
        loss = trust.gamma_weighted(t.log_ratio, t.logp, t.advantages, positive, negative)
        return Surrogate(loss)

    def sentence(self) -> str:
        positive = f"power {spoken(self.k_positive)} and decay {spoken(self.lambda_positive)}"
        negative = f"{spoken(self.k_negative)} and {spoken(self.lambda_negative)}"
        smooth = "logp is weighted by a smooth, stopped function of the ratio"
        shape = "1 at ratio 1, largest at power / decay, fading beyond"
        signs = f"{positive} where the advantage is not negative, {negative} elsewhere"
        return f"{smooth}: {shape}: {signs}"

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_logp=(NO_ADVANTAGE,)),)


@dataclass(frozen=True)
class Quadratic(TrustPart):
    """DRO / Kimi k1.5: `-(A·logp - ½·beta·log_ratio²)`, a pull to the ratio's anchor policy."""

    follows_advantage: ClassVar[bool] = False
    beta: Annotated[
        float, bounds(above=0, finite=True, hint="beta scales the pull to the anchor policy.")
    ]

    def __call__(self, t: Tokens) -> Surrogate:
        return Surrogate(trust.quadratic(t.log_ratio, t.logp, t.advantages, self.beta))

    def sentence(self) -> str:
        pull = f"half of {spoken(self.beta)} times the squared log-ratio pulls to the anchor"
        return f"logp is weighted by the advantage, and {pull}"

    def slopes(self) -> tuple[Slopes, ...]:
        pull = Condition("log_ratio == 0", "at the anchor")
        idle = "nothing to learn from, and no pull to the anchor"
        return (Slopes(through_logp=(NO_ADVANTAGE,), through_ratio=(pull,), idle=idle),)


@dataclass(frozen=True)
class Regression(TrustPart):
    """`(beta·log_ratio - A)²`: the scaled log-ratio is fitted to the advantage A.

    With the ratio `SequenceProduct`, the log-ratio is the sum over the sequence, and all its tokens
    have the same term, which `SeqMeanTokenMean` counts once per sequence. This gives A*-PO (anchor
    "ref", A = reward - value of the prompt) and SPPO (anchor "old", A = η·(win rate - ½)).
    """

    follows_advantage: ClassVar[bool] = False
    beta: Annotated[
        float, bounds(above=0, finite=True, hint="beta scales the log-ratio to the advantage.")
    ]

    def __call__(self, t: Tokens) -> Surrogate:
        return Surrogate(trust.regression(t.log_ratio, t.advantages, self.beta))

    def sentence(self) -> str:
        fit = f"{spoken(self.beta)} times the log-ratio is regressed on the advantage"
        return f"{fit}: the loss is the squared difference"

    def slopes(self) -> tuple[Slopes, ...]:
        met = f"{number(self.beta)} * log_ratio == advantages"
        return (Slopes(through_ratio=(Condition(met, "its log-ratio is where it should be"),)),)


@dataclass(frozen=True)
class TaperedNegative(TrustPart):
    """TOPR: `-A·logp` where A > 0; elsewhere `-sg[min(r, ratio_max)]·A·logp`.

    r is the ratio of the spec; sg stops the gradient. Where A < 0, a smaller r weighs less.
    """

    ratio_max: Positive = 1.0

    def __call__(self, t: Tokens) -> Surrogate:
        r, a = t.ratio, t.advantages
        loss = trust.tapered_negative(r, t.logp, a, self.ratio_max)
        return Surrogate(loss, upper=t.mask & (a <= 0) & (r.detach() > self.ratio_max))

    def sentence(self) -> str:
        stopped = f"the stopped ratio, at most {spoken(self.ratio_max)}"
        where = f"where that is not positive also by {stopped}"
        so = "so that a bad token already unlikely fades out"
        return f"logp is weighted by the advantage; {where}, {so}"

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_logp=(NO_ADVANTAGE,)),)


@dataclass(frozen=True)
class CovClip(TrustPart):
    """Clip-Cov: PPO's clip, and randomly chosen tokens of high covariance get no policy gradient.

    The dropped tokens are chosen at random from the tokens with `cov_low < cov < cov_high` that PPO
    does not clip already; cov_t = (A_t - mean A)·(logp_t - mean logp), with means over the whole
    step (see `measure`). fraction: the share of dropped tokens among all tokens, at least one
    token; if fewer tokens qualify, all of these are dropped. A dropped token has policy term 0 and
    still counts in the denominator. eps_low, eps_high: as in `Clip`. Source: arXiv 2505.22617.
    The random draw is a hash of `seed`, the token's advantage and its old_logp (or whatever
    the ratio divides by), so the same tokens are dropped however the batch is split. (Candidates
    that agree in both numbers are all dropped, or none of them is.) A token whose advantage or logp
    differs from the mean only by rounding has covariance 0.
    """

    statistics_names: ClassVar[tuple[str, ...]] = (*_MEANS, "draw_threshold")
    eps_low: LowerDistance = 0.2
    eps_high: UpperDistance = 0.2
    fraction: Fraction = 2e-4
    cov_low: Real = 1.0
    cov_high: Annotated[Real, not_below("cov_low")] = 5.0
    seed: Annotated[int, bounds(least=0), _is_seed] = 0

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The step's mean advantage and logp, and the smallest draw that drops a candidate."""
        stats, k = _means(t, self.fraction, group)
        score = torch.where(self.candidates(t, _covariance(t, stats)), 0.0, -math.inf)
        least, draw = kth_largest(score, self._draws(t), k, t.sequences.cp_group, group)
        # Fewer candidates than k: all of them are dropped.
        threshold = torch.where(least == -math.inf, torch.iinfo(torch.int64).min, draw)
        return {**stats, "draw_threshold": threshold}

    def __call__(self, t: Tokens) -> Surrogate:
        stats = t.batch_statistics(self)
        candidates = self.candidates(t, _covariance(t, stats))
        dropped = candidates & (self._draws(t) >= stats["draw_threshold"])
        s = self.surrogate(t)
        return s._replace(loss=torch.where(dropped, 0, s.loss), dropped=dropped)

    def surrogate(self, t: Tokens) -> Surrogate:
        """PPO's clip, before any token is dropped."""
        return clipped_surrogate(t, self.eps_low, self.eps_high)

    def candidates(self, t: Tokens, cov: Tensor) -> Tensor:
        """The tokens that may be dropped: cov_low < cov < cov_high, and not clipped by PPO."""
        r, a = t.ratio.detach(), t.advantages
        unclipped = ~((a > 0) & (r > 1 + self.eps_high) | (a < 0) & (r < 1 - self.eps_low))
        inside = (cov > self.cov_low) & (cov < self.cov_high)
        return t.mask & unclipped & inside & ~r.isnan()

    def _draws(self, t: Tokens) -> Tensor:
        return trust.draws(self.seed, t.anchor_logp(t.anchor), t.advantages)

    def formula(self, anchor: str) -> list[tuple[str, Any]]:
        """The formula's lines for `explain`: name, and expression or part. anchor: the ratio's."""
        low, high = f"1 - {number(self.eps_low)}", f"1 + {number(self.eps_high)}"
        free = f"~((advantages > 0) & (ratio > {high}) | (advantages < 0) & (ratio < {low}))"
        inside = f"(cov > {number(self.cov_low)}) & (cov < {number(self.cov_high)})"
        count = f"max(floor({number(self.fraction)} * N), 1)"
        return [
            _COVARIANCE,
            ("candidate", f"{inside} & {free}"),
            ("lot", f"where(candidate, draw({self.seed}, {ANCHORS[anchor]}, advantages), -1)"),
            ("dropped", f"candidate & (lot >= kth_largest(lot, {count}))"),
            ("clipped", Clip(self.eps_low, self.eps_high)),
            ("surrogate", "where(dropped, 0, clipped)"),
        ]

    def sentence(self) -> str:
        pool = (
            f"tokens drawn at random among those with covariance between {spoken(self.cov_low)} "
            f"and {spoken(self.cov_high)}"
        )
        many = f"as many as {spoken(100 * self.fraction)} % of all tokens (at least one)"
        return f"{Clip(self.eps_low, self.eps_high).sentence()}; and {pool}, {many}, get none"

    def slopes(self) -> tuple[Slopes, ...]:
        clipped = bounds_of_clip(self.eps_low, f"1 + {number(self.eps_high)}", "inf")
        drawn = Condition("dropped", "drawn from the tokens of high covariance")
        return (Slopes(through_ratio=(NO_ADVANTAGE, *clipped, drawn)),)


@dataclass(frozen=True)
class CovKL(TrustPart):
    """KL-Cov: `-A·r`, plus `coef·|log_ratio|` on the tokens with the highest covariance.

    cov_t = (A_t - mean A)·(logp_t - mean logp) over the whole step. fraction: the share of
    penalised tokens among all tokens; at least one token is penalised. Source: arXiv 2505.22617.
    A hash of a token's log-probabilities orders tokens of equal covariance. A token whose advantage
    or logp differs from the mean only by rounding has covariance 0, so if all advantages are equal,
    only the hash decides.
    """

    follows_advantage: ClassVar[bool] = False
    statistics_names: ClassVar[tuple[str, ...]] = (*_MEANS, "cov_threshold", "draw_threshold")
    fraction: Fraction = 2e-4
    coef: Annotated[float, bounds(least=0, finite=True)] = 1.0

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The step's mean advantage and logp, and the smallest covariance that is penalised, with
        the smallest draw at that covariance.
        """
        stats, k = _means(t, self.fraction, group)
        cov, draws = self._score(t, stats)
        score, groups = torch.where(t.mask, cov, -math.inf), (t.sequences.cp_group, group)
        cov_k, draw_k = least_of_largest(score, draws, k, *groups)
        return {**stats, "cov_threshold": cov_k, "draw_threshold": draw_k}

    def __call__(self, t: Tokens) -> Surrogate:
        stats = t.batch_statistics(self)
        least = stats["cov_threshold"], stats["draw_threshold"]
        return self.penalise(t, t.mask & reaches_threshold(*self._score(t, stats), least))

    def penalise(self, t: Tokens, chosen: Tensor) -> Surrogate:
        """The loss with the penalty on the `chosen` tokens."""
        penalty = torch.where(chosen, self.coef * t.log_ratio.abs(), 0)
        return Surrogate(-t.advantages * t.ratio + penalty, upper=chosen)

    def _score(self, t: Tokens, stats: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return _covariance(t, stats), trust.draws(0, t.anchor_logp(t.anchor), t.logp.detach())

    def formula(self, anchor: str) -> list[tuple[str, str]]:
        """The formula's lines for `explain`: name and expression."""
        penalty = "abs(log_ratio)" if self.coef == 1 else f"{number(self.coef)} * abs(log_ratio)"
        return [
            _COVARIANCE,
            ("chosen", f"cov >= kth_largest(cov, max(floor({number(self.fraction)} * N), 1))"),
            ("surrogate", f"-advantages * ratio + where(chosen, {penalty}, 0)"),
        ]

    def sentence(self) -> str:
        some = f"the {spoken(100 * self.fraction)} % of the tokens with the highest covariance"
        return f"no clipping; {some} pay {spoken(self.coef)} times their absolute log-ratio"

    def slopes(self) -> tuple[Slopes, ...]:
        idle = "(advantages == 0) & (~chosen | (log_ratio == 0))"
        condition = Condition(idle, "nothing to learn from, and not held back")
        return (Slopes(through_ratio=(condition,)),)


def _means(t: Tokens, fraction: float, group: Any) -> tuple[dict[str, Tensor], Tensor]:
    """The means of the step, and the number of tokens in this share of it, at least one."""
    stats = step_means(t.advantages, t.logp.detach(), t.mask, t.sequences.cp_group, group)
    return stats, (fraction * stats["tokens"]).to(torch.int64).clamp(min=1)


def _covariance(t: Tokens, stats: dict[str, Tensor]) -> Tensor:
    return step_covariance(t.advantages, t.logp, stats)


@dataclass(frozen=True)
class BySign:
    """Tokens with A > 0 use the trust region `positive`, and all others use `negative`.

    At most one of the two may be `CovClip` or `CovKL`. That part sorts all tokens of the
    step, of both signs of A, but limits only those of its own sign.
    """

    positive: Any
    negative: Any

    def __post_init__(self) -> None:
        for field, part in (("positive", self.positive), ("negative", self.negative)):
            if isinstance(part, type):
                raise SpecError(
                    f"BySign.{field}: {part.__name__} is a class; make one: {part.__name__}(…)."
                )
            if not isinstance(part, VARIANTS):
                raise SpecError(
                    f"BySign.{field} must be a trust region of the library, got {safe_repr(part)}; "
                    "put your own function in the trust slot."
                )
        choosing = [
            type(part).__name__ for part in self._sides if getattr(part, "statistics_names", ())
        ]
        if len(choosing) > 1:
            raise SpecError(
                f"BySign: {' and '.join(choosing)} both choose tokens of the whole step; only one "
                "side may."
            )

    @property
    def _sides(self) -> tuple[Any, Any]:
        return self.positive, self.negative

    @property
    def reach(self) -> str:
        """The larger reach of the two sides (see `LossSpec.reach`)."""
        return "sequence" if "sequence" in {part.reach for part in self._sides} else "token"

    @property
    def follows_advantage(self) -> bool:
        """Whether a token with advantage 0 has loss 0, on both sides."""
        return all(part.follows_advantage for part in self._sides)

    @property
    def reads_ratio(self) -> bool:
        """Whether a side uses the spec's ratio."""
        return any(getattr(part, "reads_ratio", True) for part in self._sides)

    @property
    def statistics_names(self) -> tuple[str, ...]:
        """The names of the `statistics`."""
        return tuple(name for part in self._sides for name in getattr(part, "statistics_names", ()))

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The means and thresholds over the step that `CovClip` or `CovKL` needs, if used."""
        choosing = [part for part in self._sides if getattr(part, "statistics_names", ())]
        return {name: x for part in choosing for name, x in part.statistics(t, group).items()}

    def check_ratio(self, ratio: Any) -> None:
        """Raise unless both sides can be used with `ratio`."""
        for part in self._sides:
            part.check_ratio(ratio)

    def __call__(self, t: Tokens) -> Surrogate:
        positive, negative = self.positive(t), self.negative(t)
        loss = trust.by_sign(positive.loss, negative.loss, t.advantages)
        with torch.no_grad():
            good, never = t.advantages > 0, torch.zeros_like(t.mask)
            flags = [
                None
                if a is None and b is None
                else torch.where(good, never if a is None else a, never if b is None else b)
                for a, b in zip(positive[1:], negative[1:], strict=True)
            ]
        return Surrogate(loss, *flags)

    def sentence(self) -> str:
        positive, negative = (part.sentence() for part in self._sides)
        return f"where the advantage is positive: {positive}; elsewhere: {negative}"

    def slopes(self) -> tuple[Slopes, ...]:
        """Both sides' conditions for a token to have no gradient."""
        sides = (("positive", self.positive), ("negative", self.negative))
        return tuple(
            x for side, part in sides for slopes in part.slopes() for x in slopes.on_side(side)
        )


VARIANTS = (
    BySign,
    Clip,
    TwoSidedClip,
    DetachedClip,
    SoftGate,
    ProbabilityBand,
    GeometricClip,
    FutureKL,
    GammaWeight,
    CovClip,
    CovKL,
    Quadratic,
    Regression,
    TaperedNegative,
    Unbounded,
)
