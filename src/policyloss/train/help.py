"""`policyloss train --help`, written from the source of the options: their comments are its titles,
their docstrings its sentences.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
import types
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

INDENT = " " * 4


def help_text(options: type, command: str) -> str:
    """All options of a dataclass in groups, each with its values, its default, and a sentence."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [f"usage: {command} [--OPTION VALUE …]", "", inspect.getdoc(options) or ""]
    fields = {field.name: field for field in dataclasses.fields(options)}
    hints = get_type_hints(options)
    for title, names in groups(options).items():
        lines += ["", title]
        for name, meaning in names.items():
            lines.append(f"  {_flag(name, hints[name])}{_default(fields[name].default)}")
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


def _flag(name: str, kind: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return f"{flag}, --no-{name.replace('_', '-')}"
    return f"{flag} {_values(kind)}"


def _values(kind: Any) -> str:
    """What is typed after an option of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _values(next(one for one in inner if one is not type(None)))
    if origin is Literal:
        return "|".join(inner)
    if origin is tuple:
        one = _values(inner[0])
        return f"{one} …" if inner[-1] is Ellipsis else " ".join([one] * len(inner))
    return {int: "NUMBER", float: "NUMBER", Path: "PATH", str: "TEXT"}[kind]


def _default(value: Any) -> str:
    if value is None or value == () or isinstance(value, bool):
        return " (on)" if value is True else ""
    return f" ({' '.join(map(str, value)) if isinstance(value, tuple) else value})"
