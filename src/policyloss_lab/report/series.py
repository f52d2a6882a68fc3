"""From lines of metrics to series over steps, histograms and the numbers of the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from policyloss_lab import limits
from policyloss_lab.reading import (
    Notes,
    finite,
    integer,
    is_number,
    json_lines,
    open_noted,
    row_at,
)
from policyloss_lab.report.markup import listed
from policyloss_lab.report.panels import PANELS

Series = dict[str, dict[str, list[Any]]]
HISTOGRAM = "ratio_histogram"
SUMMED = ("tokens", "step_s")  # other measures of progress than the step
# The metrics that the charts name are kept, however many others there are.
_EXPECTED = {
    name.removeprefix("timing/") for panel in PANELS for name in panel.patterns if "*" not in name
} | {"tokens"}


Point = tuple[int, "float | int | None"]


def extremes(points: Sequence[Point], size: int) -> list[Point]:
    """The lowest, the highest and the first nonfinite of every `size` successive points, each once,
    in order.
    """
    out: list[Point] = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        values = [value for _, value in part if value is not None]
        ends = (min(values), max(values)) if values else ()
        wanted = {next(k for k, (_, v) in enumerate(part) if v == end) for end in ends}
        if len(values) < len(part):
            wanted.add(next(k for k, (_, v) in enumerate(part) if v is None))
        out += [part[k] for k in sorted(wanted)]
    return out


class Line:
    """One metric over the steps: its points, thinned if there are many, and the numbers of the
    summary, which count all points.
    """

    def __init__(self) -> None:
        self.count = self.nonfinite = 0
        self.first_nonfinite = 0
        self.total: float | int = 0
        self.best: float | int = -math.inf
        self.first: tuple[int, float | int] | None = None
        self.last: tuple[int, float | int] | None = None
        self._points: list[Point] = []
        self._even: list[Point] = []
        self._stride = 1  # between two points of _even
        self._newest: Point = (0, None)

    def add(self, step: int, value: float | int | None) -> None:
        """Add the next point; None means NaN or infinity."""
        point = self._newest = (step, value)
        self._points.append(point)
        if len(self._points) > 2 * limits.POINTS:
            self._points = extremes(self._points, 4)
        if self.count % self._stride == 0:
            self._even.append(point)
            if len(self._even) > 2 * limits.POINTS:
                self._even = self._even[::2]
                self._stride *= 2
        self.count += 1
        if value is None:
            self.first_nonfinite = self.first_nonfinite if self.nonfinite else step
            self.nonfinite += 1
            return
        self.first = self.first or (step, value)
        self.last = (step, value)
        self.best = max(self.best, value)
        self.total += value

    def points(self, limit: int) -> list[Point]:
        """All points if there are at most `limit`, else about `limit` points: the last point, and
        the lowest, the highest and the first nonfinite point of every stretch.
        """
        points = self._points
        if len(points) > limit:
            points = extremes(points, math.ceil(3 * len(points) / limit))
        return points if points[-1:] == [self._newest] else [*points, self._newest]

    def sampled(self, limit: int) -> list[Point]:
        """At most `limit` evenly spaced points, for statistics, which the extremes of `points`
        would mislead.
        """
        return self._even[:: math.ceil(len(self._even) / limit)]

    def change(self) -> dict[str, Any] | None:
        """The first, last and best finite value with their steps; None if there is none."""
        if self.first is None or self.last is None:
            return None
        (first_step, first), (last_step, last) = self.first, self.last
        return {
            "first": first,
            "first_step": first_step,
            "last": last,
            "last_step": last_step,
            "best": self.best,
        }


class Table:
    """A file of metrics: a `Line` for each, the histograms, and the number of trained steps."""

    def __init__(self) -> None:
        self.lines: dict[str, Line] = {}
        self.trained = 0  # steps; an evaluation after the last step has a line but is no step
        self.histograms = Histograms()
        # The sums up to each step, on which other metrics are drawn.
        self._sums = {name: Line() for name in SUMMED}
        self._left_out: set[str] = set()

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """Add the row of a step. Steps come in order, each once."""
        # Strict JSON has no NaN: such numbers are null, and "nonfinite" lists their names.
        names = row.get("nonfinite")
        nonfinite = names if isinstance(names, dict) else {}
        self.trained += any(key != "step" and not key.startswith("eval/") for key in row)
        for key, value in row.items():
            if key == HISTOGRAM:
                self.histograms.add(step, value)
            elif (
                key != "step"
                and (is_number(value) or (value is None and key in nonfinite))
                and self._is_kept(key)
            ):
                line = self.lines.get(key) or self.lines.setdefault(key, Line())
                line.add(step, finite(value))
                if key in SUMMED:
                    self._sums[key].add(step, line.total)

    def _is_kept(self, name: str) -> bool:
        if name in self.lines or name in _EXPECTED:
            return True
        if len(self.lines) < limits.NAMES and len(name) <= limits.NAME_LENGTH:
            return True
        if len(self._left_out) < limits.INDEXED:  # the count is bounded, too
            self._left_out.add(name[: limits.NAME_LENGTH])
        return False

    def series(self, file: str, notes: Notes, budget: int = limits.POINT_BUDGET) -> Series:
        """{metric: {"step": […], "value": […]}}; nonfinite values are None. budget: the number of
        points of all metrics together.
        """
        if self._left_out:
            count = (
                f"{'at least ' * (len(self._left_out) >= limits.INDEXED)}{len(self._left_out):,}"
            )
            shown = f"{len(self.lines):,} are shown, names of up to {limits.NAME_LENGTH} characters"
            notes.append(f"{file} holds too many metrics: {shown}, and {count} were left out.")
        limit = self._limit(budget)
        thinned = [line.count for line in self.lines.values() if line.count > limit]
        if thinned:
            what = f"{len(thinned)} metric(s) of {file} have up to {max(thinned):,} points"
            notes.append(
                f"{what}; about {limit:,} of each are drawn, the lowest and the highest of every "
                "stretch among them, and the rest is left out."
            )
        return {key: _columns(line.points(limit)) for key, line in sorted(self.lines.items())}

    def sampled(self, budget: int = limits.POINT_BUDGET) -> Series:
        """As `series`, with evenly spaced points."""
        limit = self._limit(budget)
        return {key: _columns(line.sampled(limit)) for key, line in self.lines.items()}

    def _limit(self, budget: int) -> int:
        """The number of points of one line if all together have about `budget`."""
        return max(2, min(limits.POINTS, budget // max(1, len(self.lines))))

    def sums(self, name: str, limit: int = 1_000) -> dict[str, list[Any]] | None:
        """The sum of a metric of `SUMMED` up to each step; None if it was never written."""
        return _columns(self._sums[name].points(limit)) if self._sums[name].count else None

    def nonfinite_notes(self) -> Notes:
        """A sentence for metrics that were nonfinite equally often, first at the same step."""
        names: dict[tuple[int, Any], list[str]] = {}
        for key, line in sorted(self.lines.items()):
            if line.nonfinite:
                names.setdefault((line.nonfinite, line.first_nonfinite), []).append(key)
        return [
            f"{listed(keys)} {'were' if len(keys) > 1 else 'was'} NaN or infinite at {count} "
            f"step(s), first at step {first}."
            for (count, first), keys in names.items()
        ]

    def change(self, name: str) -> dict[str, Any] | None:
        """The first, last and best value of a metric; None if it was never finite."""
        return self.lines[name].change() if name in self.lines else None

    def total(self, name: str) -> float | int | None:
        """The sum of a metric over the steps; None if it was never written."""
        return self.lines[name].total if name in self.lines else None


def _columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    return {"step": [step for step, _ in points], "value": [value for _, value in points]}


def read_table(path: Path, notes: Notes, budget: int = limits.METRIC_BYTES) -> Table:
    """The rows of a file in the order of their steps; the last row of a step counts. A file of more
    than `budget` bytes is read in evenly spaced parts.
    """
    table = Table()
    # step → the byte offset of its last row, because a file may be larger than memory
    places: dict[int, int] = {}
    repeated = without = new = 0
    stride = 1
    file = open_noted(path, notes)
    if file is None:
        return table
    with file:
        for offset, row in json_lines(file, path.name, notes, budget, limits.NUMBER_PARTS):
            step = integer(row.get("step"))
            if step is None:
                without += 1
                continue
            if step in places:
                repeated += 1
                places[step] = offset
                continue
            new += 1
            if new % stride == 0:
                places[step] = offset
            if len(places) > limits.INDEXED:
                places = dict(list(places.items())[1::2])
                stride *= 2
        for step in sorted(places):
            table.add(step, row_at(file, places[step]))
    if stride > 1:
        notes.append(
            f"{path.name} has {new:,} steps; {len(places):,} that are evenly spaced were read, and "
            "the others were left out."
        )
    if repeated:
        notes.append(
            f"{path.name} has {repeated} step(s) more than once; the last line of each is used."
        )
    if without:
        notes.append(f"{path.name} has {without} line(s) without a step, left out.")
    return table


class Histograms:
    """The histograms of the ratio by step, thinned if there are many."""

    def __init__(self) -> None:
        self._edges: list[float] = []
        self._rows: list[tuple[int, list[Any]]] = []
        self._count = self._odd = 0
        self._stride = 1

    def add(self, step: int, value: Any) -> None:
        """Add the histogram of the next step, as the run wrote it."""
        usable = _histogram(value)
        if usable is None or (self._edges and usable[0] != self._edges):
            self._odd += 1
            return
        self._edges = usable[0]
        if self._count % self._stride == 0:
            self._rows.append((step, usable[1]))
            if len(self._rows) > limits.HISTOGRAMS:
                self._rows = self._rows[::2]
                self._stride *= 2
        self._count += 1

    def data(self, notes: Notes) -> dict[str, list[Any]] | None:
        """{"edges": [E], "step": [S], "counts": [S][E − 1]}; None if no step has one."""
        if self._odd:
            what = (
                f"{self._odd} ratio histogram(s) have other edges than the first, or no usable ones"
            )
            notes.append(f"{what}, and were left out.")
        if self._stride > 1:
            notes.append(
                f"{len(self._rows):,} of {self._count:,} ratio histograms are shown; the others "
                "are left out."
            )
        if not self._rows:
            return None
        return {
            "edges": self._edges,
            "step": [s for s, _ in self._rows],
            "counts": [c for _, c in self._rows],
        }


def _histogram(value: Any) -> tuple[list[float], list[Any]] | None:
    """The positive, finite edges, and the counts between them. An outer edge of 0 or infinity is
    replaced by an edge one bin further out.
    """
    if not isinstance(value, dict):
        return None
    edges, counts = value.get("edges"), value.get("counts")
    if (
        not isinstance(edges, list)
        or not isinstance(counts, list)
        or not 0 < len(counts) <= limits.BINS
    ):
        return None
    edges = [edge if edge == math.inf else finite(edge) for edge in edges[: limits.BINS + 2]]
    counts = [finite(count) for count in counts]
    if None in edges or None in counts:
        return None
    if len(edges) == len(counts) - 1:  # the outermost counts lie beyond the edges
        edges = [0.0, *edges, math.inf]
    if len(edges) != len(counts) + 1 or not all(a < b for a, b in pairwise(edges)):
        return None
    if edges[0] == 0 and len(edges) > 3:
        edges[0] = edges[1] ** 2 / edges[2]
    if edges[-1] == math.inf and len(edges) > 3:
        edges[-1] = edges[-2] ** 2 / edges[-3]
    usable = (
        all(finite(e) is not None for e in edges)
        and edges[0] > 0
        and all(a < b for a, b in pairwise(edges))
    )
    return (edges, counts) if usable else None
