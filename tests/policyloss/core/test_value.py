"""The value loss: numbers by hand, clip fraction, explained variance against numpy, layouts,
masks and refusals.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isnan, nan

import numpy as np
import pytest
import torch
from walk import walked

import policyloss as pl
from cases import assert_same
from policyloss.value import huber_error


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


def loss_and_grad(values, returns, old_values, mask=None, *args, **kwargs):
    leaf = values.clone().requires_grad_()
    mask = torch.ones_like(leaf, dtype=torch.bool) if mask is None else mask
    out = pl.value_loss(leaf, returns, old_values, mask, *args, **kwargs)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return out.loss.item(), grad, out.metrics.compute()


# value, return, old value, loss, gradient, does the clip bind; clip = 0.2.
# The clipped value is old + clamp(v − old, ±0.2).
BY_HAND = [
    (1.0, 0.0, 1.0, 0.5, 1.0, False),  # nothing moved: ½·1², slope v − R
    (1.1, 0.0, 1.0, 0.605, 1.1, False),  # inside: ½·1.1²
    (2.0, 0.0, 1.0, 2.0, 2.0, False),  # moved away from R: ½·2² = 2 > ½·1.2²
    (
        0.5,
        0.0,
        1.0,
        0.32,
        0.0,
        True,
    ),  # moved to R too fast: ½·0.8² = 0.32 > ½·0.5² = 0.125; a constant
    (
        1.0,
        3.0,
        2.0,
        2.0,
        -2.0,
        False,
    ),  # moved down, away from R = 3: ½·2² = 2 > ½·(1.8 − 3)² = 0.72
    (2.0, 3.0, 1.0, 1.62, 0.0, True),  # moved up to R too fast: ½·(1.2 − 3)² = 1.62 > ½
]


@walked(("v", "r", "old", "loss", "grad", "binds"), BY_HAND)
def test_clipped_by_hand(v, r, old, loss, grad, binds):
    got, slope, metrics = loss_and_grad(row(v), row(r), row(old))
    assert got == pytest.approx(loss, rel=1e-12)
    assert slope.item() == pytest.approx(grad, abs=1e-12)
    assert metrics["clip_fraction"] == binds
    # Without clipping it is always ½(v − R)².
    got, slope, metrics = loss_and_grad(row(v), row(r), None, clip=None)
    assert got == pytest.approx((v - r) ** 2 / 2, rel=1e-12)
    assert slope.item() == pytest.approx(v - r, rel=1e-12)
    assert "clip_fraction" not in metrics, "a metric that was not measured is not reported"


def test_huber_by_hand():
    # δ = 1: |e| = ½ → ½·¼ = ⅛, slope e; |e| = 3 → 1·(3 − ½) = 2.5, slope ±1;
    # |e| = 1 is on the seam: ½.
    for e, loss, slope in ((0.5, 0.125, 0.5), (3.0, 2.5, 1.0), (-3.0, 2.5, -1.0), (1.0, 0.5, 1.0)):
        got, grad, _ = loss_and_grad(
            row(e), row(0.0), None, clip=None, kind="huber", huber_delta=1.0
        )
        assert got == pytest.approx(loss, rel=1e-12)
        assert grad.item() == pytest.approx(slope, rel=1e-12)
    # With clip 0.2: v = 0.5, old = 3, R = 0 → the clipped value is 2.8, 1·(2.8 − ½) = 2.3 > ⅛,
    # a constant.
    got, grad, metrics = loss_and_grad(row(0.5), row(0.0), row(3.0), kind="huber", huber_delta=1.0)
    assert (got, grad.item(), metrics["clip_fraction"]) == (pytest.approx(2.3), 0, 1)


def test_huber_is_torch_huber_and_squared_inside():
    e = torch.linspace(-30, 30, 101, dtype=torch.float64)
    zero = torch.zeros_like(e)
    torch.testing.assert_close(
        huber_error(e, 10.0), torch.nn.functional.huber_loss(e, zero, reduction="none", delta=10.0)
    )
    v, r, old = (torch.randn(3, 5, dtype=torch.float64) for _ in range(3))
    plain, _, _ = loss_and_grad(v, r, old)
    huber, _, _ = loss_and_grad(v, r, old, kind="huber", huber_delta=100.0)
    assert huber == pytest.approx(plain, rel=1e-14)


def test_an_infinite_clip_is_no_clip():
    v, r, old = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    assert loss_and_grad(v, r, old, clip=inf)[0] == pytest.approx(
        loss_and_grad(v, r, None, clip=None)[0], rel=1e-14
    )


# Errors v − R with R = 0: rows (1, 2, 3) and (4, –, –), so token losses (½, 2, 4½) and (8).
AGGREGATES = [
    (None, 15 / 4),
    (pl.TokenMean(), 15 / 4),
    (pl.SeqMeanTokenMean(), (7 / 3 + 8) / 2),
    (pl.SeqMeanTokenSum(), 15 / 2),
    (pl.SeqMeanTokenSumNorm(10), 15 / 20),
    (pl.TokenSum(), 15.0),
    (pl.TokenSumNorm(10), 1.5),
    (pl.PromptMean(), 15 / 4),
    (pl.LengthWeighted(), 15 / 2),
    (pl.LocalTokenMean(), 15 / 4),
    (pl.LocalSeqMeanTokenMean(), (7 / 3 + 8) / 2),
]
VALUES = torch.tensor([[1, 2, 3], [4, 99, 99]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]], dtype=torch.bool)


@walked(("aggregate", "loss"), AGGREGATES, ids=str)
def test_aggregates(aggregate, loss):
    ids = torch.tensor([3, 3])
    got, grad, metrics = loss_and_grad(
        VALUES, 0 * VALUES, None, MASK, None, aggregate=aggregate, group_ids=ids
    )
    assert got == pytest.approx(loss, rel=1e-12)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
    assert (grad[1, 1:] == 0).all()


def test_totals():
    # 8 tokens and 5 sequences in the step, two averaging ranks: 2·15/8 and 2·(7/3 + 8)/5;
    # the metric leaves the 2 out.
    totals = pl.Totals(8, 5, dp_size=2)
    got, _, metrics = loss_and_grad(VALUES, 0 * VALUES, None, MASK, None, totals=totals)
    assert (got, metrics["loss"]) == (pytest.approx(30 / 8), pytest.approx(15 / 8))
    got, _, _ = loss_and_grad(
        VALUES, 0 * VALUES, None, MASK, None, totals=totals, aggregate=pl.SeqMeanTokenMean()
    )
    assert got == pytest.approx(2 * (7 / 3 + 8) / 5)


def batch(seed=0, rows=5, width=7):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, width, generator=g, dtype=torch.float64)
    returns = values + torch.randn(rows, width, generator=g, dtype=torch.float64)
    old = values + 0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=g) < 0.7
    mask[2] = False
    return values, returns, old, mask


def test_metrics_against_numpy():
    values, returns, old, mask = batch()
    _, _, metrics = loss_and_grad(values, returns, old, mask, 0.2)
    v, r, o = (x[mask].numpy() for x in (values, returns, old))
    held = np.clip(v, o - 0.2, o + 0.2)
    expected = {
        "loss": 0.5 * np.maximum((v - r) ** 2, (held - r) ** 2).mean(),
        "tokens": len(v),
        "value_mean": v.mean(),
        "return_mean": r.mean(),
        "value_error": np.abs(v - r).mean(),
        "explained_variance": 1 - np.var(r - v) / np.var(r),
        "clip_fraction": ((held - r) ** 2 > (v - r) ** 2).mean(),
        "nonfinite_tokens": 0,
    }
    assert 0 < expected["clip_fraction"] < 1
    assert_same(metrics, {name: float(x) for name, x in expected.items()})


@walked("dtype", [torch.float32, torch.float64])
def test_an_unmoved_value_is_not_clipped(dtype):
    """Nothing moves by 10, so nothing is clipped: not by a rounding error either."""
    g = torch.Generator().manual_seed(0)
    values, returns, old = (torch.randn(16, 64, generator=g, dtype=dtype) for _ in range(3))
    _, grad, metrics = loss_and_grad(values, returns, old, clip=10.0)
    assert metrics["clip_fraction"] == 0
    torch.testing.assert_close(grad, (values - returns) / values.numel())


def test_explained_variance_of_a_perfect_a_constant_and_an_offset_critic():
    returns = row(1, 2, 3, 6)
    for values, expected in (
        (returns, 1.0),
        (0 * returns + 3, 0.0),
        (returns - 5, 1.0),
        (-returns, 1 - 4.0),
    ):
        metrics = loss_and_grad(values, returns, None, clip=None)[2]
        assert metrics["explained_variance"] == pytest.approx(expected, abs=1e-12)
    assert not np.isfinite(
        loss_and_grad(row(1.0), row(1.0), None, clip=None)[2]["explained_variance"]
    )


def test_metrics_merge_to_the_whole():
    values, returns, old, mask = batch(seed=3, rows=6)
    totals = pl.Totals.count(mask)
    pieces = [
        pl.value_loss(values[c], returns[c], old[c], mask[c], totals=totals)
        for c in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    whole = pl.value_loss(values, returns, old, mask)
    assert_same(sum(p.metrics for p in pieces).compute(), whole.metrics.compute())
    assert_same(sum(p.loss for p in pieces), whole.loss)


@walked(
    "aggregate",
    [pl.TokenMean(), pl.SeqMeanTokenMean(), pl.SeqMeanTokenSum(), pl.PromptMean()],
    ids=str,
)
def test_packed_is_padded(aggregate):
    values, returns, old, mask = batch(seed=4)
    lengths = torch.tensor([7, 3, 5, 0, 6])
    inside = torch.arange(7) < lengths[:, None]
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.tensor([1, 2, 1, 2, 3])
    loss, grad, metrics = loss_and_grad(
        values, returns, old, mask & inside, aggregate=aggregate, group_ids=ids
    )
    flat = (x[inside] for x in (values, returns, old, mask))
    packed = loss_and_grad(*flat, aggregate=aggregate, cu_seqlens=offsets, group_ids=ids)
    assert packed[0] == pytest.approx(loss, rel=1e-13)
    assert_same(packed[1], grad[inside])
    assert_same(packed[2], metrics)


@walked("garbage", [nan, inf, -inf, 1e300])
def test_masked_garbage_changes_nothing(garbage):
    values, returns, old, mask = batch(seed=5)
    expected = loss_and_grad(values, returns, old, mask)
    poisoned = (torch.where(mask, x, garbage) for x in (values, returns, old))
    loss, grad, metrics = loss_and_grad(*poisoned, mask)
    assert loss == expected[0]
    assert torch.equal(grad, expected[1])
    assert_same(metrics, expected[2], 0)


def test_a_nan_at_a_valid_token_shows():
    values, returns, old, mask = batch(seed=5)
    values[mask.nonzero()[0].tolist()[0], mask.nonzero()[0].tolist()[1]] = nan
    loss, _, metrics = loss_and_grad(values, returns, old, mask)
    assert isnan(loss)
    assert metrics["nonfinite_tokens"] == 1


def test_nothing_valid_is_zero():
    values, returns, old, mask = batch()
    loss, grad, metrics = loss_and_grad(values, returns, old, torch.zeros_like(mask))
    assert loss == 0
    assert torch.equal(grad, torch.zeros_like(values))
    assert isnan(metrics["clip_fraction"])


def test_targets_are_constants():
    values, returns, old, mask = batch()
    leaves = [x.clone().requires_grad_() for x in (values, returns, old)]
    pl.value_loss(*leaves, mask).loss.backward()
    assert leaves[0].grad.abs().sum() > 0
    assert leaves[1].grad is None
    assert leaves[2].grad is None


def test_half_precision_is_computed_in_float32():
    values, returns, old, mask = (x.bfloat16() if x.is_floating_point() else x for x in batch())
    half = pl.value_loss(values, returns, old, mask).loss
    full = pl.value_loss(values.float(), returns.float(), old.float(), mask).loss
    assert half.dtype == torch.float32
    assert torch.equal(half, full)


REFUSED = {
    "kind": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, kind="hubert"),
        ["'hubert'", "did you mean 'huber'", "mse"],
    ),
    "clip": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, clip=0.0),
        ["clip", "> 0", "None", "0.0"],
    ),
    "nan clip": (lambda v, r, o, m: pl.value_loss(v, r, o, m, clip=nan), ["clip", "nan"]),
    "delta": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, kind="huber", huber_delta=-1.0),
        ["huber_delta", "-1.0"],
    ),
    "no old values": (lambda v, r, o, m: pl.value_loss(v, r, None, m), ["old_values", "clip=None"]),
    "old shape": (
        lambda v, r, o, m: pl.value_loss(v, r, o[:, :2], m),
        ["old_values", "(5, 2)", "(5, 7)"],
    ),
    "mask shape": (lambda v, r, o, m: pl.value_loss(v, r, o, m[:2]), ["mask", "(2, 7)"]),
    "returns shape": (lambda v, r, o, m: pl.value_loss(v, r[:2], o, m), ["returns", "(2, 7)"]),
    "values integer": (
        lambda v, r, o, m: pl.value_loss(v.long(), r, o, m),
        ["values", "floating-point"],
    ),
    "prompt mean": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, aggregate=pl.PromptMean()),
        ["group_ids"],
    ),
    "aggregate class": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, aggregate=pl.TokenMean),
        ["TokenMean", "class"],
    ),
    "aggregate name": (
        lambda v, r, o, m: pl.value_loss(v, r, o, m, aggregate="token-mean"),
        ["aggregate", "'token-mean'"],
    ),
}


@walked("name", REFUSED)
def test_refused(name):
    make, words = REFUSED[name]
    with pytest.raises(pl.PolicyLossError) as error:
        make(*batch())
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"the message does not say {missing}: {error.value}"


def test_dual_ranks_average_to_the_batch():
    values, returns, old, mask = batch(seed=8)
    totals = replace(pl.Totals.count(mask), dp_size=2)
    shares = [
        loss_and_grad(values[c], returns[c], old[c], mask[c], totals=totals)
        for c in (slice(0, 3), slice(3, 5))
    ]
    loss, grad, _ = loss_and_grad(values, returns, old, mask)
    assert sum(s[0] for s in shares) / 2 == pytest.approx(loss, rel=1e-13)
    assert_same(torch.cat([s[1] for s in shares]) / 2, grad)
