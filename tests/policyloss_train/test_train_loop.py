"""Small whole runs of `policyloss train`: their files, also after an error."""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_loop_ranks
from safetensors.torch import load_file
from train_loop_ranks import SMALL, arguments, lines, resume, train

import policyloss as pl
from policyloss.catalogue import PRESETS
from policyloss.cli import main
from policyloss_train import loop
from policyloss_train.collect import Collector
from policyloss_train.config import BY_TEACHER
from policyloss_train.preflight import ADVANTAGES
from policyloss_train.run.directory import RunDir

# A run in which everything that a checkpoint must hold matters:
# completions that wait, two epochs, a critic, a schedule.
WHOLE = {
    "loss": "ppo",
    "staleness": 2,
    "epochs": 2,
    "steps": 5,
    "prompts": 3,
    "schedule": "cosine",
    "lr_warmup": 2,
    "micro_tokens": 100,
}


class Killed(BaseException):
    """Raised by a test to end a run."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    """A run that nothing has disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert train(out, model=model, **WHOLE) == 0
    return out


def assert_same_run(out: Path, expected: Path) -> None:
    """The same bytes in the logs and in the last checkpoint."""
    for name in ("metrics.jsonl", "rollouts.jsonl", "answers.jsonl"):
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    last = sorted(path.name for path in (expected / "checkpoints").iterdir())[-1]
    kept = [path / "checkpoints" / last for path in (out, expected)]
    assert (kept[0] / "rank00000.safetensors").read_bytes() == (
        kept[1] / "rank00000.safetensors"
    ).read_bytes()
    assert json.loads((kept[0] / "checkpoint.json").read_text()) == json.loads(
        (kept[1] / "checkpoint.json").read_text()
    )


def before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: int, act: Callable[[], None]
) -> None:
    """Call `act` once, when `owner.name(…)` is about to be called after `step` steps."""
    original = getattr(owner, name)
    state = {"done": 0, "acted": False}
    log = RunDir.log

    def counted(self: RunDir, at: int, metrics: Any, timing: Any) -> None:
        log(self, at, metrics, timing)
        state["done"] = at

    def acting(*given: Any, **named: Any) -> Any:
        if state["done"] == step and not state["acted"]:
            state["acted"] = True
            act()
        return original(*given, **named)

    monkeypatch.setattr(RunDir, "log", counted)
    monkeypatch.setattr(owner, name, acting)


def kill() -> None:
    raise Killed


