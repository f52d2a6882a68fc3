"""Trust regions that bound the ratio or the probability of a token."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional import trust
from policyloss.functional.collectives import outside_level
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.validate import NotNegative, Part, bounds, not_below
from policyloss.parts.wording import (
    NO_ADVANTAGE,
    Condition,
    Slopes,
    interval_in_words,
    number,
    spoken,
)
from policyloss.tokens import Tokens

# The default of eps_high, which means "the same as eps_low"; no finished part holds it.
_SYMMETRIC = cast("float", None)


class Surrogate(NamedTuple):
    """A per-token loss, and flags for the tokens whose loss or gradient the trust region limits.

    upper, lower: by the upper or lower bound of the ratio. dual: by the dual clip. dropped: by a
    random choice, which removed the token's gradient. A flag is None if the trust region has no
    such limit. loss and flags (bool): `[B, T]` or packed `[N]`. The library's trust regions set at
    most one flag per token, and none where the mask is False.
    """

    loss: Tensor
    upper: Tensor | None = None
    lower: Tensor | None = None
    dual: Tensor | None = None
    dropped: Tensor | None = None


class TrustPart(Part):
    """Base of the trust regions, with the reach and `follows_advantage` of most (see `trust`)."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    token_ratio: ClassVar[str] = ""  # why the ratio must be a `TokenRatio`; "" if it need not be

    def check_ratio(self, ratio: Any) -> None:
        """Raise unless this part can be used with `ratio`."""
        if self.token_ratio and not isinstance(ratio, TokenRatio):
            raise SpecError(
                f"{type(self).__name__} {self.token_ratio}, so ratio must be TokenRatio, got "
                f"{type(ratio).__name__}."
            )


_RATIO = "ratio_min/ratio_max are ratios (0.8, 1.28), not distances from 1."
_DUAL = "dual is the largest ratio where the advantage is negative; None turns it off."
_DELTA = "delta is a ratio; it usually lies above 1 + eps_high."
_CAP = "cap is the largest weight of form='score'; math.inf is no cap."
_HINT = "eps_* are distances from 1; math.inf is no bound."


def _no_percentage(owner: Any, field: str, below: float) -> None:
    low = getattr(owner, field)
    if below <= low < math.inf:
        raise SpecError(
            f"{type(owner).__name__}.{field}={low:g} puts the lower bound at {1 - low:g}, which no "
            "ratio reaches: give a distance from 1 (0.2 for 20 %), or math.inf for no lower bound."
        )


def _warn_of_bounds(owner: Any, field: str) -> None:
    """Warn of two distances that look like bounds of the ratio."""
    low, high, name = owner.eps_low, owner.eps_high, type(owner).__name__
    if 0.5 <= low < 1 < high < 2:
        warnings.warn(
            f"{name}(eps_low={low:g}, eps_high={high:g}) looks like bounds of the ratio, but eps_* "
            f"are distances from 1: the ratio is held within [{1 - low:g}, {1 + high:g}]. For the "
            f"bounds [{low:g}, {high:g}] give eps_low={1 - low:g}, eps_high={high - 1:g}.",
            stacklevel=outside_level(),
        )


# A little above 1 is no lower bound either, but is no percentage.
LowerDistance: TypeAlias = Annotated[
    float, bounds(least=0, hint=_HINT), partial(_no_percentage, below=2)
]
UpperDistance: TypeAlias = Annotated[float, bounds(least=0, hint=_HINT), _warn_of_bounds]


