"""The health panel of sick, healthy and short runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from policyloss_lab.report import sections
from policyloss_lab.report.data import collect


def run_in(folder: Path, steps: int, spike: float = 1.0) -> dict[str, Any]:
    folder.mkdir()
    lines = [
        {"step": s, "reward/mean": 0.1 + 0.02 * s, "grad_norm": spike if s == 15 else 1 + s % 2}
        for s in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stored = {"step": 15, "tokens": ["ab", "<i>"], "ratio": [1.0, 3.0], "advantage": 50.0}
    (folder / "rollouts.jsonl").write_text(json.dumps(stored))
    (run,) = collect([folder])["runs"]
    return dict(run)


def test_a_symptom_has_its_step_its_tokens_and_its_remedy(tmp_path: Path) -> None:
    page = sections.health([run_in(tmp_path / "sick", 30, spike=90.0)])
    assert "<summary>Health: 1 symptom</summary>" in page
    assert "<b>gradient_spike</b> from step 15: the gradient norm is 90 at step 15" in page
    # |advantage|·ratio: 50·3 and 50·1; the text of a token is escaped.
    assert "&#x27;&lt;i&gt;&#x27; (150), &#x27;ab&#x27; (50)" in page
    assert "<br>Remedy: Read the rewards" in page


def test_a_healthy_run_is_called_so_and_a_short_one_is_not(tmp_path: Path) -> None:
    healthy, short = run_in(tmp_path / "well", 30), run_in(tmp_path / "short", 5)
    page = sections.health([healthy, short])
    assert "<summary>Health: no symptom</summary>" in page
    assert "<bdi>well</bdi>: no symptom in 30 steps" in page
    assert "short" not in page
    assert sections.health([short]) == ""


def test_findings_in_tokens_come_first_and_are_only_text(tmp_path: Path) -> None:
    run_in(tmp_path / "run", 30, spike=90.0)
    rows = [
        {"step": 3, "cause": "temperature", "evidence": "<b>τ</b>", "remedy": "Sample at 1."},
        {"step": "x", "cause": ["a"], "evidence": "e" * 10**6},
    ]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "run/findings.jsonl").write_text("\n".join([lines[0], "{", lines[1]]) + "\n")
    (run,) = collect([tmp_path / "run"])["runs"]
    assert [row["cause"] for row in run["health"]] == ["temperature", "['a']", "gradient_spike"]
    assert len(json.dumps(run["health"])) < 10**4
    page = sections.health([run])
    assert "<b>temperature</b> from step 3: &lt;b&gt;τ&lt;/b&gt;." in page
    assert any("findings.jsonl has 1 line(s)" in note for note in run["notes"])