@pytest.mark.parametrize(
    ("owner", "name", "step"),
    [
        (loop.resume, "store", 0),  # before there is a checkpoint at all: nothing can be resumed
        pytest.param(Collector, "collect", 0, marks=pytest.mark.slow),
        (loop.Training, "_learn", 3),
        (loop.resume, "store", 4),  # the line is there, its checkpoint is not
        pytest.param(RunDir, "append", 5, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(
    owner: Any,
    name: str,
    step: int,
    whole: Path,
    tmp_path: Path,
    model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        before(patch, owner, name, step, kill)
        with pytest.raises(Killed):
            train(out, model=model, **WHOLE)
    assert not (out / "checkpoints" / "step_000005").exists()
    if name == "store" and step == 0:
        assert resume(out) == 2
        assert "no checkpoint" in capsys.readouterr().err
        return
    assert resume(out) == 0
    assert_same_run(out, whole)
    assert (
        f"resumed {out} after step {step // 2 * 2 - (2 if name == 'store' else 0)}"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_line(whole: Path, tmp_path: Path, model: str) -> None:
    """Another process, so that nothing is tidied up: the lock stays, and half a line."""
    out = tmp_path / "run"
    command = arguments(out, {**SMALL, "model": model, **WHOLE})
    here = str(Path(__file__).parents[1] / "workers")
    done = subprocess.run(
        [sys.executable, str(Path(here) / "train_loop_ranks.py"), "5", *command],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        },
        timeout=120,
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    assert (out / "metrics.jsonl").read_text().endswith('"reward/mean": 0.')
    assert (out / "lock").exists()
    assert resume(out) == 0
    assert_same_run(out, whole)


def test_an_interrupted_run_finishes_its_step(
    whole: Path,
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    before(monkeypatch, loop.Training, "_learn", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(out, model=model, **WHOLE) == 130
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert lines(out)[-1]["step"] == 3
    assert (out / "checkpoints" / "step_000003").is_dir()
    assert (
        f"stopped after step 3; go on with: policyloss train --resume --out {out} --reward "
        f"{SMALL['reward']}" in capsys.readouterr().out
    )
    assert resume(out) == 0
    assert_same_run(out, whole)


def test_a_request_to_end_is_an_interruption_and_a_second_one_ends_at_once(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*numbers: int) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        before(patch, loop.Training, "_learn", 0, lambda: press(signal.SIGTERM))
        assert train(tmp_path / "once", model=model) == 130
    assert [row["step"] for row in lines(tmp_path / "once")] == [0, 1]
    before(monkeypatch, loop.Training, "_learn", 1, lambda: press(signal.SIGTERM, signal.SIGINT))
    assert train(tmp_path / "twice", model=model) == 130
    assert [row["step"] for row in lines(tmp_path / "twice")] == [0, 1]
    assert resume(tmp_path / "twice") == 0


def test_more_steps_than_the_run_had(tmp_path: Path, model: str) -> None:
    """Three steps and then two more equal five, except for the evaluation that ended the three."""
    for out, steps in ((tmp_path / "long", 5), (tmp_path / "short", 3)):
        assert train(out, model=model, steps=steps, eval_every=1) == 0
    assert resume(tmp_path / "short", extend=5) == 0
    assert_same_run(tmp_path / "short", tmp_path / "long")
    assert resume(tmp_path / "short") == 0  # nothing is left to do, and nothing is lost
    assert_same_run(tmp_path / "short", tmp_path / "long")


def test_the_ages_of_completions_that_waited(whole: Path, tmp_path: Path, model: str) -> None:
    """The first weights sample the completions of three steps."""
    rows = lines(whole)[1:]
    for name in ("policy/age_max", "policy/age_mean"):
        assert [row[name] for row in rows] == [0, 1, 2, 2, 2]
    spec = tmp_path / "young.json"
    spec.write_text(pl.LossSpec(correction=pl.Stale(0)).as_json)
    assert train(tmp_path / "run", model=model, loss=str(spec), staleness=1, steps=2) == 0
    rejected = [row["policy/rejected_fraction/Stale"] for row in lines(tmp_path / "run")[1:]]
    assert rejected == [0, 1]


def test_a_run_is_never_overwritten(
    whole: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held = (whole / "metrics.jsonl").read_bytes()
    assert train(whole, model=model) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == held
    with RunDir.open(whole):
        assert resume(whole) == 2
    assert "in use" in capsys.readouterr().err
    assert (whole / "metrics.jsonl").read_bytes() == held


def test_without_a_run_there_is_nothing_to_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(tmp_path / "none") == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_corrupt_checkpoint_costs_the_steps_since_the_one_before(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    file = out / "checkpoints" / "step_000005" / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.warns(UserWarning, match="step_000005"):
        assert resume(out) == 0
    assert_same_run(out, whole)


def test_a_reward_that_fails_on_some_prompts(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, model=model, reward="train_loop_ranks:sometimes") == 0
    said = capsys.readouterr().out
    assert "raised RuntimeError: no connection to the grader; prompt 'sort " in said
    rows = lines(out)[1:]
    assert all(row["reward/errors"] + row["sequences"] == 16 for row in rows)
    assert sum(row["reward/errors"] for row in rows) > 0
    # All four completions of a prompt or none.
    assert all(row["reward/errors"] % 4 == 0 for row in rows)
    assert all(math.isfinite(row["policy/loss"]) and row["grad_norm"] > 0 for row in rows)
    assert all(
        int(row["prompt"][5]) % 2 and row["prompt"][5] != "5" for row in lines(out, "rollouts")
    )


def test_a_reward_that_fails_on_everything(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run ends, and goes on where it was when the grader is back."""
    options = {"model": model, "reward": "train_loop_ranks:sometimes", "steps": 4}
    assert train(tmp_path / "good", **options) == 0
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        before(
            patch, Collector, "collect", 3, lambda: patch.setattr(train_loop_ranks, "failing", True)
        )
        assert train(out, **options) == 2
    assert "the reward function failed on every completion of a step" in capsys.readouterr().err
    assert [row["step"] for row in lines(out)] == [0, 1, 2, 3]
    assert resume(out) == 0
    assert_same_run(out, tmp_path / "good")


def groups_of_rollouts(out: Path, step: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in lines(out, "rollouts"):
        if row["step"] == step:
            found.setdefault(row["group"], []).append(row["reward"])
    return found


def test_dynamic_sampling_keeps_groups_that_differ(tmp_path: Path, model: str) -> None:
    """Rewards of ¼ steps in pairs are often equal; without the option some of them are, with it
    none, and still four groups.
    """
    options = {"model": model, "group_size": 2, "rollouts_rows": 99, "minibatches": 1, "steps": 4}
    plain, dynamic = tmp_path / "plain", tmp_path / "dynamic"
    assert train(plain, **options) == 0
    assert train(dynamic, **options, dynamic_sampling=True) == 0
    assert any(
        len(set(group)) == 1
        for step in range(1, 5)
        for group in groups_of_rollouts(plain, step).values()
    )
    rows = lines(dynamic)[1:]
    for row in rows:
        groups = groups_of_rollouts(dynamic, row["step"])
        assert len(groups) == row["groups/kept"] == 4
        assert all(len(group) == 2 and len(set(group)) == 2 for group in groups.values())
        assert row["sequences"] % 8 == 0
        assert row["groups/zero_variance"] <= row["sequences"] / 2 - 4
    assert max(row["sequences"] for row in rows) > 8  # somewhere one draw was not enough


def test_dynamic_sampling_is_content_when_it_finds_nothing(tmp_path: Path, model: str) -> None:
    """The model never solves the task exactly with one token:
    all rewards are 0, and a step learns nothing.
    """
    options = {"reward": None, "max_new_tokens": 1, "dynamic_sampling": True, "dynamic_tries": 2}
    assert train(tmp_path, model=model, **options) == 0
    for row in lines(tmp_path)[1:]:
        assert (row["groups/kept"], row["sequences"], row["grad_norm"]) == (0, 32, 0)


def test_completions_that_were_cut(tmp_path: Path, model: str) -> None:
    """Four tokens end few answers. Left out of the loss, kept in it,
    or kept with a reward of −1.
    """
    options = {
        "model": model,
        "max_new_tokens": 5,
        "steps": 1,
        "minibatches": 1,
        "rollouts_rows": 16,
    }
    found = {}
    for overlong in ("keep", "mask", "penalise"):
        assert train(tmp_path / overlong, **options, overlong=overlong) == 0
        found[overlong] = lines(tmp_path / overlong)[1]
    rows = lines(tmp_path / "keep", "rollouts")
    ended = sum(len(row["ids"]) for row in rows if row["finished"])
    assert 0 < found["keep"]["truncated"] < 1
    assert (
        found["keep"]["policy/tokens"]
        == found["penalise"]["policy/tokens"]
        == found["keep"]["tokens"]
    )
    assert found["mask"]["policy/tokens"] == ended < found["mask"]["tokens"]
    penalised = [row["reward"] if row["finished"] else -1.0 for row in rows]
    assert [row["reward"] for row in lines(tmp_path / "penalise", "rollouts")] == penalised
    assert found["penalise"]["reward/mean"] == pytest.approx(sum(penalised) / 16)


def test_the_support_of_the_sampler(tmp_path: Path, model: str) -> None:
    """The one most likely token, by top-k or by top-p,
    makes all completions of a prompt the greedy one.
    """
    assert train(tmp_path / "free", model=model, steps=1, rollouts_rows=16) == 0
    for name, option in (("k", {"top_k": 1}), ("p", {"top_p": 1e-6})):
        with pytest.warns(UserWarning, match="exactly 0, so that it was certain"):
            assert train(tmp_path / name, model=model, steps=1, rollouts_rows=16, **option) == 0
    k, p, free = (
        [(row["group"], row["completion"]) for row in lines(tmp_path / name, "rollouts")]
        for name in ("k", "p", "free")
    )
    assert k == p
    assert len(set(k)) == 4 < len(set(free))


ONE_STEP = {"steps": 1, "prompts": 2, "eval_prompts": 1, "eval_every": 0, "micro_tokens": 40}


def assert_learned(out: Path, model: str) -> dict[str, Any]:
    """Every number is one, and the weights moved and are numbers."""
    (_, row) = lines(out)
    numbers = {name: x for name, x in row.items() if name != "ratio_histogram"}
    assert all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers.values()), numbers
    assert row["grad_norm"] > 0
    assert sum(row["ratio_histogram"]["counts"]) == row["tokens"]
    start = load_file(Path(model) / "model.safetensors")
    tensors = load_file(out / "checkpoints" / "step_000001" / "rank00000.safetensors")
    assert all(x.isfinite().all() for x in tensors.values())
    assert not torch.equal(tensors["policy/model.model.norm.weight"], start["model.norm.weight"])
    return row


def has_a_teacher(name: str) -> bool:
    """Whether a preset needs a teacher, as in `test_train_teacher.py`."""
    pulls = any(getattr(part, "teaches", False) for part in pl.preset(name).kl_parts)
    return pulls or PRESETS[name].advantage in BY_TEACHER


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in pl.presets() if not has_a_teacher(name)])
def test_every_preset_takes_a_step(name: str, tmp_path: Path, model: str) -> None:
    assert train(tmp_path, model=model, loss=name, **ONE_STEP) == 0
    row = assert_learned(tmp_path, model)
    assert ("value/loss" in row) == (name in ("ppo", "ppo_dual_clip", "decoupled_ppo"))


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - set(BY_TEACHER)))
def test_every_advantage_takes_a_step(name: str, tmp_path: Path, model: str) -> None:
    assert train(tmp_path, model=model, advantage=name, passk=2, **ONE_STEP) == 0
    row = assert_learned(tmp_path, model)
    assert ("value/loss" in row) == (name == "gae")
    assert row["advantage/std"] > 0


def test_eval_and_sample(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    named = ["--reward", SMALL["reward"]]
    assert main(["eval", str(whole), "--prompts", "16", "--json", *named]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 5
    assert (
        found["accuracy"]
        == lines(whole)[-1]["eval/accuracy"]
        == sum(r["reward"] >= 1 for r in found["results"]) / 16
    )
    assert [r["reward"] for r in found["results"]] == [
        train_loop_ranks.graded(None, r["completion"]) for r in found["results"]
    ]
    older = whole / "checkpoints" / "step_000004"
    assert (
        main(
            [
                "eval",
                str(whole),
                "--prompts",
                "16",
                "--show",
                "2",
                "--checkpoint",
                str(older),
                *named,
            ]
        )
        == 0
    )
    head, *wrong = capsys.readouterr().out.splitlines()
    assert (
        head == f"{whole}, step 4: accuracy {lines(whole)[4]['eval/accuracy']:.3f} on 16 held-out "
        "prompts of sort"
    )
    assert len(wrong) == 2
    assert all(line.startswith("  'sort ") and ", not '" in line for line in wrong)
    assert main(["sample", str(whole), "sort 4321=", "--number", "2", "--temperature", "0"]) == 0
    prompt, *answers = capsys.readouterr().out.splitlines()
    assert prompt == "'sort 4321='"
    assert len(answers) == 2
    assert len(set(answers)) == 1  # greedy
    assert main(["eval", str(whole), "--checkpoint", "nope", *named]) == 2
    # And of no rank.
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("policyloss: checkpoint nope is incomplete")
    )


def test_a_task_of_one_s_own(tmp_path: Path, model: str) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "split": "held_out" if a == b else "train"}
        for a in range(5)
        for b in range(5)
    ]
    rows.append(rows[0])  # one held-out prompt twice
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "run"
    assert (
        train(
            out,
            model="tiny",
            warmup_steps=40,
            task=str(data),
            reward="exact",
            steps=2,
            eval_prompts=99,
        )
        == 0
    )
    (start, _, _) = lines(out)
    # Six lines are held out, with five prompts.
    assert start["eval/prompts"] == 5
    assert start["eval/accuracy"] * 6 == pytest.approx(round(start["eval/accuracy"] * 6))
    seen = {row["prompt"] for row in lines(out, "rollouts")}
    assert seen <= {row["prompt"] for row in rows if row["split"] == "train"}
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert all(
        row["reward"] == float(row["completion"].strip() == answers[row["prompt"]])
        for row in lines(out, "rollouts")
    )


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors and objects that are alive after some of 20 steps,
    with completions that wait and a critic.
    """
    alive: dict[int, tuple[int, int]] = {}
    log = RunDir.log

    def counted(self: RunDir, step: int, metrics: Any, timing: Any) -> None:
        log(self, step, metrics, timing)
        if step in (6, 8, 18, 20):
            gc.collect()
            objects = gc.get_objects()
            alive[step] = (sum(issubclass(type(x), torch.Tensor) for x in objects), len(objects))

    monkeypatch.setattr(RunDir, "log", counted)
    options = {**ONE_STEP, "steps": 20, "loss": "ppo", "staleness": 1, "checkpoint_every": 0}
    assert train(tmp_path, model=model, **options) == 0
    # A step that is remembered by mistake would hold eight completions of three tensors
    # and some 200 objects.
    assert abs(alive[18][0] - alive[6][0]) < 20
    assert abs(alive[20][0] - alive[8][0]) < 20
    assert alive[20][1] - alive[8][1] < 12 * 10


@pytest.mark.slow
def test_reinforcement_learning_teaches_the_built_in_task(tmp_path: Path) -> None:
    """From the mostly wrong answers of the warm-up to right ones, on held-out prompts."""
    size = {
        "warmup_steps": 120,
        "prompts": 16,
        "group_size": 8,
        "max_new_tokens": 16,
        "eval_prompts": 128,
    }
    quiet = {"eval_every": 0, "checkpoint_every": 0, "rollouts_every": 0}
    assert (
        train(
            tmp_path,
            reward=None,
            steps=24,
            minibatches=4,
            lr=1e-3,
            schedule="linear",
            **size,
            **quiet,
        )
        == 0
    )
    rows = lines(tmp_path)
    assert rows[0]["eval/accuracy"] <= 0.5
    assert rows[-1]["eval/accuracy"] >= 0.85
