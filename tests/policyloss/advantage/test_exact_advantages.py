"""Within `exact()` advantages have the same bits in any order, padded anyhow or packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss import advantage

S, T = 17, 61
G = torch.Generator().manual_seed(5)
LENGTHS = torch.randint(1, T + 1, (S,), generator=G)
INSIDE = torch.arange(T) < LENGTHS[:, None]
MASK = INSIDE & (torch.rand(S, T, generator=G) < 0.8)
CU_SEQLENS = torch.nn.functional.pad(LENGTHS.cumsum(0), (1, 0))
GROUPS = torch.randint(0, 4, (S,), generator=G)
ORDER = torch.randperm(S, generator=G)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (3 * torch.randn(*shape, generator=G, dtype=torch.float64) + 1).to(dtype)


def scans(dtype: torch.dtype) -> dict[str, Callable[..., Tensor]]:
    """Functions of two tensors `[S, T]`, a mask, and where sequences end."""
    last = noise(S, dtype=dtype)
    return {
        "gae": lambda r, v, m, cu=None, rows=slice(None): (
            pl.gae(r, v, m, 0.99, 0.95, cu_seqlens=cu, last_values=last[rows]).advantages
        ),
        "discounted_returns": lambda r, v, m, cu=None, rows=slice(None): (
            advantage.discounted_returns(r, m, 0.97, cu_seqlens=cu)
        ),
        "reinforce_pp": lambda r, v, m, cu=None, rows=slice(None): advantage.reinforce_pp(
            r, m, 0.97, cu_seqlens=cu, group="local"
        ),
    }


@walked("dtype", DTYPES, ids=str)
@walked("name", scans(torch.float32))
def test_a_scan_has_the_same_bits_in_every_layout(name, dtype):
    """Packed, in another order, with more padding, padded on the left, and alone."""
    scan = scans(dtype)[name]
    r, v = noise(S, T, dtype=dtype), noise(S, T, dtype=dtype)
    with pl.exact():
        expected = scan(r, v, MASK)
        packed = scan(r[INSIDE], v[INSIDE], MASK[INSIDE], CU_SEQLENS)
        shuffled = scan(r[ORDER], v[ORDER], MASK[ORDER], None, ORDER)
        wide = [torch.nn.functional.pad(x, (13, 5)) for x in (r, v, MASK)]
        padded = scan(*wide)[:, 13 : 13 + T]
        alone = [scan(r[[i]], v[[i]], MASK[[i]], None, [i]) for i in range(S)]
    assert torch.equal(packed, expected[INSIDE])
    assert torch.equal(shuffled, expected[ORDER])
    assert torch.equal(padded, expected)
    if name != "reinforce_pp":  # which is whitened over all tokens
        assert torch.equal(torch.cat(alone), expected)
    torch.testing.assert_close(scan(r, v, MASK), expected, rtol=1e-5, atol=1e-5)


ESTIMATORS = {
    "whiten": lambda r, i: pl.whiten(r[i], MASK[i]),
    "batch_std": lambda r, i: pl.group_advantages(r[i, 0], GROUPS[i], scale="batch_std"),
    "gdpo": lambda r, i: advantage.gdpo(r[i, :2], GROUPS[i]),
    "reinforce_pp_baseline": lambda r, i: advantage.reinforce_pp_baseline(
        r[i, 0], GROUPS[i], LENGTHS[i], group="local"
    ),
    "grpo": lambda r, i: advantage.grpo(r[i, 0], GROUPS[i]),
    "mad": lambda r, i: pl.group_advantages(r[i, 0], GROUPS[i], scale="mad"),
    "asymre": lambda r, i: advantage.asymre(r[i, 0], GROUPS[i]),
    "flash_reinforce": lambda r, i: advantage.flash_reinforce(r[i, 0]),
    "prpo": lambda r, i: advantage.prpo(r[i, 0]),
    "hierarchical_grpo": lambda r, i: advantage.hierarchical_grpo(
        r[i, 0], GROUPS[i] // 2, GROUPS[i], i % 2, torch.tensor([1])
    ),
    "grpo_loo": lambda r, i: advantage.grpo_loo(r[i, 0], GROUPS[i]),
    "opo": lambda r, i: advantage.opo(r[i, 0], GROUPS[i], LENGTHS[i]),
}


@walked("size", [1.0, 1e-12], ids=str)
@walked("name", ESTIMATORS)
def test_statistics_of_a_batch_do_not_depend_on_its_order(name, size):
    """In float64, where a plain sum shows its order; small numbers keep their digits."""
    rewards = noise(S, T, dtype=torch.float64) * size
    estimate = ESTIMATORS[name]
    everyone = torch.arange(S)
    with pl.exact():
        expected = estimate(rewards, everyone)
        for seed in range(5):
            order = torch.randperm(S, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(estimate(rewards, order), expected[order])
    torch.testing.assert_close(estimate(rewards, everyone), expected, rtol=1e-9, atol=1e-12)


def test_a_sequence_without_tokens_and_a_batch_without_sequences():
    with pl.exact():
        empty = advantage.discounted_returns(torch.ones(2, 3), torch.zeros(2, 3).bool(), 0.9)
        nothing = advantage.discounted_returns(torch.ones(0, 3), torch.zeros(0, 3).bool(), 0.9)
    assert empty.tolist() == [[0.0] * 3] * 2
    assert nothing.shape == (0, 3)


def test_a_discounted_return_by_hand():
    """Rewards 1, 2, 4 at valid tokens, γ = ½: 4; 2 + 2 = 4; 1 + 2 = 3. A NaN stays at home."""
    rewards = torch.tensor([[1.0, 9.0, 2.0, 4.0], [1.0, float("nan"), 1.0, 1.0]])
    mask = torch.tensor([[True, False, True, True], [True] * 4])
    with pl.exact():
        returns = advantage.discounted_returns(rewards, mask, 0.5)
    assert returns[0].tolist() == [3.0, 0.0, 4.0, 4.0]
    assert bool(returns[1].isnan().all())