@dataclass(frozen=True)
class Clip(TrustPart):
    """PPO: `max(-A·r, -A·clip(r, 1-eps_low, 1+eps_high))`, at most `-A·dual` where A < 0.

    eps_low, eps_high: distances from 1 (math.inf: no bound); `Clip(0.2)` is `Clip(0.2, 0.2)`.
    dual: a number above 1 (Ye et al. use 3); None leaves the bound `-A·dual` out.
    """

    eps_low: LowerDistance
    eps_high: UpperDistance = _SYMMETRIC
    dual: Annotated[float, bounds(above=1, hint=_DUAL)] | None = None

    def __post_init__(self) -> None:
        if self.eps_high is _SYMMETRIC:
            object.__setattr__(self, "eps_high", self.eps_low)
        super().__post_init__()

    def __call__(self, t: Tokens) -> Surrogate:
        return clipped_surrogate(t, self.eps_low, self.eps_high, self.dual)

    def sentence(self) -> str:
        if self.dual == 1 + self.eps_high and self.eps_low >= 1:
            where = f"where the ratio is above {spoken(self.dual)}"
            return f"the gradient stops {where}, whatever the sign of the advantage"
        inner = _stops(1 - self.eps_low, 1 + self.eps_high)
        if self.dual is None:
            return inner
        return f"{inner}; where the advantage is negative, also above {spoken(self.dual)}"

    def slopes(self) -> tuple[Slopes, ...]:
        dual = math.inf if self.dual is None else self.dual
        clipped = bounds_of_clip(self.eps_low, f"1 + {number(self.eps_high)}", number(dual))
        return (Slopes(through_ratio=(NO_ADVANTAGE, *clipped)),)

    @property
    def traits(self) -> tuple[str, ...]:
        holds = {
            "dual": self.dual is not None,
            "aipo": math.isinf(self.eps_low) and self.dual == 1 + self.eps_high,
            "asymmetric": self.eps_low != self.eps_high,
        }
        return tuple(word for word, true in holds.items() if true)


def clipped_surrogate(
    t: Tokens, eps_low: float, eps_high: float, dual: float | None = None
) -> Surrogate:
    """PPO's clip, with flags for the tokens that it limits."""
    r, a = t.ratio, t.advantages
    loss = trust.clipped(r, a, eps_low, eps_high, dual)
    if not t.flags:
        return Surrogate(loss)
    with torch.no_grad():
        positive, negative = a > 0, a < 0
        return Surrogate(
            loss,
            upper=positive & (r > 1 + eps_high),
            lower=negative & (r < 1 - eps_low),
            dual=None if dual is None else negative & (r > dual),
        )


def _stops(low: float, high: float) -> str:
    if math.isinf(high) and low <= 0:
        return "the gradient never stops"
    if math.isinf(high):
        return f"the gradient stops where the advantage pushes the ratio below {spoken(low)}"
    where = f"out of [{spoken(low)}, {spoken(high)}]" if low > 0 else f"above {spoken(high)}"
    return f"the gradient stops where the advantage pushes the ratio {where}"


def bounds_of_clip(eps_low: float, high: str, dual: str) -> tuple[Condition, ...]:
    """PPO's three bounds as conditions, without the bounds that no ratio reaches."""
    low = f"1 - {number(eps_low)}"
    conditions = {
        Condition(f"(advantages > 0) & (ratio > {high})", "held from above"): high[-3:] != "inf",
        Condition(f"(advantages < 0) & (ratio < {low})", "held from below"): eps_low < 1,
        Condition(f"(advantages < 0) & (ratio > {dual})", "held by the outer bound"): dual != "inf",
    }
    return tuple(condition for condition, reached in conditions.items() if reached)


@dataclass(frozen=True)
class TwoSidedClip(TrustPart):
    """INTELLECT-2: `-min(min(r, delta)·A, clip(r, 1-eps_low, 1+eps_high)·A)`.

    delta: the largest ratio, also where A < 0.
    """

    delta: Annotated[float, bounds(above=1, hint=_DELTA)]
    eps_low: LowerDistance = 0.2
    eps_high: UpperDistance = 0.2

    def __call__(self, t: Tokens) -> Surrogate:
        r, a = t.ratio, t.advantages
        high = 1 + self.eps_high
        loss = trust.two_sided_clipped(r, a, self.delta, self.eps_low, self.eps_high)
        if not t.flags:
            return Surrogate(loss)
        with torch.no_grad():
            positive, negative = a > 0, a < 0
            return Surrogate(
                loss,
                upper=positive & (r > min(self.delta, high)),
                lower=negative & (r < 1 - self.eps_low),
                dual=negative & (r > max(self.delta, high)),
            )

    def sentence(self) -> str:
        first, last = sorted((self.delta, 1 + self.eps_high))
        negative = f"where the advantage is negative, also above {spoken(last)}"
        return f"{_stops(1 - self.eps_low, first)}; {negative}"

    def note_beside(self, other: object) -> str:
        """The remark of `diff` on this trust region and `other`, or ""."""
        dual = Clip(self.eps_low, self.eps_high, dual=self.delta)
        if other != dual or self.delta < 1 + self.eps_high:
            return ""
        return "Dual clip and two-sided clip with these numbers are the same surrogate."

    def slopes(self) -> tuple[Slopes, ...]:
        first, last = sorted((self.delta, 1 + self.eps_high))
        clipped = bounds_of_clip(self.eps_low, number(first), number(last))
        return (Slopes(through_ratio=(NO_ADVANTAGE, *clipped)),)


