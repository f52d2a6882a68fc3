"""Writes the files that a command was asked for: only regular files, completely or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from policyloss.errors import InputError

_KINDS = {
    stat.S_IFLNK: "symbolic link, which is not followed",
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def kind_of(mode: int) -> str | None:
    """What a file is, by the mode that `stat` gives; None if it is a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "special file")


def check_output(path: Path, argument: str) -> None:
    """Refuse a path of anything but a regular file: replacing a device would destroy it."""
    try:
        kind = kind_of(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    if kind is not None:
        raise InputError(
            f"{argument}={str(path)!r} is a {kind}; give the name of a regular file, new or old."
        )


def write_output(path: str | Path, data: bytes, argument: str = "out") -> None:
    """Write `data` to `path`, and make its folder if there is none. argument: the name of the path
    in an error.

    The bytes go to a temporary file beside the target first, which is then renamed over it: a
    reader never sees half a file, and a full disk leaves the old one.
    """
    path = Path(path)
    check_output(path, argument)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(name, path)
    except OSError as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    finally:
        Path(name).unlink(missing_ok=True)
