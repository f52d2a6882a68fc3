"""Data about sampled completions: the branch of each token, and the choice of groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import CORRECTIONS, TRUSTS
from policyloss_lab.completions import BRANCHES, choose_groups, spread, token_branches

NAMES = tuple(BRANCHES)


def named(codes: Tensor) -> list[str]:
    return [NAMES[code] for code in codes.flatten().tolist()]


def ratios(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64).log()


def test_the_branches_of_a_clip_with_a_dual_bound() -> None:
    """Bounds 0.8 and 1.28, dual 3. A > 0: only the upper bound holds. A < 0: only the lower one,
    and the dual one beyond 3.
    """
    spec = pl.preset("dapo").replace(trust=pl.Clip(0.2, 0.28, dual=3.0))
    logp = ratios(1.0, 1.3, 0.7, 1.0, 1.3, 0.7, 3.1, 1.3, 1.3)
    advantages = torch.tensor([[1.0, 1, 1, -1, -1, -1, -1, 0, 1]], dtype=torch.float64)
    mask = torch.tensor([[True] * 8 + [False]])
    codes = token_branches(spec, logp, torch.zeros_like(logp), advantages, mask)
    assert named(codes) == [
        *("plain", "upper", "plain"),
        *("plain", "plain", "lower", "dual"),
        *("no_advantage", "masked"),
    ]


def test_a_rejected_token_is_marked_inside_and_outside_the_trust_region() -> None:
    """Weights exp(old − rollout) of 1, 3 and 1; the band keeps 0.5 to 2."""
    spec = pl.preset("dapo").replace(correction=(pl.Band(0.5, 2.0),))
    old, rollout = ratios(1.0, 3.0, 1.0), ratios(1.0, 1.0, 1.0)
    logp = old + ratios(1.5, 1.5, 1.0)
    advantages, mask = torch.ones_like(logp), torch.ones_like(logp, dtype=torch.bool)
    codes = token_branches(spec, logp, old, advantages, mask, rollout_logp=rollout)
    assert named(codes) == ["upper", "rejected", "plain"]
    # The whole sequence leaves the mask with its rejected token; a token that was never in it
    # stays masked.
    mask[0, 2] = False
    codes = token_branches(
        spec.replace(rejected="drop_sequence"), logp, old, advantages, mask, rollout_logp=rollout
    )
    assert named(codes) == ["rejected", "rejected", "masked"]


def test_a_ratio_of_sequences_has_one_branch_for_all_of_its_tokens() -> None:
    """GSPO: the geometric mean of 4, 1 and 1 is 4^(1/3) = 1.59, beyond 1 + 4e-4."""
    logp = ratios(4.0, 1.0, 1.0, 1.0, 1.0)[0]
    mask = torch.ones(5, dtype=torch.bool)
    codes = token_branches(
        "gspo", logp, torch.zeros(5), torch.ones(5), mask, cu_seqlens=torch.tensor([0, 3, 5])
    )
    assert named(codes) == ["upper"] * 3 + ["plain"] * 2


@walked("trust", TRUSTS, ids=repr)
@walked("correction", [(), CORRECTIONS[3], CORRECTIONS[-1]], ids=repr)
def test_branches_count_as_the_metrics_of_the_loss_do(trust: object, correction: object) -> None:
    """For any part: the share of tokens in each branch is the metric of that name."""
    generator = torch.Generator().manual_seed(3)
    logp, old, rollout = (
        -torch.rand(6, 20, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    advantages = torch.randn(6, 20, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 20, generator=generator) < 0.8
    spec = pl.preset("ppo").replace(trust=trust, correction=correction)
    tensors = {"rollout_logp": rollout, "teacher_logp": rollout, "ref_logp": rollout}
    names = named(token_branches(spec, logp, old, advantages, mask, **tensors))
    metrics = pl.policy_loss(spec, logp, old, advantages, mask, **tensors).metrics.compute()
    n = metrics["tokens"]
    assert names.count("masked") == 120 - n
    rejected = metrics.get("rejected_fraction", 0.0) * n
    assert names.count("rejected") == pytest.approx(rejected)
    if not rejected:
        for kind in ("upper", "lower", "dual", "dropped"):
            share = metrics.get(f"clip_fraction_{kind}", 0.0)
            assert names.count(kind) == pytest.approx(share * n), kind


def test_the_spread_of_a_group() -> None:
    assert spread([1.0, 0.0, 0.0, 1.0]) == 0.5
    assert spread([0.0, 0.0, 3.0]) == pytest.approx(math.sqrt(2))  # mean 1: (1 + 1 + 4) / 3
    assert spread([7.0]) == 0


def test_groups_are_chosen_for_their_spread() -> None:
    groups = [[1, 1], [0, 0], [0, 1], [0, 3], [1, 1], [0, 2], [0, 0]]
    # Spreads 0, 0, ½, 3/2, 0, 1, 0. The worst without spread is the second, the best the last one
    # of reward 1.
    assert choose_groups(groups, 1) == [3]
    assert choose_groups(groups, 2) == [3, 1]
    assert choose_groups(groups, 4) == [3, 1, 5, 4]
    assert choose_groups(groups, 7) == [3, 1, 5, 4, 2, 0, 6]
    assert choose_groups(groups, 99) == [3, 1, 5, 4, 2, 0, 6]


def test_groups_that_are_all_equal_take_one_place() -> None:
    """All wrong but two: the second all-wrong group is not worth a place before a spread."""
    assert choose_groups([[0, 0], [0, 0], [0, 1], [0, 2]], 3) == [3, 0, 2]
    assert choose_groups([[0, 0], [0, 0]], 2) == [0, 1]
    assert choose_groups([], 3) == []
    assert choose_groups([[1, 2]], 0) == []
