"""Drop-ins for other frameworks: their names, arguments, return values and numbers, computed by
this library.

There is one package per framework (`verl`, `openrlhf`, `colossalai`, `trl`, `tinker`) or engine
(`skyrl`, `nemo_rl`, `prime_rl`, `slime`, `miles`, `torchtitan`, `areal`), loaded at its first use;
engines that need a few lines only are in `engines`. Only hooks (`register()`, `install()`, a
trainer or loss subclass) need the framework installed. Adapters translate options and do a
framework's bookkeeping; every loss, ratio, KL and average comes from the core.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    *("areal", "colossalai", "miles", "nemo_rl", "openrlhf", "prime_rl", "skyrl", "slime"),
    *("tinker", "torchtitan", "trl", "verl"),
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"policyloss.compat has no {name!r}; there are {', '.join(__all__)}.")
    return import_module(f"policyloss.compat.{name}")
