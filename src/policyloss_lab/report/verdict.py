"""Whether a run learns: one sentence, from its held-out accuracy and its reward.

A change counts if it exceeds two standard errors; by chance alone, this happens in about one of
twenty runs. A run does not learn if its gain plus two standard errors is still small. Otherwise the
verdict is unclear.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

_LEAST = 10  # the fewest points to estimate the noise of a curve
_FELL = 0.25  # a run gets worse if it loses this share of its gain
_SMALL = 0.25  # a smaller share of the possible gain does not matter
_SURE = 0.98  # an accuracy at which nothing is left to learn
_OPEN = ("flat", "unclear")  # no change was seen

WORDS = {
    "learns": "Learns",
    "worse": "Gets worse",
    "flat": "Does not learn",
    "solved": "Was right from the start",
    "early": "Too early to tell",
    "unclear": "Cannot tell",
}

Curves = Mapping[str, Mapping[str, Sequence[Any]]]


class Level(NamedTuple):
    """A mean over some steps: its value and variance, the first and last step, and their number."""

    value: float
    variance: float
    first_step: int
    last_step: int
    steps: int = 1


class Course(NamedTuple):
    """The levels of a curve at its beginning, its end and its best. room: the possible gain."""

    name: str
    share: bool  # an accuracy, which is shown in percent
    begin: Level
    end: Level
    best: Level
    room: float

    def change(self) -> dict[str, Any]:
        """The first, last and best level, in the form of a run's summary."""
        return {
            "first": self.begin.value,
            "first_step": self.begin.first_step,
            "last": self.end.value,
            "last_step": self.end.last_step,
            "best": self.best.value,
            "over": self.end.steps,
        }


def courses_of(metrics: Curves) -> dict[str, Course]:
    """The courses of "held_out" accuracy and "reward" that have enough points."""
    reward = _smooth_course("the mean reward", _points(metrics, "reward/mean"), share=False)
    both = {"held_out": _held_out(metrics), "reward": reward}
    return {name: course for name, course in both.items() if course is not None}


def verdict_of(metrics: Curves, summary: Mapping[str, Any]) -> dict[str, str]:
    """{"state": a key of `WORDS`, "sentence"} of the curves of a run. The first course that changed
    decides, held-out accuracy before reward; if the other course disagrees, the sentence adds it.
    """
    judged = [_judge(course) for course in courses_of(metrics).values()]
    if not judged:
        if not any(_points(metrics, name) for name in ("eval/accuracy", "reward/mean")):
            return _verdict("unclear", "neither a held-out accuracy nor a reward was logged")
        return _verdict("early", f"{summary['steps']} steps were logged")
    state, text = next((one for one in judged if one[0] not in _OPEN), judged[0])
    if state not in _OPEN:
        text = "; but ".join([text, *(other for its, other in judged if its != state)])
    planned = summary["planned_steps"]
    begun = planned is not None and summary["steps"] < planned / 2
    if state in _OPEN and summary["state"] == "running" and begun:
        return _verdict("early", f"{summary['steps']} of {planned} steps are done; {text}")
    return _verdict(state, text)


def _judge(course: Course) -> tuple[str, str]:
    """The state of one course, and the reason."""
    change, error = _difference(course.begin, course.end)
    fall, fall_error = _difference(course.end, course.best)
    gain = course.best.value - course.begin.value
    if change < -error or (fall > 1.5 * fall_error and fall > _FELL * gain):
        if gain > 1.5 * error:
            return "worse", _sentence(course, "reached", course.best, "and fell to")
        return "worse", _sentence(course, "fell from", course.begin, "to")
    if change > error:
        return "learns", _sentence(course, "rose from", course.begin, "to")
    text = _sentence(course, "is", course.begin, "and")
    if course.share and min(course.begin.value, course.end.value) > _SURE:
        return "solved", text
    if change + error > _SMALL * course.room:
        return "unclear", text
    return "flat", f"{text}, no more than chance"


def _verdict(state: str, reason: str) -> dict[str, str]:
    return {"state": state, "sentence": f"{WORDS[state]}: {reason}."}


def _held_out(metrics: Curves) -> Course | None:
    """The course of the held-out accuracy, with noise from the number of prompts."""
    points, prompts = _points(metrics, "eval/accuracy"), dict(_points(metrics, "eval/prompts"))
    if len(points) < 2 or any(prompts.get(step, 0) < 1 for step, _ in points):
        return _smooth_course("held-out accuracy", points, share=True)
    levels = [
        # One more success and failure each: 256 right of 256 does not mean certainty.
        Level(p, q * (1 - q) / n, step, step)
        for step, p in points
        for n in [prompts[step]]
        for q in [(min(1.0, max(0.0, p)) * n + 1) / (n + 2)]
    ]
    best = max(levels, key=lambda level: level.value)
    return Course("held-out accuracy", True, levels[0], levels[-1], best, 1 - levels[0].value)


def _smooth_course(name: str, points: Sequence[tuple[int, float]], *, share: bool) -> Course | None:
    """The course of a curve by means over a fifth of its points; None if there are too few.

    The noise is half the mean squared difference of neighbours, so that a slow rise is not noise. A
    reward has no upper end: its gain is relative to its beginning, or to its noise if the noise
    is larger.
    """
    if len(points) < _LEAST:
        return None
    size = len(points) // 5
    noise = sum((b - a) ** 2 for (_, a), (_, b) in pairwise(points)) / 2 / (len(points) - 1)
    starts = range(0, len(points) - size + 1, max(1, size // 4))
    levels = [_mean(points[start : start + size], noise) for start in starts]
    end = _mean(points[-size:], noise)
    best = max([*levels, end], key=lambda level: level.value)
    begin = levels[0]
    room = 1 - begin.value if share else max(abs(begin.value), math.sqrt(noise))
    return Course(name, share, begin, end, best, room)


def _mean(points: Sequence[tuple[int, float]], noise: float) -> Level:
    mean = sum(value for _, value in points) / len(points)
    return Level(mean, noise / len(points), points[0][0], points[-1][0], len(points))


def _points(metrics: Curves, name: str) -> list[tuple[int, float]]:
    curve = metrics.get(name, {"step": [], "value": []})
    pairs = zip(curve["step"], curve["value"], strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def _difference(before: Level, after: Level) -> tuple[float, float]:
    """(`after` − `before`, two standard errors of it)."""
    return after.value - before.value, 2 * math.sqrt(before.variance + after.variance)


def _sentence(course: Course, verb: str, before: Level, link: str) -> str:
    change, error = _difference(before, course.end)
    scale, unit = (100, " percentage points") if course.share else (1, "")
    first, last = (_level(course, level) for level in (before, course.end))
    size = f"{scale * change:+.3g} ± {scale * error:.2g}{unit}".replace("-", "−")
    return f"{course.name} {verb} {first} {link} {last} ({size})"


def _level(course: Course, level: Level) -> str:
    value = f"{100 * level.value:.1f} %" if course.share else f"{level.value:.3g}"
    if level.steps == 1:
        return f"{value} at step {level.first_step}"
    return f"{value} in steps {level.first_step} to {level.last_step}"