@dataclass(frozen=True)
class DetachedClip(TrustPart):
    """CISPO: `-sg[clip(r, ratio_min, ratio_max)]·A·logp`, where sg stops the gradient.

    ratio_min and ratio_max bound the ratio r itself, not its distance from 1. outside="clip" keeps
    every token's gradient; "zero_by_sign" zeroes the loss of the tokens that PPO would clip, and
    clips r of the others; "zero" zeroes it for every token outside the bounds. weight="one"
    replaces the ratio by 1, so the loss of a token that is not zeroed is `-A·logp` (REC without
    importance sampling).
    """

    ratio_min: Annotated[float, bounds(least=0, finite=True, hint=_RATIO)]
    ratio_max: Annotated[float, bounds(above=0, hint=_RATIO), not_below("ratio_min")]
    outside: Literal["clip", "zero_by_sign", "zero"] = "clip"
    weight: Literal["ratio", "one"] = "ratio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight == "one" and self.outside == "clip":
            raise SpecError(
                "DetachedClip(weight='one') with outside='clip' would have no bound: give "
                "outside='zero' or 'zero_by_sign', or use Unbounded('logp')."
            )

    @classmethod
    def around_one(cls, eps_low: float, eps_high: float) -> DetachedClip:
        """CISPO with bounds at distances from 1 (verl, SkyRL): [1 − eps_low, 1 + eps_high]."""
        return cls(max(1 - eps_low, 0.0), 1 + eps_high)

    def __call__(self, t: Tokens) -> Surrogate:
        r = t.ratio
        loss = trust.detached_clipped(
            r, t.logp, t.advantages, self.ratio_min, self.ratio_max, self.outside, self.weight
        )
        if not t.flags:
            return Surrogate(loss)
        with torch.no_grad():
            return Surrogate(
                loss, upper=t.mask & (r > self.ratio_max), lower=t.mask & (r < self.ratio_min)
            )

    def sentence(self) -> str:
        band = interval_in_words(self.ratio_min, self.ratio_max)
        by = "the stopped ratio" if self.weight == "ratio" else "the advantage alone"
        if self.outside == "zero":
            return f"logp is weighted by {by}; a token counts only while its ratio is {band}"
        tail = "tokens that PPO would clip get none"
        if self.weight == "one":
            return f"logp is weighted by {by}; {tail} (the band is {band})"
        if self.outside == "clip":
            tail = "no token loses its gradient"
        return f"logp is weighted by the stopped ratio, kept {band}; {tail}"

    def slopes(self) -> tuple[Slopes, ...]:
        if self.outside == "clip":
            return (Slopes(through_logp=(NO_ADVANTAGE,)),)
        up, down = f"ratio > {number(self.ratio_max)}", f"ratio < {number(self.ratio_min)}"
        if self.outside == "zero_by_sign":
            up, down = f"(advantages > 0) & ({up})", f"(advantages < 0) & ({down})"
        conditions = [NO_ADVANTAGE, Condition(up, "dropped above the band")]
        if self.ratio_min > 0:
            conditions.append(Condition(down, "dropped below the band"))
        return (Slopes(through_logp=tuple(conditions)),)


