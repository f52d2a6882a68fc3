"""`StoredRun`: the contents of a run's files, read from a run directory of ours or from the files
of another trainer.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.completions import step_in_name, stored_completions, trackio_tables
from policyloss_lab.logs.names import STEPS, our_names
from policyloss_lab.logs.scalars import numbered, rows_of
from policyloss_lab.logs.tables import table_rows
from policyloss_lab.logs.trackers import Row, trackio_config, trackio_rows
from policyloss_lab.reading import (
    Lines,
    Notes,
    integer,
    json_object,
    open_noted,
    sampled_note,
    strict,
)
from policyloss_lab.report.rollouts import as_stored, read_rollouts
from policyloss_lab.report.series import Table, read_table
from policyloss_lab.report.sources import KINDS, Files, files_of, is_our_run, split_run


@dataclass
class StoredRun:
    """The contents of a run's files. source: the trainer or the format. spec: the loss as JSON, or
    None. planned: the planned number of steps, or None.
    """

    source: str
    version: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    planned: int | None = None
    table: Table = field(default_factory=Table)
    times: Table = field(default_factory=Table)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


def read_our_run(folder: Path, notes: Notes, runs: int) -> StoredRun:
    """Read the run directory `folder`. runs: the number of runs that share the limits."""
    contents = json_object(folder / "config.json", notes)
    config, version = contents.get("config"), contents.get("policyloss")
    config, defaults = (
        x if isinstance(x, dict) else {} for x in (config, contents.get("defaults"))
    )
    size = limits.bytes_of(limits.METRIC_BYTES, runs)
    tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
    rows = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    answers = folder / "answers.jsonl"  # optional, so its absence needs no note
    return StoredRun(
        "policyloss",
        version if isinstance(version, str) else "",
        config,
        defaults,
        spec=contents.get("loss"),
        planned=integer(config.get("steps")),
        table=read_table(folder / "metrics.jsonl", notes, size),
        times=read_table(folder / "timing.jsonl", notes, size),
        environment=json_object(folder / "environment.json", notes),
        rollouts=read_rollouts(folder / "rollouts.jsonl", notes, tokens, size=rows),
        answers=read_rollouts(answers, notes, tokens // limits.ANSWERS_SHARE, as_stored, rows)
        if os.path.lexists(answers)
        else [],
    )


_RANGE = ("__MIN", "__MAX")


class Columns:
    """Numbers by metric and step, stored compactly; the last number of a step counts."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Add numbers of a step; rows may come in any order."""
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                if name in STEPS or name.startswith("_") or len(self._columns) >= limits.COLUMNS:
                    continue
                column = self._columns[name] = (array("q"), array("d"))
            column[0].append(step)
            column[1].append(value)

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, numbers) in the order of steps. Metrics that have one of our names come first."""
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
            order = sorted(order, key=steps.__getitem__)  # stable: equal steps keep their order
        for i in order:
            yield steps[i], rank, values[i]


def read_tables(paths: Sequence[Path], notes: Notes, budget: int) -> dict[str, Columns]:
    """{name of a run: its numbers} of some tables; a name in several tables is one run, and "" is a
    run without a name. About `budget` bytes are read.
    """
    runs: dict[str, Columns] = {}
    for path in paths:
        file = open_noted(path, notes)
        if file is None:
            continue
        with file:
            lines = Lines(file, budget // len(paths), limits.NUMBER_PARTS)
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
    """A row without the extremes of the points that W&B has averaged."""
    return {
        name: value
        for name, value in row.items()
        if not name.endswith(_RANGE) or name[: -len(_RANGE[0])] not in row
    }


@dataclass
class RunPlace:
    """Where a run is stored. path: the argument, plus `#` and the name of the run if the path holds
    several runs. files: the files of another trainer's run; None for ours. run: the name of the run
    in a table of several runs. columns: its numbers in a table, which is read once for all runs.
    notes: about omitted data.
    """

    path: Path
    notes: Notes
    files: Files | None = None
    run: str = ""
    columns: Columns | None = None


def places_of(path: Path, paths: int) -> list[RunPlace]:
    """The runs in `path`: one, or all runs of a table. paths: the number of paths that share the
    limits.
    """
    notes: Notes = []
    if is_our_run(path):
        return [RunPlace(path, notes)]
    files = files_of(path, notes)
    if files.kind != "table":
        return [RunPlace(path, notes, files)]
    # A number takes a third of its bytes in JSON lines.
    runs = read_tables(files.numbers, notes, limits.bytes_of(limits.METRIC_BYTES, paths) // 3)
    if files.run and files.run not in runs:
        names = ", ".join(repr(name) for name in [*runs][:10])
        raise InputError(f"{split_run(path)[0]} holds no run {files.run!r}; it holds {names}.")
    if files.run or len(runs) < 2:
        columns = runs[files.run] if files.run else next(iter(runs.values()), Columns())
        return [RunPlace(path, notes, files, files.run, columns)]
    if files.completions:
        notes.append("Files of completions next to a table of several runs were not read.")
    files = replace(files, completions=[])
    return [
        RunPlace(Path(f"{path}#{run}"), notes if not i else [], files, run, columns)
        for i, (run, columns) in enumerate(runs.items())
    ]


def labels_of(places: Sequence[RunPlace]) -> list[str]:
    """A short, unique name for each run: the name of its folder, or its name in its table. If two
    names are equal, the parent folder or the table is added; if still equal, a number.
    """
    names, longer = [], []
    for place in places:
        path = (split_run(place.path)[0] if place.run else place.path).resolve()
        parts = (path.name, place.run) if place.run else (path.parent.name, path.name)
        names.append(parts[1])
        longer.append("/".join(parts))
    names = [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def read_foreign(
    path: Path, files: Files, columns: Columns | None, notes: Notes, runs: int
) -> StoredRun:
    """Read the run of another trainer in `path`, a folder or a file. columns: its numbers, if they
    were read already. runs: the number of runs that share the limits.
    """
    source = KINDS.get(files.kind, "completions only")
    run = StoredRun(source if files.kind else f"{source}: {files.completions[0].name}")
    columns = _numbers(files, notes, runs) if columns is None else columns
    for step, row in columns.rows():
        run.table.add(step, row)
        trained = any(not name.startswith("eval") for name in row)
        run.table.trained = max(0, step) if trained else run.table.trained
    if files.kind and not run.table.lines:
        raise InputError(f"{path} holds no row with a step and numbers; it is no log of a run.")
    if files.kind == "state":
        run.planned = _planned(files.numbers[0])
    if files.kind == "trackio":
        database = files.numbers[0]
        run.config = strict(trackio_config(database, files.run), database.name, notes)
    run.rollouts = _completions(files, run.table, notes, runs)
    return run


def _numbers(files: Files, notes: Notes, runs: int) -> Columns:
    columns = Columns()
    budget = limits.bytes_of(limits.METRIC_BYTES, runs) // max(1, len(files.numbers))
    if files.kind == "events":  # a number takes a third of its bytes in JSON lines
        budget //= 3
    for path in files.numbers:
        file = open_noted(path, notes)
        if file is None:
            continue
        with file:
            size = file.seek(0, 2)
            file.seek(0)
            if size > budget and files.kind != "state":
                notes.append(sampled_note(path.name, size, budget))
            try:
                rows = rows_of(file, path.name, budget)
                if files.kind == "trackio":
                    rows = numbered(trackio_rows(path, files.run, budget))
                for step, row in rows:
                    if abs(step) < limits.LARGEST_STEP:
                        columns.add(step, row)
            except OSError as error:
                notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
    return columns


def _completions(files: Files, table: Table, notes: Notes, runs: int) -> list[dict[str, Any]]:
    """The completions of one or many files. They are written to a temporary `rollouts.jsonl` first,
    from which the page's selection is read.
    """
    paths = sorted(files.completions, key=lambda path: (step_in_name(path), path))
    budget = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    chosen = _evenly(paths, budget)
    if len(chosen) < len(paths):
        notes.append(
            f"{len(chosen)} of {len(paths)} files of completions were read, evenly spaced; the "
            "others were left out."
        )
    pattern = re.compile(r"(?:train/)?rewards/(.+)/mean$")
    rewards = [match[1] for name in table.lines if (match := pattern.match(name))]
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / "completions.jsonl"
        with spool.open("w", encoding="utf-8") as out:
            before: list[str] = []
            if files.kind == "trackio":
                tables = trackio_tables(files.numbers[0], files.run, budget, rewards)
                out.writelines(_line(row) for row in tables)
            for path in chosen:
                lines = _spooled(path, budget // max(1, len(chosen)), rewards, notes)
                # TRL stores the completions of a batch again at each step of that batch.
                texts = [line.partition(",")[2] for line in lines]
                if texts != before or path.suffix == ".jsonl":
                    out.writelines(lines)
                before = texts
        if not spool.stat().st_size:
            return []
        tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
        return read_rollouts(spool, notes, tokens, size=2 * budget)


def _spooled(path: Path, budget: int, rewards: list[str], notes: Notes) -> list[str]:
    """The rows of one file as JSON lines; [] and a note if it cannot be read."""
    file = open_noted(path, notes)
    if file is None:
        return []
    with file:
        try:
            rows, sampled = stored_completions(file, path, budget, rewards)
            lines = [_line(row) for row in rows]
        except (InputError, OSError) as error:
            notes.append(str(error))
            return []
        if sampled:
            notes.append(sampled_note(path.name, file.seek(0, 2), budget))
    return lines


def _line(row: dict[str, Any]) -> str:
    """A row as a JSON line. Texts keep one character above the limit, so that a note reports it."""
    most = limits.TEXT_LENGTH + 1
    short = {name: x[:most] if isinstance(x, str) else x for name, x in row.items()}
    return json.dumps(short, default=str) + "\n"


def _evenly(paths: list[Path], budget: int) -> list[Path]:
    """Every k-th file, counted back from the last, with the smallest k that fits the budget."""
    sizes = [path.lstat().st_size for path in paths]
    stride = 1
    while stride < len(paths) and sum(sizes[::-stride]) > budget:
        stride += 1
    return paths[::-stride][::-1]


def _planned(path: Path) -> int | None:
    """The planned number of steps in a trainer_state.json."""
    file = open_noted(path, [])
    if file is None:
        return None
    with file:
        head = file.read(limits.MIB)
        file.seek(max(0, file.seek(0, 2) - limits.MIB))
        match = re.search(rb'"max_steps": (\d{1,15})\b', head + file.read())
    return int(match[1]) if match and int(match[1]) else None


def rename_metrics(table: Table, times: Table) -> dict[str, str]:
    """Rename the metrics of a table to our names, and move times to `times`; returns {our name: the
    original name}.
    """
    ours = our_names(table.lines)
    table.lines = {ours.get(name, name): line for name, line in table.lines.items()}
    for name in [name for name in table.lines if name.startswith("timing/")]:
        times.lines.setdefault(name.removeprefix("timing/"), table.lines.pop(name))
    return {our: name for name, our in ours.items()}
