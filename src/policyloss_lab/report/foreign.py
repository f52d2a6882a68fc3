"""The runs of other trainers, read into what the page shows of ours."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.logs.completions import step_in_name, stored_completions, trackio_tables
from policyloss_lab.logs.names import our_names
from policyloss_lab.logs.records import wandb_config
from policyloss_lab.logs.scalars import numbered, rows_of
from policyloss_lab.logs.trackio import trackio_config, trackio_rows
from policyloss_lab.report import limits
from policyloss_lab.report.columns import Columns
from policyloss_lab.report.reading import Notes, open_regular, sampled_note, strict
from policyloss_lab.report.rollouts import read_rollouts
from policyloss_lab.report.series import Table
from policyloss_lab.report.sources import KINDS, Files
from policyloss_lab.report.stored import StoredRun


def read_foreign(
    path: Path, files: Files, columns: Columns | None, notes: Notes, runs: int
) -> StoredRun:
    """The run in `path`, a folder or a file, in bounded time and memory. columns: its numbers, if
    they have been read. runs: how many runs share the bounds.
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
    if files.kind in ("wandb", "trackio"):
        run.config = _settings(files, notes)
    run.rollouts = _completions(files, run.table, notes, runs)
    return run


def _numbers(files: Files, notes: Notes, runs: int) -> Columns:
    columns = Columns()
    budget = limits.bytes_of(limits.METRIC_BYTES, runs) // max(1, len(files.numbers))
    if files.kind == "events":  # a number takes a third of its bytes in JSON lines
        budget //= 3
    for path in files.numbers:
        file = open_regular(path, notes)
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
    """The completions of many files, or of one: first as lines of `rollouts.jsonl` in a temporary
    file, of which those that the page shows are then chosen.
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
                # TRL stores the completions of a batch again at each step that is made with it.
                texts = [line.partition(",")[2] for line in lines]
                if texts != before or path.suffix == ".jsonl":
                    out.writelines(lines)
                before = texts
        if not spool.stat().st_size:
            return []
        tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
        return read_rollouts(spool, notes, tokens, size=2 * budget)


def _spooled(path: Path, budget: int, rewards: list[str], notes: Notes) -> list[str]:
    """The rows of one file as lines, its step first; [] and a note if it cannot be read."""
    file = open_regular(path, notes)
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
    """A row as a line. Its texts are a little longer than what is shown, so that a note says so."""
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
    """How many steps a trainer_state.json says that there are to be."""
    file = open_regular(path, [])
    if file is None:
        return None
    with file:
        head = file.read(limits.MIB)
        file.seek(max(0, file.seek(0, 2) - limits.MIB))
        match = re.search(rb'"max_steps": (\d{1,15})\b', head + file.read())
    return int(match[1]) if match and int(match[1]) else None


def _settings(files: Files, notes: Notes) -> dict[str, Any]:
    """The settings of a run that a tracker stored."""
    path = files.numbers[0]
    stored = trackio_config(path, files.run) if files.kind == "trackio" else {}
    file = open_regular(path, notes) if files.kind == "wandb" else None
    if file is not None:
        with file:
            stored = wandb_config(file)
    settings: dict[str, Any] = strict(stored, path.name, notes)
    return settings


def renamed(table: Table, times: Table) -> dict[str, str]:
    """Give the metrics of a table our names, and move times to `times`; returns {our name: the name
    that it had}.
    """
    ours = our_names(table.lines)
    table.lines = {ours.get(name, name): line for name, line in table.lines.items()}
    for name in [name for name in table.lines if name.startswith("timing/")]:
        times.lines.setdefault(name.removeprefix("timing/"), table.lines.pop(name))
    return {our: name for name, our in ours.items()}
