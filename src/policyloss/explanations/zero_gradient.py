"""The tokens that get exactly no gradient from the policy term, as conditions in formula names.

A condition is an expression over the names of the printed formula, so a test can evaluate it: the
gradient is zero where it holds, and nowhere else (save for numbers that cancel by chance, or a
weight so small that it underflows). The trust part states where its own slopes are zero; this
module adds the effects of the ratio and the corrections.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policyloss.explanations.algebra.expression import FALSE, binary, constant, without_stops
from policyloss.explanations.formula import clamp_bounds, formula, raw_log_ratio, rejects
from policyloss.parts.wording import NO_ADVANTAGE, Condition, Slopes
from policyloss.spec import LossSpec

__all__ = ["Condition", "ZeroGradient", "zero_gradient"]
_EVERY = {"sequence": "seq_all", "run": "run_all"}
Conditions = tuple[Condition, ...]


@dataclass(frozen=True)
class ZeroGradient:
    """When the policy term gives a token no gradient.

    alone: any one of these is enough. together: a token's gradient runs through its whole group
    (`group` is "sequence" or "run"), so it is zero only if every token of the group meets one of
    these. known: False if a callable decides.
    """

    alone: Conditions = ()
    together: Conditions = ()
    group: str = "sequence"
    known: bool = True

    @property
    def expression(self) -> str:
        """All conditions as one expression; "" if no token ever gets a zero gradient."""
        parts = [f"({c.expression})" for c in self.alone]
        if self.together:
            parts.append(f"{_EVERY[self.group]}({_any_of(self.together)})")
        return " | ".join(parts)


def zero_gradient(spec: LossSpec) -> ZeroGradient:
    """The conditions for `spec`; KL and entropy terms, which move any token, are left out."""
    if not hasattr(spec.trust, "slopes") or not hasattr(spec.ratio, "shared_over"):
        return ZeroGradient(known=False)
    slopes = spec.trust.slopes()
    slopes = tuple(_in_names_of_lines(s, formula(spec).other_names) for s in slopes)
    if len(slopes) > 1 and any(s.within_sequence for s in slopes):
        return ZeroGradient(known=False)
    rejected: Conditions = ()
    gone: Conditions = ()
    if rejects(spec) and spec.rejected == "keep":
        rejected = (Condition("~keep", "rejected by a correction"),)
    elif rejects(spec):
        gone = (Condition("~keep", "rejected by a correction, as if masked"),)
    clamp, group = _beyond_clamp(spec.ratio), spec.ratio.shared_over
    if slopes[0].within_sequence:
        together = (NO_ADVANTAGE, *rejected) if rejected else ()
        return ZeroGradient((*gone, *(slopes[0].through_ratio or ()), *clamp), together)
    if group is None:
        of_token = tuple(c for s in slopes for c in _of_token(s, clamp))
        return ZeroGradient((*gone, *rejected, *_once(of_token)))
    token_clamp: Conditions = spec.ratio.no_slope() if hasattr(spec.ratio, "no_slope") else ()
    if all(s.through_ratio is None for s in slopes):
        return ZeroGradient((*gone, *rejected, *_once(_through(slopes, "through_logp"))))
    through_ratio = _once((*_through(slopes, "through_ratio"), *clamp))
    if all(s.through_logp is None for s in slopes):
        return ZeroGradient((*gone, *token_clamp), (*rejected, *through_ratio), group)
    through_logp = (*_through(slopes, "through_logp"), *rejected)
    shared = f"{_EVERY[group]}({_any_of((*through_ratio, *rejected))})"
    moved = " | ".join([shared, *(f"({c.expression})" for c in token_clamp)])
    both = f"({_any_of(through_logp)}) & ({moved})"
    return ZeroGradient((*gone, Condition(both, slopes[0].idle)))


def _in_names_of_lines(s: Slopes, other_names: dict[str, str]) -> Slopes:
    """The same slopes, with the names of the formula's lines."""

    def rename(conditions: Conditions | None) -> Conditions | None:
        if conditions is None:
            return None
        return tuple(c.rename(lambda line: other_names.get(line, line)) for c in conditions)

    return s._replace(through_logp=rename(s.through_logp), through_ratio=rename(s.through_ratio))


def _any_of(conditions: Conditions) -> str:
    if len(conditions) == 1:
        return conditions[0].expression
    return " | ".join(f"({c.expression})" for c in conditions)


def _once(conditions: Conditions) -> Conditions:
    """The conditions without repetitions."""
    return tuple(dict.fromkeys(conditions))


def _of_token(s: Slopes, clamp: Conditions) -> Conditions:
    """Where a token gets no gradient, if it shares its gradient with no other token."""
    if s.when:
        clamp = tuple(c.where(s.when) for c in clamp)
    if s.through_ratio is None:
        return s.through_logp or ()
    if s.through_logp is None:
        return (*s.through_ratio, *clamp)
    if not s.through_logp or not (*s.through_ratio, *clamp):
        return ()
    both = f"({_any_of(s.through_logp)}) & ({_any_of((*s.through_ratio, *clamp))})"
    return (Condition(both, s.idle),)


def _through(slopes: tuple[Slopes, ...], which: str) -> Conditions:
    """Where the slope in `logp` or in the ratio is zero, also because the loss does not read it."""
    conditions: Conditions = ()
    for s in slopes:
        stated = getattr(s, which)
        unread = (Condition(s.when, "its loss does not read it"),)
        conditions += unread if stated is None else stated
    return conditions


def _beyond_clamp(part: Any) -> Conditions:
    """The log-ratio lies beyond its clamp, where the ratio does not move."""
    raw = raw_log_ratio(part)
    if raw is None:
        return ()
    value, bounds = without_stops(raw), zip("<>", clamp_bounds(part.log_clamp), strict=True)
    tests = [binary(sign, value, constant(bound)) for sign, bound in bounds if bound is not None]
    texts = [f"({test})" for test in tests if test != FALSE]
    return (Condition(" | ".join(texts), "the log-ratio is beyond its clamp"),) if texts else ()
