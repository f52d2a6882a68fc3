"""Two ranks give the numbers of one process: sequences spread over ranks (context parallel), or
distributed among them (data parallel).

With `cp_group`, the ranks' losses add up to the whole loss and the gradients of the shards are the
shards of the gradient; with data-parallel ranks, their average is (`dp_size`). Metrics merged by
`all_reduce` are the metrics of the whole batch on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing
from started import run_ranks, started_once
from two_ranks import (
    BATCH,
    CP_SPECS,
    DP_ROWS,
    SHARDINGS,
    VALUE_AGGREGATES,
    cp_cases,
    shard,
    whole_gradient,
    work,
)
from walk import walked

import policyloss as pl
from cases import BY_CORRECTION, PRESETS, Result, assert_same, make_batch, run

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The results of both ranks for every case. Parallel test workers share one pair of
    processes: the first starts it.
    """
    folder = started_once(
        tmp_path_factory,
        "two_ranks",
        lambda place: run_ranks(work, str(place), count=2),
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def both(said: Said, case: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return said[0][case], said[1][case]


@walked("case", cp_cases())
def test_context_parallel_ranks_add_up(case: str, said: Said) -> None:
    spec, sharding, packed = cp_cases()[case]
    expected, ranks = run(spec, BATCH), both(said, f"cp: {case}")
    assert_same(ranks[0]["loss"] + ranks[1]["loss"], expected.loss, what="loss")
    for name in ("dlogp", "dentropy"):
        assert_same(
            whole_gradient([r[name] for r in ranks], sharding, packed),
            getattr(expected, name),
            what=name,
        )
    for rank in ranks:
        assert_same(rank["metrics"], expected.metrics, what="metric")


@walked("sharding", SHARDINGS)
def test_the_shards_are_the_batch(sharding: str) -> None:
    """Both ranks hold a part of it, or the case tests nothing;
    and no token is lost or held twice.
    """
    shards = [shard(sharding, rank, packed=False) for rank in (0, 1)]
    assert sum(int(s.mask.sum()) for s in shards) == int(BATCH.mask.sum())
    assert all(int(s.lengths.sum()) > 0 for s in shards)
    without = [bool((s.mask.sum(1)[BATCH.mask.sum(1) > 0] == 0).any()) for s in shards]
    assert (sharding == "halves") or (sharding == "zigzag") or any(without)
    if sharding == "a rank without a valid token":
        assert not shards[1].mask.any()


def value_of_whole(aggregate: Any) -> Result:
    values = BATCH.logp.clone().requires_grad_()
    out = pl.value_loss(
        values,
        BATCH.advantages,
        BATCH.old_logp,
        BATCH.mask,
        aggregate=aggregate,
        group_ids=BATCH.group_ids,
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    return Result(out.loss.detach(), gradient, torch.zeros_like(gradient), out.metrics)


@walked("aggregate", VALUE_AGGREGATES, ids=str)
def test_value_loss_over_context_parallel_ranks(aggregate: Any, said: Said) -> None:
    expected, ranks = value_of_whole(aggregate), both(said, f"cp value: {aggregate}")
    assert_same(ranks[0]["loss"] + ranks[1]["loss"], expected.loss, what="loss")
    assert_same(
        whole_gradient([r["dlogp"] for r in ranks], "zigzag", packed=True),
        expected.dlogp,
        what="gradient",
    )
    assert_same(ranks[1]["metrics"], expected.metrics, what="metric")


def test_one_advantage_per_sequence_reaches_every_rank(said: Said) -> None:
    batch = make_batch(seed=10).map(
        lambda _: torch.linspace(-2, 2, 7, dtype=torch.float64), "advantages"
    )
    expected, ranks = run(PRESETS["gspo"], batch), both(said, "cp per sequence")
    assert_same(ranks[0]["loss"] + ranks[1]["loss"], expected.loss, what="loss")
    assert_same(
        whole_gradient([r["dlogp"] for r in ranks], "halves", packed=True),
        expected.dlogp,
        what="gradient",
    )


@walked("holder", [0, 1])
@walked(
    "name",
    [n for n, s in CP_SPECS.items() if n.endswith(":keep") and "rollout_logp" in s.reads],
)
def test_a_nan_on_one_rank_is_not_dropped(name: str, holder: int, said: Said) -> None:
    ranks = both(said, f"cp nan: {name}, {holder}")
    assert (ranks[0]["loss"] + ranks[1]["loss"]).isnan()
    assert ranks[0]["metrics"]["nonfinite_tokens"] >= 1


def test_turns_that_cross_ranks_need_positions(said: Said) -> None:
    """With them, see `test_cp_order`."""
    for message in both(said, "cp turn"):
        assert "a turn depends on the order of tokens" in str(message)
        assert "pass positions=" in str(message)


def check_average(
    ranks: tuple[dict[str, Any], dict[str, Any]], expected: Result, split: str
) -> None:
    """The mean over ranks of loss and gradient, as DDP takes it, is the whole batch's."""
    assert_same((ranks[0]["loss"] + ranks[1]["loss"]) / 2, expected.loss, what="loss")
    for rows, rank in zip(DP_ROWS[split], ranks, strict=True):
        assert_same(rank["dlogp"] / 2, expected.dlogp[rows], what="gradient")
        assert_same(rank["metrics"], expected.metrics, what="metric")


@walked("split", DP_ROWS)
@walked("name", [*PRESETS, *BY_CORRECTION, "PromptMean"])
def test_data_parallel_ranks_average(name: str, split: str, said: Said) -> None:
    """PromptMean's group 11 has one sequence on each rank; measured statistics cross ranks too."""
    spec = {**PRESETS, **BY_CORRECTION, "PromptMean": pl.LossSpec(aggregate=pl.PromptMean())}[name]
    check_average(both(said, f"dp: {name}, {split}"), run(spec, BATCH), split)


@walked("split", DP_ROWS)
@walked("aggregate", VALUE_AGGREGATES, ids=str)
def test_value_loss_over_data_parallel_ranks(aggregate: Any, split: str, said: Said) -> None:
    check_average(both(said, f"dp value: {aggregate}, {split}"), value_of_whole(aggregate), split)


def test_totals_are_counted_over_the_groups_named(said: Said) -> None:
    """5 of the 7 sequences have valid tokens. The default `dp_size`
    is every rank whose gradients are averaged.
    """
    tokens = int(BATCH.mask.sum())
    for rank, rows in enumerate(DP_ROWS["uneven"]):
        own = BATCH.rows(list(rows)).mask
        assert said[rank]["count cp"] == [tokens, 5, 2]
        assert said[rank]["count cp and group"] == [tokens, 5, 2]
        assert said[rank]["count dp"] == [tokens, 5, 2]
        assert said[rank]["count dp by group"] == [tokens, 5, 1]
        assert said[rank]["count alone"] == [int(own.sum()), int(own.any(1).sum()), 1]


@walked("case", ["error missing", "error missing value"])
def test_missing_totals_are_an_error_on_two_ranks(case: str, said: Said) -> None:
    for message in both(said, case):
        assert "torch.distributed runs on 2 ranks" in str(message)
        assert "policyloss.Totals.count(" in str(message)
        assert 'totals="local"' in str(message)


def test_with_a_cp_group_the_data_parallel_group_must_be_named(said: Said) -> None:
    for message in both(said, "error no group"):
        assert "pass the data-parallel group as group=" in str(message)


def test_local_totals_are_this_rank_only(said: Said) -> None:
    for rank, rows in enumerate(DP_ROWS["uneven"]):
        assert_same(
            said[rank]["local"], run(PRESETS["ppo"], BATCH.rows(list(rows))).loss, what="loss"
        )
