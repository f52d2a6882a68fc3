"""The benchmark of the head on tiny shapes: inputs, float64 answers, the gate, targets, and the
page drawn from its JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import (
    harness,
    head,
    head_data,
    head_logits,
    head_providers,
    head_reference,
    head_targets,
)
from benchmarks.head_data import Case, Shape
from benchmarks.head_providers import IN_TURNS, OURS, QUARTER, SHARED, THREE, UNROLLED, Entry
from benchmarks.head_reference import Result

import policyloss as pl
from docs import performance_figure, performance_page

TINY = Shape(sequences=4, length=40, vocabulary=61, hidden=16)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return head_data.make(TINY, "cpu")


# Inputs -------------------------------------------------------------------------------------------


def test_inputs_are_peaked_and_lie_on_both_sides_of_every_bound() -> None:
    dense = head_data.make(Shape(4, 500, 997, 64), "cpu")["dense"]
    assert 0.3 <= dense.statistics.entropy.mean().item() <= 1.0
    # Tokens are drawn from the distributions themselves, so −logp is near the entropy on average:
    # the standard error of 2000 draws with a spread of about 1 nat is 0.02.
    assert abs(dense.statistics.entropy.mean() + dense.statistics.logp.mean()).item() < 0.1
    log_ratio = dense.statistics.logp - dense.old_logp.flatten()
    for bound in (0.8, 1.2, 3.0):
        assert (log_ratio < math.log(bound)).any()
        assert (log_ratio > math.log(bound)).any()
        assert (log_ratio - math.log(bound)).abs().min() > 0.99 * head_data.MARGIN
    assert (dense.advantages > 0).any()
    assert (dense.advantages < 0).any()


def test_the_statistics_match_the_inputs(cases: dict[str, Case]) -> None:
    dense = cases["dense"]
    logprob = (
        (dense.hidden.detach().double() @ dense.weight.detach().double().T)
        .log_softmax(-1)
        .flatten(0, 1)
    )
    torch.testing.assert_close(
        dense.statistics.logp, logprob.gather(-1, dense.ids.flatten()[:, None]).squeeze(-1)
    )
    torch.testing.assert_close(dense.statistics.entropy, -(logprob.exp() * logprob).sum(-1))


def test_masks_and_zero_advantages(cases: dict[str, Case]) -> None:
    shares = {name: case.mask.double().mean().item() for name, case in cases.items()}
    expected = {
        "dense": 1.0,
        "half masked": 0.5,
        QUARTER: 0.5,
        "agentic": 0.2,
        "two sequences": 1.0,
        "tree": 1.0,
    }
    assert shares == pytest.approx(expected)
    assert (cases[QUARTER].advantages == 0).tolist() == [True, False, False, False]
    # F = 1/2 of the tokens count and 3/4 of those are moved: (2·1/2 + 4·3/8) / 6 = 2.5 / 6.
    assert head.live_share(cases[QUARTER]) == pytest.approx(2.5 / 6)
    gathered = cases["agentic"].gathered()
    assert gathered.hidden.shape == (1, 32, 16)  # a fifth of 160
    torch.testing.assert_close(
        gathered.hidden.detach()[0], cases["agentic"].hidden.detach()[cases["agentic"].mask]
    )


# The float64 answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "loss"),
    [
        ("dense", "dual clip"),
        (QUARTER, "dual clip"),
        ("agentic", "clip"),
        ("dense", "entropy"),
        ("two sequences", "gspo"),
    ],
)
def test_the_answer_is_the_gradient_of_the_line(
    cases: dict[str, Case], case: str, loss: str
) -> None:
    chosen = cases[case]
    hidden, weight = (x.detach().double().requires_grad_() for x in (chosen.hidden, chosen.weight))
    logprob = (hidden @ weight.T).log_softmax(-1)
    logp = logprob.gather(-1, chosen.ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(logprob.exp() * logprob).sum(-1)
    spec = pl.LossSpec(trust=pl.Clip(0.2, 0.2)) if loss == "clip" else head_providers.SPECS[loss]
    out = pl.policy_loss(
        spec,
        logp,
        chosen.old_logp,
        chosen.advantages,
        chosen.mask,
        entropy=entropy if loss == "entropy" else None,
    )
    d_hidden, d_weight = torch.autograd.grad(out.loss, (hidden, weight))
    answer = head_reference.exact(chosen, loss)
    torch.testing.assert_close(answer.loss, out.loss.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(answer.d_hidden, d_hidden.flatten(0, 1), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(answer.d_weight, d_weight, rtol=1e-9, atol=1e-14)
    assert d_weight.abs().max() > 1e-4, "a test of zeros"


def test_errors_match_their_names(cases: dict[str, Case]) -> None:
    case = cases["dense"]
    answer = head_reference.exact(case, "dual clip")
    off = Result(
        answer.loss + 0.25,
        answer.logp + 0.5,
        answer.entropy - 0.125,
        answer.d_hidden * 1.5,
        answer.d_weight * 0.75,
    )
    found = head_reference.errors(off, answer, case)
    assert found == pytest.approx(
        {"loss": 0.25, "logp": 0.5, "entropy": 0.125, "d_hidden": 0.5, "d_weight": 0.25}
    )


def test_the_answer_from_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    ids, g, h = (
        torch.tensor([0, 6, 3, 3, 1]),
        torch.randn(5, generator=generator),
        torch.randn(5, generator=generator),
    )
    logprob = logits.log_softmax(-1)
    logp, entropy = logprob.gather(-1, ids[:, None]).squeeze(-1), -(logprob.exp() * logprob).sum(-1)
    (gradient,) = torch.autograd.grad((logp, entropy), logits, (g.double(), h.double()))
    found = head_logits.exact_logits(logits.detach(), ids, g, h)
    torch.testing.assert_close(found[0], logp.detach())
    torch.testing.assert_close(found[1], entropy.detach())
    torch.testing.assert_close(found[2], gradient.float())


# Runs ---------------------------------------------------------------------------------------------


def run_tiny(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "head.json"
    status = head.main(
        ["--shape", "4,40,61,16", "--rounds", "2", "--no-peers", "--out", str(out), *options]
    )
    return status, json.loads(out.read_text())


@pytest.mark.slow
def test_a_whole_run_on_a_cpu(tmp_path: Path) -> None:
    status, run = run_tiny(tmp_path)
    assert run["failures"] == []
    assert status == 0
    assert set(run["groups"]) == {
        *("dense", "masked", "tree", "forward only", IN_TURNS, "from logits")
    }
    dense = run["groups"]["dense"]
    assert {
        THREE,
        "one bare matmul",
        OURS,
        "policyloss, recompute",
        "policyloss, stash",
        "eager PyTorch",
    } <= set(dense)
    for providers in run["groups"].values():
        for name, p in providers.items():
            assert p["p20_ms"] <= p["median_ms"] <= p["p80_ms"], name
            assert p["kind"] != "ours" or p["errors"], name
            assert p.get("same_bits", True), name
    # float32 d hidden and d weight; also the loss, and logp and entropy of 160 tokens.
    gradients = 4 * (4 * 40 * 16 + 61 * 16)
    assert dense[OURS]["output_bytes"] == gradients + 4 + 2 * 4 * 160
    by_what = {t["what"]: t for t in run["targets"]}
    assert (
        by_what["share of the matmul rate, dense"]["measured"]
        == dense[THREE]["median_ms"] / dense[OURS]["median_ms"]
    )
    assert {t["id"] for t in run["targets"]} == {"C1", "T18"}
    assert run["shape"] == {"sequences": 4, "length": 40, "vocabulary": 61, "hidden": 16}
    assert run["environment"]["torch"] == torch.__version__


def test_a_part_of_a_run(tmp_path: Path) -> None:
    _, run = run_tiny(tmp_path, "--only", "t6")
    assert set(run["groups"]) == {"forward only", IN_TURNS}


def test_a_tree_and_its_unrolled_batch_are_right(tmp_path: Path) -> None:
    """Both are compared with float64, in their gradients by the distinct hidden states too."""
    status, run = run_tiny(tmp_path, "--only", "t18")
    assert (status, run["failures"], set(run["groups"])) == (0, [], {"tree"})
    assert set(run["groups"]["tree"]) == {SHARED, UNROLLED}
    assert all(p["errors"]["d_hidden"] < 1e-5 for p in run["groups"]["tree"].values())


def scaled_gradient(case: Case, folder: Path) -> head_providers.Run:
    right = head_providers.eager(case, folder)

    def run() -> Result:
        result = right()
        assert result.d_weight is not None
        return result._replace(d_weight=result.d_weight * 1.001)

    return run


def unwritten_gradient(case: Case, folder: Path) -> head_providers.Run:
    right = head_providers.eager(case, folder)

    def run() -> Result:
        buffer = torch.empty_like(case.hidden)
        result = right()
        assert result.d_hidden is not None
        buffer[:, 1:] = result.d_hidden[:, 1:].detach()
        return result._replace(d_hidden=buffer)

    return run


def changing_bits(case: Case, folder: Path) -> head_providers.Run:
    right, calls = head_providers.eager(case, folder), []

    def run() -> Result:
        calls.append(None)
        result = right()
        assert result.d_weight is not None
        return result._replace(d_weight=result.d_weight * (1 + 1e-7 * len(calls)))

    return run


def failing(case: Case, folder: Path) -> head_providers.Run:
    raise RuntimeError("no such kernel")


@pytest.mark.slow
def test_a_wrong_provider_is_refused_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(name: str, make: head_providers.Make, kind: str = "ours") -> Entry:
        return Entry(name, make, ("C1",), kind=kind)

    right = [
        entry
        for entry in head_providers.entries()
        if entry.group == "dense" and entry.name in (THREE, "eager PyTorch")
    ]
    made = [
        *right,
        wrong("policyloss, scaled", scaled_gradient),
        wrong("policyloss, unwritten", unwritten_gradient),
        wrong("policyloss, changing", changing_bits),
        wrong("policyloss, failing", failing),
    ]
    monkeypatch.setattr(head_providers, "entries", lambda: made)
    status, run = run_tiny(tmp_path, "--only", "C1")
    assert status == 1
    reasons = {f["provider"]: f["reason"] for f in run["failures"]}
    # Scaled by 1.001, the gradient is off by 1e-3 of itself.
    assert re.fullmatch(
        r"wrong answer, not timed: d_weight is off by 1\.0e-03 \(limit .*\)",
        reasons["policyloss, scaled"],
    )
    assert "d_hidden is off by nan" in reasons["policyloss, unwritten"]
    assert reasons["policyloss, failing"] == "RuntimeError: no such kernel"
    assert set(run["groups"]["dense"]) == {THREE, "eager PyTorch", "policyloss, changing"}
    assert run["groups"]["dense"]["policyloss, changing"]["same_bits"] is False


@pytest.mark.slow
def test_a_peer_that_is_not_here_is_listed_with_the_reason(
    tmp_path: Path, cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.peers._root", lambda *_: None)  # not even if it is installed
    bench = head.Bench(cases, tmp_path, rounds=1)
    peers = [
        e
        for e in head_providers.entries()
        if e.group == "dense" and e.kind == "peer" and "cpu" in e.devices
    ]
    of_torch = (head_providers.eager, head_providers.row_loop, head_providers.torch_head)
    missing = [e for e in peers if e.make not in of_torch]
    bench.run(missing)
    assert bench.groups == {"dense": {}}
    assert [f["provider"] for f in bench.failures] == [
        e.name for e in missing if e.loss == "dual clip"
    ] + ["Liger GRPO"]
    for failure in bench.failures:
        assert re.match(r"MissingPeerError: \w+ is neither installed nor under", failure["reason"])


def test_limits() -> None:
    yardstick = {"loss": 1e-9, "logp": 3e-2, "d_hidden": 4e-3, "d_weight": 0.0}
    # Twice the yardstick's error, a loss as far off as a log-prob,
    # and no less than float32's rounding.
    expected = {"loss": 6e-2, "logp": 6e-2, "d_hidden": 8e-3, "d_weight": 2e-6}
    assert head_reference.limits(yardstick, ours=False, dtype=torch.bfloat16) == pytest.approx(
        expected
    )
    assert head_reference.limits(yardstick, ours=True, dtype=torch.bfloat16)["d_hidden"] == 3e-3
    assert head_reference.refusal({"logp": math.nan}, expected) is not None
    assert head_reference.refusal({"logp": 6e-2}, expected) is None


def test_unwritten_memory_holds_nan() -> None:
    with head_reference.poisoned("cpu"):
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# The clock ----------------------------------------------------------------------------------------


def test_each_round_has_an_order_of_its_own_and_preparation_is_outside_the_clock() -> None:
    calls: list[str] = []
    providers = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    prepare = {"b": lambda: calls.append("prepare b")}
    times = harness.time_interleaved(providers, 40, warmup=0, prepare=prepare, few={"c": 1})
    assert set(times) == set("abc")
    assert {name: calls.count(name) for name in ("a", "b", "c", "prepare b")} == {
        "a": 40,
        "b": 40,
        "c": 1,
        "prepare b": 40,
    }
    assert all(before == "prepare b" for before, name in itertools.pairwise(calls) if name == "b")
    # In which of the 40 rounds b comes first is drawn:
    # nearly half of them, and the same ones every time.
    rounds = [name for name in calls if name in "ab"]
    first = [rounds[i] for i in range(0, 80, 2)]
    assert 10 < first.count("b") < 30
    assert all(set(rounds[i : i + 2]) == {"a", "b"} for i in range(0, 80, 2))


# Targets ------------------------------------------------------------------------------------------


def provider(kind: str, milliseconds: float, gib: float = 0.0, **errors: float) -> dict[str, Any]:
    times = {"median_ms": milliseconds, "p20_ms": milliseconds, "p80_ms": milliseconds}
    return {
        "kind": kind,
        "chunked": kind == "peer",
        "errors": errors,
        "extra_bytes": int(gib * 2**30),
        **times,
    }


def made_up() -> dict[str, Any]:
    """A run with invented round numbers."""
    dense = {
        THREE: provider("floor", 100.0),
        OURS: provider("ours", 110.0, 5.0, logp=1e-5, d_hidden=1e-3, d_weight=4e-3)
        | {"same_bits": True, "plan": "one_pass: why\n  rows"},
        "policyloss, recompute": provider(
            "ours", 165.0, 0.5, logp=2e-5, d_hidden=1e-3, d_weight=1e-3
        )
        | {"same_bits": False},
        "eager PyTorch": provider("peer", 132.0, 40.0, logp=7e-3, d_hidden=1e-2, d_weight=1e-2),
        "Liger GRPO": provider("peer", 1100.0, 4.0, d_hidden=1e-3, d_weight=1e-3),
    }
    shape = {"sequences": 8, "length": 2048, "vocabulary": 151936, "hidden": 4096}
    inputs = {
        "mean_entropy": 0.6,
        "mean_logp": -0.6,
        "below_clip": 0.01,
        "above_clip": 0.04,
        "above_dual": 0.01,
    }
    failures = [{"group": "dense", "provider": "verl, Triton", "reason": "RuntimeError: a | b\nc"}]
    environment = {
        "gpu": "Some GPU",
        "torch": "2.11",
        "cuda": "12.8",
        "driver": "1",
        "triton": "3.6",
        "threads": 1,
    }
    groups = {"dense": dense}
    result = {
        "environment": environment,
        "shape": shape,
        "dtype": "bfloat16",
        "inputs": inputs,
        "groups": groups,
        "failures": failures,
    }
    return {**result, "targets": head_targets.cuda_targets(groups)}


def test_targets_are_ratios_within_the_run() -> None:
    found = {(t["id"], t["what"]): t for t in made_up()["targets"]}
    first = found["T1", "time / three bare matmuls"]
    # 110 / 100.
    assert (first["measured"], first["met"], first["stretch_met"]) == (
        pytest.approx(1.1),
        True,
        False,
    )
    assert found["T1", "extra memory / eager PyTorch's"]["measured"] == pytest.approx(5 / 40)
    assert found["T1", "times faster than Liger"]["measured"] == pytest.approx(10)
    slower = found["T5", "least memory: time / one pass"]
    # 165 / 110, more than 1.45.
    assert (slower["measured"], slower["met"]) == (
        pytest.approx(1.5),
        False,
    )
    assert found["T5", "least memory: extra memory, GiB"]["stretch_met"] is True
    # The worst of ours, not the first.
    assert found["T10", "log-prob error (RMS)"]["measured"] == 2e-5
    assert found["T10", "d weight, relative error"]["met"] is False
    assert found["T10", "share of our providers with the same bits in two runs"]["measured"] == 0.5
    missing = found["T1", "times faster than verl's Triton head"]
    assert (missing["measured"], missing["met"]) == (None, None)


def test_cpu_targets() -> None:
    groups = {
        "dense": {
            THREE: provider("floor", 90.0),
            OURS: provider("ours", 100.0, 1 / 32),
            "a": provider("peer", 120.0),
            "b": provider("peer", 500.0),
        },
        "masked": {
            THREE: provider("floor", 90.0),
            f"policyloss, {QUARTER}": provider("ours", 50.0),
        },
        "tree": {SHARED: provider("ours", 60.0), UNROLLED: provider("ours", 100.0)},
    }
    measured = [t["measured"] for t in head_targets.cpu_targets(groups, live=0.4)]
    # 90 / 100; 90·0.4 / 50; a thirty-second of a GiB; the faster of the two peers; 60 / 100.
    assert measured == pytest.approx([0.9, 0.72, 32, 1.2, 0.6])


# The page -----------------------------------------------------------------------------------------


@pytest.fixture
def pages(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "head_cuda.json").write_text(json.dumps(made_up()))
    return performance_page.performance_pages(tmp_path)


def test_the_page_is_drawn_from_the_run(pages: dict[str, str]) -> None:
    page = pages["docs/performance.md"]
    assert (
        f"| **{OURS}** | 1.10 | 110.0 (110.0 to 110.0) | 5.0 GiB | 1.0e-05 | 1.0e-03 | 4.0e-03 |"
        in page
    )
    assert (
        "| Liger GRPO | 11.00 | 1100.0 (1100.0 to 1100.0) | 4.0 GiB |  | 1.0e-03 | 1.0e-03 |"
        in page
    )
    assert "| dense | verl, Triton | RuntimeError: a \\| b c |" in page
    assert "| T1 | time / three bare matmuls | ≤ 1.12 | ≤ 1.05 | 1.1 | yes |" in page
    assert "| T5 | least memory: time / one pass | ≤ 1.45 |  | 1.5 | **no** |" in page
    assert "| T1 | times faster than verl's Triton head | ≥ 1.6 |  |  | not measured |" in page
    assert "5% of the ratios beyond the clip range" in page
    assert "one_pass: why" in page


def test_the_page_before_the_first_run(tmp_path: Path) -> None:
    pages = performance_page.performance_pages(tmp_path / "none")
    assert set(pages) == {"docs/performance.md"}
    assert "No run has been recorded yet." in pages["docs/performance.md"]


def test_the_page_has_the_kept_runs_of_loss_and_gae() -> None:
    page = performance_page.performance_pages(Path(__file__).parents[2] / "benchmarks/results")[
        "docs/performance.md"
    ]
    assert "## The loss on a CPU, forward and backward" in page
    assert "| policyloss | " in page
    assert "## GAE on a CPU, no loop over time" in page
    assert "| padded, multi-turn | policyloss |" in page


def test_the_figure_has_a_bar_for_each_and_the_floor(pages: dict[str, str]) -> None:
    drawing = ET.fromstring(pages["docs/figures/head.svg"])
    space = "{http://www.w3.org/2000/svg}"
    texts = ["".join(t.itertext()) for t in drawing.iter(f"{space}text")]
    # Ours first, then the others from fast to slow.
    names = [
        OURS,
        "policyloss, recompute",
        "eager PyTorch",
        "Liger GRPO",
    ]
    assert [t for t in texts if t in names] == names
    assert "three bare matmuls: 100.0" in texts
    bars = [
        b for b in drawing.iter(f"{space}rect") if b.get("x") == str(performance_figure.TIME_START)
    ]
    lengths = [float(b.get("width", 0)) for b in bars]
    # Liger's 1100 is more than 2.5 times the next (165),
    # so the axis ends at 165·1.12 and its bar is cut there.
    whole = performance_figure.TIME_END - performance_figure.TIME_START
    assert lengths == pytest.approx(
        [whole * t / (165 * 1.12) for t in (110, 165, 132, 165 * 1.12)], abs=0.06
    )
    # Liger's time and eager PyTorch's memory are longer than drawn.
    assert len(list(drawing.iter(f"{space}path"))) == 2
    (floor,) = [line for line in drawing.iter(f"{space}line") if line.get("stroke-dasharray")]
    assert float(floor.get("x1", 0)) == pytest.approx(
        performance_figure.TIME_START + whole * 100 / (165 * 1.12), abs=0.06
    )
    assert drawing[0].get("fill") == "#ffffff"  # its own background: readable on a dark page


def test_the_figure_without_an_outlier_is_not_cut() -> None:
    scale = performance_figure.Scale(0, 100, [10.0, 20.0, 40.0])
    assert [scale.at(x) for x in (10.0, 20.0, 40.0)] == [25.0, 50.0, 100.0]
    assert not scale.cuts(40.0)


def test_gathered_rows_of_a_dense_case_are_the_case_itself(cases: dict[str, Case]) -> None:
    assert cases["dense"].gathered() is cases["dense"]
    assert replace(cases["dense"], name="x").token_advantages.shape == (4, 40)
