"""A task: prompts, each with its answer, and a function that scores completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from random import Random
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Example:
    """One prompt. answer: the correct completion, or "" if only a scorer can decide. id: its index
    in its split. messages: the messages of the prompt, if it is a chat.
    """

    prompt: str
    answer: str
    id: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


SUCCESS = 1.0  # the default score of a correct answer
Reward = Callable[[Example, str], float]


class Tool(NamedTuple):
    """A tool that the policy calls in its completion. end: the text, one token, that ends a call.
    answer: takes the prompt and the text of the turn, and returns the text that the tool writes.
    """

    end: str
    answer: Callable[[str, str], str]


@dataclass(frozen=True)
class Task:
    """Prompts for training, other prompts for evaluation (no prompt is in both sets), and a
    function that scores completions, by convention in [0, 1]; it raises `RewardError` on failure.

    train: the only prompts of warm-up and training. success: the smallest score that counts as
    correct; accuracy is the share of completions that reach it. demonstration: a completion for
    warm-up to imitate, or None. tool: of a task in turns. Then a demonstration has the texts of the
    policy alone, and `score` also takes a completion up to the end of a turn.
    """

    name: str
    train: Sequence[Example]
    held_out: Sequence[Example]
    score: Reward
    success: float = SUCCESS
    demonstration: Callable[[Example, Random], str | None] = lambda e, rng: e.answer or None
    tool: Tool | None = None


def number_examples(examples: Iterable[Example]) -> tuple[Example, ...]:
    """The examples, each with its index as id."""
    return tuple(replace(example, id=i) for i, example in enumerate(examples))


@cache  # a run makes its task twice
def draw_splits(
    draw: Callable[[Random], Iterator[Example]], seed: int, train: int, held_out: int
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """`train` training examples that follow from `seed`, and `held_out` others that do not."""
    others = list(islice(drop_duplicates(draw(Random("held out"))), held_out))
    rows = islice(drop_duplicates(draw(Random(f"train {seed}")), others), train)
    return number_examples(rows), number_examples(others)


def drop_duplicates(
    examples: Iterable[Example], others: Sequence[Example] = ()
) -> Iterator[Example]:
    """The examples, except those that repeat the prompt of an earlier one or of `others`."""
    taken = {example.prompt for example in others}
    for example in examples:
        if example.prompt not in taken:
            taken.add(example.prompt)
            yield example


def is_text(text: str) -> bool:
    """Whether no character is half a surrogate pair, which JSON may hold but tokenizers reject."""
    return text == text.encode(errors="replace").decode()


def normalise_spaces(text: str) -> str:
    """Replace every run of white space by one space, and strip both ends."""
    return " ".join(text.split())
