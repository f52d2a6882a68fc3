"""The two kernels that `policy_loss` uses on a GPU give the numbers of the eager loss.

Triton's interpreter runs them on a CPU.
"""

from __future__ import annotations

import ast
import math
from typing import Any

# isort: off
from interpreted import DEVICE, triton  # before anything that imports Triton

# isort: on
import pytest
import torch
from torch import Tensor

import policyloss as pl
from cases import PRESETS, Batch, make_batch
from policyloss.compiled import fused, token_graph, token_program
from policyloss.compiled.token_graph import trace_graph
from policyloss.inputs import Inputs

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
BATCH = make_batch(seed=5, rows=4, width=6).map(lambda x: x.to(torch.float32))
UNSERVED = {"gspo_turn", "clip_cov", "kl_cov", "fipo", "m2po"}
LEAVES = ("logp", "entropy", "divergence")


def arguments_of(spec: pl.LossSpec, batch: Batch = BATCH) -> dict[str, Any]:
    """The inputs of the loss, on the device of the kernels, with groups only if it needs them."""
    names = ("logp", "old_logp", "advantages", "mask", *spec.reads)
    chosen = {name: x for name, x in batch.kwargs.items() if name in names and x is not None}
    return {name: x.to(DEVICE) for name, x in chosen.items()}


def run(
    spec: pl.LossSpec, arguments: dict[str, Any], by_kernels: bool, totals: Any, level: str
) -> tuple[Tensor, dict[str, float], list[Tensor]]:
    """Loss, metrics, and the gradients in all that has one."""
    leaves = {n: x.clone().requires_grad_() for n, x in arguments.items() if n in LEAVES}
    inputs = Inputs(**{**arguments, **leaves})
    if by_kernels:
        out = fused.run_kernels(spec, inputs, totals, level)
        assert out is not None, fused._kernels(
            spec, level, fused._call(spec, inputs, inputs.tensors(), totals)
        )
    else:
        with pl.unfused():
            out = pl.policy_loss(
                spec, **{**arguments, **leaves}, totals=totals or "local", metrics=level
            )
    out.loss.backward()
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    return out.loss.detach(), out.metrics.compute(), gradients


def assert_equal(
    spec: pl.LossSpec, arguments: dict[str, Any], totals: Any = None, level: str = "all"
) -> dict[str, float]:
    """Both ways agree within what float32 sums and exponentials round; the kernels' metrics."""
    expected = run(spec, arguments, False, totals, level)
    actual = run(spec, arguments, True, totals, level)
    torch.testing.assert_close(actual[0], expected[0], rtol=2e-6, atol=1e-7, equal_nan=True)
    assert actual[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert actual[1][name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), name
    for a, b in zip(actual[2], expected[2], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=5e-6, atol=1e-7, equal_nan=True)
    return actual[1]


# One of every shape of graph: tokens alone, a weight of its rows, sums of rows, several of them.
QUICK = ("ppo_dual_clip", "grpo", "gspo", "icepop")
SERVED = [
    name for name in PRESETS if name not in UNSERVED and "group_ids" not in PRESETS[name].reads
]


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SERVED]
)
def test_the_kernels_compute_the_loss(name: str) -> None:
    assert_equal(PRESETS[name], arguments_of(PRESETS[name]))


@pytest.mark.parametrize("name", QUICK)
def test_the_kernels_divide_by_the_totals_of_the_step(name: str) -> None:
    tokens = torch.tensor(50, device=DEVICE)
    assert_equal(PRESETS[name], arguments_of(PRESETS[name]), pl.Totals(tokens, 30, dp_size=2))


