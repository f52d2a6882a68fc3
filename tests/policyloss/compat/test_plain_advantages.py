"""Plain arithmetic: each group rounded as torch rounds it alone, hand numbers for the small
constants, and the exact functions.
"""

import math

import pytest
import torch
from walk import walked

from policyloss.advantage import discounted_returns, gae, group_advantages, rloo, whiten
from policyloss.advantage.returns import reward_to_go
from policyloss.compat.verl.advantage_numbers import (
    PlainGroups,
    combine_rewards,
    less_baseline,
    over_tokens,
    plain_gae,
    plain_returns,
    plain_whiten,
    sequence_scores,
)
from policyloss.errors import InputError

HOLES = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def float64(x):
    return torch.tensor(x, dtype=torch.float64)


def close(actual, expected, atol=1e-14):
    torch.testing.assert_close(
        actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=0, atol=atol
    )


def sized_groups(seed, dtype, sizes=(1, 2, 3, 5, 5, 8, 9, 16, 21), offset=3.0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.repeat_interleave(torch.arange(len(sizes)) * 7 - 20, torch.tensor(sizes))
    ids = ids[torch.randperm(len(ids), generator=g)]
    return (offset + torch.randn(len(ids), generator=g, dtype=torch.float64)).to(dtype), ids


@walked("dtype", [torch.float32, torch.float64])
def test_stacked_has_the_mean_and_the_deviation_of_each_group_alone(dtype):
    for seed in range(5):
        rewards, ids = sized_groups(seed, dtype)
        g = PlainGroups.stacked(rewards, ids)
        for group in ids.unique():
            rows = (ids == group).nonzero().flatten()
            assert (g.size[rows] == len(rows)).all()
            if len(rows) == 1:
                assert (g.mean[rows], g.std[rows]) == (0, 1)
                continue
            assert (g.mean[rows] == rewards[rows].mean()).all()
            close(
                g.std[rows], rewards[rows].std().expand(len(rows)), atol=4 * torch.finfo(dtype).eps
            )


@walked("dtype", [torch.float32, torch.float64])
def test_indexed_adds_up_one_row_after_the_other(dtype):
    rewards, ids = sized_groups(1, dtype)
    g = PlainGroups.indexed(rewards, ids)
    for group in ids.unique():
        rows = (ids == group).nonzero().flatten()
        total = torch.zeros(())
        for r in rewards[rows].float():
            total = total + r
        if len(rows) > 1:
            assert (g.mean[rows] == total / len(rows)).all()
    assert g.std.dtype == torch.float32


def test_in_float64_plain_and_exact_agree():
    rewards, ids = sized_groups(2, torch.float64, offset=0.0)
    g = PlainGroups.stacked(rewards, ids)
    close(g.centered, group_advantages(rewards, ids, scale=None, single="raw"), atol=1e-13)
    close(
        g.scale(g.centered, 0.0), group_advantages(rewards, ids, eps=0.0, single="raw"), atol=1e-12
    )
    close(g.zero_alone(rloo(rewards, ids, single="raw")), rloo(rewards, ids))


def test_rounding_shows_where_plain_differs_from_exact():
    # Three float32 times 0.9 add up to 2.69999981, a third of which is 2⁻²⁴ below 0.9:
    # a deviation of √(3/2)·2⁻²⁴.
    rewards, ids, residue = torch.full((3,), 0.9), torch.zeros(3).long(), 2**-24
    g = PlainGroups.stacked(rewards, ids)
    assert (g.centered == residue).all()
    close(g.scale(g.centered, 1e-6), [residue / (math.sqrt(1.5) * residue + 1e-6)] * 3, atol=1e-8)
    assert (group_advantages(rewards, ids) == 0).all()


def test_a_group_of_one_divides_by_a_float32_number():
    g = PlainGroups.stacked(float64([5.0, 1.0, 3.0]), torch.tensor([0, 1, 1]))
    # 1 + 1e-6 in float32 is 1 + 8·2⁻²³; in the group of two the deviation is √2.
    close(
        g.scale(g.centered, 1e-6),
        [5 / (1 + 8 * 2**-23), -1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)],
        atol=1e-15,
    )


def test_per_nonzero_by_hand():
    # Two of five rewards are not 0: α = 2.5; the group {1, 0, 0, 2} has mean 3/4.
    g = PlainGroups.stacked(float64([1.0, 0.0, 0.0, 2.0, 0.0]), torch.tensor([1, 1, 1, 1, 2]))
    close(g.per_nonzero(0.5), [5 * 0.25, -5 * 0.75, -5 * 0.75, 5 * 1.25, 0])
    # With three of five, α = 5/3 is 5 times a third in float32, each rounded.
    g = PlainGroups.stacked(float64([1.0, 1.0, 1.0, 0.0, 0.0]), torch.arange(5))
    alpha = (torch.tensor(1 / 3, dtype=torch.float32) * 5).item()
    assert alpha != 5 / 3
    close(g.per_nonzero(), [alpha, alpha, alpha, 0, 0], atol=1e-16)


def test_scores_and_tokens():
    rewards, mask = (
        float64([[1.0, 2.0, 4.0], [0.0, 8.0, 16.0]]),
        torch.tensor([[1, 0, 1], [0, 0, 1]]),
    )
    close(sequence_scores(rewards), [7, 24])
    tokens = over_tokens(torch.tensor([2.0, math.inf]), mask)
    assert tokens.tolist() == [[2, 0, 2], [0, 0, math.inf]]
    assert tokens.dtype == torch.float32
    assert over_tokens(torch.ones(2), mask.double()).dtype == torch.float64


