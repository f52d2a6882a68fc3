"""How far apart two results are: value by value, in kind as well as in number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@dataclass(frozen=True)
class Difference:
    """One output compared: the worst |ours − theirs| / max(1, |theirs|), both numbers there, and
    any other problem.
    """

    worst: float
    ours: Any
    theirs: Any
    problem: str = ""


def compare(ours: Any, theirs: Any) -> Difference:
    """The difference between two values of one output.

    Tensors must agree in shape and dtype, other values in kind: None is not a number, a float is
    not a tensor. An infinity equals the same infinity; NaN equals nothing, not even NaN. Values
    that cannot be compared are infinitely far apart.
    """
    if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
        return _tensors(ours.detach(), theirs.detach())
    if _is_number(theirs) and _is_number(ours):
        return Difference(_apart(float(ours), float(theirs)), ours, theirs)
    if type(theirs) is not type(ours):
        return Difference(
            math.inf,
            _brief(ours),
            _brief(theirs),
            f"theirs is a {_kind(theirs)}, ours a {_kind(ours)}",
        )
    same = bool(theirs == ours)
    return Difference(0.0 if same else math.inf, ours, theirs, "" if same else "not equal")


def flatten(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Nested results under one name each ("metrics.kl", "returns.0");
    arrays and their scalars as tensors and numbers.
    """
    flat: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, Mapping):
            flat |= flatten({f"{name}.{key}": x for key, x in value.items()})
        elif isinstance(value, (list, tuple)):
            flat |= flatten({f"{name}.{i}": x for i, x in enumerate(value)})
        else:
            flat[name] = _plain(value)
    return flat


def is_finite(value: Any) -> bool:
    """Whether every number of `value` is finite; True for other values."""
    if isinstance(value, Tensor):
        return bool(torch.isfinite(value).all())
    return not isinstance(value, float) or math.isfinite(value)


def _plain(value: Any) -> Any:
    """The value without NumPy: this module must load where NumPy is not installed."""
    if type(value).__module__ == "numpy":
        return value.item() if value.ndim == 0 else torch.as_tensor(value)
    return value


def _tensors(ours: Tensor, theirs: Tensor) -> Difference:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        form = f"theirs is {_kind(theirs)}, ours {_kind(ours)}"
        return Difference(math.inf, _brief(ours), _brief(theirs), form)
    if theirs.numel() == 1:
        mine, other = ours.item(), theirs.item()
        return Difference(_apart(float(mine), float(other)), mine, other)
    if theirs.numel() == 0 or torch.equal(ours, theirs):
        return Difference(0.0, None, None)
    a, b = ours.reshape(-1).double(), theirs.reshape(-1).double()
    # a == b first: the same infinity is no difference.
    apart = torch.where(a == b, 0, (a - b).abs() / b.abs().clamp(min=1))
    apart = torch.where(apart.isnan(), math.inf, apart)
    worst = int(apart.argmax())
    return Difference(float(apart[worst]), float(a[worst]), float(b[worst]))


def _apart(a: float, b: float) -> float:
    if a == b:
        return 0.0
    apart = abs(a - b) / max(1.0, abs(b))
    return math.inf if math.isnan(apart) else apart


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _brief(value: Any) -> Any:
    """A value as a failure shows it."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else f"tensor {_kind(value)}"
    return value if value is None or isinstance(value, (int, float, str)) else repr(value)[:80]
