"""The curves of a run with the statistics that detectors need, and the verdict's thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

Curve = list[tuple[int, float]]
NEIGHBOURS = 8  # values before and after a value that define the usual value around it


@dataclass(frozen=True)
class LogThresholds:
    """The numbers at which a curve is a symptom, each with its reason. None depends on the units of
    rewards, gradients or values. A bound holds if a curve keeps it for a tenth of the run.
    """

    least_steps: int = 8  # in fewer steps there is no trend; only nonfinite numbers count
    trend_sigma: float = 3.0  # standard errors between two levels: rare by chance
    trend_least: float = 0.05  # share of the larger level: a smaller change does not matter
    solved: float = 0.9  # share of right answers: flat curves are then no symptom
    collapse: float = 0.5  # share of the gain that is lost: most of the learning is undone
    entropy_share: float = 0.2  # of its start: few different answers are left to compare
    entropy_growth: float = 3.0  # times its start: learning lowers it, exploring may double it
    dead_groups: float = 0.8  # share of groups: dynamic sampling would draw five times as often
    dead_unsolved: float = 0.4  # the part of it that groups with only right answers do not explain
    clip_share: float = 0.5  # share of tokens: most of the batch has no gradient
    clip_side: float = 0.1  # share of tokens at one bound, which can clip half of them at most
    clip_ratio: float = 3.0  # times the other bound: uneven bounds, as in GSPO, may double it
    kl_high: float = 0.5  # nats per token without a better score: e¹⁰ in an answer of 20 tokens
    kl_far: float = 2.0  # nats per token with a better score: the reference gives a token a seventh
    spike: float = 20.0  # times the usual number around a step: k3 of a rare token makes it 12
    spike_sigma: float = 4.0  # deviations of that ratio's logarithm: some runs are always erratic
    gradient_growth: float = 10.0  # times its start: clipping then leaves a tenth of the gradient
    truncated: float = 0.5  # share of completions: most rewards judge text without an end
    length_growth: float = 2.0  # times its start without a better score
    step_kl_high: float = 0.1  # nats per token and step: PPO stops an epoch at 0.01 to 0.02
    step_kl_low: float = 1e-6  # nats per token and step: a thousand steps stay in a trust region
    mismatch: float = 0.01  # nats per token in nine of ten steps: healthy engines have 0.002
    mismatch_far: float = 0.1  # nats per token in any tenth of the run: completions are too old
    value_loss: float = 10.0  # times the mean squared reward: a critic that predicts 0 has 1
    value_variance: float = 1.5  # variance of its errors over variance of returns: a constant has 1
    value_bias: float = 0.5  # of mean value and mean return, as a share of a usual reward


@dataclass(frozen=True)
class Log:
    """The curves of a run. curves: by our names. raw: by the names of the log. rollouts: the stored
    completions, if any. limits: the thresholds of the verdict.
    """

    curves: Mapping[str, Curve]
    raw: Mapping[str, Curve] = field(default_factory=dict)
    rollouts: Sequence[Mapping[str, Any]] = ()
    limits: LogThresholds = LogThresholds()

    @property
    def steps(self) -> int:
        """The length of the longest curve."""
        return max(map(len, self.curves.values()), default=0)

    def finite(self, name: str) -> Curve:
        """The finite points of a curve."""
        return [(step, y) for step, y in self.curves.get(name, []) if math.isfinite(y)]

    def values(self, name: str) -> list[float]:
        """The finite values of a curve."""
        return [y for _, y in self.finite(name)]

    def start(self, name: str) -> float:
        """The median of the first tenth of a curve (a policy may change early); 0 without one."""
        ys = self.values(name) or [0.0]
        return median(ys[: math.ceil(len(ys) / 10)])

    def base(self, name: str) -> float:
        """The start of a curve; inf, of which no multiple is reached, if it is not positive."""
        return self.start(name) if self.start(name) > 0 else math.inf

    def end(self, name: str, part: int = 4) -> float:
        """The median of the last quarter, or of another part, of a curve; 0 without one."""
        ys = self.values(name) or [0.0]
        return median(ys[-math.ceil(len(ys) / part) :])

    def differ(self, name: str, before: float, after: float) -> int:
        """1 if a curve rose between two levels, -1 if it fell, 0 if its noise explains the
        difference. One level is the median of a tenth of the curve, the other of a quarter.

        The noise is the median jump between neighbours, which neither a slow trend nor an outlier
        enlarges. For normal noise with standard deviation σ, that median is 0.954 σ.
        """
        ys = self.values(name)
        noise = median(abs(b - a) for a, b in pairwise(ys)) / 0.954
        error = noise * math.sqrt(1 / math.ceil(len(ys) / 10) + 1 / math.ceil(len(ys) / 4))
        least = self.limits.trend_least * max(abs(before), abs(after))
        if abs(after - before) <= max(self.limits.trend_sigma * error, least):
            return 0
        return 1 if after > before else -1

    def trend(self, name: str) -> int:
        """Whether a curve rose (1), fell (-1) or did neither (0) from its start to its end."""
        if len(self.values(name)) < 3:
            return 0
        return self.differ(name, self.start(name), self.end(name))

    def fall(self, name: str) -> tuple[float, float, int] | None:
        """(best level, last level, step of the fall) if a curve lost most of its gain again, or
        most of its level if it never rose.
        """
        if len(self.values(name)) < 3:
            return None
        start, last = self.start(name), self.end(name, 10)
        top, first, _ = self.busiest(name)
        gain = top - start if self.differ(name, start, top) > 0 else top
        if self.differ(name, top, last) >= 0 or not 0 < self.limits.collapse * gain <= top - last:
            return None
        return top, last, self.onset(name, lambda y: 2 * y <= top + last, first)

    def windows(self, name: str, part: int) -> list[Curve]:
        """Overlapping parts of a curve: one `part`-th of it each, but at least 3 points."""
        curve = self.finite(name)
        width = min(len(curve), max(3, math.ceil(len(curve) / part)))
        starts = range(0, len(curve) - width + 1, max(1, width // 8))
        return [curve[i : i + width] for i in starts] if curve else []

    def highest(self, name: str) -> float:
        """The highest level that a curve keeps for a tenth of the run; −inf without a curve."""
        levels = (median(y for _, y in window) for window in self.windows(name, 10))
        return max(levels, default=-math.inf)

    def busiest(self, name: str) -> tuple[float, int, int]:
        """(median, first step, last step) of the quarter with the highest median, then sum."""
        quarters = [([y for _, y in window], window) for window in self.windows(name, 4)]
        ys, window = max(quarters, key=lambda quarter: (median(quarter[0]), sum(quarter[0])))
        return median(ys), window[0][0], window[-1][0]

    def onset(self, name: str, test: Callable[[float], bool], after: int = 0) -> int:
        """The first step of a tenth of a curve in which three of four values pass a test; else the
        first step that passes it. after: the least step.
        """
        curve = [point for point in self.finite(name) if point[0] >= after]
        width = max(3, math.ceil(len(curve) / 10))
        counts = [0, *accumulate(test(y) for _, y in curve)]
        ends = counts[width:] + counts[-1:] * width
        passing = [i for i, (_, y) in enumerate(curve) if test(y)]
        long = (i for i in passing if 4 * (ends[i] - counts[i]) >= 3 * width)
        return curve[next(long, next(iter(passing), 0))][0]

    def outliers(self, name: str) -> list[tuple[int, float, float]]:
        """(step, value, ratio) of the values with an unusual ratio to the medians of their
        neighbours before and after, compared with the limits and with the usual variation of that
        ratio's logarithm. Zeros are steps without a gradient, and are left out.
        """
        curve = [(step, y) for step, y in self.finite(name) if y > 0]
        if len(curve) < self.limits.least_steps:
            return []
        ys, ratios = [y for _, y in curve], []
        for i, y in enumerate(ys):
            sides = ys[max(0, i - NEIGHBOURS) : i], ys[i + 1 : i + 1 + NEIGHBOURS]
            # The larger of the two medians, so that the last value before a fall is no outlier.
            ratios.append(y / max(median(side) for side in sides if side))
        deviation = 1.4826 * median(abs(math.log(ratio)) for ratio in ratios)
        bound = max(self.limits.spike, math.exp(min(self.limits.spike_sigma * deviation, 700)))
        return [(*point, x) for point, x in zip(curve, ratios, strict=True) if x >= bound]

    @property
    def score(self) -> str:
        """The curve that shows best whether the task is learned: held-out prompts, else rewards."""
        return "held_out" if len(self.values("held_out")) >= 3 else "reward"

    @property
    def right(self) -> float:
        """The share of right answers at the end, on held-out prompts if there are any, because a
        broken verifier accepts all training answers. 0 if the log has no such share.
        """
        name = "held_out" if self.values("held_out") else "accuracy"
        return self.end(name) if all(0 <= y <= 1 for y in self.values(name)) else 0.0

    @property
    def solved(self) -> bool:
        """Whether the task is solved, so that flat curves are no symptom."""
        return self.right >= self.limits.solved

    @property
    def learned(self) -> bool:
        """Whether rewards or held-out scores rose."""
        return max(self.trend("reward"), self.trend("held_out")) > 0

    @property
    def improved(self) -> bool:
        """Whether the task is solved, or the score rose. A held-out score has few points, so less
        than a significant rise is enough if the reward rose, too.
        """
        start, end = self.start(self.score), self.end(self.score)
        least = self.limits.trend_least * max(abs(start), abs(end))
        higher = end - start > least and self.trend("reward") > 0
        return self.solved or higher or self.trend(self.score) > 0
