"""Other projects' losses, loaded for comparison when they are installed or lie unpacked
in a folder (`make peers`).

Only the file that holds the loss is loaded: stand-ins replace its heavy imports, so no framework
needs to be installed. None of their code is part of this project.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch


class MissingPeerError(Exception):
    """A package is neither installed nor in the folder of peers."""


class _StandIn(types.ModuleType):
    """A module in which every name exists and does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(
            name,
            (),
            {
                "__class_getitem__": classmethod(lambda cls, _: cls),
                "__call__": lambda self, x=None, *_: x,
            },
        )


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
    """Import files of `root` without running the `__init__` of `packages`,
    with stand-ins for missing modules.
    """
    missing = tuple(
        n
        for n in stand_ins
        if "." in n or (n not in sys.modules and PathFinder.find_spec(n) is None)
    )
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
    """verl's `compute_policy_loss`, or None if verl is missing."""
    root = _root(peers, "verl")
    if root is None:
        return None
    packages = ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers", "verl.utils")
    stand_ins = (
        "ray",
        "tensordict",
        "transformers",
        "omegaconf",
        "hydra",
        "codetiming",
        "packaging",
    )
    with _alone(root, packages, (*stand_ins, "verl.trainer.config", "verl.workers.config")):
        groupwise = importlib.import_module("verl.utils.groupwise")
        for name in ("as_torch_index", "group_mean_std"):
            setattr(sys.modules["verl.utils"], name, getattr(groupwise, name))
        core = importlib.import_module("verl.trainer.ppo.core_algos")
    # Below its deprecation wrapper, whose warning cannot be compiled.
    loss: Callable[..., Any] = getattr(
        core.compute_policy_loss, "__wrapped__", core.compute_policy_loss
    )
    return loss


# Heads --------------------------------------------------------------------------------------------
# Each function below returns a callable of another project, or raises MissingPeerError or the error
# of its import.


def _found(peers: Path, package: str) -> Path:
    root = _root(peers, package)
    if root is None:
        raise MissingPeerError(f"{package} is neither installed nor under {peers} (`make peers`)")
    return root


def _module(name: str, **contents: Any) -> None:
    """Put a module with just these names where an import finds it."""
    module = types.ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module


def torch_linear_cross_entropy() -> Callable[..., Any]:
    """PyTorch's own head and cross entropy, from torch 2.13 on."""
    function: Callable[..., Any] | None = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise MissingPeerError("this torch has no linear_cross_entropy")
    return function


def verl_linear_cross_entropy(peers: Path) -> Callable[..., Any]:
    """verl's Triton head: (hidden, weight, labels, temperature, reduction) → (logp, entropy)."""
    with _alone(_found(peers, "verl"), ("verl", "verl.utils"), ()):
        _module(
            "verl.utils.device",
            is_cuda_available=torch.cuda.is_available(),
            get_device_capability=torch.cuda.get_device_capability,
            get_device_name=lambda: "cuda",
            get_torch_device=lambda: torch.cuda,
        )
        importlib.import_module("verl.utils.kernel.kernels")
        head: Callable[..., Any] = importlib.import_module(
            "verl.utils.kernel.linear_cross_entropy"
        ).linear_cross_entropy
    return head


def verl_chunked_head(peers: Path) -> Any:
    """verl's `FusedLinearForPPO` class: chunks of rows in plain torch. Load it before Liger: it
    uses Liger if that is imported.
    """
    with _alone(_found(peers, "verl"), ("verl", "verl.utils", "verl.utils.experimental"), ()):
        return importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPO


def openrlhf_log_probs(peers: Path) -> Callable[..., Any]:
    """OpenRLHF's `log_probs_from_logits`."""
    with _alone(
        _found(peers, "openrlhf"), ("openrlhf", "openrlhf.models"), ("deepspeed", "transformers")
    ):
        function: Callable[..., Any] = importlib.import_module(
            "openrlhf.models.utils"
        ).log_probs_from_logits
    return function


