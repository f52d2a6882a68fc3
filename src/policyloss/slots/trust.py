"""The `trust` slot: how is a step limited? Each is called with `Tokens` (log_ratio and ratio set) and returns a `Surrogate`.

reach: whose numbers the slope of a token's loss depends on beside batch-wide ones (see `LossSpec.reach`). follows_advantage:
whether the loss is the advantage times something, so that it vanishes with it.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional import trust
from policyloss.functional.masking import accumulator_dtype
from policyloss.functional.ranks import all_sum, at_least, kth_largest, outside_level
from policyloss.slots import checks
from policyloss.tokens import Tokens


class Surrogate(NamedTuple):
    """A per-token loss, and where the limit binds: `upper`, `lower`, `dual` (at the largest weight), `dropped` (by lot).

    Flags are bool and token-shaped. The parts here flag a token once at most, and no masked one.
    """

    loss: Tensor
    upper: Tensor | None = None
    lower: Tensor | None = None
    dual: Tensor | None = None
    dropped: Tensor | None = None


def _ratio(t: Tokens) -> Tensor:
    assert t.ratio is not None, "the ratio slot runs before the trust slot"
    return t.ratio


def _check_eps(owner: Clip | TwoSidedClip | CovClip) -> None:
    hint = "eps_* are distances from 1; math.inf is no bound."
    checks.number(owner, "eps_low", least=0, hint=hint)
    checks.number(owner, "eps_high", least=0, hint=hint)
    low, high, name = owner.eps_low, owner.eps_high, type(owner).__name__
    if 2 <= low < math.inf:  # a little above 1 is no lower bound either, but is no percentage
        raise SpecError(
            f"{name}.eps_low={low:g} puts the lower bound at {1 - low:g}, which no ratio reaches: "
            "give a distance from 1 (0.2 for 20 %), or math.inf for no lower bound."
        )
    if 0.5 <= low < 1 < high < 2:
        warnings.warn(
            f"{name}(eps_low={low:g}, eps_high={high:g}) looks like bounds of the ratio, but eps_* "
            f"are distances from 1: the ratio is held within [{1 - low:g}, {1 + high:g}]. For the "
            f"bounds [{low:g}, {high:g}] give eps_low={1 - low:g}, eps_high={high - 1:g}.",
            stacklevel=outside_level(),
        )


@dataclass(frozen=True)
class Clip:
    """PPO: `max(-A·r, -A·clip(r, 1-eps_low, 1+eps_high))`; with `dual`, at most `-A·dual` where A < 0.

    eps_low, eps_high: distances from 1 (math.inf: no bound). dual: None for off, else > 1 (Ye et al. use 3).
    """

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    eps_low: float
    eps_high: float
    dual: float | None = None

    def __post_init__(self) -> None:
        _check_eps(self)
        checks.number(
            self,
            "dual",
            above=1,
            optional=True,
            hint="dual is the largest ratio where the advantage is negative; None turns it off.",
        )

    def __call__(self, t: Tokens) -> Surrogate:
        return _clipped(t, self.eps_low, self.eps_high, self.dual)


def _clipped(t: Tokens, eps_low: float, eps_high: float, dual: float | None = None) -> Surrogate:
    r, a = _ratio(t), t.advantages
    loss = trust.clipped(r, a, eps_low, eps_high, dual)
    with torch.no_grad():
        positive, negative = a > 0, a < 0
        return Surrogate(
            loss,
            upper=positive & (r > 1 + eps_high),
            lower=negative & (r < 1 - eps_low),
            dual=None if dual is None else negative & (r > dual),
        )


@dataclass(frozen=True)
class TwoSidedClip:
    """INTELLECT-2: `-min(min(r, delta)·A, clip(r, 1-eps_low, 1+eps_high)·A)`. delta: the largest ratio, for either sign of A."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    delta: float
    eps_low: float = 0.2
    eps_high: float = 0.2

    def __post_init__(self) -> None:
        _check_eps(self)
        checks.number(self, "delta", above=1, hint="delta is a ratio; it usually lies above 1 + eps_high.")

    def __call__(self, t: Tokens) -> Surrogate:
        r, a = _ratio(t), t.advantages
        high = 1 + self.eps_high
        loss = trust.two_sided_clipped(r, a, self.delta, self.eps_low, self.eps_high)
        with torch.no_grad():
            positive, negative = a > 0, a < 0
            return Surrogate(
                loss,
                upper=positive & (r > min(self.delta, high)),
                lower=negative & (r < 1 - self.eps_low),
                dual=negative & (r > max(self.delta, high)),
            )