@dataclass(frozen=True)
class ProbabilityBand(TrustPart):
    """DPPO: a token whose probability changed too much gets no gradient, but counts in the mean.

    p₀ is the token's probability under the policy in the ratio's denominator, p the current one.
    divergence: "tv" `|p-p₀|`, or "kl" `KL(p₀‖p)` over two outcomes, "this token" and "any other
    token". low, high: the largest divergence for p < p₀ and for p > p₀. sides: "advantage" drops
    the gradient only above the band with A > 0 and below it with A < 0, "both" on either side. The
    loss of other tokens: form="score" `-sg[min(r, cap)]·A·logp`, where sg stops the gradient;
    form="ratio" `-r·A` (the same gradient while r ≤ cap).
    """

    divergence: Literal["tv", "kl"]
    low: NotNegative
    high: NotNegative
    sides: Literal["advantage", "both"] = "advantage"
    form: Literal["score", "ratio"] = "score"
    cap: Annotated[float, bounds(above=0, hint=_CAP)] = 20.0

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The names of the fields that have no effect with this form."""
        return ("cap",) if self.form == "ratio" else ()

    def __call__(self, t: Tokens) -> Surrogate:
        r, a, logp = t.ratio, t.advantages, t.logp
        band = (self.divergence, self.low, self.high, self.sides == "both")
        outside = trust.outside_band(logp.detach(), t.anchor_logp(t.anchor), a, *band)
        # The weight is zeroed, not the product, so that a NaN advantage still shows.
        weight = torch.where(
            outside, 0, r if self.form == "ratio" else r.detach().clamp(max=self.cap)
        )
        loss = -weight * a if self.form == "ratio" else -weight * a * logp
        capped = t.mask & ~outside & (r.detach() > self.cap) if self.form == "score" else None
        return Surrogate(loss, upper=outside & (a > 0), lower=outside & ~(a > 0), dual=capped)

    def sentence(self) -> str:
        measure = "changed" if self.divergence == "tv" else "diverged (binary KL, in nats)"
        side = "either way" if self.sides == "both" else "in the direction of its advantage"
        weight = f"the stopped ratio, at most {spoken(self.cap)}, times logp"
        if self.form == "ratio":
            weight = "the ratio"
        far = f"{spoken(self.high)} upward or {spoken(self.low)} downward"
        until = f"a token counts until its probability has {measure} by {far}, {side}"
        return f"{until}; it counts {weight}"

    def slopes(self) -> tuple[Slopes, ...]:
        conditions = (NO_ADVANTAGE, Condition("outside", "its probability left the band"))
        if self.form == "ratio":
            return (Slopes(through_ratio=conditions),)
        return (Slopes(through_logp=conditions),)


@dataclass(frozen=True)
class GeometricClip(TrustPart):
    """GMPO: `-A·exp(mean_t c_t)`, with c_t the token's log-ratio, clipped.

    The log-ratio is clipped at eps_high where A > 0 and at -eps_low where A < 0; both are distances
    in *log* space. The ratio must be a `TokenRatio`, because `GeometricClip` itself takes the mean
    over the sequence.
    """

    reach: ClassVar[str] = "sequence"
    token_ratio: ClassVar[str] = "averages token log-ratios itself"
    eps_low: NotNegative
    eps_high: NotNegative

    def __call__(self, t: Tokens) -> Surrogate:
        d, a = t.log_ratio, t.advantages
        # As `trust.geometric_clipped`, with sum and count in one all-reduce where they cross ranks.
        mean = t.sequence_mean(trust.geometric_log_ratio(d, a, self.eps_low, self.eps_high))
        loss = -a * t.sequences.expand(mean.exp())
        if not t.flags:
            return Surrogate(loss)
        with torch.no_grad():
            return Surrogate(
                loss, upper=(a > 0) & (d > self.eps_high), lower=(a < 0) & (d < -self.eps_low)
            )

    def sentence(self) -> str:
        band = f"[{spoken(-self.eps_low)}, {spoken(self.eps_high)}]"
        clipped = f"each log-ratio is held within {band} on the side the advantage pushes to"
        return f"{clipped}, then the ratios are averaged geometrically over the sequence"

    def slopes(self) -> tuple[Slopes, ...]:
        above = f"(advantages > 0) & (log_ratio > {number(self.eps_high)})"
        below = f"(advantages < 0) & (log_ratio < {number(-self.eps_low)})"
        conditions = (Condition(above, "held from above"), Condition(below, "held from below"))
        return (Slopes(through_ratio=(NO_ADVANTAGE, *conditions), within_sequence=True),)
