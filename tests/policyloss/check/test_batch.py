"""The batch that `check_loss` and the tests share: what its cuts and its packing give, by hand."""

from __future__ import annotations

import torch

import cases
from policyloss.check.batch import Batch


def small() -> Batch:
    """Three rows of width 3 and lengths 2, 0, 3. Token j of row i is 10·i + j in every tensor."""
    x = torch.arange(3) + 10.0 * torch.arange(3)[:, None]
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1]], dtype=torch.bool)
    return Batch(*[x] * 9, mask, torch.tensor([7, 8, 9]), torch.tensor([2, 0, 3]), 3)


def test_the_tests_and_check_loss_have_one_class() -> None:
    assert cases.Batch is Batch
    assert type(cases.make_batch()) is type(Batch.random()) is Batch


def test_packing_keeps_tokens_that_are_not_trained_on_and_drops_padding() -> None:
    packed = small().packed()
    assert packed.logp.tolist() == [0, 1, 20, 21, 22]
    assert packed.mask.tolist() == [True, False, False, True, True]
    assert packed.cu_seqlens is not None
    assert packed.cu_seqlens.tolist() == [0, 2, 2, 5]
    assert packed.as_rows(packed.old_logp + 1).tolist() == [[1, 2, 0], [0, 0, 0], [21, 22, 23]]
    assert torch.equal(small().as_rows(small().logp), small().logp)


def test_rows_come_in_the_requested_order_with_all_their_tensors() -> None:
    for index in ([2, 0], torch.tensor([2, 0])):
        part = small().rows(index)
        assert part.advantages.tolist() == [[20, 21, 22], [0, 1, 2]]
        assert (part.lengths.tolist(), part.group_ids.tolist()) == ([3, 2], [9, 7])
        assert part.inside.tolist() == [[True, True, True], [True, True, False]]


def test_map_changes_named_tensors_and_by_default_all_numbers_of_tokens() -> None:
    changed = small().map(lambda x: -x)
    assert all(torch.equal(getattr(changed, name), -small().logp) for name in cases.TOKEN_TENSORS)
    assert torch.equal(changed.mask, small().mask)
    one = small().map(lambda x: -x, "entropy")
    assert torch.equal(one.entropy, -small().entropy)
    assert torch.equal(one.logp, small().logp)


def test_the_lengths_of_a_random_batch_end_at_its_last_token_to_train_on() -> None:
    batch = Batch.random(seed=4)
    last = [
        max((j + 1 for j, valid in enumerate(row) if valid), default=0)
        for row in batch.mask.tolist()
    ]
    assert batch.lengths.tolist() == last
    assert last[1] == 0
    assert int(batch.packed().mask.sum()) == int(batch.mask.sum())
