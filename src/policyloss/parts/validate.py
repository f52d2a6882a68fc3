"""Checks of the fields of parts; each error names the field, its value and the fix.

A part that extends `Part` is checked when it is made, by the annotations of its fields: the words
of a `Literal`, and the checks of an `Annotated` type, such as `Annotated[float, bounds(above=0)]`.
A field whose annotation ends in `| None` may also be None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from policyloss.arguments import check_number, description, is_number
from policyloss.errors import SpecError, SpecTypeError, unknown_name

if TYPE_CHECKING:
    from typing_extensions import Self  # part of typing since Python 3.11

# A check of a field: it is called with the part and the name of the field.
Check = Callable[[Any, str], None]


class Part:
    """Base of the parts whose fields are checked."""

    _checks: ClassVar[tuple[tuple[str, Check], ...]] = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """Refuse a field that the part does not have, with an error that names its fields."""
        for name in values.keys() - cls.__dataclass_fields__.keys():
            names = [field.name for field in dataclasses.fields(cls)]
            raise SpecTypeError(unknown_name(f"{cls.__name__} field", name, names))
        return super().__new__(cls)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._checks = tuple(_checks_of(cls))

    def __post_init__(self) -> None:
        for field, check in self._checks:
            check(self, field)


def _checks_of(part: type) -> Iterator[tuple[str, Check]]:
    for field, hint in get_type_hints(part, include_extras=True).items():
        kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        checks: list[Check] = []
        for kind in kinds:
            if get_origin(kind) is Literal:
                checks.append(partial(choice, valid=get_args(kind)))
            elif get_origin(kind) is Annotated:
                checks += kind.__metadata__
        for check in checks:
            yield field, partial(_unless_none, check) if type(None) in kinds else check


def _unless_none(check: Check, owner: Any, field: str) -> None:
    if getattr(owner, field) is not None:
        check(owner, field)


def check_field(owner: Any, field: str, **bounds: Any) -> None:
    """Check that `owner.field` is a number within the bounds of `check_number`."""
    check_number(
        f"{type(owner).__name__}.{field}", getattr(owner, field), error=SpecError, **bounds
    )


def bounds(**bounds: Any) -> Check:
    """A check that a field is a number within these bounds (see `check_number`)."""
    return partial(check_field, **bounds)


def not_below(low: str) -> Check:
    """A check that a field is at least the field called `low`, if neither is None."""
    return partial(_not_below, low=low)


def _not_below(owner: Any, field: str, low: str) -> None:
    a, b = getattr(owner, low), getattr(owner, field)
    if is_number(a) and is_number(b) and a > b:
        raise SpecError(f"{type(owner).__name__}: {low}={a!r} is above {field}={b!r}; swap them.")


def choice(owner: Any, field: str, valid: tuple[str, ...]) -> None:
    """Check that `owner.field` is one of `valid`."""
    value = getattr(owner, field)
    if not isinstance(value, str) or value not in valid:
        raise SpecError(unknown_name(f"{type(owner).__name__}.{field}", value, valid))


def log_clamp(owner: Any, field: str) -> None:
    """Check that `owner.field` is None, a number > 0, or a pair (low, high), None for no bound."""
    value = getattr(owner, field)
    pair = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(v is None or (is_number(v) and not math.isnan(v)) for v in value)
        and (value[0] is None or value[1] is None or value[0] < value[1])
    )
    if not pair and value is not None and not (is_number(value) and value > 0):
        raise SpecError(
            f"{type(owner).__name__}.{field} must be None, a number > 0 (meaning ±number) or a "
            f"pair (low, high), got {description(value)}."
        )


Real: TypeAlias = Annotated[float, bounds()]
Finite: TypeAlias = Annotated[float, bounds(finite=True)]
Positive: TypeAlias = Annotated[float, bounds(above=0)]
NotNegative: TypeAlias = Annotated[float, bounds(least=0)]
LowerBound: TypeAlias = Annotated[float, bounds(least=0, finite=True)]
