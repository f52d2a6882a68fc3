"""`weights=`: a weight multiplies the loss of its token, KL and entropy included.

The shared suites run with weights too: every batch of `cases.make_batch` has some.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import PRESETS, SPECS, assert_same, assert_same_result, make_batch, run, unweighted
from policyloss.arguments import tracing

BATCH = make_batch(seed=8)
# Rows (1, 2, 3) and (10, –, –) of losses, and their weights.
LOSSES = torch.tensor([[1.0, 2.0, 3.0], [10.0, 5.0, 5.0]], dtype=torch.float64)
VALID = torch.tensor([[1, 1, 1], [1, 0, 0]])
WEIGHTS = torch.tensor([[2.0, 0.0, 1.0], [0.5, 9.0, -7.0]], dtype=torch.float64)


def at_ratio_one(aggregate: Any, **others: Any) -> pl.LossOutput:
    """A token's loss is −A here."""
    spec = pl.LossSpec(trust=pl.Unbounded(), aggregate=aggregate)
    logp = torch.full_like(LOSSES, -1.0).requires_grad_()
    return pl.policy_loss(spec, logp, logp.detach(), -LOSSES, VALID, **others)


@walked(
    ("aggregate", "loss"),
    [
        # Σ w·loss = 2·1 + 0·2 + 1·3 + 0.5·10 = 10, over 4 tokens, 2 sequences, a weight of 3.5.
        (pl.TokenMean(), 10 / 4),
        (pl.SeqMeanTokenMean(), (5 / 3 + 5 / 1) / 2),
        (pl.TokenSum(), 10.0),
        (pl.WeightMean(), 10 / 3.5),
    ],
    ids=str,
)
def test_weights_by_hand(aggregate: Any, loss: float) -> None:
    out = at_ratio_one(aggregate, weights=WEIGHTS)
    assert_same(out.loss.detach(), torch.tensor(loss, dtype=torch.float64))
    metrics = out.metrics.compute()
    assert_same(metrics["loss"], loss, what="the metric is weighted")
    assert_same(metrics["advantage_mean"], -16 / 4, what="and no other metric is")
    assert metrics["tokens"] == 4
    averaged = pl.aggregate_tokens(LOSSES, VALID, aggregate, weights=WEIGHTS)
    assert_same(averaged, torch.tensor(loss, dtype=torch.float64))
    # The value loss of an error e is ½e².
    value = pl.value_loss(
        *((2 * LOSSES).sqrt(), torch.zeros_like(LOSSES), None, VALID),
        clip=None,
        aggregate=aggregate,
        weights=WEIGHTS,
    )
    assert_same(value.loss, torch.tensor(loss, dtype=torch.float64))


def test_a_scaled_advantage_is_not_a_weight() -> None:
    """Twice the weight is twice the loss. Twice the advantage leaves the KL and the entropy."""
    spec = pl.LossSpec(trust=pl.Unbounded(), kl=pl.KL("k3", 0.5), entropy_coef=0.1)
    batch, twice = unweighted(BATCH), {"weights": 2 * torch.ones_like(BATCH.logp)}
    plain = run(spec, batch)
    weighted = run(spec, dataclasses.replace(batch, **twice))
    scaled = run(spec, dataclasses.replace(batch, advantages=2 * batch.advantages))
    assert_same(weighted.loss, 2 * plain.loss)
    assert_same(weighted.dlogp, 2 * plain.dlogp)
    assert_same(weighted.dentropy, 2 * plain.dentropy)
    assert_same(scaled.dentropy, plain.dentropy)
    rest = run(spec.replace(trust=lambda t: 0 * t.logp), batch)  # the KL and the entropy alone
    assert_same(weighted.loss - scaled.loss, rest.loss)
    assert rest.loss.abs() > 1e-3


@walked("name", PRESETS)
def test_ones_are_no_weights(name: str) -> None:
    spec = PRESETS[name]
    assert_same_result(run(spec, BATCH, weights=None), run(spec, unweighted(BATCH)))


def test_a_weight_of_0_or_1_is_a_mask_for_the_mean_over_weights() -> None:
    spec = SPECS["token:WeightMean()"]
    kept = BATCH.weights > 0.8
    weighted = run(spec, dataclasses.replace(BATCH, weights=kept.to(torch.float64)))
    masked = dataclasses.replace(BATCH, mask=BATCH.mask & kept)
    expected = run(spec.replace(aggregate=pl.TokenMean()), masked, weights=None)
    assert_same(weighted.loss, expected.loss)
    assert_same(weighted.dlogp, expected.dlogp)


@walked("packed", [False, True], ids=["padded", "packed"])
def test_one_weight_per_sequence(packed: bool) -> None:
    each = torch.arange(1.0, 8.0, dtype=torch.float64)
    batch = dataclasses.replace(BATCH, weights=each[:, None].expand(BATCH.mask.shape))
    batch = batch.packed() if packed else batch
    spec = SPECS["token:WeightMean()"]
    expected = run(spec, batch)
    for shape in ((7,), (7, 1)):
        assert_same_result(run(spec, batch, weights=each.view(shape)), expected)