@pytest.mark.parametrize("totals", [None, pl.Totals(50, 30)], ids=["local", "totals"])
def test_value_and_gradient_takes_the_gradients_of_the_kernels(
    totals: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = PRESETS["ppo_dual_clip"]
    arguments = arguments_of(spec)
    leaf = arguments["logp"].clone().requires_grad_()
    monkeypatch.setattr(fused, "_reason_to_skip", lambda inputs: "")  # as on a GPU
    results = fused.fused_gradients(spec, Inputs(**{**arguments, "logp": leaf}), totals, "all")
    assert results is not None
    (out, gradients), (loss, metrics, expected) = results, run(spec, arguments, True, totals, "all")
    assert not out.loss.requires_grad
    assert torch.equal(out.loss, loss)
    assert out.metrics.compute() == pytest.approx(metrics, nan_ok=True)
    assert gradients.keys() == {"logp"}
    assert torch.equal(gradients["logp"], expected[0])


@pytest.mark.parametrize("name", QUICK)
def test_kernels_name_nothing_else(name: str) -> None:
    """The executed source is arithmetic: names that it assigns, and functions of Triton's
    language.
    """
    spec = PRESETS[name]
    inputs = Inputs(**arguments_of(spec))
    ready = fused._kernels(spec, "all", fused._call(spec, inputs, inputs.tensors(), None))
    nodes = list(ast.walk(ast.parse(ready.run.text)))
    assert not any(isinstance(n, (ast.Import, ast.ImportFrom, ast.Lambda, ast.With)) for n in nodes)
    known = {"triton", "tl", "range", "float"}
    known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    known |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    assert {n.id for n in nodes if isinstance(n, ast.Name)} <= known
    hidden = [n.attr for n in nodes if isinstance(n, ast.Attribute) and n.attr.startswith("_")]
    assert hidden == []


@pytest.mark.parametrize(
    "part", [pl.Stale(2), pl.Stale(math.inf, 0.75), pl.TruncateRatio(1.2, 0.9)], ids=str
)
def test_the_kernels_read_ages_and_bound_ratios(part: Any) -> None:
    spec = pl.LossSpec(ratio=pl.TokenRatio(anchor="rollout"), correction=part)
    assert_equal(spec, arguments_of(spec))


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_a_loss_that_does_not_fit_has_a_reason(name: str) -> None:
    spec = PRESETS[name]
    inputs = Inputs(**arguments_of(spec))
    assert fused.run_kernels(spec, inputs, None, "all") is None
    call = fused._call(spec, inputs, inputs.tensors(), None)
    assert "neither tokens, nor rows, nor numbers" in str(fused._kernels(spec, "all", call))


def test_the_hand_computed_loss() -> None:
    """Two tokens: r = e^0.5 = 1.6487 with A = 1 is held at 1.2; r = 1 with A = −2 gives 2."""
    logp = torch.tensor([[-1.0, -2.0, 7.0]], device=DEVICE)
    old = torch.tensor([[-1.5, -2.0, math.nan]], device=DEVICE)
    advantages = torch.tensor([[1.0, -2.0, math.inf]], device=DEVICE)
    mask = torch.tensor([[True, True, False]], device=DEVICE)
    arguments = {"logp": logp, "old_logp": old, "advantages": advantages, "mask": mask}
    loss, metrics, (gradient,) = run(pl.preset("ppo"), arguments, True, None, "all")
    assert loss.item() == pytest.approx((-1.2 + 2.0) / 2)
    assert gradient.tolist() == [[0.0, 1.0, 0.0]]
    assert metrics["clip_fraction_upper"] == 0.5
    assert metrics["kl_old_k1"] == pytest.approx(-0.25)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.5))
    assert metrics["tokens"] == 2


SPEC = pl.preset("ppo_dual_clip").replace(kl=pl.KL("k3", 0.1))


def test_levels_dtypes_and_shapes() -> None:
    plain = arguments_of(SPEC)
    half = {n: x.to(torch.bfloat16) if n != "mask" else x.float() for n, x in plain.items()}
    assert_equal(SPEC, half)
    per_row = {**plain, "advantages": plain["advantages"][:, 1], "mask": plain["mask"].long()}
    assert_equal(SPEC, per_row, level="basic")
    sliced = {n: x.repeat(1, 2)[:, 1::2] for n, x in plain.items()}
    assert_equal(SPEC, {**sliced, "advantages": sliced["advantages"][:, :1]}, level="none")


