"""A dataclass of options: what each may be follows from its annotation, and the help from its
source, whose comments are the titles and whose docstrings are the sentences.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import shutil
import sys
import textwrap
import types
from collections.abc import Mapping
from itertools import pairwise, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from policyloss.errors import InputError

LARGEST = 2**63 - 1  # what a tensor, and most files, hold as a whole number
INDENT = " " * 4
# By type: what is typed on a command line, and what a file must hold.
_WORDS = {
    int: ("NUMBER", "a whole number below 2⁶³"),
    float: ("NUMBER", "a finite number"),
    bool: ("", "true or false"),
    Path: ("PATH", "a path"),
    str: ("TEXT", "a string"),
}


class Within(NamedTuple):
    """The numbers that an option may be, and why: `Annotated[int, Within(least=1)]`."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    why: str = ""

    def __str__(self) -> str:
        words = {"least": "at least", "most": "at most"}
        limits = [(words.get(name, name), x) for name, x in self._asdict().items() if name != "why"]
        return " and ".join(f"{word} {x}" for word, x in limits if math.isfinite(x))

    def __contains__(self, x: object) -> bool:
        return (
            isinstance(x, (int, float))
            and self.least <= x <= self.most
            and self.above < x < self.below
        )


Count = Annotated[int, Within(least=1)]
Whole = Annotated[int, Within(least=0)]
NotNegative = Annotated[float, Within(least=0)]
Positive = Annotated[float, Within(above=0)]


def flag(name: str) -> str:
    """The option of a field as it is typed."""
    return "--" + name.replace("_", "-")


def check_numbers(options: Any) -> None:
    """Raise for a number that the annotation of its field does not allow, and for one that no run
    could use, before a tensor or an optimizer meets it.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name)
        limits = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Within)]
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, int) and abs(x) > LARGEST:
                raise InputError(
                    f"{flag(name)} must be below 2**63, got a number of {x.bit_length()} bits."
                )
            if isinstance(x, float) and not math.isfinite(x):
                raise InputError(f"{flag(name)} must be finite, got {x}.")
            for limit in limits:
                if x is not None and x not in limit:
                    shown = " ".join(map(str, value)) if isinstance(value, tuple) else x
                    raise InputError(f"{flag(name)} must be {limit}, got {shown}{limit.why}.")


def typed(options: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values from a file by name, each as the dataclass `options` declares it: a path from a
    string, a tuple from a list.
    """
    hints = get_type_hints(options)
    return {name: _as(hints[name], value, name) for name, value in values.items()}


def _as(kind: Any, value: Any, name: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _as(_without_none(kind), value, name)
    if origin is tuple:
        ragged = inner[-1] is Ellipsis
        if not isinstance(value, (list, tuple)) or not (ragged or len(value) == len(inner)):
            raise _wrong(name, value, "a list" if ragged else f"a list of {len(inner)} numbers")
        kinds = repeat(inner[0], len(value)) if ragged else inner
        return tuple(_as(one, x, name) for one, x in zip(kinds, value, strict=True))
    if origin is Literal:
        fits, wanted = isinstance(value, str) and value in inner, "one of " + ", ".join(inner)
    else:
        fits, wanted = _fits(kind, value), _WORDS[kind][1]
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


def _without_none(kind: Any) -> Any:
    return next(one for one in get_args(kind) if one is not type(None))


def help_text(options: type, command: str) -> str:
    """All options of a dataclass in groups, each with its values, its default, and a sentence."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [f"usage: {command} [--OPTION VALUE …]", "", inspect.getdoc(options) or ""]
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = get_type_hints(options)
    for title, names in groups(options).items():
        lines += ["", title]
        for name, meaning in names.items():
            no = f", {flag(f'no_{name}')}" if hints[name] is bool else f" {_values(hints[name])}"
            lines.append(f"  {flag(name)}{no}{_default(fields[name].default)}")
            lines += textwrap.wrap(meaning, width, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def groups(options: type) -> dict[str, dict[str, str]]:
    """Title → option → what it means. A title is a comment on a line of its own."""
    source = textwrap.dedent(inspect.getsource(options))
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)).body
    titles = {
        number: line.strip().removeprefix("# ")
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("    # ")
    }
    texts: dict[str, dict[str, str]] = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            title = titles[max(number for number in titles if number < node.lineno)]
            text = ast.literal_eval(after.value) if isinstance(after, ast.Expr) else ""
            texts.setdefault(title, {})[node.target.id] = " ".join(text.split())
    return texts


def _values(kind: Any) -> str:
    """What is typed after an option of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _values(_without_none(kind))
    if origin is Literal:
        return "|".join(inner)
    if origin is tuple:
        one = _values(inner[0])
        return f"{one} …" if inner[-1] is Ellipsis else " ".join([one] * len(inner))
    return _WORDS[kind][0]


def _default(value: Any) -> str:
    if value is None or value == () or isinstance(value, bool):
        return " (on)" if value is True else ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"
