"""The benchmark of whole steps on a tiny model: the gate, the search for the largest batch, and the
table drawn from its JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import step

from docs import performance_page

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return step.make_model(step.SMALL.models["tiny"], 500, 32, "cpu")


def test_the_gate_lets_right_heads_pass_and_stops_a_wrong_one(model: Any) -> None:
    batch = step.Batch.of(2, 32, 500, "cpu")
    assert step.wrong(step.ours, model, batch) == ""
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        assert step.wrong(step.torch_linear_cross_entropy(step.RESULTS), model, batch) == ""
    assert "gradient off" in step.wrong(lambda m, b: step.ours(m, b) * 1.1, model, batch)
    loss = step.ours(model, batch)
    torch.testing.assert_close(loss, step.eager(model, batch), rtol=1e-4, atol=1e-5)


def test_the_largest_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    limit, each = 11, None

    def first_step(_step: Any, _model: Any, rows: Any) -> step.First | None:
        tried.append(rows)
        return step.First(each and 100 + each * rows, 0.0) if rows <= limit else None

    def largest(most: int, memory: int = 0) -> int:
        tried.clear()
        return step.largest(step.ours, None, most, lambda rows: rows, memory)  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(step, "first_step", first_step)
    assert largest(64) == 11
    assert tried == [1, 2, 4, 8, 16, 12, 10, 11]
    assert largest(4) == 4
    # Memory of 100 + 10 per row: 440 rows fit into 4500, and few steps are taken near there.
    limit, each = 440, 10
    assert largest(4096, 4500) == 439
    assert tried == [1, 4, 16, 64, 412, 467, 439, 453]
    assert largest(20, 4500) == 20
    limit = 50  # less than memory allows: a third of it is used elsewhere
    assert largest(4096, 4500) in range(48, 51)


def test_the_page_shows_times_peaks_and_failures() -> None:
    row = {"model": "4B", "tokens": 65536}
    run = {
        "environment": {"gpu": None, "torch": "2", "cores": 2, "threads": 1, "machine": "x"},
        "length": 2048,
        "rows": [
            {**row, "head": "body alone", "median_ms": 1200.0, "peak_bytes": 2**30},
            {**row, "head": "ours", "median_ms": 1234.4, "peak_bytes": 3 * 2**30},
            {**row, "head": "eager logits"},
            {**row, "head": "later", "median_ms": 1500.0, "body_ms": 1000.0, "peak_bytes": 2**30},
            {**row, "tokens": 1, "head": "body alone", "median_ms": 1.0, "peak_bytes": 2**30},
        ],
        "largest": [{"model": "4B", "head": "ours", "tokens": 262144}],
        "absent": {"Liger": "not here"},
    }
    page = performance_page.step_section(run, "cpu")
    cells = "| 4B, 65,536 | 1200 ms, 1.0 GiB | 1234 ms (+2.9%), 3.0 GiB | does not fit | "
    cells += "1500 ms (+50.0%), 1.0 GiB |"
    assert cells in page
    assert "| 4B, 1 | 1 ms, 1.0 GiB | not measured | not measured | not measured |" in page
    assert "| 4B | not measured | 262,144 | not measured | not measured |" in page
    assert "Not measured: Liger (not here)." in page


def test_a_cpu_has_no_peaks_and_no_target_of_larger_models() -> None:
    """The head may also be faster than the body's own loss, by the noise of a machine."""
    row = {"model": "31M", "tokens": 1024, "peak_bytes": None}
    run = {
        "environment": {"gpu": None, "torch": "2", "cores": 2, "threads": 1, "machine": "x"},
        "length": 256,
        "rows": [
            {**row, "head": "body alone", "median_ms": 1000.0},
            {**row, "head": "ours", "median_ms": 990.0},
        ],
        "largest": [],
        "absent": {},
    }
    page = performance_page.performance_page({"step_cpu": run})
    assert "## A whole training step on a CPU" in page
    assert "how much longer that is than the body alone.\n" in page
    assert "T16" not in page
    assert "| 31M, 1,024 | 1000 ms | 990 ms (-1.0%) |" in page
    assert "training step" not in performance_page.performance_page({})


def test_the_savings_in_the_readme_are_those_of_the_recorded_run() -> None:
    """`pl.hf.policy_loss` against each fused head, the least and the most over all sizes."""
    rows = json.loads((step.RESULTS / "step_cuda.json").read_text(encoding="utf-8"))["rows"]
    times = {(r["head"], r["model"], r["tokens"]): r["median_ms"] for r in rows if "median_ms" in r}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    for head, words in {
        "verl, Triton": "7–16 %",
        "verl, chunked torch": "10–27 %",
        "TRL, chunked": "0.5–2 %",
    }.items():
        saved = [
            100 * (1 - times[(step.OURS, *size)] / time)
            for (who, *size), time in times.items()
            if who == head
        ]
        assert len(saved) == 9
        least, most = min(saved), max(saved)
        low = f"{least:.1f}" if least < 1 else f"{least:.0f}"
        assert f"{low}–{most:.0f} %" == words
        assert words in readme
        assert f"{head} {least:.1f} to {most:.1f} %" in page
