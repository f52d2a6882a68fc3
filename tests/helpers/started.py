"""Work that parallel test workers share, such as a start of processes: the first worker to come
does it, the others wait.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

PATIENCE_S = 300.0
PRELOADED = ("torch.distributed.fsdp", "policyloss", "cases")


def run_ranks(body: Callable[..., None], *arguments: Any, count: int, imports: str = "") -> None:
    """`body(rank, *arguments)` in `count` processes, until all have ended.

    They are forked from a process that has imported `PRELOADED` and the modules `imports`, because
    importing takes longer than most of their work. A worker has one such process: the first call
    determines its imports.
    """
    multiprocessing.set_forkserver_preload([*PRELOADED, *imports.split()])
    torch.multiprocessing.start_processes(
        body, args=arguments, nprocs=count, start_method="forkserver"
    )


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
