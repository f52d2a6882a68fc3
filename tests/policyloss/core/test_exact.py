"""Within `exact()` a step has the same bits however it is cut and laid out: every loss, gradient
and metric; and the sums this rests on.
"""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import in_shares, walked

import policyloss as pl
from cases import LOCAL, LOSSES, MIXTURES, PRESETS, SPECS, assert_same, make_batch, run, step_totals
from policyloss.functional.exact import QUANTA, add, arithmetic, exact_total, fold, limbs
from policyloss.functional.segments import Sequences
from policyloss.metrics import Metrics
from policyloss.records import Stat, Sum

ALL = list(range(9))
CUTS = ([ALL], [[i] for i in ALL], [[8, 3, 1], [0], [6, 2, 7, 5, 4]])
BATCH = make_batch(seed=4, rows=9, width=11, dtype=torch.float32)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def is_by_token(spec: pl.LossSpec) -> bool:
    """Whether nothing but the token itself decides over its gradient, and no sigmoid does."""
    local = type(spec.aggregate) in LOCAL
    alone = spec.reach == "token" and not spec.correction and not spec.needs_statistics
    return alone and not local and not isinstance(spec.trust, pl.SoftGate)


def numbers(count: int, seed: int = 0) -> list[float]:
    """Numbers of very different size, as float32 holds them; their sum in any order differs."""
    draw = random.Random(seed)
    values = [draw.uniform(-1, 1) * 2.0 ** draw.randint(-20, 20) for _ in range(count)]
    return torch.tensor(values, dtype=torch.float32).tolist()


def test_limbs_by_hand():
    # 5.75 = 6 - 0.25, and 0.25 = 2^28 quanta of 2^-30; 2^-40 = 2^20 quanta of 2^-60.
    assert limbs(torch.tensor([5.75])).tolist() == [[6.0, -0.25, 0.0]]
    assert limbs(torch.tensor([2.0**-40])).tolist() == [[0.0, 0.0, 2.0**-40]]
    # A number that needs all three; float64 holds it, and nothing is lost.
    x = 3 + 2.0**-20 + 2.0**-45
    assert limbs(torch.tensor([x], dtype=torch.float64)).tolist() == [[3.0, 2.0**-20, 2.0**-45]]
    # Below half of the last quantum nothing is left.
    assert limbs(torch.tensor([2.0**-62])).tolist() == [[0.0, 0.0, 0.0]]


def test_each_limb_is_a_small_multiple_of_its_quantum():
    parts = limbs(torch.tensor(numbers(500)))
    for part, quantum, before in zip(parts.unbind(-1), QUANTA, (math.inf, *QUANTA), strict=False):
        assert torch.equal((part / quantum).round() * quantum, part)
        assert float(part.abs().max()) <= before / 2
    assert torch.equal(fold(parts), torch.tensor(numbers(500), dtype=torch.float64))


def test_a_total_is_the_exact_sum_in_any_order():
    values = numbers(3000)
    truth = float(sum(map(Fraction, values)))
    with pl.exact():
        for seed in range(4):
            random.Random(seed).shuffle(values)
            sums = [arithmetic().total(torch.tensor(part)) for part in (values[:7], values[7:1000])]
            sums.append(arithmetic().total(torch.tensor(values[1000:])))
            assert float(fold(sums[0] + sums[1] + sums[2])) == truth


def test_plain_sums_depend_on_the_order():
    """Otherwise the tests here would show nothing."""
    values, sums = numbers(3000), set()
    for seed in range(4):
        random.Random(seed).shuffle(values)
        sums.add(float(torch.tensor(values).sum()))
    assert len(sums) > 1


