"""`collect`: reads runs and returns the plain data of a report. docs/report.md has the schema."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab import limits, reading
from policyloss_lab.diagnosis.run_doctor import diagnose_rows
from policyloss_lab.diagnosis.symptoms import Finding
from policyloss_lab.limits import NOTE_LENGTH, NOTES, cut
from policyloss_lab.logs.completions import step_in_name, stored_completions, trackio_tables
from policyloss_lab.logs.names import STEPS, our_names
from policyloss_lab.logs.scalars import entries_with_step, rows_of
from policyloss_lab.logs.trackers import Row, trackio_config, trackio_rows
from policyloss_lab.reading import Notes
from policyloss_lab.report import compare
from policyloss_lab.report.rollouts import read_rollouts, with_branches
from policyloss_lab.report.series import Table, read_table
from policyloss_lab.report.sources import KINDS, Source, source_of, split_run
from policyloss_lab.report.verdict import courses_of, verdict_of
from policyloss_lab.runs.lock import is_held

SCHEMA = 1


def collect(paths: Sequence[str | Path]) -> dict[str, Any]:
    """All data of a report on the runs in `paths`, JSON-ready and without NaN. A path is a run
    directory of ours, or a folder or file of another trainer (docs/report.md lists them). A table
    of several runs counts as several runs.

    {"schema": 1, "runs": [run, …], "differences": {"config": […], "environment": […], "loss":
    […]}, "groups": [{"label", "runs", "end"}], "identical": [[index of a run, …]]}. A
    missing or half-written file adds a note to the run's "notes". A folder without a run raises
    an `InputError`.
    """
    if isinstance(paths, (str, Path)):
        raise InputError(f"paths={str(paths)!r} is one path; give a list of run directories.")
    if not paths:
        raise InputError("paths is empty; give at least one run directory.")
    sources = [source for path in paths for source in sources_of(Path(path), len(paths))]
    pairs = zip(sources, labels_of(sources), strict=True)
    runs = [_run(source, label, len(sources)) for source, label in pairs]
    settings = ("config", "environment")
    between = {name: compare.differences([run[name] for run in runs]) for name in settings}
    return {
        "schema": SCHEMA,
        "runs": runs,
        "differences": {**between, "loss": compare.loss_differences(runs)},
        "groups": compare.seed_groups(runs),
        "identical": compare.identical_runs(runs),
    }


def _run(source: Source, label: str, runs: int) -> dict[str, Any]:
    """The data of one run. runs: the number of runs that share the limits."""
    path, notes = source.path, source.notes
    (_read_ours if source.kind == "ours" else _read_foreign)(source, runs)
    table, times = source.table, source.times
    file = "metrics.jsonl" if source.kind == "ours" else path.name
    names = rename_metrics(table, times)
    points = limits.share(limits.ALL_POINTS, limits.POINT_BUDGET, runs)
    loss = compare.loss_card(source.spec, source.config, notes)
    summary, sampled = _summary(source), table.sampled(points)
    rollouts = with_branches(source.rollouts, loss)
    judged, symptoms = health_of(sampled, rollouts)
    return {
        "label": label,
        "path": str(path),
        "source": source.format,
        "policyloss": source.version,
        "config": source.config,
        "defaults": source.defaults,
        "environment": source.environment,
        "loss": loss,
        "summary": summary,
        "metrics": table.series(file, notes, points),
        "names": names,
        "timing": times.series("timing.jsonl", notes, points),
        "progress": {"tokens": table.sums("tokens"), "seconds": times.sums("step_s")},
        "ratio_histogram": table.histograms.data(notes),
        "rollouts": rollouts,
        "answers": source.answers,
        "notes": _bound_notes(notes + table.nonfinite_notes()),
        "verdict": verdict_of(sampled, summary),
        "levels": {name: course.change() for name, course in courses_of(sampled).items()},
        "health": source.findings + symptoms,
        "judged_steps": judged,
    }


def _bound_notes(notes: Notes) -> Notes:
    more = [f"There are {len(notes) - NOTES} more notes like these."] if len(notes) > NOTES else []
    return [cut(note, NOTE_LENGTH) for note in notes[:NOTES]] + more


def _summary(source: Source) -> dict[str, Any]:
    config, table = source.config, source.table
    return {
        "model": _name_of(config.get("model")),
        "task": _name_of(config.get("task")),
        "engine": _name_of(config.get("rollout")),
        "steps": source.steps,
        "planned_steps": source.planned,
        "state": _state(source.path, source.steps, source.planned),
        "seconds": source.times.total("step_s"),
        "tokens": table.total("tokens"),
        "held_out": table.change("eval/accuracy"),
        "accuracy": table.change("accuracy"),
        "reward": table.change("reward/mean"),
    }


def _name_of(value: Any) -> str | None:
    """The name of a model or task in a config, where it is a text or an object."""
    if isinstance(value, Mapping):
        value = value.get("name") or value.get("path")
    return value if isinstance(value, str) and value else None


def _state(folder: Path, trained: int, planned: int | None) -> str:
    """Whether the run is "finished", "running" (a process holds its lock), "stopped" before the
    planned end, or "unknown" because no end was planned.
    """
    if is_held(folder):
        return "running"
    if planned is None:
        return "unknown"
    return "finished" if trained >= planned else "stopped"


def health_of(
    metrics: Mapping[str, Mapping[str, Sequence[Any]]], rollouts: Sequence[Mapping[str, Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """The symptoms of a run: (the number of judged steps, 0 if there are too few; [{"cause",
    "step", "evidence", "remedy"}]). metrics: as `Table.series` returns them.
    """
    rows: dict[int, dict[str, float]] = {}
    for name, curve in metrics.items():
        for step, value in zip(curve["step"], curve["value"], strict=True):
            row = rows.setdefault(step, {"step": float(step)})
            row[name] = math.nan if value is None else float(value)
    try:
        verdict = diagnose_rows([rows[step] for step in sorted(rows)], rollouts=rollouts)
    except InputError:
        return 0, []
    return verdict.steps, [finding._asdict() for finding in verdict.findings]


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
        more = False
        with reading.open_noted(path, notes) as file:
            size = os.fstat(file.fileno()).st_size
            if size > budget and source.kind != "state":
                notes.append(reading.sampled_note(path.name, size, budget))
            try:
                rows = (
                    entries_with_step(trackio_rows(path, source.run, budget))
                    if source.kind == "trackio"
                    else rows_of(file, str(path), budget)
                )
                for run, step, row in rows:
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
    places = []
    for source in sources:
        path = source.path.resolve()
        place = (path.parent.name, path.name)
        if source.kind == "table" and source.run:
            place = (split_run(source.path)[0].resolve().name, source.run)
        places.append(place)
    short = [name for _, name in places]
    names = [name if short.count(name) == 1 else f"{place}/{name}" for place, name in places]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _read_ours(source: Source, runs: int) -> None:
    """Read a run directory of ours. runs: the number of runs that share the limits."""
    folder, notes = source.path, source.notes
    contents = reading.json_object(folder / "config.json", notes)
    source.config, source.defaults = (
        x if isinstance(x, dict) else {} for x in map(contents.get, ("config", "defaults"))
    )
    version = contents.get("policyloss")
    source.format, source.version = "policyloss", version if isinstance(version, str) else ""
    source.spec, source.planned = contents.get("loss"), reading.integer(source.config.get("steps"))
    size = limits.bytes_of(limits.METRIC_BYTES, runs)
    source.table = read_table(folder / "metrics.jsonl", notes, size)
    source.times = read_table(folder / "timing.jsonl", notes, size)
    source.steps = source.table.trained.shape[0]
    source.environment = reading.json_object(folder / "environment.json", notes)
    tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
    size = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    source.rollouts = read_rollouts(folder / "rollouts.jsonl", notes, tokens, size)
    answers = folder / "answers.jsonl"
    if os.path.lexists(answers):  # optional, so its absence needs no note
        tokens //= limits.ANSWERS_SHARE
        source.answers = read_rollouts(answers, notes, tokens, size, by_information=False)
    source.findings = _read_findings(folder / "findings.jsonl", notes)


def _read_findings(path: Path, notes: Notes) -> list[dict[str, Any]]:
    """The doctor's findings in tokens, at most `NOTES`; a run without `lab.attach` has none."""
    if not os.path.lexists(path):
        return []
    with reading.open_noted(path, notes) as file:
        lines = reading.json_lines(file, path.name, notes, limits.MIB, limits.COMPLETION_PARTS)
        rows = [row for _, row in lines]
    texts = [name for name in Finding._fields if name != "step"]
    return [
        {name: cut(str(row.get(name, "")), NOTE_LENGTH) for name in texts}
        | {"step": reading.integer(row.get("step")) or 0}
        for row in rows[:NOTES]
    ]


