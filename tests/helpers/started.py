"""Work that parallel test workers share, such as a start of processes: the first worker to come
does it, the others wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PATIENCE_S = 300.0


def started_once(
    factory: pytest.TempPathFactory, name: str, work: Callable[[Path], object]
) -> Path:
    """The folder `name` of this test session, after `work(folder)` has been done in it,
    once for all workers.
    """
    base = factory.getbasetemp()
    folder: Path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + PATIENCE_S
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        return folder
    try:
        work(folder)
    finally:
        done.touch()
    return folder
