"""`explorer_page`: the explorer as one HTML file; `policyloss explore` writes and opens it.

Its data are every part with its formula, limits and names, and every preset. Expressions repeat
each other, so each node is stored once: a name is a string (a parameter begins with "$"), a number
a number, and everything else is a list of its operator and the indices of its arguments in the list
of nodes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import webbrowser
from collections.abc import Sequence
from typing import Any

from policyloss.catalogue import PRESETS, as_spec, presets_equal_to
from policyloss.commands import read_options
from policyloss.errors import SpecError
from policyloss.explanations import explain
from policyloss.explanations.algebra.expression import Expression
from policyloss.explanations.formula import VOCABULARY
from policyloss.explanations.framework_names import ELSEWHERE, FrameworkNames
from policyloss.mixture import read_loss
from policyloss.output import check_output, write_output
from policyloss.parts.data import VARIANTS, part_as_data
from policyloss.spec import LossSpec
from policyloss_lab.commands import Explore
from policyloss_lab.explore.fields import Field, fields_of, limits, start, start_number
from policyloss_lab.explore.templates import Template, joints, template
from policyloss_lab.report.markup import asset, document

MOST = 3  # losses side by side
FIRST = Explore.losses
_ASSETS = (
    *("report/page.css", "explore/explorer.css", "report/draw.js", "explore/formula.js"),
    *("explore/spec.js", "explore/controls.js", "explore/curves.js", "explore/tokens.js"),
    *("explore/written.js", "explore/explorer.js"),
)


def explorer_page(losses: Sequence[LossSpec | str] = FIRST) -> str:
    """The page of the explorer. losses: one to three to show first, presets by name or specs."""
    title, body = "Loss explorer · policyloss", asset("explore/explorer.html")
    return document(title, body, page_data(losses), _ASSETS)


def explore_command(arguments: Sequence[str]) -> int:
    """Write the page, and open it in a browser; returns the exit code."""
    options = read_options("explore", Explore, arguments)
    check_output(options.out, "--out")
    losses = map(read_loss, options.losses)
    page = explorer_page([loss if isinstance(loss, str) else as_spec(loss) for loss in losses])
    write_output(options.out, page.encode(), "--out")
    # Without a screen, `webbrowser` would start a text browser.
    screen = any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    shows = options.open and (screen or sys.platform in ("darwin", "win32"))
    opened = shows and webbrowser.open(options.out.resolve().as_uri())
    print(f"{options.out}: {'opened' if opened else 'open it'} in a browser.", flush=True)
    return 0


def page_data(losses: Sequence[LossSpec | str] = FIRST) -> dict[str, Any]:
    """All data of the page, JSON-ready. losses: the losses to show first."""
    if not 1 <= len(losses) <= MOST:
        raise SpecError(f"the explorer shows one to {MOST} losses, got {len(losses)}.")
    shown = [_loss(loss) for loss in losses]  # first, to refuse unknown losses quickly
    nodes = _Nodes()
    slots = {
        slot: {part.__name__: _part(slot, template(part), nodes) for part in parts}
        for slot, parts in VARIANTS.items()
    }
    return {
        "slots": slots,
        "joints": nodes.lines(joints()),
        "nodes": nodes.table,
        "variants": nodes.variants,
        "presets": {name: _preset(name) for name in PRESETS},
        "elsewhere": [_entry_data(entry) for entry in ELSEWHERE],
        "vocabulary": VOCABULARY,
        "default": LossSpec().to_dict(),
        "entropy_coef": {"name": "entropy_coef", "kind": "number", "optional": False}
        | {"integer": False, "default": 0.0, **_of_number(0.0)},
        "unfit_ratios": _unfit_ratios(),
        "losses": shown,
        "most": MOST,
    }


class _Nodes:
    """The nodes and the variants, each once."""

    def __init__(self) -> None:
        self.table: list[Any] = []
        self.variants: list[Any] = []
        self._places: dict[Any, int] = {}

    def place(self, x: Expression) -> int:
        if x not in self._places:
            arguments = [self.place(argument) for argument in x.arguments]
            operator = x.value if x.operator == "call" else x.operator
            self._places[x] = len(self.table)
            self.table.append(x.value if x.is_leaf else [operator, *arguments])
        return self._places[x]

    def lines(self, lines: Any) -> Any:
        """Lines, which may be nested by name, with indices for their nodes."""
        if isinstance(lines, dict):
            return {name: self.lines(each) for name, each in lines.items()}
        return [[label, self.place(x)] for label, x in lines]

    def variant(self, data: dict[str, Any]) -> int:
        if data not in self.variants:
            self.variants.append(data)
        return self.variants.index(data)


def _part(slot: str, of: Template, nodes: _Nodes) -> dict[str, Any]:
    return {
        "about": (of.part.__doc__ or "").split("\n\n")[0].replace("\n    ", " "),
        "fields": [_field(slot, of.part, field) for field in fields_of(of.part)],
        "start": part_as_data(slot, start(of.part)),
        "words_if_infinite": {name: list(words) for name, words in of.words_if_infinite.items()},
        "keys": [[key, list(options)] for key, options in of.keys.items()],
        # The index of a variant encodes its options; the last key varies fastest.
        "variants": [
            nodes.variant(
                {"error": v.error}
                if v.error
                else {"lines": nodes.lines(v.lines), "words": list(v.words)}
            )
            for v in of.variants.values()
        ],
    }


def _field(slot: str, part: type, field: Field) -> dict[str, Any]:
    default = next(f.default for f in dataclasses.fields(part) if f.name == field.name)
    data: dict[str, Any] = {"name": field.name, "kind": field.kind}
    if default is not dataclasses.MISSING and (default is not None or field.kind != "number"):
        data["default"] = list(default) if isinstance(default, tuple) else default
    elif field.optional:
        data["default"] = None
    if field.kind == "choice":
        data["options"] = list(field.options)
    if field.kind == "number":
        data |= {"optional": field.optional, "integer": field.integer}
        data |= _of_number(start_number(part, field), **limits(part, field)._asdict())
    if field.kind == "clamp":
        data |= _of_number(20.0, above=0)
    return data


def _unfit_ratios() -> dict[str, dict[str, str]]:
    """{trust region: {ratio that it refuses: the error}}."""
    errors: dict[str, dict[str, str]] = {}
    for trust in VARIANTS["trust"]:
        for ratio in VARIANTS["ratio"]:
            try:
                LossSpec(ratio=start(ratio), trust=start(trust))
            except SpecError as error:
                errors.setdefault(trust.__name__, {})[ratio.__name__] = str(error)
    return errors


def _of_number(first: float, **limits: Any) -> dict[str, Any]:
    """An initial number, its limits, and useful ends of a slider."""
    high = next((limits[k] for k in ("most", "below") if limits.get(k) is not None), None)
    low = next((limits[k] for k in ("least", "above") if limits.get(k) is not None), None)
    far = max(1.0, 2.0 * abs(first))
    ends = [-far if low is None else low, far if high is None else min(high, max(far, low or 0))]
    return {"start": first, "slider": ends, **{k: v for k, v in limits.items() if v is not None}}


def _preset(name: str) -> dict[str, Any]:
    explanation = explain(name)
    return {
        "title": explanation.title,
        "paper": explanation.paper,
        "note": explanation.note,
        "spec": explanation.spec.to_dict(),
        "formula": str(explanation.formula),
        "elsewhere": [i for i, entry in enumerate(ELSEWHERE) if entry in explanation.elsewhere],
    }


def _entry_data(entry: FrameworkNames) -> dict[str, Any]:
    names = {who: called for whose, called in entry.names.items() for who in whose.split(", ")}
    return {"part": entry.part, "what": entry.what, "needs": entry.needs.split(), "names": names}


def _loss(loss: LossSpec | str) -> dict[str, Any]:
    """A loss as plain data; an error if the page lacks one of its parts."""
    spec = as_spec(loss)
    for slot, parts in VARIANTS.items():
        for part in spec.parts_in(slot):
            if type(part) not in parts:
                raise SpecError(
                    f"the explorer knows only the parts of the library; the {slot!r} slot holds "
                    f"{type(part).__name__}. Use `policyloss explain` for this loss."
                )
    known = presets_equal_to(spec)
    name = loss if isinstance(loss, str) else known[0].name if known else None
    return {"preset": name, "spec": spec.to_dict()}
