"""Trust regions that weight a token smoothly instead of cutting it off (see `trust`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from policyloss.functional import trust
from policyloss.parts.trust_clips import Surrogate, TrustPart
from policyloss.parts.validate import Positive, within
from policyloss.parts.wording import NO_ADVANTAGE, Condition, Slopes, spoken
from policyloss.tokens import Tokens

_FinitePositive: TypeAlias = Annotated[float, within(above=0, finite=True)]
_FiniteNotNegative: TypeAlias = Annotated[float, within(least=0, finite=True)]


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
        return (
            f"{smooth}: {shape}: {positive} where the advantage is not negative, {negative} "
            "elsewhere"
        )

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_logp=(NO_ADVANTAGE,)),)


@dataclass(frozen=True)
class Quadratic(TrustPart):
    """DRO / Kimi k1.5: `-(A·logp - ½·beta·log_ratio²)`, a quadratic pull to the anchor."""

    follows_advantage: ClassVar[bool] = False
    beta: Annotated[
        float, within(above=0, finite=True, hint="beta scales the pull to the anchor policy.")
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
class TaperedNegative(TrustPart):
    """TOPR: `-A·logp` where A > 0; elsewhere `-sg[min(r, ratio_max)]·A·logp`.

    sg stops the gradient. So the weight of a bad token falls as the token becomes unlikely.
    """

    ratio_max: Positive = 1.0

    def __call__(self, t: Tokens) -> Surrogate:
        r, a = t.ratio, t.advantages
        loss = trust.tapered_negative(r, t.logp, a, self.ratio_max)
        return Surrogate(loss, upper=t.mask & (a <= 0) & (r.detach() > self.ratio_max))

    def sentence(self) -> str:
        stopped = f"the stopped ratio, at most {spoken(self.ratio_max)}"
        where = (
            f"where that is not positive also by {stopped}, so that a bad token already unlikely "
            "fades out"
        )
        return f"logp is weighted by the advantage; {where}"

    def slopes(self) -> tuple[Slopes, ...]:
        return (Slopes(through_logp=(NO_ADVANTAGE,)),)
