"""The built-in task: put digits in order. A model with 140 thousand weights learns it by
reinforcement in a minute on a CPU.

The warm-up data is imperfect on purpose, like the text that a language model is pretrained on: nine
of ten demonstrations leave the last digit in the last position. So the model learns to write digits
and to stop, but mostly in a wrong order, and longer warm-up hardly changes that. Only the reward
can teach the model the right position of the last digit.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from policyloss_train.tasks.base import Example, Reward, Task, draw_splits

DIGITS = "0123456789"
SHORTEST, LONGEST = 4, 6  # 186 480 different prompts
TRAIN, HELD_OUT = 4096, 512
RIGHT_DEMONSTRATIONS = 0.1  # chosen by experiment: greedy accuracy 0.2 to 0.35 after warm-up


def sort_task(seed: int, score: Reward) -> Task:
    """`sort 52731=` → `12357`: four to six different digits. Training prompts follow from `seed`;
    the held-out prompts do not depend on it.
    """
    splits = draw_splits(_draw, seed, TRAIN, HELD_OUT)
    return Task("sort", *splits, score, demonstration=demonstrate_sorting)


def demonstrate_sorting(example: Example, rng: Random) -> str:
    """The answer in one case of ten; else all digits but the last, sorted, then the last digit."""
    if rng.random() < RIGHT_DEMONSTRATIONS:
        return example.answer
    *others, last = example.meta["digits"]
    return "".join([*sorted(others), last])


def _draw(rng: Random) -> Iterator[Example]:
    while True:
        digits = "".join(rng.sample(DIGITS, rng.randint(SHORTEST, LONGEST)))
        yield Example(f"sort {digits}=", "".join(sorted(digits)), meta={"digits": digits})
