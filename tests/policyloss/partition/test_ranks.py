"""Any partition, the same gradient: 1, 2 and 4 gloo processes give the numbers of one process with
the whole batch in one call.

Loss, gradient of a small model and every metric are compared with the single process in float64: to
1e-12 in float64 and to 1e-6 in float32 (of the gradient's largest entry; of a number, or of 1 if it
is smaller). Losses that need statistics of the batch measure them on each rank's whole share first.
The two `Local…` aggregations are left out: they depend on the cut on purpose.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from ranks_cases import (
    CUTS,
    EVERY_AGGREGATE,
    EVERYWHERE,
    FULL,
    GLOBAL,
    POLICY_INPUTS,
    ROWS,
    SPECS,
    TOLERANCE,
    VALUE_INPUTS,
    flat,
    only,
    parameters,
    part,
    placed,
    predict,
    specs_of,
)
from ranks_more import COUNTED, PER_SEQUENCE, PER_TOKEN, optimal_baseline
from ranks_work import WORLDS, told, work, work_on_every_pair
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import AGGREGATES, BY_CORRECTION, LOCAL, PRESETS, assert_same, label

Said = dict[int, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["each pair once", "every pair"],
)
def every_pair(request: pytest.FixtureRequest) -> bool:
    """Whether every preset with every aggregation is cut in each of the `FULL` ways."""
    chosen: bool = request.param
    return chosen


@pytest.fixture(scope="module")
def said(every_pair: bool, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The results of the ranks of each world, by the size of the world."""
    body = work_on_every_pair if every_pair else work
    folder = told(tmp_path_factory, body, 4, "hypothesis")
    return {size: torch.load(folder / f"world{size}.pt", weights_only=True) for size in WORLDS}


@cache
def reference(case: str) -> dict[str, Any]:
    """A loss of the whole batch on one process, in one call and in float64."""
    model, whole = parameters(torch.float64), part(ROWS, EVERYWHERE, False, torch.float64)
    logp, entropy, values = predict(model, whole["ids"])
    if case.startswith("value "):
        kind, aggregate = case.removeprefix("value ").split(":")
        given = {
            "kind": kind,
            "huber_delta": 0.7,
            "aggregate": {label(a): a for a in GLOBAL}[aggregate],
        }
        out = pl.value_loss(values, **only(whole, VALUE_INPUTS), **given)
    else:
        given = {**only(whole, POLICY_INPUTS), "entropy": entropy, "divergence": entropy.square()}
        out = pl.policy_loss(SPECS[case], logp, **given)
    gradient = flat(torch.autograd.grad(out.loss, model, allow_unused=True), model)
    return {"loss": out.loss.detach(), "gradient": gradient, "metrics": out.metrics.compute()}


def check(said: Said, cut: str, case: str, dtype: str) -> None:
    actual, expected = said[CUTS[cut].ranks][dtype][f"{cut}|{case}"], reference(case)
    tolerance = TOLERANCE[dtype]
    assert_same(actual["loss"].double(), expected["loss"], tolerance, f"{case}: loss")
    size = expected["gradient"].abs().max()
    error = (actual["gradient"].double() - expected["gradient"]).abs().max() / size
    assert error <= tolerance, (
        f"{case}: the gradient is off by {error:.1e} of its largest entry {size:.1e}"
    )
    assert_same(actual["metrics"], expected["metrics"], tolerance, f"{case}: metric")


def check_where_cut(said: Said, case: str, dtype: str, every_pair: bool) -> None:
    """Under every cut of `FULL` that this loss has: all of them, or one."""
    cuts = [cut for cut in FULL if case in specs_of(cut, dtype, every_pair)]
    in_each = every_pair or (case in PRESETS and dtype == "float64")
    in_one = dtype == "float64" or case in PRESETS
    assert len(cuts) == (len(FULL) if in_each else in_one)
    for cut in cuts:
        check(said, cut, case, dtype)


