"""`policyloss doctor RUN`: what is printed, exit codes, and thresholds as options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from policyloss.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Twelve steps that learn, in which 30 % of the completions are cut."""
    rows = [
        {
            "step": s,
            "reward/mean": 0.1 + 0.05 * s,
            "truncated": 0.3,
            "grad_norm": 1.0 + 0.1 * (s % 2),
        }
        for s in range(1, 13)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_exit_codes_and_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(run)]) == 0
    assert capsys.readouterr().out == (
        "healthy: no symptom in 12 steps\n"
        "  Checked: gradient norm, reward, cut completions.\n"
        "  Not in the log, so not checked: spread of rewards, right answers, held-out score, "
        "entropy, KL to the reference, KL of a step, clipped tokens, clipped at the upper bound, "
        "clipped at the lower bound, spread of advantages, length, groups with equal rewards, KL "
        "between engine and trainer.\n"
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "grad_norm": null, "nonfinite": {"grad_norm": "nan"}}\n')
    assert main(["doctor", str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "1 symptom in 13 steps",
        "  severe: nonfinite from step 13: grad_norm is not finite at step 13. Remedy: Print the "
        "inputs of that number at that step.",
    ]
    (run / "metrics.jsonl").write_text('{"step": 1, "what": 2}')
    assert main(["doctor", str(run)]) == 2
    assert "these logs have no known metric" in capsys.readouterr().err


def test_thresholds_come_from_the_command_line(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run), "--threshold", "truncated=0.25", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["cause"], finding["severity"]) == ("truncation", "warning")
    assert main(["doctor", str(run), "--threshold", "least_steps=13"]) == 2
    assert "at least 13 steps, and this log has 12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("truncate=0.25", "did you mean 'truncated'?"),
        ("truncated", "NAME=NUMBER"),
        ("truncated=much", "NAME=NUMBER"),
        ("truncated=nan", "NAME=NUMBER"),
        ("truncated=-1", "NAME=NUMBER"),
        ("least_steps=2.5", "whole number"),
    ],
)
def test_a_wrong_threshold_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], pair: str, message: str
) -> None:
    assert main(["doctor", str(run), "--threshold", pair]) == 2
    assert message in capsys.readouterr().err


def test_thresholds_of_tokens_are_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logp = [-0.5 - 0.01 * i for i in range(40)]
    noisy = [x + 0.004 * math.sin(9 * i) for i, x in enumerate(logp)]
    file = tmp_path / "tokens.jsonl"
    file.write_text(json.dumps({"rollout_logp": noisy, "old_logp": logp}))
    assert main(["doctor", str(file), "--threshold", "floor=0.1"]) == 0
    assert main(["doctor", str(file), "--threshold", "truncated=0.1"]) == 2
    assert "unknown threshold 'truncated'" in capsys.readouterr().err
