"""The files of a run directory as data: plain files and folders. A link or a pipe among them is
refused, never followed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from policyloss.errors import InputError
from policyloss.train.run.atomic import StorageError

# What a run directory holds under names of its own;
# other files that lie there are nobody's business.
FILES = (
    "config.json",
    "environment.json",
    "track.json",
    "metrics.jsonl",
    "timing.jsonl",
    "rollouts.jsonl",
    "lock",
)
FOLDERS = ("checkpoints", "tensorboard")
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # Windows has neither
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def require_plain(path: Path) -> None:
    """Raise if there is something at `path` that is neither a plain file nor a folder."""
    try:
        kind = stat.S_IFMT(os.lstat(path).st_mode)
    except OSError:
        return  # whoever opens it says what is wrong
    if kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise StorageError(
            f"{path} is {_KINDS.get(kind, 'no plain file')}. A run directory holds plain files and "
            "folders only, because what leads out of it is neither read nor written; remove it, "
            "or put the file itself there."
        )


def open_plain(path: Path, flags: int) -> int:
    """Open a plain file by `os.open`; a link is not followed, and a pipe is not waited for."""
    require_plain(path)
    handle = os.open(path, flags | _NO_LINK | _NO_WAIT, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise StorageError(f"{path} is no plain file; remove it.")
    return handle


def read_plain(path: Path) -> bytes:
    """The bytes of a plain file."""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        return file.read()


def refuse_links(run: Path) -> None:
    """Raise if a file of the run directory `run` is a link, a pipe or a device, or if `run` has a
    name that is no text.

    `run` itself may be a link: the user named it.
    """
    try:
        str(run).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{str(run)!r} is no text in UTF-8, and safetensors opens no such file; use another "
            "name."
        ) from None
    for name in FILES:
        require_plain(run / name)
        require_plain(run / f".{name}.tmp")
    for name in FOLDERS:
        require_plain(run / name)
        for folder, inner, files in os.walk(run / name):
            for entry in (*inner, *files):
                require_plain(Path(folder) / entry)
