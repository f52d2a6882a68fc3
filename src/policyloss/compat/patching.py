"""Replaces one object by another in a framework that is already imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any


def installed_version(package: str) -> str:
    """The release of an installed framework; an error says what works without it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise ImportError(
            f"{package} is not installed here, so there is nothing to hook into; the functions of "
            f"policyloss.compat.{package} work without it."
        ) from None


def swap(package: str, pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """In every imported module of `package`, replace each global that is the first of a pair by the
    second. A name bound by `from package.module import name` is a separate global, so patching the
    module that defines it is not enough. Modules that are imported later take their names from the
    patched ones. Returns the names that changed, "module.name".
    """
    changed = []
    for module_name, module in list(sys.modules.items()):
        if module is None or not (module_name == package or module_name.startswith(f"{package}.")):
            continue
        for name, value in list(vars(module).items()):
            for old, new in pairs:
                if value is old:
                    setattr(module, name, new)
                    changed.append(f"{module_name}.{name}")
    return changed
