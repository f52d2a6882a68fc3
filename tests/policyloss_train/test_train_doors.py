"""The doors of the trainer: options that changed, what counts as right,
and run directories of other people.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_loop_ranks import SMALL, lines, resume, train

import policyloss as pl
from policyloss.cli import main
from policyloss.commands import arguments_of
from policyloss.errors import InputError
from policyloss_lab.runs.files import StorageError, replace_file
from policyloss_lab.runs.lock import Lock
from policyloss_lab.runs.records import JsonLines
from policyloss_train.arguments import named_options, read_arguments
from policyloss_train.config import TrainConfig
from policyloss_train.models import load_model
from policyloss_train.run.checkpoint import latest
from policyloss_train.run.directory import RunDir
from policyloss_train.run.resume import stored_options
from policyloss_train.tasks import make_task


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """A run of two steps that nothing has disturbed; tests copy it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert train(out, model=model, steps=2, checkpoint_every=1) == 0
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def rewritten(run: Path, at: dict[str, Any] | None = None, **options: Any) -> Path:
    """The same run with other options in its config.json, and other files next to it."""
    contents = json.loads((run / "config.json").read_text()) | (at or {})
    contents["config"] |= options
    (run / "config.json").write_text(json.dumps(contents))
    return run


# ---------------------------------------------------------------- options of a run that goes on


def test_which_options_were_named() -> None:
    words = "--lr 1 --no-resume --group-size=4 --loss.kl.coef 1 --stop a b --betas 0 0.5"
    named = {"lr": 1.0, "resume": False, "group_size": 4, "stop": ("a", "b"), "betas": (0.0, 0.5)}
    assert named_options(words.split()) == (named, [("kl.coef", "1")])


