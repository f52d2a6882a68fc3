"""What a task is made of: prompts, each with its answer,
and a way to score what a model says to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol


@dataclass(frozen=True)
class Example:
    """One prompt. answer: the right completion, or "" where only a scorer knows. id: its place in
    its split. messages: what the prompt was made of, if it is a chat.
    """

    prompt: str
    answer: str
    id: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


SUCCESS = 1.0  # the score of a right answer, where a task says nothing else
Reward = Callable[[Example, str], float]


class Task(Protocol):
    """Prompts to train on, others to evaluate on (no prompt is in both), and a score,
    by convention in [0, 1].
    """

    @property
    def name(self) -> str:
        """As `make_task` was given it."""

    @property
    def train(self) -> Sequence[Example]:
        """The only prompts that warm-up and training see."""

    @property
    def held_out(self) -> Sequence[Example]:
        """The prompts of the evaluations."""

    @property
    def success(self) -> float:
        """The score from which on a completion counts as right:
        accuracy is the share of those that reach it.
        """

    def score(self, example: Example, completion: str) -> float:
        """How good `completion` is; raises `RewardError` where the scorer fails."""

    def demonstration(self, example: Example, rng: Random) -> str | None:
        """A completion that warm-up imitates; None where there is none to show."""


@dataclass(frozen=True)
class ListTask:
    """A task held in memory. Its demonstrations are the answers, where it has them."""

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    reward: Reward
    success: float = SUCCESS

    def score(self, example: Example, completion: str) -> float:
        """By `reward`."""
        return self.reward(example, completion)

    def demonstration(self, example: Example, rng: Random) -> str | None:
        """The answer."""
        return example.answer or None


def numbered(rows: Iterable[tuple[str, str, Mapping[str, Any]]]) -> tuple[Example, ...]:
    """(prompt, answer, meta) in order, each with its place as id."""
    return tuple(Example(prompt, answer, i, meta) for i, (prompt, answer, meta) in enumerate(rows))


def normalised(text: str) -> str:
    """Every run of white space is one space, and none is left at the ends."""
    return " ".join(text.split())