def liger_grpo_loss(peers: Path) -> Any:
    """Liger's `LigerFusedLinearGRPOLoss` class."""
    with _alone(_found(peers, "liger_kernel"), ("liger_kernel", "liger_kernel.chunked_loss"), ()):
        return importlib.import_module(
            "liger_kernel.chunked_loss.grpo_loss"
        ).LigerFusedLinearGRPOLoss


def liger_jsd_loss(peers: Path) -> Any:
    """Liger's `LigerFusedLinearJSDLoss` class."""
    with _alone(_found(peers, "liger_kernel"), ("liger_kernel", "liger_kernel.chunked_loss"), ()):
        return importlib.import_module("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDLoss


def cut_cross_entropy(peers: Path) -> Callable[..., Any]:
    """Apple's `linear_cross_entropy`."""
    with _alone(_found(peers, "cut_cross_entropy"), ("cut_cross_entropy",), ()):
        function: Callable[..., Any] = importlib.import_module(
            "cut_cross_entropy.linear_cross_entropy"
        ).linear_cross_entropy
    return function


def trl_chunked_head(peers: Path) -> Any:
    """TRL's `ChunkedLogProbFunction`: tiles of rows × vocabulary,
    recomputed in the backward; Triton kernels on a GPU.
    """
    with _trl(peers):
        module = importlib.import_module("trl.kernels.chunked_logprob")
        # Its backward imports one name from the trainer's helpers: a context that gathers sharded
        # weights, of which there are none.
        _module("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: nullcontext())
        return module.ChunkedLogProbFunction


def trl_chunked_divergence(peers: Path) -> Any:
    """TRL's `ChunkedDivergenceFunction`: both models' logits in tiles, twice."""
    with _trl(peers):
        _module("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: nullcontext())
        module = importlib.import_module("trl.kernels.chunked_divergence")
        return module.ChunkedDivergenceFunction


# The vocabulary chunk that TRL's trainers pass to its chunked head.
TRL_CHUNK = 32768


def trl_pair(peers: Path, kernel: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """TRL's `selective_log_softmax` and `entropy_from_logits`: in plain torch, or with the Triton
    `kernel` they take on a GPU.

    Their file imports half of an ecosystem, so only these functions are read from it.
    """
    names = ("_supports_trl_loss_kernel", "selective_log_softmax", "entropy_from_logits")
    given: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "is_triton_available": lambda: kernel,
    }
    if kernel:
        with _trl(peers):
            given["_fused_logprob_entropy"] = importlib.import_module(
                "trl.kernels.logprob_entropy"
            ).selective_log_softmax_and_entropy
    path = _found(peers, "trl") / "trl/trainer/utils.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names
    ]
    exec(compile(tree, str(path), "exec"), given)
    return given["selective_log_softmax"], given["entropy_from_logits"]


@contextmanager
def _trl(peers: Path) -> Any:
    """Imports from `trl.kernels`, which uses transformers only to test for Triton, and packaging to
    compare versions.
    """
    if PathFinder.find_spec("packaging") is None:
        _module("packaging")
        _module(
            "packaging.version",
            Version=importlib.import_module("torch._vendor.packaging.version").Version,
        )
    with _alone(_found(peers, "trl"), ("trl", "trl.kernels", "trl.trainer"), ()):
        kept = {name: sys.modules.get(name) for name in ("transformers", "transformers.utils")}
        _module("transformers")
        _module(
            "transformers.utils",
            is_triton_available=lambda: importlib.util.find_spec("triton") is not None,
        )
        try:
            yield
        finally:
            for name, module in kept.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module


def openrlhf_policy_loss(peers: Path) -> Any | None:
    """OpenRLHF's `PolicyLoss` class, or None if OpenRLHF is missing."""
    root = _root(peers, "openrlhf")
    if root is None:
        return None
    with _alone(root, ("openrlhf", "openrlhf.models"), ("deepspeed", "transformers")):
        return importlib.import_module("openrlhf.models.loss").PolicyLoss
