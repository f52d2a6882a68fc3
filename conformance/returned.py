"""How many values each pinned callable returns, seen while a few cases run."""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from torch import Tensor

from conformance.cases import Case, run_side
from conformance.suite import Function

LOOKED_AT = 3  # cases of each function
Seen = dict[str, set[str]]


def observe(functions: Iterable[Function], calls: dict[str, Callable[..., Any]], side: str) -> Seen:
    """The forms in which the named callables return ("2 values", "Tensor") while one side runs some
    cases of the functions.
    """
    codes = {code_of(call): name for name, call in calls.items()}
    if not codes:
        return defaultdict(set)
    with watching(codes) as seen:
        for function in functions:
            for case in some_cases(function):
                run_side(
                    getattr(function, side),
                    function,
                    case.inputs(function),
                    case.options,
                    case.seed,
                )
    return seen


def some_cases(function: Function) -> Iterator[Case]:
    """A few cases, spread over the options."""
    step = max(1, len(function.options) // LOOKED_AT)
    for options in function.options[::step]:
        yield Case(1, (function.kinds or ("ragged",))[0], "float64", options)


@contextmanager
def watching(codes: dict[CodeType, str]) -> Iterator[Seen]:
    """Record the return values of the functions with these code objects, for any caller."""
    seen: Seen = defaultdict(set)

    def note(frame: FrameType, event: str, value: Any) -> None:
        # A function that raises also "returns" None here; nothing pinned returns None on purpose.
        if event == "return" and frame.f_code in codes and value is not None:
            seen[codes[frame.f_code]].add(form(value))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def form(value: Any) -> str:
    """The kind of a returned value, and its number of values."""
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return "Tensor" if isinstance(value, Tensor) else type(value).__name__


def code_of(call: Callable[..., Any]) -> CodeType:
    """The code that runs, under any decorators."""
    inner: Any = inspect.unwrap(call)
    code: CodeType = inner.__code__
    return code
