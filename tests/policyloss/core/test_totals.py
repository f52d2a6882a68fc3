"""Counting a step: the counts of `Totals`, their sums, and their errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import assert_same, make_batch, run

# Rows with 3, 1 and no valid tokens; the last row is no sequence.
MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
IDS = torch.tensor([8, 5, 8])


def numbers(totals: pl.Totals) -> tuple[int, int, int]:
    return int(totals.tokens), int(totals.sequences), totals.dp_size


def groups(totals: pl.Totals) -> dict[int, float]:
    return dict(zip(totals.groups.ids.tolist(), totals.groups.tokens.tolist(), strict=True))


def test_count():
    assert numbers(pl.Totals.count(MASK)) == (4, 2, 1)
    assert numbers(pl.Totals.count(MASK.float())) == (4, 2, 1)
    assert numbers(pl.Totals.count(MASK, dp_size=3)) == (4, 2, 3)
    assert numbers(pl.Totals.count(torch.zeros(2, 3, dtype=torch.bool))) == (0, 0, 1)
    assert pl.Totals.count(MASK).groups is None


def test_count_packed():
    # The same tokens end to end, cut as rows of 4, 4 and 4; then with an empty sequence between.
    flat = MASK.reshape(-1)
    assert numbers(pl.Totals.count(flat, cu_seqlens=torch.tensor([0, 4, 8, 12]))) == (4, 2, 1)
    assert numbers(pl.Totals.count(flat, cu_seqlens=torch.tensor([0, 4, 4, 12]))) == (4, 2, 1)
    # 1, 1 and 2 valid tokens.
    assert numbers(pl.Totals.count(flat, cu_seqlens=torch.tensor([0, 1, 2, 12]))) == (
        4,
        3,
        1,
    )


def test_count_groups():
    # Group 8 has rows of 3 and 0 valid tokens, group 5 one of 1.
    assert groups(pl.Totals.count(MASK, group_ids=IDS)) == {5: 1, 8: 3}
    assert groups(pl.Totals.count(MASK, group_ids=torch.tensor([-2, -2, 7]))) == {-2: 4, 7: 0}


def test_count_is_exact_beyond_float32():
    # 2²⁴ + 1 tokens in two rows: a float32 sum of the rows would lose the last one.
    mask = torch.ones(2, 2**23 + 1, dtype=torch.bool)
    mask[0, 0] = False
    assert int(pl.Totals.count(mask).tokens) == 2**24 + 1


def test_add():
    a, b = pl.Totals.count(MASK), pl.Totals.count(torch.ones(2, 2, dtype=torch.bool))
    assert numbers(a + b) == (8, 4, 1)
    assert numbers(pl.Totals(3, 2, dp_size=2) + pl.Totals(4, 1, dp_size=2)) == (7, 3, 2)
    with pytest.raises(TypeError):
        a + 1


def test_add_groups():
    a = pl.Totals.count(MASK, group_ids=IDS)
    b = pl.Totals.count(torch.ones(2, 2, dtype=torch.bool), group_ids=torch.tensor([5, 6]))
    assert groups(a + b) == {5: 3, 6: 2, 8: 3}
    assert (pl.Totals(1, 1, groups=2) + pl.Totals(1, 1, groups=3)).groups == 5
    assert (a + pl.Totals(1, 1)).groups is None, (
        "a part whose groups are unknown makes the sum's unknown"
    )


def test_totals_that_cannot_be_added():
    a = pl.Totals.count(MASK, group_ids=IDS)
    with pytest.raises(pl.InputError, match="dp_size"):
        a + replace(a, dp_size=2)
    with pytest.raises(pl.InputError, match="number of groups"):
        a + pl.Totals(1, 1, groups=3)
    batch = make_batch()
    measured = pl.measure(pl.preset("clip_cov"), **batch.kwargs)
    with pytest.raises(pl.InputError, match="do not add up"):
        measured + measured


BAD = {
    "negative": (lambda: pl.Totals(-1, 1), ["Totals.tokens", "-1"]),
    "text": (lambda: pl.Totals("all", 1), ["Totals.tokens", "'all'"]),
    "many sequences": (lambda: pl.Totals(1, torch.ones(3)), ["Totals.sequences", "(3,)"]),
    "no ranks": (lambda: pl.Totals(1, 1, dp_size=0), ["Totals.dp_size", "0"]),
    "mask of halves": (lambda: pl.Totals.count(MASK * 0.5), ["mask", "0 and 1"]),
    "flat mask": (lambda: pl.Totals.count(MASK.reshape(-1)), ["[B, T]", "cu_seqlens"]),
    "ids per token": (
        lambda: pl.Totals.count(MASK, group_ids=torch.zeros(3, 4)),
        ["group_ids", "(3, 4)", "(3,)"],
    ),
    "ids too few": (
        lambda: pl.Totals.count(MASK, group_ids=torch.zeros(2)),
        ["group_ids", "(2,)", "(3,)"],
    ),
    "offsets": (
        lambda: pl.Totals.count(MASK.reshape(-1), cu_seqlens=torch.tensor([0, 11])),
        ["cu_seqlens", "12"],
    ),
}


@walked("name", BAD)
def test_refused(name):
    make, words = BAD[name]
    with pytest.raises(pl.InputError) as error:
        make()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"the message does not say {missing}: {error.value}"


def test_counted_totals_change_nothing_for_a_whole_batch():
    batch = make_batch(seed=9)
    for aggregate in (
        pl.TokenMean(),
        pl.SeqMeanTokenMean(),
        pl.SeqMeanTokenSum(),
        pl.SeqMeanTokenSumNorm(7),
        pl.PromptMean(),
    ):
        spec = pl.preset("grpo").replace(aggregate=aggregate)
        totals = pl.Totals.count(batch.mask, group_ids=batch.group_ids)
        given, alone, local = (
            run(spec, batch, totals=totals),
            run(spec, batch),
            run(spec, batch, totals="local"),
        )
        assert_same(given.loss, alone.loss)
        assert_same(given.dlogp, alone.dlogp)
        assert_same(local.loss, alone.loss, 0)


def test_plain_numbers_and_tensors_are_the_same_totals():
    batch = make_batch(seed=9)
    for dtype in (torch.int32, torch.int64, torch.float64):
        tensors = pl.Totals(torch.tensor(40, dtype=dtype), torch.tensor(8, dtype=dtype))
        for aggregate in (pl.TokenMean(), pl.SeqMeanTokenMean()):
            spec = pl.preset("ppo").replace(aggregate=aggregate)
            assert torch.equal(
                run(spec, batch, totals=tensors).loss,
                run(spec, batch, totals=pl.Totals(40, 8)).loss,
            )


GLOBAL = (
    pl.TokenMean(),
    pl.SeqMeanTokenMean(),
    pl.SeqMeanTokenSum(),
    pl.TokenSum(),
    pl.PromptMean(),
)


@walked("aggregate", GLOBAL, ids=str)
def test_averaging_ranks_give_the_gradient_of_the_batch(aggregate):
    """Two ranks with uneven shares, dp_size=2: the mean of their gradients is the gradient
    of the whole batch.
    """
    batch = make_batch(seed=12)
    spec = pl.preset("grpo").replace(aggregate=aggregate)
    totals = replace(pl.Totals.count(batch.mask, group_ids=batch.group_ids), dp_size=2)
    shares = [run(spec, batch.rows(rows), totals=totals) for rows in ([0, 1, 2, 3, 4], [5, 6])]
    whole = run(spec, batch)
    assert_same(sum(s.loss for s in shares) / 2, whole.loss)
    assert_same(torch.cat([s.dlogp for s in shares]) / 2, whole.dlogp)


def test_measure_counts_the_survivors():
    batch = make_batch(seed=12)
    spec = pl.LossSpec(correction=pl.Band(0.9, 1.1), rejected="renormalise")
    weight = (batch.old_logp - batch.rollout_logp).exp()
    kept = batch.mask & (weight >= 0.9) & (weight <= 1.1)
    totals = pl.measure(spec, **batch.kwargs)
    assert numbers(totals)[:2] == (int(kept.sum()), int(kept.any(-1).sum()))
    dropped = pl.measure(spec.replace(rejected="drop_sequence"), **batch.kwargs)
    whole = kept.sum(-1) == batch.mask.sum(-1)
    assert numbers(dropped)[:2] == (
        int((batch.mask & whole[:, None]).sum()),
        int((batch.mask.any(-1) & whole).sum()),
    )
    assert (
        numbers(pl.measure(spec.replace(rejected="keep"), **batch.kwargs))[:2]
        == numbers(pl.Totals.count(batch.mask))[:2]
    )


def test_measure_does_not_track_gradients():
    batch = make_batch(seed=12)
    batch = replace(batch, logp=batch.logp.requires_grad_())
    totals = pl.measure(pl.preset("kl_cov"), **batch.kwargs)
    assert totals.statistics
    assert not any(x.requires_grad for x in totals.statistics.values())
