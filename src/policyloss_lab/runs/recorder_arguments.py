"""The arguments of a `Recorder`: plain numbers, texts and lists, or an error that names them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from policyloss.errors import InputError, safe_repr
from policyloss.metrics import Metrics

NUMBER, NONE = (int, float), type(None)
_LARGEST = 2**63


def metric_numbers(metrics: Mapping[str, Any] | Metrics) -> dict[str, float]:
    """Metrics by name; those of a loss under its name."""
    if isinstance(metrics, Metrics):
        metrics = {"policy": metrics}
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"metrics is {safe_repr(metrics)}; give {{name: number}}, or the metrics of a loss."
        )
    out: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or name == "step":
            raise InputError(
                f"metrics has the key {safe_repr(name)}; keys are names, and the step is step=…"
            )
        if isinstance(value, Metrics):
            out |= {f"{name}/{inner}": x for inner, x in value.compute().items()}
            continue
        number = _float(value)
        if number is None:
            raise InputError(
                f"metrics[{name!r}] is a {type(value).__name__} and no number; give a number, a "
                "tensor with one, or leave it out."
            )
        out[name] = number
    return out


def _float(value: Any) -> float | None:
    """A number, or a tensor with one, as a float; None for everything else."""
    try:
        return None if isinstance(value, str) else float(value)
    except Exception:  # somebody else's object may raise anything
        return None


def duration(value: Any) -> float:
    """Seconds."""
    seconds = None if isinstance(value, bool) else _float(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise InputError(f"seconds is {safe_repr(value)}; give a finite number from 0 on.")
    return seconds


def whole_number(value: Any, name: str, end: int = _LARGEST) -> int:
    """A whole number from 0 on and below `end`, or a tensor with one."""
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except Exception:  # somebody else's object may raise anything
        number = -1
    if not 0 <= number < end:
        raise InputError(
            f"{name} is {safe_repr(value)}; give a whole number from 0 on and below {end}."
        )
    return number


def _plain(values: Any) -> Any:
    """A tensor or an array as lists; everything else as it is."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
    return values.tolist() if hasattr(values, "tolist") else values


def listed(values: Any, name: str, *kinds: type) -> list[Any]:
    """Values, or those of a tensor, as a list. kinds: what each must be; without any, all goes."""
    try:
        entries = _plain(values)
        if isinstance(entries, (str, bytes, Mapping)):
            raise TypeError
        plain = [_plain(x) for x in entries]
    except Exception:  # somebody else's object may raise anything
        raise InputError(
            f"{name} is {safe_repr(values)}, of which no list can be made; give a list or a tensor."
        ) from None
    if kinds and not set(map(type, plain)) <= {*kinds} - {int}:
        for i, x in enumerate(plain):
            if not isinstance(x, kinds) or (isinstance(x, int) and abs(x) >= _LARGEST):
                raise InputError(
                    f"{name}[{i}] is {safe_repr(x)}; give {' or '.join(k.__name__ for k in kinds)}."
                )
    return plain


def column(values: Any, name: str, count: int, *kinds: type) -> list[Any] | None:
    """One value per completion."""
    if values is None:
        return None
    entries = listed(values, name, *kinds)
    if len(entries) != count:
        raise InputError(f"{name} has {len(entries)} entries for {count} prompts; give one each.")
    return entries


def rows_of(
    values: Any, name: str, count: int, mask: list[Any] | None, *kinds: type
) -> list[Any] | None:
    """One list per completion, without what `mask` leaves out."""
    rows = column(values, name, count)
    if rows is None:
        return None
    for i, row in enumerate(rows):
        rows[i] = row = listed(row, f"{name}[{i}]", *kinds)
        if mask is not None:
            if len(row) != len(mask[i]):
                raise InputError(
                    f"{name}[{i}] has {len(row)} tokens and mask[{i}] {len(mask[i])}; they must be "
                    "equal."
                )
            rows[i] = [x for x, used in zip(row, mask[i], strict=True) if used]
    return rows


def decoded(decode: Callable[[list[int]], str], ids: list[int]) -> str:
    """The text that `decode` makes of ids."""
    try:
        text: Any = decode(ids)
    except Exception as error:  # the user's own function may raise anything
        raise InputError(f"decode({safe_repr(ids)}) raised {safe_repr(error)}.") from error
    if not isinstance(text, str):
        raise InputError(f"decode({safe_repr(ids)}) is {safe_repr(text)}; it must be a text.")
    return text
