"""Puts the drop-ins into `coati`, ColossalChat's package, if it can be imported."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from policyloss.compat.colossalai import distributed, models
from policyloss.compat.patching import swap
from policyloss.errors import SpecError

_OURS: dict[str, tuple[Any, ...]] = {
    "coati.distributed.loss": (distributed.PolicyLoss,),
    "coati.models.loss": (models.PolicyLoss, models.ValueLoss),
}
_installed: list[tuple[Any, Any]] = []


def install() -> list[str]:
    """Replace coati's losses by these in every module of coati that is or will be imported; returns
    what was replaced. A module of coati that cannot be imported is left out. It is an error if none
    can be imported, or if a loss takes other arguments than this library knows. A second call
    changes nothing; `uninstall` undoes it.
    """
    if not _installed:
        _installed.extend(
            [pair for name, classes in _OURS.items() for pair in _pairs(name, classes)]
        )
    if not _installed:
        raise ModuleNotFoundError(
            f"none of {', '.join(_OURS)} can be imported; put ColossalChat's coati on the path."
        )
    swap("coati", _installed)
    return [f"{old.__module__}.{old.__name__}" for old, _ in _installed]


def uninstall() -> None:
    """Restore coati's losses in every module of coati."""
    swap("coati", [(new, old) for old, new in _installed])
    _installed.clear()


def _pairs(module_name: str, classes: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    try:
        module = import_module(module_name)
    except ImportError:
        return []
    pairs = []
    for ours in classes:
        theirs = getattr(module, ours.__name__)
        for method in ("__init__", "forward"):
            _check_arguments(
                f"{module_name}.{ours.__name__}.{method}",
                getattr(theirs, method),
                getattr(ours, method),
            )
        pairs.append((theirs, ours))
    return pairs


def _check_arguments(called: str, theirs: Any, ours: Any) -> None:
    expected = [
        name
        for name, p in inspect.signature(ours).parameters.items()
        if p.kind is not p.KEYWORD_ONLY
    ]
    there = list(inspect.signature(theirs).parameters)
    if there != expected:
        raise SpecError(
            f"{called} takes ({', '.join(there)}) here; known is ({', '.join(expected)}), of "
            "ColossalChat in 0.5.0."
        )