@walked("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_loud(bad):
    with pl.exact():
        assert math.isnan(float(fold(arithmetic().total(torch.tensor([1.0, bad, 2.0])))))


def test_numbers_combined_with_limbs():
    three = torch.tensor([1.0, 0.25, 0.0], dtype=torch.float64)
    two = torch.tensor(2.0, dtype=torch.float64)
    assert add(three, two).tolist() == [3.0, 0.25, 0.0]
    assert add(two, three).tolist() == [3.0, 0.25, 0.0]
    merged = Metrics({"a": Stat(three, torch.tensor(2))}) + Metrics({"a": Stat(two, two)})
    assert merged.compute() == {"a": 3.25 / 4}
    assert (Metrics({"a": Sum(three)}) + Metrics({"a": Sum(two)})).compute() == {"a": 3.25}


@in_shares(2)
def test_a_step_has_the_same_bits_however_it_is_cut(share):
    """Padded and packed, whole, row by row, and in another order: gradients and metrics.

    The `loss` of a mixture, a weighted sum, is rounded in every call.
    """
    names = [*(n for n, x in SPECS.items() if type(x.aggregate) not in LOCAL), *MIXTURES]
    for name in names[share::2]:
        check_bits_of_cuts(name)


def check_bits_of_cuts(name):
    spec = LOSSES[name]
    with pl.exact():
        totals = step_totals(spec, BATCH)
        expected = run(spec, BATCH, totals)
        for cut, packed in zip(CUTS, (True, False, True), strict=True):
            gradients = torch.zeros(2, 9, 11)
            metrics = pl.Metrics()
            for rows in cut:
                part = BATCH.rows(rows)
                result = run(spec, part.packed() if packed else part, totals)
                gradients[:, rows] = torch.stack([result.dlogp, result.dentropy])
                metrics = metrics + result.records
            assert torch.equal(gradients[0], expected.dlogp)
            assert torch.equal(gradients[1], expected.dentropy)
            numbers, wanted = metrics.compute(), expected.metrics
            if name in MIXTURES:
                assert_same(numbers.pop("loss"), wanted.pop("loss"), 1e-15)
            assert_same(numbers, wanted, 0)


@walked("name", ["dapo", "gspo", "grpo", "dr_grpo", "cispo"])
@walked("dtype", DTYPES.values(), ids=DTYPES)
def test_the_mode_changes_no_more_than_roundings(name, dtype):
    batch = make_batch(seed=5, dtype=dtype)
    plain = run(SPECS[name], batch)
    with pl.exact():
        result = run(SPECS[name], batch)
    tolerance = 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert_same(result.loss, plain.loss, tolerance)
    assert_same(result.dlogp, plain.dlogp, tolerance)
    assert_same(result.metrics, plain.metrics, tolerance)


def test_a_single_token_by_hand():
    """A = 2, r = 1.1 inside the clip: loss and slope are −2.2, and k3 is 0.1 − ln 1.1."""
    logp = torch.tensor([[math.log(0.5) + math.log(1.1)]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[math.log(0.5)]], dtype=torch.float64)
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pl.exact():
        out = pl.policy_loss("ppo", logp, old, torch.tensor([[2.0]]).double(), mask)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-2.2, rel=1e-14)
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-2.2, rel=1e-14)
    metrics = out.metrics.compute()
    assert metrics["loss"] == pytest.approx(-2.2, rel=1e-14)
    assert metrics["kl_old_k3"] == pytest.approx(0.1 - math.log(1.1), rel=1e-12)


def test_the_gradient_of_an_exact_total():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exact_total, (x,), atol=1e-7)


@walked("packed", [False, True])
def test_the_gradients_of_exact_sequences(packed):
    """Of the sum and of the way back to tokens, against differences of float64."""
    x = torch.randn(7 if packed else (3, 4), dtype=torch.float64, requires_grad=True)
    sequences = Sequences.of(x, torch.tensor([0, 3, 3, 7]) if packed else None)

    def spread(x: Tensor) -> Tensor:
        return sequences.expand(sequences.sum(x) ** 2) * x

    with pl.exact():
        assert torch.autograd.gradcheck(spread, (x,), atol=1e-6)


