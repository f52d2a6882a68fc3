"""Checkpoints: a folder of safetensors and JSON for each step, complete or not there.

    checkpoints/step_000010/checkpoint.json       step, numbers, and the size and SHA-256 of each file
    checkpoints/step_000010/tensors.safetensors

A checkpoint is written to a hidden folder beside, brought to the disk, then renamed. Hidden names: `.step_000010.tmp` is one half
written, `.old` one about to be replaced by a newer of the same step, `.gone` one being deleted, `.discarded` one that a resume from
an earlier step left behind. No file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policyloss.errors import InputError
from policyloss.train.run.atomic import StorageError, from_json, make_folder, sync, to_json, write_error, write_synced
from policyloss.train.run.optimizer_state import load_optimizer_state, optimizer_state
from policyloss.train.run.plain_files import read_plain, require_plain

__all__ = [
    "StorageError",
    "discard_after",
    "latest",
    "load",
    "load_optimizer_state",
    "optimizer_state",
    "save",
    "step_of",
    "subtree",
]

INDEX = "checkpoint.json"
FORMAT = 1
_BODY = b', "checkpoint": '  # between the checksum of the rest of the index and the rest
TENSORS = "tensors.safetensors"
_NAME = re.compile(r"(\.?)step_(\d{1,18})(?:\.(tmp|old|gone|discarded))?")

State = Mapping[str, Any]  # tensors, and mappings or sequences of them


def save(folder: Path, step: int, state: State, numbers: Mapping[str, Any], *, keep: int | None) -> Path:
    """Write the checkpoint of `step` into `folder`, then delete all but the newest `keep`. Returns its path.

    state: tensors, in mappings and sequences as deep as you like; they come back flat, `{"model": {"w": x}}` as `"model/w"`.
    Tensors that are the same memory (tied weights) are written once. numbers: anything JSON holds.
    keep: how many to keep, this one included; None keeps all. Nothing is deleted before the new one is complete, and if it cannot
    be written (a full disk), everything older is as it was.
    """
    check_arguments(step, keep)
    whole, same = _distinct(flatten(state))
    with undone_on_error(folder, step):
        temporary = begin(folder, step)
        files = {TENSORS: write_tensors(temporary / TENSORS, whole)}
        path = finish(temporary, step, {"files": files, "same": same, "numbers": numbers})
    prune(folder, step, keep)
    return path


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors (on the CPU, by their flat names) and the numbers of a checkpoint. Raises if a byte of it has changed."""
    index = checked_index(path, sums=True)
    if "sharded" in index:
        raise InputError(f"{path} was written by several ranks; read it with load_sharded.")
    tensors: dict[str, Tensor] = load_file(path / TENSORS)
    tensors |= {name: tensors[first] for name, first in index["same"].items()}
    return tensors, index["numbers"]


def latest(folder: Path, check: Callable[[Path], object] | None = None) -> Path | None:
    """The newest checkpoint in `folder` that is complete and intact, every byte; None if there is none.

    One that is not is reported by a warning, and the next older is tried. check: a further look at one, by a function that raises
    a `StorageError` if it is not good.
    """
    for path in _newest_first(folder):
        try:
            checked_index(path, sums=True)
            if check is not None:
                check(path)
        except StorageError as error:
            warnings.warn(f"{error} Trying the next older one.", UserWarning, stacklevel=2)
        else:
            return path
    return None


def discard_after(folder: Path, step: int) -> None:
    """Set aside the checkpoints after `step`, which a run that continues from there makes anew; the next `save` deletes them."""
    for path in _newest_first(folder):
        if step_of(path) > step:
            os.replace(path, _hidden(folder, step_of(path), "discarded", free=True))
            sync(folder)


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise InputError(f"{path} is not a checkpoint: their names are like step_000010.")
    return int(found[2])


