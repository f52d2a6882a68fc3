"""Checkpoints: a folder of safetensors and JSON for each step, either complete or absent.

    checkpoint.json          step, numbers, where the rows of each tensor are, and each file's
                             size and SHA-256
    rank00000.safetensors    the rows of the first rank; one file for each rank that has rows

The format does not depend on the number of ranks: any number of ranks can read any checkpoint.
A checkpoint is written to a hidden folder, synced to the disk, then renamed. No file is ever
unpickled. The names of the folders:

    step_000010              a complete checkpoint
    .step_000010.tmp         being written
    .step_000010.old         being replaced by a new checkpoint of the same step
    .step_000010.gone        being deleted
    .step_000010.discarded   later than the step that a run was resumed from
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from policyloss.errors import InputError
from policyloss_lab.runs import files
from policyloss_lab.runs.files import StorageError
from policyloss_train.distributed import on_every_rank, on_first_rank, rank_in
from policyloss_train.run import shards

INDEX = "checkpoint.json"
INDEX_BYTES = 1 << 30  # the index names every piece of every tensor, and holds queued completions
FORMAT = 2
_NAME = re.compile(r"(\.?)step_(\d{1,18})(?:\.(tmp|old|gone|discarded))?")
_BODY = b', "checkpoint": '  # separates the index from its checksum

State = Mapping[str, Any]  # tensors, and mappings or sequences of them
T = TypeVar("T")


def save(
    folder: Path,
    step: int,
    state: State,
    numbers: Mapping[str, Any],
    *,
    keep: int | None,
    group: Any = None,
) -> Path:
    """Write the checkpoint of `step` into `folder`, and delete old ones; returns the new path.

    state: tensors, in nested mappings and sequences; `load` returns them flat, `{"model": {"w":
        x}}` as `"model/w"`. Tensors that share memory (tied weights) are written once.
    numbers: JSON values; those of the first rank are kept.
    keep: the number of newest checkpoints to keep, this one included; None keeps all. Nothing is
        deleted before the new checkpoint is complete.
    group: the ranks that each call this function; if one fails, all raise. None: this process
        alone. Each rank writes its rows of a DTensor. The lowest rank that has a plain tensor
        writes it.
    """
    tensors = flatten(state)
    shares = {name: shards.share_of(x) for name, x in tensors.items()}
    entries = shards.locate_pieces(on_every_rank(lambda: shares, group))
    path, file = published_path(folder, step), shards.file_of(rank_in(group))
    to_write = {
        name: shards.local_part(tensors[name])
        for name, entry in entries.items()
        if any(piece["file"] == file for piece in entry["pieces"])
    }
    try:
        temporary = on_first_rank(partial(_writing, path, begin, folder, step), group)
        write = partial(_writing, path, write_tensors, temporary / file, to_write)
        written = on_every_rank(write, group)
        by_file = {shards.file_of(rank): entry for rank, entry in enumerate(written) if entry}
        contents = {"files": by_file, "tensors": entries, "numbers": numbers}
        on_first_rank(partial(_writing, path, _finish, temporary, step, contents), group)
    except BaseException:
        if rank_in(group) == 0:
            undo(folder, step)
        raise
    on_first_rank(lambda: prune(folder, step, keep), group)
    return path


def load(
    path: Path, layout: State | None = None, *, group: Any = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, by flat names, and the numbers of a checkpoint that any number of ranks wrote.
    Only sizes are checked: `latest` and `check_index` check every byte.

    layout: DTensors, named as in the saved state. A tensor with the same shape, and the same name
        or a name under it (an optimizer's moments are `parameter/exp_avg`), becomes a DTensor of
        the same layout and device; each rank reads its rows. All others are read in full, on the
        CPU.
    group: ranks that each call this; if one cannot read its part, all raise.
    """
    contents: list[tuple[dict[str, Tensor], dict[str, Any]]] = []  # not to be sent to other ranks
    on_every_rank(lambda: contents.append(_load(path, flatten(layout or {}))), group)
    return contents[0]


