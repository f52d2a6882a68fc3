"""The file `lock` names the process that uses a run directory; if that has ended, it is no lock."""

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


LOCK_BYTES = 4096  # no lock is longer


class Lock:
    """Holds `folder/lock` until `release`: this process's id, its host, and when it began.

    The lock of a process that has ended on this host, by kill -9 too, is taken over; that of a live
    one is refused. A lock from another host is refused, because from here one cannot see whether
    its process lives; its user deletes the file.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        pid, host = os.getpid(), socket.gethostname()
        self.owner: dict[str, Any] = {"pid": pid, "host": host, "began": _began(pid)}
        try:
            with self._alone() as handle:
                self._refuse_if_held(os.read(handle, LOCK_BYTES))
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(self.owner).encode(), 0)
                os.fsync(handle)
        except OSError as error:
            raise write_error(self.path, error, "Nothing else was written.") from error

    def release(self) -> None:
        """Release the directory, if it is still this process that holds it: a child that was forked
        from it does not.
        """
        if os.getpid() != self.owner["pid"] or not self.path.exists():
            return
        with suppress(OSError, StorageError), self._alone() as handle:
            if _read(os.read(handle, LOCK_BYTES)) == self.owner:
                self.path.unlink()

    @contextmanager
    def _alone(self) -> Iterator[int]:
        """The lock file, opened for this process alone: two must not both take a dead lock."""
        while True:
            handle = open_plain(self.path, os.O_RDWR | os.O_CREAT)
            try:
                if sys.platform != "win32":
                    # Some network disks cannot; then what the file says must do.
                    with suppress(OSError):
                        fcntl.flock(handle, fcntl.LOCK_EX)
                # Else another process removed the file meanwhile: open the new one.
                if _same_file(handle, self.path):
                    yield handle
                    return
            finally:
                os.close(handle)

    def _refuse_if_held(self, data: bytes) -> None:
        holder = _read(data)
        if holder is None:
            return
        pid, host = holder["pid"], holder["host"]
        if host != self.owner["host"]:
            raise StorageError(
                f"{self.path.parent} is locked by process {pid} on {host}, and from "
                f"{self.owner['host']} one cannot see whether it still runs. If it does not, "
                f"delete {self.path} and start again; or use another directory."
            )
        if _runs(pid, holder.get("began")):
            raise StorageError(
                f"{self.path.parent} is in use by process {pid} on this host. Wait for it, stop "
                "it, or use another directory."
            )


def is_held(folder: Path) -> bool:
    """Whether the lock of a run names a process that is alive, or one on another host, which cannot
    be asked. A link or a pipe in the place of the lock is not read, and is no lock.
    """
    try:
        handle = open_plain(folder / "lock", os.O_RDONLY)
    except (OSError, StorageError):
        return False
    try:
        holder = _read(os.read(handle, LOCK_BYTES))
    finally:
        os.close(handle)
    return holder is not None and (
        holder["host"] != socket.gethostname() or _runs(holder["pid"], holder.get("began"))
    )


def _read(data: bytes) -> dict[str, Any] | None:
    """The holder of a lock; None for a file that is empty or half written, as a crash leaves it."""
    try:
        holder = from_json(data)
    except ValueError:
        return None
    if not isinstance(holder, dict) or "host" not in holder:
        return None
    pid = holder.get("pid")
    # 0 and less are groups of processes to the system.
    real = isinstance(pid, int) and not isinstance(pid, bool) and pid > 0
    return holder if real else None


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def _runs(pid: int, began: Any) -> bool:
    """Whether the process that took the lock lives; of the same id, one may have begun later."""
    if not is_running(pid):
        return False
    now = _began(pid)
    return now != _ENDED and (began is None or now in (None, began))


_ENDED = "ended"


def _began(pid: int) -> str | None:
    """When a process began, since the system did; None where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The second field is the program's name, in parentheses, and may hold anything:
    # count from the last parenthesis on.
    state, *fields = stat.rpartition(")")[2].split()
    # Z: killed, and nobody has asked for its exit code yet.
    return _ENDED if state in "ZX" else f"{boot} {fields[18]}"
