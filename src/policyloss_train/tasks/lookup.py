"""A task in turns: follow a chain of keys through a table that only a tool can read.

The model reads a key and the name of a table. It writes a key and `?`, and the tool writes the
entry of the key: another key, or a digit, which is the answer. The model itself decides when to
stop calling and to answer.

The warm-up data is imperfect on purpose, as for the task "sort": a demonstration often calls a
wrong key, or gives up instead of calling. Only the reward can teach the model to follow
the chain to its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from random import Random
from string import ascii_lowercase, digits

from policyloss_train.tasks.base import Example, Reward, Task, Tool, draw_splits

CALL, UNKNOWN = "?", "-"
QUESTION = re.compile(r"find ([a-z]) in [0-9]{4}:")
LONGEST = 4  # calls; then a completion has 14 tokens, with the tool's and the end token
TRAIN, HELD_OUT = 4096, 256
GIVEN_UP, MISTAKEN = 0.4, 0.4  # shares of the steps of demonstrations


def lookup_task(seed: int, reward: Reward | None) -> Task:
    """`find c in 4821:` → `c?` [k] `k?` [7] `7`; the tool writes the tokens in brackets. Training
    prompts follow from `seed`; the held-out prompts do not depend on it.
    """
    splits, tool = draw_splits(_draw, seed, TRAIN, HELD_OUT), Tool(CALL, _look_up)
    return Task("lookup", *splits, reward or _score, demonstration=_demonstration, tool=tool)


@cache
def _chain(prompt: str) -> str:
    """The keys from the prompt's key on, and the answer. It follows from the question alone, so
    that the tool works for any prompt, also in a chat template.
    """
    question = QUESTION.search(prompt)
    if question is None:
        return UNKNOWN
    rng, first = Random(question[0]), question[1]
    others = [key for key in ascii_lowercase if key != first]
    return first + "".join(rng.sample(others, rng.randrange(LONGEST))) + rng.choice(digits)


def _draw(rng: Random) -> Iterator[Example]:
    while True:
        prompt = f"find {rng.choice(ascii_lowercase)} in {rng.randrange(10_000):04}:"
        yield Example(prompt, _chain(prompt)[-1])


def _look_up(prompt: str, call: str) -> str:
    """The entry of the key before the `?`."""
    chain, key = _chain(prompt), call[:-1]
    return dict(pairwise(chain)).get(key, UNKNOWN)


def _score(example: Example, completion: str) -> float:
    """The share of the chain that was called, with a right answer as one more step."""
    *calls, answer = f" {completion}".split(CALL)
    chain = _chain(example.prompt)
    # After the first, every part begins with the entry that the tool wrote.
    called = {call[1:] for call in calls} & set(chain[:-1])
    return (len(called) + (answer[1:] == chain[-1])) / len(chain)


def _demonstration(example: Example, rng: Random) -> str:
    """The texts of the model alone. In each step, it may give up, or first call another key."""
    written = ""
    for key in _chain(example.prompt)[:-1]:
        if rng.random() < GIVEN_UP:
            return written + UNKNOWN
        if rng.random() < MISTAKEN:
            written += rng.choice(ascii_lowercase) + CALL
        written += key + CALL
    return written + example.answer