@dataclass(frozen=True)
class DetachedClip:
    """CISPO: `-sg[clip(r, ratio_min, ratio_max)]·A·logp`.

    ratio_min, ratio_max are ratios, not distances. outside="clip" keeps every token's gradient; "zero_by_sign" drops the tokens
    PPO would clip; "zero" drops every token outside the band.
    """

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    ratio_min: float
    ratio_max: float
    outside: Literal["clip", "zero_by_sign", "zero"] = "clip"

    def __post_init__(self) -> None:
        hint = "ratio_min/ratio_max are ratios (0.8, 1.28), not distances from 1."
        checks.number(self, "ratio_min", least=0, hint=hint)
        checks.number(self, "ratio_max", above=0, hint=hint)
        checks.interval(self, "ratio_min", "ratio_max")
        checks.choice(self, "outside", ("clip", "zero_by_sign", "zero"))

    @classmethod
    def around_one(cls, eps_low: float, eps_high: float) -> DetachedClip:
        """The band [1 − eps_low, 1 + eps_high], for those who give CISPO's bounds as distances (verl, SkyRL)."""
        return cls(max(1 - eps_low, 0.0), 1 + eps_high)

    def __call__(self, t: Tokens) -> Surrogate:
        r = _ratio(t)
        loss = trust.detached_clipped(r, t.logp, t.advantages, self.ratio_min, self.ratio_max, self.outside)
        with torch.no_grad():
            return Surrogate(loss, upper=t.mask & (r > self.ratio_max), lower=t.mask & (r < self.ratio_min))


@dataclass(frozen=True)
class SoftGate:
    """SAPO: `-A·(4/τ)·sigmoid(τ·(r-1))`, τ = tau_positive where A > 0, tau_negative elsewhere."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        checks.number(self, "tau_positive", above=0, finite=True)
        checks.number(self, "tau_negative", above=0, finite=True)

    def __call__(self, t: Tokens) -> Surrogate:
        return Surrogate(trust.soft_gated(_ratio(t), t.advantages, self.tau_positive, self.tau_negative))


@dataclass(frozen=True)
class ProbabilityBand:
    """DPPO: a token counts only while its probability is near the anchor's; the weight is the ratio.

    divergence: "tv" `|p-p₀|`, or "kl" `KL(p₀‖p)` of "this token or another". low, high: the largest divergence downward and
    upward. sides="advantage" drops a token only when it left in the direction the advantage pushes, "both" on either side.
    form="score": `-sg[min(r, cap)]·A·logp`; form="ratio": `-r·A` (the same gradient while r ≤ cap). The anchor is the ratio's.
    """

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    divergence: Literal["tv", "kl"]
    low: float
    high: float
    sides: Literal["advantage", "both"] = "advantage"
    form: Literal["score", "ratio"] = "score"
    cap: float = 20.0

    def __post_init__(self) -> None:
        checks.choice(self, "divergence", ("tv", "kl"))
        checks.number(self, "low", least=0)
        checks.number(self, "high", least=0)
        checks.choice(self, "sides", ("advantage", "both"))
        checks.choice(self, "form", ("score", "ratio"))
        checks.number(self, "cap", above=0, hint="cap is the largest weight of form='score'; math.inf is no cap.")

    def __call__(self, t: Tokens) -> Surrogate:
        r, a, logp = _ratio(t), t.advantages, t.logp
        outside = trust.outside_band(
            logp.detach(), t.anchor_logp(t.anchor), a, self.divergence, self.low, self.high, self.sides == "both"
        )
        # The weight is zeroed, not the product, so that a NaN advantage still shows.
        weight = torch.where(outside, 0, r if self.form == "ratio" else r.detach().clamp(max=self.cap))
        loss = -weight * a if self.form == "ratio" else -weight * a * logp
        capped = t.mask & ~outside & (r.detach() > self.cap) if self.form == "score" else None
        return Surrogate(loss, upper=outside & (a > 0), lower=outside & ~(a > 0), dual=capped)


@dataclass(frozen=True)
class GeometricClip:
    """GMPO: `-A·exp(mean_t c_t)`, c_t the token log-ratio clipped to [-eps_low, eps_high] where the advantage pushes it out.

    eps_low, eps_high are distances in *log* space. Needs `TokenRatio`; the product over the sequence is taken here. epsilon: added
    to the sequence's length in the mean (0 is the mean; verl adds 1e-8).
    """

    reach: ClassVar[str] = "sequence"
    follows_advantage: ClassVar[bool] = True
    eps_low: float
    eps_high: float
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        for name in ("eps_low", "eps_high", "epsilon"):
            checks.number(self, name, least=0, finite=name == "epsilon")

    def __call__(self, t: Tokens) -> Surrogate:
        d, a = t.log_ratio, t.advantages
        if self.epsilon:
            loss = trust.geometric_clipped(d, a, self.eps_low, self.eps_high, t.lengths, t.sequences, self.epsilon)
        else:  # the same, with sum and count in one all-reduce where they cross ranks
            mean = t.sequence_mean(trust.geometric_log_ratio(d, a, self.eps_low, self.eps_high))
            loss = -a * t.sequences.expand(mean.exp())
        with torch.no_grad():
            return Surrogate(loss, upper=(a > 0) & (d > self.eps_high), lower=(a < 0) & (d < -self.eps_low))


@dataclass(frozen=True)
class GammaWeight:
    """VESPO: `-sg[φ(r)]·A·logp`, `φ(r) = e^λ·r^k·e^(-λr)`; (k, λ) by the sign of A. Meant for `SequenceProduct`."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        for name in ("k_positive", "k_negative"):
            checks.number(self, name, least=0, finite=True)
        for name in ("lambda_positive", "lambda_negative"):
            checks.number(self, name, above=0, finite=True)

    def __call__(self, t: Tokens) -> Surrogate:
        positive, negative = (self.k_positive, self.lambda_positive), (self.k_negative, self.lambda_negative)
        return Surrogate(trust.gamma_weighted(t.log_ratio, t.logp, t.advantages, positive, negative))


