"""Turns and scans over time with tokens on several ranks, and prompts with samples on several
ranks: equal to one process.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from cp_order_ranks import (
    BATCH,
    CASES,
    ESTIMATES,
    IDS,
    KINDS,
    REWARDS,
    ROWS,
    SCANS,
    SHARDINGS,
    TURN_SPECS,
    kind_of,
    over_time,
    owners,
    scan_cases,
    shard,
    through_the_head,
    whole,
    work,
)
from started import run_ranks, started_once
from walk import walked

from cases import PRESETS, assert_same, run
from policyloss import advantage

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The results of the four ranks for every case. Parallel test workers share one set of
    processes: the first starts it.
    """

    def start(place: Path) -> None:
        run_ranks(work, str(place), count=4)

    folder = started_once(tmp_path_factory, "cp_order", start)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(4)]


def groups_of(size: int) -> list[list[int]]:
    """The context-parallel groups of this size: two pairs, which do the same, or all four ranks."""
    return [[0, 1], [2, 3]] if size == 2 else [[0, 1, 2, 3]]


@walked("sharding", SHARDINGS)
@walked("ranks", [2, 4])
def test_the_shards_are_the_batch(sharding: str, ranks: int) -> None:
    """No valid token is lost or held twice, and turns do cross ranks."""
    parts = [shard(sharding, rank, ranks, "padded") for rank in range(ranks)]
    numbers = torch.arange(BATCH.mask.numel(), dtype=torch.float64).view(BATCH.mask.shape) + 1
    assert torch.equal(whole([p.split(numbers) for p in parts], sharding), numbers * BATCH.mask)
    assert sum(int(p.batch.mask.sum()) for p in parts) == int(BATCH.mask.sum())
    owner = owners(ranks)[sharding]
    crossings = BATCH.mask[:, 1:] & BATCH.mask[:, :-1] & (owner[:, 1:] != owner[:, :-1])
    assert crossings.sum() >= 2 or (ranks == 2 and sharding.startswith(("a rank", "one rank")))


@walked(("size", "sharding", "layout"), CASES)
@walked("name", TURN_SPECS)
def test_turns_cross_ranks(name: str, size: int, sharding: str, layout: str, said: Said) -> None:
    expected = run(TURN_SPECS[name], BATCH, **KINDS[kind_of(name, size, sharding)])
    for ranks in groups_of(size):
        found = [said[rank][f"turns: {name}, {size}, {sharding}, {layout}"] for rank in ranks]
        assert_same(sum(f["loss"] for f in found), expected.loss, what="loss")
        assert_same(whole([f["dlogp"] for f in found], sharding), expected.dlogp, what="gradient")
        for f in found:
            assert_same(f["metrics"], expected.metrics, what="metric")


def test_head_and_compiled_loss_pass_positions_on(said: Said) -> None:
    expected = through_the_head(None)
    for name in ("loss", "gradient"):
        assert_same(sum(ranks["head"][name] for ranks in said), expected[name], what=name)
    assert expected["gradient"].abs().max() > 1e-2
    assert_same(
        sum(ranks["compiled"] for ranks in said),
        run(TURN_SPECS["gspo_turn"], BATCH).loss,
        what="loss",
    )


def test_a_turn_is_not_a_sequence() -> None:
    """The turns of a rank alone, or the sequence as one turn, give other losses: the cases above
    can fail.
    """
    turn, sequence = (run(PRESETS[name], BATCH).dlogp for name in ("gspo_turn", "gspo"))
    assert (turn - sequence).abs().max() > 1e-3
    alone = [
        run(PRESETS["gspo_turn"], shard("contiguous", rank, 2, "padded").batch).dlogp
        for rank in (0, 1)
    ]
    assert (whole(alone, "contiguous") - turn).abs().max() > 1e-3


@walked(("size", "sharding", "layout"), CASES)
def test_scans_cross_ranks(size: int, sharding: str, layout: str, said: Said) -> None:
    for name, per_sequence, poisoned in scan_cases(size, layout):
        expected = over_time(SCANS[name], per_sequence, poisoned, None)
        assert bool(expected.isnan().any()) == poisoned
        for ranks in groups_of(size):
            case = f"scan: {name}, {per_sequence}, {poisoned}, {size}, {sharding}, {layout}"
            assert_same(whole([said[rank][case] for rank in ranks], sharding), expected, what=case)


