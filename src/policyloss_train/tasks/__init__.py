"""Tasks by name: the built-in tasks, reasoning-gym tasks, and files of prompts and answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from policyloss.errors import InputError
from policyloss_train.tasks.base import Example, Task
from policyloss_train.tasks.gym import gym_task
from policyloss_train.tasks.jsonl import file_task
from policyloss_train.tasks.lookup import lookup_task
from policyloss_train.tasks.rewards import make_reward
from policyloss_train.tasks.sort import sort_task

GYM = "reasoning_gym:"
IN_TURNS = ("lookup",)  # tasks with a tool
BUILT_IN = ("sort", *IN_TURNS)


def make_task(name: str, *, reward: str | None, seed: int, success: float | None = None) -> Task:
    """The task called `name`: "sort", "lookup", "reasoning_gym:<data set>", or the path of a .jsonl
    file.

    reward: as in `make_reward`; None is the task's own rule (for "sort" and files: "exact").
    seed: for the generated training prompts; the held-out prompts do not depend on the seed, so
    runs with different seeds can be compared.
    success: the smallest reward that counts as correct; None is the task's own value, 1.
    """
    chosen = None if reward is None else make_reward(reward)
    if name == "sort":
        task = sort_task(seed, chosen or make_reward("exact"))
    elif name == "lookup":
        task = lookup_task(seed, chosen)
    elif name.startswith(GYM):
        task = gym_task(name, name.removeprefix(GYM), seed, chosen)
    elif name.endswith(".jsonl"):
        task = file_task(Path(name), chosen or make_reward("exact"))
    else:
        raise InputError(
            f"unknown task {name!r}. Valid: {', '.join(BUILT_IN)}, {GYM}<data set>, or the path of "
            "a file that ends in .jsonl."
        )
    return task if success is None else replace(task, success=success)


__all__ = ["Example", "Task", "make_task"]
