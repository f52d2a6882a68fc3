"""`StoredRun`: the contents of a run's files, read from a run directory of ours or from the files
of another trainer.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.completions import step_in_name, stored_completions, trackio_tables
from policyloss_lab.logs.names import STEPS, our_names
from policyloss_lab.logs.scalars import numbered, rows_of
from policyloss_lab.logs.tables import table_rows
from policyloss_lab.logs.trackers import Row, trackio_config, trackio_rows
from policyloss_lab.reading import Lines, integer, json_object, open_noted, sampled_note, strict
from policyloss_lab.report.rollouts import read_rollouts
from policyloss_lab.report.series import Table, read_table
from policyloss_lab.report.sources import KINDS, Source, source_of, split_run


def sources_of(path: Path, paths: int) -> list[Source]:
    """The runs in `path` with their numbers, except for ours: one run, or all runs of a table.
    paths: the number of paths that share the limits.
    """
    source = source_of(path)
    tables = _read_numbers(source, paths)
    if source.kind == "table" and source.run not in tables and source.run:
        names = ", ".join(repr(name) for name in [*tables][:10])
        raise InputError(f"{split_run(path)[0]} holds no run {source.run!r}; it holds {names}.")
    if source.kind != "table" or source.run or len(tables) < 2:
        only = next(iter(tables.values()), Table())
        return [replace(source, table=tables.get(source.run, only))]
    if source.completions:
        source.notes.append("Files of completions next to a table of several runs were not read.")
    source.completions = []
    notes = [source.notes, *([] for _ in range(len(tables) - 1))]
    return [
        replace(source, path=Path(f"{path}#{run}"), notes=its, run=run, table=table)
        for its, (run, table) in zip(notes, tables.items(), strict=True)
    ]


def _read_numbers(source: Source, paths: int) -> dict[str, Table]:
    """{name of a run: its numbers}. A table may hold several runs, and a name in several tables is
    one run; every other file holds one run without a name.
    """
    notes, tables = source.notes, dict[str, Table]()
    budget = limits.bytes_of(limits.METRIC_BYTES, paths) // max(1, len(source.numbers))
    if source.kind in ("events", "table"):  # a number takes a third of its bytes in JSON lines
        budget //= 3
    for path in source.numbers:
        file = open_noted(path, notes)
        if file is None:
            continue
        more = False
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > budget and source.kind != "state":
                notes.append(sampled_note(path.name, size, budget))
            try:
                for run, step, row in _rows(source, file, path, budget):
                    if run not in tables and len(tables) == limits.RUNS:
                        more = True
                    elif abs(step) < limits.LARGEST_STEP:
                        tables.setdefault(run, Table()).add(step, _metrics(row))
            except OSError as error:
                notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
        if more:
            most = limits.RUNS
            notes.append(f"{path.name} holds more than {most} runs; the others were left out.")
    return tables


def _rows(
    source: Source, file: BinaryIO, path: Path, budget: int
) -> Iterator[tuple[str, int, Row]]:
    """(run, step, numbers) of each row of a file; the run is "" if the file does not name it."""
    if source.kind == "table":
        lines = Lines(file, budget, limits.NUMBER_PARTS)
        try:
            yield from table_rows(line.decode("utf-8", "replace") for _, line in lines)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        return
    rows = (
        numbered(trackio_rows(path, source.run, budget))
        if source.kind == "trackio"
        else rows_of(file, path.name, budget)
    )
    for step, row in rows:
        yield "", step, row


_RANGE = ("__MIN", "__MAX")


def _metrics(row: Row) -> Row:
    """A row without steps, trackers' own numbers, and the extremes of points that W&B averaged."""
    return {
        name: value
        for name, value in row.items()
        if name not in STEPS
        and not name.startswith("_")
        and (not name.endswith(_RANGE) or name[: -len(_RANGE[0])] not in row)
    }


