"""`compiled_loss` is `policy_loss` under `torch.compile`: the same loss, gradients and metrics.

Every kind of loss runs as Dynamo traced it; a few run through Inductor.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import (
    PRESETS,
    Batch,
    Result,
    assert_same,
    assert_same_result,
    make_batch,
    run,
    step_totals,
    unweighted,
    with_divergence,
)
from policyloss.compiled import CompiledLoss, compiled_loss, in_graph
from policyloss.compiled import in_graph as two_stages
from policyloss.compiled import loss as compiled
from policyloss.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns about itself
BATCH = make_batch(seed=9)
LAYOUTS = {"padded": BATCH, "packed": BATCH.packed()}
# Presets that differ in numbers only are one graph with other constants;
# the first of each kind is traced.
KINDS = {
    re.sub(r"\binf\b|-?\d[\d.e-]*", "#", repr(spec)): name
    for name, spec in reversed(PRESETS.items())
}
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="Inductor needs a C++ compiler"
)
FULL = pl.LossSpec(
    ratio=pl.SequenceRatio(grad="token"),
    trust=pl.CovClip(fraction=0.2, cov_low=-1.0, seed=3),
    correction=(
        pl.Band(0.8, 1.25),
        pl.Reject("k3", "max", high=0.05),
        pl.SelfNormalise("sequences"),
    ),
    rejected="renormalise",
    kl=pl.KL("k3", 0.1, weight="ratio"),
    entropy_coef=0.01,
    aggregate=pl.PromptMean(),
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """The graphs of a test, which run as Dynamo traced them: a second instead of ten."""
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    return traced


def compiled_run(loss: CompiledLoss, batch: Batch, totals: Any = None) -> Result:
    """As `cases.run`, with the loss scaled before its backward."""
    logp, entropy = (x.detach().clone().requires_grad_() for x in (batch.logp, batch.entropy))
    carried = {"logp": logp, "entropy": entropy, "divergence": with_divergence(batch, entropy)}
    out = loss(**{**batch.kwargs, **carried}, totals=totals)
    dlogp, dentropy = torch.autograd.grad(4 * out.loss, (logp, entropy), materialize_grads=True)
    return Result(
        out.loss.detach(), batch.as_rows(dlogp / 4), batch.as_rows(dentropy / 4), out.metrics
    )


def check_bare(loss: CompiledLoss, batch: Batch) -> None:
    """A loss that reads four tensors is given those and no more,
    because every tensor adds to the time of a trace.
    """
    names = ("old_logp", "advantages", "mask")
    (logp, wanted) = (batch.logp.detach().requires_grad_() for _ in range(2))
    out = loss(logp, *(getattr(batch, n) for n in names))
    expected = pl.policy_loss(loss.spec, wanted, *(getattr(batch, n) for n in names))
    out.loss.backward()
    expected.loss.backward()
    assert_same(out.loss, expected.loss, what="loss")
    assert_same(logp.grad, wanted.grad, what="gradient")
    assert_same(out.metrics.compute(), expected.metrics.compute(), what="metric")


# --- The graph is the loss ------------------------------------------------------------------------


@pytest.mark.usefixtures("graphs")
@walked(("turn", "name"), [*enumerate(sorted(KINDS.values()))][::7])
def test_a_preset_traced_is_the_eager_loss(turn: int, name: str, graphs: list[Any]) -> None:
    check_traced(name, [LAYOUTS["padded" if turn % 2 else "packed"]], graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("graphs")
@walked("name", sorted(KINDS.values()))
def test_every_preset_traced_is_the_eager_loss(name: str, graphs: list[Any]) -> None:
    check_traced(name, [LAYOUTS["padded"], LAYOUTS["packed"]], graphs)


def check_traced(name: str, batches: list[Batch], graphs: list[Any]) -> None:
    """The traced preset equals the eager one on each batch, with one graph for each."""
    before = len(graphs)
    spec, loss = PRESETS[name], compiled_loss(PRESETS[name])
    for batch in batches:
        totals = replace(step_totals(spec, LAYOUTS["padded"]), dp_size=3)
        step = totals if batch is LAYOUTS["packed"] else None
        assert_same_result(compiled_run(loss, batch, step), run(spec, batch, step))
    assert len(graphs) - before == len(batches)


@pytest.mark.slow
@needs_compiler
def test_inductor_gives_the_same_numbers() -> None:
    batch = LAYOUTS["packed"]
    totals = step_totals(FULL, batch)
    assert_same_result(compiled_run(compiled_loss(FULL), batch, totals), run(FULL, batch, totals))


@pytest.mark.slow
@needs_compiler
def test_inductor_in_single_and_half_precision_for_any_shape() -> None:
    """One graph of any shape per dtype. A sum of 13·300 terms in another order differs
    by roundings of float32, 6e-8 each.
    """
    spec = PRESETS["ppo_dual_clip"]
    loss = compiled_loss(spec, dynamic=True)
    for dtype, tol in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        for rows, width in ((7, 8), (13, 300)):
            batch = make_batch(seed=3, rows=rows, width=width, dtype=dtype)
            actual, expected = compiled_run(loss, batch), run(spec, batch)
            assert actual.dlogp.dtype == dtype
            assert_same(actual.dlogp, expected.dlogp, tol, "gradient")
            assert_same(actual.loss, expected.loss, 1e-6, "loss")
            assert_same(actual.metrics, expected.metrics, 1e-6, "metric")


# --- When it compiles -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_second_shape_compiles_for_every_shape(layout: str, graphs: list[Any]) -> None:
    spec = PRESETS["gspo"]
    loss = compiled_loss(spec)
    for seed, (rows, width) in enumerate(((7, 8), (5, 6), (9, 20), (5, 5))):
        batch = make_batch(seed, rows, width)
        batch = batch.packed() if layout == "packed" else batch
        assert_same_result(compiled_run(loss, batch), run(spec, batch))
    assert len(graphs) == 2


@pytest.mark.usefixtures("graphs")
def test_one_row_after_many_is_not_taken_for_any_number_of_rows() -> None:
    """A size of 1 broadcasts, so a graph made for it must not serve others,
    nor the other way round.
    """
    loss = compiled_loss(PRESETS["ppo"], dynamic=True)
    for rows, width in ((1, 9), (4, 9), (1, 4), (3, 2)):
        check_bare(loss, make_batch(rows, rows, width))


def test_totals_are_data_whatever_they_are_made_of(graphs: list[Any]) -> None:
    """Numbers, tensors on the device and the averages of ranks:
    their values change from step to step, the graph stays.
    """
    loss = compiled_loss(PRESETS["grpo"])
    for totals in (pl.Totals(100, 7), pl.Totals(250, 12), pl.Totals(31.0, 5)):
        assert_same_result(compiled_run(loss, BATCH, totals), run(PRESETS["grpo"], BATCH, totals))
    assert len(graphs) == 1
    tensors = pl.Totals(torch.tensor(64), torch.tensor(9))
    assert_same_result(compiled_run(loss, BATCH, tensors), run(PRESETS["grpo"], BATCH, tensors))


# --- Gradients ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("graphs")
def test_a_backward_belongs_to_its_own_call() -> None:
    """Two calls before either backward: no buffer is shared between them."""
    loss = compiled_loss(PRESETS["ppo"])
    batches = [BATCH, make_batch(seed=1)]
    leaves = [b.logp.clone().requires_grad_() for b in batches]
    outs = [loss(**{**b.kwargs, "logp": x}) for b, x in zip(batches, leaves, strict=True)]
    outs[0].loss.backward()
    outs[1].loss.backward()
    for b, x in zip(batches, leaves, strict=True):
        assert_same(x.grad, run(PRESETS["ppo"], b).dlogp, what="gradient")


@pytest.mark.usefixtures("graphs")
def test_only_tensors_with_a_gradient_are_differentiated() -> None:
    spec = PRESETS["ppo"].replace(entropy_coef=0.1)
    loss, expected = compiled_loss(spec), run(spec, BATCH)
    entropy = BATCH.entropy.clone().requires_grad_()
    out = loss(**{**BATCH.kwargs, "entropy": entropy})
    assert_same(
        torch.autograd.grad(out.loss, entropy)[0], expected.dentropy, what="entropy gradient"
    )
    with torch.no_grad():
        silent = loss(**{**BATCH.kwargs, "entropy": entropy}).loss
    assert not silent.requires_grad
    assert_same(silent, expected.loss, what="loss")
    assert not loss(**BATCH.kwargs).loss.requires_grad


@pytest.mark.usefixtures("graphs")
def test_a_second_derivative_is_refused() -> None:
    """The known gradient is a constant: a second derivative of it is an error, not 0."""
    logp = BATCH.logp.clone().requires_grad_()
    out = compiled_loss(PRESETS["ppo"])(**{**BATCH.kwargs, "logp": logp})
    (gradient,) = torch.autograd.grad(out.loss, logp, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


@pytest.mark.usefixtures("graphs")
def test_strides_and_offsets_are_no_matter() -> None:
    """Of slices that begin anywhere in their storage, and of a transposed matrix."""
    wide, loss = make_batch(seed=4, rows=6, width=20), compiled_loss(PRESETS["ppo"], dynamic=True)
    for start in (0, 2, 5):
        check_bare(loss, wide.map(lambda x, i=start: x[:, i : i + 6], *wide.token_shaped))
    check_bare(loss, wide.map(lambda x: x.t().contiguous().t(), "logp", "mask"))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("totals", [None, pl.Totals(100, 7, dp_size=2)], ids=["local", "totals"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_and_gradient_equal_the_backward_pass(totals: Any, dtype: torch.dtype) -> None:
    spec = PRESETS["ppo"].replace(entropy_coef=0.1)
    batch, loss = make_batch(seed=2, dtype=dtype), compiled_loss(spec)
    expected = run(spec, batch, totals)
    out, gradients = loss.value_and_gradient(**batch.kwargs, totals=totals)
    tol = 1e-12 if dtype == torch.float64 else 1e-6
    assert not out.loss.requires_grad
    assert_same(out.loss, expected.loss, tol, "loss")
    assert_same(out.metrics.compute(), expected.metrics, tol, "metric")
    # One rounding to bfloat16 of numbers that agree to float32: a last digit at most.
    last_digit = tol if dtype == torch.float64 else 2**-8
    for got, wanted, name in (
        (gradients.logp, expected.dlogp, "logp"),
        (gradients.entropy, expected.dentropy, "entropy"),
    ):
        assert got.dtype == dtype
        assert_same(got, wanted, last_digit, f"gradient of {name}")
    bare = {name: x for name, x in batch.kwargs.items() if name != "entropy"}
    assert (
        compiled_loss(PRESETS["ppo"]).value_and_gradient(**bare, totals=totals)[1].entropy is None
    )


def test_value_and_gradient_where_there_is_no_graph() -> None:
    """L = −mean(2·logp) over the n valid tokens: the gradient of each is −2/n."""
    loss = compiled_loss(pl.LossSpec(trust=lambda t: -2 * t.logp))
    out, gradients = loss.value_and_gradient(**unweighted(BATCH).kwargs)
    assert not out.loss.requires_grad
    assert_same(
        gradients.logp,
        torch.where(BATCH.mask, -2.0 / BATCH.mask.sum().double(), 0.0),
        what="gradient",
    )
    assert gradients.entropy.count_nonzero() == 0


@pytest.mark.usefixtures("graphs")
def test_a_leaf_that_the_loss_does_not_read_has_gradient_zero() -> None:
    entropy = BATCH.entropy.clone().requires_grad_()
    out = compiled_loss(PRESETS["ppo"])(**{**BATCH.kwargs, "entropy": entropy})
    assert torch.autograd.grad(out.loss, entropy)[0].count_nonzero() == 0


# --- Sums in two stages ---------------------------------------------------------------------------


def cut_sums(monkeypatch: pytest.MonkeyPatch, batch: Batch) -> None:
    """Cut sums over the tokens of such a batch as on a GPU."""
    monkeypatch.setattr(two_stages, "FEWEST", 2)
    n = batch.logp.numel()
    monkeypatch.setattr(in_graph, "nullcontext", lambda: two_stages.InTwoStages(n))


@pytest.mark.parametrize(
    ("rows", "n", "wanted"),
    [
        (512, 512 * 8192, 512),  # a row each
        (64, 64 * 2048, 512),  # eight parts of a row each
        (8, 8 * 3, 0),  # too few tokens
        (1, 7 * 7 * 11 * 13, 539),  # of a pack: 7·7·11, the least divisor that is not below 512
        (1, 1009 * 2, 1009),
        (1, 4099 * 5, 0),  # 4099 is a prime, and too many
        (10_000, 10_000 * 7, 2500),  # four rows together
        (4099, 4099 * 8, 0),
    ],
)
def test_where_a_sum_is_cut(rows: int, n: int, wanted: int) -> None:
    assert two_stages.partials(rows, n) == wanted
    assert wanted == 0 or n % wanted == 0


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    "spec",
    [PRESETS["ppo_dual_clip"], FULL, PRESETS["gspo"]],
    ids=["ppo_dual_clip", "all slots", "gspo"],
)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_sums_in_two_stages_are_the_same_sums(
    spec: pl.LossSpec, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[int | str | None] = []
    cut = two_stages._cut
    monkeypatch.setattr(two_stages, "_cut", lambda *args: places.append(cut(*args)) or places[-1])
    batch = LAYOUTS[layout]
    cut_sums(monkeypatch, batch)
    assert_same_result(compiled_run(compiled_loss(spec), batch), run(spec, batch))
    assert len([place for place in places if place is not None]) > 10


@pytest.mark.usefixtures("graphs")
def test_sums_in_two_stages_keep_nan_and_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN makes maximum, minimum and sum NaN, also when it sits in the partial result
    that all second stages read.
    """
    cut_sums(monkeypatch, BATCH)
    for value in (float("nan"), float("inf")):
        batch = BATCH.map(lambda x: x.clone(), "logp")
        batch.logp[batch.mask.nonzero()[0].unbind()] = value
        got = compiled_loss(PRESETS["ppo"])(**batch.kwargs).metrics.compute()
        wanted = pl.policy_loss(PRESETS["ppo"], **batch.kwargs).metrics.compute()
        assert sum(x != x for x in wanted.values()) > 1 or value == float("inf")
        assert_same(got, wanted, what="metric")


