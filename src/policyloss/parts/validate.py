"""Checks of the fields of parts; each error names the field, its value and the fix."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from policyloss.arguments import check_number, is_number, seen
from policyloss.errors import SpecError, unknown_name


def number(
    owner: Any,
    field: str,
    *,
    above: float | None = None,
    least: float | None = None,
    optional: bool = False,
    finite: bool = False,
    hint: str = "",
) -> None:
    """Check that `owner.field` is a number > `above` or ≥ `least`."""
    value = getattr(owner, field)
    if value is None and optional:
        return
    name = f"{type(owner).__name__}.{field}"
    check_number(name, value, above=above, least=least, finite=finite, error=SpecError, hint=hint)


def choice(owner: Any, field: str, valid: Iterable[str]) -> None:
    """Check that `owner.field` is one of `valid`."""
    value = getattr(owner, field)
    names = list(valid)
    if not isinstance(value, str) or value not in names:
        raise SpecError(unknown_name(f"{type(owner).__name__}.{field}", value, names))


def interval(owner: Any, low: str, high: str) -> None:
    """Check that `owner.low <= owner.high`, if neither is None."""
    a, b = getattr(owner, low), getattr(owner, high)
    if is_number(a) and is_number(b) and a > b:
        raise SpecError(f"{type(owner).__name__}: {low}={a!r} is above {high}={b!r}; swap them.")


def log_clamp(owner: Any, field: str = "log_clamp") -> None:
    """Check a clamp: None, a number > 0, or a pair (low, high) with None for no bound."""
    value = getattr(owner, field)
    pair = (
        isinstance(value, tuple)
        and len(value) == 2
        and all(v is None or (is_number(v) and not math.isnan(v)) for v in value)
        and (value[0] is None or value[1] is None or value[0] < value[1])
    )
    if pair:
        return
    if value is not None and not (is_number(value) and value > 0):
        raise SpecError(
            f"{type(owner).__name__}.{field} must be None, a number > 0 (meaning ±number) or a "
            f"pair (low, high), got {seen(value)}."
        )
