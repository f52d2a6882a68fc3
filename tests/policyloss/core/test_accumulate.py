"""`accumulate`: however a step is cut into micro-batches and distributed to ranks, it equals the
whole batch in one call.

Loss, gradients and metrics agree to 1e-12 in float64,
for every preset and for the losses that have to be measured first.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.multiprocessing
from accumulate_ranks import (
    BATCH,
    DP_CASES,
    MEASURED,
    PROMPT,
    SHARES,
    SPECS,
    Share,
    current,
    micro_batches,
    taken,
    work,
)
from started import run_ranks, started_once
from walk import walked

import policyloss as pl
from cases import NAMED, PRESETS, assert_same, run

CUTS: dict[str, Share] = {
    "uneven, layouts mixed": [
        ([6], "padded"),
        ([5, 0, 4, 1], "packed"),
        ([], "packed"),
        ([2, 3], "padded"),
        ([], "padded"),
    ],
    "one by one": [([i], "padded" if i % 2 else "packed") for i in range(7)],
}
REINFORCE = pl.LossSpec(trust=pl.Unbounded("ratio"))


def check(said: list[dict[str, Any]], spec: Any, ranks: int = 1) -> None:
    """The mean over `ranks` of loss and gradients, and each rank's reduced metrics, are those of
    the whole batch in one call.
    """
    expected = run(spec, BATCH)
    assert_same(
        torch.tensor(sum(s["loss"] for s in said) / ranks, dtype=torch.float64),
        expected.loss,
        what="loss",
    )
    assert_same(sum(s["dlogp"] for s in said) / ranks, expected.dlogp, what="gradient")
    assert_same(
        sum(s["dentropy"] for s in said) / ranks, expected.dentropy, what="entropy gradient"
    )
    for one in said:
        assert_same(one["metrics"], expected.metrics, what="metric")


@walked("cut", CUTS)
@walked("name", [*NAMED, *PROMPT])
def test_any_cut_is_the_whole_batch(name: str, cut: str) -> None:
    spec = {**NAMED, **PROMPT}[name]
    check([taken(pl.accumulate(spec, micro_batches(CUTS[cut]), logp=current))], spec)


@walked("name", MEASURED)
def test_a_measurement_before_the_steps_covers_the_batch(name: str) -> None:
    spec = MEASURED[name]
    check(
        [taken(pl.accumulate(spec, micro_batches(CUTS["uneven, layouts mixed"]), logp=current))],
        spec,
    )


@walked("name", ["ppo", "gspo", "m2po"])
def test_a_word_for_the_old_policy_in_any_cut(name: str) -> None:
    """Of m2po the step is measured, with the old policy of the measured log-probabilities."""
    logp = BATCH.logp.clone().requires_grad_()
    tensors = {n: BATCH.kwargs[n] for n in ("advantages", "mask", "rollout_logp", "ages")}
    whole = pl.policy_loss(name, logp, "loglinear", **tensors)
    (expected,) = torch.autograd.grad(whole.loss, logp)
    chosen = [[4, 0], [1, 2, 3, 6, 5]]
    micros = [
        {**{n: x[rows] for n, x in tensors.items()}, "rows": rows, "old_logp": "loglinear"}
        for rows in chosen
    ]
    step = pl.accumulate(name, micros, logp=lambda micro: BATCH.logp[micro["rows"]])
    loss = sum(micro.loss(logp[micro["rows"]]) for micro in step)
    assert_same(loss.detach(), whole.loss.detach(), what="loss")
    assert_same(torch.autograd.grad(loss, logp)[0], expected, what="gradient")
    assert_same(step.metrics.compute(), whole.metrics.compute(), what="metric")


def hand_made() -> list[dict[str, Any]]:
    """One sequence of one token with advantage 5, and two of one and two tokens
    with advantage −1; ratios are 1.
    """
    masks = torch.tensor([[True]]), torch.tensor([[True, False], [True, True]])
    advantages = torch.tensor([5.0]), torch.tensor([-1.0, -1.0])
    return [
        {"mask": m, "old_logp": torch.full(m.shape, -1.0), "advantages": a}
        for m, a in zip(masks, advantages, strict=True)
    ]


@walked(
    ("aggregate", "losses", "gradients"),
    [
        # Four tokens: (−5 + 1 + 1 + 1) / 4. Each micro-batch by its own mean, averaged,
        # would be (−5 + 1) / 2.
        (pl.TokenMean(), [-1.25, 0.75], [[[-1.25]], [[0.25, 0.0], [0.25, 0.25]]]),
        # Three sequences: (−5 + 1 + 1) / 3; the two tokens of the last share its third.
        (pl.SeqMeanTokenMean(), [-5 / 3, 2 / 3], [[[-5 / 3]], [[1 / 3, 0.0], [1 / 6, 1 / 6]]]),
    ],
    ids=["tokens", "sequences"],
)
def test_by_hand(aggregate: Any, losses: list[float], gradients: list[Any]) -> None:
    step = pl.accumulate(REINFORCE.replace(aggregate=aggregate), hand_made())
    assert (int(step.totals.tokens), int(step.totals.sequences), step.totals.dp_size) == (4, 3, 1)
    assert step.counts is step.totals
    for micro, loss, gradient in zip(step, losses, gradients, strict=True):
        logp = torch.full(micro["mask"].shape, -1.0, requires_grad=True)
        share = micro.loss(logp)
        share.backward()
        torch.testing.assert_close(share.detach(), torch.tensor(loss))
        torch.testing.assert_close(logp.grad, torch.tensor(gradient))
    metrics = step.reduce_metrics().compute()
    assert metrics["tokens"] == 4
    assert metrics["loss"] == pytest.approx(sum(losses), rel=1e-6)


def test_survivors_by_hand() -> None:
    """One of two tokens is rejected here and none of two there, so three survive: −(2 + 3 + 4) / 3
    = −3, not −(2 + 7/2) / 2.
    """
    spec = REINFORCE.replace(
        correction=pl.Band(0.5, 2.0), rejected="renormalise", aggregate=pl.TokenMean()
    )
    # Old/rollout = exp(5) is outside the band.
    rollout = (
        torch.tensor([[0.0, -5.0]]),
        torch.zeros(1, 2),
    )
    advantages = torch.tensor([[2.0, 9.0]]), torch.tensor([[3.0, 4.0]])
    shared = {"mask": torch.ones(1, 2), "old_logp": torch.zeros(1, 2)}
    micros = [
        {**shared, "rollout_logp": r, "advantages": a}
        for r, a in zip(rollout, advantages, strict=True)
    ]
    step = pl.accumulate(spec, micros, logp=lambda _: torch.zeros(1, 2))
    assert (int(step.counts.tokens), int(step.totals.tokens)) == (4, 3)
    losses = [float(micro.loss(torch.zeros(1, 2))) for micro in step]
    assert losses == pytest.approx([-2 / 3, -7 / 3], rel=1e-6)


def test_a_micro_batch_is_the_trainers_own_mapping() -> None:
    given = [{**m, "ids": torch.arange(3), "note": i} for i, m in enumerate(hand_made())]
    step = pl.accumulate(REINFORCE, given)
    assert len(step) == 2
    for i, micro in enumerate(step):
        assert micro["ids"] is given[i]["ids"]
        assert (micro["note"], list(micro), len(micro)) == (i, list(given[i]), len(given[i]))
        assert micro.is_last == (i == 1)
    assert "ids" in repr(micro)


def test_arguments_are_what_the_loss_functions_take() -> None:
    positions = torch.arange(2)
    first, second = hand_made()
    step = pl.accumulate(
        REINFORCE, [{**first, "ref_logp": None}, {**second, "positions": positions}]
    )
    without, with_positions = (micro.arguments() for micro in step)
    names = {"mask", "old_logp", "advantages", "totals", "cp_group"}
    assert set(without) == names  # linear_policy_loss makes the entropy itself, and takes none
    assert set(with_positions) == names | {"positions"}
    assert with_positions["positions"] is positions
    assert without["totals"] is step.totals


def test_the_head_in_one_pass() -> None:
    """`linear_policy_loss(…, **micro.arguments())` on micro-batches,
    against one call on the whole batch.
    """
    torch.manual_seed(0)
    spec, hidden = PRESETS["dapo"], torch.randn(7, BATCH.width, 5, dtype=torch.float64)
    weight, ids = torch.randn(11, 5, dtype=torch.float64), torch.randint(11, BATCH.mask.shape)

    def gradient(loss: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, head)[0]

    head = weight.clone().requires_grad_()
    whole = pl.linear_policy_loss(
        *(spec, hidden, head, ids, BATCH.old_logp, BATCH.advantages, BATCH.mask),
        weights=BATCH.weights,
        ages=BATCH.ages,
    )
    expected = gradient(whole.loss, head)
    step = pl.accumulate(spec, micro_batches([([4, 0], "padded"), ([1, 2, 3, 6, 5], "padded")]))
    total = torch.zeros_like(weight)
    for micro in step:
        rows = micro["where"][:, 0] // BATCH.width
        arguments = micro.arguments(ref_logp=None, rollout_logp=None)
        del arguments["entropy"], arguments["divergence"]
        out = pl.linear_policy_loss(spec, hidden[rows], head, ids[rows], **arguments)
        total += gradient(out.loss, head)
        step.add(out.metrics)
    assert_same(total, expected, what="gradient of the head")
    assert_same(step.metrics.compute(), whole.metrics.compute(), what="metric")


def test_what_is_known_only_after_the_forward() -> None:
    """An entropy given to the call counts: 4 tokens at entropy 2 and coefficient 0.1 add −0.2 to
    (−5 + 1 + 1 + 1) / 4.
    """
    step = pl.accumulate(REINFORCE.replace(entropy_coef=0.1, aggregate=pl.TokenMean()), hand_made())
    losses = [
        float(m.loss(torch.full(m["mask"].shape, -1.0), entropy=torch.full(m["mask"].shape, 2.0)))
        for m in step
    ]
    assert sum(losses) == pytest.approx(-0.5 - 0.2, rel=1e-6)


def test_log_probabilities_are_asked_for_only_where_they_are_needed() -> None:
    asked: list[tuple[Any, bool]] = []

    def forward(micro: pl.MicroBatch) -> torch.Tensor:
        asked.append((micro["where"], torch.is_grad_enabled()))
        return current(micro)

    pl.accumulate(PRESETS["gspo"], micro_batches(CUTS["one by one"]), logp=forward)
    assert not asked
    given = micro_batches(CUTS["one by one"])
    pl.accumulate(PRESETS["kl_cov"], given, logp=forward)
    assert [where for where, _ in asked] == [micro["where"] for micro in given]
    assert not any(enabled for _, enabled in asked)


def test_one_advantage_per_sequence_is_measured_as_one_per_token() -> None:
    per_sequence = torch.linspace(-2, 2, 7, dtype=torch.float64)
    given = micro_batches(CUTS["uneven, layouts mixed"])
    for micro, (rows, layout) in zip(given, CUTS["uneven, layouts mixed"], strict=True):
        micro["advantages"] = per_sequence[rows] if layout == "padded" else per_sequence[rows, None]
    spec = MEASURED["Truncate(1.1)+SelfNormalise():renormalise"].replace(
        trust=pl.CovKL(fraction=0.2)
    )
    said = taken(pl.accumulate(spec, given, logp=current))
    expected = run(spec, BATCH.map(lambda _: per_sequence, "advantages"))
    assert_same(said["dlogp"], expected.dlogp, what="gradient")
    assert_same(said["metrics"], expected.metrics, what="metric")


def test_extras_are_measured_too() -> None:
    """A rejection by an extra: one of four tokens leaves, so three survive the whole step."""

    def by_extra(t: pl.Tokens) -> pl.Corrected:
        return pl.Corrected(None, t.extra("keep") > 0)

    spec = REINFORCE.replace(correction=by_extra, rejected="renormalise", aggregate=pl.TokenMean())
    given = [
        {**micro, "extras": {"keep": torch.ones(micro["mask"].shape)}} for micro in hand_made()
    ]
    given[1]["extras"]["keep"][0, 0] = 0
    step = pl.accumulate(spec, given, logp=lambda micro: torch.full(micro["mask"].shape, -1.0))
    assert int(step.totals.tokens) == 3
    # −5 of the first sequence, 1 of each of the two survivors of the others.
    losses = [float(micro.loss(torch.full(micro["mask"].shape, -1.0))) for micro in step]
    assert losses == pytest.approx([-5 / 3, 2 / 3], rel=1e-6)


def test_a_micro_batch_that_was_only_measured_is_unused() -> None:
    spec = REINFORCE.replace(trust=pl.CovKL(fraction=0.2))
    step = pl.accumulate(
        spec, hand_made(), logp=lambda micro: torch.full(micro["mask"].shape, -1.0)
    )
    first, _ = step
    first.loss(torch.full((1, 1), -1.0))
    with pytest.raises(pl.InputError, match="1 micro-batches of this step were never used"):
        step.reduce_metrics()


def test_a_repeated_micro_batch_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has three micro-batches, this one has two: the third may stay unused."""
    module = importlib.import_module("policyloss.accumulation")
    counted = module.count_step
    monkeypatch.setattr(module, "count_step", lambda *args: (counted(*args)[0], 3))
    step = pl.accumulate(REINFORCE, hand_made())
    first, second, empty = step
    assert [micro.is_last for micro in (first, second, empty)] == [False, False, True]
    assert not empty["mask"].any()
    losses = [float(m.loss(torch.full(m["mask"].shape, -1.0))) for m in (first, second)]
    assert step.reduce_metrics().compute()["loss"] == pytest.approx(sum(losses), rel=1e-6)
    assert float(empty.loss(torch.full((2, 2), -1.0))) == 0


