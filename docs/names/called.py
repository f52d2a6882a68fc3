"""The types of the tables of options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

REQUIRED = object()  # a required argument


class Option(NamedTuple):
    """A setting of a framework: its name in the configuration or on the command line,
    and its default.
    """

    name: str
    default: Any


class Argument(NamedTuple):
    """A parameter of a function or class of this library or of a framework (and then of its
    drop-in), and its default.
    """

    function: str
    parameter: str
    default: Any = REQUIRED


Cell = tuple[Option | Argument | str, ...]  # a string is a remark
FRAMEWORKS = ("verl", "OpenRLHF", "TRL", "ColossalChat")


@dataclass(frozen=True)
class Row:
    """One choice of a user: its description, and its names in this library and in each framework.
    An empty cell: the framework does not have it.
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
