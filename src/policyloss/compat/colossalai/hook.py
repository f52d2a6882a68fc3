"""Puts the drop-ins into `coati`, ColossalChat's package, if it can be imported."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from policyloss.compat.colossalai import distributed, models
from policyloss.compat.hooks import Patch
from policyloss.errors import SpecError

_OURS: dict[str, tuple[Any, ...]] = {
    "coati.distributed.loss": (distributed.PolicyLoss,),
    "coati.models.loss": (models.PolicyLoss, models.ValueLoss),
}
_patch = Patch("coati")


def install() -> list[str]:
    """Replace coati's losses in every module of coati, also in modules imported later; returns the
    classes that were replaced.

    A module of coati that cannot be imported is left out. An error is raised if none can be
    imported, or if a loss takes unknown arguments. A second call changes nothing; `uninstall`
    undoes it.
    """
    if not _patch.pairs:
        _patch.pairs.extend(
            [pair for name, classes in _OURS.items() for pair in _pairs(name, classes)]
        )
    if not _patch.pairs:
        raise ModuleNotFoundError(
            f"none of {', '.join(_OURS)} can be imported; put ColossalChat's coati on the path."
        )
    _patch.apply()
    return [f"{old.__module__}.{old.__name__}" for old, _ in _patch.pairs]


def uninstall() -> None:
    """Restore coati's losses in every module of coati."""
    _patch.undo()


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
            f"{called} takes ({', '.join(there)}), not ({', '.join(expected)}) as in ColossalChat "
            "0.5.0."
        )
