"""Reads the numbers of a run, step by step: from JSON lines, `trainer_state.json`, verl's console
output, TensorBoard events, or a CSV export.

A log may come from anybody. Nothing in it is executed, and memory is bounded. The format
follows from the first bytes of a file, not from its name.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.names import STEPS, step_of
from policyloss_lab.logs.trackers import NOT_READ, WANDB_HEAD, Row, events, is_tensorboard
from policyloss_lab.reading import Lines, number_of, parse_object

EVERYTHING = 2**62  # bytes
_CONSOLE = re.compile(r"step:(\d+) - (\S+:\S+)")


def rows_of(file: BinaryIO, name: str, budget: int = EVERYTHING) -> Iterator[tuple[str, int, Row]]:
    """(run, step, numbers by name) of each row, in the order of the file; the same step may come
    again. The run is "" if the file does not name it.

    file: open, at its beginning. name: of the file, for errors. A file of more than about `budget`
    bytes is sampled evenly.
    """
    head = file.read(4096)
    file.seek(0)
    share = budget / max(1, os.fstat(file.fileno()).st_size)
    if is_tensorboard(head):
        return (("", step, row) for step, row in events(file, name, share))
    if head.startswith(WANDB_HEAD):
        raise InputError(f"{name} {NOT_READ}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    # One JSON object over many lines.
    document = b'"log_history"' in head or head.lstrip().partition(b"\n")[0].rstrip() == b"{"
    if start == b"{" and (name.endswith("trainer_state.json") or document):
        return entries_with_step(_history(file, name))
    lines = (line for _, line in Lines(file, budget, limits.NUMBER_PARTS))
    texts = (line.decode("utf-8", "replace") for line in lines)
    if start == b"{":
        return entries_with_step(row for text in texts if (row := parse_object(text)) is not None)
    if b"\x00" in head:
        return iter(())
    if _CONSOLE.search(head.decode("utf-8", "replace")) or b"," not in head.partition(b"\n")[0]:
        return _console(texts)
    return _table_rows(texts, name)


def entries_with_step(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[str, int, Row]]:
    """("", step, numbers) of each entry that has a step; other values are left out."""
    for entry in entries:
        inner = entry.get("data")  # verl writes {"step": …, "data": {…}}
        flat = {**entry, **inner} if isinstance(inner, dict) else entry
        row = {k: x for k, v in flat.items() if (x := number_of(v)) is not None}
        if isinstance(bad := flat.get("nonfinite"), dict):  # where ours writes null
            row |= {str(k): x for k, v in bad.items() if (x := number_of(v)) is not None}
        step = step_of(row)
        if step is not None:
            yield "", step, row


def _history(file: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    """The entries of "log_history" in a trainer_state.json, up to the first unreadable one."""
    text = file.read(limits.LOG_BYTES).decode("utf-8", "replace")
    key = re.search(r'"log_history"\s*:\s*\[', text)
    if key is None:
        raise InputError(f"{name} has no log_history; give the trainer_state.json of a run.")
    decoder, between, place = json.JSONDecoder(), re.compile(r"[\s,]*"), key.end()
    while (gap := between.match(text, place)) and text[gap.end() : gap.end() + 1] not in ("", "]"):
        try:
            entry, place = decoder.raw_decode(text, gap.end())
        except (ValueError, RecursionError):
            return
        if isinstance(entry, dict):
            yield entry


def _console(lines: Iterable[str]) -> Iterator[tuple[str, int, Row]]:
    """Lines such as `step:3 - actor/entropy:0.5 - actor/grad_norm:1.2`, as verl prints them."""
    for line in lines:
        match = _CONSOLE.search(line)
        if match is None:
            continue
        row: Row = {}
        for part in line[match.start() :].split(" - ")[1:]:
            name, _, value = part.strip().rpartition(":")
            number = number_of(re.sub(r"^np\.float\d+\((.*)\)$", r"\1", value))
            if name and number is not None:
                row[name] = number
        step = step_of({"step": float(match.group(1)[:20])})
        if step is not None:
            yield "", step, row


_BETWEEN = " - "  # the separator of run and metric


def is_table(line: str) -> bool:
    """Whether a file with the first line `line` is a table that `_table_rows` reads."""
    names = {_name(column.strip('"')).rpartition(_BETWEEN)[2] for column in line.split(",")}
    return not names.isdisjoint(STEPS) or {"Name", "State"} <= names


def _table_rows(lines: Iterable[str], file: str) -> Iterator[tuple[str, int, Row]]:
    """The rows of one run or of several. The run is "" if no column names it.

    A chart of W&B: the x axis, then the columns of one run after the other, named "run - metric",
    "run - metric__MIN" and "run - metric__MAX"; if the x axis is not the step, also "run - _step".
    A chart of trackio: the runs below each other, named in the column "run". W&B's table of runs:
    one line of last values for each run, named in the column "Name".
    """
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
            f"{file}: line {reader.line_num} cannot be read as one of a table ({error}); it is not "
            "the log of a run."
        ) from error
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


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
    """The rows of `_table_rows` if runs are below each other. run: the name if no column has it."""
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
