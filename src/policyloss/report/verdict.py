"""Whether a run learns: one sentence, from its held-out accuracy or its reward.

A change counts if it exceeds two standard errors, about what chance gives once in twenty runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from policyloss.report.reading import integer

_LEAST = 10  # points of a curve whose noise is estimated from the curve itself
_FELL = 0.25  # of what was gained, lost since the best: then the run gets worse
_SURE = 0.98  # an accuracy at which nothing is left to learn

WORDS = {
    "learns": "Learns",
    "worse": "Gets worse",
    "flat": "Does not learn",
    "solved": "Was right from the start",
    "early": "Too early to tell",
    "unmeasured": "Cannot tell",
}


class Level(NamedTuple):
    """A mean over some steps: its value, the variance of that mean, and the first and last of the
    steps.
    """

    value: float
    variance: float
    first_step: int
    last_step: int


class Course(NamedTuple):
    """The levels of a curve: at its beginning, at its end, and where it was highest."""

    name: str
    share: bool  # an accuracy, which is shown in percent
    begin: Level
    end: Level
    best: Level


def verdict_of(
    metrics: Mapping[str, Mapping[str, Sequence[Any]]],
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
) -> dict[str, str]:
    """{"state": a key of `WORDS`, "sentence"} of the curves of a run. config: its
    `eval_prompts` gives the uncertainty of a held-out accuracy.
    """
    course = _held_out(metrics, integer(config.get("eval_prompts"))) or _rewards(metrics)
    if course is None:
        if not any(_points(metrics, name) for name in ("eval/accuracy", "reward/mean")):
            return _verdict("unmeasured", "neither a held-out accuracy nor a reward was logged")
        return _verdict("early", f"{summary['steps']} steps were logged")
    change, error = _difference(course.begin, course.end)
    fall, fall_error = _difference(course.end, course.best)
    gain = course.best.value - course.begin.value
    if change < -error or (fall > 1.5 * fall_error and fall > _FELL * gain):
        if gain > 1.5 * error:
            return _verdict("worse", _sentence(course, "reached", course.best, "and fell to"))
        return _verdict("worse", _sentence(course, "fell from", course.begin, "to"))
    if change > error:
        return _verdict("learns", _sentence(course, "rose from", course.begin, "to"))
    if course.share and min(course.begin.value, course.end.value) > _SURE:
        return _verdict("solved", _sentence(course, "is", course.begin, "and"))
    text = _sentence(course, "is", course.begin, "and")
    planned = summary["planned_steps"]
    if summary["state"] == "running" and planned is not None and summary["steps"] < planned / 2:
        return _verdict("early", f"{summary['steps']} of {planned} steps are done; {text}")
    return _verdict("flat", f"{text}, no more than chance")


def _verdict(state: str, reason: str) -> dict[str, str]:
    return {"state": state, "sentence": f"{WORDS[state]}: {reason}."}


def _held_out(
    metrics: Mapping[str, Mapping[str, Sequence[Any]]], prompts: int | None
) -> Course | None:
    """The course of the held-out accuracy, whose noise follows from the number of prompts."""
    points = _points(metrics, "eval/accuracy")
    if len(points) < 2 or prompts is None or prompts < 1:
        return _smoothed("held-out accuracy", points, share=True)
    levels = [
        # One success and one failure more: 256 of 256 are right is not "certainly all".
        Level(p, q * (1 - q) / prompts, step, step)
        for step, p in points
        for q in [(min(1.0, max(0.0, p)) * prompts + 1) / (prompts + 2)]
    ]
    best = max(levels, key=lambda level: level.value)
    return Course("held-out accuracy", True, levels[0], levels[-1], best)


def _rewards(metrics: Mapping[str, Mapping[str, Sequence[Any]]]) -> Course | None:
    return _smoothed("the mean reward", _points(metrics, "reward/mean"), share=False)


def _smoothed(name: str, points: Sequence[tuple[int, float]], *, share: bool) -> Course | None:
    """The course of a curve by the means of a fifth of its points; None if there are too few.

    The noise is that of neighbours, half the mean of their squared differences: a slow rise does
    not count as noise.
    """
    if len(points) < _LEAST:
        return None
    size = len(points) // 5
    noise = sum((b - a) ** 2 for (_, a), (_, b) in pairwise(points)) / 2 / (len(points) - 1)
    levels = []
    for start in range(0, len(points) - size + 1, max(1, size // 4)):
        inside = points[start : start + size]
        levels.append(_mean(inside, noise))
    end = _mean(points[-size:], noise)
    best = max([*levels, end], key=lambda level: level.value)
    return Course(name, share, levels[0], end, best)


def _mean(points: Sequence[tuple[int, float]], noise: float) -> Level:
    mean = sum(value for _, value in points) / len(points)
    return Level(mean, noise / len(points), points[0][0], points[-1][0])


def _points(
    metrics: Mapping[str, Mapping[str, Sequence[Any]]], name: str
) -> list[tuple[int, float]]:
    curve = metrics.get(name, {"step": [], "value": []})
    pairs = zip(curve["step"], curve["value"], strict=True)
    return [(step, value) for step, value in pairs if value is not None]


def _difference(before: Level, after: Level) -> tuple[float, float]:
    """(how much higher `after` is, two standard errors of that)."""
    return after.value - before.value, 2 * math.sqrt(before.variance + after.variance)


def _sentence(course: Course, verb: str, before: Level, link: str) -> str:
    change, error = _difference(before, course.end)
    scale, unit = (100, " percentage points") if course.share else (1, "")
    first, last = (_level(course, level) for level in (before, course.end))
    size = f"{scale * change:+.3g} ± {scale * error:.2g}{unit}".replace("-", "−")
    return f"{course.name} {verb} {first} {link} {last} ({size})"


def _level(course: Course, level: Level) -> str:
    value = f"{100 * level.value:.1f} %" if course.share else f"{level.value:.3g}"
    if level.first_step == level.last_step:
        return f"{value} at step {level.first_step}"
    return f"{value} in steps {level.first_step} to {level.last_step}"