def test_options_that_changed_are_listed_with_both_values(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    assert (
        resume(run, lr=0.25, steps=9, loss="gspo", task="x.jsonl", dynamic_sampling=True, seed=0)
        == 2
    )
    said = capsys.readouterr().err
    assert "--lr is 0.25, and the run has 0.0005" in said
    assert "--steps is 9, and the run has 2" in said
    assert "--task is x.jsonl, and the run has sort" in said
    assert "--dynamic-sampling is True, and the run has False" in said
    assert "--loss is gspo, and the run has dapo" in said
    # Options that the other loss would change.
    assert "--loss.trust.eps_low is 0.0003, and the run has 0.2" in said
    assert "--extend" in said
    assert "--seed" not in said  # typed, and as it was
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_a_change_of_the_loss_is_a_change(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = ["train", "--resume", "--out", str(run), "--reward", SMALL["reward"]]
    assert main([*named, "--loss.trust.eps-high", "0.5"]) == 2
    assert "--loss.trust.eps_high is 0.5, and the run has 0.28" in capsys.readouterr().err
    assert main([*named, "--loss.trust.eps-high", "0.28", "--loss", "dapo"]) == 0


def test_how_a_run_is_watched_and_stored_may_change(run: Path) -> None:
    """A default that is typed counts as typed: the run was started with --checkpoint-every 1."""
    assert resume(run, extend=4, checkpoint_every=20, keep=1, heartbeat=7, reward_timeout=9) == 0
    config = RunDir.read_config(run)["config"]
    assert [config[name] for name in ("steps", "checkpoint_every", "keep", "heartbeat")] == [
        4,
        20,
        1,
        7,
    ]
    assert (config["resume"], config["extend"]) == (False, None)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_000004"]


def test_the_whole_command_again_with_resume_goes_on(run: Path, model: str) -> None:
    assert train(run, model=model, steps=2, checkpoint_every=1, resume=True) == 0


def test_the_options_of_a_run_are_the_starting_point_of_another(run: Path) -> None:
    """Named options win; defaults that followed the model, the loss or the longest completion
    follow again.
    """
    reward = SMALL["reward"]
    stored = stored_options(run)[0].to_dict()
    with pytest.raises(InputError, match=rf"{run}.*names the reward {reward!r}, which is code"):
        read_arguments(["--like", str(run)])
    like = ["--like", str(run), "--reward", reward]
    config, spec, named = read_arguments([*like, "--steps", "7"])
    changed = {"like": str(run), "out": "runs/latest", "steps": 7}
    assert config.to_dict() == {**stored, **changed}
    assert (spec, named) == (pl.preset("dapo"), {"like", "reward", "steps"})
    assert (config.lr, config.advantage) == (SMALL["lr"], "grpo")
    # Another loss has its own advantages, and adapters their own rate.
    assert read_arguments([*like, "--loss", "dr_grpo"]).config.advantage == "dr_grpo"
    rewritten(run, lr=1e-6)
    assert read_arguments([*like, "--lora-rank", "4"]).config.lr == 1e-5
    assert read_arguments([*like, "--model", "tiny"]).config.lr == 5e-4
    rewritten(run, lr=2e-6, advantage="rloo")
    config, _, _ = read_arguments([*like, "--lora-rank", "4", "--loss", "dr_grpo"])
    assert (config.lr, config.advantage) == (2e-6, "rloo")
    # A horizon is the longest completion, unless it was set.
    for horizon, expected in ((8, 24), (9, 9)):
        loss = pl.preset("dr_grpo", eps_high=0.3).with_horizon(horizon)
        rewritten(run, loss="dr_grpo", advantage="dr_grpo", at={"loss": loss.to_dict()})
        config, spec, _ = read_arguments([*like, "--max-new-tokens", "24"])
        assert (spec.aggregate.horizon, spec.trust.eps_high) == (expected, 0.3)  # type: ignore[union-attr]
        assert config.advantage == "dr_grpo"
        assert config.headline(spec).startswith("loss dr_grpo (the preset dr_grpo, changed);")
    file = run / "more.toml"
    file.write_text('seed = 5\nsteps = 6\nreward = "exact"\n')
    config, _, _ = read_arguments(["--like", str(run), "--config", str(file), "--steps", "4"])
    assert (config.seed, config.steps, config.reward) == (5, 4, "exact")


def test_a_run_directory_downloads_nothing_for_another_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "policyloss_train.command.train", lambda *args, **named: started.append(named) or 0
    )
    like = ["train", "--like", str(run), "--reward", SMALL["reward"]]
    assert main(like) == 0
    assert main([*like, "--model", "tiny", "--out", str(run / "other")]) == 0
    assert started == [
        {"offline": True, "named_out": False},
        {"offline": False, "named_out": True},
    ]


def test_a_file_of_options_goes_on_with_its_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'out = "{run}"\nreward = "{SMALL["reward"]}"\nprompts = 4\n')
    assert main(["train", "--resume", "--config", str(file)]) == 0
    file.write_text(f"{file.read_text()}seed = 7\n")
    assert main(["train", "--resume", "--config", str(file)]) == 2
    assert "--seed is 7, and the run has 0" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(run), "--like", str(run)]) == 2
    assert "--resume goes on" in capsys.readouterr().err


def test_a_new_run_cannot_be_extended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--extend", "9"]) == 2
    assert "--extend 9 continues a run: add --resume" in capsys.readouterr().err


# ---------------------------------------------------------------- what counts as right


