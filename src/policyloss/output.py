"""The output of commands: sections of text, and files. Only regular files are read or written, and
a file is written completely or not at all.
"""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

from policyloss.errors import InputError

# Windows has only the last one. Without O_NONBLOCK, opening a pipe would wait for a writer.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
WIDTH = 100  # of text
_KINDS = {
    stat.S_IFLNK: "symbolic link, which is not followed",
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "named pipe",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def kind_of(mode: int) -> str | None:
    """The kind of a file in words, from its `stat` mode; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "special file")


class NotRegularError(OSError):
    """A path leads to something other than a regular file. kind: its kind, in words."""

    def __init__(self, kind: str) -> None:
        super().__init__(errno.EINVAL, f"it is a {kind}")
        self.kind = kind


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a regular file by `os.open`; any other file is an error, also a link unless `follow`."""
    with suppress(FileNotFoundError):
        _refuse_other_kinds((os.stat if follow else os.lstat)(path).st_mode)
    handle = os.open(path, flags | _FLAGS | (0 if follow else _NO_LINK), 0o644)
    try:
        # Another file may have taken the name meanwhile.
        _refuse_other_kinds(os.fstat(handle).st_mode)
    except NotRegularError:
        os.close(handle)
        raise
    return handle


def _refuse_other_kinds(mode: int) -> None:
    kind = kind_of(mode)
    if kind is not None:
        raise NotRegularError(kind)


def read_regular(path: Path, limit: int, *, follow: bool = False) -> bytes:
    """The bytes of a regular file; an `OSError` for one of more than `limit` bytes."""
    with os.fdopen(open_regular(path, follow=follow), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit / 2**20:g} MiB")
    return data


def check_output(path: Path, argument: str) -> None:
    """Refuse a path of anything but a regular file: replacing a device would destroy it."""
    try:
        kind = kind_of(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error
    if kind is not None:
        raise InputError(f"{argument}={str(path)!r} is a {kind}; give the name of a regular file.")


def temporary_prefix(path: Path) -> str:
    """The beginning of names that this process may use next to `path` until the file is complete.

    Leftovers of killed processes under such names are removed.
    """
    prefix = f".{path.name[:100]}."
    for left in path.parent.glob(f"{glob.escape(prefix)}*tmp"):
        pid = left.name[len(prefix) :].partition(".")[0]
        if pid.isdecimal() and not is_running(int(pid)):
            with suppress(OSError):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    return f"{prefix}{os.getpid()}."


def is_running(pid: int) -> bool:
    """Whether a process of that number exists; always True on Windows, where the check ends it."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def write_output(path: str | Path, data: bytes, argument: str = "out") -> None:
    """Write `data` to `path`, and create its folder if needed.

    The bytes go to a temporary file in the target's folder first, which is then renamed to the
    target: a reader never sees half a file, and a full disk leaves the old file. argument: the name
    of the path in an error.
    """
    path = Path(path)
    check_output(path, argument)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(".tmp", temporary_prefix(path), path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)  # mkstemp makes files that only their owner can read
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise InputError(f"{argument}={str(path)!r} cannot be written: {error}.") from error


def section(title: str, lines: list[str]) -> str:
    """A titled list of lines, wrapped; the text of one that begins with "- " hangs below itself."""
    indent = "  " if title else ""
    body = []
    for line in lines:
        if line.startswith("  "):
            body.append(indent + line)  # laid out already: formulas and tables are not wrapped
        else:
            hanging = indent + ("  " if line.startswith("- ") else "")
            wrapper = textwrap.TextWrapper(
                WIDTH, indent, hanging, break_long_words=False, break_on_hyphens=False
            )
            body += wrapper.wrap(line)
    return "\n".join([title, *body] if title else body)
