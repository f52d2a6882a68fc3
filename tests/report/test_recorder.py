"""`pl.report.Recorder`: what any loop records is the run directory that the report reads."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import policyloss as pl
from policyloss.report import Recorder, collect


def run_of(folder: Path) -> dict[str, Any]:
    (run,) = collect([folder])["runs"]
    out: dict[str, Any] = run
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    logp = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    config = {"steps": 2, "model": "mine", "task": "adding", "lr": 1e-6}
    with Recorder(tmp_path / "run", spec="dapo", config=config) as recorder:
        assert run_of(tmp_path / "run")["summary"]["state"] == "running"
        for step in (1, 2):
            out = pl.policy_loss("dapo", logp, logp.detach(), torch.ones(1), mask)
            metrics = {"reward": torch.tensor(step / 4), "policy": out.metrics, "kl": math.nan}
            recorder.step(metrics, tokens=2, seconds=0.5)
    run = run_of(tmp_path / "run")
    assert run["summary"]["steps"] == 2
    assert run["summary"]["state"] == "finished"
    assert run["summary"]["tokens"] == 4
    assert run["summary"]["seconds"] == 1.0
    assert (run["summary"]["model"], run["summary"]["task"]) == ("mine", "adding")
    assert run["loss"]["name"] == "dapo"
    assert run["loss"]["spec"] == pl.preset("dapo").to_dict()
    # Two tokens at ratio 1 with an advantage of 1 under a token mean.
    assert run["metrics"]["policy/loss"]["value"] == [-1.0, -1.0]
    assert run["metrics"]["reward/mean"] == {"step": [1, 2], "value": [0.25, 0.5]}
    assert run["names"]["reward/mean"] == "reward"
    assert run["metrics"]["policy/kl_ref"]["value"] == [None, None]
    assert run["timing"]["tokens_per_s"]["value"] == [4.0, 4.0]
    assert run["environment"]["packages"]["torch"]
    assert run["notes"] == ["policy/kl_ref was NaN or infinite at 2 step(s), first at step 1."]


def test_metrics_alone_are_those_of_the_policy(tmp_path: Path) -> None:
    logp, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    out = pl.policy_loss("ppo", logp, logp, torch.ones(1), mask)
    with Recorder(tmp_path) as recorder:
        recorder.step(out.metrics, step=7)
        recorder.step({"a": 1})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["policy/ratio_mean"] == 1.0
    assert (first["step"], second["step"]) == (7, 8)


PROMPTS = ["1+1=", "1+1=", "2+2="]
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
IDS = torch.arange(12).reshape(3, 4)


def test_padded_tensors(tmp_path: Path) -> None:
    """Only what the mask keeps is stored; numbers of tokens stand beside the right ones."""
    logp = -torch.arange(12, dtype=torch.float64).reshape(3, 4) / 8
    with Recorder(tmp_path, spec="ppo") as recorder:
        recorder.completions(
            5,
            prompts=PROMPTS,
            ids=IDS,
            mask=MASK,
            decode=lambda ids: "".join(chr(97 + i) for i in ids),
            rewards=torch.tensor([1.0, 0.0, 0.5]),
            advantages=torch.tensor([0.5, -0.5, 0.0]),
            logp=logp.requires_grad_(),
            old_logp=logp - 0.5,
            entropy=-logp,
            finish_reasons=["stop", "length", "stop"],
            answers=["2", "2", "4"],
        )
    first, second, third = lines(tmp_path / "rollouts.jsonl")
    assert first["ids"] == [1, 2]
    assert first["tokens"] == ["b", "c"]
    assert first["completion"] == "bc"
    assert first["logp"] == [-0.125, -0.25]
    assert first["entropy"] == [0.125, 0.25]
    assert first["ratio"] == pytest.approx([math.exp(0.5)] * 2)
    assert first["token_advantage"] == [0.5, 0.5]
    assert [row["group"] for row in (first, second, third)] == [0, 0, 1]
    assert [row["finished"] for row in (first, second, third)] == [True, False, True]
    assert second["completion"] == "f"
    assert third["logp"] == [-9 / 8, -10 / 8, -11 / 8]
    row = run_of(tmp_path)["rollouts"][0]
    assert (row["step"], row["reward"], row["advantage"], row["answer"]) == (5, 1.0, 0.5, "2")
    assert row["tokens"] == ["b", "c"]


def test_lists_of_different_lengths(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.completions(
            1,
            prompts=["a", "b"],
            texts=["xy", "z"],
            tokens=[["x", "y"], ["z"]],
            advantages=[[1.0, 0.0], [-1.0]],
            rollout_logp=[torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])],
            groups=["g", "h"],
            rewards=[1, 0],
        )
        recorder.completions(2, prompts=["a"], texts=["only text"])
    first, second, third = lines(tmp_path / "rollouts.jsonl")
    assert first["token_advantage"] == [1.0, 0.0]
    assert first["advantage"] == 0.5
    assert first["rollout_logp"] == [-1.0, -2.0]
    assert (first["group"], second["group"]) == ("g", "h")
    assert second["tokens"] == ["z"]
    assert third == {"step": 2, "prompt": "a", "completion": "only text", "group": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1.0]}, "rewards has 1 entries for 2 prompts"),
        ({"ids": [[1, 2], [3]], "logp": [[0.0], [0.0]]}, "completion 0 has different numbers of"),
        ({"ids": [[1, 2], [3]], "mask": [[1], [1]]}, r"ids\[0\] has 2 tokens and mask\[0\] 1"),
    ],
)
def test_completions_that_do_not_fit(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with Recorder(tmp_path) as recorder:
        with pytest.raises(pl.InputError, match=message):
            recorder.completions(1, prompts=["a", "b"], **arguments)
        assert (tmp_path / "rollouts.jsonl").read_text() == ""


def test_metrics_that_are_no_numbers(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        for value in (torch.ones(2), "text", None, [1]):
            with pytest.raises(pl.InputError, match=r"metrics\['x'\] is a \w+ and no number"):
                recorder.step({"x": value})
        recorder.step({"x": 1})
        with pytest.raises(pl.InputError, match="step=1 was recorded already, the last one is 1"):
            recorder.step({"x": 1}, step=1)


def test_a_run_is_not_overwritten_but_continued(tmp_path: Path) -> None:
    with Recorder(tmp_path, config={"seed": 1}) as recorder:
        for step in range(1, 6):
            recorder.step({"a": step})
            recorder.completions(step, prompts=["p"], texts=[str(step)])
        with pytest.raises(pl.PolicyLossError, match="in use by process"):
            Recorder(tmp_path)
    with pytest.raises(pl.InputError, match=r"holds a run already .*resume_after=STEP"):
        Recorder(tmp_path)
    with Recorder(tmp_path, resume_after=3) as recorder:
        recorder.step({"a": 40})
    run = run_of(tmp_path)
    assert run["metrics"]["a"] == {"step": [1, 2, 3, 4], "value": [1, 2, 3, 40]}
    assert [row["completion"] for row in run["rollouts"]] == ["1", "2", "3"]


KILLED = """
import os, signal, sys
from policyloss.report import Recorder
recorder = Recorder(sys.argv[1])
for step in range(1, 4):
    recorder.step({"a": step})
    recorder.completions(step, prompts=["p"], texts=["x" * 100])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")
