"""Credit by turn: hand-computed numbers, every layout, and an enumeration of all groups of a
process in which the policy decides when to stop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import stopping
import torch
from conformance.turns import RECORDED as RECORDED_TURNS
from conformance.turns import evaluate
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import assert_same

A = pl.advantage
ROOT = Path(__file__).parents[3]
F64: Any = {"dtype": torch.float64}
# Two trajectories of three and two turns; the second one's ids leave a number out. A reward at a
# token of the environment (99) counts for nothing.
IDS = torch.tensor([[-1, 0, 0, -1, 1, 1, -1, 2], [-1, 0, -1, 3, 3, -1, -1, -1]])
REWARDS = torch.zeros(2, 8, **F64)
REWARDS[0, 2], REWARDS[0, 3], REWARDS[0, 7], REWARDS[1, 4] = 1, 99, 4, 3
VALUES = torch.arange(16.0, **F64).view(2, 8)
GROUP = torch.tensor([5, 5])


def spread(first: list[float], second: list[float]) -> Tensor:
    """One number per turn, at the tokens of the turn."""
    (a, b, c), (d, e) = first, second
    return torch.tensor([[0, a, a, 0, b, b, 0, c], [0, d, 0, e, e, 0, 0, 0]], **F64)


def test_returns_by_hand() -> None:
    # Rewards of the turns: 1, 0, 4 and 0, 3.
    expected = spread([1 + 0.5 * (0.5 * 4), 0.5 * 4, 4], [0.5 * 3, 3])
    assert_same(A.turn_returns(REWARDS, IDS, 0.5), expected)
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    apart = A.turn_returns(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), zeros)
    assert apart.tolist() == [[3, 3], [7, 7]], "the same id in another sequence is another turn"
    per_sequence = A.turn_returns(torch.tensor([4.0, 3.0], **F64), IDS)
    assert_same(per_sequence, spread([4, 4, 4], [3, 3]), what="a reward of the last turn")


def test_gae_by_hand() -> None:
    """γ = 0.9, and λ = 0.5 in the first sequence, 0.8 in the second. The values at the first tokens
    of the turns are 1, 4, 7 and 9, 11.
    """
    lam = torch.tensor([0.5, 0.8], **F64)
    last = 4 - 7
    middle = 0 + 0.9 * 7 - 4 + 0.9 * 0.5 * last
    first = 1 + 0.9 * 4 - 1 + 0.9 * 0.5 * middle
    end = 3 - 11
    begin = 0 + 0.9 * 11 - 9 + 0.9 * 0.8 * end
    result = A.turn_gae(REWARDS, VALUES, IDS, 0.9, lam)
    assert_same(result.advantages, spread([first, middle, last], [begin, end]))
    assert_same(result.returns, spread([first + 1, middle + 4, last + 7], [begin + 9, end + 11]))
    bootstrapped = A.turn_gae(REWARDS, VALUES, IDS, 0.9, lam, last_values=torch.tensor([0.0, 2.0]))
    assert_same(bootstrapped.advantages[1, 3], torch.tensor(end + 0.9 * 2, **F64))


def test_turns_of_one_token_are_gae() -> None:
    mask = torch.rand(4, 9, generator=torch.Generator().manual_seed(0)) < 0.7
    ids = torch.where(mask, torch.arange(9), -1)
    rewards, values = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(1), **F64)
    expected = pl.gae(rewards, values, mask, 0.9, 0.7)
    for x, y in zip(A.turn_gae(rewards, values, ids, 0.9, 0.7), expected, strict=True):
        assert_same(x, y)


def test_leave_one_out_by_hand() -> None:
    # Returns 5, 4, 4 and 3, 3; nobody else has a third turn.
    assert_same(A.turn_loo(REWARDS, IDS, GROUP), spread([5 - 3, 4 - 3, 4], [3 - 5, 3 - 4]))


def test_mt_grpo_by_hand() -> None:
    """Of the turns before the last, the first has the rewards 1 and 0, the second only one."""
    outcomes = torch.tensor([1.0, 0.0], **F64)
    expected = spread([0.5 + 2 * 0.5, 0.5, 0.5], [-0.5 - 2 * 0.5, -0.5])
    assert_same(A.mt_grpo(REWARDS, outcomes, IDS, GROUP, 2.0, scale=None), expected)


def test_gigpo_by_hand() -> None:
    """Episodes: 5 and 3. The state 7 is met in turns with the returns 5, 4 and 3; 8 and 9 once."""
    states = torch.zeros_like(IDS)
    states[0, 1], states[0, 4], states[0, 7], states[1, 1], states[1, 3] = 7, 7, 8, 7, 9
    expected = spread([1 + 0.5 * 1, 1 + 0.5 * 0, 1], [-1 - 0.5 * 1, -1])
    assert_same(A.gigpo(REWARDS, IDS, states, GROUP, 1.0, 0.5), expected)


def test_lambda_by_length() -> None:
    lam = A.adaptive_lam(torch.tensor([10, 40, 1000]))
    assert_same(lam, torch.tensor([0.0, 0.5, 0.98]))
    values, mask = torch.randn(2, 50, generator=torch.Generator().manual_seed(2), **F64), None
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1, 40:] = False
    each = A.adaptive_lam(mask.sum(-1).double())
    result = pl.gae(values, values, mask, 0.9, each)
    for row in (0, 1):
        alone = pl.gae(values[row, None], values[row, None], mask[row, None], 0.9, float(each[row]))
        assert_same(result.advantages[row], alone.advantages[0])
    with pytest.raises(pl.InputError, match=r"lam has shape \(3,\); give one per sequence, \(2,\)"):
        pl.gae(values, values, mask, 0.9, torch.ones(3, **F64))


# Every estimator, as a function of rewards, values and ids of turns and states, and a layout.
EVERY = {
    "turn_gae": lambda r, v, i, s, o, g, **k: A.turn_gae(r, v, i, 0.9, 0.8, **k).advantages,
    "turn_returns": lambda r, v, i, s, o, g, **k: A.turn_returns(r, i, 0.9, **k),
    "turn_loo": lambda r, v, i, s, o, g, **k: A.turn_loo(r, i, g, 0.9, **k),
    "mt_grpo": lambda r, v, i, s, o, g, **k: A.mt_grpo(r, o, i, g, 0.5, **k),
    "gigpo": lambda r, v, i, s, o, g, **k: A.gigpo(r, i, s, g, 0.9, **k),
}


def batch(rows: int = 6, width: int = 9) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    ids = torch.randint(-1, 3, (rows, width), generator=g).sort(1, descending=True).values
    ids = torch.where(ids >= 0, 2 - ids, -1)  # rising ids, then the padding
    ids[:, 2] = -1  # a tool
    ids[3] = -1  # a row without a turn
    r, v = torch.randn(2, rows, width, generator=g, **F64)
    states = torch.randint(0, 2, (rows, width), generator=g)
    outcomes = torch.randn(rows, generator=g, **F64)
    groups = torch.tensor([4, 9, 4, 4, 9, 4])
    return {"r": r, "v": v, "i": ids, "s": states, "o": outcomes, "g": groups}


@walked("name", EVERY)
def test_padded_packed_and_permuted_are_the_same(name: str) -> None:
    data = batch()
    expected = EVERY[name](**data)
    assert expected.abs().sum() > 1
    valid = data["i"] >= 0
    assert (expected[~valid] == 0).all()
    poisoned = {k: torch.where(valid, x, torch.nan) for k, x in data.items() if k in "rv"}
    assert_same(EVERY[name](**{**data, **poisoned}), expected)
    order = torch.tensor([4, 0, 5, 3, 1, 2])
    assert_same(EVERY[name](**{k: x[order] for k, x in data.items()}), expected[order])
    cu_seqlens = torch.arange(0, 55, 9)
    flat = {k: x.reshape(-1) for k, x in data.items()}
    assert_same(EVERY[name](**flat, cu_seqlens=cu_seqlens).view(6, 9), expected)
    halves = [EVERY[name](**{k: x[j] for k, x in data.items()}) for j in ([0, 2, 3, 5], [1, 4])]
    joined = torch.empty_like(expected)
    joined[[0, 2, 3, 5]], joined[[1, 4]] = halves
    assert_same(joined, expected, what="whole groups apart")
    nothing = {**data, "i": torch.full_like(data["i"], -1)}
    assert (EVERY[name](**nothing) == 0).all()


def test_errors_name_the_argument() -> None:
    with pytest.raises(pl.InputError, match="turn_ids must be a tensor of integers"):
        A.turn_returns(REWARDS, IDS.double())
    with pytest.raises(pl.InputError, match=r"state_ids has shape \(2, 3\)"):
        A.gigpo(REWARDS, IDS, IDS[:, :3], GROUP)
    with pytest.raises(pl.InputError, match="group_ids must be a tensor of one integer per seq"):
        A.turn_loo(REWARDS, IDS, torch.tensor([1, 2, 3]))
    with pytest.raises(pl.InputError, match="gamma must be between 0 and 1"):
        A.turn_returns(REWARDS, IDS, 2.0)


# --- Numbers of AReaL and Trinity-RFT, recorded by `python -m conformance.turns` ------------------

RECORDED = json.loads(RECORDED_TURNS.read_text(encoding="utf-8"))


@walked("trainer", ["areal", "trinity"])
def test_the_numbers_are_those_of_the_trainers(trainer: str) -> None:
    """Both compute in float32, and Trinity without a spread divides by 1 + 1e-6."""
    assert len(RECORDED[trainer]) == 4
    for case in RECORDED[trainer]:
        for found, expected in evaluate(trainer, case):
            assert_same(found, expected, 1e-5)


# --- The policy decides when to stop --------------------------------------------------------------


@walked("name", ["turn_loo", "rloo"])
def test_the_expected_estimate_is_the_gradient(name: str) -> None:
    estimate, gradient = stopping.expected_gradient(getattr(stopping, name))
    assert gradient.norm() > 0.1
    assert (estimate - gradient).abs().max() < 1e-12


def test_the_bias_of_mt_grpo_is_the_number_on_the_page() -> None:
    bias = stopping.relative_bias(stopping.mt_grpo)
    page = (ROOT / "docs" / "turns.md").read_text(encoding="utf-8")
    assert f"**{100 * bias:.1f} %**" in page
    assert stopping.relative_bias(stopping.turn_loo) < 1e-12


def test_mt_grpo_has_no_bias_where_nobody_can_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process, in which every trajectory has all turns."""
    full = [t for t in stopping.trajectories() if len(t.actions) == stopping.TURNS]
    monkeypatch.setattr(stopping, "trajectories", lambda: iter(full))
    logits = stopping.logits()
    logits[: stopping.TURNS - 1, :, stopping.STOP] = -torch.inf
    monkeypatch.setattr(stopping, "logits", lambda: logits.clone())
    assert stopping.relative_bias(stopping.mt_grpo) < 1e-12


