"""Whether values that came from a file are of the types that a dataclass of options declares."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from policyloss.errors import InputError

LARGEST = 2**63 - 1  # what a tensor, and most files, hold as a whole number


def typed(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by name, each as the dataclass `options` declares it: a path from a string, a tuple
    from a list.
    """
    hints = get_type_hints(options)
    return {name: _as(hints[name], value, name) for name, value in values.items()}


def _as(kind: Any, value: Any, name: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        (inner,) = (one for one in get_args(kind) if one is not type(None))
        return _as(inner, value, name)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _wrong(name, value, "one of " + ", ".join(get_args(kind)))
        return value
    if origin is tuple:
        kinds = get_args(kind)
        if kinds[-1] is Ellipsis and isinstance(value, (list, tuple)):
            return tuple(_as(kinds[0], x, name) for x in value)
        if not isinstance(value, (list, tuple)) or len(value) != len(kinds):
            raise _wrong(name, value, f"a list of {len(kinds)} numbers")
        return tuple(_as(one, x, name) for one, x in zip(kinds, value, strict=True))
    if kind is Path and isinstance(value, (str, Path)) and "\0" not in str(value):
        return Path(value)
    if (
        kind is float
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and _fits(value)
    ):
        return value
    if kind is int and type(value) is int and abs(value) <= LARGEST:
        return value
    if (kind is bool and isinstance(value, bool)) or (
        kind is str and isinstance(value, str) and "\0" not in value
    ):
        return value
    words = {
        Path: "a path",
        float: "a number",
        int: "a whole number below 2⁶³",
        bool: "true or false",
        str: "a string",
    }
    raise _wrong(name, value, words[kind])


def _fits(value: float) -> bool:
    try:
        float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
    return True


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    shown = (
        f"{type(value).__name__} of {value.bit_length()} bits"
        if isinstance(value, int) and abs(value) > LARGEST
        else repr(value)
    )
    return InputError(f"the option {name!r} is {shown[:80]}; it must be {wanted}.")
