"""The file `lock` of a run directory names the process that uses it, while that process lives."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from policyloss_lab.runs import files

if sys.platform != "win32":
    import fcntl

_TRIES, _WAIT = 20, 0.05  # a process that only looks at the lock holds it for a moment


class Lock:
    """Holds `folder/lock` until `release`. The system frees the lock when the process ends, also by
    kill -9.

    A lock that names another host is refused, because not every network disk locks across hosts;
    the user must delete the file. Windows and disks that cannot lock have no other protection.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self.owner = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            self._handle = self._take()
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, json.dumps(self.owner).encode())
            os.fsync(self._handle)
        except OSError as error:
            raise files.write_error(self.path, error, "Nothing else was written.") from error
        if hasattr(os, "register_at_fork"):  # else a child that outlives this process keeps it
            os.register_at_fork(after_in_child=self._close)

    def _take(self) -> int:
        for _ in range(_TRIES):
            handle = files.open_plain(self.path, os.O_RDWR | os.O_CREAT)
            owner = _owner(handle)
            if _is_elsewhere(owner):
                os.close(handle)
                raise files.StorageError(
                    f"{self.path.parent} is locked by process {owner.get('pid')} on "
                    f"{owner['host']}, and from {self.owner['host']} one cannot see whether it "
                    f"still runs. If it does not, delete {self.path} and start again; or use "
                    "another directory."
                )
            # Without a name, the file was removed by its last owner.
            if _locks(handle) and os.fstat(handle).st_nlink:
                return handle
            os.close(handle)
            time.sleep(_WAIT)
        raise files.StorageError(
            f"{self.path.parent} is in use by process {owner.get('pid')} on this host. Wait for "
            "it, stop it, or use another directory."
        )

    def release(self) -> None:
        """Release the directory if this process still holds it; a forked child does not."""
        if self._handle >= 0:
            with suppress(OSError):
                if os.fstat(self._handle).st_nlink and _owner(self._handle) == self.owner:
                    self.path.unlink()
            self._close()

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1


@contextmanager
def lock_folder(path: Path) -> Iterator[Lock]:
    """Lock a run directory, created if needed; the lock is released only if the body fails."""
    try:
        files.make_folder(path)
    except (OSError, ValueError) as error:
        raise files.write_error(path, error, "Nothing was written.") from error
    files.refuse_links(path)
    lock = Lock(path)
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


def is_held(folder: Path) -> bool:
    """Whether a process on this host holds the lock of a run, or one on another host may."""
    try:
        handle = files.open_plain(folder / "lock", os.O_RDONLY)
    except (OSError, files.StorageError):
        return False
    try:
        return _is_elsewhere(_owner(handle)) or not _locks(handle, shared=True)
    finally:
        os.close(handle)


def _locks(handle: int, *, shared: bool = False) -> bool:
    """Lock an open file; False if another process has locked it."""
    if sys.platform != "win32":
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # the disk cannot lock
            pass
    return True


def _owner(handle: int) -> dict[str, Any]:
    """The owner in a lock file; {} if a crash left it empty or half-written."""
    try:
        os.lseek(handle, 0, os.SEEK_SET)
        owner = files.from_json(os.read(handle, 4096))
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_elsewhere(owner: dict[str, Any]) -> bool:
    here = socket.gethostname()
    return bool(owner.get("host", here) != here)
