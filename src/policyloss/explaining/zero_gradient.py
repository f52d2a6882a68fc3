"""Which tokens get exactly no gradient from the policy term, as conditions in the words of the formula.

A condition is an expression over the same names as the printed formula, so a test can evaluate it: the gradient is zero where it
holds, and nowhere else (save for numbers that cancel by chance, or a weight so small that it underflows).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from policyloss.explaining.formulas import ANCHORS, clamp_bounds, raw_log_ratio, rejects
from policyloss.explaining.trust_formulas import number
from policyloss.slots import ratio, trust
from policyloss.spec import LossSpec


class Condition(NamedTuple):
    """An expression that is True for a token, and what it says."""

    expression: str
    meaning: str


_ZERO_ADVANTAGE = Condition("advantages == 0", "nothing to learn from")


@dataclass(frozen=True)
class ZeroGradient:
    """When the policy term gives a token no gradient.

    alone: any one of these is enough. together: a token's gradient runs through its whole group (`group` is "sequence" or "run"),
    so it is zero only if every token of the group meets one of these. known: False if a callable decides.
    """

    alone: tuple[Condition, ...] = ()
    together: tuple[Condition, ...] = ()
    group: str = "sequence"
    known: bool = True

    @property
    def expression(self) -> str:
        """All conditions as one expression; "" if no token ever gets a zero gradient."""
        parts = [f"({c.expression})" for c in self.alone]
        if self.together:
            every = "seq_all" if self.group == "sequence" else "run_all"
            parts.append(f"{every}({' | '.join(f'({c.expression})' for c in self.together)})")
        return " | ".join(parts)


def zero_gradient(spec: LossSpec) -> ZeroGradient:
    """The conditions for `spec`. KL and entropy terms are left out: they move a token whatever these say."""
    if not isinstance(spec.trust, trust.VARIANTS) or not isinstance(spec.ratio, ratio.VARIANTS):
        return ZeroGradient(known=False)
    group = _group(spec)
    conditions = _of_trust(spec)
    rejected: tuple[Condition, ...] = ()
    gone: tuple[Condition, ...] = ()
    if rejects(spec) and spec.rejected == "keep":
        rejected = (Condition("~keep", "rejected by a correction"),)
    elif rejects(spec):
        gone = (Condition("~keep", "rejected by a correction, as if masked"),)
    if isinstance(spec.trust, trust.Quadratic):
        return _quadratic(spec, group, rejected, gone)
    if isinstance(spec.trust, trust.GeometricClip):
        together = (_ZERO_ADVANTAGE, *rejected) if rejected else ()
        return ZeroGradient((*gone, *conditions), together)
    if group is None:
        return ZeroGradient((*gone, *rejected, *conditions))
    return ZeroGradient((*gone, *_beyond_token_clamp(spec.ratio)), (*rejected, *conditions), group)


def _group(spec: LossSpec) -> str | None:
    """What a token's gradient is shared over: None if each token has its own."""
    through_logp = isinstance(spec.trust, (trust.DetachedClip, trust.GammaWeight, trust.TaperedNegative)) or (
        getattr(spec.trust, "form", "") in ("logp", "score")
    )
    if through_logp:
        return None
    if isinstance(spec.ratio, ratio.SegmentRatio):
        return "run"
    shared = isinstance(spec.ratio, ratio.SequenceProduct) or getattr(spec.ratio, "grad", "") == "sequence"
    return "sequence" if shared else None


def _beyond_clamp(part: Any) -> Condition | None:
    """The log-ratio lies beyond its clamp, where the ratio does not move."""
    low, high = clamp_bounds(part.log_clamp)
    if part.anchor == "current":
        return None
    x = f"seq_mean(logp - {ANCHORS[part.anchor]})" if getattr(part, "grad", "") == "token" else raw_log_ratio(part)
    tests = [f"({x} < {number(low)})"] if low is not None and low != -math.inf else []
    if high is not None and high != math.inf:
        tests.append(f"({x} > {number(high)})")
    return Condition(" | ".join(tests), "the log-ratio is beyond its clamp") if tests else None


def _beyond_token_clamp(part: Any) -> tuple[Condition, ...]:
    """The token's own log-ratio lies beyond the clamp it has inside a product over the sequence."""
    limit = getattr(part, "token_clamp", None)
    if limit is None or math.isinf(limit) or part.anchor == "current":
        return ()
    return (Condition(f"abs(logp - {ANCHORS[part.anchor]}) > {number(limit)}", "its own log-ratio is beyond token_clamp"),)


