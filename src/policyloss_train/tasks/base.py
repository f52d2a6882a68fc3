"""A task: prompts, each with its answer, and a way to score what a model says to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any


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
Row = tuple[str, str, Mapping[str, Any]]  # the prompt, answer and meta of an example


def answer_of(example: Example, rng: Random) -> str | None:
    """The answer, where there is one to show."""
    return example.answer or None


@dataclass(frozen=True)
class Task:
    """Prompts to train on, others to evaluate on (no prompt is in both), and a score, by convention
    in [0, 1]; it raises `RewardError` where it fails.

    train: the only prompts that warm-up and training see. success: the smallest score that
    counts as correct; accuracy is the share of completions that reach it. demonstration: a
    completion that warm-up imitates, or None.
    """

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    score: Reward
    success: float = SUCCESS
    demonstration: Callable[[Example, Random], str | None] = answer_of


def number_examples(rows: Iterable[Row]) -> tuple[Example, ...]:
    """The examples of rows, each with its place as id."""
    return tuple(Example(prompt, answer, i, meta) for i, (prompt, answer, meta) in enumerate(rows))


def drop_duplicates(rows: Iterable[Row], others: Sequence[Row] = ()) -> Iterator[Row]:
    """The rows whose prompt is in none before it and in none of the others."""
    taken = {prompt for prompt, _, _ in others}
    for row in rows:
        if row[0] not in taken:
            taken.add(row[0])
            yield row


def is_text(text: str) -> bool:
    """Whether no character is half of a surrogate pair: JSON may hold one, tokenizers do not."""
    return text == text.encode(errors="replace").decode()


def normalise_spaces(text: str) -> str:
    """Every run of white space is one space, and none is left at the ends."""
    return " ".join(text.split())