def latest(
    folder: Path, check: Callable[[Path], object] | None = None, *, group: Any = None
) -> Path | None:
    """The newest checkpoint in `folder` that is intact in every byte; None if there is none.

    Warns of each damaged checkpoint, and tries the next older one. check: raises a `StorageError`
    for a checkpoint that is unusable for other reasons. group: ranks that each call this.
    """

    def search() -> Path | None:
        for path in newest_first(folder):
            try:
                check_index(path, sums=True)
                if check is not None:
                    check(path)
            except StorageError as error:
                warnings.warn(f"{error} Trying the next older one.", stacklevel=2)
            else:
                return path
        return None

    return on_first_rank(search, group)


def subtree(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors under `name`, without it: `subtree({"model/w": x}, "model") == {"w": x}`."""
    start = f"{name}/"
    return {key[len(start) :]: x for key, x in tensors.items() if key.startswith(start)}


def count_from(numbers: Mapping[str, Any], name: str) -> int:
    """A count among the numbers of a checkpoint; raises a `TypeError` for any other value."""
    value = numbers[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{name} is {str(value)[:40]}, not a count")
    return value


def flatten(state: State) -> dict[str, Tensor]:
    """`{"a": {"b": x}, "c": [y]}` → `{"a/b": x, "c/0": y}`."""
    flat: dict[str, Tensor] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            flat[name] = value.detach()
            return
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            add(f"{name}/{key}" if name else str(key), inner)

    add("", state)
    return flat


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Write a safetensors file and sync it to the disk; without tensors, write none. → its size,
    SHA-256, and the names of tensors that share another's memory; None without a file.
    """
    if not tensors:
        return None
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name, x in tensors.items():
        if x.numel() and x.data_ptr():
            earlier = first.setdefault((x.device, x.data_ptr(), x.shape, x.stride(), x.dtype), name)
            if earlier != name:
                same[name] = earlier
    save_file({name: _own_memory(x) for name, x in tensors.items() if name not in same}, path)
    files.sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path), "same": same}


def check_index(path: Path, *, sums: bool) -> dict[str, Any]:
    """The index of an intact checkpoint. sums: check the checksums too, not only the sizes."""
    damaged = f"checkpoint {path} is damaged:"
    try:
        with files.damage_named(f"{damaged} {INDEX} is not readable"):
            data = files.read_plain(path / INDEX, INDEX_BYTES)
            checksum = files.from_json(data)["sha256"]
            body = data.partition(_BODY)[2][:-1]
            if hashlib.sha256(body).hexdigest() != checksum:
                raise StorageError(f"{damaged} {INDEX} does not have its checksum.")
            index: dict[str, Any] = files.from_json(body)
            if index["format"] != FORMAT:
                raise StorageError(
                    f"checkpoint {path} has format {index['format']}, and this version reads "
                    f"format {FORMAT}; use the version that wrote it."
                )
            for name, file in index["files"].items():
                _check_file(path, name, file, sums)
            if type(index["step"]) is not int or not isinstance(index["numbers"], dict):
                raise StorageError(f"{damaged} {INDEX} needs a step and numbers by name.")
            return index
    except OSError as error:
        reason = f"{error.filename or path}: {error.strerror}"
        raise StorageError(f"checkpoint {path} is incomplete: {reason}.") from None


def _finish(temporary: Path, step: int, contents: Mapping[str, Any]) -> None:
    """Write the index, sync all files to the disk, and rename the folder to publish it."""
    body = files.to_json({"format": FORMAT, "step": step, **contents}, "checkpoint")
    files.write_synced(
        temporary / INDEX,
        b'{"sha256": "%s"%s%s}' % (hashlib.sha256(body).hexdigest().encode(), _BODY, body),
    )
    files.sync(temporary)
    publish(temporary)