def test_whiten_with_its_small_constants():
    x, mask = float64([[1.0, 2.0, 100.0], [6.0, 7.0, 3.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    # {1, 2, 6, 3} with count_eps = 1: the mean is 12/5 = 2.4 and the squares 1.96 + 0.16 + 12.96 +
    # 0.36 = 15.44, so the variance is 15.44/5·4/3, to which eps is added. Masked tokens are
    # measured from 2.4 too.
    scale = (15.44 / 5 * 4 / 3 + 0.2) ** -0.5
    out = plain_whiten(x, mask.double(), eps=0.2, count_eps=1.0)
    close(
        out,
        [[-1.4 * scale, -0.4 * scale, 97.6 * scale], [3.6 * scale, 4.6 * scale, 0.6 * scale]],
        atol=1e-13,
    )
    exact = whiten(x, mask)
    close(
        torch.where(mask.bool(), plain_whiten(x, mask.double(), count_eps=0.0), 0),
        exact,
        atol=1e-14,
    )
    # An integer mask has a float32 count: n + 1e-8 is n, and 4/3 is rounded.
    bessel = torch.tensor(4 / 3, dtype=torch.float32).item()
    close(plain_whiten(x, mask)[0, 0], -2 * (14 / 4 * bessel + 1e-8) ** -0.5, atol=1e-15)


@walked("count", [0, 1])
def test_whiten_refuses_values_without_variance(count):
    with pytest.raises(InputError, match=f"two valid tokens, got {count}"):
        plain_whiten(torch.ones(2, 3), torch.arange(6).view(2, 3) < count)


def test_gae_by_hand_at_masked_tokens_too():
    rewards, values, mask = (
        float64([[1.0, 2.0, 3.0, 9.0]]),
        float64([[0.5, 1.0, 1.5, 7.0]]),
        torch.tensor([[1, 0, 1, 0]]),
    )
    out = plain_gae(rewards, values, mask, 0.9, 0.5)
    # δ₃ = 3 − 1.5 = 1.5; the second token is skipped:
    # δ₁ = 1 + 0.9·1.5 − 0.5 = 1.85, A₁ = 1.85 + 0.45·1.5 = 2.525.
    # A masked token carries the next valid one's, and adds its own value for its return.
    close(out.advantages, [[2.525, 1.5, 1.5, 0]])
    close(out.returns, [[3.025, 2.5, 3.0, 7.0]])


@walked(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.7)])
def test_gae_and_returns_are_the_exact_ones_at_valid_tokens(gamma, lam):
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 5, generator=g, dtype=torch.float64)
    plain, exact = (
        plain_gae(rewards, values, HOLES, gamma, lam),
        gae(rewards, values, HOLES, gamma, lam),
    )
    for a, b in zip(plain, exact, strict=True):
        close(torch.where(HOLES.bool(), a, 0), b, atol=1e-13)
    close(
        plain_returns(rewards, HOLES, gamma), discounted_returns(rewards, HOLES, gamma), atol=1e-13
    )


def test_returns_cut_at_holes_by_hand():
    rewards, mask = float64([[1.0, 5.0, 2.0, 4.0, 8.0]]), torch.tensor([[1, 0, 1, 1, 0]])
    # From the end, γ = 0.5: 8 (masked, passes nothing on), 4, 2 + 0.5·4 = 4,
    # 5 + 0.5·4 = 7 (masked, passes nothing on), 1.
    close(plain_returns(rewards, mask, 0.5, holes="cut"), [[1, 7, 4, 4, 8]])
    # Bridged: 4, 4, then 1 + 0.5·4 = 3.
    close(plain_returns(rewards, mask, 0.5), [[3, 0, 4, 4, 0]])


def test_reward_to_go_by_hand():
    rewards, mask = float64([[1.0, 5.0, 2.0, 4.0, math.nan]]), torch.tensor([[1, 0, 1, 1, 0]])
    go = reward_to_go(rewards, mask)
    close(go, [[7, 6, 6, 4, 0]])
    close(less_baseline(go, float64([2.0]), mask), [[5, 6, 4, 2, 0]])


def test_weighted_sum_has_float32_weights():
    parts = [float64([1.0, 2.0]), float64([10.0, 20.0])]
    close(combine_rewards(parts), [11, 22])
    tenth = torch.tensor(0.1, dtype=torch.float32).item()
    close(combine_rewards(parts, [2, 0.1]), [2 + 10 * tenth, 4 + 20 * tenth], atol=1e-15)
    with pytest.raises(InputError, match=r"one number per reward \(2\), got 3"):
        combine_rewards(parts, [1, 2, 3])


def test_no_rows():
    none, ids = torch.zeros(0), torch.zeros(0).long()
    for g in (PlainGroups.stacked(none, ids), PlainGroups.indexed(none, ids)):
        assert g.per_nonzero().shape == g.scale(g.centered, 1e-6).shape == (0,)


@walked(
    ("call", "message"),
    [
        (lambda: sequence_scores(torch.ones(3)), r"tensor \[B, T\]"),
        (lambda: sequence_scores(torch.ones(3, 2).long()), "floating-point"),
        (lambda: over_tokens(torch.ones(2), torch.full((2, 3), 0.5)), "only 0 and 1"),
        (lambda: PlainGroups.stacked(torch.ones(2), torch.tensor([1])), "give one id each"),
        (lambda: PlainGroups.indexed(torch.ones(2), [1, 2]), "tensor of integers"),
        (
            lambda: plain_gae(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 2), 1.0, 1.0),
            "mask has shape",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
