"""A command and its arguments, which are declared as a dataclass: the annotation of a field is its
type, the docstring its help. A comment on a line of its own is the title of the fields below it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import math
import shutil
import textwrap
import types
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from policyloss.errors import InputError

T = TypeVar("T")
OPTIONS, HELP = "options", ("-h", "--help")
LARGEST = 2**63 - 1  # the largest whole number of a tensor, and of most files
_TYPED = {int: "NUMBER", float: "NUMBER", Path: "PATH", str: "TEXT"}


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
        if not isinstance(x, (int, float)):
            return False
        return self.least <= x <= self.most and self.above < x < self.below


Count = Annotated[int, Within(least=1)]
Whole = Annotated[int, Within(least=0)]
NotNegative = Annotated[float, Within(least=0)]
Positive = Annotated[float, Within(above=0)]


class Positional(NamedTuple):
    """The name in the help of an argument without a flag: `Annotated[Path, Positional("RUN")]`."""

    name: str


class Argument(NamedTuple):
    """An argument of a command. title: its group in the help. place: its name without a flag."""

    name: str
    kind: Any
    default: Any
    meaning: str
    title: str = OPTIONS
    place: str = ""

    @property
    def is_list(self) -> bool:
        """Whether it takes any number of values."""
        return get_origin(self.kind) is tuple and get_args(self.kind)[-1] is Ellipsis

    @property
    def values(self) -> tuple[str, ...]:
        """A name in the help for each value that is typed."""
        if self.place:
            return (self.place,)
        kind = without_none(self.kind)
        inner = get_args(kind) if get_origin(kind) is tuple else (kind,)
        return tuple(
            "|".join(get_args(one)) if get_origin(one) is Literal else _TYPED[one]
            for one in inner
            if one is not Ellipsis
        )

    @property
    def usage(self) -> str:
        """Its place in the usage line."""
        more = f"[{self.place} ...]" if self.is_list else ""
        needed = self.place if self.default is dataclasses.MISSING else ""
        return f"{needed} {more}".strip()

    @property
    def shown_default(self) -> str:
        """The default as a user would type it; empty without a default."""
        value = self.default
        if value is dataclasses.MISSING or value is None or value == () or value is False:
            return ""
        if value is True:
            return "on"
        return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


JSON = Argument("json", bool, False, "Print JSON instead of text.")


class Command(NamedTuple):
    """A subcommand: about, its arguments or their dataclass, and the module of its function."""

    about: str
    options: type | list[Argument]
    module: str

    @property
    def arguments(self) -> list[Argument]:
        """Its arguments."""
        return self.options if isinstance(self.options, list) else arguments_of(self.options)


class Parser(argparse.ArgumentParser):
    """Reads words, and prints the help in the same way for every command."""

    def __init__(self, prog: str, usage: str, about: str) -> None:
        width = min(shutil.get_terminal_size().columns, 100) - 2
        super().__init__(
            prog,
            f"{prog} {usage}",
            about,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, width=width),
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise an `InputError` instead of ending the process."""
        raise InputError(f"{message}. See {self.prog} --help.")


def flag(name: str) -> str:
    """The option of a field, as a user types it."""
    return "--" + name.replace("_", "-")


def without_none(kind: Any) -> Any:
    """The type that `X | None` consists of, or `kind` itself."""
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    return next(one for one in get_args(kind) if one is not type(None))


def arguments_of(options: type) -> list[Argument]:
    """The arguments that a dataclass declares, in the order of its fields."""
    hints, meanings = _annotations(options), _meanings(options)
    arguments = []
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        place = "".join(mark.name for mark in marks if isinstance(mark, Positional))
        title, meaning = meanings[field.name]
        arguments.append(Argument(field.name, kind, field.default, meaning, title, place))
    return arguments


@cache
def _annotations(options: type) -> dict[str, Any]:
    """Each field with its annotation, and the limits in it."""
    return get_type_hints(options, include_extras=True)