def test_the_task_defines_success(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards of 0, ¼, … 1: with --success 0.5, three of the five are right.
    By default only the last is.
    """
    data = tmp_path / "task.jsonl"
    rows = [{"prompt": f"sort {n}=", "answer": str(n)} for n in range(1000, 1040)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": model, "task": str(data), "steps": 1, "rollouts_rows": 16, "eval_every": 1}
    assert train(tmp_path / "half", **options, success=0.5) == 0
    assert train(tmp_path / "plain", **options) == 0
    rewards = [row["reward"] for row in lines(tmp_path / "half", "rollouts")]
    assert lines(tmp_path / "half")[1]["accuracy"] == sum(r >= 0.5 for r in rewards) / 16
    assert lines(tmp_path / "plain")[1]["accuracy"] == sum(r >= 1 for r in rewards) / 16
    assert lines(tmp_path / "plain")[1]["accuracy"] < lines(tmp_path / "half")[1]["accuracy"]
    capsys.readouterr()
    named = ["--reward", SMALL["reward"], "--json"]
    found = []
    for more in ([], ["--success", "0.25"]):
        assert main(["eval", str(tmp_path / "half"), *named, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one["success"] for one in found] == [0.5, 0.25]
    assert found[0]["accuracy"] == lines(tmp_path / "half")[1]["eval/accuracy"]
    for one, least in zip(found, (0.5, 0.25), strict=True):
        scores = [row["reward"] for row in one["results"]]
        assert one["accuracy"] == sum(score >= least for score in scores) / len(scores)


def test_a_task_has_a_success_of_its_own() -> None:
    assert make_task("sort", reward=None, seed=0).success == 1
    assert make_task("sort", reward=None, seed=0, success=0.3).success == 0.3


# ---------------------------------------------------------------- a run directory is data

CODE = "raise SystemExit('this code must not run')"


@pytest.fixture
def foreign(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that names code in the current folder that can be imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "foreign_code.py").write_text(f"open('ran', 'w').close()\n{CODE}")
    return rewritten(run, reward="foreign_code:score")


@pytest.mark.parametrize(
    "command", [["eval"], ["sample"], ["train", "--resume", "--out"]], ids=lambda c: c[0]
)
def test_code_that_only_the_run_names_is_not_run(
    foreign: Path, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([*command, str(foreign)])
    assert not (tmp_path / "ran").exists()
    assert "foreign_code" not in sys.modules
    if command == ["sample"]:  # which scores nothing
        assert code == 0
        return
    assert code == 2
    assert "names the reward 'foreign_code:score', which is code" in capsys.readouterr().err


def test_code_that_the_user_names_is_run(
    foreign: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The import itself fails with its own error.
    assert main(["eval", str(foreign), "--reward", "foreign_code:score"]) == 2
    assert (
        "importing 'foreign_code' raised SystemExit: this code must not run"
        in capsys.readouterr().err
    )
    assert (tmp_path / "ran").exists()
    assert main(["eval", str(foreign), "--reward", "exact", "--prompts", "2"]) == 0


@pytest.mark.parametrize(
    "command", [["eval"], ["sample"], ["train", "--resume", "--out"]], ids=lambda c: c[0]
)
def test_a_model_that_only_the_run_names_is_not_fetched(
    run: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import socket

    import huggingface_hub.file_download

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.file_download, "get_hf_file_metadata", refuse)
    rewritten(run, model="somebody/some-model", reward=None)
    assert main([*command, str(run)]) == 2
    said = capsys.readouterr().err
    assert "cannot load the model 'somebody/some-model'" in said
    assert "to download it, use --model" in said


def test_code_of_a_model_needs_a_word_of_the_user(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(run, trust_remote_code=True, reward=None)
    for command in (["eval"], ["sample"], ["train", "--resume", "--out"]):
        assert main([*command, str(run)]) == 2
        assert "--trust-remote-code" in capsys.readouterr().err
    assert main(["sample", str(run), "--trust-remote-code", "--number", "1"]) == 0


def test_the_code_of_a_model_is_not_run(tmp_path: Path, model: str) -> None:
    """There is no prompt either, which would wait for an answer."""
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "foreign",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{CODE}")
    task = make_task("sort", reward=None, seed=0)
    with pytest.raises(InputError, match=r"(?s)cannot load the model.*trust_remote_code"):
        load_model(str(folder), task, dtype=torch.float32, device="cpu", seed=0)
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- links and pipes

OF_A_RUN = (
    "config.json",
    "environment.json",
    "metrics.jsonl",
    "timing.jsonl",
    "rollouts.jsonl",
    "answers.jsonl",
    "lock",
    ".config.json.tmp",
)
INSIDE = (
    "checkpoints",
    "tensorboard",
    "checkpoints/step_000002",
    "checkpoints/step_000002/rank00000.safetensors",
)


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", [*OF_A_RUN, *INSIDE])
def test_links_and_pipes_are_refused(
    name: str, kind: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The targets of links keep their bytes, and no read waits for a pipe."""
    outside, inside = tmp_path / "outside", run / name
    if inside.exists():
        shutil.move(inside, outside)
    else:
        outside.write_text("somebody's file")
    files = (
        [outside]
        if outside.is_file()
        else sorted(file for file in outside.rglob("*") if file.is_file())
    )
    before = [file.read_bytes() for file in files]
    inside.symlink_to(outside) if kind == "link" else os.mkfifo(inside)
    for command in (["train", "--resume", "--out"], ["eval"], ["sample"], ["train", "--out"]):
        assert main([*command, str(run)]) == 2, command
        said = capsys.readouterr().err
        assert f"{name} is a {'symbolic link' if kind == 'link' else 'named pipe'}" in said, (
            command,
            said,
        )
    assert [file.read_bytes() for file in files] == before


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """Each of the writers, by itself: a temporary name left by a crash may be a link."""
    outside, folder = tmp_path / "outside", tmp_path / "run"
    outside.write_text("somebody's file")
    folder.mkdir()
    for name in (".config.json.tmp", "timing.jsonl", "lock"):
        (folder / name).symlink_to(outside)
    replace_file(folder / "config.json", b"new")
    with pytest.raises(StorageError, match=r"timing\.jsonl is a symbolic link"):
        JsonLines(folder / "timing.jsonl")
    with pytest.raises(StorageError, match="lock is a symbolic link"):
        Lock(folder)
    assert (folder / "config.json").read_bytes() == b"new"
    assert not (folder / "config.json").is_symlink()
    assert outside.read_text() == "somebody's file"


def test_the_directory_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(run)
    assert main(["sample", str(tmp_path / "latest"), "--number", "1"]) == 0


def test_a_task_is_no_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "task.jsonl")
    assert train(tmp_path / "run", task=str(tmp_path / "task.jsonl"), reward="exact") == 2
    assert "task.jsonl: it is a named pipe" in capsys.readouterr().err


