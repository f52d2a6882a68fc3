"""The folders of checkpoints, by name: started, published, set aside, deleted.

step_000010              a complete checkpoint
.step_000010.tmp         being written
.step_000010.old         being replaced by a new checkpoint of the same step
.step_000010.gone        being deleted
.step_000010.discarded   later than the step that a run was resumed from
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

from policyloss.errors import InputError
from policyloss_lab.runs.files import make_folder, sync

_NAME = re.compile(r"(\.?)step_(\d{1,18})(?:\.(tmp|old|gone|discarded))?")


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise InputError(f"{path} is not a checkpoint: their names are like step_000010.")
    return int(match[2])


def published_path(folder: Path, step: int) -> Path:
    """The path of a step's complete checkpoint."""
    return folder / f"step_{step:06d}"


def begin(folder: Path, step: int) -> Path:
    """Make an empty temporary folder for a checkpoint, and remove leftovers of interrupted ones."""
    temporary = _hidden(folder, step, "tmp")
    make_folder(folder)
    _tidy(folder)
    temporary.mkdir()
    return temporary


def undo(folder: Path, step: int) -> None:
    """Remove all files written since `begin`."""
    shutil.rmtree(_hidden(folder, step, "tmp"), ignore_errors=True)


def publish(temporary: Path) -> Path:
    """Rename a complete checkpoint to its final name; on failure, restore the step's older one."""
    folder, step = temporary.parent, step_of(temporary)
    path, old = published_path(folder, step), _hidden(folder, step, "old")
    replaces = path.exists()
    if replaces:
        os.replace(path, old)
    try:
        os.replace(temporary, path)
    except BaseException:
        if replaces:
            os.replace(old, path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    return path


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, including any set aside and not yet replaced."""
    by_step: dict[int, Path] = {}
    # ".step…" sorts before "step…", which replaces it here.
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if (
            match
            and path.is_dir()
            and (not match[1] if match[3] is None else match[1] and match[3] == "old")
        ):
            by_step[int(match[2])] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def discard_after(folder: Path, step: int) -> None:
    """Set aside the checkpoints after `step`; the next `prune` deletes them."""
    for path in newest_first(folder):
        if step_of(path) > step:
            os.replace(path, _hidden(folder, step_of(path), "discarded", free=True))
            sync(folder)


def prune(folder: Path, step: int, keep: int | None, readable: Callable[[Path], bool]) -> None:
    """Delete discarded checkpoints, and all before `step` but the newest `keep` readable ones."""
    kept = 1
    for path in newest_first(folder):
        if keep is None or step_of(path) >= step:
            continue
        if kept < keep and readable(path):
            kept += 1
            continue
        try:
            # Rename first, so that a crash never leaves half a checkpoint under its name.
            os.replace(path, _hidden(folder, step_of(path), "gone", free=True))
        except OSError as error:  # the new checkpoint is complete, so the run goes on
            warnings.warn(
                f"could not delete the old checkpoint {path}: {error}", UserWarning, stacklevel=3
            )
    _remove_hidden(folder, "gone", "discarded")


def _tidy(folder: Path) -> None:
    """Clean up after a crash: bring back checkpoints set aside, delete temporary folders."""
    for path in newest_first(folder):
        if path.name.endswith(".old"):
            os.replace(path, published_path(folder, step_of(path)))
    _remove_hidden(folder, "tmp", "old", "gone")


def _remove_hidden(folder: Path, *kinds: str) -> None:
    for path in list(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match[1] and match[3] in kinds:
            shutil.rmtree(path, ignore_errors=True)


def _hidden(folder: Path, step: int, kind: str, *, free: bool = False) -> Path:
    path = folder / f".step_{step:06d}.{kind}"
    if free:
        shutil.rmtree(path, ignore_errors=True)
    return path
