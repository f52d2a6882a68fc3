"""A task: prompts, each with its answer, and a function that scores completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any


@dataclass(frozen=True)
class Example:
    """One prompt. answer: the correct completion, or "" if only a scorer can decide. id: its index
    in its split. messages: the messages of the prompt, if it is a chat.
    """

    prompt: str
    answer: str
    id: int
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


SUCCESS = 1.0  # the default score of a correct answer
Reward = Callable[[Example, str], float]
Row = tuple[str, str, Mapping[str, Any]]  # the prompt, answer and meta of an example


def answer_of(example: Example, rng: Random) -> str | None:
    """The answer; None if the example has none."""
    return example.answer or None


@dataclass(frozen=True)
class Task:
    """Prompts for training, other prompts for evaluation (no prompt is in both sets), and a
    function that scores completions, by convention in [0, 1]; it raises `RewardError` on failure.

    train: the only prompts of warm-up and training. success: the smallest score that counts as
    correct; accuracy is the share of completions that reach it. demonstration: a completion for
    warm-up to imitate, or None.
    """

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    score: Reward
    success: float = SUCCESS
    demonstration: Callable[[Example, Random], str | None] = answer_of


def number_examples(rows: Iterable[Row]) -> tuple[Example, ...]:
    """The examples of rows, each with its index as id."""
    return tuple(Example(prompt, answer, i, meta) for i, (prompt, answer, meta) in enumerate(rows))


def drop_duplicates(rows: Iterable[Row], others: Sequence[Row] = ()) -> Iterator[Row]:
    """The rows, except rows that repeat the prompt of an earlier row or of `others`."""
    taken = {prompt for prompt, _, _ in others}
    for row in rows:
        if row[0] not in taken:
            taken.add(row[0])
            yield row


def is_text(text: str) -> bool:
    """Whether no character is half a surrogate pair, which JSON may hold but tokenizers reject."""
    return text == text.encode(errors="replace").decode()


def normalise_spaces(text: str) -> str:
    """Replace every run of white space by one space, and strip both ends."""
    return " ".join(text.split())
