"""Logs as the packages themselves write them, and files that are not what they seem.

Those in tests/recorded/doctor/logs were written by TRL 1.16 (a training run of its GRPOTrainer) and
by the loggers of verl 0.9.1; tests/helpers/record_logs.py made them. TensorBoard files are written
here by the tensorboard package. The CSV files are written by hand, in the layout of W&B's export of
a panel and of `run.history()`, and in the one that trackio's `import_csv` takes.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

import policyloss as pl
import policyloss_lab as lab
from policyloss_lab.diagnosis.run_doctor import diagnose_rows, read_log

RECORDED = Path(__file__).parents[2] / "recorded/doctor/logs"


def test_a_state_that_trl_wrote() -> None:
    rows = read_log(RECORDED / "trainer_state.json")
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[0]["reward"] == pytest.approx(0.85119, abs=1e-5)
    assert "reward" not in rows[1]  # TRL logs rewards with the first update of a batch only
    verdict = diagnose_rows(rows)
    assert verdict.metrics == (
        *("clip", "clip_high", "clip_low", "dead_groups", "entropy", "grad_norm", "held_out"),
        *("kl", "length", "reward", "reward_std", "truncated"),
    )
    # Nearly all completions have 8 tokens, which is the limit of that run.
    assert "truncation" in [finding.cause for finding in verdict.findings]


@pytest.mark.parametrize("name", ["verl.jsonl", "verl_console.txt"])
def test_a_log_of_verl(name: str) -> None:
    rows = read_log(RECORDED / name)
    assert len(rows) == 12
    assert rows[1]["critic/score/mean"] == 0.375
    verdict = diagnose_rows(rows)
    assert verdict.metrics == (
        *("clip", "entropy", "grad_norm", "held_out", "length", "reward", "step_kl", "truncated"),
        "value_return",
    )
    assert "value_loss" not in verdict.missing  # verl writes returns without a critic, too
    causes = [finding.cause for finding in verdict.findings]
    # Its entropy is 2·exp(-step), all of its responses fill their room, and its ppo_kl is ±1e-4.
    assert causes == ["truncation", "entropy_collapse"]


def test_both_of_verls_loggers_say_the_same() -> None:
    file, console = (read_log(RECORDED / name) for name in ("verl.jsonl", "verl_console.txt"))
    assert file == console


def test_validation_of_verl_is_the_held_out_score() -> None:
    rows = [{"step": s, "val-core/openai/gsm8k/acc/mean@8": 0.3} for s in range(1, 10)]
    assert diagnose_rows(rows).metrics == ("held_out",)


def test_all_events_of_a_directory_are_read(tmp_path: Path) -> None:
    """A run that was resumed has two files."""
    from torch.utils.tensorboard import SummaryWriter

    for first, suffix in ((1, ".a"), (7, ".b")):
        with SummaryWriter(str(tmp_path), filename_suffix=suffix) as writer:
            for step in range(first, first + 6):
                writer.add_scalar("train/grad_norm", step / 2, step)
    rows = read_log(tmp_path)
    assert [(row["step"], row["train/grad_norm"]) for row in rows] == [
        (s, s / 2) for s in range(1, 13)
    ]


def csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_exports_as_tables(tmp_path: Path) -> None:
    panel = csv(
        tmp_path / "panel.csv",
        '"Step","run-1 - train/reward","run-1 - train/reward__MIN","run-1 - train/reward__MAX"',
        *(f'"{s}","{s / 10}","0","1"' for s in range(1, 13)),
    )
    assert read_log(panel)[2] == pytest.approx(
        {"step": 3, "train/reward": 0.3, "train/reward__MIN": 0, "train/reward__MAX": 1}
    )
    assert diagnose_rows(read_log(panel)).metrics == ("reward",)
    history = csv(
        tmp_path / "history.csv",
        ",_step,train/kl,train/grad_norm,note",
        *(f"{s},{s},,{'NaN' if s == 9 else 1.0},text" for s in range(12)),
    )
    assert read_log(history)[0]["_step"] == 0
    (finding,) = lab.doctor_run(history).findings
    assert (finding.cause, finding.step) == ("nonfinite", 9)
    trackio = csv(tmp_path / "trackio.csv", "step,timestamp,reward", "1,2026-01-01,0.5")
    assert read_log(trackio) == [{"step": 1.0, "reward": 0.5}]


def test_a_table_of_several_runs_is_no_log_of_one(tmp_path: Path) -> None:
    file = csv(tmp_path / "two.csv", "Step,a - reward,b - reward", "1,0.1,0.9")
    with pytest.raises(pl.InputError, match=r"the runs 'a' and 'b'; export one run"):
        read_log(file)


def test_lines_of_different_lengths_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    file = csv(tmp_path / "torn.csv", "step,reward,kl", "1,0.5", "2,0.6,0.1,9,9", "3,,0.2", "4")
    assert read_log(file) == [
        {"step": 1.0, "reward": 0.5},
        {"step": 2.0, "reward": 0.6, "kl": 0.1},
        {"step": 3.0, "kl": 0.2},
        {"step": 4.0},
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x89PNG\r\n\x1a\n\x00\x00\x00",
        b"[1, 2, 3]",
        b'{"step": 1e400, "reward": 1}\n{"step": null}\n{"step": "x"}\n',
        b'{"a":' * 100_000,
        b"step," + b"x" * 200_000 + b"\n1,2\n",
        b"brain.Event:2" + bytes(range(256)),
        b"step:1 - reward",
    ],
)
def test_a_file_without_a_log_has_no_verdict(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(content)
    with pytest.raises(pl.InputError, match=r"not the log of a run|have no known metric"):
        lab.doctor_run(file)


def test_steps_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    steps = [-1, 1e300, math.nan, 5]
    lines = [json.dumps({"step": s, "reward": 0.5}) for s in steps]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(pl.InputError, match=r"at least 8 steps.*this log has 1"):
        lab.doctor_run(tmp_path)


def test_a_million_lines_take_bounded_time(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step":{s},"kl":0}}\n' for s in range(1_000_000)))
    began = time.perf_counter()
    with pytest.raises(pl.InputError, match="more than 200,000 steps"):
        lab.doctor_run(file)
    assert time.perf_counter() - began < 20  # 2 seconds, on a machine that does nothing else


def test_a_table_of_many_columns_takes_bounded_time(tmp_path: Path) -> None:
    """Each column is compared with those before it by one look, not by a walk along all of them."""
    names = ",".join(f"m{i}" for i in range(60_000))
    file = tmp_path / "wide.csv"
    file.write_text(f"step,{names}\n1\n")
    began = time.perf_counter()
    with pytest.raises(pl.InputError, match="have no known metric"):
        lab.doctor_run(file)
    assert time.perf_counter() - began < 10  # 0.1 seconds; a walk takes a minute


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "real.jsonl").write_text('{"step": 1, "reward": 1}')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "real.jsonl")
    with pytest.raises(pl.InputError, match="symbolic link"):
        lab.doctor_run(tmp_path)
