"""The head over ranks gives the numbers of one process:
a vocabulary in shards, sequences in shards, batches in shards.

The expected numbers come from the contract line and `policy_loss` on the whole batch, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import divergence_ranks
import head_ranks as ranks_of
import head_ranks_train as train_of
import pytest
import torch
import torch.multiprocessing
from head_cases import (
    CUDA,
    LOGPROB_PLANS,
    LOSS_PLANS,
    HeadBatch,
    assert_near,
    assert_same_bits,
    contract,
    leaf,
)
from head_ranks import (
    BATCH,
    CP_SEQUENCE,
    CP_TOKEN,
    CUTS,
    FIRST,
    VOCAB,
    ZEROS,
    Cut,
    cp_cases,
    given,
    logprob_cases,
    loss_cases,
    plan_cases,
)
from started import run_ranks, started_once
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
from two_ranks import DP_ROWS, SHARDINGS, held
from walk import walked

import policyloss as pl
from cases import PRESETS, assert_same

pytestmark = pytest.mark.skipif(CUDA, reason="its ranks are processes on a CPU, in float64")
Said = list[dict[str, Any]]
TOLERANCE = 1e-12


def told(factory: pytest.TempPathFactory, body: Callable[[int, str], None], count: int) -> Path:
    """The folder with the results of `count` processes.
    Parallel test workers share one set of them: the first starts it.
    """

    def start(place: Path) -> None:
        try:
            run_ranks(body, str(place), count=count)
        # Results up to here are kept; the missing ones fail below.
        except (
            ProcessExitedException,
            ProcessRaisedException,
        ) as stopped:
            print(stopped)

    return started_once(factory, f"head_ranks_{body.__name__}", start)


def read(folder: Path, name: str, count: int) -> Said:
    return [torch.load(folder / f"{name}{rank}.pt", weights_only=True) for rank in range(count)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return read(told(tmp_path_factory, train_of.two, 2), "rank", 2)


@pytest.fixture(scope="module")
def agreement(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return read(told(tmp_path_factory, train_of.two, 2), "agreement", 2)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Said:
    return read(told(tmp_path_factory, ranks_of.three, 3), "rank", 3)


@pytest.fixture
def said(request: pytest.FixtureRequest, count: int) -> Said:
    ranks: Said = request.getfixturevalue({2: "two", 3: "three"}[count])
    return ranks


def numbers(value: Tensor, leaves: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    return ranks_of.numbers(value, leaves, **more)


def on_one(
    spec: pl.LossSpec, batch: HeadBatch, bias: Tensor | None = None, **head: Any
) -> dict[str, Any]:
    """The loss of the whole batch on one process, from the contract's log-probs and entropy."""
    leaves = {
        "hidden": leaf(batch.hidden),
        "weight": leaf(batch.weight),
        **({} if bias is None else {"bias": leaf(bias)}),
    }
    values = contract(ids=batch.ids, mask=batch.tokens.mask, **leaves, **head)
    out = pl.policy_loss(spec, values.logp, entropy=values.entropy, **given(batch))
    seen = {
        "logp": values.logp.detach(),
        "entropy": values.entropy.detach(),
        "metrics": out.metrics.compute(),
    }
    return numbers(out.loss, leaves, **seen)


def check_shards(said: Said, case: str, expected: dict[str, Any], cut: Cut) -> None:
    """Values and the gradient of hidden complete on every rank, bit for bit the same;
    of weight and bias, this rank's rows.
    """
    whole = [name for name in expected if name not in ("dweight", "dbias", "metrics")]
    for rank, numbers in enumerate(s[case] for s in said):
        for name in whole:
            assert_near(numbers[name], expected[name], TOLERANCE, f"rank {rank}, {name}")
            assert_same_bits(numbers[name], said[0][case][name])
        for name in ("dweight", "dbias"):
            # The tolerance is of the whole, not of the shard.
            scale = max(1.0, 1 / (float(expected[name].abs().max()) or 1.0))
            assert_near(
                scale * numbers[name],
                scale * expected[name][cut.part(rank)],
                TOLERANCE,
                f"rank {rank}, {name}",
            )
        if "metrics" in expected:
            assert_same(numbers["metrics"], expected["metrics"], TOLERANCE, f"rank {rank}, metric")


SHARDED = [(count, name) for count, cuts in CUTS.items() for name in cuts]