def test_the_leave_one_out_baseline_lowers_the_variance() -> None:
    assert stopping.variance(stopping.turn_loo) < 0.9 * stopping.variance(stopping.rloo)


def test_a_divergence_of_whole_distributions_is_no_advantage() -> None:
    """Its expected gradient as an advantage is 0, over all tokens that can be sampled; as a loss it
    has one.
    """
    logits = torch.randn(7, generator=torch.Generator().manual_seed(4), **F64).requires_grad_()
    teacher = torch.randn(7, generator=torch.Generator().manual_seed(5), **F64).log_softmax(0)
    logp = logits.log_softmax(0)
    top = teacher.topk(3).indices
    divergence = (logp.exp() * (logp - teacher))[top].sum()
    sampled = (logp.detach().exp() * logp * -divergence.detach()).sum()  # E[log π(a)·A]
    (as_advantage,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (as_loss,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    assert as_advantage.abs().max() < 1e-15 < 0.01 < as_loss.abs().max()
    log_ratio = (teacher - logp).detach()  # of the sampled token: `advantage.opd`
    whole = (logp.exp() * (logp - teacher)).sum()
    (by_token,) = torch.autograd.grad(
        (logp.detach().exp() * logp * log_ratio).sum(), logits, retain_graph=True
    )
    assert_same(by_token, -torch.autograd.grad(whole, logits)[0])
