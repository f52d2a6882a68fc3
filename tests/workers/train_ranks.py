"""What four ranks do with sharded checkpoints, for `test_train_checkpoint`:
save on some, load on others, fail on one.
"""

from __future__ import annotations

import errno
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from policyloss_train.optimizers import load_optimizer_state, optimizer_state
from policyloss_train.run import checkpoint
from policyloss_train.run.checkpoint import latest, load, save, subtree

STEPS, MORE = 3, 2
Whole = dict[str, Tensor]


def make_model() -> nn.Module:
    """Rows that no number of ranks divides: 5 and 7; over four ranks 5 are 2, 2, 1 and none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7, bias=False))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
    """Every rank sees the same batch: with 1, 2 or 4 of them the averaged gradient
    has the same bits.
    """
    for step in range(first, first + steps):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {"model": dict(model.named_parameters())}
    return {**tensors, "optimizer": optimizer_state(model, optimizer)}, {"lr": 0.1}


def whole(x: Any) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full.detach().clone()


def trained(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model() if mesh is None else fully_shard(make_model(), mesh=mesh)
    optimizer = make_optimizer(model)
    train(model, optimizer, 0, STEPS)
    return model, optimizer


def resumed(path: Path, mesh: DeviceMesh, group: Any) -> tuple[Whole, Whole]:
    """The contents of a checkpoint, read on the ranks of `mesh`; and the weights after more
    training.
    """
    model = fully_shard(make_model(), mesh=mesh)
    optimizer = make_optimizer(model)
    parameters = dict(model.named_parameters())
    tensors, _ = load(path, {"model": parameters, "optimizer": parameters}, group=group)
    model.load_state_dict(subtree(tensors, "model"))
    load_optimizer_state(model, optimizer, subtree(tensors, "optimizer"))
    held = {name: whole(x) for name, x in tensors.items()}
    train(model, optimizer, STEPS, MORE)
    return held, {name: whole(x) for name, x in model.named_parameters()}


def failure(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def failing(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, group: Any
) -> dict[str, Any]:
    """A rank whose disk is full."""
    state, numbers = state_of(model, optimizer)

    def full(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    real, checkpoint.write_tensors = (
        checkpoint.write_tensors,
        full if rank == 1 else checkpoint.write_tensors,
    )  # type: ignore[assignment]
    try:
        found = {"full disk": failure(lambda: save(folder, 9, state, numbers, keep=1, group=group))}
    finally:
        checkpoint.write_tensors = real
    dist.barrier(group)  # the first rank removes the files
    found["folder"] = sorted(path.name for path in folder.iterdir())
    found["latest"] = str(latest(folder))
    return found


def on_two(folder: Path, rank: int, mesh: DeviceMesh, group: Any) -> dict[str, Any]:
    """Ranks 0 and 1: train, save twice, load again; read the checkpoint of one process; fail."""
    model, optimizer = trained(mesh)
    state, numbers = state_of(model, optimizer)
    extra = {
        "rng": {f"rank{rank}": torch.full((3,), rank)},
        "empty": torch.zeros(0, 4),
        "count": torch.tensor(7),
    }
    save(folder / "two", 1, {"x": torch.ones(2)}, {}, keep=1, group=group)
    path = save(folder / "two", 3, {**state, **extra}, numbers, keep=1, group=group)
    found: dict[str, Any] = {"path": str(path), "latest": str(latest(folder / "two", group=group))}
    found["2 to 2"] = resumed(path, mesh, group)
    single = folder / "one"
    if rank == 0:
        alone, its = trained(None)
        state_alone, numbers_alone = state_of(alone, its)
        save(single, 3, state_alone, numbers_alone, keep=1)
    dist.barrier(group)
    found["1 to 2"] = resumed(single / "step_000003", mesh, group)
    return found | failing(folder / "two", model, optimizer, rank, group)


def on_four(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """All ranks: read the checkpoints of two ranks and of one; save."""
    found: dict[str, Any] = {
        "2 to 4": resumed(folder / "two" / "step_000003", mesh, dist.group.WORLD)
    }
    found["1 to 4"] = resumed(folder / "one" / "step_000003", mesh, dist.group.WORLD)
    model, optimizer = trained(mesh)
    save(folder / "four", 3, *state_of(model, optimizer), keep=1, group=dist.group.WORLD)
    return found


def work(rank: int, folder: str) -> None:
    """One of four ranks; its results go to a file."""
    torch.set_num_threads(1)
    here = Path(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{here / 'store'}",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    pair = dist.new_group([0, 1])
    found: dict[str, Any] = {}
    if rank < 2:
        found |= on_two(here, rank, DeviceMesh.from_group(pair, "cpu"), pair)
    dist.barrier()
    found |= on_four(here, init_device_mesh("cpu", (4,)))
    if rank < 2:
        found["4 to 2"] = resumed(
            here / "four" / "step_000003", DeviceMesh.from_group(pair, "cpu"), pair
        )
    torch.save(found, here / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