@walked("weights", [torch.tensor([1.0, -1.0]), -WEIGHTS], ids=["sequence", "token"])
def test_a_negative_weight_is_an_error(weights: Tensor) -> None:
    with pytest.raises(pl.InputError, match="weights must not be negative"):
        at_ratio_one(pl.TokenMean(), weights=weights)


def test_a_nan_weight_shows() -> None:
    weights = torch.where(torch.arange(3) == 0, torch.nan, WEIGHTS)
    assert at_ratio_one(pl.TokenMean(), weights=weights).loss.isnan()


def test_what_the_mean_over_weights_needs() -> None:
    with pytest.raises(pl.InputError, match="WeightMean reads weights, which is missing"):
        at_ratio_one(pl.WeightMean())
    counted = pl.Totals.count(VALID)
    with pytest.raises(pl.InputError, match=r"make totals with Totals\.count\(mask, weights=…\)"):
        at_ratio_one(pl.WeightMean(), weights=WEIGHTS, totals=counted)
    assert pl.LossSpec(aggregate=pl.WeightMean()).reads == ("old_logp", "weights")
    with pytest.raises(pl.InputError, match=r"Totals\.weights must be a sum of weights"):
        pl.Totals(1, 1, weights=-1.0)


def test_counts_of_weights_add_up() -> None:
    whole = pl.Totals.count(VALID, weights=WEIGHTS)
    assert_same(whole.weights, torch.tensor(3.5, dtype=torch.float64))
    parts = [pl.Totals.count(VALID[i : i + 1], weights=WEIGHTS[i : i + 1]) for i in (0, 1)]
    assert_same((parts[0] + parts[1]).weights, whole.weights)
    assert (parts[0] + pl.Totals.count(VALID)).weights is None
    spec = pl.LossSpec(aggregate=pl.WeightMean())
    logp = torch.full_like(LOSSES, -1.0)
    measured = pl.measure(spec, logp, logp, -LOSSES, VALID, weights=WEIGHTS)
    assert_same(measured.weights, whole.weights)


def test_rejected_tokens_have_no_weight() -> None:
    """`rejected="renormalise"`: as if the mask of a rejected token were False."""
    spec = pl.LossSpec(correction=pl.Veto(0.9), rejected="renormalise", aggregate=pl.WeightMean())
    hit = (BATCH.old_logp - BATCH.rollout_logp).exp() < 0.9
    kept = BATCH.mask & ~(hit & BATCH.mask).any(1, keepdim=True)
    assert 0 < kept.sum() < BATCH.mask.sum()
    plain = spec.replace(correction=(), rejected="keep")
    expected = run(plain, dataclasses.replace(BATCH, mask=kept))
    for totals in (None, pl.measure(spec, **BATCH.kwargs)):
        result = run(spec, BATCH, totals)
        assert_same(result.loss, expected.loss)
        assert_same(result.dlogp, expected.dlogp)


def test_micro_batches_divide_by_the_weights_of_the_step() -> None:
    logp = torch.full_like(LOSSES, -1.0)
    rows = [slice(0, 1), slice(1, 2)]
    parts: list[dict[str, Any]] = [
        {"mask": VALID[i], "advantages": -LOSSES[i], "old_logp": logp[i], "weights": WEIGHTS[i]}
        for i in rows
    ]
    spec = pl.LossSpec(trust=pl.Unbounded(), aggregate=pl.WeightMean())
    step = pl.accumulate(spec, parts)
    assert_same(sum(float(micro.loss(logp[:1])) for micro in step), 10 / 3.5, what="loss")
    with pytest.raises(pl.InputError, match=r"micro_batches\[1\] has no weights, but others have"):
        pl.accumulate(spec, [parts[0], {**parts[1], "weights": None}])
    with pytest.raises(pl.InputError, match="weights cannot be replaced now"):
        next(iter(pl.accumulate(spec, parts))).arguments(weights=WEIGHTS[:1])


@walked("plan", ["one_pass", "recompute", "stash"])
def test_the_head_takes_weights(plan: str) -> None:
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(*BATCH.mask.shape, 4, generator=g, dtype=torch.float64).requires_grad_()
    matrix = torch.randn(9, 4, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 9, BATCH.mask.shape, generator=g)
    spec = SPECS["token:WeightMean()"]
    left_out = ("logp", "entropy", "divergence")
    shared = {name: x for name, x in BATCH.kwargs.items() if name not in left_out}
    out = pl.linear_policy_loss(spec, hidden, matrix, ids, plan=plan, **shared)
    made = pl.logprobs(hidden @ matrix.T, ids, entropy=True, mask=BATCH.mask)
    expected = pl.policy_loss(spec, made.logp, entropy=made.entropy, **shared)
    assert_same(out.loss.detach(), expected.loss.detach())
    gradients = [torch.autograd.grad(x.loss, hidden)[0] for x in (out, expected)]
    assert_same(*gradients, what="gradient")


def test_negative_weights_are_counted_where_the_host_would_wait() -> None:
    with tracing():
        out = at_ratio_one(pl.TokenMean(), weights=-WEIGHTS)
    with pytest.raises(pl.InputError, match="weights held 3 negative numbers"):
        out.metrics.compute()
