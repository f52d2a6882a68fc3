"""Completions that wait in a checkpoint: ranks gather the completions of one process, and any
number of ranks gets its share.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from policyloss_train.collect import Completions
from policyloss_train.sampler import Sample

PROMPTS = 3  # groups of a step; a second draw of dynamic sampling has the groups 3 to 5


def sample(group: int, length: int, reward: float) -> Sample:
    ids = torch.arange(length) + 10 * group
    return Sample(
        group,
        group,
        torch.arange(group + 1),
        ids,
        -ids.float(),
        length % 2 == 0,
        f"text {group}",
        reward,
    )


ROWS = [
    sample(0, 2, 0.5),
    sample(0, 3, 1.0),
    sample(1, 1, 0.0),
    sample(2, 4, 1.0),
    sample(4, 1, 0.25),
]
ALL = Completions(
    ROWS, torch.tensor([0.1, 0.1, 0.2, 0.3, 0.4]), {"tokens": 11.0, "reward/mean": 0.55}
)


def same(a: Completions, b: Completions) -> bool:
    def plain(x: Completions) -> Any:
        rows = [
            [v.tolist() if isinstance(v, torch.Tensor) else v for v in vars(s).values()]
            for s in x.samples
        ]
        return rows, None if x.greedy is None else x.greedy.tolist(), x.statistics

    return bool(plain(a) == plain(b))


def test_the_share_of_a_rank() -> None:
    """Rank r of two samples the places r, r + 2, … of a draw: groups 0 and 2 on rank 0, 1 and (in
    the second draw) 4 on rank 1.
    """
    first, second = (ALL.share(rank, 2, PROMPTS) for rank in (0, 1))
    assert [s.group for s in first.samples] == [0, 0, 2]
    assert [s.group for s in second.samples] == [1, 4]
    assert first.greedy is not None
    torch.testing.assert_close(first.greedy, torch.tensor([0.1, 0.1, 0.3]), rtol=0, atol=0)
    assert first.statistics == second.statistics == ALL.statistics


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("greedy", [True, False])
def test_any_number_of_ranks_and_back(world: int, greedy: bool) -> None:
    """Shares → gathered → a checkpoint, its numbers through JSON → the same shares."""
    everything = ALL if greedy else Completions(ALL.samples, None, ALL.statistics)
    shares = [everything.share(rank, world, PROMPTS) for rank in range(world)]
    assert sum(len(share.samples) for share in shares) == len(ROWS)
    tensors, numbers = Completions.merge(shares).state()
    assert tensors["completion_ids"].tolist() == [0, 1, 0, 1, 2, 10, 20, 21, 22, 23, 40]
    back = Completions.from_state(tensors, json.loads(json.dumps(numbers)))
    back.check(examples=5, vocabulary=41)
    assert same(back, everything)
    for rank, share in enumerate(shares):
        assert same(back.share(rank, world, PROMPTS), share)


def test_no_completions_at_all() -> None:
    nothing = Completions([], None, {"tokens": 0.0})
    tensors, numbers = nothing.state()
    assert tensors == {}
    assert same(Completions.from_state(tensors, numbers), nothing)


@pytest.mark.parametrize(
    ("examples", "vocabulary", "statistics", "says"),
    [
        (4, 41, {"tokens": 1.0}, "a completion of example 4, group 4"),
        (5, 40, {"tokens": 1.0}, "tokens that the model does not have, torch.int64"),
        (5, 41, {}, "the statistics of completions say tokens = None"),
        (5, 41, {"tokens": math.inf}, "the statistics of completions say tokens = inf"),
    ],
)
def test_missing_columns_are_left_out(
    examples: int, vocabulary: int, statistics: Any, says: str
) -> None:
    """The last of five examples is 4, and the largest token id is 40."""
    with pytest.raises(TypeError, match=says):
        Completions(ROWS, None, statistics).check(examples, vocabulary)
