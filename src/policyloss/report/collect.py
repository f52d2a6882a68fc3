"""`collect`: run directories → plain data. The schema is in docs/report.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.report import limits
from policyloss.report.branches import with_branches
from policyloss.report.compare import differences, loss_card, loss_differences
from policyloss.report.health import health_of
from policyloss.report.limits import NOTE_LENGTH, NOTES, cut
from policyloss.report.reading import Notes, integer, is_regular, json_object
from policyloss.report.rollouts import as_stored, read_rollouts
from policyloss.report.seeds import identical_runs, seed_groups
from policyloss.report.series import Table, read_table
from policyloss.report.verdict import verdict_of
from policyloss.train.run.lock import is_held

SCHEMA = 1


def collect(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything a report shows of the runs in `paths`, as JSON-able data without NaN.

    {"schema": 1, "runs": [run, …], "differences": {"config": […], "environment": […], "loss":
    […]}, "groups": [{"label", "runs", "end"}], "identical": [[index of a run, …]]}. A file that is
    missing or half-written gives a note in the run's "notes". A folder that is no run is an
    `InputError`.
    """
    if isinstance(paths, (str, Path)):
        raise InputError(f"paths={str(paths)!r} is one path; give a list of run directories.")
    if not paths:
        raise InputError("paths is empty; give at least one run directory.")
    folders = [_run_folder(Path(p)) for p in paths]
    labels = _labels(folders)
    runs = [
        _run(folder, label, len(folders)) for folder, label in zip(folders, labels, strict=True)
    ]
    between = {name: differences([run[name] for run in runs]) for name in ("config", "environment")}
    return {
        "schema": SCHEMA,
        "runs": runs,
        "differences": {**between, "loss": loss_differences(runs)},
        "groups": seed_groups(runs),
        "identical": identical_runs(runs),
    }


def _run_folder(path: Path) -> Path:
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {problem}; give the folder that `policyloss train` wrote.")
    if not any(is_regular(path / name) for name in ("config.json", "metrics.jsonl")):
        inside = sorted(p.parent.name for p in islice(path.glob("*/config.json"), 100))
        hint = (
            f" It holds runs: {', '.join(inside[:5])}."
            if inside
            else " A link to such a file does not count."
        )
        raise InputError(
            f"{path} is no run directory: it has neither config.json nor metrics.jsonl.{hint}"
        )
    return path


def _labels(folders: Sequence[Path]) -> list[str]:
    """A short, unique name for each run: that of its folder, with the parent folder if two are
    equal, and with a number if that does not help.
    """
    names = [folder.resolve().name for folder in folders]
    longer = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    names = [
        long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _run(folder: Path, label: str, runs: int) -> dict[str, Any]:
    """What the page shows of one of `runs`, which share the bounds on what is drawn."""
    notes: Notes = []
    points = limits.share(limits.ALL_POINTS, limits.POINT_BUDGET, runs)
    tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
    stored = json_object(folder / "config.json", notes)
    config = stored.get("config")
    config = config if isinstance(config, dict) else {}
    defaults = stored.get("defaults")
    table = read_table(folder / "metrics.jsonl", notes)
    metrics = table.series("metrics.jsonl", notes, points)
    histogram = table.histograms.data(notes)
    times = read_table(folder / "timing.jsonl", notes)
    version = stored.get("policyloss")
    run: dict[str, Any] = {
        "label": label,
        "path": str(folder),
        "policyloss": version if isinstance(version, str) else "",
        "config": config,
        "defaults": defaults if isinstance(defaults, dict) else {},
        "environment": json_object(folder / "environment.json", notes),
        "loss": loss_card(stored.get("loss"), config, notes),
        "summary": _summary(folder, config, table, times),
        "metrics": metrics,
        "timing": times.series("timing.jsonl", notes, points),
        "progress": {"tokens": table.sums("tokens"), "seconds": times.sums("step_s")},
        "ratio_histogram": histogram,
        "rollouts": read_rollouts(folder / "rollouts.jsonl", notes, tokens),
        "answers": _answers(folder / "answers.jsonl", notes, tokens // limits.ANSWERS_SHARE),
        "notes": _bounded(notes + table.nonfinite_notes()),
    }
    run["rollouts"] = with_branches(run["rollouts"], run["loss"])
    sampled = table.sampled(points)
    judged, symptoms = health_of(sampled, run["rollouts"])
    verdict = verdict_of(sampled, run["summary"], config)
    return {**run, "verdict": verdict, "health": symptoms, "judged_steps": judged}


def _answers(path: Path, notes: Notes, budget: int) -> list[dict[str, Any]]:
    """The answers to held-out prompts; that a run has stored none needs no note."""
    return read_rollouts(path, notes, budget, as_stored) if os.path.lexists(path) else []


def _bounded(notes: Notes) -> Notes:
    more = [f"There are {len(notes) - NOTES} more notes like these."] if len(notes) > NOTES else []
    return [cut(note, NOTE_LENGTH) for note in notes[:NOTES]] + more


def _summary(folder: Path, config: Mapping[str, Any], table: Table, times: Table) -> dict[str, Any]:
    planned = integer(config.get("steps"))
    return {
        "model": _named(config.get("model")),
        "task": _named(config.get("task")),
        "engine": _named(config.get("rollout")),
        "steps": table.trained,
        "planned_steps": planned,
        "state": _state(folder, table.trained, planned),
        "seconds": times.total("step_s"),
        "tokens": table.total("tokens"),
        "held_out": table.change("eval/accuracy"),
        "accuracy": table.change("accuracy"),
        "reward": table.change("reward/mean"),
    }


def _named(value: Any) -> str | None:
    """The name of a model or task, which a config holds as text or in an object."""
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
