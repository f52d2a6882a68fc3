"""`collect`: run directories → plain data. The schema is in docs/report.md."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.report.compare import differences, loss_card, loss_differences
from policyloss.report.reading import Notes, json_lines, json_object, strict
from policyloss.report.rollouts import read_rollouts
from policyloss.report.series import Series, by_step, first_and_last, histograms, nonfinite_notes, series, total

SCHEMA = 1


def collect(paths: Sequence[str | Path]) -> dict[str, Any]:
    """Everything a report shows of the runs in `paths`, as JSON-able data without NaN.

    {"schema": 1, "runs": [run, …], "differences": {"config": […], "environment": […], "loss": […]}}.
    A file that is missing or half-written gives a note in the run's "notes". A folder that is no run is an `InputError`.
    """
    if isinstance(paths, (str, Path)):
        raise InputError(f"paths={str(paths)!r} is one path; give a list of run directories.")
    if not paths:
        raise InputError("paths is empty; give at least one run directory.")
    folders = [_run_folder(Path(p)) for p in paths]
    runs = [_run(folder, label) for folder, label in zip(folders, _labels(folders), strict=True)]
    between = {name: differences([run[name] for run in runs]) for name in ("config", "environment")}
    return {"schema": SCHEMA, "runs": runs, "differences": {**between, "loss": loss_differences(runs)}}


def _run_folder(path: Path) -> Path:
    if not path.is_dir():
        seen = "is a file" if path.exists() else "does not exist"
        raise InputError(f"{path} {seen}; give the folder that `policyloss train` wrote.")
    if not any((path / name).is_file() for name in ("config.json", "metrics.jsonl")):
        inside = sorted(p.parent.name for p in path.glob("*/config.json"))
        hint = f" It holds runs: {', '.join(inside[:5])}." if inside else ""
        raise InputError(f"{path} is no run directory: it has neither config.json nor metrics.jsonl.{hint}")
    return path


def _labels(folders: Sequence[Path]) -> list[str]:
    """A short name for each run, different for each: the folder's, with its parent's if two are alike, else with a number."""
    names = [folder.resolve().name for folder in folders]
    longer = [f"{folder.resolve().parent.name}/{folder.resolve().name}" for folder in folders]
    names = [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)]


def _run(folder: Path, label: str) -> dict[str, Any]:
    notes: Notes = []
    stored = json_object(folder / "config.json", notes)
    config = stored.get("config")
    config = strict(config) if isinstance(config, dict) else {}
    lines = by_step(json_lines(folder / "metrics.jsonl", notes), "metrics.jsonl", notes)
    metrics = series(lines)
    timing = series(by_step(json_lines(folder / "timing.jsonl", notes), "timing.jsonl", notes))
    notes += nonfinite_notes(metrics)
    return {
        "label": label,
        "path": str(folder),
        "policyloss": str(stored.get("policyloss", "")),
        "config": config,
        "environment": strict(json_object(folder / "environment.json", notes)),
        "loss": loss_card(strict(stored.get("loss")), config, notes),
        "summary": _summary(folder, config, lines, metrics, timing),
        "metrics": metrics,
        "timing": timing,
        "ratio_histogram": histograms(lines, notes),
        "rollouts": read_rollouts(folder / "rollouts.jsonl", notes),
        "notes": notes,
    }


def _summary(
    folder: Path, config: Mapping[str, Any], lines: Mapping[int, Mapping[str, Any]], metrics: Series, timing: Series
) -> dict[str, Any]:
    planned = config.get("steps")
    planned = planned if isinstance(planned, int) else None
    trained = sum(any(key != "step" and not key.startswith("eval/") for key in row) for row in lines.values())
    return {
        "model": _named(config.get("model")),
        "task": _named(config.get("task")),
        "steps": trained,  # an evaluation after the last step has a line of its own, and is no step
        "planned_steps": planned,
        "state": _state(folder, trained, planned),
        "seconds": total(timing, "step_s"),
        "tokens": total(metrics, "tokens"),
        "held_out": first_and_last(metrics, "eval/accuracy"),
        "accuracy": first_and_last(metrics, "accuracy"),
        "reward": first_and_last(metrics, "reward/mean"),
    }


def _named(value: Any) -> str | None:
    """The name of a model or task, which a config holds as text or in an object of its own."""
    if isinstance(value, Mapping):
        value = value.get("name") or value.get("path")
    return value if isinstance(value, str) and value else None


def _state(folder: Path, trained: int, planned: int | None) -> str:
    """The run is finished, running (a process holds its lock), stopped before the planned end, or unknown if none was planned."""
    if _is_held(folder / "lock"):
        return "running"
    if planned is None:
        return "unknown"
    return "finished" if trained >= planned else "stopped"


def _is_held(lock: Path) -> bool:
    """Whether a process holds the run: its lock names one that is alive, or one of another machine, which cannot be asked."""
    holder = json_object(lock, [])
    pid, host = holder.get("pid"), holder.get("host")
    if not isinstance(pid, int):
        return False  # no lock, or one that a crash left half-written
    if host != socket.gethostname() or sys.platform == "win32":  # there, asking would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
