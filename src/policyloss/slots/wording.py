"""What the parts say about themselves in text: numbers, intervals, bounds, and conditions without gradient."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

# The argument that carries the log-probability of each anchor, as a formula writes it.
ANCHORS = {
    "old": "old_logp",
    "rollout": "rollout_logp",
    "ref": "ref_logp",
    "current": "sg(logp)",
}
# Names that mean the same in every formula. Any other name in a condition is a line of one part.
COMMON_NAMES = frozenset(
    {"advantages", "ratio", "log_ratio", "logp", "old_logp", "rollout_logp", "ref_logp"} | {"keep", "mask", "abs", "inf"}
)


class Condition(NamedTuple):
    """An expression that is True for a token, and what it says."""

    expression: str
    meaning: str

    def on_side(self, test: str, suffix: str) -> Condition:
        """The same condition where `test` holds; the lines of the part it belongs to end in `suffix`."""
        renamed = re.sub(
            r"[A-Za-z_]\w*",
            lambda match: match[0] if match[0] in COMMON_NAMES else match[0] + suffix,
            self.expression,
        )
        return Condition(f"({test}) & ({renamed})", self.meaning)


class Slopes(NamedTuple):
    """Where the loss of a token has no slope, apart from rejections and the clamp of the ratio.

    A trust part returns one of these, or several that hold for different tokens.
    through_logp: any of these makes the slope in the token's own `logp` zero; None if the loss does
    not read `logp` but through the ratio. through_ratio: the same for the ratio slot's log-ratio.
    when: the tokens this is about, "" for all. idle: what it means that both are zero.
    within_sequence: the loss of a token depends on the log-ratios of its whole sequence.
    """

    through_logp: tuple[Condition, ...] | None = None
    through_ratio: tuple[Condition, ...] | None = None
    when: str = ""
    idle: str = "nothing to learn from, and nothing moves it through the ratio"
    within_sequence: bool = False

    def on_side(self, test: str, suffix: str, *, without_advantage: bool) -> Slopes:
        """The same slopes, for the tokens where `test` holds (see `Condition.on_side`).

        without_advantage: whether tokens with an advantage of 0 are among them.
        """

        def there(conditions: tuple[Condition, ...]) -> tuple[Condition, ...]:
            others = tuple(c.on_side(test, suffix) for c in conditions if c != NO_ADVANTAGE)
            return (NO_ADVANTAGE, *others) if without_advantage and NO_ADVANTAGE in conditions else others

        through = [None if c is None else there(c) for c in (self.through_logp, self.through_ratio)]
        when = f"({test}) & ({self.when})" if self.when else test
        return self._replace(through_logp=through[0], through_ratio=through[1], when=when)


NO_ADVANTAGE = Condition("advantages == 0", "nothing to learn from")


def number(x: float) -> str:
    """A number as Python source that reads back to the same float; whole numbers without a point."""
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return str(int(x)) if float(x).is_integer() and abs(x) < 1e15 else repr(float(x))


def spoken(x: float) -> str:
    """A number inside a sentence."""
    return "no bound" if math.isinf(x) else f"{x:.10g}"


def interval(low: float, high: float) -> str:
    """Where a number that is never negative may lie, in words."""
    if math.isinf(high):
        return f"at least {spoken(low)}" if low > 0 else "anywhere"
    both = low > 0 and not math.isinf(low)
    return f"within [{spoken(low)}, {spoken(high)}]" if both else f"at most {spoken(high)}"


def bounds(low: float | None, high: float | None, words: tuple[str, str] = ("at least", "at most")) -> list[str]:
    """The bounds that exist, in words: ["at least 0.5", "at most 2"]."""
    stated = [] if low is None else [f"{words[0]} {spoken(low)}"]
    return stated if high is None else [*stated, f"{words[1]} {spoken(high)}"]
