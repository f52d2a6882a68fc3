"""Puts the drop-ins into an installed OpenRLHF."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from policyloss.compat.hooks import installed_version, swap
from policyloss.compat.openrlhf import losses
from policyloss.compat.openrlhf.words import check_release
from policyloss.compat.releases import at_least
from policyloss.errors import SpecError

_installed: list[tuple[Any, Any]] = []


def install(release: str | None = None) -> str:
    """Replace PolicyLoss, ValueLoss, aggregate_loss and compute_approx_kl in every module of
    OpenRLHF that is or will be imported; returns the release whose numbers they give. release:
    OpenRLHF's version, if the package has no metadata. A second call changes nothing; `uninstall`
    undoes it.
    """
    version = release or installed_version("openrlhf")
    check_release(version)
    if at_least(version, "0.9.1") and not at_least(version, "0.9.3"):
        raise SpecError(
            f"OpenRLHF {version} passes use_icepop, which only 0.9.1 and 0.9.2 have; use 0.9.3 or "
            "a later release."
        )
    if not _installed:
        loss, utils = import_module("openrlhf.models.loss"), import_module("openrlhf.models.utils")
        classes = (_serving(cls, version) for cls in (losses.PolicyLoss, losses.ValueLoss))
        of_loss = (*classes, losses.aggregate_loss)
        ours = [*((loss, new) for new in of_loss), (utils, losses.compute_approx_kl)]
        # aggregate_loss is there from 0.10.3 on.
        _installed.extend(
            (getattr(m, new.__name__), new) for m, new in ours if hasattr(m, new.__name__)
        )
    swap("openrlhf", _installed)
    return version


def uninstall() -> None:
    """Restore OpenRLHF's classes and functions in every module of OpenRLHF."""
    swap("openrlhf", [(new, old) for old, new in _installed])
    _installed.clear()


def _serving(cls: Any, release: str) -> Any:
    """The class as OpenRLHF `release` has it."""
    return type(
        cls.__name__,
        (cls,),
        {"default_release": release, "__doc__": cls.__doc__, "__module__": cls.__module__},
    )
