"""Files that survive a crash: written whole, brought to the disk, then given their name;
and JSON that keeps every float.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policyloss.errors import InputError, PolicyLossError


class StorageError(PolicyLossError):
    """A file of a run that could not be written, or does not hold what was written."""


def write_error(what: object, error: Exception, kept: str) -> StorageError:
    """The error for a failed write: what was to be written, why it failed,
    what to do. kept: what is still there.
    """
    number = error.errno if isinstance(error, OSError) else None
    reason = os.strerror(number) if number else str(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "Free some space"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "Make the directory writable"
    else:
        advice = "Check that the directory is there and its disk is healthy"
    return StorageError(f"could not write {what}: {reason}. {kept} {advice}, then resume.")


def sync(path: Path) -> None:
    """Bring a file, or the list of names in a folder, from the system's memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, and bring their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and bring it to the disk. What is there under its name, a link for one, is
    removed and not written to.
    """
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Give `path` new contents at one moment: a reader, or a crash,
    sees the old ones or the new ones.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(path, error, "The old contents are as they were.") from error


def to_json(value: Any, name: str, *, indent: int | None = None) -> bytes:
    """`value` as JSON that any reader takes and `from_json` turns back exactly;
    tuples come back as lists.

    Floats are written with all their digits. NaN and infinities, which JSON lacks,
    are written as `{"float": "nan"}`.
    name: what `value` is, for the error about something that JSON cannot hold.
    """
    return json.dumps(_plain(value, name), indent=indent, allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """What `to_json` was given."""
    try:
        return json.loads(data, object_hook=_float_or_dict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(
                    f"{name} has the key {key!r}, but JSON takes only strings as keys; use "
                    "str(key)."
                )
        return {key: _plain(inner, f"{name}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"{name} is a {type(value).__name__}, which JSON cannot hold; give a number, a string, a "
        "list or a dict."
    )


def _float_or_dict(value: dict[str, Any]) -> Any:
    return (
        float(value["float"])
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf")
        else value
    )
