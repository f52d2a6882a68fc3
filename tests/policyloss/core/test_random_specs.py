"""The laws hold for any loss, not only for those with a name: random specs over all slots and
numbers, on random batches.
"""

from __future__ import annotations

import json
from itertools import pairwise

import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import specs

import policyloss as pl
from cases import Batch, Result, assert_same, assert_same_result, make_batch, run, step_totals

SEEDS = st.integers(0, 20)


@given(specs())
def test_a_spec_survives_json(spec: pl.LossSpec) -> None:
    written = json.dumps(spec.to_dict(), allow_nan=False)
    read = pl.LossSpec.from_dict(json.loads(written))
    assert read == spec
    assert hash(read) == hash(spec)
    assert json.dumps(read.to_dict()) == written


@given(specs(), SEEDS)
def test_padded_equals_packed(spec: pl.LossSpec, seed: int) -> None:
    batch = make_batch(seed)
    assert_same_result(run(spec, batch.packed()), run(spec, batch))


@given(
    specs(),
    SEEDS,
    st.permutations(range(7)),
    st.lists(st.integers(0, 7), max_size=3),
    st.booleans(),
)
def test_any_partition_sums_to_the_whole(
    spec: pl.LossSpec, seed: int, order: list[int], cuts: list[int], packed: bool
) -> None:
    """Rows in any order, cut anywhere (empty micro-batches included), padded or packed."""
    batch = make_batch(seed)
    totals = step_totals(spec, batch)
    bounds = [0, *sorted(cuts), 7]
    whole = run(spec, batch)
    loss, records = torch.zeros((), dtype=torch.float64), pl.Metrics({})
    dlogp, dentropy = torch.full_like(batch.logp, torch.nan), torch.full_like(batch.logp, torch.nan)
    for start, stop in pairwise(bounds):
        rows = order[start:stop]
        part = batch.rows(rows)
        result = run(spec, part.packed() if packed else part, totals)
        loss, records = loss + result.loss, records + result.records
        dlogp[rows], dentropy[rows] = result.dlogp, result.dentropy
    assert_same_result(Result(loss, dlogp, dentropy, records), whole)


def garbage_in(batch: Batch, value: float) -> Batch:
    return batch.map(lambda x: torch.where(batch.mask, x, value))


@given(specs(), SEEDS, st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e30]))
def test_masked_positions_change_nothing_and_gradients_are_finite(
    spec: pl.LossSpec, seed: int, value: float
) -> None:
    batch = make_batch(seed)
    expected = run(spec, batch)
    assert expected.loss.isfinite()
    assert expected.dlogp.isfinite().all()
    assert (expected.dlogp[~batch.mask] == 0).all()
    assert_same_result(run(spec, garbage_in(batch, value)), expected, tol=0)


def fell_alike(a: Result, b: Result) -> bool:
    """Whether every clip and rejection fell the same way,
    which a token within rounding of a bound may not do.
    """
    x, y = a.metrics, b.metrics
    return all(
        abs(x[n] - y[n]) < 1e-3 for n in x if "fraction" in n or n in ("tokens", "clamped_tokens")
    )


@given(specs(), SEEDS)
def test_float32_agrees_with_float64(spec: pl.LossSpec, seed: int) -> None:
    """Same inputs in both precisions, gradients agree to a few float32 roundings:
    no slot cancels digits away.
    """
    assume(not isinstance(spec.trust, pl.CovClip))  # it draws tokens by the bits of their numbers
    batch = make_batch(seed).map(lambda x: x.to(torch.float32))
    exact, rounded = run(spec, batch.map(lambda x: x.to(torch.float64))), run(spec, batch)
    assume(fell_alike(exact, rounded))
    scale = exact.dlogp.abs().max().clamp(min=1e-3)
    assert_same(rounded.dlogp.double() / scale, exact.dlogp / scale, tol=1e-5, what="gradient")
