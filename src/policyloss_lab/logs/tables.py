"""Reads tables (CSV) of one run or of several, in the layouts that W&B and trackio export.

A chart of W&B: the x axis, then the columns of one run after the other, named "run - metric",
"run - metric__MIN" and "run - metric__MAX"; if the x axis is not the step, also "run - _step".
A chart of trackio: the runs below each other, named in the column "run". W&B's table of runs: one
line of last values for each run, named in the column "Name".
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from policyloss.errors import InputError
from policyloss_lab.logs.names import STEPS, step_of
from policyloss_lab.logs.trackers import Row
from policyloss_lab.reading import number_of

_BETWEEN = " - "  # the separator of run and metric


def is_table(line: str) -> bool:
    """Whether a file with the first line `line` is such a table."""
    names = {_name(column.strip('"')).rpartition(_BETWEEN)[2] for column in line.split(",")}
    return not names.isdisjoint(STEPS) or {"Name", "State"} <= names


def table_rows(lines: Iterable[str]) -> Iterator[tuple[str, int, Row]]:
    """(run, step, numbers by metric) of each row. The run is "" if no column names it."""
    reader = csv.reader(lines)
    try:
        columns = [_name(column) for column in next(reader, [])]
        runs, shared = _columns_by_run(columns)
        if len(runs) > 1:
            yield from _beside_each_other(reader, runs, shared)
            return
        (run, places), *_ = [*runs.items(), ("", {})]
        yield from _below_each_other(reader, run, shared | places)
    except csv.Error as error:
        raise InputError(
            f"line {reader.line_num} cannot be read as one of a table ({error}); it is not the "
            "log of a run."
        ) from error


def _name(column: str) -> str:
    name = column.strip().lstrip("\ufeff").strip('"')
    return "step" if name.lower() == "step" else name


def _columns_by_run(columns: Sequence[str]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """({run: {metric: index of its column}}, {name: index} of the columns of no run)."""
    runs: dict[str, dict[str, int]] = {}
    shared: dict[str, int] = {}
    counts: Counter[str] = Counter()
    latest: dict[str, str] = {}  # for each name, the run to which the next column belongs
    for place, column in enumerate(columns):
        run, dash, metric = (part.strip() for part in column.rpartition(_BETWEEN))
        if not dash:
            if metric and metric in shared:
                raise InputError(f"the table has the column {metric!r} twice; leave one out.")
            shared[metric] = place
            continue
        if run not in latest or metric in runs[latest[run]]:
            latest[run] = _unique(run, counts)
            runs[latest[run]] = {}
        runs[latest[run]][metric] = place
    shared.pop("", None)
    # The first column is the x axis under any name.
    strays = [name for name, place in shared.items() if place and name not in STEPS]
    if len(runs) > 1 and strays:
        example = next(column for column in columns if _BETWEEN in column)
        raise InputError(f"{strays[0]!r} is the column of no run; name it as {example!r} is.")
    return runs, shared


def _unique(name: str, counts: Counter[str]) -> str:
    """`name`, or "name (2)" for a second run of that name."""
    counts[name] += 1
    return name if counts[name] == 1 else _unique(f"{name} ({counts[name]})", counts)


def _beside_each_other(
    rows: Iterable[Sequence[str]], runs: dict[str, dict[str, int]], shared: dict[str, int]
) -> Iterator[tuple[str, int, Row]]:
    for values in rows:
        common = _numbers(values, shared)
        for run, places in runs.items():
            numbers = _numbers(values, places)
            step = step_of(common | numbers)
            if numbers and step is not None:
                yield run, step, common | numbers


def _below_each_other(
    rows: Iterable[Sequence[str]], run: str, places: dict[str, int]
) -> Iterator[tuple[str, int, Row]]:
    """The rows of `table_rows` if runs are below each other. run: the name if no column has it."""
    of_wandb = {"Name", "State"} <= places.keys()
    if of_wandb and places.keys().isdisjoint(STEPS):
        raise InputError(
            "this is W&B's table of runs, with their last values and no column of steps; add the "
            "column _step to it, or export a chart."
        )
    place = places.get("Name" if of_wandb else "run")
    counts: Counter[str] = Counter()
    for values in rows:
        numbers = _numbers(values, places)
        step = step_of(numbers)
        if step is None:
            continue
        name = run if place is None or place >= len(values) else values[place].strip()
        yield _unique(name, counts) if of_wandb else name, step, numbers


def _numbers(values: Sequence[str], places: dict[str, int]) -> Row:
    """The numbers of a line, which may be shorter than the first line."""
    return {
        name: number
        for name, place in places.items()
        if place < len(values) and (number := number_of(values[place])) is not None
    }
