"""The runs of other trainers on the page: their numbers under our names, their completions.

TRL's files were written by its GRPOTrainer (conformance/trl_report_run.py), verl's by its loggers
and its own function for dumps (tests/helpers/record_logs.py). TensorBoard and trackio write theirs
here. Those of prime-rl follow version 1 of its token export.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_runs import realistic_run, write_lines

import policyloss as pl
import policyloss_lab as lab
from policyloss.cli import main
from policyloss_lab.logs.names import our_names
from policyloss_lab.report import collect, render
from policyloss_lab.report.markup import escape

RECORDED = Path(__file__).parents[2] / "recorded"
TRL = RECORDED / "report/trl"


def run_of(path: str | Path) -> dict[str, Any]:
    (run,) = collect([path])["runs"]
    out: dict[str, Any] = run
    return out


def state(*steps: int) -> list[dict[str, Any]]:
    history = json.loads((TRL / "trainer_state.json").read_text())["log_history"]
    return [row for row in history if row["step"] in steps]


def test_a_run_of_trl() -> None:
    run = run_of(TRL)
    first, *_ = state(1)
    *_, last, _ = [row for row in state(*range(21)) if "reward" in row] + [None]
    assert run["metrics"]["reward/mean"]["step"] == list(range(1, 21))
    assert run["metrics"]["reward/mean"]["value"][0] == first["reward"]
    assert run["metrics"]["reward/mean"]["value"][-1] == last["reward"]
    assert run["metrics"]["policy/entropy"]["value"][0] == first["entropy"]
    assert run["metrics"]["eval/reward"]["step"] == [5, 10, 15, 20]
    assert run["timing"]["step_s"]["value"][0] == first["step_time"]
    assert run["names"]["policy/clip_fraction_upper"] == "clip_ratio/high_mean"
    assert run["names"]["eval/reward"] == "eval_reward"
    assert "grad_norm" not in run["names"]  # it has one name
    summary = run["summary"]
    assert (summary["steps"], summary["planned_steps"], summary["state"]) == (20, 20, "finished")
    assert run["source"].startswith("trainer_state.json")
    assert run["judged_steps"] == 20
    assert run["notes"] == []


def test_the_completions_of_trl() -> None:
    """Two prompts with four completions each at the steps 1, 10 and 20; one reward function."""
    from pyarrow import parquet

    rows = run_of(TRL)["rollouts"]
    stored = parquet.read_table(TRL / "completions/completions_00010.parquet").to_pylist()
    shown = [row for row in rows if row["step"] == 10]
    assert [row["step"] for row in rows] == [1] * 8 + [10] * 8 + [20] * 8
    for name in ("prompt", "completion", "reward", "advantage"):
        assert [row[name] for row in shown] == [row[name] for row in stored]
    assert [row["group"] for row in shown] == [0] * 4 + [1] * 4
    assert {row["finished"] for row in rows} == {None}, "TRL does not say why one ended"


def test_rewards_of_several_functions_are_added(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    chat = [{"role": "user", "content": "hi"}]
    table = {
        "step": [3, 3],
        "prompt": [chat, chat],
        "completion": [[{"role": "assistant", "content": "ho"}]] * 2,
        "right": [1.0, 0.0],
        "short": [0.25, None],
        "seen": [7.0, 7.0],  # logged with the rewards
        "advantage": [1.0, -1.0],
    }
    (tmp_path / "completions").mkdir()
    parquet.write_table(pa.table(table), tmp_path / "completions/completions_00003.parquet")
    log = [{"step": 3, "reward": 0.5, "rewards/right/mean": 0.5, "rewards/short/mean": 0.25}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    rows = run_of(tmp_path)["rollouts"]
    assert [row["reward"] for row in rows] == [1.25, 0.0]
    assert rows[0]["prompt"] == "user: hi"
    assert rows[0]["completion"] == "assistant: ho"


def test_completions_that_are_stored_again_are_shown_once(tmp_path: Path) -> None:
    """TRL logs the completions of a batch at each of the steps that are made with it."""
    from pyarrow import parquet

    table = parquet.read_table(TRL / "completions/completions_00010.parquet").drop(["step"])
    for step in (10, 11, 12):
        (tmp_path / "completions").mkdir(exist_ok=True)
        parquet.write_table(table, tmp_path / f"completions/completions_{step:05d}.parquet")
    assert [row["step"] for row in run_of(tmp_path)["rollouts"]] == [10] * 8


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    run = run_of(TRL)
    assert run["rollouts"] == []
    assert (
        "completions_00001.parquet needs pyarrow: pip install 'policyloss-lab[parquet]'."
        in run["notes"]
    )
    assert run["summary"]["steps"] == 20


def test_a_model_next_to_a_log_is_not_a_run(tmp_path: Path) -> None:
    """`save_model` writes a config.json into the folder of the run."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    for step in (5, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        log = [{"step": s, "reward": s / 10} for s in range(1, step + 1)]
        text = json.dumps({"log_history": log, "max_steps": 40}, indent=2)
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(text)
    run = run_of(tmp_path)
    assert run["metrics"]["reward/mean"]["step"] == list(range(1, 21))
    assert run["summary"]["state"] == "stopped"


