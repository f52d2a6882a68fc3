"""Runs every recipe, for `test_recipes`: `python tests/workers/recipe_ranks.py FOLDER` leaves what
each saved and printed there.

A recipe's ranks are started as `torchrun` starts them: as `__main__`, with the same environment.
They are forks of one process that has already imported torch and transformers, because those
imports take several times as long as the five steps of training.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
# How many processes each runs on.
RANKS = {
    "plain_loop": 1,
    "ddp": 2,
    "fsdp2": 2,
    "accelerate_loop": 2,
    "deepspeed_zero2": 2,
    "fabric": 2,
}
LIMIT = 60.0  # seconds for one recipe; a rank that waits for another would wait for ever


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_rank(recipe: str, rank: int, port: int, folder: Path) -> None:
    """One rank of a recipe, in a process of its own; its output goes to a file."""
    log = os.open(folder / f"{recipe}.{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if RANKS[recipe] > 1:
        elastic = {
            "TORCHELASTIC_RUN_ID": "recipes",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS[recipe]),
            **elastic,
        }
        os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS[recipe]), "GROUP_RANK": "0"}
    sys.argv = [str(RECIPES / f"{recipe}.py"), str(folder / f"{recipe}.pt")]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run_recipe(recipe: str, folder: Path) -> None:
    """All ranks of a recipe. If one fails or the time is up, the others are ended:
    they would wait for it.
    """
    fork, port = multiprocessing.get_context("fork"), free_port()
    ranks: list[Any] = [
        fork.Process(target=run_rank, args=(recipe, rank, port, folder))
        for rank in range(RANKS[recipe])
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT
    while (
        any(p.is_alive() for p in ranks)
        and not any(p.exitcode for p in ranks)
        and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join()
    (folder / f"{recipe}.codes").write_text(" ".join(str(process.exitcode) for process in ranks))


def train_without_accumulate(parts: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """The same training in one process and float64.
    Several parts: each with a mean of its own, as loops do that go wrong.
    """
    import task

    import policyloss as pl

    model = task.make_model().double()
    optimizer = task.make_optimizer(model)
    metrics = pl.Metrics()
    for _ in range(steps):
        for part in parts:
            logp = task.logp_of(model, part)
            out = pl.policy_loss(
                pl.preset("dapo"), logp, part["old_logp"], part["advantages"], part["mask"]
            )
            (out.loss / len(parts)).backward()
            metrics = out.metrics
        optimizer.step()
        optimizer.zero_grad()
    return {"metrics": metrics.compute(), "parameters": dict(model.state_dict())}


def main(folder: Path) -> None:
    """Run the recipes one after another, then the reference."""
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(RECIPES))
    import task  # brings torch, transformers and policyloss, once for all recipes
    import torch

    torch.set_num_threads(1)
    for recipe in RANKS:
        run_recipe(recipe, folder)
    whole, cut = [task.rollouts()], task.micro_batches()
    torch.save(train_without_accumulate(whole, task.STEPS), folder / "whole_batch.pt")
    torch.save(train_without_accumulate(cut, task.STEPS), folder / "mean_of_means.pt")
    torch.save(train_without_accumulate(whole, 0), folder / "untrained.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
