"""A teacher in the advantages, a KL in the advantages or rewards: hand numbers and layouts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch
from policyloss import advantage

BATCH = make_batch(seed=11, width=12)
PACK = BATCH.packed()
TRUE = torch.ones(1, 4, dtype=torch.bool)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def test_opd_by_hand() -> None:
    teacher, old = row(-1.0, -2.0, -0.5, -3.0), row(-1.5, -1.0, -0.5, -1.0)
    # t − old = 0.5, −1, 0, −2
    assert_same(advantage.opd(teacher, old), row(0.5, -1.0, 0.0, -2.0), 0)
    assert_same(advantage.opd(teacher, old, 0.1), row(0.05, -0.1, 0.0, -0.2))
    # 3 + 2·(t − old), for a base of one number per sequence and per token
    expected = row(4.0, 1.0, 3.0, -1.0)
    assert_same(advantage.opd(teacher, old, 2.0, torch.tensor([3.0])), expected, 0)
    assert_same(advantage.opd(teacher, old, 2.0, torch.full((1, 4), 3.0)), expected, 0)
    mask = torch.tensor([[True, False, True, True]])
    garbage = torch.where(mask, teacher, math.nan)
    assert_same(
        advantage.opd(garbage, old, 2.0, torch.tensor([3.0]), mask=mask), row(4.0, 0, 3.0, -1.0), 0
    )


def test_rlsd_by_hand() -> None:
    # d = ln 1.1, ln 2 (held at 1.25), ln 0.5 (held at 0.75), 0; weights 1 − 0.5 + 0.5·clip.
    old, d = row(-3.0, -3.0, -3.0, -3.0), row(1.1, 2.0, 0.5, 1.0).log()
    good = advantage.rlsd(old + d, old, torch.tensor([2.0]), 0.5, 0.25)
    assert_same(good, row(2.1, 2.25, 1.75, 2.0), 1e-15)
    # A bad sequence turns the exponents: 1/1.1 = 10/11, 1/2 (held at 0.75), 2 (held at 1.25), 1.
    bad = advantage.rlsd(old + d, old, torch.tensor([-2.0]), 0.5, 0.25)
    assert_same(bad, row(-21 / 11, -1.75, -2.25, -2.0), 1e-15)
    assert_same(advantage.rlsd(old + d, old, torch.tensor([2.0]), 0.0), row(2, 2, 2, 2), 0)
    assert_same(advantage.rlsd(old + d, old, torch.tensor([0.0])), row(0, 0, 0, 0), 0)


def test_prefix_weights_by_hand() -> None:
    # |A| = 1, 3, 0, 4: total 8, prefixes 0, 1, 4, 4; w = 1 + 0.5·(1 − prefix/8)
    a = row(1.0, -3.0, 0.0, 4.0)
    assert_same(advantage.prefix_weights(a, TRUE, 0.5), row(1.5, 1.4375, 1.25, 1.25), 1e-15)
    # The second token is masked: total 5, prefixes 0, –, 1, 1
    mask = torch.tensor([[True, False, True, True]])
    expected = row(1.5, 0.0, 1.4, 1.4)
    assert_same(advantage.prefix_weights(row(1, math.nan, 0, 4), mask, 0.5), expected, 1e-15)
    # No disagreement at all: every token counts 1 + γ
    assert_same(advantage.prefix_weights(row(0, 0, 0, 0), TRUE, 0.5), row(1.5, 1.5, 1.5, 1.5), 0)
    assert_same(advantage.prefix_weights(a, TRUE, 0.0), row(1, 1, 1, 1), 0)


def test_iw_opd_weighs_the_teachers_part_alone() -> None:
    teacher, old = row(-1.0, -4.0, -1.0, 0.0), row(-2.0, -1.0, -1.0, -4.0)
    # A = 1, −3, 0, 4 with the weights above: 1.5, −4.3125, 0, 5; plus a base of 10
    expected = row(11.5, 5.6875, 10.0, 15.0)
    actual = advantage.iw_opd(teacher, old, TRUE, 0.5, base=torch.tensor([10.0]))
    assert_same(actual, expected, 1e-14)
    # A coefficient changes the size of A, not the shares.
    doubled = advantage.iw_opd(teacher, old, TRUE, 0.5, coef=2.0, base=torch.tensor([10.0]))
    assert_same(doubled, 2 * expected - 10, 1e-14)


def test_centered_kl_by_hand() -> None:
    old, ref = row(-1.0, -1.0, -1.0, -1.0), row(-2.0, -1.5, -1.0, 9.0)
    mask = torch.tensor([[True, True, True, False]])
    # KL = 1, 0.5, 0 with mean 0.5; 2·(0.5 − KL) = −1, 0, 1; base 0.25
    actual = advantage.centered_kl(old, ref, mask, 2.0, torch.tensor([0.25]))
    assert_same(actual, row(-0.75, 0.25, 1.25, 0.0), 1e-15)
    assert abs(float(advantage.centered_kl(old, ref, mask, 2.0).sum())) < 1e-15


@walked(
    ("estimator", "penalties"),
    [
        ("k1", (0.5, -0.5)),
        ("abs", (0.5, 0.5)),
        ("k2", (0.125, 0.125)),
        ("k3", (math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5)),
    ],
)
def test_kl_in_reward_by_hand(estimator: str, penalties: tuple[float, float]) -> None:
    old, ref, mask = row(-1.0, -1.0, 7.0), row(-1.5, -0.5, 7.0), torch.tensor([[1, 1, 0]])
    # The reward 2 belongs to the last valid token; d = ref − old = −0.5, 0.5; coef 0.2
    expected = row(-0.2 * penalties[0], 2 - 0.2 * penalties[1], 0.0)
    actual = advantage.kl_in_reward(torch.tensor([2.0]), old, ref, mask, 0.2, estimator=estimator)
    assert_same(actual, expected, 1e-15)
    on_tokens = advantage.kl_in_reward(row(0.0, 2.0, 5.0), old, ref, mask, 0.2, estimator=estimator)
    assert_same(on_tokens, expected, 1e-15)


CALLS: dict[str, Any] = {
    "opd": lambda b, **k: advantage.opd(
        b.teacher_logp, b.old_logp, 0.7, b.kwargs["advantages"], mask=b.mask, **k
    ),
    "iw_opd": lambda b, **k: advantage.iw_opd(
        b.teacher_logp, b.rollout_logp, b.mask, 0.8, 0.7, b.kwargs["advantages"], **k
    ),
    "rlsd": lambda b, **k: advantage.rlsd(
        b.teacher_logp, b.old_logp, b.kwargs["advantages"], mask=b.mask, **k
    ),
    "centered_kl": lambda b, **k: advantage.centered_kl(
        b.old_logp, b.ref_logp, b.mask, 0.7, b.kwargs["advantages"], **k
    ),
    "kl_in_reward": lambda b, **k: advantage.kl_in_reward(
        torch.linspace(-1, 2, len(b.lengths), dtype=torch.float64)[:, None],
        b.old_logp,
        b.ref_logp,
        b.mask,
        0.7,
        estimator="k3",
        **k,
    ),
}


@walked("name", CALLS)
def test_packed_equals_padded_and_padding_is_ignored(name: str) -> None:
    padded = CALLS[name](BATCH)
    assert padded.abs().max() > 0.1
    assert not padded[~BATCH.mask].any()
    packed = PACK.as_rows(CALLS[name](PACK, cu_seqlens=PACK.cu_seqlens))
    assert_same(packed, padded, 1e-14)
    poisoned = BATCH.map(lambda x: torch.where(BATCH.mask, x, math.nan))
    assert_same(CALLS[name](poisoned), padded, 0)
    assert not CALLS[name](BATCH.map(lambda x: x.requires_grad_())).requires_grad


def test_iw_opd_is_the_published_loop() -> None:
    """A loop over the tokens of each sequence, with the sums as the paper writes them."""
    expected = torch.zeros_like(BATCH.logp)
    gap = (BATCH.teacher_logp - BATCH.rollout_logp).tolist()
    for i, valid in enumerate(BATCH.mask.tolist()):
        places = [t for t, counts in enumerate(valid) if counts]
        total, prefix = sum(abs(gap[i][t]) for t in places), 0.0
        for t in places:
            expected[i, t] = (1 + 0.8 * (1 - prefix / total)) * gap[i][t]
            prefix += abs(gap[i][t])
    actual = advantage.iw_opd(BATCH.teacher_logp, BATCH.rollout_logp, BATCH.mask, 0.8)
    assert_same(actual, expected, 1e-14)


def test_the_gradient_lowers_the_kl_to_the_teacher() -> None:
    """The expected policy gradient of the OPD advantage is the gradient of KL(student‖teacher)."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=g, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    student = logits.log_softmax(0)
    kl = (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    # Each of the six tokens as a sequence of its own, weighted by how often it is sampled.
    a = advantage.opd(teacher[:, None], student.detach()[:, None])
    spec = pl.LossSpec(pl.TokenRatio(), pl.Unbounded("ratio"), aggregate=pl.TokenSum())
    mask = torch.ones(6, 1)
    weighted = a * student.detach().exp()[:, None]
    out = pl.policy_loss(spec, student[:, None], student.detach()[:, None], weighted, mask)
    (actual,) = torch.autograd.grad(out.loss, logits)
    assert_same(actual, expected, 1e-14)


@walked(
    ("call", "words"),
    [
        (lambda x: advantage.opd(x, x[:1]), ["teacher_logp has shape (2, 4)", "(1, 4)"]),
        (lambda x: advantage.opd(x, x, float("nan")), ["coef must be finite"]),
        (lambda x: advantage.opd(x, x, 1.0, torch.zeros(3)), ["base has shape (3,)"]),
        (lambda x: advantage.opd(x.long(), x), ["teacher_logp must be"]),
        (lambda x: advantage.rlsd(x, x, x, 2.0), ["coef must be <= 1"]),
        (lambda x: advantage.rlsd(x, x, x, 1.0, 1.0), ["eps must be < 1"]),
        (lambda x: advantage.iw_opd(x, x, x != 0, -1.0), ["gamma must be >= 0"]),
        (lambda x: advantage.centered_kl(x, x, x[:1] != 0, 1.0), ["mask has shape (1, 4)"]),
        (lambda x: advantage.kl_in_reward(x, x, x, x != 0, -1.0), ["coef must be >= 0"]),
        (
            lambda x: advantage.kl_in_reward(x, x, x, x != 0, 1.0, estimator="k4"),
            ["estimator", "k4"],
        ),
        (lambda x: advantage.kl_in_reward(x[:, :3], x, x, x != 0, 1.0), ["rewards have shape"]),
    ],
)
def test_errors_name_the_argument(call: Any, words: list[str]) -> None:
    with pytest.raises(pl.InputError) as error:
        call(torch.zeros(2, 4))
    assert all(word in str(error.value) for word in words), str(error.value)
