"""What the tables of options are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

REQUIRED = object()  # an argument that must be given


class Option(NamedTuple):
    """A setting of a framework: its name in the configuration or on the command line,
    and its default.
    """

    name: str
    default: Any


class Argument(NamedTuple):
    """A parameter of a function or class, of this library or of a framework (then its drop-in has
    it too), and its default.
    """

    function: str
    parameter: str
    default: Any = REQUIRED


Cell = tuple[Option | Argument | str, ...]  # a string is a remark
FRAMEWORKS = ("verl", "OpenRLHF", "TRL", "ColossalChat")


@dataclass(frozen=True)
class Row:
    """One thing a user may choose: what it is, and how this library and each framework call it.
    An empty cell: not there.
    """

    what: str
    policyloss: Cell
    verl: Cell = ()
    openrlhf: Cell = ()
    trl: Cell = ()
    colossalchat: Cell = ()

    def cell(self, framework: str) -> Cell:
        """The cell of "policyloss" or of one of `FRAMEWORKS`."""
        found: Cell = getattr(self, framework.lower())
        return found


def trl(*names: str, **defaults: Any) -> Cell:
    """Options of a GRPOConfig, and remarks."""
    return tuple(Option(name, default) for name, default in defaults.items()) + names
