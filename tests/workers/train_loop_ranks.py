"""Shared by the tests of whole training runs: a model, rewards, runs by the command line, and the
work of two ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SMALL = {
    "prompts": 4,
    "group_size": 4,
    "max_new_tokens": 8,
    "eval_prompts": 16,
    "warmup_steps": 0,
    "lr": 5e-4,  # the models of tests are tiny
    "critic_lr": 1e-3,
    "steps": 3,
    "eval_every": 2,
    "checkpoint_every": 2,
    "rollouts_every": 1,
    "reward": "train_loop_ranks:graded",
}

failing = False  # whether the reward `sometimes` fails on everything


def graded(example: Any, completion: str) -> float:
    """0, ¼, … 1: nothing sensible, but different for the completions of a prompt,
    so that there is a gradient.
    """
    return sum(map(ord, completion)) % 5 / 4


def sometimes(example: Any, completion: str) -> float:
    """Raises for a prompt that begins with an even digit, is NaN for one that begins with 5,
    and else as `graded`.
    """
    first = int(example.meta["digits"][0])
    if failing or first % 2 == 0:
        raise RuntimeError("no connection to the grader")
    return float("nan") if first == 5 else graded(example, completion)


def make_model(folder: Path) -> str:
    """A tiny model that has learned to write digits and to stop, as a folder:
    a run of a test needs no warm-up of its own.
    """
    from policyloss_train.models import load_model
    from policyloss_train.setup import warm_up
    from policyloss_train.tasks import make_task

    task = make_task("sort", reward=None, seed=0)
    model, tokenizer = load_model("tiny", task, dtype=torch.float32, device="cpu", seed=0)
    warm_up(model, tokenizer, task, steps=60, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def arguments(out: Path, options: Mapping[str, Any]) -> list[str]:
    """The command line of a run. True is a flag, None and False are nothing."""
    found = ["train", "--out", str(out)]
    for name, value in options.items():
        if value is not None and value is not False:
            found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


def train(out: Path, **options: Any) -> int:
    """`policyloss train` in this process; a small run unless `options` change it."""
    from policyloss.cli import main

    return main(arguments(out, {**SMALL, **options}))


def resume(out: Path, **options: Any) -> int:
    """`policyloss train --resume`, with the reward of the run named again: it is code, which a run
    directory cannot request.
    """
    from policyloss.cli import main

    file = out / "config.json"
    named = json.loads(file.read_text())["config"]["reward"] if file.exists() else None
    return main(arguments(out, {"resume": True, "reward": named, **options}))


def lines(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def kill_in_a_line(command: Sequence[str], step: int) -> None:
    """Run the command, and die by SIGKILL when half of the line of `step` is written."""
    from policyloss.cli import main
    from policyloss_train.run.directory import RunDir

    log = RunDir.log

    def dying(self: RunDir, at: int, metrics: Any, timing: Any) -> None:
        if at == step:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(f'{{"step": {at}, "reward/mean": 0.')
            os.kill(os.getpid(), signal.SIGKILL)
        log(self, at, metrics, timing)

    RunDir.log = dying  # type: ignore[method-assign]
    main(list(command))


def work(rank: int, folder: str, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """The body of each of two processes: every run, or the resumption of it,
    one after the other in one group of processes.
    """
    torch.set_num_threads(1)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    codes = {}
    for name, options in runs.items():
        start = resume if options.get("resume") else train
        codes[name] = start(
            Path(folder) / name, **{key: x for key, x in options.items() if key != "resume"}
        )
    (Path(folder) / f"codes{rank}.json").write_text(json.dumps(codes))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_in_a_line(sys.argv[2:], int(sys.argv[1]))