def test_a_killed_process_loses_no_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "a"')  # a machine that crashed
    run = run_of(tmp_path)
    assert run["metrics"]["a"]["value"] == [1, 2, 3]
    assert len(run["rollouts"]) == 3
    with Recorder(tmp_path, resume_after=3) as recorder:
        recorder.step({"a": 4})
    assert run_of(tmp_path)["metrics"]["a"]["value"] == [1, 2, 3, 4]


def test_completions_are_bounded_on_disk_and_evenly_spaced(tmp_path: Path) -> None:
    """Rows of 1,005 bytes or so in 100 kB: 99 fit. At step 100 every second one is dropped, again
    at 200 (of 2, so every fourth stays) and at 400; so that of 500 steps every eighth is there.
    """
    with Recorder(tmp_path, rollout_bytes=100_000) as recorder:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(1, 501):
                recorder.completions(step, prompts=["p"], texts=["x" * 950])
                recorder.step({"a": 1})
                assert os.path.getsize(tmp_path / "rollouts.jsonl") <= 100_000
        recorder.completions(501, prompts=["p"], texts=["y" * 200_000])  # never fits
    steps = [row["step"] for row in lines(tmp_path / "rollouts.jsonl")]
    assert steps == list(range(1, 501, 8))
    (warning,) = caught
    assert "has reached rollout_bytes=100000" in str(warning.message)
    assert warning.filename == __file__
    left_out = run_of(tmp_path)["metrics"]["completions_left_out"]["value"]
    assert left_out[-1] == 500 - len(steps)


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(pl.PolicyLossError, match="symbolic link"):
        Recorder(tmp_path / "run")
    assert (tmp_path / "other").read_text() == "kept"
