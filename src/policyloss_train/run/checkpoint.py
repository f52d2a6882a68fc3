"""Checkpoints: a folder of safetensors and JSON for each step, complete or not there.

    checkpoint.json          step, numbers, where the rows of each tensor are, and each file's
                             size and SHA-256
    rank00000.safetensors    what the first rank wrote; so for each rank that has rows

One process and many write and read the same format: any number of ranks reads what any other wrote.
A checkpoint is written to a hidden folder beside (`checkpoint_folder`), brought to the disk, then
renamed. No file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from policyloss.errors import InputError
from policyloss_lab.runs import files
from policyloss_lab.runs.files import StorageError
from policyloss_train.distributed import on_every_rank, on_first_rank, rank_in
from policyloss_train.run import checkpoint_folder as folders
from policyloss_train.run import shards

INDEX = "checkpoint.json"
INDEX_BYTES = 1 << 30  # it names every piece of every tensor, and completions that wait
FORMAT = 2
_BODY = b', "checkpoint": '  # between the checksum of the rest of the index and the rest

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
    """Write the checkpoint of `step` into `folder`, delete all but the newest `keep`. → its path.

    state: tensors, in mappings and sequences as deep as you like; they come back flat,
        `{"model": {"w": x}}` as `"model/w"`. Those that are the same memory (tied weights) are
        written once.
    numbers: anything JSON holds; those of the first rank are kept.
    keep: how many to keep, this one included; None keeps all. Nothing is deleted before the new one
        is complete, and if it cannot be written (a full disk), everything older is as it was.
    group: the ranks that write it together, each by a call of this; if one fails, all raise. None:
        this process alone. Of a DTensor each rank writes its own rows. A plain tensor is written by
        the lowest rank that has one of its name: give it the same values on all ranks, or on each
        rank a name of its own.
    """
    if step < 0 or (keep is not None and keep < 1):
        raise InputError(
            f"a checkpoint needs step ≥ 0 and keep ≥ 1 (or None to keep all), got step={step}, "
            f"keep={keep}."
        )
    tensors: dict[str, Tensor] = {}

    def plan() -> dict[str, shards.Share]:
        tensors.update(flatten(state))
        return {name: shards.share_of(name, x, group) for name, x in tensors.items()}

    # Of the same plans on every rank: all raise, or none.
    entries = shards.located(on_every_rank(plan, group))
    path, file = folders.published_path(folder, step), shards.file_of(rank_in(group))
    to_write = {
        name: shards.local_part(tensors[name])
        for name, entry in entries.items()
        if any(piece["file"] == file for piece in entry["pieces"])
    }
    with _undone_on_error(folder, step, group):
        temporary = on_first_rank(partial(_explained, path, folders.begin, folder, step), group)
        written = on_every_rank(
            partial(_explained, path, write_tensors, temporary / file, to_write), group
        )
        by_file = {shards.file_of(rank): entry for rank, entry in enumerate(written) if entry}
        contents = {"files": by_file, "tensors": entries, "numbers": numbers}
        on_first_rank(partial(_explained, path, _finish, temporary, step, contents), group)
    on_first_rank(lambda: folders.prune(folder, step, keep, _readable), group)
    return path


def load(
    path: Path, layout: State | None = None, *, group: Any = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, by flat names, and the numbers of a checkpoint that any number of ranks wrote.

    Sizes are checked, not sums: take the path from `latest`, or call `checked_index` before, which
    read every byte.

    layout: DTensors, named as in the state that was saved. What has the shape and name of one of
        them, or its shape and a name under its own (an optimizer's moments are
        `parameter/exp_avg`), is read as this rank's rows and becomes a DTensor laid out like it, on
        its device. Everything else is read whole, on the CPU: without a layout, one process reads
        what many wrote.
    group: ranks that each call this; if one cannot read its part, all raise.
    """
    contents: list[tuple[dict[str, Tensor], dict[str, Any]]] = []  # not to be sent to other ranks
    on_every_rank(lambda: contents.append(_load(path, flatten(layout or {}))), group)
    return contents[0]


def latest(
    folder: Path, check: Callable[[Path], object] | None = None, *, group: Any = None
) -> Path | None:
    """The newest checkpoint in `folder` of which every byte is intact; None if there is none.

    One that is not is reported by a warning, and the next older is tried. check: a further look at
    one, by a function that raises a `StorageError` if it is not good. group: ranks that each call
    this; the first one looks, and all get its answer.
    """

    def look() -> Path | None:
        for path in folders.newest_first(folder):
            try:
                checked_index(path, sums=True)
                if check is not None:
                    check(path)
            except StorageError as error:
                warnings.warn(f"{error} Trying the next older one.", UserWarning, stacklevel=2)
            else:
                return path
        return None

    return on_first_rank(look, group)


