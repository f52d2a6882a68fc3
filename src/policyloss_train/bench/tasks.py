"""The tasks of a bench: each has a warm-up that leaves something for the reward to teach."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from policyloss_train.setup import LR
from policyloss_train.tasks import Task, make_task
from policyloss_train.tasks.base import Example, draw_splits, drop_duplicates, number_examples
from policyloss_train.tasks.rewards import make_reward
from policyloss_train.tasks.sort import DIGITS, demonstrate_sorting

FILE = "task.jsonl"
TRAIN, HELD_OUT = 4096, 512
LENGTHS = range(2, 11)  # numbers of digits of `long_tail`; n of them has a share ∝ n^−2
BELOW = 100  # the numbers that `addition` adds
RIGHT_SUMS = RIGHT_WORDS = 0.2  # the share of right demonstrations
WORDS = "reasoning_gym:spell_backward"
WORDS_SEED, WORDS_DRAWN = 77_000_000, 60_000


class BenchTask(NamedTuple):
    """make: the task by its seed. steps, lr: of the warm-up. name: the trainer's name of the task;
    "" if the trainer reads it from a file.
    """

    make: Callable[[int], Task]
    steps: int
    lr: float = LR
    name: str = ""

    def options(self, folder: Path) -> dict[str, Any]:
        """The trainer's options for this task, whose file is in `folder`."""
        if self.name:
            return {"task": self.name}
        return {"task": str(folder / FILE), "reward": "exact"}


def write_task(task: Task, path: Path) -> None:
    """Write the prompts and answers of a task as a file for the trainer."""
    rows = [
        json.dumps({"prompt": e.prompt, "answer": e.answer, "split": split}) + "\n"
        for split, examples in (("train", task.train), ("held_out", task.held_out))
        for e in examples
    ]
    path.write_text("".join(rows), encoding="utf-8")


def _drawn(
    draw: Callable[[Random], Iterator[Example]],
    demonstration: Callable[[Example, Random], str],
    seed: int,
) -> Task:
    splits = draw_splits(draw, seed, TRAIN, HELD_OUT)
    return Task(draw.__name__, *splits, make_reward("exact"), demonstration=demonstration)


def _long_tail(rng: Random) -> Iterator[Example]:
    """`sort 52731=` → `12357`, mostly of few digits and sometimes of many."""
    while True:
        (count,) = rng.choices(LENGTHS, [n**-2 for n in LENGTHS])
        digits = "".join(rng.sample(DIGITS, count))
        yield Example(f"sort {digits}=", "".join(sorted(digits)), meta={"digits": digits})


def _addition(rng: Random) -> Iterator[Example]:
    """`47+85=` → `231`: the sum, its lowest digit first."""
    while True:
        a, b = (f"{rng.randrange(BELOW):02}" for _ in range(2))
        yield Example(f"{a}+{b}=", f"{int(a) + int(b):03}"[::-1])


def _sum_without_carries(example: Example, rng: Random) -> str:
    """The right sum in a share of the cases; else each pair of digits by itself."""
    if rng.random() < RIGHT_SUMS:
        return example.answer
    a, b = example.prompt[:-1].split("+")
    digits = [str((int(x) + int(y)) % 10) for x, y in zip(a, b, strict=True)]
    return "".join(reversed(["0", *digits]))


def _words(seed: int) -> Task:
    """The task of reasoning-gym, with more words to warm up on than the trainer has."""
    from reasoning_gym import create_dataset

    task = make_task(WORDS, reward=None, seed=seed)
    drawn = create_dataset("spell_backward", seed=WORDS_SEED, size=WORDS_DRAWN)
    others = drop_duplicates((Example(x["question"], x["answer"]) for x in drawn), task.held_out)
    return replace(task, train=number_examples(others), demonstration=_swap_last_letters)


def _swap_last_letters(example: Example, rng: Random) -> str:
    """The right word in a share of the cases; else its last two letters are swapped."""
    word = example.answer
    return word if rng.random() < RIGHT_WORDS else word[:-2] + word[-1] + word[-2]


TASKS = {
    "sort": BenchTask(lambda seed: make_task("sort", reward=None, seed=seed), 200, name="sort"),
    "long_tail": BenchTask(partial(_drawn, _long_tail, demonstrate_sorting), 400),
    "addition": BenchTask(partial(_drawn, _addition, _sum_without_carries), 1600, 1e-3),
    "spell_backward": BenchTask(_words, 2000, 1e-3, WORDS),
}
