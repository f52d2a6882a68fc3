"""Putting one object in the place of another in a framework that is already imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def swap(package: str, pairs: Sequence[tuple[Any, Any]]) -> list[str]:
    """Wherever an imported module of `package` has a global that is the first of a pair, make it the second.

    A name bound by `from package.module import name` is a global of its own, so patching the module that defines it is not
    enough. What is imported later takes its names from the patched modules. Returns the names that changed, "module.name".
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