@walked("aggregate", [pl.LocalTokenMean(), pl.LocalSeqMeanTokenMean()], ids=str)
def test_local_means_stay_local(aggregate: Any) -> None:
    """The spec names them: −5 and 1, each micro-batch's own mean."""
    step = pl.accumulate(REINFORCE.replace(aggregate=aggregate), hand_made())
    assert [float(micro.loss(torch.full(micro["mask"].shape, -1.0))) for micro in step] == [
        -5.0,
        1.0,
    ]


def test_a_step_is_iterated_once() -> None:
    step = pl.accumulate(REINFORCE, hand_made())
    assert len(list(step)) == 2
    with pytest.raises(
        pl.InputError, match=r"add its gradients again; call policyloss\.accumulate again"
    ):
        iter(step)


MASK = torch.ones(1, 2, dtype=torch.bool)
ONE = {"mask": MASK, "old_logp": torch.zeros(1, 2), "advantages": torch.ones(1)}
WRONG: dict[str, tuple[Any, str]] = {
    "one mapping": (
        ONE,
        (
            r"micro_batches must be a list of mappings, got dict; .* put a single micro-batch in a "
            r"list"
        ),
    ),
    "an iterator": (iter([ONE]), r"got list_iterator; .* by list\("),
    "a tensor": (MASK, "got Tensor"),
    "tensors": (
        [ONE, MASK],
        r"micro_batches\[1\] must be a mapping of names to tensors, got Tensor",
    ),
    "nothing": ([], "rank 0 of 1 has no micro-batch; .* give it one with an all-False mask"),
    "no mask": (
        [ONE, {"ids": MASK, "mask": None}],
        r"micro_batches\[1\] has no mask \(it has ids, mask\)",
    ),
    "an empty mapping": ([{}], r"micro_batches\[0\] has no mask \(it has nothing\)"),
    "a mask of weights": (
        [ONE, {**ONE, "mask": torch.full((1, 2), 0.5)}],
        r"micro_batches\[1\]: mask must be bool or hold only 0 and 1",
    ),
    "a flat mask": (
        [{**ONE, "mask": MASK[0]}],
        r"micro_batches\[0\]: expected padded tokens \[B, T\].*pass cu_seqlens=",
    ),
    "groups of some": (
        [{**ONE, "group_ids": torch.tensor([1])}, ONE],
        r"micro_batches\[1\] has no group_ids, but others have",
    ),
    "groups of tokens": (
        [{**ONE, "group_ids": torch.ones(1, 2)}],
        r"micro_batches\[0\]: group_ids must be a tensor of one integer",
    ),
}