@cache
def _meanings(options: type) -> dict[str, tuple[str, str]]:
    """Each field with its title and its docstring, read from the source of the class."""
    meanings = {}
    for kind in reversed(options.__mro__[:-1]):
        source = textwrap.dedent(inspect.getsource(kind))
        lines = enumerate(source.splitlines(), 1)
        titles = {number: line[6:] for number, line in lines if line.startswith("    # ")}
        body: Any = ast.parse(source).body[0]
        for node, after in zip(body.body, body.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign):
                title = [titles[number] for number in titles if number < node.lineno]
                meaning = " ".join(ast.literal_eval(after.value).split())
                meanings[node.target.id] = (title[-1] if title else OPTIONS, meaning)  # type: ignore[union-attr]
    return meanings


def check_numbers(options: Any) -> None:
    """Raise for a number that the annotation of its field does not allow, or no run could use."""
    for name, hint in _annotations(options.__class__).items():
        value = getattr(options, name)
        limits = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Within)]
        for x in value if isinstance(value, tuple) else (value,):
            if isinstance(x, int) and abs(x) > LARGEST:
                raise InputError(f"{flag(name)} must be below 2**63, got {x.bit_length()} bits.")
            if isinstance(x, float) and not math.isfinite(x):
                raise InputError(f"{flag(name)} must be finite, got {x}.")
            for limit in limits:
                if x is not None and x not in limit:
                    shown = " ".join(map(str, value)) if isinstance(value, tuple) else x
                    raise InputError(f"{flag(name)} must be {limit}, got {shown}{limit.why}.")


def parser_of(command: str, about: str, arguments: Sequence[Argument]) -> Parser:
    """The parser of a command line, which prints its help. Its result holds no defaults."""
    usage = [a.usage for a in arguments if a.place]
    line = Parser(f"policyloss {command}", " ".join([*usage, "[options]"]), about)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for argument in arguments:
        title = "arguments" if argument.place else argument.title
        if title not in groups:
            groups[title] = line.add_argument_group(title)
        _add(groups[title], argument)
    last = groups.get(OPTIONS) or line.add_argument_group(OPTIONS)
    last.add_argument(*HELP, action="help", help="Print this help.")
    return line


def _add(group: argparse._ArgumentGroup, a: Argument) -> None:
    default = f" (default: {a.shown_default})" if a.shown_default else ""
    about: dict[str, Any] = {"help": a.meaning.replace("%", "%%") + default}
    kind = without_none(a.kind)
    if kind is bool and a.default:
        group.add_argument(flag(a.name), action=argparse.BooleanOptionalAction, **about)
        return
    if kind is bool:
        group.add_argument(flag(a.name), action="store_true", **about)
        no = flag(f"no_{a.name}")
        group.add_argument(no, dest=a.name, action="store_false", help=argparse.SUPPRESS)
        return
    if get_origin(kind) is tuple:
        many = "*" if a.place and a.default is not dataclasses.MISSING else "+"
        about["nargs"] = many if a.is_list else len(a.values)
        kind = get_args(kind)[0]
    if a.is_list and not a.place:
        about["action"] = "extend"
    if get_origin(kind) is Literal:
        about["choices"] = get_args(kind)
    else:
        about["type"] = kind
    metavar = a.values if len(a.values) > 1 else a.values[0]
    group.add_argument(a.name if a.place else flag(a.name), metavar=metavar, **about)


def read_words(command: str, arguments: Sequence[Argument], words: Sequence[str]) -> dict[str, Any]:
    """The arguments that stand on a command line, by name."""
    values = vars(parser_of(command, "", arguments).parse_args(words))
    return {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}


def read_options(command: str, options: type[T], words: Sequence[str]) -> T:
    """The command line as the dataclass that declares its arguments."""
    values = options(**read_words(command, arguments_of(options), words))
    check_numbers(values)
    return values
