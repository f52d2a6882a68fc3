"""A time limit for somebody's function, which may hang in Python or in a system call.

The function runs in this very thread, with the state, the devices and the signals it expects: in a
thread of its own it could not use signals (math-verify does), and a forked process would lose what
it remembers and could not use a GPU. The system's alarm interrupts it, in Python code as in a call
that waits. What ignores the alarm, native code that never returns to the interpreter, cannot be
taken back: after a longer time the process ends with the stack of where it hangs, and the run
resumes from its last checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
AGAIN_S = (
    1.0  # a function that swallows the interruption is interrupted again after so many seconds
)
HARD = 3.0  # times the limit, and at least `HARD_S` seconds more: then the process ends
HARD_S = 20.0
REARM_S = 1.0  # within `many_calls`, the end of the process may come this much earlier


class _Watch:
    """When the process was last told to end, and whether it stays told between calls."""

    armed, seconds, kept = 0.0, 0.0, False


@contextmanager
def many_calls() -> Iterator[None]:
    """Around many calls of `call_within`: what would end the process is a thread, whose start takes
    longer than most functions, so it stays from one call to the next.
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
    """`function(*arguments)`, or `TimeIsUp` after so many seconds; 0 is no limit."""
    if not seconds:
        return function(*arguments)
    watched = _end_process_after(max(HARD * seconds, seconds + HARD_S))
    try:
        if threading.current_thread() is not threading.main_thread() or not hasattr(
            signal, "setitimer"
        ):
            return function(*arguments)  # only the main thread can be interrupted
        return _interrupted_after(seconds, function, arguments)
    finally:
        if watched and not _Watch.kept:
            faulthandler.cancel_dump_traceback_later()


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
        running = False  # from here on, an alarm that comes late does nothing
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:  # somebody else's alarm goes on
            signal.setitimer(
                signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval
            )
    return result


def _end_process_after(seconds: float) -> bool:
    """Have the process end after so long. → whether there is a place to print the stack to."""
    now = time.monotonic()
    if _Watch.kept and _Watch.seconds == seconds and 0 < now - _Watch.armed < REARM_S:
        return True
    try:
        handle = sys.__stderr__.fileno() if sys.__stderr__ is not None else 2
        os.fstat(handle)
    except (OSError, ValueError):
        return False
    faulthandler.dump_traceback_later(seconds, exit=True, file=handle)
    _Watch.armed, _Watch.seconds = now, seconds
    return True
