"""The numbers of other trainers' runs by metric and step, and the tables that hold several runs."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.logs.lines import Lines
from policyloss_lab.logs.names import STEPS, our_names
from policyloss_lab.logs.records import Row
from policyloss_lab.logs.scalars import PARTS
from policyloss_lab.logs.tables import table_rows
from policyloss_lab.report import limits
from policyloss_lab.report.reading import Notes, open_regular, sampled_note

_COLUMNS = 5_000  # metrics that are collected; the page shows fewer
_RANGE = ("__MIN", "__MAX")


class Columns:
    """Numbers by metric and step, compactly; a later number of the same step replaces it."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Add numbers of a step; rows may come in any order."""
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                if name in STEPS or name.startswith("_") or len(self._columns) >= _COLUMNS:
                    continue
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(value)

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, numbers), by step. Metrics with a name of ours come first."""
        known = our_names(self._columns)
        names = sorted(self._columns, key=lambda name: name not in known)
        merged = heapq.merge(*(self._points(name, rank) for rank, name in enumerate(names)))
        now, row = None, dict[str, float]()
        for step, rank, value in merged:
            if step != now and now is not None:
                yield now, row
                row = {}
            now, row[names[rank]] = step, value
        if now is not None:
            yield now, row

    def _points(self, name: str, rank: int) -> Iterator[tuple[int, int, float]]:
        steps, values = self._columns[name]
        order: Any = range(len(steps))
        if any(a > b for a, b in itertools.pairwise(steps)):
            order = sorted(order, key=steps.__getitem__)  # stable: the later one comes later
        for i in order:
            yield steps[i], rank, values[i]


def read_tables(paths: Sequence[Path], notes: Notes, budget: int) -> dict[str, Columns]:
    """The numbers of each run in some tables, by its name; a name that several tables have is one
    run, and "" is a run without a name. About `budget` bytes are read.
    """
    runs: dict[str, Columns] = {}
    for path in paths:
        file = open_regular(path, notes)
        if file is None:
            continue
        with file:
            lines = Lines(file, budget // len(paths), PARTS)
            if lines.sampled:
                notes.append(sampled_note(path.name, lines.size, budget // len(paths)))
            texts = (line.decode("utf-8", "replace") for _, line in lines)
            more = False
            try:
                for run, step, row in table_rows(texts):
                    if run not in runs and len(runs) == limits.RUNS:
                        more = True
                    elif abs(step) < limits.LARGEST_STEP:
                        runs.setdefault(run, Columns()).add(step, _without_ranges(row))
            except InputError as error:
                raise InputError(f"{path}: {error}") from None
            except OSError as error:
                notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
        if more:
            most = limits.RUNS
            notes.append(f"{path.name} holds more than {most} runs; the others were left out.")
    return runs


def _without_ranges(row: Row) -> Row:
    """A row without the lowest and the highest of the points that W&B made one of."""
    return {
        name: value
        for name, value in row.items()
        if not name.endswith(_RANGE) or name[: -len(_RANGE[0])] not in row
    }
