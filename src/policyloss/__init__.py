"""policyloss: the loss functions of LLM reinforcement learning,
as short compositions of orthogonal parts.

import policyloss as pl
spec = pl.preset("dapo")
out = pl.policy_loss(spec, logp, old_logp, advantages, mask)
out.loss.backward()
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyloss.public import *  # noqa: F403

__version__ = "0.1.0"
# Public functions whose module has the same name.
_FUNCTIONS = ("accumulate", "doctor", "explain", "presets")


class _Package(ModuleType):
    """Imports torch when a public name is first read, so that the command line starts at once."""

    def __getattr__(self, name: str) -> Any:
        if name not in _FUNCTIONS and find_spec(f"policyloss.{name}"):
            return import_module(f"policyloss.{name}")
        if not name.startswith("__") or name == "__all__":
            public = vars(import_module("policyloss.public"))
            vars(self).update({key: public[key] for key in ("__all__", *public["__all__"])})
        if name in vars(self):
            return vars(self)[name]
        raise AttributeError(f"module 'policyloss' has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """The import of a submodule sets it here, where it must not hide the function."""
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return list({*vars(self), *self.__all__})


sys.modules[__name__].__class__ = _Package