def _of_trust(spec: LossSpec) -> tuple[Condition, ...]:
    part = spec.trust
    beyond = _beyond_clamp(spec.ratio)
    clamp = () if beyond is None else (beyond,)
    if isinstance(part, trust.Clip):
        dual = math.inf if part.dual is None else part.dual
        return (_ZERO_ADVANTAGE, *_ppo(1 - part.eps_low, f"1 + {number(part.eps_high)}", number(dual)), *clamp)
    if isinstance(part, trust.TwoSidedClip):
        first, last = sorted((part.delta, 1 + part.eps_high))
        return (_ZERO_ADVANTAGE, *_ppo(1 - part.eps_low, number(first), number(last)), *clamp)
    if isinstance(part, trust.CovClip):
        drawn = Condition("dropped", "drawn from the tokens of high covariance")
        return (_ZERO_ADVANTAGE, *_ppo(1 - part.eps_low, f"1 + {number(part.eps_high)}", "inf"), drawn, *clamp)
    if isinstance(part, trust.DetachedClip):
        return (_ZERO_ADVANTAGE, *_outside_of(part))
    if isinstance(part, trust.ProbabilityBand):
        outside = Condition("outside", "its probability left the band")
        return (_ZERO_ADVANTAGE, outside, *(clamp if part.form == "ratio" else ()))
    if isinstance(part, trust.GeometricClip):
        up = Condition(f"(advantages > 0) & (log_ratio > {number(part.eps_high)})", "held from above")
        down = Condition(f"(advantages < 0) & (log_ratio < {number(-part.eps_low)})", "held from below")
        return (_ZERO_ADVANTAGE, up, down, *clamp)
    if isinstance(part, trust.CovKL):
        idle = Condition("(advantages == 0) & (~chosen | (log_ratio == 0))", "nothing to learn from, and not held back")
        return (idle, *clamp)
    through_ratio = isinstance(part, trust.SoftGate) or getattr(part, "form", "") == "ratio"
    return (_ZERO_ADVANTAGE, *(clamp if through_ratio else ()))


def _ppo(low: float, high: str, dual: str) -> tuple[Condition, ...]:
    """PPO's three bounds, those that can bind: a ratio is never below 0."""
    found = []
    if not high.endswith("inf"):
        found.append(Condition(f"(advantages > 0) & (ratio > {high})", "held from above"))
    if low > 0:
        found.append(Condition(f"(advantages < 0) & (ratio < {_below_one(low)})", "held from below"))
    if dual != "inf":
        found.append(Condition(f"(advantages < 0) & (ratio > {dual})", "held by the outer bound"))
    return tuple(found)


def _below_one(low: float) -> str:
    """`1 - eps` as it stands in the formula, if that reads back to the same float."""
    eps = round(1 - low, 12)
    return f"1 - {number(eps)}" if 1 - eps == low else number(low)


def _outside_of(part: trust.DetachedClip) -> tuple[Condition, ...]:
    if part.outside == "clip":
        return ()
    up, down = f"ratio > {number(part.ratio_max)}", f"ratio < {number(part.ratio_min)}"
    if part.outside == "zero_by_sign":
        up, down = f"(advantages > 0) & ({up})", f"(advantages < 0) & ({down})"
    found = (Condition(up, "dropped above the band"), Condition(down, "dropped below the band"))
    return found if part.ratio_min > 0 else found[:1]


def _quadratic(spec: LossSpec, group: str | None, rejected: tuple[Condition, ...], gone: tuple[Condition, ...]) -> ZeroGradient:
    """The pull to the anchor moves a token even where its advantage is 0, unless it is at the anchor or beyond the clamp."""
    beyond = _beyond_clamp(spec.ratio)
    still = "(log_ratio == 0)" if beyond is None else f"(log_ratio == 0) | {beyond.expression}"
    if group is None:
        idle = Condition(f"(advantages == 0) & ({still})", "nothing to learn from, and no pull to the anchor")
        return ZeroGradient((*gone, *rejected, idle))
    every = "seq_all" if group == "sequence" else "run_all"
    own = "(advantages == 0) | ~keep" if rejected else "advantages == 0"
    pull = f"{every}(({still}) | ~keep)" if rejected else f"({still})"
    pull = " | ".join([pull, *(f"({c.expression})" for c in _beyond_token_clamp(spec.ratio))])
    return ZeroGradient((*gone, Condition(f"({own}) & ({pull})", "nothing to learn from, and no pull to the anchor")))
