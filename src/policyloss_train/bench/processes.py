"""Run jobs in processes."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

Job = TypeVar("Job")
Done = TypeVar("Done")


def run_in_processes(
    jobs: Iterable[Job], workers: int, work: Callable[[Job], Done]
) -> Iterator[Done]:
    """Results in order of completion. No job waits in a process, so that none starts after Ctrl-C.

    Processes are forked, so they share the imports of this one, which has no threads yet. A single
    worker is this process.
    """
    if workers == 1:
        yield from map(work, jobs)
        return
    waiting = iter(jobs)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        # Python 3.12 warns of threads that a fork would lose; those of a library compute nothing.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
            running: set[Future[Done]] = {
                pool.submit(work, job) for job in islice(waiting, workers)
            }
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                running |= {pool.submit(work, job) for job in islice(waiting, 1)}
                yield future.result()