@dataclass(frozen=True)
class Quadratic:
    """DRO / Kimi k1.5: `-(A·logp - ½·beta·log_ratio²)`: no ratio, a quadratic pull to the anchor."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = False
    beta: float

    def __post_init__(self) -> None:
        checks.number(self, "beta", above=0, finite=True, hint="beta scales the pull to the anchor policy.")

    def __call__(self, t: Tokens) -> Surrogate:
        return Surrogate(trust.quadratic(t.log_ratio, t.logp, t.advantages, self.beta))


@dataclass(frozen=True)
class TaperedNegative:
    """TOPR: `-A·logp` where A > 0; elsewhere `-sg[min(r, ratio_max)]·A·logp`, so a bad token already unlikely fades out."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    ratio_max: float = 1.0

    def __post_init__(self) -> None:
        checks.number(self, "ratio_max", above=0)

    def __call__(self, t: Tokens) -> Surrogate:
        r, a = _ratio(t), t.advantages
        loss = trust.tapered_negative(r, t.logp, a, self.ratio_max)
        return Surrogate(loss, upper=t.mask & (a <= 0) & (r.detach() > self.ratio_max))


@dataclass(frozen=True)
class Unbounded:
    """No limit. form="ratio": `-A·r` (importance sampling); form="logp": `-A·logp` (REINFORCE, GPG; reads no ratio)."""

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    form: Literal["ratio", "logp"] = "ratio"

    def __post_init__(self) -> None:
        checks.choice(self, "form", ("ratio", "logp"))

    def __call__(self, t: Tokens) -> Surrogate:
        return Surrogate(-t.advantages * (_ratio(t) if self.form == "ratio" else t.logp))


@dataclass(frozen=True)
class CovClip:
    """Clip-Cov: PPO's clip, and a random `fraction` of the tokens with `cov_low < cov < cov_high` get no gradient (2505.22617).

    cov_t = (A_t - mean A)·(logp_t - mean logp) over the whole step. At least one token, none that PPO clips already. The choice
    depends on `seed` and on the token's own numbers, not on where it stands: any cut of the batch drops the same tokens. (Tokens
    with the same anchor log-probability and advantage share a draw, so of many such, all or none are dropped.)
    """

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = True
    statistics_names: ClassVar[tuple[str, ...]] = ("advantage_mean", "logp_mean", "draw_threshold")
    eps_low: float = 0.2
    eps_high: float = 0.2
    fraction: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_eps(self)
        _check_fraction(self)
        checks.number(self, "cov_low")
        checks.number(self, "cov_high")
        checks.interval(self, "cov_low", "cov_high")
        _check_seed(self)

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The batch-wide numbers: mean advantage and logp, and the draw from which a candidate is dropped."""
        stats = _means(t, group)
        score = torch.where(self.candidates(t, stats), 0.0, -math.inf)
        k = _how_many(self.fraction, stats["tokens"])
        least, draw = kth_largest(score, self._draws(t), k, t.sequences.cp_group, group)
        # Fewer candidates than k: all of them are dropped.
        return {**stats, "draw_threshold": torch.where(least == -math.inf, torch.iinfo(torch.int64).min, draw)}

    def __call__(self, t: Tokens) -> Surrogate:
        stats = t.batch_statistics(self)
        dropped = self.candidates(t, stats) & (self._draws(t) >= stats["draw_threshold"])
        s = self.surrogate(t)
        return s._replace(loss=torch.where(dropped, 0, s.loss), dropped=dropped)

    def surrogate(self, t: Tokens) -> Surrogate:
        """PPO's clip, before any token is dropped."""
        return _clipped(t, self.eps_low, self.eps_high)

    def candidates(self, t: Tokens, stats: dict[str, Tensor]) -> Tensor:
        """The tokens that may be dropped: covariance inside the window, and not clipped already."""
        r, a = _ratio(t).detach(), t.advantages
        cov = trust.covariance(t.logp, a, stats["logp_mean"], stats["advantage_mean"])
        unclipped = ~((a > 0) & (r > 1 + self.eps_high) | (a < 0) & (r < 1 - self.eps_low))
        inside = (cov > self.cov_low) & (cov < self.cov_high)
        return t.mask & unclipped & inside & ~r.isnan()

    def _draws(self, t: Tokens) -> Tensor:
        return trust.draw(self.seed, t.anchor_logp(t.anchor), t.advantages)


