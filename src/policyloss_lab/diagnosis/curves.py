"""The curves of a run with the statistics that detectors need, and the verdict's thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

Curve = list[tuple[int, float]]
NEIGHBOURS = 8  # values before and after a value that define the usual value around it


@dataclass(frozen=True)
class LogThresholds:
    """The numbers at which a curve is a symptom; docs/doctor.md gives the source of each.

    least_steps: with fewer steps, only nonfinite numbers are a symptom.
    trend_sigma, trend_least: a curve rose or fell if its end differs from its start by more than
    `trend_sigma` standard errors and by more than the share `trend_least` of the larger of the two.
    solved: smallest score at which flat curves are no symptom.
    entropy_share: share of the entropy at the start.
    dead_groups: share of groups with equal rewards; dead_unsolved: the part of that share that
    right answers do not explain.
    clip_side: share of the tokens clipped on one side; clip_ratio: multiple of the other side.
    kl_high: nats per token.
    spike: multiple of the usual value around a step; spike_sigma: deviations of its logarithm.
    truncated: share of completions. length_growth: multiple of the length at the start.
    step_kl_high, step_kl_low: change of the policy by one step, in nats per token.
    mismatch: KL(rollout, old) in nats per token.
    """

    least_steps: int = 8
    trend_sigma: float = 3.0
    trend_least: float = 0.05
    solved: float = 0.9
    entropy_share: float = 0.2
    dead_groups: float = 0.8
    dead_unsolved: float = 0.4
    clip_side: float = 0.1
    clip_ratio: float = 2.0
    kl_high: float = 0.5
    spike: float = 10.0
    spike_sigma: float = 4.0
    truncated: float = 0.5
    length_growth: float = 2.0
    step_kl_high: float = 0.1
    step_kl_low: float = 1e-6
    mismatch: float = 0.01


@dataclass(frozen=True)
class Log:
    """The curves of a run. curves: by our names. raw: by the names of the log. rollouts: the stored
    completions, if any. limits: the thresholds of the verdict.
    """

    curves: Mapping[str, Curve]
    raw: Mapping[str, Curve] = field(default_factory=dict)
    rollouts: Sequence[Mapping[str, Any]] = ()
    limits: LogThresholds = LogThresholds()

    def finite(self, name: str) -> Curve:
        """The finite points of a curve."""
        return [(step, y) for step, y in self.curves.get(name, []) if math.isfinite(y)]

    def values(self, name: str) -> list[float]:
        """The finite values of a curve."""
        return [y for _, y in self.finite(name)]

    def start(self, name: str) -> float | None:
        """The median of the first tenth of a curve; short, because a policy may change early."""
        ys = self.values(name)
        return median(ys[: math.ceil(len(ys) / 10)]) if ys else None

    def end(self, name: str) -> float | None:
        """The median of the last quarter of a curve."""
        ys = self.values(name)
        return median(ys[-math.ceil(len(ys) / 4) :]) if ys else None

    def trend(self, name: str) -> int:
        """1 if a curve rose, -1 if it fell, 0 if its noise explains the difference.

        The noise is the median jump between neighbours, which neither a slow trend nor an outlier
        enlarges. For normal noise with standard deviation σ, that median is 0.954 σ.
        """
        ys, start, end = self.values(name), self.start(name), self.end(name)
        if len(ys) < 3 or start is None or end is None:
            return 0
        noise = median(abs(b - a) for a, b in pairwise(ys)) / 0.954
        error = noise * math.sqrt(1 / math.ceil(len(ys) / 10) + 1 / math.ceil(len(ys) / 4))
        least = self.limits.trend_least * max(abs(start), abs(end))
        change = end - start
        small = abs(change) <= max(self.limits.trend_sigma * error, least)
        return 0 if small else 1 if change > 0 else -1

    def since(self, name: str, test: Callable[[float], bool]) -> int:
        """The first step from which on at least three of four values of a curve pass a test."""
        begin = passed = 0
        for count, (step, y) in enumerate(reversed(self.curves.get(name, [])), 1):
            passed += test(y)
            if test(y) and 4 * passed >= 3 * count:
                begin = step
        return begin

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
        return [
            (*point, ratio) for point, ratio in zip(curve, ratios, strict=True) if ratio >= bound
        ]

    def busiest(self, name: str) -> tuple[float, int, int]:
        """(median, first step, last step) of the quarter of a curve with the highest median; ties
        are resolved by the mean.
        """
        curve = self.finite(name)
        width = math.ceil(len(curve) / 4)
        tops = []
        for i in range(0, len(curve) - width + 1, max(1, width // 8)):
            ys = [y for _, y in curve[i : i + width]]
            tops.append((median(ys), sum(ys), -i))
        top, _, i = max(tops)
        return top, curve[-i][0], curve[width - 1 - i][0]

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
        ys = self.values(name)
        return (self.end(name) or 0.0) if all(0 <= y <= 1 for y in ys) else 0.0

    @property
    def solved(self) -> bool:
        """Whether the task is solved, so that flat curves are no symptom."""
        return self.right >= self.limits.solved

    @property
    def learned(self) -> bool:
        """Whether rewards or held-out scores rose."""
        return max(self.trend("reward"), self.trend("held_out")) > 0