def test_a_nan_in_one_sum_does_not_reach_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stages share a read of the first sum's partial results;
    y: 1 + 2 + 3 − 4 = 2, between −4 and 3.
    """
    monkeypatch.setattr(two_stages, "FEWEST", 2)
    x, y = torch.tensor([[1.0, torch.nan], [3.0, 5.0]]), torch.tensor([[1.0, 2.0], [3.0, -4.0]])
    with two_stages.InTwoStages(4) as cut:
        found = [
            x.sum(),
            x.amax(),
            y.sum(),
            y.amax(),
            y.amin(),
            y.int().amax(),
            (y > 1).sum(dtype=torch.int32),
        ]
    assert cut.shared[2].shape == (2,)
    assert found[0].isnan()
    assert found[1].isnan()
    assert [t.item() for t in found[2:]] == [2.0, 3.0, -4.0, 3, 2]
    assert found[-1].dtype == torch.int32


@pytest.mark.parametrize("layout", [pytest.param("padded", marks=pytest.mark.slow), "packed"])
def test_two_stages_for_any_shape(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    cut_sums(monkeypatch, BATCH)
    spec = PRESETS["gspo"]
    loss = compiled_loss(spec, dynamic=True)
    for rows, width in ((5, 4), (9, 7)):
        batch = make_batch(rows, rows, width)
        batch = batch.packed() if layout == "packed" else batch
        assert_same_result(compiled_run(loss, batch), run(spec, batch))


# --- Where there is no graph ----------------------------------------------------------------------


def test_a_callable_in_a_slot_runs_eagerly() -> None:
    """It may keep a state that a graph would freeze."""
    calls: list[int] = []

    def trust(t: pl.Tokens) -> Tensor:
        calls.append(1)
        return -t.advantages * t.ratio * len(calls)

    loss = compiled_loss(pl.LossSpec(trust=trust))
    first, second = (loss(**BATCH.kwargs).loss for _ in range(2))
    assert_same(second, 2 * first, what="loss")


def test_a_context_parallel_call_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, seen = compiled_loss(PRESETS["ppo"]), list[Any]()
    monkeypatch.setattr(
        compiled, "policy_loss", lambda *arguments, cp_group, **others: seen.append(cp_group)
    )
    loss(**BATCH.kwargs, cp_group="ranks")
    assert seen == ["ranks"]


def test_a_batch_without_tokens_is_zero() -> None:
    logp = torch.zeros(3, 0, requires_grad=True)
    out = compiled_loss(PRESETS["ppo"])(
        logp, logp.detach(), torch.zeros(3), torch.zeros(3, 0, dtype=torch.bool)
    )
    out.loss.backward()
    assert out.loss.item() == 0
    assert logp.grad is not None


def test_it_may_stand_inside_a_compiled_function() -> None:
    torch._dynamo.reset()
    loss = compiled_loss(PRESETS["ppo"])
    step = torch.compile(
        lambda logp: 2 * loss(**{**BATCH.kwargs, "logp": logp}).loss,
        backend="eager",
        fullgraph=True,
    )
    assert_same(step(BATCH.logp), 2 * run(PRESETS["ppo"], BATCH).loss, what="loss")


# --- Errors are those of the eager loss -----------------------------------------------------------


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize(
    ("change", "spec"),
    [
        ({"mask": BATCH.mask[:, :-1]}, "ppo"),
        ({"old_logp": BATCH.old_logp[1:]}, "ppo"),
        ({"advantages": BATCH.advantages[:, :3]}, "ppo"),
        ({"old_logp": None}, "ppo"),
        ({"ref_logp": None}, "grpo"),
        ({"logp": None}, "ppo"),
        ({"totals": 3}, "ppo"),
    ],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else x,
)
def test_bad_input_gives_the_same_error(change: dict[str, Any], spec: str) -> None:
    arguments = {**BATCH.kwargs, **change}
    with pytest.raises(InputError) as eager:
        pl.policy_loss(PRESETS[spec], **arguments)
    loss = compiled_loss(PRESETS[spec])
    compiled_loss_of_good_input = loss(**BATCH.kwargs).loss
    assert_same(
        compiled_loss_of_good_input, pl.policy_loss(PRESETS[spec], **BATCH.kwargs).loss, what="loss"
    )
    with pytest.raises(InputError) as seen:
        loss(**arguments)
    assert str(seen.value) == str(eager.value)


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("way", ["__call__", "value_and_gradient"])
def test_wrong_values_are_refused(way: str) -> None:
    call = getattr(compiled_loss(PRESETS["ppo"]), way)
    with pytest.raises(InputError, match=f"mask held {int(BATCH.mask.sum())} values"):
        call(**{**BATCH.kwargs, "mask": BATCH.mask * 2.0})
    with pytest.raises(InputError, match="cu_seqlens of 1 calls did not rise"):
        call(**{**LAYOUTS["packed"].kwargs, "cu_seqlens": torch.arange(8) % 5})


def test_a_spec_is_needed() -> None:
    with pytest.raises(InputError, match="spec must be a LossSpec"):
        compiled_loss(0.2)  # type: ignore[arg-type]