@walked("case", WRONG)
def test_wrong_micro_batches_are_refused(case: str) -> None:
    given, message = WRONG[case]
    with pytest.raises(pl.InputError, match=message):
        pl.accumulate(REINFORCE, given)


@walked("name", ["group", "cp_group"])
def test_a_group_needs_torch_distributed(name: str) -> None:
    with pytest.raises(
        pl.InputError, match=f"^{name} needs torch.distributed, which is not initialised"
    ):
        pl.accumulate(REINFORCE, [ONE], **{name: object()})


@walked("logp", [None, torch.zeros(1, 2)], ids=["missing", "a tensor"])
def test_a_loss_that_must_be_measured_needs_log_probabilities(logp: Any) -> None:
    with pytest.raises(
        pl.InputError, match=r'survivors of a rejection.*pass logp=, a function.*rejected="keep"'
    ):
        pl.accumulate(PRESETS["clip_cov"], [ONE], logp=logp)


@walked(
    ("returned", "seen"),
    [((torch.zeros(1, 2), None), "tuple"), (torch.zeros(2), r"shape \(2,\)"), (None, "NoneType")],
)
def test_log_probabilities_of_another_shape_are_refused(returned: Any, seen: str) -> None:
    with pytest.raises(
        pl.InputError,
        match=(
            r"logp of micro_batches\[0\] must be a tensor of its mask's shape \(1, 2\), got "
            rf"{seen}"
        ),
    ):
        pl.accumulate(PRESETS["clip_cov"], [ONE], logp=lambda _: returned)


