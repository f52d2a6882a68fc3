"""Lengths, cut completions and tokens of high entropy: hand numbers, layouts, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch
from policyloss import advantage

BATCH = make_batch(seed=3, width=9)
PACK = BATCH.packed()


def test_soft_overlong_by_hand() -> None:
    # Of 100 tokens the last 20 are punished: 90 tokens are half of the way.
    lengths = torch.tensor([0, 80, 85, 90, 100, 120])
    expected = torch.tensor([0, 0, -0.25, -0.5, -1, -1])
    assert_same(advantage.soft_overlong(lengths, 100, 20), expected, 0)
    assert_same(advantage.soft_overlong(lengths, 100, 20, 0.5), expected / 2, 0)


def test_a_cut_sequence_leaves_the_mask_and_the_denominator() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]])
    kept = advantage.mask_truncated(mask, torch.tensor([False, True, False]))
    assert kept.tolist() == [[True, True, False], [False] * 3, [False, True, True]]
    # Four of seven tokens are left: on policy each has the gradient −A/4.
    assert pl.Totals.count(kept).tokens == 4
    logp = torch.zeros(3, 3, requires_grad=True)
    pl.policy_loss("ppo", logp, logp.detach(), torch.ones(3), kept).loss.backward()
    assert_same(logp.grad, kept / -4.0, 0)


def test_a_pack_is_masked_as_rows_are() -> None:
    truncated = torch.arange(len(BATCH.lengths)) % 2 == 0
    padded = advantage.mask_truncated(BATCH.mask, truncated)
    packed = advantage.mask_truncated(PACK.mask, truncated, cu_seqlens=PACK.cu_seqlens)
    assert 0 < padded.sum() < BATCH.mask.sum()
    assert torch.equal(PACK.as_rows(packed), padded)


def test_top_entropy_by_hand() -> None:
    entropy = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 9.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # Of 0, 1, 2, 3, 4 the 0.6 quantile lies at place 0.6·4 = 2.4: 2.4; the 0.5 quantile is 2.
    kept = advantage.top_entropy_mask(entropy, mask, 0.4)
    assert kept.tolist() == [[False] * 3, [True, True, False]]
    kept = advantage.top_entropy_mask(entropy, mask, 0.5)
    assert kept.tolist() == [[False, False, True], [True, True, False]]
    assert torch.equal(advantage.top_entropy_mask(entropy, mask, 1.0), mask.bool())
    assert not advantage.top_entropy_mask(entropy, 0 * mask).any()


@walked("share", [0.01, 0.2, 0.37, 0.9])
def test_the_threshold_is_the_quantile(share: float) -> None:
    entropy = torch.rand(6, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = entropy < 0.8
    kept = advantage.top_entropy_mask(entropy, mask, share)
    assert torch.equal(kept, mask & (entropy >= entropy[mask].quantile(1 - share)))


@walked(
    ("call", "words"),
    [
        (lambda x: advantage.soft_overlong([1], 2, 1), "lengths must be"),
        (lambda x: advantage.soft_overlong(x, 4, 0), "buffer must be > 0"),
        (lambda x: advantage.soft_overlong(x, 4, 5), "limit must be >= 5"),
        (lambda x: advantage.soft_overlong(x, 5, 4, -1.0), "coef must be >= 0"),
        (lambda x: advantage.mask_truncated(x != 0, [True]), "truncated must be"),
        (lambda x: advantage.mask_truncated(x != 0, x != 0), "one flag per sequence, (2,)"),
        (lambda x: advantage.mask_truncated(x[0] != 0, x[0] != 0), "pass cu_seqlens"),
        (lambda x: advantage.top_entropy_mask(x, x != 0, 0.0), "share must be > 0"),
        (lambda x: advantage.top_entropy_mask(x, x[:1] != 0), "mask has shape (1, 4)"),
    ],
)
def test_errors_name_the_argument(call: Any, words: str) -> None:
    with pytest.raises(pl.InputError) as error:
        call(torch.zeros(2, 4))
    assert words in str(error.value), str(error.value)
