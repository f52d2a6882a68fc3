"""The parts that may fill each slot, and parts as plain data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from policyloss.errors import SpecError, safe_repr, unknown_name
from policyloss.parts import aggregate, correction, kl, ratio, trust

VARIANTS: dict[str, tuple[type, ...]] = {
    "ratio": ratio.VARIANTS,
    "trust": trust.VARIANTS,
    "correction": correction.VARIANTS,
    "kl": kl.VARIANTS,
    "aggregate": aggregate.VARIANTS,
}
DEEPEST = 32  # levels of a loss as data; parts of parts take a few
_FRAMEWORK_PARTS: dict[str, dict[str, type]] = {slot: {} for slot in VARIANTS}
P = TypeVar("P")
FieldPath: TypeAlias = tuple[str | int, ...]


def has_fields(part: Any) -> bool:
    """Whether `part` is a dataclass, like every part of the library, not a plain callable."""
    return dataclasses.is_dataclass(part) and not isinstance(part, type)


def is_part(slot: str, part: Any) -> bool:
    """Whether `part` is one of the library's parts for `slot`, not a user's callable."""
    return isinstance(part, VARIANTS[slot])


def field_paths(owner: Any, path: FieldPath = ()) -> Iterator[FieldPath]:
    """The paths of the numbers and choices in a loss: `("trust", "eps_low")`,
    `("correction", 0, "high")`.
    """
    if isinstance(owner, tuple):
        for i, part in enumerate(owner):
            yield from field_paths(part, (*path, i))
        return
    for f in dataclasses.fields(owner):
        value = getattr(owner, f.name)
        if _holds_fields(value):
            yield from field_paths(value, (*path, f.name))
        else:
            yield (*path, f.name)


def _holds_fields(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_holds_fields, value))
    return has_fields(value)


def with_value(owner: Any, path: FieldPath, value: Any) -> Any:
    """`owner` with the entry at `path` replaced; the parts on the way are checked again."""
    first, rest = path[0], path[1:]
    if isinstance(owner, tuple):
        return tuple(with_value(x, rest, value) if i == first else x for i, x in enumerate(owner))
    inner = with_value(getattr(owner, str(first)), rest, value) if rest else value
    return dataclasses.replace(owner, **{str(first): inner})


def check_part(slot: str, part: Any) -> None:
    """Raise unless `part` may fill `slot`: one of its variants, or a callable."""
    if isinstance(part, type):
        raise SpecError(f"{slot}={part.__name__} is a class; make one: {part.__name__}(…).")
    if isinstance(part, VARIANTS[slot]):
        return
    if hasattr(part, "statistics") and not hasattr(part, "statistics_names"):
        raise SpecError(
            f"{slot}={part!r} has statistics; name them in statistics_names, so that a missing "
            "measurement is noticed."
        )
    for other, variants in VARIANTS.items():
        if isinstance(part, variants):
            raise SpecError(
                f"{type(part).__name__} belongs in the {other!r} slot, not in {slot!r}: "
                f"pl.LossSpec({other}={type(part).__name__}(…))."
            )
    if not callable(part):
        names = ", ".join(v.__name__ for v in VARIANTS[slot])
        raise SpecError(
            f"{slot}={safe_repr(part)} is not a part; use one of {names}, or a callable of Tokens."
        )


def framework_part(slot: str, framework: str) -> Callable[[type[P]], type[P]]:
    """A decorator for a framework's part: specs that hold one can be written as data.

    The class extends a part of this slot. In data its type is "framework.ClassName", which can be
    read back wherever `policyloss.compat` has loaded that framework.
    """

    def known(part: type[P]) -> type[P]:
        _FRAMEWORK_PARTS[slot][f"{framework}.{part.__name__}"] = part
        return part

    return known


def known_parts(slot: str) -> dict[str, type]:
    """The classes that may be written as data in `slot`, by their names in the data."""
    return {**{part.__name__: part for part in VARIANTS[slot]}, **_FRAMEWORK_PARTS[slot]}


def kind(part: Any) -> type:
    """The library's class of a part; for a framework's part, the class that it extends."""
    ours = {variant for variants in VARIANTS.values() for variant in variants}
    return next((each for each in type(part).__mro__ if each in ours), type(part))


def part_as_data(slot: str, part: Any) -> dict[str, Any]:
    """A part as plain data: its type's name and its fields."""
    name = next((name for name, known in known_parts(slot).items() if known is type(part)), None)
    if name is None:
        raise SpecError(
            f"the {slot!r} slot holds a callable ({part!r}), which cannot be written as data."
        )
    values = {f.name: _encode_value(slot, getattr(part, f.name)) for f in dataclasses.fields(part)}
    return {"type": name, **values}


def _encode_value(slot: str, value: Any) -> Any:
    if is_part(slot, value):  # a part may be made of parts of the same slot
        return part_as_data(slot, value)
    if isinstance(value, tuple):
        return [_encode_value(slot, v) for v in value]
    if isinstance(value, float) and math.isinf(value):
        return "inf" if value > 0 else "-inf"  # JSON has no infinity
    return value


def check_depth(data: Any) -> None:
    """Raise if plain data has more levels than a loss can have."""
    level = [data]
    for _ in range(DEEPEST):
        holders = [x for x in level if isinstance(x, (Mapping, list, tuple))]
        level = [y for x in holders for y in (x.values() if isinstance(x, Mapping) else x)]
    if level:
        raise SpecError(f"data is nested too deeply to be a loss: more than {DEEPEST} levels.")


def part_from_data(slot: str, data: Any) -> Any:
    """The inverse of `part_as_data`; an error names the valid types and fields."""
    variants: dict[str, Any] = known_parts(slot)
    if not isinstance(data, Mapping) or "type" not in data:
        raise SpecError(
            f'the {slot!r} slot must be a mapping with a "type", got {data!r}. Types: '
            f"{', '.join(variants)}."
        )
    name = data["type"]
    if not isinstance(name, str) or name not in variants:
        framework, dot, _ = str(name).partition(".")
        if dot:
            raise SpecError(
                f"{slot} type {name!r} is named like a framework's own part; those are known once "
                f"their drop-ins are loaded: import policyloss.compat.{framework} before reading "
                "the spec."
            )
        raise SpecError(unknown_name(f"{slot} type", name, variants))
    make = variants[name]
    valid = [f.name for f in dataclasses.fields(make)]
    for key in data:
        if key != "type" and key not in valid:
            none = f"{name} has no fields, got {key!r}."
            raise SpecError(unknown_name(f"{name} field", key, valid) if valid else none)
    values = {k: _decode_value(slot, v) for k, v in data.items() if k != "type"}
    return make_part(make, values)


def make_part(make: Any, values: Mapping[str, Any]) -> Any:
    """The part of the class `make` with these fields; an error names the missing ones."""
    needed = [f.name for f in dataclasses.fields(make) if f.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise SpecError(f"{make.__name__} needs {', '.join(missing)}.")
    return make(**values)


def _decode_value(slot: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return part_from_data(slot, value)
    if isinstance(value, list):
        return tuple(_decode_value(slot, v) for v in value)
    return float(value) if value in ("inf", "-inf") else value