def labels_of(sources: Sequence[Source]) -> list[str]:
    """A short, unique name for each run: the name of its folder, or its name in its table. If two
    names are equal, the parent folder or the table is added; if still equal, a number.
    """
    names, longer = [], []
    for source in sources:
        if source.kind == "table" and source.run:
            parts = (split_run(source.path)[0].resolve().name, source.run)
        else:
            parts = (source.path.resolve().parent.name, source.path.resolve().name)
        names.append(parts[1])
        longer.append("/".join(parts))
    names = [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


@dataclass
class StoredRun:
    """The contents of a run's files. source: the trainer or the format. steps: the number of
    trained steps. spec: the loss as JSON, or None. planned: the planned number of steps, or None.
    """

    source: str
    table: Table
    steps: int
    version: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    planned: int | None = None
    times: Table = field(default_factory=Table)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


def read_run(source: Source, runs: int) -> StoredRun:
    """Read the files of a run. runs: the number of runs that share the limits."""
    return _read_ours(source, runs) if source.kind == "ours" else _read_foreign(source, runs)


def _read_ours(source: Source, runs: int) -> StoredRun:
    folder, notes = source.path, source.notes
    contents = json_object(folder / "config.json", notes)
    config, defaults = (
        x if isinstance(x, dict) else {} for x in map(contents.get, ("config", "defaults"))
    )
    version = contents.get("policyloss")
    size = limits.bytes_of(limits.METRIC_BYTES, runs)
    tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
    rows = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    answers = folder / "answers.jsonl"  # optional, so its absence needs no note
    table = read_table(folder / "metrics.jsonl", notes, size)
    return StoredRun(
        "policyloss",
        table,
        table.trained.shape[0],
        version if isinstance(version, str) else "",
        config,
        defaults,
        spec=contents.get("loss"),
        planned=integer(config.get("steps")),
        times=read_table(folder / "timing.jsonl", notes, size),
        environment=json_object(folder / "environment.json", notes),
        rollouts=read_rollouts(folder / "rollouts.jsonl", notes, tokens, rows),
        answers=read_rollouts(
            answers, notes, tokens // limits.ANSWERS_SHARE, rows, by_information=False
        )
        if os.path.lexists(answers)
        else [],
    )


def _read_foreign(source: Source, runs: int) -> StoredRun:
    if source.kind and not source.table.lines:
        raise InputError(
            f"{source.path} holds no row with a step and numbers; it is no log of a run."
        )
    name = KINDS.get(source.kind) or f"completions only: {source.completions[0].name}"
    run = StoredRun(name, source.table, max([0, *source.table.trained.tolist()[-1:]]))
    if source.kind == "state":
        run.planned = _planned(source.numbers[0])
    if source.kind == "trackio":
        file = source.numbers[0]
        run.config = strict(trackio_config(file, source.run), file.name, source.notes)
    run.rollouts = _completions(source, runs)
    return run


def _completions(source: Source, runs: int) -> list[dict[str, Any]]:
    """The completions of one or many files. They are written to a temporary `rollouts.jsonl` first,
    from which the page's selection is read.
    """
    notes = source.notes
    paths = sorted(source.completions, key=lambda path: (step_in_name(path), path))
    budget = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    chosen = _evenly(paths, budget)
    if len(chosen) < len(paths):
        notes.append(
            f"{len(chosen)} of {len(paths)} files of completions were read, evenly spaced; the "
            "others were left out."
        )
    pattern = re.compile(r"(?:train/)?rewards/(.+)/mean$")
    rewards = [match[1] for name in source.table.lines if (match := pattern.match(name))]
    with tempfile.TemporaryDirectory() as folder:
        spool = Path(folder) / "completions.jsonl"
        with spool.open("w", encoding="utf-8") as out:
            before: list[str] = []
            if source.kind == "trackio":
                tables = trackio_tables(source.numbers[0], source.run, budget, rewards)
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
        return read_rollouts(spool, notes, tokens, 2 * budget)


def _spooled(path: Path, budget: int, rewards: list[str], notes: list[str]) -> list[str]:
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