@walked("name", PRESETS)
def test_every_preset_with_every_aggregation(name: str, every_pair: bool, said: Said) -> None:
    cases = [name, *(f"{name}:{label(a)}" for a in GLOBAL if a != PRESETS[name].aggregate)]
    assert len({SPECS[c].aggregate for c in cases}) >= len(GLOBAL)
    for case, dtype in product(cases, TOLERANCE):
        check_where_cut(said, case, dtype, every_pair)


@walked("case", EVERY_AGGREGATE)
def test_every_aggregation_with_kl_and_entropy(case: str, every_pair: bool, said: Said) -> None:
    check_where_cut(said, case, "float64", every_pair)


@walked("case", BY_CORRECTION)
def test_every_correction(case: str, every_pair: bool, said: Said) -> None:
    check_where_cut(said, case, "float64", every_pair)


@walked("cut", [c for c in CUTS if c not in FULL])
def test_every_preset_under_the_other_cuts(cut: str, said: Said) -> None:
    for case in PRESETS:
        check(said, cut, case, "float64")


@walked(("cut", "dtype"), [(c, d) for c in CUTS for d in TOLERANCE if d == "float64" or c in FULL])
def test_value_loss(cut: str, dtype: str, said: Said) -> None:
    for aggregate in GLOBAL:
        for kind in ("mse", "huber"):
            check(said, cut, f"value {kind}:{label(aggregate)}", dtype)


# ------------------------------------------------------------------------------------------------
# the strength of the cases


def test_only_the_local_aggregations_are_left_out() -> None:
    assert (
        {type(a) for a in AGGREGATES} - {type(a) for a in GLOBAL}
        == set(LOCAL)
        == {pl.LocalTokenMean, pl.LocalSeqMeanTokenMean}
    )


@walked("cut", CUTS)
def test_a_cut_holds_every_token_once(cut: str) -> None:
    seen = torch.zeros(EVERYWHERE.shape, dtype=torch.int64)
    for rank in range(CUTS[cut].ranks):
        micro, held = CUTS[cut].place(rank)
        for rows in micro:
            tokens = part(rows, held, CUTS[cut].packed, torch.float64)["mask"]
            seen += placed(tokens.long(), rows, held)
    assert torch.equal(seen, part(ROWS, EVERYWHERE, False, torch.float64)["mask"].long())


def valid_tokens(cut: str) -> list[list[int]]:
    """Valid tokens of each micro-batch of each rank."""
    places = [CUTS[cut].place(rank) for rank in range(CUTS[cut].ranks)]
    return [
        [int(part(rows, held, False, torch.float64)["mask"].sum()) for rows in micro]
        for micro, held in places
    ]


def test_the_cuts_match_their_names() -> None:
    assert {cut.ranks for cut in CUTS.values()} == set(WORLDS)
    assert 0 in valid_tokens("accumulation, a micro-batch without a valid token")[0]
    assert [0] in valid_tokens("DP, a rank without a valid token")
    assert [0] in valid_tokens("DP over 4 ranks")
    assert [0] in valid_tokens("CP, a rank without a valid token")
    counts = valid_tokens("DP x CP x accumulation")
    assert 0 in counts[0]
    assert len({n for rank in counts for n in rank}) > 4
    whole = part(ROWS, EVERYWHERE, False, torch.float64)["mask"]
    for cut in (c for c in CUTS if c.startswith("CP")):
        shares = torch.stack([(whole & held).any(1) for held in CUTS[cut].shards])
        assert (shares.sum(0) > 1).any() or "without a valid" in cut, (
            "no sequence lies on two ranks"
        )
        assert (shares.sum(0)[whole.any(1)] < len(CUTS[cut].shards)).any(), (
            "no rank is without a sequence"
        )


def test_the_batch_makes_the_parts_bind() -> None:
    """A part that never binds would be compared with itself as if it were not there."""
    assert reference("clip_cov")["metrics"]["clip_fraction_dropped"] > 0
    assert reference("kl_cov")["metrics"]["clip_fraction_upper"] > 0
    for name in ("ppo", "dapo", "gspo", "cispo_unified", "topr"):
        assert 0 < reference(name)["metrics"]["clip_fraction"] < 1
    rejecting = {c: reference(c)["metrics"].get("rejected_fraction", 0.5) for c in BY_CORRECTION}
    assert [c for c, share in rejecting.items() if not 0 < share < 1] == []
    # A regression on the advantage has 2·beta times the gradient of the others (see a2po).
    scale = {c: 2 * s.trust.beta for c, s in SPECS.items() if isinstance(s.trust, pl.Regression)}
    largest = {c: reference(c)["gradient"].abs().max() / scale.get(c, 1) for c in SPECS}
    assert min(largest.values()) > 1e-4