def test_missing_advantages_are_named() -> None:
    (micro,) = pl.accumulate(
        REINFORCE, [{"ids": MASK, "mask": MASK, "old_logp": torch.zeros(1, 2)}]
    )
    with pytest.raises(pl.InputError, match=r"no advantages \(it has ids, mask, old_logp\)"):
        micro.loss(torch.zeros(1, 2))
    assert float(micro.loss(torch.zeros(1, 2), advantages=torch.tensor([3.0]))) == -3.0


def test_what_was_counted_cannot_be_replaced() -> None:
    (micro,) = pl.accumulate(REINFORCE, [ONE])
    with pytest.raises(
        pl.InputError, match="mask cannot be replaced now: the step was counted with"
    ):
        micro.arguments(mask=MASK)
    with pytest.raises(pl.InputError, match="unknown tensor 'entropies'; did you mean 'entropy'"):
        micro.loss(torch.zeros(1, 2), entropies=MASK)


Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The results of both ranks for every case. Parallel test workers share one pair of
    processes: the first starts it.
    """
    folder = started_once(
        tmp_path_factory,
        "accumulate_ranks",
        lambda place: run_ranks(work, str(place), count=2),
    )
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def both(said: Said, case: str) -> list[Any]:
    return [rank[case] for rank in said]


@walked(("name", "case"), DP_CASES)
def test_data_parallel_ranks_average(name: str, case: str, said: Said) -> None:
    """Also where a group's sequences lie on both ranks (PromptMean),
    and where the step is measured over both.
    """
    check(both(said, f"dp: {name}, {case}"), SPECS[name], ranks=2)


def test_ranks_whose_gradients_are_summed(said: Said) -> None:
    check(both(said, "dp summed"), PRESETS["dapo"], ranks=1)


def test_a_step_is_of_the_group_named(said: Said) -> None:
    """A group of one rank: its own micro-batches are the whole step,
    also where they are measured.
    """
    for one, share in zip(both(said, "dp alone"), SHARES["different numbers"], strict=True):
        rows = [row for part, _ in share for row in part]
        expected = run(PRESETS["clip_cov"], BATCH.rows(rows), "local")
        assert len(one["parts"]) == len(share)
        assert_same(one["dlogp"][rows], expected.dlogp, what="gradient")
        assert_same(one["metrics"], expected.metrics, what="metric")


@walked("name", SPECS)
def test_a_rank_with_fewer_micro_batches_repeats_one_that_adds_nothing(
    name: str, said: Said
) -> None:
    """Three on rank 0 and one on rank 1, which makes two empty ones:
    loss and gradient are exactly 0 there.
    """
    first, second = both(said, f"dp: {name}, different numbers")
    assert len(first["parts"]) == len(second["parts"]) == 3
    assert second["parts"][1:] == [(0.0, 0.0), (0.0, 0.0)]


def test_every_rank_runs_its_forward_equally_often(said: Said) -> None:
    """Before the step, to measure it, and in the step: three times on both ranks, on an all-False
    mask where there is no more.
    """
    tokens = [
        [int(BATCH.mask[rows].sum()) for rows, _ in share] for share in SHARES["different numbers"]
    ]
    first, second = both(said, "forwards")
    assert first == {"tokens": tokens[0], "number": 3, "last": [False, False, True]}
    assert second == {"tokens": [*tokens[1], 0, 0], "number": 3, "last": [False, False, True]}


def test_a_critic_divides_by_the_plain_counts(said: Said) -> None:
    expected = pl.value_loss(BATCH.logp, BATCH.advantages, BATCH.old_logp, BATCH.mask)
    ranks = both(said, "dp critic")
    assert sum(rank["loss"] for rank in ranks) / 2 == pytest.approx(float(expected.loss), rel=1e-12)
    assert all(rank["tokens"] == int(BATCH.mask.sum()) > rank["measured"] > 0 for rank in ranks)


@walked("name", SPECS)
def test_context_parallel_ranks_add_up(name: str, said: Said) -> None:
    check(both(said, f"cp: {name}"), SPECS[name])


def test_context_parallel_within_a_data_parallel_group(said: Said) -> None:
    """By default all ranks of both groups count as averaged:
    one sequence shard each on two ranks makes two.
    """
    check(both(said, "cp and group"), PRESETS["gspo"], ranks=2)


@walked(
    ("case", "calls"),
    [
        ("plain", {"all_gather": 1}),
        ("with groups", {"all_gather": 2}),
        ("cp and group", {"all_reduce": 1, "all_gather": 1}),
    ],
)
def test_a_step_is_counted_by_one_collective_per_group(
    case: str, calls: dict[str, int], said: Said
) -> None:
    assert both(said, f"collectives {case}") == [calls, calls]


@walked("case", ["plain", "with groups"])
def test_the_losses_of_a_counted_step_make_no_collective(case: str, said: Said) -> None:
    assert both(said, f"collectives of the losses, {case}") == [{}, {}]


@walked(
    ("case", "message"),
    [
        ("none", "rank 1 of 2 has no micro-batch"),
        ("none, measured", "rank 0 of 2 has no micro-batch"),
        ("groups", "rank 0 of the group has no group_ids, but others have"),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_on_all(case: str, message: str, said: Said) -> None:
    for one in both(said, f"error {case}"):
        assert str(one).startswith(message)
