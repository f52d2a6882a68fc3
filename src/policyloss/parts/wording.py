"""How parts describe themselves: numbers and bounds in words, and where a gradient is zero."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from policyloss.tokens import LOGP_ARGUMENTS

# The argument that carries the log-probability of each anchor, as a formula writes it.
ANCHORS = {**LOGP_ARGUMENTS, "current": "sg(logp)"}
# Names that mean the same in every formula. Any other name in a condition is a line of one part.
COMMON_NAMES = frozenset(
    {"advantages", "ratio", "log_ratio", "logp", "old_logp", "rollout_logp", "ref_logp"}
    | {"teacher_logp", "ages"}
    | {"keep", "mask", "abs", "inf"}
)


# The two sides that the sign of the advantage makes, and how a condition on one side begins.
SIDES = {"positive": "advantages > 0", "negative": "advantages <= 0"}
_BEGINNINGS = {"positive": "(advantages > 0) & ", "negative": "(advantages < 0) & "}


class Condition(NamedTuple):
    """A condition on a token: an expression that is True where it holds, and its meaning."""

    expression: str
    meaning: str

    def rename(self, change: Callable[[str], str]) -> Condition:
        """The same condition with other names for the lines of the part it belongs to."""

        def of_match(match: re.Match[str]) -> str:
            return match[0] if match[0] in COMMON_NAMES else change(match[0])

        return self._replace(expression=re.sub(r"[A-Za-z_]\w*", of_match, self.expression))

    def where(self, test: str) -> Condition:
        """The same condition, for the tokens where `test` holds."""
        return self._replace(expression=f"({test}) & ({self.expression})")


class Slopes(NamedTuple):
    """Where the loss of a token has no slope, apart from rejections and the clamp of the ratio.

    A trust part returns one of these, or several that hold for different tokens.
    through_logp: conditions, each of which makes the slope in the token's own `logp` zero; None if
    the loss reads `logp` only through the ratio. through_ratio: the same for the ratio slot's
    log-ratio. when: the tokens that these slopes describe, one of `SIDES`, "" for all tokens. idle:
    the meaning of two zero slopes, in words. within_sequence: whether a token's loss depends on the
    log-ratios of its whole sequence.
    """

    through_logp: tuple[Condition, ...] | None = None
    through_ratio: tuple[Condition, ...] | None = None
    when: str = ""
    idle: str = "nothing to learn from, and nothing moves it through the ratio"
    within_sequence: bool = False

    def on_side(self, side: str) -> tuple[Slopes, ...]:
        """The same slopes for the tokens of one side; none if they are about the other side.

        The lines of the part end in the name of the side.
        """
        if self.when not in ("", SIDES[side]):
            return ()
        logp, ratio = (
            None if conditions is None else tuple(x for c in conditions for x in _on_side(c, side))
            for conditions in (self.through_logp, self.through_ratio)
        )
        return (self._replace(through_logp=logp, through_ratio=ratio, when=SIDES[side]),)


def _on_side(condition: Condition, side: str) -> tuple[Condition, ...]:
    if condition == NO_ADVANTAGE:
        return (condition,) if side == "negative" else ()
    other = _BEGINNINGS["negative" if side == "positive" else "positive"]
    if condition.expression.startswith(other):
        return ()
    here = condition.rename(lambda line: f"{line}_{side}")
    begins = condition.expression.startswith(_BEGINNINGS[side])
    return (here if begins else here.where(SIDES[side]),)


NO_ADVANTAGE = Condition("advantages == 0", "nothing to learn from")


def number(x: float) -> str:
    """A number as Python source that reads back to the same float; integers without a point."""
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return str(int(x)) if float(x).is_integer() and abs(x) < 1e15 else repr(float(x))


def spoken(x: float) -> str:
    """A number inside a sentence."""
    return "no bound" if math.isinf(x) else f"{x:.10g}"


def interval_in_words(low: float, high: float) -> str:
    """The allowed interval of a number that is never negative, in words."""
    if math.isinf(high):
        return f"at least {spoken(low)}" if low > 0 else "anywhere"
    both = low > 0 and not math.isinf(low)
    return f"within [{spoken(low)}, {spoken(high)}]" if both else f"at most {spoken(high)}"


def bounds_in_words(
    low: float | None, high: float | None, words: tuple[str, str] = ("at least", "at most")
) -> list[str]:
    """The bounds that exist, in words: ["at least 0.5", "at most 2"]."""
    stated = [] if low is None else [f"{words[0]} {spoken(low)}"]
    return stated if high is None else [*stated, f"{words[1]} {spoken(high)}"]