# ---------------------------------------------------------------- checkpoints and weights


def test_a_checkpoint_that_is_named_is_checked_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step_000002" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    for command in (["eval", "--reward", "exact"], ["sample"]):
        assert main([*command, str(run), "--checkpoint", str(file.parent)]) == 2
        assert "rank00000.safetensors does not have its checksum" in capsys.readouterr().err


def test_one_that_stepped_aside_and_one_with_another_name_are_evaluated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A crash between two renames leaves `.step_000002.old`;
    a user may give a copy any name.
    """
    aside = run / "checkpoints" / ".step_000002.old"
    (run / "checkpoints" / "step_000002").rename(aside)
    assert latest(run / "checkpoints") == aside
    named = ["eval", str(run), "--reward", "exact", "--prompts", "2"]
    assert main(named) == 0
    assert f"{run}, step 2: " in capsys.readouterr().out
    aside.rename(run / "best")
    assert main([*named, "--checkpoint", str(run / "best")]) == 0
    assert f"{run}, step 2: " in capsys.readouterr().out


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "extra"])
def test_weights_that_do_not_fit_the_model(tmp_path: Path, model: str, missing: bool) -> None:
    """A missing weight would be drawn at random and trained as the model's own; an extra weight is
    reported.
    """
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    gone = "model.layers.1.mlp.up_proj.weight"
    weights = (
        {name: x for name, x in weights.items() if name != gone}
        if missing
        else {**weights, "model.more": torch.ones(2)}
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    task = make_task("sort", reward=None, seed=0)
    told: list[str] = []
    options: Any = {"dtype": torch.float32, "device": "cpu", "seed": 0, "warn": told.append}
    if missing:
        with pytest.raises(InputError, match=rf"1 weights of the model .* are missing: {gone}"):
            load_model(str(folder), task, **options)
    else:
        load_model(str(folder), task, **options)
        assert len(told) == 1
        assert "1 weights that it has no place for: model.more" in told[0]


# ---------------------------------------------------------------- before the first step


def task_with_a_long_prompt(tmp_path: Path) -> Path:
    data = tmp_path / "task.jsonl"
    good = [{"prompt": f"sort {n}=", "answer": str(n), "split": "train"} for n in range(1000, 1008)]
    bad = [
        {"prompt": "sort " + "1" * 9000, "answer": "1", "split": "train"},
        {"prompt": "sort " + "3" * 9000, "answer": "1", "split": "train"},
    ]
    held = [
        {"prompt": f"sort {n}=", "answer": str(n), "split": "held_out"} for n in range(2000, 2004)
    ]
    held.append({"prompt": "sort " + "2" * 8190, "answer": "2", "split": "held_out"})
    data.write_text("".join(json.dumps(row) + "\n" for row in [*good[:3], *bad, *good[3:], *held]))
    return data


def test_prompts_that_cannot_be_used(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "model": model,
        "task": str(task_with_a_long_prompt(tmp_path)),
        "steps": 4,
        "rollouts_rows": 16,
    }
    assert train(tmp_path / "run", **options) == 2
    said = capsys.readouterr().err
    assert "2 of 10 prompts of the split 'train' cannot be used" in said
    assert (
        "(example 3) has 9005 tokens, which with --max-new-tokens 8 are more than 8192 positions"
        in said
    )
    assert "(example 4) has 9005 tokens" in said
    assert "1 of 5 prompts of the split 'held_out' cannot be used" in said
    assert not any((tmp_path / "run").glob("checkpoints/*"))
    assert train(tmp_path / "run", **options, unusable="skip") == 0
    assert "2 of 10 prompts of the split 'train' cannot be used" in capsys.readouterr().out
    prompts = [row["prompt"] for row in lines(tmp_path / "run", "rollouts")]
    # 16 draws of 8 prompts: each twice.
    assert set(prompts) == {f"sort {n}=" for n in range(1000, 1008)}
    assert all(len(prompt) < 20 for prompt in prompts)


def test_prompts_that_are_left_out_leave_the_others_where_they_were(
    tmp_path: Path, model: str
) -> None:
    """So a run that is resumed with --unusable skip goes on in the same order."""
    from policyloss_train.collect import Collector
    from policyloss_train.config import TrainConfig
    from policyloss_train.distributed import Ranks
    from policyloss_train.rollout.session import Rollout

    task = make_task("sort", reward=None, seed=0)
    whole, skipping = (
        Collector(
            TrainConfig(),
            task,
            cast("Rollout", None),
            Ranks(0, 1, torch.device("cpu")),
            print,
            unusable=unusable,
        )
        for unusable in (frozenset[int](), frozenset({5, 9}))
    )
    order = [whole._next().id for _ in range(2 * 4096)]
    assert [skipping._next().id for _ in range(2 * 4094)] == [i for i in order if i not in (5, 9)]


def test_a_reward_that_cannot_work_is_found_before_the_first_step(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", model=model, reward="math:sqrt") == 2
    said = capsys.readouterr().err
    assert (
        "the reward fails on each of the first 8 training prompts, with their own answers" in said
    )
    assert "the reward 'math:sqrt' raised TypeError" in said
    assert not lines(tmp_path / "run")


def test_a_disk_that_is_too_small_is_found_before_the_first_step(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """138 thousand weights of 4 bytes and two moments are 1.66 MB a checkpoint: three with --keep
    2, and 1 MiB for the rest.
    """
    usage = shutil.disk_usage(tmp_path)
    for free, code in ((3 * 1_640_000 + (1 << 20), 2), (3 * 1_700_000 + (1 << 20), 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        assert train(tmp_path / "run", model=model, steps=1) == code, free
    assert "3 checkpoints of 0.002 GB need 0.006 GB" in capsys.readouterr().err


# ---------------------------------------------------------------- missing files

# Values of options that name a file, a folder or code that does not exist.
NOWHERE = {
    "loss": "/nowhere/loss.json",
    "task": "/nowhere/task.jsonl",
    "reward": "/nowhere/code.py:function",
    "model": "/nowhere",
    "teacher": "/nowhere",
    "chat_template": "/nowhere/template.jinja",
    "advantage": "/nowhere/code.py:function",
    "rollout": "/nowhere/code.py:make",
    "config": "/nowhere/run.toml",
    "like": "/nowhere",
}


def test_every_option_with_a_path_is_among_them() -> None:
    """Options of type `Path`, and options that take a path according to their help."""
    for field in dataclasses.fields(TrainConfig):
        if "Path" in str(field.type):
            assert field.name in {*NOWHERE, "out"}
    with_path = {
        argument.name
        for argument in arguments_of(TrainConfig)
        if re.search(r"\bpath\b|folder|module:|director|\bfile\b", argument.meaning)
    }
    aside = {"out", "resume", "trust_remote_code"}  # where to write, and two that name nothing
    assert with_path - aside <= NOWHERE.keys(), with_path - aside - NOWHERE.keys()


@pytest.mark.parametrize("name", NOWHERE)
def test_a_path_that_leads_nowhere_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"task": {"reward": "exact"}, "teacher": {"loss": "gkd"}}.get(name, {})
    assert train(tmp_path / "run", **{"reward": None, **others, name: NOWHERE[name]}) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
