"""Causes from logs: every format gives the same rows, every symptom is found, and calm runs are."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import policyloss as pl
import policyloss_lab as lab
from policyloss_lab.diagnosis.curves import LogThresholds
from policyloss_lab.diagnosis.run_doctor import diagnose_rows, read_log

STEPS = 40
Row = dict[str, float]


def calm(step: int) -> Row:
    """A run that learns: reward up, entropy down a little, everything else quiet."""
    share = step / STEPS
    return {
        "step": step,
        "reward/mean": 0.2 + 0.5 * share + 0.02 * math.sin(step),
        "policy/entropy": 1.0 - 0.4 * share,
        "grad_norm": 0.5 + 0.1 * math.sin(3 * step),
        "length/mean": 10 + share,
        "truncated": 0.02,
        "policy/clip_fraction_upper": 0.02,
        "policy/clip_fraction_lower": 0.01,
        "policy/kl_ref": 0.01 + 0.02 * share,
        "policy/kl_old_k3": 0.001,
        "groups/zero_variance": 4.0,
        "groups/kept": 16.0,
        "accuracy": 0.2 + 0.5 * share,
    }


def run(change: Callable[[int], Row] = lambda step: {}) -> list[Row]:
    return [{**calm(step), **change(step)} for step in range(1, STEPS + 1)]


def test_a_calm_run_has_no_symptom() -> None:
    assert diagnose_rows(run()).findings == ()


SICK: dict[str, Callable[[int], Row]] = {
    "entropy_collapse": lambda s: {"policy/entropy": math.exp(-s / 5)},
    "dead_groups": lambda s: {"groups/zero_variance": 15.0, "accuracy": 0.0},
    "clip_saturation": lambda s: {"policy/clip_fraction_upper": 0.4},
    "kl_drift": lambda s: {"policy/kl_ref": 0.001 * math.exp(s / 5), "eval/accuracy": 0.3},
    "gradient_spike": lambda s: {"grad_norm": 20.0} if s == 17 else {},
    "truncation": lambda s: {"truncated": min(1.0, s / 30)},
    "length_growth": lambda s: {"length/mean": 10.0 + s, "reward/mean": 0.3 + 0.01 * (s % 2)},
    "reward_hacking": lambda s: {"eval/accuracy": 0.6 - 0.01 * s},
    "learning_rate_high": lambda s: {
        "policy/kl_old_k3": 0.5,
        "reward/mean": 0.5 if s < 10 else 0.0,
        "accuracy": 0.0,
    },
    "learning_rate_low": lambda s: {
        "policy/kl_old_k3": 1e-9,
        "reward/mean": 0.3 + 0.01 * math.sin(s),
        "accuracy": 0.3,
    },
    "nonfinite": lambda s: {"policy/loss": math.nan, "advantage/mean": math.nan} if s > 20 else {},
    "engine_mismatch": lambda s: {"policy/kl_rollout_k3": 0.05},
    "no_learning": lambda s: {"reward/mean": 0.3 + 0.01 * math.sin(s), "accuracy": 0.3},
}


@pytest.mark.parametrize("cause", SICK)
def test_a_symptom_is_found(cause: str) -> None:
    assert cause in [finding.cause for finding in diagnose_rows(run(SICK[cause])).findings]


def test_a_symptom_has_a_first_step() -> None:
    by_cause = {f.cause: f for f in diagnose_rows(run(SICK["gradient_spike"])).findings}
    assert by_cause["gradient_spike"].step == 17
    (nan,) = diagnose_rows(run(SICK["nonfinite"])).findings
    assert nan.step == 21
    assert "in the order of computation is advantage/mean" in nan.evidence
    (cut,) = diagnose_rows(run(SICK["truncation"])).findings
    assert cut.step == 15  # 15 of 30 are half


def test_a_solved_task_is_not_sick() -> None:
    rows = run(lambda s: {"accuracy": 1.0, "groups/zero_variance": 16.0, "policy/entropy": 1.0 / s})
    assert diagnose_rows(rows).healthy


def test_thresholds_are_adjustable() -> None:
    rows = run(lambda s: {"truncated": 0.3})
    assert diagnose_rows(rows).healthy
    (finding,) = diagnose_rows(rows, LogThresholds(truncated=0.25)).findings
    assert finding.cause == "truncation"


def test_the_tokens_of_a_spike_are_named() -> None:
    first = {"tokens": ["a", "b", "c"], "ratio": [1.0, 9.0, 0.5], "token_advantage": [1, -1, 40]}
    second = {"tokens": ["d", "e"], "ratio": [1.0, 1.0], "advantage": 12.0}
    other = {"step": 16, "tokens": ["x"], "ratio": [99.0], "advantage": 1.0}
    stored = [{"step": 17, **first}, {"step": 17, **second}, other]
    (finding,) = diagnose_rows(run(SICK["gradient_spike"]), rollouts=stored).findings
    # |advantage|·ratio: 1, 9, 20, 12, 12.
    assert "most weight are 'c' (20), 'e' (12), 'd' (12)" in finding.evidence


# Formats ------------------------------------------------------------------------------------------


def ours(path: Path, rows: list[Row]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trl(path: Path, rows: list[Row]) -> Path:
    file = path.with_name("trainer_state.json")
    file.write_text(json.dumps({"log_history": rows, "global_step": len(rows)}))
    return file


def verl(path: Path, rows: list[Row]) -> Path:
    file = path.with_suffix(".jsonl")
    file.write_text("".join(json.dumps({"step": r["step"], "data": r}) + "\n" for r in rows))
    return file


def console(path: Path, rows: list[Row]) -> Path:
    lines = []
    for row in rows:
        numbers = " - ".join(f"{name}:{value!r}" for name, value in row.items())
        lines.append(f"(TaskRunner pid=7) step:{row['step']} - {numbers}")
    path.write_text("starting\n" + "\n".join(lines))
    return path


def exported(path: Path, rows: list[Row]) -> Path:
    file = path.with_suffix(".csv")
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["Step", *(f"run-1 - {name}" for name in rows[0] if name != "step")])
        writer.writerows([r["step"], *(v for k, v in r.items() if k != "step")] for r in rows)
    return file


def tensorboard(path: Path, rows: list[Row]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path)) as writer:
        for row in rows:
            for name, value in row.items():
                writer.add_scalar(name, value, int(row["step"]))
    return path


@pytest.mark.parametrize("write", [ours, trl, verl, console, exported, tensorboard])
def test_every_format_is_read(tmp_path: Path, write: Callable[[Path, list[Row]], Path]) -> None:
    rows = run(SICK["entropy_collapse"])
    path = write(tmp_path / "log", rows)
    read = read_log(path)
    assert len(read) == STEPS
    for got, expected in zip(read, rows, strict=True):
        assert {k: got[k] for k in expected} == pytest.approx(expected, rel=1e-6)
    assert lab.doctor_run(path).findings[0].cause == "entropy_collapse"


def test_logs_without_known_metrics_are_refused() -> None:
    with pytest.raises(pl.InputError, match="have no known metric"):
        diagnose_rows([{"step": 1, "what": 2.0}])
    with pytest.raises(pl.InputError, match="this log has 3"):
        diagnose_rows(run()[:3])


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match="holds neither metrics"):
        lab.doctor_run(tmp_path)
    with pytest.raises(pl.InputError, match="does not exist"):
        lab.doctor_run(tmp_path / "nothing.json")
    (tmp_path / "trainer_state.json").write_text('{"a": 1}')
    with pytest.raises(pl.InputError, match="has no log_history"):
        lab.doctor_run(tmp_path)


def test_a_cut_events_file_gives_its_complete_records(tmp_path: Path) -> None:
    folder = tensorboard(tmp_path / "log", run())
    (file,) = folder.glob("events*")
    file.write_bytes(file.read_bytes()[:-20])
    assert len(read_log(folder)) >= STEPS - 1
