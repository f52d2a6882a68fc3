"""Any cut of a batch into micro-batches sums to the same loss, the same gradient and the same
metrics, to 1e-12 in float64.

That is the use of a global denominator: `totals` are counted (or measured, where a loss needs more
than counts) once per step, and nothing a micro-batch computes depends on its companions. The two
`Local…` aggregations break this on purpose; a test shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from walk import in_shares, walked

import policyloss as pl
from cases import (
    AGGREGATES,
    CORRECTIONS,
    LOCAL,
    NAMED,
    PRESETS,
    REJECTED,
    TRUSTS,
    Batch,
    Result,
    assert_same,
    assert_same_result,
    label,
    layout_of,
    make_batch,
    run,
    step_totals,
    swapped,
)

BATCH = make_batch(seed=2)
SPLITS: dict[str, list[list[int]]] = {
    "halves": [[0, 1, 2, 3], [4, 5, 6]],
    "uneven, out of order": [[6], [5, 0, 2, 4, 1], [3]],
    "one by one": [[0], [1], [2], [3], [4], [5], [6]],
    "a micro-batch without a valid token, and one without a row": [[0, 1], [2, 3], [4, 5, 6], []],
}
FEW = [name for name in SPLITS if name != "one by one"]
GLOBAL = [a for a in AGGREGATES if not isinstance(a, LOCAL)]
BASE = pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=1.4), kl=pl.KL("k3", 0.1), entropy_coef=0.01)


@cache
def whole(spec: pl.LossSpec) -> Result:
    """The whole batch in one call without totals."""
    return run(spec, BATCH)


def summed(call: Callable[[Batch], Result], split: list[list[int]], packed: bool) -> Result:
    """Run `call` on each micro-batch and add up: losses,
    gradients (back in their rows) and metrics.
    """
    dlogp, dentropy = torch.zeros_like(BATCH.logp), torch.zeros_like(BATCH.logp)
    loss, records = torch.zeros((), dtype=torch.float64), pl.Metrics({})
    for rows in split:
        part = BATCH.rows(rows)
        result = call(part.packed() if packed else part)
        loss, records = loss + result.loss, records + result.records
        dlogp[rows], dentropy[rows] = result.dlogp, result.dentropy
    return Result(loss, dlogp, dentropy, records)


def check_split(spec: pl.LossSpec, split: str, packed: bool = False) -> None:
    totals = step_totals(spec, BATCH.packed() if packed else BATCH)
    assert_same_result(
        summed(partial(run, spec, totals=totals), SPLITS[split], packed), whole(spec)
    )


@in_shares(2)
@walked("split", SPLITS)
@walked("name", NAMED)
def test_every_preset_under_every_split(name: str, split: str, share: int) -> None:
    turn = list(NAMED).index(name) + list(SPLITS).index(split) + share
    check_split(NAMED[name], split, packed=turn % 2 == 0)


@walked("name", NAMED)
def test_the_whole_batch_as_one_micro_batch(name: str) -> None:
    """Given its own totals, a call gives the bits it gives without (up to the rounding of measured
    means in another layout).
    """
    assert_same_result(
        run(NAMED[name], BATCH, step_totals(NAMED[name], BATCH)),
        whole(NAMED[name]),
        tol=1e-15,
    )


@in_shares(3)
@walked("name", PRESETS)
def test_every_preset_with_every_aggregation(name: str, share: int) -> None:
    first = list(PRESETS).index(name)
    for turn, aggregate in [*enumerate(GLOBAL, start=first)][(first + share) % 3 :: 3]:
        spec = PRESETS[name].replace(aggregate=aggregate)
        check_split(spec, FEW[turn % len(FEW)], packed=turn % 2 == 0)


@in_shares(3)
@walked("rejected", REJECTED)
@walked("correction", CORRECTIONS, ids=label)
def test_every_correction_under_every_rejection_and_aggregation(
    correction: Any, rejected: Any, share: int
) -> None:
    first = (CORRECTIONS.index(correction) + REJECTED.index(rejected) + share) % 3
    for i, aggregate in [*enumerate(GLOBAL)][first::3]:
        spec = BASE.replace(correction=correction, rejected=rejected, aggregate=aggregate)
        check_split(spec, FEW[i % len(FEW)], packed=i % 2 == 0)


@walked("trust", TRUSTS, ids=label)
def test_every_trust_region_with_rejection_and_self_normalisation(trust: Any) -> None:
    """Statistics of the batch (covariances, a mean weight) and survivors of a rejection,
    measured together.
    """
    correction = (pl.Truncate(1.1), pl.Reject("k1", low=-0.25, high=0.25), pl.SelfNormalise())
    for rejected in REJECTED:
        spec = swapped(BASE, trust=trust, correction=correction, rejected=rejected)
        assert spec is not None
        check_split(spec, "one by one", packed=rejected == "keep")


@walked("aggregate", LOCAL, ids=lambda a: a.__name__)
def test_local_aggregations_depend_on_the_cut(aggregate: Any) -> None:
    """They reproduce runs that averaged per micro-batch,
    so the sum over the cut is not the whole — by a lot.
    """
    spec = BASE.replace(aggregate=aggregate())
    parts = summed(
        partial(run, spec, totals=step_totals(spec, BATCH)), SPLITS["halves"], packed=False
    )
    assert (parts.loss - whole(spec).loss).abs() > 0.05 * whole(spec).loss.abs()
    assert (parts.dlogp - whole(spec).dlogp).abs().max() > 0.05 * whole(spec).dlogp.abs().max()


@walked("aggregate", LOCAL, ids=lambda a: a.__name__)
def test_a_local_mean_is_the_mean_of_its_own_call(aggregate: Any) -> None:
    same = {pl.LocalTokenMean: pl.TokenMean, pl.LocalSeqMeanTokenMean: pl.SeqMeanTokenMean}[
        aggregate
    ]
    part = BATCH.rows([4, 5, 6])
    result = run(BASE.replace(aggregate=aggregate()), part, step_totals(BASE, BATCH))
    assert_same_result(result, run(BASE.replace(aggregate=same()), part))


STATISTICAL = {
    "CovClip": BASE.replace(trust=pl.CovClip()),
    "CovKL": BASE.replace(trust=pl.CovKL()),
    "SelfNormalise": BASE.replace(correction=(pl.Truncate(2.0), pl.SelfNormalise())),
    "renormalise": BASE.replace(correction=pl.Band(0.5, 2.0), rejected="renormalise"),
    "drop_sequence": BASE.replace(correction=pl.Band(0.5, 2.0), rejected="drop_sequence"),
}


@walked("name", STATISTICAL)
def test_counts_alone_are_an_error_where_a_loss_needs_statistics(name: str) -> None:
    spec = STATISTICAL[name]
    assert spec.needs_statistics
    with pytest.raises(pl.InputError, match=r"policyloss\.measure"):
        run(spec, BATCH, pl.Totals.count(BATCH.mask))
    assert_same_result(run(spec, BATCH, "local"), whole(spec), tol=0)


@walked("name", [n for n, spec in PRESETS.items() if not spec.needs_statistics])
def test_measure_is_count_where_counts_are_enough(name: str) -> None:
    measured = pl.measure(PRESETS[name], **BATCH.kwargs)
    counted = pl.Totals.count(BATCH.mask, group_ids=BATCH.group_ids)
    assert (int(measured.tokens), int(measured.sequences)) == (
        int(counted.tokens),
        int(counted.sequences),
    )
    assert measured.dp_size == counted.dp_size == 1


def test_counts_of_micro_batches_add_up() -> None:
    """Counted by hand in the batch: fully masked and empty rows are not sequences, and a group of
    such rows is not a group.
    """
    counted = [
        pl.Totals.count(p.mask, group_ids=p.group_ids)
        for p in (BATCH.rows(r) for r in SPLITS["uneven, out of order"])
    ]
    total = counted[0] + counted[1] + counted[2]
    expected = step_totals(BASE, BATCH)
    assert int(total.tokens) == int(expected.tokens) == int(BATCH.mask.sum())
    assert int(total.sequences) == int(expected.sequences) == 5
    assert isinstance(total.groups, pl.GroupTokens)
    by_group = dict(zip(total.groups.ids.tolist(), total.groups.tokens.tolist(), strict=True))
    lengths = BATCH.mask.sum(1).tolist()
    assert by_group == {
        -5: lengths[5],
        11: lengths[1] + lengths[4],
        42: lengths[6],
        70: lengths[0] + lengths[2],
        99: 0,
    }


def test_packed_and_padded_counts_agree() -> None:
    padded, packed = (
        pl.Totals.count(b.mask, cu_seqlens=b.cu_seqlens) for b in (BATCH, BATCH.packed())
    )
    assert (int(padded.tokens), int(padded.sequences)) == (
        int(packed.tokens),
        int(packed.sequences),
    )


def test_a_number_of_groups_is_enough_when_no_group_is_split() -> None:
    spec = BASE.replace(aggregate=pl.PromptMean())
    # 70, 11, -5 and 42 have tokens; 99 has none.
    totals = pl.Totals(int(BATCH.mask.sum()), 5, groups=4)
    split = [[0, 2], [1, 4, 3], [5], [6]]
    assert_same_result(summed(partial(run, spec, totals=totals), split, packed=False), whole(spec))


def test_prompt_mean_without_groups_is_an_error() -> None:
    spec = BASE.replace(aggregate=pl.PromptMean())
    with pytest.raises(pl.InputError, match="group_ids"):
        run(spec, BATCH, group_ids=None)
    with pytest.raises(pl.InputError, match="groups of the whole step"):
        run(spec, BATCH, pl.Totals.count(BATCH.mask))


@walked("aggregate", GLOBAL, ids=label)
def test_dp_size_multiplies_the_loss_and_gradient_but_not_the_metric(aggregate: Any) -> None:
    """DDP averages gradients over ranks; the factor makes the average the gradient
    of the whole batch.
    """
    spec = BASE.replace(aggregate=aggregate)
    expected = whole(spec)
    result = run(spec, BATCH, step_totals(spec, BATCH, dp_size=4))
    assert_same(result.loss, 4 * expected.loss, what="loss")
    assert_same(result.dlogp, 4 * expected.dlogp, what="gradient")
    assert_same(result.metrics, expected.metrics, what="metric")


@walked("as_type", [int, float, torch.tensor], ids=["int", "float", "tensor"])
def test_totals_may_be_numbers_or_tensors(as_type: Any) -> None:
    spec = BASE.replace(aggregate=pl.SeqMeanTokenMean())
    totals = pl.Totals(as_type(int(BATCH.mask.sum())), as_type(5))
    assert_same_result(run(spec, BATCH, totals), whole(spec))


def value_run(aggregate: Any, kind: Any, batch: Batch, totals: Any = None) -> Result:
    values = batch.logp.clone().requires_grad_()
    shared: dict[str, Any] = {
        **layout_of(batch),
        "totals": totals,
        "huber_delta": 0.7,
    }
    out = pl.value_loss(
        values,
        batch.advantages,
        batch.old_logp,
        batch.mask,
        0.2,
        kind,
        aggregate=aggregate,
        **shared,
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    rows = batch.as_rows(gradient)
    return Result(out.loss.detach(), rows, torch.zeros_like(rows), out.metrics)


@walked("split", SPLITS)
@walked("kind", ["mse", "huber"])
@walked("aggregate", GLOBAL, ids=label)
def test_value_loss(aggregate: Any, kind: str, split: str) -> None:
    totals = step_totals(BASE, BATCH)
    expected = value_run(aggregate, kind, BATCH)
    for packed in (False, True):
        result = summed(partial(value_run, aggregate, kind, totals=totals), SPLITS[split], packed)
        assert_same_result(result, expected)
    doubled = value_run(aggregate, kind, BATCH, dataclasses.replace(totals, dp_size=2))
    assert_same(doubled.dlogp, 2 * expected.dlogp, what="gradient")


def test_metrics_of_uneven_micro_batches_are_the_true_fractions() -> None:
    """3 of 4 tokens clipped in one micro-batch and 0 of 12 in another is 3/16,
    not the mean of means 3/8.
    """
    advantages = torch.ones(1, dtype=torch.float64)
    spec = pl.preset("ppo")
    totals = pl.Totals(tokens=16, sequences=2)

    def part(log_ratios: list[float]) -> pl.Metrics:
        logp = torch.tensor([log_ratios], dtype=torch.float64)
        return pl.policy_loss(
            spec,
            logp,
            torch.zeros_like(logp),
            advantages,
            torch.ones_like(logp, dtype=torch.bool),
            totals=totals,
        ).metrics

    merged = (part([1.0, 1.0, 1.0, 0.0]) + part([0.0] * 12)).compute()
    assert merged["clip_fraction"] == 3 / 16
    assert merged["tokens"] == 16
