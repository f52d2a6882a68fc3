"""Other projects' losses, loaded for comparison when they are installed or lie unpacked in a folder (`make peers`).

Only the file that holds the loss is loaded: its heavy imports are answered by stand-ins, so no framework needs to be installed.
Nothing of theirs is part of this project.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _StandIn(types.ModuleType):
    """A module in which every name exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls), "__call__": lambda self, x=None, *_: x})


class _Finder(MetaPathFinder, Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname.split(".")[0] not in self.names and fullname not in self.names:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A stand-in has nothing to run."""


@contextmanager
def _alone(root: Path, packages: tuple[str, ...], stand_ins: tuple[str, ...]) -> Any:
    """Import files of `root` without running the `__init__` of `packages`, with stand-ins for missing modules."""
    missing = tuple(n for n in stand_ins if "." in n or (n not in sys.modules and PathFinder.find_spec(n) is None))
    finder = _Finder(missing)
    sys.meta_path.insert(0, finder)
    for name in packages:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = module
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _root(peers: Path, package: str) -> Path | None:
    for init in sorted(peers.glob(f"**/{package}/__init__.py"), key=lambda p: len(p.parts)):
        return init.parent.parent
    spec = PathFinder.find_spec(package)
    return Path(spec.origin).parent.parent if spec and spec.origin else None


def verl_policy_loss(peers: Path) -> Callable[..., Any] | None:
    """verl's `compute_policy_loss`, or None if verl is not here."""
    root = _root(peers, "verl")
    if root is None:
        return None
    packages = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers", "verl.utils")
    stand_ins = ("ray", "tensordict", "transformers", "omegaconf", "hydra", "codetiming", "packaging")
    with _alone(root, packages, (*stand_ins, "verl.trainer.config", "verl.workers.config")):
        groupwise = importlib.import_module("verl.utils.groupwise")
        for name in ("as_torch_index", "group_mean_std"):
            setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
        core = importlib.import_module("verl.trainer.ppo.core_algos")
    # Below its deprecation wrapper, whose warning cannot be compiled.
    loss: Callable[..., Any] = getattr(core.compute_policy_loss, "__wrapped__", core.compute_policy_loss)
    return loss


def openrlhf_policy_loss(peers: Path) -> Any | None:
    """OpenRLHF's `PolicyLoss` class, or None if OpenRLHF is not here."""
    root = _root(peers, "openrlhf")
    if root is None:
        return None
    with _alone(root, ("openrlhf", "openrlhf.models"), ("deepspeed", "transformers")):
        return importlib.import_module("openrlhf.models.loss").PolicyLoss
