"""Finds the files of a run of any trainer; the format follows from their first bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs import trackers
from policyloss_lab.logs.completions import holds_completions, step_in_name
from policyloss_lab.logs.scalars import is_table
from policyloss_lab.reading import Notes, is_regular, json_object, open_file
from policyloss_lab.report.series import Table

STATE = "trainer_state.json"
# The kinds of files with numbers. If a folder holds several, they are of the same run, and the
# first kind is read.
KINDS = {
    "state": f"{STATE} of the Hugging Face trainers, such as TRL's",
    "lines": "JSON lines with a step and numbers (verl, prime-rl and others)",
    "trackio": "a project database of trackio",
    "events": "TensorBoard events",
    "table": "a CSV export of W&B or trackio",
    "console": "verl's console output",
}
_ENDINGS = (".jsonl", ".json", ".csv", ".wandb", ".parquet", ".db", ".log", ".txt", ".out")
_STEP = re.compile(rb'"(_?step|[\w/]*global_step)"\s*:')
_OURS = ("config.json", "metrics.jsonl")
_OF_OTHERS = (STATE, "completions", "token_exports", "wandb")


@dataclass
class Source:
    """The files of one run, and their contents once they are read.

    path: the argument, plus `#` and the name of the run if a table holds several. notes: about
    omitted data. kind: "ours" for a run directory of ours, the key of `KINDS` for the files with
    numbers of another trainer, or "" for completions alone. run: the name of the run in a database
    or a table. format: in words. steps: the number of trained steps. spec: the loss as JSON.
    """

    path: Path
    notes: Notes
    kind: str = ""
    run: str = ""
    numbers: list[Path] = field(default_factory=list)
    completions: list[Path] = field(default_factory=list)
    format: str = ""
    version: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    steps: int = 0
    planned: int | None = None
    table: Table = field(default_factory=Table)
    times: Table = field(default_factory=Table)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)


def is_our_run(path: Path) -> bool:
    """Whether `policyloss train` or a `Recorder` wrote this folder."""
    if not path.is_dir() or not any(is_regular(path / name) for name in _OURS):
        return False
    if "policyloss" in json_object(path / "config.json", []):
        return True
    # The config is damaged or missing. Models of Hugging Face also have a config.json, and other
    # trainers also write metrics.jsonl.
    states = path.glob(f"checkpoint-*/{STATE}")
    if any((path / name).exists() for name in _OF_OTHERS) or any(states):
        return False
    return kind_of_file(path / "metrics.jsonl") != "lines of others"


def split_run(path: Path) -> tuple[Path, str]:
    """(`p.db`, `RUN`) for a path `p.db#RUN`; (path, "") for any other."""
    if not path.exists():
        text = str(path)
        for mark in re.finditer("#", text):
            if mark.start() and (place := Path(text[: mark.start()])).exists():
                return place, text[mark.end() :]
    return path, ""


def source_of(argument: Path) -> Source:
    """The files of the run in a path; an `InputError` with the known formats if there are none."""
    notes: Notes = []
    if is_our_run(argument):
        return Source(argument, notes, "ours")
    path, run = split_run(argument)
    if not path.exists():
        raise InputError(f"{path} does not exist; give the folder or the file of a run.")
    inside = sorted(file.parent for file in islice(path.glob("*/config.json"), 100))
    if ours := [folder.name for folder in inside if is_our_run(folder)]:
        raise InputError(f"{path} holds runs: {', '.join(ours[:5])}; give them as paths.")
    kinds: dict[str, list[Path]] = {}
    for file in [path] if path.is_file() else _inside(path, notes):
        if (kind := kind_of_file(file)) is not None:
            kinds.setdefault(kind, []).append(file)
    kinds["lines"] = kinds.get("lines", []) + kinds.pop("lines of others", [])
    completions = sorted(kinds.pop("completions", []))
    binary = [f"{file.name} {trackers.NOT_READ}" for file in kinds.pop("wandb", [])]
    chosen = next((kind for kind in KINDS if kinds.get(kind)), "")
    if not chosen and not completions:
        if binary:
            raise InputError(binary[0])
        looked = "; ".join([*KINDS.values(), "completions as parquet or JSON lines"])
        raise InputError(
            f"{path} holds no run. Looked for: a folder that `policyloss train` or "
            f"policyloss_lab.Recorder wrote (config.json, metrics.jsonl); {looked}."
        )
    notes += binary
    numbers = _of_one_run(path, chosen, kinds.get(chosen, []), notes)
    others = [KINDS[kind] for kind in sorted(kinds) if kind != chosen and kinds[kind]]
    if others:
        notes.append(f"The numbers are from {KINDS[chosen]}; not read: {', '.join(others)}.")
    if chosen == "trackio":
        run = _of_project(numbers[0], run)
    elif run and chosen != "table":
        raise InputError(f"{path} is one run; leave out #{run}.")
    return Source(argument, notes, chosen, run, numbers, completions)


def _inside(folder: Path, notes: Notes) -> Iterator[Path]:
    """The files of a folder and its subfolders that may hold a run; no link is followed."""
    count = 0
    for place, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            count += 1
            if count > limits.PATHS:
                notes.append(
                    f"{folder.name} holds more than {limits.PATHS:,} files; the others were not "
                    "looked at."
                )
                return
            if name.endswith(_ENDINGS) or "tfevents" in name:
                yield Path(place) / name


def kind_of_file(path: Path) -> str | None:
    """A key of `KINDS`, "lines of others" for JSON lines of another trainer, "completions",
    "wandb" for a binary log of W&B, or None.
    """
    try:
        with open_file(path) as file:
            head = file.read(16_384)
    except (InputError, OSError):
        return None
    if path.name == STATE or b'"log_history"' in head:
        return "state"
    if trackers.is_tensorboard(head):
        return "events"
    if head.startswith(trackers.WANDB_HEAD):
        return "wandb"
    if head.startswith(trackers.SQLITE_HEAD):
        return "trackio"
    if (path.suffix != ".json" or path.name.endswith(".table.json")) and holds_completions(head):
        return "completions"
    first = head.partition(b"\n")[0]
    if head.startswith(b"{") and path.suffix != ".json" and _STEP.search(first):
        return "lines of others" if b'"data"' in first or b'"time"' in first else "lines"
    if re.search(rb"step:\d+ - \S+:\S+", head):
        return "console"
    if path.suffix == ".csv" and is_table(first.decode("utf-8", "replace")):
        return "table"
    return None


def _of_one_run(path: Path, kind: str, files: list[Path], notes: Notes) -> list[Path]:
    """The files of one run among files of one kind: the newest state, or all events of a folder."""
    if len(files) < 2:
        return files
    if kind == "state":
        return [max(files, key=lambda file: (file.parent == path, step_in_name(file.parent)))]
    folders = sorted({file.parent for file in files})
    if kind in ("events", "console") and len(folders) == 1:
        return sorted(files)
    if kind == "trackio" or len(folders) > 1:
        names = ", ".join(str(folder.relative_to(path)) for folder in folders[:5])
        raise InputError(
            f"{path} holds several runs ({KINDS[kind]}), in {names}"
            f"{' and others' if len(folders) > 5 else ''}; give each of them as a path."
        )
    notes.append(f"{path.name} holds {len(files)} files of {KINDS[kind]}; all were read.")
    return sorted(files)


def _of_project(path: Path, run: str) -> str:
    """The name of the run in a trackio project; an `InputError` if it is not clear."""
    names = trackers.run_names(path)
    if run in names or (len(names) == 1 and not run):
        return run or names[0]
    example = f"{path.name}#{names[0] if names else 'RUN'}"
    raise InputError(f"{path} holds the runs {', '.join(names[:10])}; give one as {example}.")
