"""`diff` compares two losses: the part in each slot of their specs, and each of its numbers."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from policyloss import notebook
from policyloss.catalogue import AnyLoss, as_spec, presets_equal_to
from policyloss.explanations.formula import formula
from policyloss.explanations.sources import part_name
from policyloss.explanations.traits import describe_slot
from policyloss.parts.data import has_fields
from policyloss.parts.wording import number
from policyloss.spec import SLOTS, LossSpec


class FieldChange(NamedTuple):
    """A number or choice that differs: its name and its value on each side."""

    field: str
    a: Any
    b: Any


class SlotChange(NamedTuple):
    """A slot that differs: the part on each side, and the meaning of the change.

    fields: the fields that differ, if both sides are parts of one kind.
    """

    slot: str
    a: str
    b: str
    fields: tuple[FieldChange, ...]
    meaning: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The difference of two losses. `str()` gives plain text, `to_dict()` JSON-ready data."""

    a: str
    b: str
    changes: tuple[SlotChange, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether the two are the same spec."""
        return not self.changes

    def to_dict(self) -> dict[str, Any]:
        """The difference as plain data."""
        changes = []
        for c in self.changes:
            fields = [{"field": f.field, "a": plain(f.a), "b": plain(f.b)} for f in c.fields]
            changes.append(c._asdict() | {"fields": fields, "meaning": " ".join(c.meaning)})
        sides = {"a": self.a, "b": self.b, "equal": self.equal}
        return {**sides, "changes": changes, "notes": list(self.notes)}

    def __str__(self) -> str:
        if self.equal:
            return f"{self.a} and {self.b} are the same loss."
        blocks = [f"a: {self.a}\nb: {self.b}", *(_block(c) for c in self.changes)]
        return "\n\n".join([*blocks, *self.notes])

    def _repr_html_(self) -> str:
        """The difference as HTML, for a notebook."""
        if self.equal:
            return notebook.paragraphs(str(self))
        rows = []
        for c in self.changes:
            rows.append((c.slot, c.a, c.b))
            rows += [(f"{c.slot}.{f.field}", str(entry(f.a)), str(entry(f.b))) for f in c.fields]
        meanings = [f"{c.slot}, {text}" for c in self.changes for text in c.meaning]
        table = notebook.table(("", self.a, self.b), rows)
        return table + notebook.html_list(meanings) + notebook.paragraphs(*self.notes)


def diff(a: AnyLoss, b: AnyLoss) -> Difference:
    """The slots in which two losses differ, and the effect of each; print the result.

    a, b: a `LossSpec` or the name of a preset.
    """
    first, second = as_spec(a, "a"), as_spec(b, "b")
    changes = tuple(
        _slot_change(slot, first, second)
        for slot in SLOTS
        if getattr(first, slot) != getattr(second, slot)
    )
    notes = _notes(first, second) if changes else ()
    return Difference(_label(a, first), _label(b, second), changes, notes)


def entry(value: Any, where: str = "") -> Any:
    """The entry of `value` in a table: a number as in formulas; other values unchanged.

    where: the name of the value, such as "aggregate.horizon". A horizon of None is "not set".
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    if value is None and where.rpartition(".")[2] == "horizon":
        return "not set"
    return f"({', '.join(str(entry(v)) for v in value)})" if isinstance(value, tuple) else value


def plain(value: Any) -> Any:
    """A value in JSON's types: tuples as lists, infinities as words."""
    if isinstance(value, tuple):
        return [plain(v) for v in value]
    return number(value) if isinstance(value, float) and math.isinf(value) else value


def _label(loss: AnyLoss, spec: LossSpec) -> str:
    if isinstance(loss, str):
        return loss
    same = presets_equal_to(spec)
    return same[0].name if same else "a LossSpec"


def _slot_change(slot: str, a: LossSpec, b: LossSpec) -> SlotChange:
    mine, theirs = getattr(a, slot), getattr(b, slot)
    pair = (mine, theirs)
    if slot == "correction" and len(mine) == len(theirs) == 1:
        pair = (mine[0], theirs[0])
    fields = tuple(_field_changes(*pair)) if _alike(*pair) else ()
    return SlotChange(slot, part_text(mine), part_text(theirs), fields, _meaning(slot, a, b))


def _alike(a: Any, b: Any) -> bool:
    return has_fields(a) and type(a) is type(b)


def _field_changes(a: Any, b: Any, prefix: str = "") -> Iterator[FieldChange]:
    """The fields that differ in two parts of one kind; "field.field" for a part inside a part."""
    for field in dataclasses.fields(a):
        name, first, second = prefix + field.name, getattr(a, field.name), getattr(b, field.name)
        if _alike(first, second):
            yield from _field_changes(first, second, f"{name}.")
        elif first != second:
            yield FieldChange(
                name, *(part_text(x) if has_fields(x) else x for x in (first, second))
            )


def part_text(value: Any) -> str:
    """A part as code, without the fields that have their defaults."""
    if isinstance(value, tuple):
        return " + ".join(part_text(v) for v in value) or "none"
    if value is None or isinstance(value, (str, int, float)):
        return "none" if value is None else str(entry(value))
    if not has_fields(value):
        return part_name(value)
    fields = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
    texts = {
        f.name: part_text(x) if has_fields(x) or isinstance(x, (int, float)) else repr(x)
        for f, x in fields
        if x != f.default
    }
    return f"{part_name(value)}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _meaning(slot: str, a: LossSpec, b: LossSpec) -> tuple[str, ...]:
    first, second = (describe_slot(spec, slot) for spec in (a, b))
    if slot == "ratio" and not (a.reads_ratio or b.reads_ratio):
        return ("Neither loss reads the ratio, so it makes no difference.",)
    if not first or not second:
        return (f"{'b' if second else 'a'} alone: {first or second}.",) if first or second else ()
    if first == second:
        return (f"In both: {first}.",)
    return f"a: {first}.", f"b: {second}."


def _notes(a: LossSpec, b: LossSpec) -> tuple[str, ...]:
    pairs = [(getattr(a, slot), getattr(b, slot)) for slot in ("trust", "aggregate")]
    both_ways = [*pairs, *((second, first) for first, second in pairs)]
    notes = [part.note_beside(other) for part, other in both_ways if hasattr(part, "note_beside")]
    notes = [note for note in notes if note]
    lines = (formula(a), formula(b))
    if all(f.exact for f in lines) and lines[0].lines == lines[1].lines:
        notes.append("The formulas are the same: the difference has no effect.")
    return tuple(notes)


def _block(change: SlotChange) -> str:
    lines = [f"{change.slot}: {change.a} -> {change.b}"]
    lines += [f"  {f.field}: {entry(f.a, f.field)} -> {entry(f.b, f.field)}" for f in change.fields]
    for text in change.meaning:
        lines += textwrap.wrap(
            text, 100, initial_indent="  ", subsequent_indent="     ", break_on_hyphens=False
        )
    return "\n".join(lines)
