"""Replaces verl's functions by the drop-ins: its registries then return ours, under
verl's names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any

from policyloss.compat.patching import installed_version, swap
from policyloss.compat.releases import at_least
from policyloss.compat.verl import advantages, aggregation, losses, rollout_correction
from policyloss.compat.verl.aggregation import OLDEST
from policyloss.errors import SpecError

CORE, ROLLOUT = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
REGISTRIES = ("POLICY_LOSS_REGISTRY", "ADV_ESTIMATOR_REGISTRY")
_replaced: list[tuple[Any, Any]] = []


def install(release: str | None = None) -> tuple[str, ...]:
    """Make an installed verl compute its losses, advantages, averages, KL and rollout correction
    with this library; returns what was replaced. Every module of verl that has bound one of these
    functions gets ours, and the registries return ours, with the meaning of the installed release
    (or of `release`, if the package has no metadata). Functions that the release does not have are
    not added. A second call changes nothing, and `uninstall` undoes it. verl's workers are separate
    processes, so call it in each.
    """
    version = release or installed_version("verl")
    if not at_least(version, OLDEST):
        raise SpecError(
            f"verl {version} is older than {OLDEST}, the oldest whose meanings are kept here."
        )
    if not _replaced:
        for name, our_modules in (
            (CORE, (losses, aggregation, advantages)),
            (ROLLOUT, (rollout_correction,)),
        ):
            try:
                module = import_module(name)
            except ModuleNotFoundError as missing:
                if missing.name != name or name == CORE:
                    raise
                continue  # a release without rollout correction
            _replaced.extend(_pairs(module, our_modules, version))
    _set_registries(_replaced)
    return tuple(swap("verl", _replaced))


def uninstall() -> None:
    """Restore verl's functions."""
    back = [(new, old) for old, new in _replaced]
    _set_registries(back)
    swap("verl", back)
    _replaced.clear()


def _pairs(module: Any, our_modules: tuple[Any, ...], version: str) -> list[tuple[Any, Any]]:
    """The pairs (verl's, ours) of the functions of `module` that our modules have, too."""
    pairs = []
    for name, function in inspect.getmembers(module, callable):
        ours = next((getattr(m, name) for m in our_modules if hasattr(m, name)), None)
        if inspect.isfunction(ours) and ours.__module__.startswith("policyloss.compat.verl"):
            pairs.append((function, _in_the_meaning_of(version, ours)))
    return pairs


def _in_the_meaning_of(version: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if "release" not in inspect.signature(function).parameters:
        return function
    return update_wrapper(partial(function, release=version), function)


def _set_registries(pairs: list[tuple[Any, Any]]) -> None:
    core = import_module(CORE)
    for registry in (getattr(core, name, {}) for name in REGISTRIES):
        for name, function in registry.items():
            registry[name] = next((new for old, new in pairs if old is function), function)
