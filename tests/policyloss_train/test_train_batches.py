"""Packs of completions: the predicted tokens, the trained tokens, and cuts that lose nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from policyloss_train.advantages import judge
from policyloss_train.batches import Pack, minibatches
from policyloss_train.config import TrainConfig
from policyloss_train.sampler import Sample


def made(
    prompt: list[int], completion: list[int], reward: float, group: int, finished: bool = True
) -> Sample:
    logp = -torch.arange(1.0, len(completion) + 1) / 10
    return Sample(
        0, group, torch.tensor(prompt), torch.tensor(completion), logp, finished, "", reward
    )


SAMPLES = [
    made([5, 6, 7], [1, 2], 1.0, 0),
    made([8], [3, 4, 9], 0.0, 0),
    made([5, 6], [1], 0.0, 1, finished=False),
    made([5, 6], [2, 2], 3.0, 1),
]


def test_each_position_predicts_the_next_token() -> None:
    """Sequence 5 6 7 | 1 2 reads 5 6 7 1 and predicts 6 7 1 2,
    of which 1 and 2 are the completion; and so on.
    """
    pack = Pack.of(SAMPLES)
    assert pack.lengths == [4, 3, 2, 3]
    assert pack.tokens["ids"].tolist() == [5, 6, 7, 1, 8, 3, 4, 5, 6, 5, 6, 2]
    assert pack.tokens["targets"].tolist() == [6, 7, 1, 2, 3, 4, 9, 6, 1, 6, 2, 2]
    assert pack.tokens["mask"].int().tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1]
    assert pack.tokens["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 0, 1, 2]
    torch.testing.assert_close(
        pack.tokens["rollout_logp"],
        torch.tensor([0, 0, -0.1, -0.2, -0.1, -0.2, -0.3, 0, -0.1, 0, -0.1, -0.2]),
    )
    assert pack.cu_seqlens.tolist() == [0, 4, 7, 9, 12]
    assert pack.completion_lengths.tolist() == [2, 3, 1, 2]


def test_the_age_of_a_token_is_that_of_its_sample() -> None:
    samples = [replace(sample, version=v) for sample, v in zip(SAMPLES, (3, 5, 0, 4), strict=True)]
    ages = Pack.of(samples).with_ages(samples, 5).tokens["ages"]
    assert ages.tolist() == [2] * 4 + [0] * 3 + [5] * 2 + [1] * 3
    assert Pack.nothing().with_ages([], 5).tokens["ages"].tolist() == [0]


def test_cut_completions_may_be_left_out() -> None:
    pack = Pack.of(SAMPLES, train_on_cut=False)
    assert pack.completion_lengths.tolist() == [2, 3, 0, 2]


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [3, 0], [2], [1, 1]])
def test_a_selection_equals_a_pack_of_its_samples(chosen: list[int]) -> None:
    found, expected = Pack.of(SAMPLES).select(chosen), Pack.of([SAMPLES[i] for i in chosen])
    assert found.lengths == expected.lengths
    for part, other in ((found.tokens, expected.tokens), (found.sequences, expected.sequences)):
        assert part.keys() == other.keys()
        assert all(torch.equal(x, other[name]) for name, x in part.items())


def test_select_keeps_the_requested_order() -> None:
    chosen = Pack.of(SAMPLES).select([2, 0])
    assert chosen.tokens["ids"].tolist() == [5, 6, 5, 6, 7, 1]
    assert chosen.sequences["group_ids"].tolist() == [1, 0]
    assert chosen.micro_batch()["cu_seqlens"].tolist() == [0, 2, 6]


@pytest.mark.parametrize(("count", "number"), [(10, 3), (4, 4), (7, 1)])
def test_minibatches_are_a_partition(count: int, number: int) -> None:
    parts = minibatches(count, number, seed=3)
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts == minibatches(count, number, seed=3) != minibatches(count, number, seed=4)


def advantages(name: str, **options: object) -> torch.Tensor:
    config = TrainConfig(advantage=name, **options)  # type: ignore[arg-type]
    pack = Pack.of(SAMPLES).with_tokens(old_values=torch.full((12,), 0.5))
    pack.sequences["greedy"] = torch.tensor([0.5, 0.5, 1.0, 1.0])
    return judge(config, pack, "local")[0]


def test_advantages_by_hand() -> None:
    """Rewards 1 0 | 0 3. Dr. GRPO: minus the means ½
    and 1½. RLOO: minus the other. ReMax: minus ½ ½ 1 1.
    """
    spread = lambda *x: torch.tensor(x).repeat_interleave(torch.tensor([4, 3, 2, 3]))  # noqa: E731
    torch.testing.assert_close(advantages("dr_grpo"), spread(0.5, -0.5, -1.5, 1.5))
    torch.testing.assert_close(advantages("rloo"), spread(1.0, -1.0, -3.0, 3.0))
    torch.testing.assert_close(advantages("remax"), spread(0.5, -0.5, -1.0, 2.0))
    # Sample standard deviations of the groups are √½ and √4.5: ±½/√½ and ±1.5/√4.5 are both ±√½.
    torch.testing.assert_close(
        advantages("grpo"), 0.5**0.5 * spread(1.0, -1.0, -1.0, 1.0), rtol=1e-5, atol=1e-5
    )


def test_gae_is_whitened_over_the_tokens_that_are_trained_on() -> None:
    """λ = γ = 1: the reward minus ½ at every one of 2, 3, 1, 2 tokens:
    ½ −½ −½ 2½, mean 0.5, before whitening.
    """
    found = advantages("gae")[Pack.of(SAMPLES).tokens["mask"]]
    raw = torch.tensor([0.5, -0.5, -0.5, 2.5]).repeat_interleave(torch.tensor([2, 3, 1, 2]))
    torch.testing.assert_close(found, (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "grpo_loo",
        "opo",
        "maxrl",
        "gpg",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "passk_max_gap",
        "passk_combinatorial",
    ],
)
def test_every_estimator_prefers_the_better_answer(name: str) -> None:
    mean = [part.mean().item() for part in advantages(name, passk=1).split([4, 3, 2, 3])]
    assert mean[0] > mean[1]
    assert mean[3] > mean[2]
