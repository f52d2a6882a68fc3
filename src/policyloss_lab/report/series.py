"""From lines of metrics to series over steps, histograms and the numbers of the summary."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from policyloss_lab import limits
from policyloss_lab.logs.names import KNOWN
from policyloss_lab.reading import Notes, finite, integer, is_number, json_lines, open_noted
from policyloss_lab.report.markup import in_sentence
from policyloss_lab.report.panels import PANELS

Series = dict[str, dict[str, list[Any]]]
HISTOGRAM = "ratio_histogram"
# The metrics that the charts name are kept, however many others there are.
_EXPECTED = (
    KNOWN
    | {name.removeprefix("timing/") for panel in PANELS for name in panel.lines if "*" not in name}
    | {"tokens"}
)


class Line:
    """One metric over the steps. NaN stands for every number that is not finite."""

    def __init__(self) -> None:
        self._steps, self._values = array("q"), array("d")

    def add(self, step: int, value: float) -> None:
        """Add a point; steps may come in any order."""
        self._steps.append(step)
        self._values.append(value)

    @cached_property
    def numbers(self) -> tuple[Tensor, Tensor]:
        """(steps, values) in the order of the steps; the last number of a step counts."""
        steps, order = torch.frombuffer(self._steps, dtype=torch.int64).sort(stable=True)
        last = pad(steps.diff() != 0, (0, 1), value=True)
        return steps[last], torch.frombuffer(self._values, dtype=torch.float64)[order][last]

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.numbers[0].shape[0]

    @property
    def repeated(self) -> int:
        """The number of points that a later point of the same step replaces."""
        return len(self._steps) - self.count

    def points(self, limit: int, *, summed: bool = False) -> dict[str, list[Any]]:
        """All points if there are at most `limit`, else about `limit` points: the last point, and
        the lowest, the highest and the first nonfinite point of every stretch. summed: the sum of
        the finite values up to each step, instead of the value.
        """
        steps, values = self.numbers
        values = values.nan_to_num(0.0).cumsum(0) if summed else values
        if self.count > limit:
            places = _extremes(values, math.ceil(3 * self.count / limit))
            steps, values = steps[places], values[places]
        return {"step": steps.tolist(), "value": [_number(x) for x in values.tolist()]}

    def sampled(self, limit: int) -> dict[str, list[Any]]:
        """At most `limit` evenly spaced points, for statistics; extremes would mislead them."""
        steps, values = (x[:: math.ceil(self.count / limit)].tolist() for x in self.numbers)
        return {"step": steps, "value": [_number(x) for x in values]}


def _number(value: float) -> float | int | None:
    """A whole number as an integer, and None for NaN."""
    if math.isnan(value):
        return None
    integral = value.is_integer() and abs(value) < limits.LARGEST_STEP
    return int(value) if integral else value


def _extremes(values: Tensor, size: int) -> Tensor:
    """The indices of each `size` values' lowest, highest and first NaN, and of the last value."""
    count, end = values.shape[0], (0, -values.shape[0] % size)
    low = pad(values.nan_to_num(math.inf), end, value=math.inf).view(-1, size).argmin(1)
    high = pad(values.nan_to_num(-math.inf), end, value=-math.inf).view(-1, size).argmax(1)
    gaps = pad(values.isnan().int(), end).view(-1, size)
    first = torch.arange(0, count, size)
    gap = (first + gaps.argmax(1))[gaps.any(1)]
    places = torch.cat([first + low, first + high, gap, torch.tensor([count - 1])])
    distinct: Tensor = torch.unique(places)
    return distinct


