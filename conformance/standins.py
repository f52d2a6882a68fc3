"""Stand-ins for packages that a framework imports and a CPU comparison cannot have; installed
packages are not replaced.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

# Modules that may be missing: flash-attn builds with CUDA only; TRL 1.14 imports requests, which no
# package here requires. Other releases get no stand-in for requests: packages that find it there
# expect its own dependencies too.
MODULES: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("openrlhf", None): ("flash_attn",),
    ("trl", "1.14.0"): ("requests", "urllib3"),
}


class StandIn:
    """Anything and nothing: every attribute, call and item of it is another stand-in. As a
    decorator it returns the function.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts any arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Another stand-in, or the decorated function."""
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else StandIn()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __getitem__(self, key: Any) -> Any:
        return StandIn()

    def __mro_entries__(self, bases: tuple[type, ...]) -> tuple[type, ...]:
        return ()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages of these names; it comes last, so only missing packages reach it."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = frozenset(packages)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.packages:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def install(peer: str, release: str) -> None:
    """Install stand-ins for missing imports of this release of a framework, before its import."""
    install_packages(MODULES.get((peer, None), ()) + MODULES.get((peer, release), ()))


def install_packages(packages: Sequence[str]) -> None:
    """Install stand-ins for those of these packages that are missing."""
    sys.meta_path.append(_Finder(packages))
