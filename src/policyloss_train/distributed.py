"""Ranks under torchrun, and a module that is replicated (DDP) or sharded (FSDP2) over them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from policyloss.errors import InputError
from policyloss_lab.runs.files import StorageError

T = TypeVar("T")
Say = Callable[[str], None]  # shows the user a line, on the first rank alone


@dataclass(frozen=True)
class Ranks:
    """The rank of this process. group: the process group, or None for a single process. owns_group:
    whether `start` made the group, so that `stop` ends it.
    """

    rank: int
    world: int
    device: torch.device
    group: Any = None
    owns_group: bool = False

    @classmethod
    def start(cls, device: str, timeout: float = 600.0) -> Ranks:
        """Join the other ranks under torchrun. timeout: seconds that a rank waits for another."""
        kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        _check_device(kind)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls(0, 1, torch.device(kind))
        here = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind)
        if here.type == "cuda":
            torch.cuda.set_device(here)
        owns_group = not dist.is_initialized()
        if owns_group:
            backend = "nccl" if here.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        return cls(dist.get_rank(), world, here, dist.group.WORLD, owns_group)

    def stop(self) -> None:
        """End the process group of a finished run; its threads may abort a process that exits."""
        if self.owns_group:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def statistics(self) -> Any:
        """The group over which advantages compute their statistics."""
        return self.group if self.world > 1 else "local"

    def gather(self, x: Any) -> list[Any]:
        """`x` of every rank, in the order of ranks."""
        if self.world == 1:
            return [x]
        objects: list[Any] = [None] * self.world
        dist.all_gather_object(objects, x, group=self.group)
        return objects

    def sum(self, x: Tensor) -> Tensor:
        """`x` added up over all ranks."""
        if self.world > 1:
            x = x.clone()
            dist.all_reduce(x, group=self.group)
        return x

    def barrier(self) -> None:
        """Wait until all ranks call this method."""
        if self.world > 1:
            dist.barrier(group=self.group)


def _check_device(kind: str) -> None:
    name, _, number = kind.partition(":")
    known = kind in ("cpu", "cuda") or (name == "cuda" and number.isascii() and number.isdecimal())
    if not known:
        raise InputError(f"--device must be cpu, cuda, cuda:NUMBER or auto, got {kind!r}.")
    if name == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if int(number or 0) >= there:
            raise InputError(f"--device {kind}: there are {there} CUDA devices; use cpu or auto.")


def wrap_for_ranks(
    module: nn.Module, ranks: Ranks, parallel: str, layers: list[nn.Module]
) -> nn.Module:
    """`module` for training on several ranks. layers: modules that "fsdp" gathers one at a time."""
    if parallel == "ddp":
        return DistributedDataParallel(module, process_group=ranks.group)
    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DDP's wrapper; FSDP changes a module in place."""
    inner: nn.Module = module.module if isinstance(module, DistributedDataParallel) else module
    return inner


@contextmanager
def synchronise(module: nn.Module, last: bool) -> Iterator[None]:
    """Average gradients over ranks in the last backward of a step only."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    replicated = module if isinstance(module, DistributedDataParallel) else None
    with nullcontext() if replicated is None or last else replicated.no_sync():
        yield


@contextmanager
def gather_parameters(module: nn.Module) -> Iterator[None]:
    """Gather all parameters of a sharded module, so that ranks may run it independently."""
    parts = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def rank_in(group: Any) -> int:
    """The rank of this process in a process group; 0 without a group."""
    return 0 if group is None else dist.get_rank(group)


def on_every_rank(action: Callable[[], T], group: Any) -> list[T]:
    """Return the results of `action()` on all ranks of `group`, each of which must call this
    function. If the action fails on one rank, every rank raises.

    group: None for a single process; an error of `action` is then raised unchanged.
    """
    if group is None:
        return [action()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # gathered to all ranks, and raised below
        error = raised
    reports: list[Any] = [None] * dist.get_world_size(group)
    mine = (result, error and f"{type(error).__name__}: {error}")
    dist.all_gather_object(reports, mine, group=group)
    failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(reports) if reason]
    if failures:
        raise StorageError(" ".join(failures)) from error
    return [one for one, _ in reports]


def on_first_rank(action: Callable[[], T], group: Any) -> T:
    """Run `action()` on the first rank of `group`; every rank returns its result or raises."""
    results: list[Any] = on_every_rank(lambda: action() if rank_in(group) == 0 else None, group)
    first: T = results[0]
    return first
