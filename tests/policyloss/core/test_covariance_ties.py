"""Clip-Cov and KL-Cov where covariances are equal up to rounding:
the draw decides, and no layout or cut changes it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from walk import in_shares, walked

import policyloss as pl
from cases import Batch, Result, assert_same_result, make_batch, run, step_totals

PARTS = {
    "CovKL": pl.CovKL(fraction=0.3),
    "CovClip": pl.CovClip(fraction=0.3, cov_low=0.0, cov_high=5.0, seed=1),
    "CovClip around 0": pl.CovClip(fraction=0.3, cov_low=-1e-3, cov_high=5.0, seed=2),
}


def equal(batch: Batch, seed: int) -> Batch:
    """One advantage for all, as in a batch with a constant reward and no baseline."""
    return batch.map(lambda x: torch.full_like(x, [0.1, 1 / 3, -0.7, 3e4][seed % 4]), "advantages")


def nearly_equal(batch: Batch, seed: int) -> Batch:
    """Equal except for the last bit, like normalised rewards."""
    step = torch.finfo(batch.advantages.dtype).eps * torch.arange(
        batch.advantages.numel()
    ).remainder(3).view(7, 8)
    return batch.map(lambda x: (0.7 * (1 + step)).to(x.dtype), "advantages")


def equal_logp(batch: Batch, seed: int) -> Batch:
    """A policy that gives every token the same probability."""
    return batch.map(lambda x: torch.full_like(x, -0.3 - 0.1 * (seed % 3)), "logp")


def signs(batch: Batch, seed: int) -> Batch:
    """Advantages a, −a and 0 that add up to 0, but for rounding:
    tokens without advantage have covariance 0.
    """
    valid = batch.mask.flatten().nonzero().flatten()
    a = torch.zeros(batch.mask.numel(), dtype=batch.advantages.dtype)
    third = len(valid) // 3
    a[valid[:third]], a[valid[third : 2 * third]] = 0.1 * (1 + seed % 5), -0.1 * (1 + seed % 5)
    return replace(batch, advantages=a.view(7, 8))


TIES = {f.__name__: f for f in (equal, nearly_equal, equal_logp, signs)}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def in_parts(spec: pl.LossSpec, batch: Batch) -> Result:
    """The batch cut in three, rows out of order and one part packed,
    with the totals of the whole step.
    """
    totals = step_totals(spec, batch)
    loss, records, dlogp = (
        torch.zeros((), dtype=batch.logp.dtype),
        pl.Metrics({}),
        torch.zeros_like(batch.logp),
    )
    for rows, packed in (([5, 1], False), ([0, 2, 6], True), ([4, 3], False)):
        part = batch.rows(rows)
        actual = run(spec, part.packed() if packed else part, totals)
        loss, records = loss + actual.loss, records + actual.records
        dlogp[rows] = actual.dlogp
    return Result(loss, dlogp, torch.zeros_like(dlogp), records)


@in_shares(3)
@walked("dtype", DTYPES)
@walked("tie", TIES)
@walked("name", PARTS)
def test_padded_packed_and_cut_choose_the_same_tokens(
    name: str, tie: str, dtype: str, share: int
) -> None:
    spec = pl.LossSpec(trust=PARTS[name])
    tolerance = 1e-12 if dtype == "float64" else 1e-5
    for seed in range(share, 12, 3):
        batch = TIES[tie](make_batch(seed, dtype=DTYPES[dtype]), seed)
        whole = run(spec, batch)
        assert_same_result(run(spec, batch.packed()), whole, tolerance)
        assert_same_result(in_parts(spec, batch), whole, tolerance)


@walked("layout", ["padded", "packed"])
def test_equal_advantages_have_no_covariance(layout: str) -> None:
    """Their mean is 0.1 but for rounding, so every covariance is 0:
    none is above 0, and KL-Cov chooses only by its draw.
    """
    batch = equal(make_batch(3), 0)
    batch = batch if layout == "padded" else batch.packed()
    dropped = run(pl.LossSpec(trust=PARTS["CovClip"]), batch).metrics
    assert dropped["clip_fraction_dropped"] == 0
    stats = pl.measure(pl.LossSpec(trust=PARTS["CovKL"]), **batch.kwargs).statistics
    assert float(stats["cov_threshold"]) == 0


def hand_batch(logp: list[float]) -> dict[str, Tensor]:
    """Four tokens in one row with advantages 1, 1, −1, −1; mean advantage 0, mean logp −2."""
    x = torch.tensor([logp], dtype=torch.float64)
    return {
        "logp": x,
        "old_logp": torch.full_like(x, -2.0),
        "advantages": torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64),
        "mask": torch.ones(1, 4, dtype=torch.bool),
    }


def test_the_threshold_lies_between_the_chosen_and_the_next() -> None:
    """Covariances 1·(logp + 2): 1.0, 0.2, and −1·(logp + 2): 0.4, 0.8.
    Two of four are chosen: from (0.8 + 0.4)/2 = 0.6 on.

    So a forward whose logp differ in the last digits from those
    that were measured chooses the same tokens.
    """
    spec = pl.LossSpec(trust=pl.CovKL(fraction=0.5, coef=1.0))
    batch = hand_batch([-1.0, -1.8, -2.4, -2.8])
    totals = pl.measure(spec, **batch)
    assert float(totals.statistics["cov_threshold"]) == pytest.approx(0.6, abs=1e-12)
    moved = {
        **batch,
        "logp": batch["logp"] - torch.tensor([[1e-6, 0, 0, -1e-6]], dtype=torch.float64),
    }
    flagged = pl.policy_loss(spec, totals=totals, **moved).metrics["clip_fraction_upper"]
    assert (float(flagged.sum), float(flagged.count)) == (2, 4)
