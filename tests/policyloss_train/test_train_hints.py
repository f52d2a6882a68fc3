"""The hints of a run, its directory, and its help."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from package_imports import SOURCE
from train_loop_ranks import SMALL, arguments, lines, train

from policyloss.cli import main
from policyloss.commands import arguments_of, parser_of
from policyloss_lab.runs.lock import Lock
from policyloss_train.config import TrainConfig
from policyloss_train.run.directory import free_directory
from policyloss_train.setup import warmup_steps
from policyloss_train.watch import LONG_PATIENCE, PATIENCE, Hints, mismatch_of

# Sixteen groups of eight with different rewards, some completions cut, some right.
GOOD = {
    "reward/mean": 0.4,
    "reward/std": 0.3,
    "accuracy": 0.2,
    "truncated": 0.5,
    "groups/zero_variance": 3.0,
    "sequences": 128.0,
}
EQUAL = {**GOOD, "groups/zero_variance": 16.0}
CONSTANT = {**EQUAL, "reward/std": 0.0, "reward/mean": 0.25, "accuracy": 0.0}
CUT = {**GOOD, "truncated": 1.0}
NEVER_RIGHT = {**GOOD, "accuracy": 0.0}


def said(*steps: dict[str, float], **options: object) -> list[str]:
    heard: list[str] = []
    hints = Hints(TrainConfig(**options), 1.0, heard.append)  # type: ignore[arg-type]
    for metrics in steps:
        hints.look(metrics)
    return heard


@pytest.mark.parametrize(
    ("metrics", "patience", "text"),
    [
        (EQUAL, PATIENCE, r"all completions of a prompt had equal rewards.* 'grpo' are 0"),
        (CONSTANT, PATIENCE, r"has the reward 0.25, so nothing is learned"),
        (CUT, PATIENCE, r"was cut at --max-new-tokens 16, before it ended.*--stop"),
        (
            NEVER_RIGHT,
            LONG_PATIENCE,
            r"accuracy has been 0 for 10 steps .*none reached 1\..*--succ",
        ),
    ],
)
def test_each_hint_is_printed_once_after_some_steps_in_a_row(
    metrics: dict[str, float], patience: int, text: str
) -> None:
    assert said(*[metrics] * (patience - 1)) == []
    (hint,) = said(*[metrics] * (patience + 9))
    assert __import__("re").search(text, hint), hint
    assert said(*[*[metrics] * (patience - 1), GOOD] * 3) == []  # never often enough in a row
    (_,) = said(*[*[metrics] * patience, GOOD] * 3)  # and not a second time


def test_a_run_that_learns_hears_nothing_and_a_critic_needs_no_groups() -> None:
    assert said(*[GOOD] * 30) == []
    assert said(*[EQUAL] * 30, advantage="gae") == []


def constant(example: object, completion: str) -> float:
    return 0.5


def test_a_constant_reward_gives_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", steps=PATIENCE, reward="test_train_hints:constant") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("has the reward 0.5, so nothing is learned") == 1
    assert "warning: every completion" in shown


def test_a_second_plain_run_goes_into_a_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in arguments(tmp_path, {**SMALL, "steps": 1}) if word != str(tmp_path)]
    words.remove("--out")
    for _ in range(3):
        assert main(words) == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [
        "latest",
        "latest-2",
        "latest-3",
    ]
    assert "everything is in runs/latest-3" in capsys.readouterr().out
    stored = json.loads((tmp_path / "runs" / "latest-2" / "config.json").read_text())
    assert stored["config"]["out"] == "runs/latest-2"
    assert main([*words, "--out", "runs/latest"]) == 2  # one that is named is never another one
    assert "holds a run already" in capsys.readouterr().err


def test_a_directory_in_which_a_run_is_being_started_is_not_free(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert free_directory(path) == path
    path.mkdir()
    (path / "config.json").write_text("{}")  # a start that ended before its first checkpoint
    assert free_directory(path) == path
    lock = Lock(path)
    assert free_directory(path) == tmp_path / "run-2"
    lock.release()
    (path / "checkpoints" / "step_000000").mkdir(parents=True)
    assert free_directory(path) == tmp_path / "run-2"


def test_warm_up_on_a_user_s_data_never_happens_unasked(tmp_path: Path) -> None:
    assert warmup_steps(TrainConfig()) > 0
    assert warmup_steps(TrainConfig(task="x.jsonl", reward="exact")) == 0
    assert warmup_steps(TrainConfig(task="reasoning_gym:x")) == 0
    assert warmup_steps(TrainConfig(model="elsewhere", max_new_tokens=9)) == 0
    assert warmup_steps(TrainConfig(task="x.jsonl", reward="exact", warmup_steps=7)) == 7
    rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(20)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "run"
    options = {"task": tmp_path / "t.jsonl", "steps": 1, "eval_prompts": 2, "reward": "exact"}
    assert main(arguments(out, {**SMALL, **options, "warmup_steps": None})) == 0
    assert lines(out)[0]["eval/accuracy"] == 0  # a random model, which has seen no answer


def test_help_is_in_groups_and_has_a_sentence_for_every_option() -> None:
    declared = arguments_of(TrainConfig)
    assert list(dict.fromkeys(argument.title for argument in declared)) == [
        "Loss, task, model and run directory",
        "Sampling",
        "Advantages",
        "Learning",
        "The critic of the advantage gae",
        "Warm-up, weights and machine",
        "Evaluations, checkpoints and logs",
    ]
    assert [argument.name for argument in declared] == list(TrainConfig.__dataclass_fields__)
    learning = {a.name: a.meaning for a in declared if a.title == "Learning"}
    assert learning["lora_rank"].startswith("Train only adapters of this rank")
    text = parser_of("train", "", declared).format_help()
    assert "\nLearning:\n  --epochs NUMBER       Passes" in text
    assert "  --betas NUMBER NUMBER\n" in text
    assert "  --lora-target TEXT [TEXT ...]\n" in text
    assert "  --overlong keep|mask|penalise\n" in text
    assert "  --sampling-mask, --no-sampling-mask\n" in text
    assert "  --compile             Compile" in text


def test_who_hears_of_a_ratio_that_is_not_1_hears_of_the_doctor() -> None:
    """Every such text of the three packages, except docstrings."""
    texts = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for argument in node.args:
                    texts[file.name, ast.unparse(argument)] = None
            if isinstance(node, ast.Return) and node.value is not None:
                texts[file.name, ast.unparse(node.value)] = None
    telling = [(f, t) for f, t in texts if "ratio" in t and "is not 1" in t]
    assert {file for file, _ in telling} == {"watch.py", "session.py"}
    assert all("policyloss doctor" in text for _, text in telling)


def test_the_first_step_of_a_run_is_looked_at() -> None:
    draw = torch.Generator().manual_seed(0)
    old = torch.rand(8, 40, generator=draw).clamp(1e-3, 0.999).log()
    noise = 1e-6 * torch.randn(old.shape, generator=draw)
    a = {"old_logp": old, "rollout_logp": old + noise, "mask": torch.ones(8, 40, dtype=torch.bool)}
    bounds = torch.arange(0, 321, 40)
    tokens = {name: x.flatten() for name, x in a.items()}
    assert mismatch_of(SimpleNamespace(tokens=tokens, cu_seqlens=bounds)) is None
    late = a["rollout_logp"].roll(1, 1).flatten()
    shifted = SimpleNamespace(tokens={**tokens, "rollout_logp": late}, cu_seqlens=bounds)
    message = mismatch_of(shifted)
    assert message is not None
    assert "the ratio of the unchanged policy is not 1" in message
    assert "log-probabilities one token off" in message
    few = SimpleNamespace(tokens={k: x[:5] for k, x in tokens.items()}, cu_seqlens=None)
    assert mismatch_of(few) is None