def test_a_run_of_ours_that_a_tracker_wrote_into_is_ours(tmp_path: Path) -> None:
    run = realistic_run(tmp_path / "run", steps=8)
    (run / "wandb").mkdir()
    (run / "trainer_state.json").write_text((TRL / "trainer_state.json").read_text())
    assert run_of(run)["source"] == "policyloss"


@pytest.mark.parametrize("name", ["verl.jsonl", "verl_console.txt"])
def test_a_run_of_verl(name: str) -> None:
    run = run_of(RECORDED / "doctor/logs" / name)
    assert run["metrics"]["reward/mean"]["step"] == list(range(1, 13))
    assert run["metrics"]["reward/mean"]["value"][1] == 0.375
    assert run["names"]["reward/mean"] == "critic/score/mean"
    assert "critic/rewards/mean" in run["metrics"], (
        "a second name of the same metric does not change"
    )
    assert run["names"]["policy/kl_old_k1"] == "actor/ppo_kl"
    assert run["metrics"]["eval/reward"]["step"] == [4, 8, 12]
    assert run["names"]["eval/reward"] == "val-core/openai/gsm8k/reward/mean@1"


def test_the_dumps_of_verl_next_to_its_log(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for step in (1, 2):
        text = (RECORDED / f"report/verl/rollouts/{step}.jsonl").read_text()
        (tmp_path / f"rollouts/{step}.jsonl").write_text(text)
    (tmp_path / "log.jsonl").write_text((RECORDED / "doctor/logs/verl.jsonl").read_text())
    run = run_of(tmp_path)
    assert len(run["metrics"]["reward/mean"]["step"]) == 12
    rows = run["rollouts"]
    columns = ("step", "prompt", "completion", "answer", "reward")
    assert [[row[name] for name in columns] for row in rows][2:5] == [
        [1, "3+3=", "5", "6", 0.0],
        [1, "3+3=", "é<b>", "6", 0.0],
        [2, "2+2=", "4", "4", 1.0],
    ]
    assert "é<b>" not in render(collect([tmp_path]))


def prime_rl(step: int, **changes: Any) -> dict[str, Any]:
    """A sequence of three tokens, of which the first is the prompt."""
    return {
        "schema_version": 1,
        "step": step,
        "rank": 0,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": 0,
        "env_name": "math",
        "token_ids": [11, 12, 13],
        "position_ids": [0, 1, 2],
        "loss_mask": [False, True, True],
        "advantages": [0.0, 0.5, 0.5],
        "inference_logprobs": [0.0, -1.0, -2.0],
        "trainer_logprobs": [0.0, -1.5, -2.0],
        "entropy": [0.0, 0.75, 0.25],
        "mismatch_kl": [None, 0.1, 0.0],
        "log_importance_ratio": [None, -0.5, 0.0],
        "importance_ratio": [None, 0.60653, 1.0],
        "is_masked": [False, True, False],
        "rl_weights": [None, None, None],
        **changes,
    }


def test_the_token_export_of_prime_rl(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"token_exports/step_{step}").mkdir(parents=True)
        write_lines(tmp_path / f"token_exports/step_{step}/rank_0.jsonl", [prime_rl(step)])
    metrics = [{"step": s, "time": 1.0, "entropy/all/mean": s / 4} for s in (1, 2)]
    write_lines(tmp_path / "metrics.jsonl", metrics)
    run = run_of(tmp_path)
    assert run["metrics"]["policy/entropy"] == {"step": [1, 2], "value": [0.25, 0.5]}
    row, second = run["rollouts"]
    assert (row["step"], second["step"]) == (1, 2)
    assert row["ids"] == [12, 13]
    assert row["tokens"] == ["#12", "#13"]
    assert row["logp"] == [-1.5, -2.0]
    assert row["rollout_logp"] == [-1.0, -2.0]
    assert row["ratio"] == [0.60653, 1.0]
    assert row["token_advantage"] == [0.5, 0.5]
    assert row["clipped"] == [True, False]
    assert row["advantage"] == 0.5
    assert row["prompt"] == "1 tokens: 11"


def test_a_run_of_openrlhf_in_tensorboard(tmp_path: Path) -> None:
    """Its logger writes train/<name> into a folder that is named for the run."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "run-1")) as writer:
        for step in range(1, 5):
            for name in ("policy_loss", "reward", "response_length", "kl", "ppo_clip_ratio"):
                writer.add_scalar(f"train/{name}", step / 8, step)
            writer.add_text("train/generated_samples", "Sample: …", step)
        writer.add_scalar("eval/math_pass1", 0.5, 4)
    run = run_of(tmp_path)
    assert run["metrics"]["reward/mean"] == {
        "step": [1, 2, 3, 4],
        "value": [0.125, 0.25, 0.375, 0.5],
    }
    assert set(run["metrics"]) == {
        *("reward/mean", "policy/loss", "length/mean", "policy/kl_ref", "policy/clip_fraction"),
        "eval/math_pass1",
    }
    assert run["names"]["policy/loss"] == "train/policy_loss"


def test_several_runs_of_tensorboard_must_be_named_one_by_one(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for name in ("a", "b"):
        with SummaryWriter(str(tmp_path / name)) as writer:
            writer.add_scalar("train/reward", 1.0, 1)
    with pytest.raises(pl.InputError, match=r"several runs \(TensorBoard events\), in a, b; give"):
        collect([tmp_path])
    assert [run["label"] for run in collect([tmp_path / "a", tmp_path / "b"])["runs"]] == ["a", "b"]


TRACKIO = """
import os, sys
os.environ["TRACKIO_DIR"] = sys.argv[1]
import trackio
for name in sys.argv[2:]:
    trackio.init(project="p", name=name, config={"lr": 0.001})
    for step in (10, 20, 30):
        rows = [[step, "1+1=", "2", 1.0, 0.5], [step, "1+1=", f"-{step}", 0.0, -0.5]]
        columns = ["step", "prompt", "completion", "right", "advantage"]
        trackio.log({"train/reward": step / 40, "train/kl": float("nan"),
                     "completions": trackio.Table(columns=columns, data=rows)}, step=step)
    trackio.finish()
"""


def script(text: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def check_tracked(run: dict[str, Any]) -> None:
    assert run["metrics"]["reward/mean"] == {"step": [10, 20, 30], "value": [0.25, 0.5, 0.75]}
    assert run["names"]["reward/mean"] == "train/reward"
    assert run["config"]["lr"] == 0.001
    assert "policy/kl_ref was NaN or infinite at 3 step(s), first at step 10." in run["notes"]
    assert not [name for name in run["metrics"] if "completions" in name or name[0] == "_"]
    columns = ("step", "prompt", "completion", "reward", "advantage", "group")
    assert [[row[name] for name in columns] for row in run["rollouts"]][:2] == [
        [10, "1+1=", "2", 1.0, 0.5, 0],
        [10, "1+1=", "-10", 0.0, -0.5, 0],
    ]
    assert [row["step"] for row in run["rollouts"]] == [10, 10, 20, 20, 30, 30]


def test_a_binary_log_of_wandb_is_refused_with_the_way_to_export_it(tmp_path: Path) -> None:
    file = tmp_path / "run-1.wandb"
    file.write_bytes(b":W&B\xe1\xbe\x00")
    for path in (file, tmp_path):
        with pytest.raises(pl.InputError, match=r"run-1.wandb is a binary log .* `wandb sync`"):
            collect([path])
    with pytest.raises(pl.InputError, match=r"run-1.wandb is a binary log .* `wandb sync`"):
        lab.doctor_run(file)
    # The tables of completions next to it are read, and a note names the log.
    table = {"columns": ["step", "prompt", "completion", "right"], "data": [[3, "1+1=", "2", 1.0]]}
    (tmp_path / "completions_3_0a.table.json").write_text(json.dumps(table))
    run = run_of(tmp_path)
    assert [(row["step"], row["reward"]) for row in run["rollouts"]] == [(3, 1.0)]
    assert any("run-1.wandb is a binary log" in note for note in run["notes"])


def test_the_step_of_a_wandb_history_is_the_trainers(tmp_path: Path) -> None:
    """Not the number of calls that W&B counts."""
    rows = [{"_step": i, "train/global_step": 10 * i, "train/reward": i / 4} for i in (1, 2)]
    write_lines(tmp_path / "history.jsonl", rows)
    run = run_of(tmp_path)
    assert run["metrics"]["reward/mean"] == {"step": [10, 20], "value": [0.25, 0.5]}


def test_without_tensorboard_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.out.tfevents.1"
    file.write_bytes(bytes(12) + b"\x1a\x0dbrain.Event:2")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(pl.InputError, match=r"tensorboard: pip install 'policyloss-lab\[tensorboa"):
        collect([tmp_path])


def test_a_database_of_trackio(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    script(TRACKIO, str(tmp_path), "first", "second")
    with pytest.raises(
        pl.InputError, match=r"holds the runs first, second; give one as p\.db#first"
    ):
        collect([tmp_path / "p.db"])
    check_tracked(run_of(f"{tmp_path}/p.db#second"))


def test_any_mixture_is_drawn_side_by_side(tmp_path: Path) -> None:
    ours = realistic_run(tmp_path / "ours", steps=12)
    paths = [ours, TRL, RECORDED / "doctor/logs/verl.jsonl"]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, paths), "--out", str(page)]) == 0
    data = collect(paths)
    assert [run["label"] for run in data["runs"]] == ["ours", "trl", "verl.jsonl"]
    assert all("reward/mean" in run["metrics"] for run in data["runs"])
    html = page.read_text()
    assert "Names of the metrics" in html
    assert escape("clip_ratio/high_mean") in html
    # The page of our own runs has no such section.
    assert "Names of the metrics" not in render(collect([ours]))


def test_a_column_without_values_is_left_out(tmp_path: Path) -> None:
    ours, trl = realistic_run(tmp_path / "ours", steps=3), TRL
    known = ["Run", "Verdict", "Held-out accuracy", "Reward", "Steps", "Time"]
    for paths, names in (
        ([trl], known),
        ([ours, trl], [*known[:2], "Loss", "Model", "Task", *known[2:], "Tokens"]),
    ):
        page = render(collect(paths))
        table = page[page.index('<table class="runs') : page.index("</table>")]
        assert re.findall("<th scope=col>([^<]+)", table) == names
        for row in table.split("<tr>")[2:]:
            assert re.findall('<td data-name="([^"]+)">', row) == names[1:]
    assert "The files of the run do not name its loss." in page


def test_a_path_without_a_run_names_the_expected_files(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing, really")
    (tmp_path / "data.json").write_text('{"prompt": "x", "completion": "y"}')
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(pl.InputError, match=r"holds no run. Looked for: .*trainer_state.*parq"):
            collect([path])


def test_a_folder_with_several_logs_of_one_run_reads_one(tmp_path: Path) -> None:
    """The Hugging Face trainers write their log to TensorBoard as well."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs/host")) as writer:
        writer.add_scalar("train/reward", 9.0, 1)
    (tmp_path / "trainer_state.json").write_text((TRL / "trainer_state.json").read_text())
    run = run_of(tmp_path)
    assert run["metrics"]["reward/mean"]["value"][0] != 9.0
    (note,) = run["notes"]
    assert note.endswith("not read: TensorBoard events.")


def test_steps_that_were_made_again_count_once(tmp_path: Path) -> None:
    """A run that was resumed after step 2; an evaluation has a row of its own."""
    rows = [{"step": s, "reward": s} for s in (1, 2, 3, 4)]
    rows += [{"step": s, "reward": 10 * s} for s in (3, 4, 5)] + [{"step": 4, "eval_reward": 7}]
    write_lines(tmp_path / "log.jsonl", rows)
    run = run_of(tmp_path / "log.jsonl")
    assert run["metrics"]["reward/mean"] == {"step": [1, 2, 3, 4, 5], "value": [1, 2, 30, 40, 50]}
    assert run["metrics"]["eval/reward"] == {"step": [4], "value": [7]}
    assert run["summary"]["steps"] == 5


def test_every_name_belongs_to_one_metric() -> None:
    from policyloss_lab.logs.names import OTHER_NAMES

    every = [name for ours, others in OTHER_NAMES.items() for name in (ours, *others)]
    assert len(every) == len(set(every))
    for ours, others in OTHER_NAMES.items():
        for name in others:
            assert our_names([name]) == {name: ours}
            assert our_names([f"train/{name}"]) == {f"train/{name}": ours}
            assert our_names([name, ours]) == {}, "a metric that has our name keeps it"
