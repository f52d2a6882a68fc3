"""`collect`: reads runs and returns the plain data of a report. docs/report.md has the schema."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.diagnosis.run_doctor import diagnose_rows
from policyloss_lab.limits import NOTE_LENGTH, NOTES, cut
from policyloss_lab.reading import Notes
from policyloss_lab.report.compare import (
    differences,
    identical_runs,
    loss_card,
    loss_differences,
    seed_groups,
)
from policyloss_lab.report.rollouts import with_branches
from policyloss_lab.report.stored import (
    Source,
    StoredRun,
    labels_of,
    read_run,
    rename_metrics,
    sources_of,
)
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
    runs = [
        _run(source, label, len(sources))
        for source, label in zip(sources, labels_of(sources), strict=True)
    ]
    between = {name: differences([run[name] for run in runs]) for name in ("config", "environment")}
    return {
        "schema": SCHEMA,
        "runs": runs,
        "differences": {**between, "loss": loss_differences(runs)},
        "groups": seed_groups(runs),
        "identical": identical_runs(runs),
    }


def _run(source: Source, label: str, runs: int) -> dict[str, Any]:
    """The data of one run. runs: the number of runs that share the limits."""
    path, notes = source.path, source.notes
    stored = read_run(source, runs)
    file = "metrics.jsonl" if source.kind == "ours" else path.name
    names = rename_metrics(stored.table, stored.times)
    points = limits.share(limits.ALL_POINTS, limits.POINT_BUDGET, runs)
    table, times = stored.table, stored.times
    run: dict[str, Any] = {
        "label": label,
        "path": str(path),
        "source": stored.source,
        "policyloss": stored.version,
        "config": stored.config,
        "defaults": stored.defaults,
        "environment": stored.environment,
        "loss": loss_card(stored.spec, stored.config, notes),
        "summary": _summary(path, stored),
        "metrics": table.series(file, notes, points),
        "names": names,
        "timing": times.series("timing.jsonl", notes, points),
        "progress": {"tokens": table.sums("tokens"), "seconds": times.sums("step_s")},
        "ratio_histogram": table.histograms.data(notes),
        "rollouts": stored.rollouts,
        "answers": stored.answers,
        "notes": _bounded(notes + table.nonfinite_notes()),
    }
    run["rollouts"] = with_branches(run["rollouts"], run["loss"])
    sampled = table.sampled(points)
    judged, symptoms = health_of(sampled, run["rollouts"])
    verdict = verdict_of(sampled, run["summary"])
    levels = {name: course.change() for name, course in courses_of(sampled).items()}
    return {
        **run,
        "verdict": verdict,
        "levels": levels,
        "health": symptoms,
        "judged_steps": judged,
    }


def _bounded(notes: Notes) -> Notes:
    more = [f"There are {len(notes) - NOTES} more notes like these."] if len(notes) > NOTES else []
    return [cut(note, NOTE_LENGTH) for note in notes[:NOTES]] + more


def _summary(path: Path, stored: StoredRun) -> dict[str, Any]:
    config, table = stored.config, stored.table
    return {
        "model": _named(config.get("model")),
        "task": _named(config.get("task")),
        "engine": _named(config.get("rollout")),
        "steps": stored.steps,
        "planned_steps": stored.planned,
        "state": _state(path, stored.steps, stored.planned),
        "seconds": stored.times.total("step_s"),
        "tokens": table.total("tokens"),
        "held_out": table.change("eval/accuracy"),
        "accuracy": table.change("accuracy"),
        "reward": table.change("reward/mean"),
    }


def _named(value: Any) -> str | None:
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
