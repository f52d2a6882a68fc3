"""Imports the public names of a package when one is first read, so that a help needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def read_public(package: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package with a module `public`. package: its `globals()`."""
    name_of_package = package["__name__"]

    def get(name: str) -> Any:
        if not name.startswith("__") and find_spec(f"{name_of_package}.{name}"):
            return import_module(f"{name_of_package}.{name}")  # `public` may be loading it
        if not name.startswith("__") or name == "__all__":
            public = import_module(f"{name_of_package}.public")
            values = {key: value for key, value in vars(public).items() if key[0] != "_"}
            package.update(values, __all__=sorted(values))
            if name in package:
                return package[name]
        raise AttributeError(f"module {name_of_package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return list({*package, *get("__all__")})

    return get, names
