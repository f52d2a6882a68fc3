"""ColossalChat's losses (the package `coati` of ColossalAI 0.5.0): `PolicyLoss` of
`coati.distributed.loss`, and in `models` the two older losses of `coati.models.loss`.

`install()` replaces them in the `coati` that can be imported. ColossalChat's consumers are Ray
actors, so it must run there: `ray.init(runtime_env={"worker_process_setup_hook":
"policyloss.compat.colossalai.install"})`.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from policyloss.compat.colossalai import models
from policyloss.compat.colossalai.distributed import PolicyLoss
from policyloss.compat.hooks import Patch
from policyloss.errors import SpecError

__all__ = ["PolicyLoss", "install", "models", "uninstall"]

_OURS: dict[str, tuple[Any, ...]] = {
    "coati.distributed.loss": (PolicyLoss,),
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
        _patch.pairs.extend([pair for name in _OURS for pair in _pairs(name)])
    if not _patch.pairs:
        raise ModuleNotFoundError(
            f"none of {', '.join(_OURS)} can be imported; put ColossalChat's coati on the path."
        )
    _patch.apply()
    return [f"{old.__module__}.{old.__name__}" for old, _ in _patch.pairs]


def uninstall() -> None:
    """Restore coati's losses."""
    _patch.undo()


def _pairs(module_name: str) -> list[tuple[Any, Any]]:
    try:
        module = import_module(module_name)
    except ImportError:
        return []
    pairs = [(getattr(module, ours.__name__), ours) for ours in _OURS[module_name]]
    for theirs, ours in pairs:
        for method in ("__init__", "forward"):
            expected = [
                name
                for name, p in inspect.signature(getattr(ours, method)).parameters.items()
                if p.kind is not p.KEYWORD_ONLY
            ]
            there = list(inspect.signature(getattr(theirs, method)).parameters)
            if there != expected:
                raise SpecError(
                    f"{module_name}.{ours.__name__}.{method} takes ({', '.join(there)}), not "
                    f"({', '.join(expected)}) as in ColossalChat 0.5.0."
                )
    return pairs
