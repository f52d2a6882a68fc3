"""Where each number of a loss comes from: a preset's source, a library default, or the user."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from policyloss.catalogue import Preset
from policyloss.catalogue.nearest import GUARDS
from policyloss.explanations.formula import callable_name
from policyloss.parts.data import VARIANTS, has_fields, kind
from policyloss.spec import LossSpec

DEFAULT = "library default"


class SourcedValue(NamedTuple):
    """One choice or number: its place ("trust" or "trust.eps_low"), its value, and its source."""

    where: str
    value: Any
    source: str


def sources(spec: LossSpec, base: Preset | None) -> tuple[SourcedValue, ...]:
    """Every choice and number of `spec` with its source, compared with the preset `base` if any."""
    rows: list[SourcedValue] = []
    for slot in VARIANTS:
        if slot == "ratio" and not spec.reads_ratio:
            continue
        mine, theirs = spec.parts_in(slot), base.spec.parts_in(slot) if base else ()
        for i, part in enumerate(mine):
            label = slot if len(mine) == 1 else f"{slot}[{i}]"
            other = next((t for t in theirs if kind(t) is kind(part)), None)
            rows += _of_part(slot, label, part, other, theirs, base)
    if spec.correction and (
        spec.rejected != "keep" or (base is not None and base.spec.rejected != "keep")
    ):
        rows.append(_of_setting(spec, base, "rejected"))
    if spec.entropy_coef:
        rows.append(_of_setting(spec, base, "entropy_coef"))
    return tuple(rows)


def part_name(part: Any) -> str:
    """The class of a part, or the name of a callable."""
    return type(part).__name__ if has_fields(part) else callable_name(part)


def _of_part(
    slot: str, label: str, part: Any, other: Any, theirs: tuple[Any, ...], base: Preset | None
) -> list[SourcedValue]:
    name = part_name(part)
    if not has_fields(part):
        return [SourcedValue(label, name, "your own function")]
    if base is not None and other is not None:
        rows = [SourcedValue(label, name, base.sources.get(slot, DEFAULT))]
        for f in _fields_with_a_row(part, base, slot):
            rows += _field(slot, label, part, other, f, base)
        return rows
    if base is not None:
        had = " and ".join(part_name(t) for t in theirs) or "none"
        rows = [SourcedValue(label, name, f"set by you (preset {base.name} has {had})")]
    else:
        is_default = getattr(LossSpec(), slot, None) == part
        rows = [SourcedValue(label, name, DEFAULT if is_default else "set by you")]
    for f in _fields_with_a_row(part, None, slot):
        value = getattr(part, f.name)
        where = f"{label}.{f.name}"
        if has_fields(value):
            rows += _of_part(f"{slot}.{f.name}", where, value, None, (), None)
        else:
            rows.append(SourcedValue(where, value, DEFAULT if value == f.default else "set by you"))
    return rows


def _field(
    slot: str, label: str, part: Any, other: Any, field: Any, base: Preset
) -> list[SourcedValue]:
    value, theirs = getattr(part, field.name), getattr(other, field.name, field.default)
    where, key = f"{label}.{field.name}", f"{slot}.{field.name}"
    if has_fields(value):
        alike = theirs if type(theirs) is type(value) else None
        return _of_part(key, where, value, alike, (theirs,), base)
    if value != theirs:
        left_open = field.name == "horizon" and theirs is None
        had = "leaves it to your run" if left_open else f"has {theirs!r}"
        return [SourcedValue(where, value, f"set by you (preset {base.name} {had})")]
    of_slot = base.sources.get(slot, DEFAULT)
    if value == field.default and (field.name in GUARDS or isinstance(value, str)):
        of_slot = DEFAULT
    return [SourcedValue(where, value, base.sources.get(key) or of_slot)]


def _fields_with_a_row(part: Any, base: Preset | None, slot: str) -> list[Any]:
    """The fields that get a row: numbers that have an effect, and choices worth a row.

    A choice is worth a row if it is not the default, or if it has a source.
    """

    def worth(field: Any) -> bool:
        value = getattr(part, field.name)
        if field.name in getattr(part, "idle_fields", ()):
            return False
        sourced = base is not None and f"{slot}.{field.name}" in base.sources
        return sourced or value != field.default or isinstance(value, (int, float, tuple))

    return [f for f in dataclasses.fields(part) if worth(f)]


def _of_setting(spec: LossSpec, base: Preset | None, slot: str) -> SourcedValue:
    value = getattr(spec, slot)
    if base is not None and value == getattr(base.spec, slot):
        return SourcedValue(slot, value, base.sources.get(slot, DEFAULT))
    had = "" if base is None else f" (preset {base.name} has {getattr(base.spec, slot)!r})"
    return SourcedValue(slot, value, f"set by you{had}")