def test_by_hand(said: Said) -> None:
    for first in (0, 2):
        even, odd = said[first]["hand"], said[first + 1]["hand"]
        # GAE with γ = 0.9, λ = 0.5 of rewards 1, 2, 3 and values 0.5, 1,
        # 1.5 at positions 0 and 2 | 1:
        # δ = 1 + 0.9·1 − 0.5, 2 + 0.9·1.5 − 1, 3 − 1.5 = 1.4, 2.35, 1.5;
        # A = 1.4 + 0.45·3.025, 2.35 + 0.45·1.5, 1.5
        assert_same(even["gae"], torch.tensor([[2.76125, 1.5]], dtype=torch.float64))
        assert_same(odd["gae"], torch.tensor([[3.025, 0.0]], dtype=torch.float64))
        # Log-ratios 0.1, 0.2, 0.6, masked, 0.5 at positions 0 and 4 | 1, 2 (and 3): turns with
        # means 0.3 and 0.5; loss −Σ ratio.
        assert_same(even["loss"], torch.tensor(-math.exp(0.3) - math.exp(0.5), dtype=torch.float64))
        assert_same(odd["loss"], torch.tensor(-2 * math.exp(0.3), dtype=torch.float64))


def test_whitening_over_pairs_of_ranks(said: Said) -> None:
    """Two pairs hold other sequences; each pair has their tokens spread over it;
    all four share mean and variance.
    """
    expected = advantage.reinforce_pp(BATCH.advantages, BATCH.mask, 0.9)
    for first, half in ((0, [0, 1, 5]), (2, [2, 3, 4, 6])):
        found = [
            torch.zeros(7, said[rank]["pairs"].shape[1], dtype=torch.float64)
            for rank in (first, first + 1)
        ]
        for x, rank in zip(found, (first, first + 1), strict=True):
            x[half] = said[rank]["pairs"]
        assert_same(whole(found, "zigzag")[half], expected[half], what="advantages")


@walked("name", ESTIMATES)
def test_groups_of_samples_cross_ranks(name: str, said: Said) -> None:
    """Rank 2 has no sequence. Bit for bit the numbers of one process, except for whitening, whose
    sums depend on the order of rows.
    """
    expected, tol = (
        ESTIMATES[name](REWARDS, IDS),
        1e-14 if name.startswith(("gdpo", "reinforce", "whiten")) else 0,
    )
    for rank, rows in enumerate(ROWS):
        assert_same(said[rank][f"estimate: {name}"], expected[rows], tol, what=f"rank {rank}")


@pytest.mark.filterwarnings("ignore:group_ids. all")
@walked("name", ESTIMATES)
def test_without_a_group_statistics_are_local_and_say_so(name: str, said: Said) -> None:
    for rank, ranks in enumerate(said):
        assert torch.equal(ranks[f"local: {name}"], ranks[f"unsaid: {name}"])
        quiet, caught = ranks[f"warnings: {name}"]
        assert quiet == 0
        ((category, message, filename),) = caught
        assert (category, filename) == ("UserWarning", "cp_order_ranks.py")
        assert "torch.distributed runs on 4 ranks" in message
        assert 'group="local"' in message
        rows = ROWS[rank]
        if name == "grpo" and rank != 2:
            assert torch.equal(ranks["local: grpo"], advantage.grpo(REWARDS[rows], IDS[rows]))
    assert not torch.equal(said[0][f"local: {name}"], said[0][f"estimate: {name}"])


def test_drop_ins_do_not_warn(said: Said) -> None:
    assert all(ranks["warnings: drop-ins"] == [] for ranks in said)


def test_the_numbers_that_losses_exchange(said: Said) -> None:
    """One all-reduce of (sum, count) for a sequence-level ratio, and one back; turns send their
    ends besides, in two gathers.
    """
    for ranks in said:
        for name in ("gspo", "gspo_token"):
            assert ranks[f"cost: {name}"][0] == {"all_reduce": 1}
        assert ranks["cost: gspo"][1] == {"all_reduce": 1}
        assert ranks["cost: gspo_token"][1] == {}
        assert ranks["cost: gspo_turn"] == [{"all_gather": 2, "all_reduce": 2}, {"all_reduce": 1}]
        assert ranks["cost: scan"] == ranks["cost: estimate"] == {"all_gather": 2}


@walked(
    ("case", "message"),
    [
        ("missing", "a turn depends on the order of tokens, and with cp_group"),
        ("missing", "pass positions=, each token's place in its whole sequence"),
        ("twice", "belongs to two valid tokens on the ranks of cp_group"),
        ("float", "positions must be a tensor of integers, got dtype torch.float64"),
        ("shape", "positions has shape (7, 1) but tokens has (7, "),
        ("scan missing", "a scan over time depends on the order of tokens"),
        ("scan twice", "position 0 of sequence 0 belongs to two valid tokens"),
        (
            "other sequences",
            "every rank must give as many sequences, but the ranks gave [3, 3, 2, 3]",
        ),
        ("mixed", "packed ones as [S, 1]"),
        ("columns", "bridge=False compares columns, which"),
        (
            "name",
            "group must be a process group, \"local\" (this rank alone) or None, got 'world'",
        ),
    ],
)
def test_every_rank_raises_the_error(case: str, message: str, said: Said) -> None:
    for rank, ranks in enumerate(said):
        assert message in ranks[case], f"rank {rank}"