@pytest.mark.parametrize(("count", "name"), SHARDED)
def test_logprobs_over_a_sharded_vocabulary(said: Said, count: int, name: str) -> None:
    cut, batch = CUTS[count][name], CUTS[count][name].batch()
    for case, arguments in logprob_cases(name == FIRST[count]).items():
        leaves = {
            "hidden": leaf(batch.hidden),
            "weight": leaf(batch.weight),
            "bias": leaf(cut.bias),
        }
        scale = {k: v for k, v in arguments.items() if k != "plan"}
        values = contract(ids=batch.ids, mask=batch.tokens.mask, **leaves, **scale)
        seen = {"logp": values.logp.detach(), "entropy": values.entropy.detach()}
        check_shards(
            said,
            f"logprobs: {name}, {case}",
            numbers(ranks_of.weighted(values), leaves, **seen),
            cut,
        )


@pytest.mark.parametrize(("count", "name"), SHARDED)
def test_supports_over_a_sharded_vocabulary(said: Said, count: int, name: str) -> None:
    """Some tokens keep no entry of a rank at all."""
    cut, batch = CUTS[count][name], CUTS[count][name].batch()
    leaves = {"hidden": leaf(batch.hidden), "weight": leaf(batch.weight), "bias": leaf(cut.bias)}
    support = {"support": ranks_of.support_of(batch)}
    expected = ranks_of.head_logprobs(leaves, batch, None, **support)
    for plan in ("recompute", "stash"):
        check_shards(said, f"support: {name}, {plan}", expected, cut)
    loss = ranks_of.head_loss(ranks_of.FULL, leaves, batch, totals="local", **support)
    check_shards(said, f"support: {name}, loss", loss, cut)


@pytest.mark.parametrize(("count", "name"), SHARDED)
def test_a_tree_over_a_sharded_vocabulary(said: Said, count: int, name: str) -> None:
    """Its terms share hidden states; on one process the batch is unrolled."""
    cut = CUTS[count][name]
    batch, index = ranks_of.tree_of(cut)
    states = leaf(batch.hidden)
    leaves = {"hidden": states, "weight": leaf(batch.weight), "bias": leaf(cut.bias)}
    values = contract(
        ids=batch.ids,
        mask=batch.tokens.mask,
        **{**leaves, "hidden": states.flatten(0, 1)[index]},
    )
    out = pl.policy_loss(ranks_of.TREE_SPEC, values.logp, entropy=values.entropy, **given(batch))
    seen = {"logp": values.logp.detach(), "metrics": out.metrics.compute()}
    expected = numbers(out.loss, leaves, **seen)
    for plan in LOSS_PLANS:
        check_shards(said, f"tree: {name}, {plan}", expected, cut)


@pytest.mark.parametrize(("count", "name"), SHARDED)
def test_the_loss_over_a_sharded_vocabulary(said: Said, count: int, name: str) -> None:
    cut, first = CUTS[count][name], name == FIRST[count]
    plain = cache(lambda spec: on_one(spec, cut.batch(), cut.bias))
    cases = loss_cases(first)
    assert len(cases) == (20 if first else 8)
    for case, (spec, _, scale) in cases.items():
        expected = on_one(spec, cut.batch(**scale), cut.bias, **scale) if scale else plain(spec)
        check_shards(said, f"loss: {name}, {case}", expected, cut)


def test_a_divergence_over_a_sharded_vocabulary(three: Said) -> None:
    """One shard has a single entry, fewer than the requested number of most probable ones."""
    cut = CUTS[3][FIRST[3]]
    expected = divergence_ranks.divergences(cut, slice(0, VOCAB), None)
    assert len(expected) == len(divergence_ranks.CASES) + 2
    for case, truth in expected.items():
        check_shards(three, case, truth, cut)


@walked(("count", "name"), SHARDED)
def test_the_shards_are_right(count: int, name: str) -> None:
    """Shards make up the vocabulary, both ends of each live one are used,
    and some tokens are clipped but not most.
    """
    cut = CUTS[count][name]
    assert (len(cut.sizes), sum(cut.sizes)) == (count, VOCAB)
    ids = set(cut.batch().ids[BATCH.tokens.mask].tolist())
    for rank in range(count):
        part = cut.part(rank)
        assert ({part.start, part.stop - 1} <= ids) == (rank != cut.dead)
        assert bool((cut.bias[part] == -torch.inf).all()) == (rank == cut.dead)
    assert 0.05 < on_one(PRESETS["ppo"], cut.batch(), cut.bias)["metrics"]["clip_fraction"] < 0.7


