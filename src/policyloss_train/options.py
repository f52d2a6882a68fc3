"""Values of options that come from a file, each as its annotation declares it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from policyloss.commands import LARGEST, without_none
from policyloss.errors import InputError

# What a file must hold, by type.
_WORDS = {
    int: "a whole number below 2⁶³",
    float: "a finite number",
    bool: "true or false",
    Path: "a path",
    str: "a string",
}
_hints = cache(get_type_hints)


def typed(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from a file by name, each as the dataclass `options` declares it: a path from a
    string, a tuple from a list.
    """
    hints = _hints(options)
    return {name: _as(hints[name], value, name) for name, value in values.items()}


def _as(kind: Any, value: Any, name: str) -> Any:
    if value is None and without_none(kind) is not kind:
        return None
    kind = without_none(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        ragged = inner[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (ragged or len(value) == len(inner)):
            raise _wrong(name, value, "a list" if ragged else f"a list of {len(inner)} numbers")
        kinds = repeat(inner[0], len(value)) if ragged else inner
        return tuple(_as(one, x, name) for one, x in zip(kinds, value, strict=True))
    if origin is Literal:
        fits, wanted = isinstance(value, str) and value in inner, "one of " + ", ".join(inner)
    else:
        fits, wanted = _fits(kind, value), _WORDS[kind]
    if not fits:
        raise _wrong(name, value, wanted)
    return Path(value) if kind is Path else value


def _fits(kind: type, value: Any) -> bool:
    if kind is int:
        return type(value) is int and abs(value) <= LARGEST
    if kind is float:
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return isinstance(value, (str, Path) if kind is Path else kind) and "\0" not in str(value)


def _wrong(name: str, value: Any, wanted: str) -> InputError:
    shown = (
        f"{type(value).__name__} of {value.bit_length()} bits"
        if isinstance(value, int) and abs(value) > LARGEST
        else repr(value)
    )
    return InputError(f"the option {name!r} is {shown[:80]}; it must be {wanted}.")
