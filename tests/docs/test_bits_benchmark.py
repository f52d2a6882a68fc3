"""The benchmark of the exact mode on a tiny shape: its gate, its targets, and its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import bits
from benchmarks.head_data import Shape, make

from docs import performance_page


@pytest.mark.slow
def test_a_run_and_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bits_cpu.json"
    assert bits.main(["--shape", "2", "9", "256", "16", "--rounds", "1", "--out", str(out)]) == 0
    assert "exact / default" in capsys.readouterr().out
    run = json.loads(out.read_text())
    assert [t["id"] for t in run["targets"]] == ["T15"] * 3
    for case in run["cases"].values():
        assert set(case["bits"]["exact"].values()) == {0}
    page = performance_page.performance_page({"bits_cpu": run})
    assert "## The same bits" in page
    assert "18 tokens × vocabulary 256 × hidden size 16" in page


def test_broken_bits_are_counted_and_not_timed() -> None:
    """A row alone is moved by some units in the last place."""
    case = make(Shape(2, 9, 256, 16), "cpu")["dense"]

    def spoiled(rows: bits.Rows, weight: bits.Tensor, plan: object) -> tuple[bits.Tensor, ...]:
        values = bits.forward(rows, weight, "auto")
        return tuple(x * (1 + 1e-6) if len(x) == 1 else x for x in values)

    result = bits.measured(spoiled, "forward", case, 1)
    assert result["bits"]["exact"] == {
        "in another order": 0,
        "a third of the rows": 0,
        "one row": 1,
        "other windows": 0,
    }
    assert "times" not in result
    assert "NOT TIMED" in bits.line("spoiled", result)
    assert bits.targets({"spoiled": result}, "cpu")[0]["met"] is None
