"""The built-in task: put digits in order. A model with 140 thousand weights learns it by
reinforcement in a minute on a CPU.

What warm-up shows is imperfect on purpose, as the text that a language model first learns from is:
nine demonstrations of ten leave the last digit where it stood. So the model learns to write digits,
when to stop, and mostly the wrong thing; by how much it is wrong hardly depends on how long warm-up
lasts. That the last digit has a place too is what only the reward can teach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random

from policyloss.train.tasks.base import SUCCESS, Example, Reward, numbered

DIGITS = "0123456789"
SHORTEST, LONGEST = 4, 6  # 186 480 different prompts
TRAIN, HELD_OUT = 4096, 512
RIGHT_DEMONSTRATIONS = 0.1  # chosen by experiment: greedy accuracy 0.2 to 0.35 after warm-up


@dataclass(frozen=True)
class SortTask:
    """`sort 52731=` → `12357`: four to six different digits.
    Held out are the same prompts whatever the seed.
    """

    train: Sequence[Example]
    held_out: Sequence[Example]
    reward: Reward
    success: float = SUCCESS
    name: str = "sort"

    @classmethod
    def of(cls, seed: int, reward: Reward) -> SortTask:
        """The task whose training prompts follow from `seed`."""
        held_out = list(islice(_different(Random("held out"), set()), HELD_OUT))
        train = islice(_different(Random(f"train {seed}"), set(held_out)), TRAIN)
        return cls(numbered(map(_example, train)), numbered(map(_example, held_out)), reward)

    def score(self, example: Example, completion: str) -> float:
        """By `reward`."""
        return self.reward(example, completion)

    def demonstration(self, example: Example, rng: Random) -> str | None:
        """The answer in one case of ten; else the digits but the last in order,
        and then the last.
        """
        if rng.random() < RIGHT_DEMONSTRATIONS:
            return example.answer
        *others, last = example.meta["digits"]
        return "".join([*sorted(others), last])


def _different(rng: Random, taken: set[str]) -> Iterator[str]:
    """Digit strings, each once and none that is in `taken`."""
    taken = set(taken)
    while True:
        digits = "".join(rng.sample(DIGITS, rng.randint(SHORTEST, LONGEST)))
        if digits not in taken:
            taken.add(digits)
            yield digits


def _example(digits: str) -> tuple[str, str, dict[str, str]]:
    return f"sort {digits}=", "".join(sorted(digits)), {"digits": digits}
