"""Modules of Triton kernels, imported when first needed and only where Triton is installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@cache
def kernels(module: str) -> Any:
    """The module of kernels of this name, or None without Triton."""
    return import_module(module) if find_spec("triton") is not None else None
