"""The tasks of the package reasoning-gym, by name and scored by their own rules."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from policyloss.errors import InputError, unknown_name
from policyloss_train.tasks.base import Example, Reward, Task, drop_duplicates, number_examples
from policyloss_train.tasks.rewards import check_reward

TRAIN, HELD_OUT = 1024, 128
# Item i of a data set with seed s depends only on s + i, so neighbouring seeds share almost all
# items. Therefore the seeds used here are far apart.
SEED_STRIDE = 1_000_000


def gym_task(name: str, dataset: str, seed: int, reward: Reward | None) -> Task:
    """The data set `dataset`; the held-out prompts do not depend on the seed."""
    source = _create(dataset, seed=0, size=HELD_OUT)
    held_out = list(drop_duplicates(_examples(source)))
    # More items than needed, to make up for repeated prompts
    # if the data set has enough different ones.
    drawn = _create(dataset, seed=(seed + 1) * SEED_STRIDE, size=2 * TRAIN)
    train = list(islice(drop_duplicates(_examples(drawn), held_out), TRAIN))
    if not train:
        raise InputError(
            f"{name} has no more than {len(held_out)} different prompts: nothing is left to "
            "train on."
        )
    rule = check_reward(
        name,
        lambda example, completion: source.score_answer(completion.strip(), example.meta["entry"]),
    )
    return Task(name, number_examples(train), number_examples(held_out), reward or rule)


def _create(dataset: str, seed: int, size: int) -> Any:
    """The data set of this name."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise InputError(
            f"the task reasoning_gym:{dataset} needs the package reasoning-gym: pip install "
            "reasoning-gym."
        ) from error
    if dataset not in DATASETS:
        raise InputError(unknown_name("task of reasoning_gym", dataset, DATASETS))
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size)
    # "composite", for example, needs settings.
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"the task reasoning_gym:{dataset} cannot be made with its default settings: {error}."
        ) from error


def _examples(source: Any) -> Iterator[Example]:
    """The examples of a data set; an item that is scored without an answer gets the answer ""."""
    for entry in source:
        answer = "" if entry["answer"] is None else str(entry["answer"])
        yield Example(entry["question"], answer, meta={"entry": entry})