def subtree(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors under `name`, without it: `subtree({"model/w": x}, "model") == {"w": x}`."""
    return {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}/")}


def flatten(state: State) -> dict[str, Tensor]:
    """`{"a": {"b": x}, "c": [y]}` → `{"a/b": x, "c/0": y}`."""
    flat: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if name in flat:
                raise InputError(f"two tensors of the state are called {name!r}; rename one.")
            flat[name] = value.detach()
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                add(f"{name}/{key}" if name else str(key), inner)
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            for i, inner in enumerate(value):
                add(f"{name}/{i}", inner)
        else:
            raise InputError(f"state[{name!r}] is a {type(value).__name__}; tensors go into state, everything else into numbers.")

    add("", state)
    return flat


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file, bring it to the disk, and return its size and SHA-256."""
    save_file({name: _own_memory(name, x) for name, x in tensors.items()}, path)
    sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def check_arguments(step: int, keep: int | None) -> None:
    """Raise if no checkpoint could be called so, or none would be kept."""
    if step < 0 or (keep is not None and keep < 1):
        raise InputError(f"a checkpoint needs step ≥ 0 and keep ≥ 1 (or None to keep all), got step={step}, keep={keep}.")


@contextmanager
def undone_on_error(folder: Path, step: int) -> Iterator[None]:
    """Around the writing of a checkpoint: if it fails, what was written is removed, and a full disk gets a clear error."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(_hidden(folder, step, "tmp"), ignore_errors=True)
        if isinstance(error, (OSError, safetensors.SafetensorError)):
            raise write_error(f"checkpoint {_named(folder, step)}", error, "Older checkpoints are untouched.") from error
        raise


def begin(folder: Path, step: int) -> Path:
    """An empty temporary folder for the files of a checkpoint. Removes what an earlier one that was interrupted left."""
    temporary = _hidden(folder, step, "tmp")
    make_folder(folder)
    _tidy(folder)
    temporary.mkdir()
    return temporary


def finish(temporary: Path, step: int, contents: Mapping[str, Any]) -> Path:
    """Write the index beside the files, bring all to the disk, and give the folder its name: from here on it is a checkpoint."""
    body = to_json({"format": FORMAT, "step": step, **contents}, "checkpoint")
    write_synced(temporary / INDEX, b'{"sha256": "%s"%s%s}' % (hashlib.sha256(body).hexdigest().encode(), _BODY, body))
    sync(temporary)
    path = _named(temporary.parent, step)
    _publish(temporary, path)
    return path


def checked_index(path: Path, *, sums: bool) -> dict[str, Any]:
    """The index of a checkpoint, or an error that says what is wrong with it. sums: whether to read every byte, or only sizes."""
    try:
        data = read_plain(path / INDEX)
        said = from_json(data)["sha256"]
        body = data.partition(_BODY)[2][:-1]
        if hashlib.sha256(body).hexdigest() != said:
            raise StorageError(f"checkpoint {path} is damaged: {INDEX} does not have its checksum.")
        index: dict[str, Any] = from_json(body)
        if index["format"] != FORMAT:
            raise StorageError(f"checkpoint {path} has format {index['format']}, this version reads {FORMAT}; use a newer one.")
        for name, file in index["files"].items():
            _check_file(path, name, file, sums)
        if type(index["step"]) is not int or not isinstance(index["numbers"], dict):
            raise StorageError(f"checkpoint {path} is damaged: {INDEX} needs a step and numbers by name.")
    except OSError as error:
        raise StorageError(f"checkpoint {path} is incomplete: {error.filename or path}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"checkpoint {path} is damaged: {INDEX} is not readable ({error}).") from None
    return index


def _check_file(path: Path, name: str, file: Mapping[str, Any], sums: bool) -> None:
    if Path(name).name != name:
        raise StorageError(f"checkpoint {path} is not one of ours: it names the file {name!r} outside of its folder.")
    require_plain(path / name)
    size = (path / name).stat().st_size
    if size != file["bytes"]:
        raise StorageError(f"checkpoint {path} is damaged: {name} has {size} bytes, {file['bytes']} were written.")
    if sums and _sha256(path / name) != file["sha256"]:
        raise StorageError(f"checkpoint {path} is damaged: {name} does not have its checksum.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are another one's very memory, and for each of these the name of the other."""
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name, x in tensors.items():
        if hasattr(x, "placements"):
            raise InputError(f"state[{name!r}] is spread over ranks (a DTensor); write it with save_sharded.")
        if x.numel() and x.data_ptr():
            seen = first.setdefault((x.device, x.data_ptr(), x.shape, x.stride(), x.dtype), name)
            if seen != name:
                same[name] = seen
    return {name: x for name, x in tensors.items() if name not in same}, same


def _own_memory(name: str, x: Tensor) -> Tensor:
    """`x` on the CPU, contiguous, and in memory that nothing else uses, which safetensors asks for."""
    if x.is_meta or x.layout != torch.strided:
        raise InputError(f"state[{name!r}] has no plain memory ({x.device}, {x.layout}); make it a dense tensor with values.")
    here = x.cpu().contiguous()
    whole = here.untyped_storage().nbytes() == here.numel() * here.element_size()
    return here if whole else here.clone()


def _named(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}"


def _hidden(folder: Path, step: int, what: str, *, free: bool = False) -> Path:
    path = folder / f".step_{step:06d}.{what}"
    if free:
        shutil.rmtree(path, ignore_errors=True)
    return path


def _publish(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name. One of the same step steps aside first, and comes back if that fails."""
    old = _hidden(path.parent, step_of(path), "old")
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


def _newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`. One that stepped aside counts if a crash left it without the one that was to replace it."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:  # ".step…" sorts before "step…", which replaces it here
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and (not match[1] if match[3] is None else match[1] and match[3] == "old"):
            found[int(match[2])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def _tidy(folder: Path) -> None:
    """Finish what a crash interrupted: bring back one that stepped aside, delete what has no use."""
    for path in _newest_first(folder):
        if path.name.endswith(".old"):
            os.replace(path, _named(folder, step_of(path)))
    _remove_hidden(folder, "tmp", "old", "gone")


def prune(folder: Path, step: int, keep: int | None) -> None:
    """Delete what a resume discarded, and the checkpoints before `step` beyond the newest `keep` that can be read."""
    kept = 1
    for path in _newest_first(folder):
        if keep is None or step_of(path) >= step:
            continue
        if kept < keep and _readable(path):
            kept += 1
            continue
        try:
            os.replace(path, _hidden(folder, step_of(path), "gone", free=True))  # a crash leaves no half of it under its name
        except OSError as error:  # the new one is complete: not worth ending a run
            warnings.warn(f"could not delete the old checkpoint {path}: {error}", UserWarning, stacklevel=3)
    _remove_hidden(folder, "gone", "discarded")


def _remove_hidden(folder: Path, *kinds: str) -> None:
    for path in list(folder.iterdir()):
        match = _NAME.fullmatch(path.name)
        if match and match[1] and match[3] in kinds:
            shutil.rmtree(path, ignore_errors=True)


def _readable(path: Path) -> bool:
    try:
        checked_index(path, sums=False)
    except StorageError:
        return False
    return True