class Table:
    """The metrics and histograms of a file."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.histograms = Histograms()
        self._left_out: set[str] = set()

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add a row. The last number of a step counts."""
        # Strict JSON has no NaN: such numbers are null, and "nonfinite" lists their names.
        names = row.get("nonfinite")
        nonfinite = names if isinstance(names, dict) else {}
        for key, value in row.items():
            if key == HISTOGRAM:
                self.histograms.add(step, value)
            elif key != "step" and (is_number(value) or (value is None and key in nonfinite)):
                line = self._line(key)
                if line is not None:
                    known = finite(value)
                    line.add(step, math.nan if known is None else known)

    def _line(self, name: str) -> Line | None:
        """The line of a metric, new or not; None if there are too many."""
        fits = len(self.lines) < limits.NAMES and len(name) <= limits.NAME_LENGTH
        if name not in self.lines and (fits or name in _EXPECTED):
            self.lines[name] = Line()
        elif name not in self.lines:
            self._left_out.add(name[: limits.NAME_LENGTH])
        return self.lines.get(name)

    @property
    def trained(self) -> Tensor:
        """The steps with metrics of training, in order; an evaluation alone is no step."""
        names = [name for name in self.lines if not name.startswith(("eval/", "eval_"))]
        steps = [torch.empty(0, dtype=torch.int64), *(self.lines[n].numbers[0] for n in names)]
        distinct: Tensor = torch.unique(torch.cat(steps))
        return distinct

    def series(self, file: str, notes: Notes, budget: int = limits.POINT_BUDGET) -> Series:
        """{metric: {"step": […], "value": […]}}; nonfinite values are None. budget: the number of
        points of all metrics together.
        """
        if self._left_out:
            shown = f"{len(self.lines):,} are shown, names of up to {limits.NAME_LENGTH} characters"
            count = f"{len(self._left_out):,}"
            notes.append(f"{file} holds too many metrics: {shown}, and {count} were left out.")
        limit = self._limit(budget)
        thinned = [line.count for line in self.lines.values() if line.count > limit]
        if thinned:
            what = f"{len(thinned)} metric(s) of {file} have up to {max(thinned):,} points"
            notes.append(
                f"{what}; about {limit:,} of each are drawn, the lowest and the highest of every "
                "stretch among them, and the rest is left out."
            )
        return {key: line.points(limit) for key, line in sorted(self.lines.items())}

    def sampled(self, budget: int = limits.POINT_BUDGET) -> Series:
        """As `series`, with evenly spaced points."""
        limit = self._limit(budget)
        return {key: line.sampled(limit) for key, line in self.lines.items()}

    def _limit(self, budget: int) -> int:
        """The number of points of one line if all together have about `budget`."""
        return max(2, min(limits.POINTS, budget // max(1, len(self.lines))))

    def sums(self, name: str, limit: int = 1_000) -> dict[str, list[Any]] | None:
        """The sum of a metric up to each step; None if it was never written."""
        return self.lines[name].points(limit, summed=True) if name in self.lines else None

    def nonfinite_notes(self) -> Notes:
        """A sentence for metrics that were nonfinite equally often, first at the same step."""
        names: dict[tuple[int, int], list[str]] = {}
        for key, line in sorted(self.lines.items()):
            steps = line.numbers[0][line.numbers[1].isnan()].tolist()
            if steps:
                names.setdefault((len(steps), steps[0]), []).append(key)
        return [
            f"{in_sentence(keys)} {'were' if len(keys) > 1 else 'was'} NaN or infinite at {count} "
            f"step(s), first at step {first}."
            for (count, first), keys in names.items()
        ]

    def change(self, name: str) -> dict[str, Any] | None:
        """The first, last and best finite value of a metric, with their steps; None without one."""
        numbers = self.lines[name].numbers if name in self.lines else (torch.empty(0),) * 2
        steps, values = (x[~numbers[1].isnan()] for x in numbers)
        if not steps.numel():
            return None
        return {
            "first": _number(float(values[0])),
            "first_step": int(steps[0]),
            "last": _number(float(values[-1])),
            "last_step": int(steps[-1]),
            "best": _number(float(values.max())),
        }

    def total(self, name: str) -> float | int | None:
        """The sum of a metric's finite values; None if it was never written."""
        if name not in self.lines:
            return None
        return _number(float(self.lines[name].numbers[1].nan_to_num(0.0).sum())) or 0


def read_table(path: Path, notes: Notes, budget: int = limits.METRIC_BYTES) -> Table:
    """The rows of a file. A file of more than `budget` bytes is read in evenly spaced parts."""
    table, without = Table(), 0
    with open_noted(path, notes) as file:
        for _, row in json_lines(file, path.name, notes, budget, limits.NUMBER_PARTS):
            step = integer(row.get("step"))
            if step is None:
                without += 1
            else:
                table.add(step, row)
    if repeated := max((line.repeated for line in table.lines.values()), default=0):
        notes.append(f"{path.name} has {repeated} step(s) more than once; the last ones count.")
    if without:
        notes.append(f"{path.name} has {without} line(s) without a step, left out.")
    return table


class Histograms:
    """The histograms of the ratio by step; the last one of a step counts."""

    def __init__(self) -> None:
        self._edges: list[float] = []
        self._counts: dict[int, list[Any]] = {}
        self._odd = 0

    def add(self, step: int, value: Any) -> None:
        """Add the histogram of a step, as the run wrote it."""
        edges, counts = _histogram(value)
        self._edges = self._edges or edges
        if edges and edges == self._edges:
            self._counts[step] = counts
        else:
            self._odd += 1

    def data(self, notes: Notes) -> dict[str, list[Any]] | None:
        """{"edges": [E], "step": [S], "counts": [S][E − 1]}; None if no step has one."""
        if self._odd:
            notes.append(
                f"{self._odd} ratio histogram(s) have other edges than the first, or no usable "
                "ones, and were left out."
            )
        steps = sorted(self._counts)[:: math.ceil(len(self._counts) / limits.HISTOGRAMS) or 1]
        if len(steps) < len(self._counts):
            notes.append(
                f"{len(steps):,} of {len(self._counts):,} ratio histograms are shown; the others "
                "are left out."
            )
        if not steps:
            return None
        return {"edges": self._edges, "step": steps, "counts": [self._counts[s] for s in steps]}


def _histogram(value: Any) -> tuple[list[float], list[Any]]:
    """The positive, finite edges, and the counts between them; no edges if they are unusable. An
    outer edge of 0 or infinity is replaced by an edge one bin further out.
    """
    parts = value if isinstance(value, dict) else {}
    edges, counts = (x if isinstance(x, list) else [] for x in map(parts.get, ("edges", "counts")))
    if not 0 < len(counts) <= limits.BINS or abs(len(edges) - len(counts)) != 1:
        return [], []
    edges = [edge if edge == math.inf else finite(edge) for edge in edges]
    counts = [finite(count) for count in counts]
    if len(edges) < len(counts):  # the outermost counts lie beyond the edges
        edges = [0.0, *edges, math.inf]
    if None in counts or not _rises(edges):
        return [], []
    if edges[0] == 0 and len(edges) > 3:
        edges[0] = edges[1] ** 2 / edges[2]
    if edges[-1] == math.inf and len(edges) > 3:
        edges[-1] = edges[-2] ** 2 / edges[-3]
    usable = _rises([0.0, *map(finite, edges)])
    return (edges, counts) if usable else ([], [])


def _rises(edges: list[Any]) -> bool:
    return None not in edges and all(a < b for a, b in pairwise(edges))
