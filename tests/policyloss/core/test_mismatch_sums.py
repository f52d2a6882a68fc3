"""`Mismatch`: hand numbers, quantiles, any partition, packs, ranks, errors."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from walk import walked

import policyloss as pl
from policyloss.compat.verl import compute_offpolicy_metrics

LN2 = math.log(2)
S, T = 6, 40


def draw(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(S, T, generator=g, dtype=torch.float64)
    noise = 0.05 * torch.randn(S, T, generator=g, dtype=torch.float64)
    lengths = torch.tensor([40, 1, 17, 0, 33, 8])
    mask = (torch.arange(T) < lengths[:, None]) & (torch.rand(S, T, generator=g) < 0.9)
    ages = torch.randint(0, 9, (S, T), generator=g)
    return {"old_logp": old, "rollout_logp": old + noise, "mask": mask, "ages": ages}


def assert_numbers(found: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert math.isclose(found[name], x, rel_tol=tolerance, abs_tol=tolerance), name


def test_by_hand() -> None:
    # Ratios 2, 1, 1 of the first sequence, and 4, ½ of the second; the last token is masked.
    d = torch.tensor([[LN2, 0.0, 0.0], [2 * LN2, -LN2, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    ages = torch.tensor([[0, 1, 2], [3, 4, 5]])
    bands = ((0.75, 3.0), (0.25, 8.0))
    found = pl.Mismatch.of(d, torch.zeros_like(d), mask, ages=ages, bands=bands)
    numbers = found.compute()
    # Σ ρ² = 4 + 1 + 1 + 16 + ¼; the products are 2 and 2, so e^(2·Σd) is 4 for both.
    assert math.isclose(numbers["chi2_token"], 22.25 / 5 - 1)
    assert math.isclose(numbers["chi2_sequence"], 3)
    assert numbers["tokens"] == 5
    assert numbers["outside_0.75_3"] == 2 / 5  # 4 and ½
    assert numbers["outside_0.25_8"] == 0
    # Sorted ½, 1, 1, 2, 4: the third, and the fifth twice.
    assert numbers["ratio_p50"] == 1
    assert math.isclose(math.log(numbers["ratio_p99"]), 2 * LN2, rel_tol=0.045)
    # Positions 0, 1, 2: the first tokens are 2 and 4.
    places = found.by_position()
    assert [(p, x["tokens"]) for p, x in places.items()] == [(0, 2), (1, 2), (2, 1)]
    assert math.isclose(places[0]["chi2_token"], 20 / 2 - 1)
    # Ages 0 | 1 | 2, 3 | 4; the token of age 5 is masked.
    by_age = found.by_age()
    assert [(a, x["tokens"]) for a, x in by_age.items()] == [(0, 1), (1, 1), (2, 2), (4, 1)]
    assert by_age[2]["outside_0.75_3"] == 1 / 2
    assert pl.Mismatch.of(d, d, mask).by_age() == {}


@walked("scale", [1e-3, 0.05, 1.0, 8.0])
def test_a_quantile_is_right_to_its_bin(scale: float) -> None:
    g = torch.Generator().manual_seed(2)
    d = scale * torch.randn(4, 500, generator=g, dtype=torch.float64) + scale / 9
    numbers = pl.Mismatch.of(d, torch.zeros_like(d), torch.ones(4, 500)).compute()
    ordered = d.view(-1).sort().values
    for q in (50, 95, 99):
        expected = ordered[math.ceil(q / 100 * 2000) - 1].item()
        found = math.log(numbers[f"ratio_p{q}"])
        assert abs(found - expected) <= 0.045 * abs(expected) + 2**-14


def test_chi2_is_verls() -> None:
    """The drop-in's numbers, which `make conformance` compares with verl's own."""
    batch = draw(3)
    keep = batch["mask"].any(1)  # verl counts empty sequences, with a weight of 1
    rows = [batch[name][keep] for name in ("old_logp", "rollout_logp", "mask")]
    found = pl.Mismatch.of(*rows).compute()
    theirs = compute_offpolicy_metrics(rows[0], rows[1], rows[2].double())
    assert math.isclose(found["chi2_token"], theirs["chi2_token"], rel_tol=1e-6)
    assert math.isclose(found["chi2_sequence"], theirs["chi2_seq"], rel_tol=1e-6)


def test_any_partition_gives_the_same_numbers() -> None:
    whole = pl.Mismatch.of(**draw())
    cuts = ([4], [0, 3], [1, 2, 5])
    parts = [pl.Mismatch.of(**{n: x[i] for n, x in draw().items()}) for i in cuts]
    merged = sum(parts)
    # The histogram and the shares are counts, which are exact.
    assert torch.equal(merged.by_bin.sum((0, 1))[:-3], whole.by_bin.sum((0, 1))[:-3])
    assert_numbers(merged.compute(), whole.compute(), 1e-13)
    for name in ("by_position", "by_age"):
        tables = getattr(merged, name)(), getattr(whole, name)()
        assert tables[0].keys() == tables[1].keys()
        for first in tables[0]:
            assert_numbers(tables[0][first], tables[1][first], 1e-13)


def test_a_pack_is_measured_as_rows_are() -> None:
    batch = draw()
    mask = batch["mask"]
    rows = [x.clone() for x in (batch["old_logp"], batch["rollout_logp"])]
    for x in rows:
        x[~mask] = math.nan
    padded = pl.Mismatch.of(*rows, mask, ages=batch["ages"])
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    flat = {name: x[mask] for name, x in batch.items()}
    packed = pl.Mismatch.of(**flat, cu_seqlens=bounds)
    torch.testing.assert_close(packed.by_bin, padded.by_bin, rtol=1e-13, atol=0)
    torch.testing.assert_close(packed.by_sequence, padded.by_sequence, rtol=1e-13, atol=0)


def test_the_exact_mode_changes_no_count() -> None:
    plain = pl.Mismatch.of(**draw())
    with pl.exact():
        exact = pl.Mismatch.of(**draw())
    torch.testing.assert_close(exact.by_bin, plain.by_bin, rtol=1e-13, atol=0)
    torch.testing.assert_close(exact.by_sequence, plain.by_sequence, rtol=1e-13, atol=0)


def on_rank(rank: int, store: Any, out: Any) -> None:
    """Even tokens of the sequences on one rank, odd ones on the other."""
    timeout = timedelta(seconds=60)
    init = f"file://{store}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timeout)
    batch = draw()
    places = batch["mask"].cumsum(1) - batch["mask"].long()
    half = {name: x[:, rank::2].contiguous() for name, x in {**batch, "positions": places}.items()}
    found = pl.Mismatch.of(**half, cp_group=dist.group.WORLD).all_reduce(dist.group.WORLD)
    dist.destroy_process_group()
    torch.save((found.by_bin, found.by_sequence), out)


def test_ranks_that_share_sequences_count_them_once(tmp_path: Any) -> None:
    store, outs = tmp_path / "store", [tmp_path / "0.pt", tmp_path / "1.pt"]
    other = mp.get_context("spawn").Process(target=on_rank, args=(1, store, outs[1]))
    other.start()
    on_rank(0, store, outs[0])
    other.join()
    whole = pl.Mismatch.of(**draw())
    for out in outs:
        by_bin, by_sequence = torch.load(out)
        torch.testing.assert_close(by_bin, whole.by_bin, rtol=1e-13, atol=0)
        torch.testing.assert_close(by_sequence, whole.by_sequence, rtol=1e-13, atol=0)


def test_a_nan_shows_and_nothing_is_nan() -> None:
    x = torch.tensor([[-1.0, math.nan]])
    numbers = pl.Mismatch.of(x, torch.zeros(1, 2), torch.ones(1, 2)).compute()
    assert all(math.isnan(numbers[name]) for name in ("chi2_token", "ratio_p50", "chi2_sequence"))
    empty = pl.Mismatch.of(x, x, torch.zeros(1, 2))
    assert math.isnan(empty.compute()["ratio_p99"])
    assert empty.by_position() == {}
    huge = pl.Mismatch.of(torch.zeros(1, 2), torch.full((1, 2), -900.0), torch.ones(1, 2)).compute()
    assert math.isclose(huge["chi2_sequence"], math.exp(40), rel_tol=1e-12)
    assert huge["outside_0.5_2"] == 1


@walked(
    ("call", "words"),
    [
        (lambda x: pl.Mismatch.of(x, x[:1], x != 0), "rollout_logp has shape (1, 3)"),
        (lambda x: pl.Mismatch.of(x, x, x != 0, ages=x), "ages must be"),
        (lambda x: pl.Mismatch.of(x, x, x != 0, bands=(0.5, 2.0)), "bands must hold pairs"),
        (lambda x: pl.Mismatch.of(x, x, x != 0, bands=[(2.0, 0.5)]), "bands must be >= 2"),
        (
            lambda x: pl.Mismatch.of(x, x, x != 0) + pl.Mismatch.of(x, x, x != 0, bands=[(0, 9)]),
            "the same bands",
        ),
    ],
)
def test_errors_name_the_argument(call: Any, words: str) -> None:
    with pytest.raises((pl.InputError, TypeError)) as error:
        call(torch.zeros(2, 3))
    assert words in str(error.value), str(error.value)