@pytest.mark.parametrize("stray", [-1, VOCAB])
@pytest.mark.parametrize("count", [2, 3])
def test_an_id_outside_the_whole_vocabulary_stops_every_rank(
    said: Said, count: int, stray: int
) -> None:
    cases = [f"stray logprobs: {stray}, {plan}" for plan in plan_cases(LOGPROB_PLANS)]
    for case in [*cases, *(f"stray loss: {stray}, {plan}" for plan in LOSS_PLANS)]:
        messages = {s[case] for s in said}
        assert len(messages) == 1
        assert f"ids holds {stray} at position" in messages.pop()


@pytest.mark.parametrize("plan", LOSS_PLANS)
@pytest.mark.parametrize("count", [2, 3])
def test_nothing_to_train_on_over_a_sharded_vocabulary(said: Said, count: int, plan: str) -> None:
    for numbers in (s[f"nothing: {plan}"] for s in said):
        for name in ("value", "logp", "entropy", "dhidden", "dweight", "dbias"):
            assert (numbers[name] == 0).all(), name
        assert numbers["metrics"]["tokens"] == 0


@pytest.mark.parametrize("plan", LOSS_PLANS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_nan_in_one_shard_shows_on_every_rank(said: Said, count: int, plan: str) -> None:
    for numbers in (s[f"nan: {plan}"] for s in said):
        assert numbers["value"].isnan()
        assert numbers["logp"][BATCH.tokens.mask].isnan().all()
        assert numbers["metrics"]["nonfinite_tokens"] == BATCH.tokens.mask.sum()


def test_an_error_on_one_rank_is_an_error_on_all(agreement: Said) -> None:
    """A shard without entries, or hidden states that are not the same everywhere:
    none is left waiting for the others.
    """
    for s in agreement:
        assert "weight has no entries on rank 1 of vocab_group" in s["empty"]
        assert (
            "hidden must be the same on every rank of vocab_group, but they hold [16, 56] tokens"
            in s["fewer"]
        )


@walked(
    ("plan", "memory"),
    [("auto", "scarce on one"), *((plan, "ample") for plan in ("auto", *LOSS_PLANS))],
)
@walked("name", ["ppo", "gspo"])
def test_ranks_take_the_same_windows_whatever_they_hold(
    agreement: Said, name: str, plan: str, memory: str
) -> None:
    """Each window is summed over the ranks, so neither the size
    of a shard nor a rank's memory may change it.
    """
    cut, case = CUTS[2]["one entry and the rest"], f"{name}, {plan}, {memory}"
    check_shards(agreement, f"agreement: {case}", on_one(PRESETS[name], cut.batch(), cut.bias), cut)
    expected = plan if plan != "auto" else "recompute" if memory == "scarce on one" else "one_pass"
    for s in agreement:
        assert s[f"plan: {case}"] == [expected, 16]


@pytest.mark.parametrize("count", [2, 3])
def test_missing_totals_are_an_error_with_a_sharded_vocabulary(said: Said, count: int) -> None:
    for s in said:
        assert f"torch.distributed runs on {count} ranks" in s["no totals"]
        assert 'totals="local"' in s["no totals"]


def whole(gradients: list[Tensor], sharding: str, packed: bool) -> Tensor:
    """The ranks' gradients of their hidden states, at the places these have in `BATCH`."""
    found = torch.zeros_like(BATCH.hidden)
    for rank, gradient in enumerate(gradients):
        inside = ranks_of.shard(sharding, rank, packed=False).tokens.inside
        found[held(sharding, rank)] = gradient if packed else gradient[inside]
    return found


def check_sums(two: Said, case: str, expected: dict[str, Any], sharding: str, packed: bool) -> None:
    """The ranks' losses and weight gradients add up,
    and their hidden gradients are the shards of the whole.
    """
    ranks = [s[case] for s in two]
    for name in ("value", "dweight"):
        assert_near(ranks[0][name] + ranks[1][name], expected[name], TOLERANCE, name)
    assert_near(
        whole([r["dhidden"] for r in ranks], sharding, packed),
        expected["dhidden"],
        TOLERANCE,
        "dhidden",
    )


one_process = cache(lambda name: on_one({**CP_TOKEN, **CP_SEQUENCE}[name], BATCH))


@walked("sharding", SHARDINGS)
@walked("name", [*CP_TOKEN, *CP_SEQUENCE])
def test_context_parallel_ranks_add_up(two: Said, name: str, sharding: str) -> None:
    spec = {**CP_TOKEN, **CP_SEQUENCE}[name]
    cases = {
        case: packed
        for case, (s, _, where, packed) in cp_cases().items()
        if s is spec and where == sharding
    }
    assert len(cases) >= 2
    assert set(cases.values()) == {True, False}
    for case, packed in cases.items():
        expected = one_process(name)
        check_sums(two, f"cp: {case}", expected, sharding, packed)
        for s in two:
            assert_same(s[f"cp: {case}"]["metrics"], expected["metrics"], TOLERANCE, "metric")


@walked("name", ["ppo, seq-mean", "gspo"])
def test_context_parallel_ranks_with_averaged_gradients(two: Said, name: str) -> None:
    """`Totals.count` takes it that gradients are averaged over the group:
    each rank's is then twice its share.
    """
    expected, ranks = one_process(name), [s[f"cp mean: {name}"] for s in two]
    assert_near(
        (ranks[0]["dweight"] + ranks[1]["dweight"]) / 2, expected["dweight"], TOLERANCE, "dweight"
    )
    assert_near(
        whole([r["dhidden"] for r in ranks], "zigzag", packed=True) / 2,
        expected["dhidden"],
        TOLERANCE,
        "dhidden",
    )


def test_the_plan_of_a_sequence_that_lies_on_several_ranks(two: Said) -> None:
    for s in two:
        assert s["cp plan: ppo, seq-mean"][0] == "one_pass"
        assert s["cp plan: gspo"] == ["recompute", "a sequence's tokens lie on several ranks"]
        assert (
            "plan='one_pass' cannot run this loss: a sequence's tokens lie on several ranks"
            in s["cp one pass"]
        )


def test_missing_totals_are_an_error_with_a_cp_group(two: Said) -> None:
    for s in two:
        assert "torch.distributed runs on 2 ranks" in s["cp no totals"]
        assert "policyloss.Totals.count(" in s["cp no totals"]


@walked("sharding", SHARDINGS)
def test_rows_left_out_under_a_cp_group(two: Said, sharding: str) -> None:
    """Tokens without advantage are not computed, but still counted in every sequence's length."""
    check_sums(
        two,
        f"cp skip: {sharding}",
        on_one(CP_TOKEN["ppo, seq-mean"], ZEROS),
        sharding,
        packed=False,
    )


def check_parameters(two: Said, case: str, expected: dict[str, Tensor], tol: float) -> None:
    for s in two:
        assert s[case].keys() == expected.keys()
        for name, x in expected.items():
            assert x.abs().max() > 0
            assert_near(s[case][name], x, tol, f"{case}, {name}")


@pytest.mark.skipif(not train_of.FSDP_RUNS, reason="FSDP2 of this torch does not run on a CPU")
@walked("split", DP_ROWS)
@walked("name", train_of.SPECS)
def test_three_steps_with_a_sharded_body(two: Said, name: str, split: str) -> None:
    """FSDP2 around the body, the head a plain weight: the parameters of one process, to 1e-10."""
    steps, start = (
        train_of.whole_steps(train_of.SPECS[name]),
        dict(train_of.new_policy().named_parameters()),
    )
    assert all((steps[n] - start[n]).abs().max() > 1e-4 for n in steps)
    check_parameters(two, f"fsdp: {name}, {split}", steps, 1e-10)


def test_a_sharded_head(two: Said) -> None:
    """A DTensor is refused with what to do, which gives the gradient of all ranks;
    `full_tensor()` alone keeps one rank's.
    """
    for s in two:
        for name in ("weight", "bias"):
            assert f"InputError: {name} is a DTensor" in s[f"dtensor {name}"]
            assert "full_tensor(grad_placements=" in s[f"dtensor {name}"]
    if not two[0]["gloo averages"]:
        pytest.skip("Gloo of this torch adds up where it should average")
    gradients = train_of.whole_gradients(train_of.FULL)
    check_parameters(
        two,
        "dtensor gradients",
        {n: g for n, g in gradients.items() if n.startswith("head")},
        TOLERANCE,
    )


@walked("split", DP_ROWS)
@walked("name", train_of.SPECS)
def test_averaged_gradients(two: Said, name: str, split: str) -> None:
    """DDP, at once and over micro-batches that are added to gradients of 1:
    those of one process with the whole batch.
    """
    expected = train_of.whole_gradients(train_of.SPECS[name])
    check_parameters(two, f"ddp: {name}, {split}", expected, TOLERANCE)
    check_parameters(
        two, f"accumulated: {name}, {split}", {n: 1 + g for n, g in expected.items()}, TOLERANCE
    )