# ------------------------------------------------------------------------------------------------
# advantages


@cache
def whole_advantages(name: str) -> Tensor:
    whole, alone = part(ROWS, EVERYWHERE, False, torch.float64), {"group": None, "cp_group": None}
    if name == "optimal_token_baseline":
        return placed(optimal_baseline(whole, alone), ROWS, EVERYWHERE)
    if name in PER_SEQUENCE:
        return PER_SEQUENCE[name](whole, alone)
    return placed(PER_TOKEN[name](whole, alone), ROWS, EVERYWHERE)


@walked("name", [*PER_TOKEN, *PER_SEQUENCE, "optimal_token_baseline"])
def test_advantages(name: str, said: Said) -> None:
    """Scans that cross shards, statistics of the batch,
    and groups of samples that lie on several ranks.
    """
    expected = whole_advantages(name)
    assert expected.abs().max() > 0.1
    cuts = [
        c
        for c, cut in CUTS.items()
        if cut.ranks > 1 and (name != "optimal_token_baseline" or len(cut.shards) == 1)
    ]
    for cut in cuts:
        assert_same(
            said[CUTS[cut].ranks]["advantages"][f"{cut}|{name}"], expected, what=f"{cut}: {name}"
        )


# ------------------------------------------------------------------------------------------------
# collectives

S = len(ROWS)
FORWARD_AND_BACKWARD: dict[str, tuple[list[int], list[int]]] = {
    "token": ([], []),
    "token, mean of a sequence": ([S], []),
    "sequence": ([2 * S], [2 * S]),
    "sequence, mean of a sequence": ([2 * S], [2 * S]),
    "sequence, gradient of a token": ([2 * S], []),
    "product": ([S], [S]),
    "geometric mean": ([2 * S], [2 * S]),
    "corrected by token": ([], []),
    "corrected by sequence": ([2 * S], []),
    "dropped by sequence": ([S, S], []),
}


@walked("name", COUNTED)
def test_a_loss_makes_no_collective_under_data_parallel(name: str, said: Said) -> None:
    """The totals were counted before; nothing else is needed of other ranks."""
    assert said[2]["collectives"][f"DP|{name}"] == {"forward": [], "backward": []}


@walked("name", COUNTED)
def test_context_parallel_ranks_exchange_a_few_numbers_per_sequence(name: str, said: Said) -> None:
    """How many numbers each all-reduce of the loss and of its backward carries;
    S sequences, of 8 tokens or fewer.
    """
    forward, backward = FORWARD_AND_BACKWARD[name]
    seen = said[2]["collectives"][f"CP, contiguous|{name}"]
    assert seen["forward"] == [["allreduce", n] for n in forward]
    assert seen["backward"] == [["allreduce", n] for n in backward]


# ------------------------------------------------------------------------------------------------
# errors


@walked("call", ["policy_loss", "value_loss", "aggregate_tokens"])
@walked("world", [2, 4])
def test_missing_totals_are_an_error(call: str, world: int, said: Said) -> None:
    message = said[world]["refusals"][call]
    assert f"torch.distributed runs on {world} ranks" in message
    assert "policyloss.Totals.count(" in message
    assert 'totals="local"' in message


@walked("world", [2, 4])
def test_global_numbers_that_are_missing_are_an_error_or_a_warning(world: int, said: Said) -> None:
    refusals = said[world]["refusals"]
    assert "pass positions=" in refusals["turns"]
    assert "policyloss.measure(spec" in refusals["statistics"]
    for call in ("grpo", "whiten"):
        (message,) = refusals[f"warned {call}"]
        assert f"runs on {world} ranks, but these statistics are of this rank alone" in message
        assert refusals[f"warned {call} local"] == []
