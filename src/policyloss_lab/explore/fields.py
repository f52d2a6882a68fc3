"""The legal values of the fields of parts, as data for the controls of the page.

The words of a choice and the limits of a number come from the annotation of the field.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from policyloss.catalogue import PRESETS
from policyloss.errors import PolicyLossError
from policyloss.functional.masking import LogClamp
from policyloss.parts.correction import DivergenceMask, Reject, Stale, TruncateRatio
from policyloss.parts.data import VARIANTS, has_fields

# The initial parts of classes that no preset has and that have no defaults.
_STARTS = (
    *(DivergenceMask("kl", high=0.1), Reject("k1", "token", high=0.1)),
    *(Stale(2, decay=0.9), TruncateRatio(2.0)),
)
# Initial numbers that neither a preset nor a default has; 2 where none is stated.
_OPEN_NUMBERS = {"low": 0.05}


class Field(NamedTuple):
    """A field of a part.

    kind: "choice", "number", "clamp" (None, ±number or a pair) or "part" (a part of the same slot).
    options: the values of a choice. optional: a number that may be None. integer: a number without
    fraction.
    """

    name: str
    kind: str
    options: tuple[Any, ...] = ()
    optional: bool = False
    integer: bool = False


class Limits(NamedTuple):
    """The legal values of a number; None is no limit.

    least, most: inclusive; above, below: exclusive. not_below: the field with the
    lower limit as its value. infinite: whether infinity is legal.
    """

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    not_below: str | None = None
    infinite: bool = True


@cache
def fields_of(part: type) -> tuple[Field, ...]:
    """The fields of a class of parts."""
    hints = get_type_hints(part, include_extras=True)
    return tuple(_field(f.name, hints[f.name]) for f in dataclasses.fields(part))


def _field(name: str, hint: Any) -> Field:
    kinds = set(_leaves(hint))
    choices = [kind for kind in kinds if get_origin(kind) is Literal]
    none = (None,) if type(None) in kinds else ()
    if choices:
        return Field(name, "choice", (*none, *get_args(choices[0])))
    if str in kinds:  # the name of a tensor; on the page, the ratio is the only one
        return Field(name, "choice", (*none, "ratio"))
    if set(_leaves(LogClamp)) <= kinds:
        return Field(name, "clamp")
    if Any in kinds:
        return Field(name, "part")
    return Field(name, "number", (), bool(none), float not in kinds)


def _leaves(hint: Any) -> Iterator[Any]:
    """The types and the checks that an annotation joins."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        for each in get_args(hint):
            yield from _leaves(each)
    else:
        yield hint


def numbers_of(part: type) -> tuple[Field, ...]:
    """The fields that hold a number."""
    return tuple(field for field in fields_of(part) if field.kind == "number")


@cache
def slot_of(part: type) -> str:
    """The slot that a class of parts fills."""
    return next(slot for slot, parts in VARIANTS.items() if part in parts)


@cache
def start(part: type) -> Any:
    """The initial part: from the first preset that has one, else from `_STARTS` or the defaults."""
    known = (*_in_presets(part), *_STARTS)
    return next((each for each in known if type(each) is part), None) or part()


def _in_presets(part: type) -> Iterator[Any]:
    def inside(value: Any) -> Iterator[Any]:
        if type(value) is part:
            yield value
        if has_fields(value):
            for f in dataclasses.fields(value):
                yield from inside(getattr(value, f.name))

    for preset in PRESETS.values():
        for each in preset.spec.parts_in(slot_of(part)):
            yield from inside(each)


@cache
def start_number(part: type, field: Field) -> float:
    """A finite initial number, also for a field that is None or infinite at first."""
    values = [getattr(each, field.name) for each in (*_in_presets(part), start(part))]
    values += [f.default for f in dataclasses.fields(part) if f.name == field.name]
    values += [2 if field.integer else _OPEN_NUMBERS.get(field.name, 2.0)]
    return next(v for v in values if isinstance(v, (int, float)) and math.isfinite(v))


def distinct_numbers(part: type) -> dict[str, float]:
    """For each number field, a number near the initial one that occurs in no formula."""
    return {
        field.name: 1_000_003 + i
        if field.integer
        else start_number(part, field) * (1 + math.pi * 1e-5 * (i + 1)) + math.pi * 1e-7 * (i + 1)
        for i, field in enumerate(numbers_of(part))
    }


def limits(part: type, field: Field) -> Limits:
    """The limits of a number field, from the checks of its annotation."""
    stated: dict[str, Any] = {}
    for each in _leaves(get_type_hints(part, include_extras=True)[field.name]):
        stated |= getattr(each, "keywords", {})
    return Limits(
        stated.get("least", 1 if field.integer else None),  # a count, if nothing is stated
        stated.get("above"),
        stated.get("below"),
        stated.get("most"),
        stated.get("low"),
        infinite=not field.integer
        and not stated.get("finite", False)
        and (field.optional or _takes_infinity(part, field.name)),
    )


def _takes_infinity(part: type, name: str) -> bool:
    try:
        dataclasses.replace(start(part), **{name: math.inf})
    except PolicyLossError:
        return False
    return True
