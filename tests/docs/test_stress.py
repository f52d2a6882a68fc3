"""The page of the stress chart: its statistics, and pages of made-up results."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chart import LOSSES
from docs.stress_figures import Panel, Point, Square, curves_figure
from docs.stress_numbers import (
    bootstrap_interval,
    compare_losses,
    spearman,
    spearman_p,
    student_p,
)

from docs import stress_page
from policyloss_train.bench.conditions import CONDITIONS

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_bootstrap_counts_every_resample() -> None:
    # The number of ones in a resample is binomial (5, 0.2): P(more than 3) = 0.0067 and
    # P(more than 2) = 0.0579, so the upper 2.5 % begin at 3 of 5.
    assert bootstrap_interval([0, 0, 0, 0, 1]) == (0, 0.6)
    # Means 0, 0.5 and 1 have the weights 1/4, 1/2 and 1/4, and the tails hold 0.3 each.
    assert bootstrap_interval([0, 1], share=0.4) == (0.5, 0.5)
    assert bootstrap_interval([3.0]) == (3, 3)


def test_student() -> None:
    assert student_p(1, 1) == pytest.approx(0.5)  # Cauchy: 1 − 2/π·atan(1)
    assert student_p(math.sqrt(2), 2) == pytest.approx(1 - math.sqrt(0.5))  # 1 − t/√(2 + t²)
    assert student_p(0, 7) == pytest.approx(1)
    assert student_p(1.9749, 160) == pytest.approx(0.05, abs=1e-5)  # a printed table


def test_comparison_by_rank() -> None:
    rows = {"a": {0: 0.1, 1: 0.2}, "b": {0: 0.5, 1: 0.6}, "c": {0: 0.3, 1: 0.9}}
    ranks = compare_losses(rows, ranked=True)
    # Ranks of a, b, c: 0, 1, 1/2 and 0, 1/2, 1. Deviations: 0 and four of 1/4; freedom 6 − 3 − 1.
    assert ranks.means == {"a": 0.0, "b": 0.75, "c": 0.75}
    assert (ranks.deviation, ranks.freedom) == (math.sqrt(4 / 16 / 2), 2)
    assert ranks.least == 1 / 6  # one order of three, given the other
    # The error is √(1/8)·√(1/2 + 1/2), t² = 0.5625·8 = 4.5, and p = 1 − t/√(2 + t²).
    assert ranks.p_value("a", "b") == pytest.approx(1 - math.sqrt(4.5 / 6.5))
    assert ranks.p_value("b", "c") == 1
    # The same order with five starts has p = 1/2⁴ with two losses, and 1/6⁴ with three.
    same = {loss: {start: float(i) for start in range(5)} for i, loss in enumerate("abc")}
    three = compare_losses(same, ranked=True)
    assert three.p_value("a", "b") == 6**-4
    assert three.differs("a", "b", 64)  # 64/1296 = 0.0494
    assert not three.differs("a", "b", 65)
    two = compare_losses({"a": same["a"], "b": same["b"]}, ranked=True)
    assert two.p_value("a", "b") == 1 / 16


def test_comparison_by_value() -> None:
    found = compare_losses({"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0, 1: 6.0}}, ranked=False)
    # Means of the starts: 2 and 4. Scores −1, −2 and 1, 2: four deviations of 0.5; freedom 1.
    assert (found.means, found.deviation, found.freedom) == ({"a": -1.5, "b": 1.5}, 1.0, 1)
    # t = 3/(1·√(1/2 + 1/2)).
    assert found.p_value("a", "b") == pytest.approx(1 - 2 / math.pi * math.atan(3))


def test_comparison_with_missing_runs() -> None:
    # `c` is the second of two with start 1, and was not run with start 0.
    ranks = compare_losses({"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0}, "c": {1: 5.0}}, ranked=True)
    assert ranks.means == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert (ranks.counts, ranks.freedom) == ({"a": 2, "b": 1, "c": 1}, 0)
    assert ranks.p_value("a", "c") == 1  # no degrees of freedom
    # No start is shared: 1, 3, 4 and 6 have the ranks 0, 1, 2 and 3 of 3.
    apart = compare_losses({"a": {0: 1.0, 1: 3.0}, "b": {2: 4.0, 3: 6.0}}, ranked=True)
    assert apart.means == pytest.approx({"a": 1 / 6, "b": 5 / 6})
    assert (apart.deviation, apart.freedom) == (pytest.approx(math.sqrt(4 / 36 / 2)), 2)


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 30, 20, 40]) == pytest.approx(0.8)  # 1 − 6·2/(4·15)
    # Ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3: 4.5/√(4.5·5).
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert spearman([1, 1, 1], [1, 2, 3]) == 0
    assert spearman_p(0.0, 10) == pytest.approx(1)
    assert spearman_p(0.8, 4) == pytest.approx(0.2)  # t = 0.8·√2/0.6, P = 1 − t/√(2 + t²)
    assert spearman_p(1.0, 4) == 0


def row(loss: str, condition: str, seed: int, *accuracy: float, **more: Any) -> dict[str, Any]:
    cell = {"loss": loss, "condition": condition, "seed": seed, "task": "sort"}
    rest = {"digest": "", "accuracy": accuracy, "grad_norm": 2.0, "error": "", "machine": "A"}
    return {**cell, **rest, **more}


def a_chart() -> list[dict[str, Any]]:
    """A collapse (`gspo`), a failure (`cispo`), and a missing cell (`cispo`, `stale_4`)."""
    rows = []
    for seed in range(3):
        bump = 0.01 * seed
        rows += [row("dapo", name, seed, 0.3, 0.9 + bump) for name in ("on_policy", "stale_4")]
        rows += [row("gspo", name, seed, 0.3, 0.95 + bump) for name in ("on_policy", "stale_4")]
        rows.append(row("cispo", "on_policy", seed, 0.3, 0.92 + bump))
        rows.append(row("TIS", "stale_4", seed, 0.3, 0.8 + 0.02 * seed))
        rows += [row(x, "stale_4", seed, 0.1, y, task="addition") for x, y in (("dapo", 0.5),)]
    rows[3] = row("gspo", "stale_4", 0, 0.3, 0.9, 0.4)
    rows[4] = row("cispo", "on_policy", 0, error="ValueError: no")
    return rows


def pages(folder: Path, rows: list[dict[str, Any]], gpu: dict[str, Any] | None) -> dict[str, str]:
    (folder / "chart.json").write_text(json.dumps(rows))
    if gpu:
        (folder / "chart_cuda.json").write_text(json.dumps(gpu))
    return stress_page.stress_pages(folder)


def gpu_run(name: str, seed: int, end: float, norms: list[float | None]) -> dict[str, Any]:
    accuracy = {"0": 0.2, "10": end}
    lengths = {"1": [20.0, 30.0], "10": [22.0 + seed, None]}
    run = {"study": "means", "name": name, "seed": seed, "error": "", "norm": norms}
    return {**run, "accuracy": accuracy, "lengths": lengths}


def test_page_of_a_small_chart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["{final[gspo stale_4]:.3f} to {high[gspo stale_4]}", "{final[gspo lr_8]:.3f}"]
    findings = [("{best[on_policy]}:", text, ("chart presets",)) for text in texts]
    monkeypatch.setattr(stress_page, "FINDINGS", findings)
    assert stress_page.stress_pages(tmp_path) == {}
    found = pages(tmp_path, a_chart(), None)
    page = found["docs/stress.md"]
    assert "21 runs train" in page
    assert "3 losses, 1 variants of them, 2 conditions and 3 seeds" in page
    assert "1 failed with an error, and 1 more collapsed." in page
    # (0.4 + 0.96 + 0.97)/3; the finding about lr_8 has no run.
    assert "- **gspo:** 0.777 to 0.97 (`chart presets`)\n\n" in page
    # 0.8 − 0.9, 0.82 − 0.91, 0.84 − 0.92: deviations of ±0.005, t = 0.09/0.0058 = 15.6, p = 0.004.
    assert "| TIS | **-0.090 (-0.100 to -0.080)** |" in page
    assert "Of 1 differences, 1 are significant" in page
    assert (
        "| `addition` | `stale_4` | 0.100 | 0.500 | `dapo` 0.500 | `dapo` 0.500 | 0 of 3 |  |"
        in page
    )
    assert (
        "| `cispo` | 0.62 (1 of 3 collapsed), 0.00 to 0.94, 2 |  |" in page
    )  # (0 + 0.93 + 0.94)/3
    assert "On a GPU" not in page
    drawn = ET.fromstring(found[f"{stress_page.FIGURES}phase.svg"])
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "78 ×1" in words
    assert words.count("62 ×1") == 1


def test_losses_are_ranked_among_the_starts_that_all_of_them_have() -> None:
    # On machine A the order is ppo, grpo, gpg. Machine B has two losses, in the other order: with
    # its ranks of two, gpg would come second.
    ends = {"A": {"ppo": 0.9, "grpo": 0.8, "gpg": 0.7}, "B": {"grpo": 0.7, "gpg": 0.8}}
    rows = [
        row(loss, "hot", seed, end, machine=name)
        for name, losses in ends.items()
        for loss, end in losses.items()
        for seed in range(3)
    ]
    grid = stress_page.read_grid(rows, {"runs": []})
    assert stress_page.compare_with_best(grid, "hot")[0] == ["ppo", "grpo", "gpg"]
    apart = [x for x in rows if x["machine"] == "B" or x["loss"] == "ppo"]  # no start has all
    grid = stress_page.read_grid(apart, {"runs": []})
    assert stress_page.compare_with_best(grid, "hot")[0] == ["ppo", "gpg", "grpo"]


def test_every_finding_is_on_the_page_and_the_first_five_in_the_readme() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/stress.md", "README.md"))
    titles = [line for line in page.splitlines() if line.startswith("- **")]
    assert len(titles) == len(stress_page.FINDINGS)
    assert f"{len(LOSSES)} presets under {len(CONDITIONS)} conditions" in " ".join(readme.split())
    for title in titles[:5]:
        words = title.removeprefix("- **").split("**")[0]
        assert words in " ".join(readme.split()), words


def test_gpu_studies(tmp_path: Path) -> None:
    runs = [gpu_run("exact", 0, 0.8, [1.0, 9.0]), gpu_run("exact", 1, 0.6, [None, 3.0])]
    runs.append({**gpu_run("mean of means", 0, 0.0, []), "error": "ValueError: no", "accuracy": {}})
    gpu = {"runs": runs, "pretraining": {"weights": 38e6}, "environment": {}}
    found = pages(tmp_path, a_chart(), gpu)
    page = found["docs/stress.md"]
    assert "3 more runs train a model of 38 million weights on a GPU (CUDA). 1 failed" in page
    # The mean of 0.8 and 0.6, the median of 9 and 3, the mean of 22 and 23; of step 1 for wrong.
    assert "| exact | 2 | 0 | 0.700 (0.600 to 0.800) | 6 | 22.5 | 30.0 |" in page
    assert "| mean of means | 1 | 1 | 0.000 (0.000 to 0.000) | 0 | – | – |" in page
    assert f"{stress_page.FIGURES}means.svg" in found
    failed = pages(tmp_path, a_chart(), {**gpu, "runs": runs[2:]})
    assert "### A mean of means" in failed["docs/stress.md"]
    assert all("means.svg" not in text for text in (*failed, failed["docs/stress.md"]))
    points = stress_page.curve_points(runs, "norm")
    assert points == [Point(1, 1.0, 1.0, 1.0), Point(2, 6.0, 3.0, 9.0)]


def test_every_condition_and_loss_has_a_place() -> None:
    assert {x for group in stress_page.GROUPS.values() for x in group} == set(CONDITIONS)
    families = [stress_page.family(loss) for loss in LOSSES]
    assert {families.count(name) for name in families} <= set(range(2, 15))  # no family of one
    assert stress_page.family("tis") == "corrected"
    assert stress_page.family("grpo") == "clipped token ratio"


def test_colours_and_panels() -> None:
    assert Square(1.0).shade == "#1b6ca8"
    assert Square(0.65).shade == "#e79f72"  # half-way between (214, 104, 45) and (248, 214, 184)
    decades = Panel("norm", {}, {0: "0"}, 0.1, 10.0, logarithmic=True)
    assert decades.levels == pytest.approx([0.1, 1, 10])
    line = {"a": [Point(0, 0.5, 0.4, 0.6), Point(1, 0.7, 0.6, 0.9)]}
    drawn = ET.fromstring(curves_figure("t", "a", [Panel("p", line, {0: "0", 1: "1"})]))
    assert len(drawn.findall(f"{SVG}polyline")) == len(drawn.findall(f"{SVG}polygon")) == 1