def test_more_tokens_than_a_span() -> None:
    wide = make_batch(seed=2, rows=4, width=1301).map(lambda x: x.to(torch.float32))
    assert wide.mask.numel() > token_program.SPAN > 1301 > token_program.BLOCK
    assert_equal(SPEC, arguments_of(SPEC, wide), level="basic")
    grpo = PRESETS["grpo"].replace(kl=None)
    assert_equal(grpo, arguments_of(grpo, wide), level="basic")


def test_only_present_tensors_are_summed() -> None:
    """By a function that is not 0 behind the end of a span, as masked tokens of a loss are."""

    def numbers(x: Tensor) -> list[Tensor]:
        packed = torch.stack([(x - 5).amax(), (x + 9).amin(), (2 - x).sum()])
        return [(x + 1).sum(), packed, 3 * x]

    example = torch.zeros(token_graph.ROWS, token_graph.WIDTH)
    run = token_program.TokenKernels(trace_graph(numbers, [example]))
    for shape in ((2, 3), (3, token_program.BLOCK), (5, token_program.SPAN // 5 + 1)):
        x = 1 - torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) / 2
        for actual, expected in zip(run([x], x.shape), numbers(x), strict=True):
            torch.testing.assert_close(actual, expected.to(actual.dtype))


def test_other_leaves_and_other_ranks_have_kernels_of_their_own() -> None:
    """A gradient where logp has one, and a loss of two ranks that is twice as large."""
    spec, arguments = SPEC.replace(entropy_coef=0.0), arguments_of(SPEC)
    for dp_size in (1, 2):
        for leaf in (False, True):
            logp = arguments["logp"].clone().requires_grad_(leaf)
            inputs = Inputs(**{**arguments, "logp": logp})
            totals = pl.Totals(torch.tensor(50, device=DEVICE), 30, dp_size=dp_size)
            out = fused.run_kernels(spec, inputs, totals, "basic")
            assert out is not None
            assert out.loss.requires_grad == leaf
            expected = run(spec, arguments, False, totals, "basic")
            torch.testing.assert_close(out.loss.detach(), expected[0])
            if leaf:
                torch.testing.assert_close(torch.autograd.grad(out.loss, logp)[0], expected[2][0])


def test_a_bad_batch_raises_an_error() -> None:
    """A NaN, an infinity, an empty mask and a wrong mask look as they do eagerly."""
    arguments = arguments_of(SPEC)
    row, column = arguments["mask"].nonzero()[3].tolist()
    for value in (math.nan, -math.inf):
        for name in ("logp", "advantages"):
            broken = {**arguments, name: arguments[name].clone()}
            broken[name][row, column] = value
            assert_equal(SPEC, broken)
    assert_equal(SPEC, {**arguments, "mask": torch.zeros_like(arguments["mask"])})
    mask = arguments["mask"].float()
    mask[row, column] = 0.5
    with pytest.raises(pl.InputError, match="1 values that are neither 0 nor 1"):
        run(SPEC, {**arguments, "mask": mask}, True, None, "none")


def test_masked_garbage_changes_nothing() -> None:
    arguments = arguments_of(SPEC)
    clean = run(SPEC, arguments, True, None, "all")
    for garbage in (math.nan, math.inf):
        dirty = {
            name: x if name == "mask" else torch.where(arguments["mask"], x, garbage)
            for name, x in arguments.items()
        }
        loss, metrics, gradients = run(SPEC, dirty, True, None, "all")
        assert loss == clean[0]
        assert metrics == clean[1]
        assert torch.equal(gradients[0], clean[2][0])


def test_a_second_derivative_is_refused() -> None:
    arguments = arguments_of(SPEC)
    logp = arguments["logp"].clone().requires_grad_()
    out = fused.run_kernels(SPEC, Inputs(**{**arguments, "logp": logp}), None, "all")
    assert out is not None
    (gradient,) = torch.autograd.grad(out.loss, logp, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_calls_that_the_kernels_do_not_support() -> None:
    arguments = arguments_of(SPEC)

    def path(spec: Any = SPEC, **changes: Any) -> str:
        inputs = Inputs(**{**arguments, **changes})
        return fused._refusal(spec, inputs, inputs.tensors())

    assert path() == ""
    assert "callable" in path(SPEC.replace(trust=lambda t: -t.advantages * t.ratio))
    assert "group_ids" in path(group_ids=torch.arange(4))
    assert "float64" in path(old_logp=arguments["old_logp"].double())
    assert "not a plain tensor" in path(ref_logp=[1.0])
    empty = {name: x[:0] for name, x in arguments.items()}
    assert "no padded tokens" in path(**empty)
    flat = {name: x.reshape(-1) for name, x in arguments.items()}
    assert "cu_seqlens" in path(**flat, cu_seqlens=torch.tensor([0, 24]))


def test_a_wrong_shape_is_refused_as_ever() -> None:
    arguments = arguments_of(SPEC)
    wrong = {**arguments, "old_logp": arguments["old_logp"][:, :3]}
    assert fused.run_kernels(SPEC, Inputs(**wrong), None, "all") is None
    with pytest.raises(pl.InputError, match="old_logp has shape"):
        pl.policy_loss(SPEC, **wrong)
    row_mask = {**arguments, "mask": arguments["mask"][:, :1]}
    assert fused.run_kernels(SPEC, Inputs(**row_mask), None, "all") is None
    with pytest.raises(pl.InputError, match="mask has shape"):
        pl.policy_loss(SPEC, **row_mask)


def test_the_path_is_reported() -> None:
    arguments = arguments_of(SPEC)
    told = pl.explain_path(SPEC, **arguments)
    if DEVICE == "cpu":
        assert told == (
            "Operation by operation, because logp is on cpu, and the kernels are for a GPU."
        )
        return
    assert told.startswith("Two Triton kernels")
    with pl.unfused():
        assert "unfused" in pl.explain_path(SPEC, **arguments)


def test_a_failing_compiler_leaves_the_eager_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise OSError("no ptxas")

    spec = SPEC.replace(entropy_coef=0.5)  # its kernels do not exist yet
    monkeypatch.setattr(fused, "TokenKernels", fails)
    inputs = Inputs(**arguments_of(spec))
    with pytest.warns(UserWarning, match=r"operation by operation.*OSError: no ptxas"):
        assert fused.run_kernels(spec, inputs, None, "all") is None
    assert fused.run_kernels(spec, inputs, None, "all") is None  # silent from then on


@pytest.mark.skipif(DEVICE == "cpu", reason="on a CPU nobody asks for the kernels")
def test_policy_loss_takes_the_kernels_by_itself() -> None:
    arguments = arguments_of(SPEC)
    out = pl.policy_loss(SPEC, **arguments)
    assert out.metrics._packed is not None
    with pl.unfused():
        eager = pl.policy_loss(SPEC, **arguments)
    torch.testing.assert_close(out.loss, eager.loss)
    assert triton.__version__


def test_one_pair_of_kernels_serves_every_shape() -> None:
    spec = SPEC.replace(entropy_coef=0.25)
    for rows, width in ((3, 40), (1, 2)):
        batch = make_batch(seed=1, rows=rows, width=width).map(lambda x: x.to(torch.float32))
        assert_equal(spec, arguments_of(spec, batch))
    _, kinds = fused._cache[id(spec)]
    assert len(kinds) == 1


def test_the_series_of_expm1() -> None:
    """kl_old_k3 of small ratios is the mean of d²/2, which exp(d) − 1 − d would round away."""
    logp = torch.full((1, 8), -1.0, device=DEVICE)
    old = logp - torch.tensor([1e-3, -1e-3] * 4, device=DEVICE)
    mask = torch.ones(1, 8, dtype=torch.bool, device=DEVICE)
    arguments = {"logp": logp, "old_logp": old, "advantages": torch.ones(1, device=DEVICE)}
    metrics = run(pl.preset("ppo"), {**arguments, "mask": mask}, True, None, "all")[1]
    d = (logp - old).double()
    exact = (torch.expm1(d) - d).mean().item()
    assert metrics["kl_old_k3"] == pytest.approx(exact, rel=2e-4)
