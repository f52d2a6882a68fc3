"""The file `lock` of a run directory names the process that uses it, while that process lives."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from policyloss.output import is_running
from policyloss_lab.runs.files import StorageError, from_json, open_plain, write_error

if sys.platform != "win32":
    import fcntl

LOCK_BYTES = 4096  # no lock file is longer


class Lock:
    """Holds `folder/lock` until `release`: the id of this process, its host, and its start time.

    The lock of a process that has ended on this host, also by kill -9, is taken over. The lock of a
    live process is refused. A lock from another host is also refused, because this host cannot
    check whether its process lives; the user must delete the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        pid, host = os.getpid(), socket.gethostname()
        self.owner: dict[str, Any] = {"pid": pid, "host": host, "began": _began(pid)}
        try:
            with _exclusively(self.path) as handle:
                self._refuse_if_held(_owner(handle))
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(self.owner).encode(), 0)
                os.fsync(handle)
        except OSError as error:
            raise write_error(self.path, error, "Nothing else was written.") from error

    def release(self) -> None:
        """Release the directory if this process still holds it; a forked child does not."""
        if os.getpid() != self.owner["pid"] or not self.path.exists():
            return
        with suppress(OSError, StorageError), _exclusively(self.path) as handle:
            if _owner(handle) == self.owner:
                self.path.unlink()

    def _refuse_if_held(self, owner: dict[str, Any] | None) -> None:
        if owner is None or not _may_live(owner):
            return
        folder, here = self.path.parent, self.owner["host"]
        if owner["host"] != here:
            raise StorageError(
                f"{folder} is locked by process {owner['pid']} on {owner['host']}, and from {here} "
                f"one cannot see whether it still runs. If it does not, delete {self.path} and "
                "start again; or use another directory."
            )
        raise StorageError(
            f"{folder} is in use by process {owner['pid']} on this host. Wait for it, stop it, or "
            "use another directory."
        )


def is_held(folder: Path) -> bool:
    """Whether the lock of a run names a live process, or one on another host. A link or a pipe
    named `lock` is not read, and is no lock.
    """
    try:
        handle = open_plain(folder / "lock", os.O_RDONLY)
    except (OSError, StorageError):
        return False
    try:
        owner = _owner(handle)
    finally:
        os.close(handle)
    return owner is not None and _may_live(owner)


@contextmanager
def _exclusively(path: Path) -> Iterator[int]:
    """The lock file, open for this process alone, so that only one takes over a dead lock."""
    while True:
        handle = open_plain(path, os.O_RDWR | os.O_CREAT)
        try:
            if sys.platform != "win32":
                # Some network disks cannot lock; then only the contents of the file count.
                with suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_EX)
            # If another process removed the file meanwhile, open the new one.
            if _is_at(path, handle):
                yield handle
                return
        finally:
            os.close(handle)


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _owner(handle: int) -> dict[str, Any] | None:
    """The owner in a lock file; None if a crash left it empty or half-written."""
    try:
        owner = from_json(os.read(handle, LOCK_BYTES))
    except ValueError:
        return None
    pid = owner.get("pid") if isinstance(owner, dict) and "host" in owner else None
    # To the system, 0 and negative numbers are groups of processes.
    return owner if type(pid) is int and pid > 0 else None


def _may_live(owner: dict[str, Any]) -> bool:
    """Whether the owner runs or is on another host. A later process may have the same id."""
    if owner["host"] != socket.gethostname():
        return True
    began = _began(owner["pid"])
    same = owner.get("began") is None or began in (None, owner["began"])
    return is_running(owner["pid"]) and began != "" and same


def _began(pid: int) -> str | None:
    """When a process began; None if the system does not report it, "" if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    # Z: killed, and its parent has not read the exit code yet.
    return "" if state in "ZX" else f"{boot} {fields[18]}"