def subtree(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors under `name`, without it: `subtree({"model/w": x}, "model") == {"w": x}`."""
    return {
        key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}/")
    }


def count_from(numbers: Mapping[str, Any], name: str) -> int:
    """A count among the numbers of a checkpoint; a `TypeError` if it is none."""
    value = numbers[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{name} is {str(value)[:40]}, not a count")
    return value


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
            raise InputError(
                f"state[{name!r}] is a {type(value).__name__}; tensors go into state, everything "
                "else into numbers."
            )

    add("", state)
    return flat


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Write a safetensors file and bring it to the disk. No tensors, no file: None.

    → its size, its SHA-256, and which tensors are the very memory of another one.
    """
    if not tensors:
        return None
    distinct, same = _distinct(tensors)
    save_file({name: _own_memory(name, x) for name, x in distinct.items()}, path)
    files.sync(path)
    return {"bytes": path.stat().st_size, "sha256": _sha256(path), "same": same}


def checked_index(path: Path, *, sums: bool) -> dict[str, Any]:
    """The index of a checkpoint that is intact. sums: read every byte of it, not sizes alone."""
    try:
        with files.damage_named(f"checkpoint {path} is damaged: {INDEX} is not readable"):
            return _checked_index(path, sums)
    except OSError as error:
        raise StorageError(
            f"checkpoint {path} is incomplete: {error.filename or path}: {error.strerror}."
        ) from None


def _checked_index(path: Path, sums: bool) -> dict[str, Any]:
    data = files.read_plain(path / INDEX, INDEX_BYTES)
    checksum = files.from_json(data)["sha256"]
    body = data.partition(_BODY)[2][:-1]
    if hashlib.sha256(body).hexdigest() != checksum:
        raise StorageError(f"checkpoint {path} is damaged: {INDEX} does not have its checksum.")
    index: dict[str, Any] = files.from_json(body)
    if index["format"] != FORMAT:
        raise StorageError(
            f"checkpoint {path} has format {index['format']}, and this version reads format "
            f"{FORMAT}; use the version that wrote it."
        )
    for name, file in index["files"].items():
        _check_file(path, name, file, sums)
    if type(index["step"]) is not int or not isinstance(index["numbers"], dict):
        raise StorageError(
            f"checkpoint {path} is damaged: {INDEX} needs a step and numbers by name."
        )
    return index


def _finish(temporary: Path, step: int, contents: Mapping[str, Any]) -> None:
    """Write the index, bring all to the disk, and rename the folder: now it is a checkpoint."""
    body = files.to_json({"format": FORMAT, "step": step, **contents}, "checkpoint")
    files.write_synced(
        temporary / INDEX,
        b'{"sha256": "%s"%s%s}' % (hashlib.sha256(body).hexdigest().encode(), _BODY, body),
    )
    files.sync(temporary)
    folders.publish(temporary)


def _load(path: Path, templates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    index = checked_index(path, sums=False)
    unreadable = (safetensors.SafetensorError, OSError)
    damage = files.damage_named(f"checkpoint {path} is damaged", " Use an older one.", *unreadable)
    with damage, ExitStack() as stack:
        opened = {
            name: shards.TensorFile(
                stack.enter_context(safe_open(path / name, framework="pt")), file["same"]
            )
            for name, file in index["files"].items()
        }
        entries = index["tensors"]
        for name, entry in entries.items():
            shards.check_pieces(opened, name, entry)
        tensors = {
            name: shards.read_like(opened, name, entry, shards.nearest_template(templates, name))
            for name, entry in entries.items()
        }
    return tensors, index["numbers"]


@contextmanager
def _undone_on_error(folder: Path, step: int, group: Any) -> Iterator[None]:
    """Around the writing of a checkpoint: if it fails, the first rank removes what was written."""
    try:
        yield
    except BaseException:
        if rank_in(group) == 0:
            folders.undo(folder, step)
        raise


def _explained(path: Path, action: Callable[..., T], *arguments: Any) -> T:
    """`action(*arguments)`; if it cannot write, an error that says what is left."""
    try:
        return action(*arguments)
    except (OSError, safetensors.SafetensorError) as error:
        raise files.write_error(
            f"checkpoint {path}", error, "Older checkpoints are untouched."
        ) from error


def _check_file(path: Path, name: str, file: Mapping[str, Any], sums: bool) -> None:
    if Path(name).name != name:
        raise StorageError(
            f"checkpoint {path} is not one of ours: it names the file {name!r} outside of its "
            "folder."
        )
    files.require_plain(path / name)
    size = (path / name).stat().st_size
    if size != file["bytes"]:
        raise StorageError(
            f"checkpoint {path} is damaged: {name} has {size} bytes, {file['bytes']} were written."
        )
    if sums and _sha256(path / name) != file["sha256"]:
        raise StorageError(f"checkpoint {path} is damaged: {name} does not have its checksum.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _distinct(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors without those that are another one's very memory, and whose memory these are."""
    first: dict[tuple[Any, ...], str] = {}
    same: dict[str, str] = {}
    for name, x in tensors.items():
        if x.numel() and x.data_ptr():
            earlier = first.setdefault((x.device, x.data_ptr(), x.shape, x.stride(), x.dtype), name)
            if earlier != name:
                same[name] = earlier
    return {name: x for name, x in tensors.items() if name not in same}, same


def _own_memory(name: str, x: Tensor) -> Tensor:
    """`x` on the CPU, contiguous, and in memory of its own, as safetensors wants it."""
    if x.is_meta or x.layout != torch.strided:
        raise InputError(
            f"state[{name!r}] has no plain memory ({x.device}, {x.layout}); make it a dense tensor "
            "with values."
        )
    here = x.cpu().contiguous()
    alone = here.untyped_storage().nbytes() == here.numel() * here.element_size()
    return here if alone else here.clone()


def _readable(path: Path) -> bool:
    try:
        checked_index(path, sums=False)
    except StorageError:
        return False
    return True