def test_a_sigmoid_has_the_bits_of_its_number_alone():
    x = 3 * torch.randn(101)
    with pl.exact():
        together = arithmetic().sigmoid(x)
        alone = torch.cat([arithmetic().sigmoid(x[i : i + 1]) for i in range(101)])
    assert torch.equal(together, alone)
    torch.testing.assert_close(together, torch.sigmoid(x))


def test_the_backward_keeps_the_mode_of_its_forward():
    spec, batch = SPECS["gspo"], BATCH
    with pl.exact():
        expected = run(spec, batch)
        logp = batch.logp.clone().requires_grad_()
        loss = pl.policy_loss(spec, **{**batch.kwargs, "logp": logp}).loss
    assert torch.equal(torch.autograd.grad(loss, logp)[0], expected.dlogp)


def test_the_mode_ends_with_its_block():
    assert arithmetic().total(torch.ones(3)).dim() == 0
    with pl.exact():
        with pl.exact(False):
            assert arithmetic().total(torch.ones(3)).dim() == 0
        assert arithmetic().total(torch.ones(3)).shape == (3,)
    with pytest.raises(pl.InputError), pl.exact():
        pl.policy_loss("dapo", *[torch.ones(3)] * 4)
    assert arithmetic().total(torch.ones(3)).dim() == 0


def test_accumulated_micro_batches_have_the_metrics_of_one():
    with pl.exact():
        results = []
        for cut in CUTS:
            shares = [BATCH.rows(rows) for rows in cut]
            micro_batches = [{**part.kwargs, "share": part} for part in shares]
            step = pl.accumulate(SPECS["dapo"], micro_batches)
            for micro in step:
                micro.loss(micro["logp"].clone().requires_grad_()).backward()
            results.append(step.reduce_metrics().compute())
    assert results[0] == results[1] == results[2]


def test_the_critic_has_the_same_bits_however_the_step_is_cut():
    values, returns, old = (BATCH.logp, BATCH.advantages, BATCH.old_logp)
    with pl.exact():
        totals = pl.Totals.count(BATCH.mask)
        results = []
        for cut in CUTS:
            metrics = pl.Metrics()
            for rows in cut:
                leaf = values[rows].clone().requires_grad_()
                out = pl.value_loss(leaf, returns[rows], old[rows], BATCH.mask[rows], totals=totals)
                metrics = metrics + out.metrics
            results.append(metrics.compute())
    assert results[0] == results[1] == results[2]


def test_a_compiler_leaves_the_loss_alone():
    """It chooses the order of operations by itself: nothing of the loss is in its graphs."""
    torch.compiler.reset()  # tests before this one may have reached the limit of recompilations
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    def twice(logp: Tensor, others: dict[str, Any]) -> Tensor:
        return 2 * pl.policy_loss(SPECS["dapo"], logp, **others).loss

    others = {name: x for name, x in BATCH.kwargs.items() if name != "logp"}
    with pl.exact():
        result = torch.compile(twice, backend=backend)(BATCH.logp, others)
        assert torch.equal(result, twice(BATCH.logp, others))
    assert not any("exp" in code for code in graphs)


def test_a_compiled_loss_runs_eagerly():
    loss = pl.compiled_loss(SPECS["dapo"])
    loss._loss = None  # is not called
    with pl.exact():
        out = loss(**BATCH.kwargs)
        assert out.metrics.compute() == run(SPECS["dapo"], BATCH).metrics


@walked("name", [n for n, x in PRESETS.items() if is_by_token(x)])
def test_by_default_the_gradient_of_a_token_has_the_same_bits_in_any_cut(name):
    """Under a loss of single tokens, except for a sigmoid on a CPU."""
    spec = PRESETS[name]
    totals = step_totals(spec, BATCH)
    expected = run(spec, BATCH, totals).dlogp
    for rows in CUTS[2]:
        part = BATCH.rows(rows)
        assert torch.equal(run(spec, part, totals).dlogp, expected[rows])
        assert torch.equal(run(spec, part.packed(), totals).dlogp, expected[rows])
