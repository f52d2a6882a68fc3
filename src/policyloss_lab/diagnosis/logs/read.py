"""Reads the numbers of a run for the doctor: all of them, or an error that says why not."""

from __future__ import annotations

import os
from pathlib import Path

from policyloss.errors import InputError
from policyloss.output import kind_of
from policyloss_lab.logs.records import Row
from policyloss_lab.logs.scalars import rows_of

FILE_BYTES = 256 * 2**20
ROWS = 200_000


def read_log(path: str | Path) -> list[Row]:
    """One row of numbers for each step, in the order of steps; an `InputError` if `path` is no log.

    path: a run directory of ours or of TRL, or a file: metrics.jsonl, trainer_state.json, verl's
    JSONL or console output, TensorBoard events, W&B's `.wandb`, a CSV export of W&B or trackio.
    """
    merged: dict[int, Row] = {}
    for file in _log_files(Path(path)):
        _refuse(file)
        try:
            with file.open("rb") as handle:
                for step, row in rows_of(handle, str(file)):
                    merged.setdefault(step, {"step": float(step)}).update(row)
                    if len(merged) > ROWS:
                        raise InputError(
                            f"{file} holds more than {ROWS:,} steps; give a part of it."
                        )
        except OSError as error:
            raise InputError(f"{file} cannot be read: {type(error).__name__}.") from error
    if not merged:
        raise InputError(f"{path} holds no row with a step and numbers; it is no log of a run.")
    return [merged[step] for step in sorted(merged)]


def _log_files(path: Path) -> list[Path]:
    """The log of a directory: of TensorBoard there is one file for each time that the run began."""
    if not path.is_dir():
        return [path]
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    for file in (path / "metrics.jsonl", path / "trainer_state.json", *states[-1:]):
        if file.exists():
            return [file]
    if events := sorted(path.glob("events.out.tfevents*")):
        return events
    raise InputError(
        f"{path} holds neither metrics.jsonl, trainer_state.json nor TensorBoard events."
    )


def _refuse(file: Path) -> None:
    """Raise for what is no regular file, or too large to be judged."""
    try:
        status = os.lstat(file)
    except FileNotFoundError:
        raise InputError(f"{file} does not exist.") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {type(error).__name__}.") from error
    kind = kind_of(status.st_mode)
    if kind is not None:
        raise InputError(f"{file} is a {kind}; give a file.")
    if status.st_size > FILE_BYTES:
        raise InputError(f"{file} is larger than {FILE_BYTES // 2**20} MiB; give a part of it.")
