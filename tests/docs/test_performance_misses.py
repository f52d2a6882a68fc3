"""The page of performance explains every missed target by figures of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import head_logits, head_providers, loss
from docs.performance_page import performance_page

from docs import performance_misses

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def missed(name: str, what: str, measured: float, sense: str = ">=", **more: Any) -> dict[str, Any]:
    bound = {"sense": sense, "reach": 5, "stretch": None, "met": False}
    return {"id": name, "what": what, "measured": measured, **bound, **more}


def timed(**ms: float) -> dict[str, Any]:
    return {"median_ms": ms["whole"], "kernel_ms": ms.get("kernels", 0.0), "chunked": True}


def test_every_miss_of_the_kept_runs_is_explained() -> None:
    runs = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    assert performance_misses.unexplained(runs) == []


def test_a_miss_without_explanation_is_named() -> None:
    """A target without an explanation, one with an unfitting text, and a missing figure."""
    lines = [missed("T99", "speed", 1.0), missed("T7", "speed", 1.0), missed("T6", "time / x", 2.0)]
    runs = {"head_cuda": {"targets": lines, "groups": {head_logits.GROUP: {}}}}
    names = ["head, GPU, T99: speed", "head, GPU, T7: speed", "head, GPU, T6: time / x"]
    assert performance_misses.unexplained(runs) == names
    section = performance_misses.misses_section(runs)
    assert "**head, GPU, T99, speed: 1, should be at least 5.**" in section
    assert section.count("No explanation has been written yet.") == 1


def test_a_target_that_is_met_is_not_explained() -> None:
    run = json.loads((RESULTS / "head_cuda.json").read_text())
    run["targets"] = [{**t, "met": True} for t in run["targets"]]
    assert performance_misses.misses_section({"head_cuda": run}) == ""
    assert "The misses" not in performance_page({"head_cuda": run})


def logits_section(what: str) -> str:
    group = {
        head_logits.COPY: timed(whole=2.2, kernels=2.0),
        head_logits.FORWARD: timed(whole=1.5, kernels=1.25),
        head_logits.BACKWARD: timed(whole=3.0, kernels=2.5),
        head_logits.TRL_KERNEL: timed(whole=4.4, kernels=4.0),
    }
    run = {"targets": [missed("T7", what, 0.7)], "groups": {head_logits.GROUP: group}}
    return performance_misses.misses_section({"head_cuda": run})


def test_rows_of_logits_by_hand() -> None:
    # A forward reads the bytes that a copy reads and writes: 2 / 2 / 1.25; 1.5 − 1.25 are the
    # host's.
    text = logits_section("from logits, forward: share of copy bandwidth")
    assert "0.80 of the copy's bandwidth. The other 0.25 ms of the 1.50 ms" in text
    text = logits_section("from logits, backward in place: share of copy bandwidth")
    assert "0.80 of the copy's bandwidth. The other 0.50 ms of the 3.00 ms" in text  # 2 / 2.5
    # 4.4 / (2.2 / 2), and 4 / 1.25.
    text = logits_section("times faster than TRL's pair with its Triton kernel")
    assert "can be more than 4.00 times faster" in text
    assert "ours is 3.20 times faster" in text


def test_the_forward_alone_by_hand() -> None:
    names = head_providers
    alone = {names.ONE: timed(whole=26, kernels=25), "policyloss": timed(whole=33, kernels=30)}
    turns = {names.ONE: timed(whole=28), names.WIDE: timed(whole=30), "policyloss": timed(whole=33)}
    shape = {"sequences": 2**10, "length": 2**10, "vocabulary": 2**10}
    line = missed("T6", f"forward only: time / {names.ONE}", 1.18, "<=", reach=1.1)
    run = {"targets": [line], "groups": {names.FORWARD: alone}, "shape": shape}
    text = performance_misses.misses_section({"head_cuda": run})
    # 30 / 25, and 2³⁰ logits of two and of four bytes.
    assert "a ratio of 1.20. The rest of our 33.0 ms" in text
    assert "writes bfloat16 logits, 2.0 GiB; ours are float32, 4.0 GiB" in text
    run["groups"][names.IN_TURNS] = turns
    text = performance_misses.misses_section({"head_cuda": run})
    assert "takes 28.0 ms, and 30.0 ms if its logits are float32; our call takes 33.0" in text
    assert "1.10 times that." in text


def test_the_head_on_a_cpu_by_hand() -> None:
    names = head_providers
    masked = {
        names.LIVE: timed(whole=100),
        names.LIVE_NEW: timed(whole=125),
        f"policyloss, {names.QUARTER}": timed(whole=150),
        f"eager PyTorch, {names.QUARTER}, rows gathered": timed(whole=175),
    }
    floor = {"median_ms": 400.0, "chunked": False}
    dense = {
        names.THREE: floor,
        names.OURS: {**floor, "median_ms": 450.0},
        "slow": timed(whole=900),
        "fast": timed(whole=480),
    }
    lines = [
        missed("C1", f"share of the matmul rate on live rows, {names.QUARTER}", 0.5),
        missed("C1", "times faster than the fastest chunked peer", 1.07),
    ]
    run = {"targets": lines, "groups": {"dense": dense, "masked": masked}}
    text = performance_misses.misses_section({"head_cpu": run})
    # 0.5·150 is the time at the dense rate, 75 ms: 75 / 100, 75 / 125, and 150 / 125.
    assert "reach 0.75 of the rate" in text
    assert "and 0.60 if the gradient of the weight goes to new memory" in text
    assert "(25 ms of 125 ms). Our call takes 1.20 times as long as these." in text
    assert "Our call takes 150 ms; eager PyTorch, whose rows were gathered before" in text
    assert "The fastest is fast, which takes 480 ms." in text
    assert "they alone are only 1.20 times faster" in text


def test_the_eager_loss_by_hand() -> None:
    ms = {"policyloss": 4.0, "policyloss, basic": 2.0, "policyloss, no metrics": 1.6}
    others = {loss.FUSED: 1.0, "verl": 8.0, "openrlhf": 5.0, loss.COATI: 2.0}
    line = missed("C2", f"eager: times faster than {loss.COATI}", 0.5)
    times = {name: timed(whole=x) for name, x in (ms | others).items()}
    text = performance_misses.misses_section({"loss_cpu": {"targets": [line], "times": times}})
    levels = "0.50 times as fast with all metrics, 1.00 times with five metrics, 1.25 times with no"
    assert f"Ours is {levels} metrics; `compiled_loss`, which has all metrics, is 2.00" in text
    assert "are 0.25 and 0.40 times as fast." in text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_targets_with_one_reason_share_a_paragraph(device: str) -> None:
    what = "loss and gradients, recompute"
    times = {"default": {"median_ms": 100.0}, "exact": {"median_ms": 112.5}}
    case = {"times": times, "bits": {"default": {"one row": 3, "others": 7}}}
    line = missed("T15", f"{what}: exact / default", 1.125, "<=", reach=1.1)
    run = {"targets": [line, line], "tile": 512, "parts": 8, "cases": {what: case}}
    text = performance_misses.misses_section({f"bits_{device}": run})
    assert text.count("1.12, should be at most 1.1.**") == 2
    assert text.count("The difference, 12.5 ms,") == 1
    assert "By default 7 rows had other bits" in text