@dataclass(frozen=True)
class CovKL:
    """KL-Cov: `-A·r`, plus `coef·|log_ratio|` on the `fraction` of tokens with the highest covariance (2505.22617).

    cov_t = (A_t - mean A)·(logp_t - mean logp) over the whole step; at least one token. Between equal covariances a draw decides
    that depends on the token's own numbers only (tokens with the same numbers fall together).
    """

    reach: ClassVar[str] = "token"
    follows_advantage: ClassVar[bool] = False
    statistics_names: ClassVar[tuple[str, ...]] = ("advantage_mean", "logp_mean", "cov_threshold", "draw_threshold")
    fraction: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        _check_fraction(self)
        checks.number(self, "coef", least=0, finite=True)

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """The batch-wide numbers: mean advantage and logp, and the covariance (and draw) from which a token is penalised."""
        stats = _means(t, group)
        cov, draws = self._score(t, stats)
        k = _how_many(self.fraction, stats["tokens"])
        cov_k, draw_k = kth_largest(torch.where(t.mask, cov, -math.inf), draws, k, t.sequences.cp_group, group)
        return {**stats, "cov_threshold": cov_k, "draw_threshold": draw_k}

    def __call__(self, t: Tokens) -> Surrogate:
        stats = t.batch_statistics(self)
        return self.penalised(t, t.mask & at_least(*self._score(t, stats), (stats["cov_threshold"], stats["draw_threshold"])))

    def penalised(self, t: Tokens, chosen: Tensor) -> Surrogate:
        """The loss with the penalty on the `chosen` tokens."""
        penalty = torch.where(chosen, self.coef * t.log_ratio.abs(), 0)
        return Surrogate(-t.advantages * _ratio(t) + penalty, upper=chosen)

    def _score(self, t: Tokens, stats: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        cov = trust.covariance(t.logp, t.advantages, stats["logp_mean"], stats["advantage_mean"])
        return cov, trust.draw(0, t.anchor_logp(t.anchor), t.logp.detach())


def _check_fraction(owner: CovClip | CovKL) -> None:
    checks.number(owner, "fraction", above=0)
    if owner.fraction > 1:
        raise SpecError(f"{type(owner).__name__}.fraction is a share of the tokens, at most 1, got {owner.fraction!r}.")


def _check_seed(owner: CovClip) -> None:
    checks.number(owner, "seed", least=0)
    if not isinstance(owner.seed, int) or owner.seed >= 2**31:
        raise SpecError(f"{type(owner).__name__}.seed must be an integer below 2**31, got {owner.seed!r}.")


def _means(t: Tokens, group: Any) -> dict[str, Tensor]:
    a, logp = (t.sequences.sum(x).sum() for x in (t.advantages, t.logp.detach()))
    n, a, logp = all_sum(torch.stack([t.lengths.sum(), a, logp]), group).unbind()
    return {"tokens": n, "advantage_mean": a / n.clamp(min=1), "logp_mean": logp / n.clamp(min=1)}


def _how_many(fraction: float, tokens: Tensor) -> Tensor:
    return (fraction * tokens.to(accumulator_dtype(tokens.device))).to(torch.int64).clamp(min=1)


VARIANTS = (
    Clip,
    TwoSidedClip,
    DetachedClip,
    SoftGate,
    ProbabilityBand,
    GeometricClip,
    GammaWeight,
    CovClip,
    CovKL,
    Quadratic,
    TaperedNegative,
    Unbounded,
)
