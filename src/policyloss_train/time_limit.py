"""A time limit for a function that may hang in Python, in a system call or in native code.

`call_within` runs a function in the calling thread, with the state, devices and signals that it
expects. Another thread could not use signals (math-verify does), and a forked process would lose
state and could not use a GPU. The system's alarm interrupts Python code and waiting system calls.
Native code that never returns to the interpreter ignores the alarm: after a longer time the process
prints its stack and ends, and the run can be resumed from its last checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_S = 1.0  # a function that swallows the interruption is interrupted again after this time
HARD = 3.0  # the process ends after this many limits, and at least `HARD_S` seconds later
HARD_S = 20.0
REARM_S = 1.0  # within `many_calls`, the process may end this much earlier


class _Watch:
    """When the end of the process was last scheduled, and whether that lasts between calls."""

    armed, seconds, kept = 0.0, 0.0, False


@contextmanager
def many_calls() -> Iterator[None]:
    """For many calls of `call_within`: keep the thread that would end the process from one call to
    the next, because starting it takes longer than most functions.
    """
    _Watch.kept = True
    try:
        yield
    finally:
        _Watch.kept = False
        _Watch.armed = 0.0
        faulthandler.cancel_dump_traceback_later()


class TimeIsUp(BaseException):
    """Raised in a function that took too long; `except Exception` does not swallow it."""


def call_within(seconds: float, function: Callable[..., T], *arguments: Any) -> T:
    """Return `function(*arguments)`, or raise `TimeIsUp` after `seconds`; 0 is no limit."""
    if not seconds:
        return function(*arguments)
    _end_process_after(max(HARD * seconds, seconds + HARD_S))
    try:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or not hasattr(signal, "setitimer"):
            return function(*arguments)  # only the main thread can be interrupted
        return _interrupted_after(seconds, function, arguments)
    finally:
        if not _Watch.kept:
            faulthandler.cancel_dump_traceback_later()


def start_thread(function: Callable[[], T]) -> Future[T]:
    """Run `function` in a thread that does not keep the process alive if it never returns."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _interrupted_after(seconds: float, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    running = True

    def interrupt(number: int, frame: Any) -> None:
        if running:
            raise TimeIsUp

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        result = function(*arguments)
        running = False  # a late alarm now does nothing
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # restore an alarm that was set before
            rest = max(left - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)
    return result


def _end_process_after(seconds: float) -> None:
    """Schedule the end of the process, if there is a file to print the stack to."""
    now = time.monotonic()
    if _Watch.kept and _Watch.seconds == seconds and 0 < now - _Watch.armed < REARM_S:
        return
    try:
        handle = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        os.fstat(handle)
    except (OSError, ValueError):
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=handle)
    _Watch.armed, _Watch.seconds = now, seconds
