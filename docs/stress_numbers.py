"""Statistics of docs/stress.md: intervals, significant differences, correlation of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, combinations_with_replacement
from statistics import fmean as mean
from typing import NamedTuple

Start = Hashable
LEVEL = 0.05


def bootstrap_interval(values: Sequence[float], share: float = 1 - LEVEL) -> tuple[float, float]:
    """The percentile interval of the mean. It counts every resample, so nothing is random."""
    n = len(values)
    weights = [
        (mean(values[i] for i in chosen), _arrangements(chosen))
        for chosen in combinations_with_replacement(range(n), n)
    ]
    tail = (1 - share) / 2 * n**n
    return _reach(sorted(weights), tail), _reach(sorted(weights, reverse=True), tail)


def _arrangements(chosen: Sequence[int]) -> int:
    """The number of orders in which a resample can be drawn."""
    return math.factorial(len(chosen)) // math.prod(
        math.factorial(k) for k in Counter(chosen).values()
    )


def _reach(weights: Sequence[tuple[float, int]], tail: float) -> float:
    """The first value at which the sum of weights exceeds the tail."""
    sums = accumulate(weight for _, weight in weights)
    return next(x for (x, _), total in zip(weights, sums, strict=True) if total > tail)


class Comparison(NamedTuple):
    """Scores of losses. means: over the runs of a loss. counts: its runs. deviation: of a score,
    pooled over all losses. freedom: its degrees of freedom. least: the smallest p-value.
    """

    means: dict[str, float]
    counts: dict[str, int]
    deviation: float
    freedom: int
    least: float

    def p_value(self, a: str, b: str) -> float:
        """Two-sided, for the difference of two losses."""
        gap = abs(self.means[a] - self.means[b])
        error = self.deviation * math.sqrt(1 / self.counts[a] + 1 / self.counts[b])
        if self.freedom < 1 or gap == 0:
            return 1.0
        return max(student_p(gap / error, self.freedom) if error else 0.0, self.least)

    def differs(self, a: str, b: str, comparisons: int) -> bool:
        """Whether the difference is significant among so many comparisons (Bonferroni)."""
        return self.p_value(a, b) * comparisons < LEVEL


def compare_losses(values: Mapping[str, Mapping[Start, float]], *, ranked: bool) -> Comparison:
    """A score is a distance from the mean of the runs with the same start, or, if ranked, a rank
    among them from 0 to 1 (Conover's test). If losses share no start with the others, all runs are
    taken together. values: by loss and start; some may be missing.
    """
    paired = _connected(values)
    runs = [(start, x) for row in values.values() for start, x in row.items()]
    peers = {key: [x for start, x in runs if start == key or not paired] for key, _ in runs}

    def score(x: float, others: Sequence[float]) -> float:
        return _rank(x, others) / max(len(others) - 1, 1) if ranked else x - mean(others)

    scores = {
        loss: [score(x, peers[key]) for key, x in row.items()] for loss, row in values.items()
    }
    means = {loss: mean(row) for loss, row in scores.items()}
    squares = sum((x - means[loss]) ** 2 for loss, row in scores.items() for x in row)
    freedom = len(runs) - len(scores) - (len(peers) - 1 if paired else 0)
    # No order of so few losses and starts is less likely by chance.
    least = 1 / math.factorial(len(scores)) ** (len(peers) - 1) if ranked else 0.0
    counts = {loss: len(row) for loss, row in scores.items()}
    return Comparison(means, counts, math.sqrt(squares / max(freedom, 1)), freedom, least)


def _connected(values: Mapping[str, Mapping[Start, float]]) -> bool:
    """Whether all losses can be compared with each other by starts that they share."""
    first, *left = (set(row) for row in values.values())
    while near := [row for row in left if row & first]:
        first.update(*near)
        left = [row for row in left if row not in near]
    return not left


def student_p(t: float, freedom: int, parts: int = 1000) -> float:
    """P(|T| > t) of Student's t: the integral of cos(x)^(freedom − 1), by Simpson's rule."""
    start = math.atan(t / math.sqrt(freedom))
    width = (math.pi / 2 - start) / parts
    weights = [1, *(4 if i % 2 else 2 for i in range(1, parts)), 1]
    tail = sum(
        w * max(math.cos(start + i * width), 0.0) ** (freedom - 1) for i, w in enumerate(weights)
    )
    logarithm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)
    return min(tail * width / 3 * 2 * math.exp(logarithm) / math.sqrt(math.pi), 1.0)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of the ranks; 0 where all values of one side are equal."""
    x, y = _ranks(a), _ranks(b)
    middle = (len(x) - 1) / 2
    together = sum((i - middle) * (j - middle) for i, j in zip(x, y, strict=True))
    squares = math.prod(sum((i - middle) ** 2 for i in ranks) for ranks in (x, y))
    return together / math.sqrt(squares) if squares else 0.0


def spearman_p(correlation: float, n: int) -> float:
    """Two-sided, by the approximation with Student's t."""
    if n < 3:
        return 1.0
    rest = 1 - correlation**2
    return student_p(abs(correlation) * math.sqrt((n - 2) / rest), n - 2) if rest > 0 else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [_rank(x, values) for x in values]


def _rank(x: float, values: Sequence[float]) -> float:
    """From 0; equal values share the mean of their ranks."""
    return sum(y < x for y in values) + (sum(y == x for y in values) - 1) / 2