def _read_foreign(source: Source, runs: int) -> None:
    """Read the files of another trainer, except for the numbers, which are read already."""
    if source.kind and not source.table.lines:
        raise InputError(f"{source.path} is no log of a run: no row has a step and numbers.")
    source.format = KINDS.get(source.kind) or f"completions only: {source.completions[0].name}"
    source.steps = max([0, *source.table.trained[-1:].tolist()])
    if source.kind == "state":
        source.planned = _planned_steps(source.numbers[0])
    if source.kind == "trackio":
        file = source.numbers[0]
        source.config = reading.strict(trackio_config(file, source.run), file.name, source.notes)
    source.rollouts = _completions(source, runs)


def _completions(source: Source, runs: int) -> list[dict[str, Any]]:
    """The completions of one or many files. They are written to a temporary `rollouts.jsonl` first,
    from which the page's selection is read.
    """
    notes = source.notes
    paths = sorted(source.completions, key=lambda path: (step_in_name(path), path))
    budget = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    chosen = paths[:: -limits.stride([path.lstat().st_size for path in paths], budget)][::-1]
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
                lines = _spool_rows(path, budget // max(1, len(chosen)), rewards, notes)
                # TRL stores the completions of a batch again at each step of that batch.
                texts = [line.partition(",")[2] for line in lines]
                if texts != before or path.suffix == ".jsonl":
                    out.writelines(lines)
                before = texts
        if not spool.stat().st_size:
            return []
        tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
        return read_rollouts(spool, notes, tokens, 2 * budget)


def _spool_rows(path: Path, budget: int, rewards: list[str], notes: list[str]) -> list[str]:
    """The rows of one file as JSON lines; [] and a note if it cannot be read."""
    with reading.open_noted(path, notes) as file:
        try:
            rows, sampled = stored_completions(file, path, budget, rewards)
            lines = [_line(row) for row in rows]
        except (InputError, OSError) as error:
            notes.append(str(error))
            return []
        if sampled:
            notes.append(reading.sampled_note(path.name, file.seek(0, 2), budget))
    return lines


def _line(row: dict[str, Any]) -> str:
    """A row as a JSON line. Texts keep one character above the limit, so that a note reports it."""
    most = limits.TEXT_LENGTH + 1
    short = {name: x[:most] if isinstance(x, str) else x for name, x in row.items()}
    return json.dumps(short, default=str) + "\n"


def _planned_steps(path: Path) -> int | None:
    """The planned number of steps in a trainer_state.json."""
    with reading.open_noted(path, []) as file:
        head = file.read(limits.MIB)
        file.seek(max(0, file.seek(0, 2) - limits.MIB))
        match = re.search(rb'"max_steps": (\d{1,15})\b', head + file.read())
    return int(match[1]) if match and int(match[1]) else None


def rename_metrics(table: Table, times: Table) -> dict[str, str]:
    """Give the metrics of a table our names, and move times; returns {our name: the old name}."""
    ours = our_names(table.lines)
    table.lines = {ours.get(name, name): line for name, line in table.lines.items()}
    for name in [name for name in table.lines if name.startswith("timing/")]:
        times.lines.setdefault(name.removeprefix("timing/"), table.lines.pop(name))
    return {our: name for name, our in ours.items()}
