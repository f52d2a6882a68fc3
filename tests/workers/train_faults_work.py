"""Rewards that leave, hang or raise; and what other processes do for the tests of faults."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # started with this folder first on the path, as pytest has it
    sys.path.insert(0, str(Path(__file__).parent))

from train_loop_ranks import arguments, graded, make_model


def _odd(example: Any) -> bool:
    return int(example.meta["digits"][0]) % 2 == 1


def leaves_sometimes(example: Any, completion: str) -> float:
    return graded(example, completion) if _odd(example) else sys.exit(0)


def hangs_sometimes(example: Any, completion: str) -> float:
    while not _odd(example):
        time.sleep(60)
    return graded(example, completion)


def raises_sometimes(example: Any, completion: str) -> float:
    if not _odd(example):
        raise RuntimeError("no time")
    return graded(example, completion)


def hangs_on_rank_1(example: Any, completion: str) -> float:
    """In the first step, not when the reward is tried before it:
    that is with an example's own answer.
    """
    if (
        os.environ["RANK"] == "1"
        and completion != example.answer
        and Path(os.environ["STALL"]).exists()
    ):
        time.sleep(600)
    return graded(example, completion)


def native_hang() -> int:
    return sum(range(10**12))


def rank(number: int, folder: str) -> None:
    """One of two processes. Its output goes to a file,
    and it is ended when the test has seen enough.
    """
    import torch

    from policyloss.cli import main
    from policyloss_train.collect import Collector

    torch.set_num_threads(1)
    os.environ |= {
        "WORLD_SIZE": "2",
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "STALL": f"{folder}/stall",
    }
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": (Path(folder) / "port").read_text()}
    collect = Collector.collect

    def stalling(self: Collector) -> Any:
        Path(folder, "stall").touch()  # from the first step on; the evaluation before it is over
        return collect(self)

    Collector.collect = stalling  # type: ignore[method-assign]
    options = {
        "model": f"{folder}/model",
        "prompts": 2,
        "group_size": 2,
        "steps": 1,
        "warmup_steps": 0,
        "max_new_tokens": 4,
    }
    options |= {
        "reward": "train_faults_work:hangs_on_rank_1",
        "reward_timeout": 0,
        "rank_timeout": 6,
        "heartbeat": 1,
        "eval_prompts": 2,
    }
    with (
        open(f"{folder}/said{number}", "w") as said,
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        code = main(arguments(Path(folder) / "run", options))
    Path(folder, f"code{number}").write_text(str(code))
    os._exit(0)


def start_two_ranks(folder: Path) -> None:
    """Run both until rank 0 has given up; then end rank 1, which hangs."""
    import multiprocessing
    import socket

    make_model(folder / "model")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        (folder / "port").write_text(str(free.getsockname()[1]))
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank, args=(number, str(folder))) for number in (0, 1)]
    for process in processes:
        process.start()
    processes[0].join(timeout=140)
    for process in processes:
        process.kill()
        process.join()


if __name__ == "__main__":
    from policyloss_train import time_limit

    time_limit.HARD_S = 1.0
    time_limit.call_within(0.5, native_hang)
    print("unreachable")