def _load(path: Path, templates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    index = check_index(path, sums=False)
    unreadable = (safetensors.SafetensorError, OSError)
    damage = files.damage_named(f"checkpoint {path} is damaged", " Use an older one.", *unreadable)
    with damage, ExitStack() as stack:

        def open_file(name: str, same: Mapping[str, str]) -> Callable[[str], Any]:
            handle = stack.enter_context(safe_open(path / name, framework="pt"))
            return lambda tensor: handle.get_slice(same.get(tensor, tensor))

        opened = {name: open_file(name, file["same"]) for name, file in index["files"].items()}
        entries = index["tensors"]
        for name, entry in entries.items():
            shards.check_pieces(opened, name, entry)
        read = partial(shards.read_like, opened, templates=templates)
        tensors = {name: read(name, entry) for name, entry in entries.items()}
    return tensors, index["numbers"]


def _writing(path: Path, action: Callable[..., T], *arguments: Any) -> T:
    """Call `action(*arguments)`; raise a `StorageError` if it cannot write."""
    try:
        return action(*arguments)
    except (OSError, safetensors.SafetensorError) as error:
        kept = "Older checkpoints are untouched."
        raise files.write_error(f"checkpoint {path}", error, kept) from error


def _check_file(path: Path, name: str, file: Mapping[str, Any], sums: bool) -> None:
    if Path(name).name != name:
        raise StorageError(f"checkpoint {path} names the file {name!r} outside of its folder.")
    files.require_plain(path / name)
    size = (path / name).stat().st_size
    if size != file["bytes"]:
        sizes = f"{name} has {size} bytes, {file['bytes']} were written"
        raise StorageError(f"checkpoint {path} is damaged: {sizes}.")
    if sums and _sha256(path / name) != file["sha256"]:
        raise StorageError(f"checkpoint {path} is damaged: {name} does not have its checksum.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _own_memory(x: Tensor) -> Tensor:
    """`x` on the CPU, contiguous, and the only tensor of its storage, as safetensors needs it."""
    here = x.cpu().contiguous()
    alone = here.untyped_storage().nbytes() == here.numel() * here.element_size()
    return here if alone else here.clone()


def _readable(path: Path) -> bool:
    try:
        check_index(path, sums=False)
    except StorageError:
        return False
    return True


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
    """Make an empty temporary folder for a checkpoint. After a crash, bring back checkpoints that
    were set aside, and delete temporary folders.
    """
    temporary = _hidden(folder, step, "tmp")
    files.make_folder(folder)
    for path in newest_first(folder):
        if path.name.endswith(".old"):
            os.replace(path, published_path(folder, step_of(path)))
    _remove_hidden(folder, "tmp", "old", "gone")
    temporary.mkdir()
    return temporary


def undo(folder: Path, step: int) -> None:
    """Remove all files written since `begin`."""
    shutil.rmtree(_hidden(folder, step, "tmp"), ignore_errors=True)


def publish(temporary: Path) -> None:
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
    files.sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, including any set aside and not yet replaced."""
    by_step: dict[int, Path] = {}
    # ".step…" sorts before "step…", which replaces it here.
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and (match[1], match[3]) in (("", None), (".", "old")):
            by_step[int(match[2])] = path
    return [by_step[step] for step in sorted(by_step, reverse=True)]


def discard_after(folder: Path, step: int) -> None:
    """Set aside the checkpoints after `step`; the next `prune` deletes them."""
    for path in newest_first(folder):
        if step_of(path) > step:
            os.replace(path, _hidden(folder, step_of(path), "discarded", free=True))
            files.sync(folder)


def prune(folder: Path, step: int, keep: int | None) -> None:
    """Delete discarded checkpoints, and all before `step` but the newest `keep` readable ones."""
    kept = 1
    for path in newest_first(folder):
        if keep is None or step_of(path) >= step:
            continue
        if kept < keep and _readable(path):
            kept += 1
            continue
        try:
            # Rename first, so that a crash never leaves half a checkpoint under its name.
            os.replace(path, _hidden(folder, step_of(path), "gone", free=True))
        except OSError as error:  # the new checkpoint is complete, so the run goes on
            warnings.warn(f"could not delete the old checkpoint {path}: {error}", stacklevel=3)
    _remove_hidden(folder, "gone", "discarded")


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
