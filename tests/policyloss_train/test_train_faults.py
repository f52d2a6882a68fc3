"""Runs with numbers that are not finite, and with rewards that exit, hang or wait."""

from __future__ import annotations

import contextlib
import json
import math
import os
import posix
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import train_faults_work
from json_places import assert_all_handled
from safetensors.torch import load_file
from train_loop_ranks import lines, resume, train

from policyloss_train import learner as learner_module
from policyloss_train import time_limit
from policyloss_train.batches import Pack
from policyloss_train.distributed import Ranks
from policyloss_train.run.directory import RunDir
from policyloss_train.tasks.base import Example, Task
from policyloss_train.tasks.rewards import RewardError, check_reward, score_completion
from policyloss_train.time_limit import TimeIsUp, call_within
from policyloss_train.watch import Watch, nonfinite_tokens


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step_{step:06d}" / "rank00000.safetensors")


# ---------------------------------------------------------------- numbers that are not finite


class Poison:
    """Makes advantages NaN in the steps that are named,
    as a bug in a reward or an estimator would.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
        judge, learn = learner_module.judge, learner_module.Learner.learn
        self.step = -1

        def learned(made: Any, pack: Pack, indices: Any, total: int, step: int) -> Any:
            self.step = step + 1  # the step that is being made, as metrics.jsonl counts
            return learn(made, pack, indices, total, step)

        def judged(config: Any, pack: Pack, *more: Any, **options: Any) -> Any:
            found = judge(config, pack, *more, **options)
            if self.step in steps:
                # The first token that is trained on.
                found[0][pack.tokens["mask"].nonzero()[0]] = math.nan
            return found

        monkeypatch.setattr(learner_module.Learner, "learn", learned)
        monkeypatch.setattr(learner_module, "judge", judged)


def test_an_update_that_is_not_finite_is_skipped(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 2 of 3: one of its two minibatches holds the NaN.
    The other one is made, and the weights stay finite.
    """
    Poison(monkeypatch, 2)
    out = tmp_path / "run"
    assert train(out, model=model, checkpoint_every=1, keep=9) == 0
    rows = lines(out)
    assert [row["skipped"] for row in rows[1:]] == [0, 1, 0]
    assert rows[2]["grad_norm"] is None
    assert rows[2]["nonfinite"]["grad_norm"] == "nan"
    said = capsys.readouterr().out
    assert "an update was skipped: its loss is nan and its gradient norm nan" in said
    assert "advantages is not finite at token 0 of completion 0" in said
    for step in range(4):
        assert all(x.isfinite().all() for x in weights(out, step).values()), step
    moved = [
        name
        for name, x in weights(out, 2).items()
        if name.startswith("policy/") and not torch.equal(x, weights(out, 1)[name])
    ]
    assert moved  # by the minibatch that was finite
    numbers = json.loads((out / "checkpoints" / "step_000003" / "checkpoint.json").read_text())[
        "checkpoint"
    ]["numbers"]["learner"]
    assert (numbers["updates"], numbers["skipped_in_a_row"]) == (5, 0)


@pytest.mark.parametrize("keep", [1, 2])
def test_too_many_in_a_row_stop_the_run_at_the_last_good_checkpoint(
    keep: int,
    tmp_path: Path,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    options = {"model": model, "checkpoint_every": 1, "keep": keep, "minibatches": 1, "steps": 5}
    with monkeypatch.context() as patch:
        Poison(patch, 3, 4, 5)
        assert train(out, **options, nonfinite_limit=2) == 2
    said = capsys.readouterr().err
    assert "stopped in step 4: 2 updates in a row were not finite (--nonfinite-limit)" in said
    assert f"The last good checkpoint is {out / 'checkpoints' / 'step_000003'}" in said
    assert checkpoints(out)[-1] == "step_000003"
    assert len(checkpoints(out)) == keep
    assert all(x.isfinite().all() for x in weights(out, 3).values())
    assert resume(out) == 0  # the cause of the NaN is removed
    assert [row["step"] for row in lines(out)] == [0, 1, 2, 3, 4, 5]


def test_weights_that_are_not_finite_are_never_a_checkpoint(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finite gradient may give weights that are not finite. With --keep 1 the good checkpoint
    would be lost.
    """
    step = torch.optim.AdamW.step
    calls = []

    def overflowing(self: Any, *given: Any) -> None:
        step(self, *given)
        calls.append(1)
        if len(calls) == 4:  # two updates a step: the last one of step 2
            with torch.no_grad():
                self.param_groups[0]["params"][3][0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflowing)
    out = tmp_path / "run"
    assert train(out, model=model, checkpoint_every=1, keep=1, eval_every=0) == 2
    said = capsys.readouterr().err
    assert "the weights are not finite after step 2 (policy/model." in said
    assert f"The last good checkpoint is {out / 'checkpoints' / 'step_000001'}" in said
    assert checkpoints(out) == ["step_000001"]


def test_a_checkpoint_that_is_not_finite_is_passed_over(tmp_path: Path, model: str) -> None:
    """As an older version wrote it: sound in every byte, and worthless."""
    from policyloss_train.run import resume as resume_module

    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_module, "nonfinite_names", lambda weights: [])
        log = RunDir.log

        def poisoned(self: RunDir, step: int, metrics: Any, timing: Any) -> None:
            log(self, step, metrics, timing)
            if step == 3:
                with torch.no_grad():
                    learners[0].policy.model.model.norm.weight[0] = math.nan

        learners: list[Any] = []
        state = learner_module.Learner.state
        patch.setattr(
            learner_module.Learner,
            "state",
            lambda learner: (learners.append(learner), state(learner))[1],
        )
        patch.setattr(RunDir, "log", poisoned)
        assert train(out, model=model, checkpoint_every=1) == 0
    assert weights(out, 3)["policy/model.model.norm.weight"][0].isnan()
    with pytest.warns(
        UserWarning,
        match=r"step_000003 is no good: 1 of its weights are not finite, policy/model\.model\.norm",
    ):
        assert resume(out) == 0
    assert all(x.isfinite().all() for x in weights(out, 3).values())


def test_which_tokens_are_to_blame() -> None:
    """Two completions of three tokens, after prompts of two:
    places 1 to 3 of each are trained on.
    """
    mask = torch.tensor([False, True, True, True] * 2)
    pack = Pack(
        {
            "mask": mask,
            "completion": mask,
            "old_logp": torch.zeros(8),
            "advantages": torch.zeros(8),
        },
        {},
        [4, 4],
    )
    seen = {0: torch.zeros(4), 1: torch.zeros(4)}
    assert nonfinite_tokens(pack, [0, 1], seen) == ""
    seen[1][2] = math.inf
    assert nonfinite_tokens(pack, [0, 1], seen) == "logp is not finite at token 1 of completion 1"
    # The first belongs to the prompt, which is not read.
    pack.tokens["advantages"][[0, 1, 3]] = math.nan
    assert (
        nonfinite_tokens(pack, [0, 1], seen)
        == "advantages is not finite at token 0 of completion 0, token 2 of completion 0"
    )
    pack.tokens["old_logp"][:] = math.nan  # the error names where it begins
    assert nonfinite_tokens(pack, [1], seen).startswith(
        "old_logp is not finite at token 0 of completion 1, token 1"
    )


# ---------------------------------------------------------------- rewards that leave or hang

EXAMPLE = Example("p", "a", 0)


def test_a_reward_cannot_leave(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By sys.exit(0) it would end the run as if all were done."""
    assert (
        train(tmp_path / "run", model=model, reward="train_faults_work:leaves_sometimes", steps=2)
        == 0
    )
    assert "raised SystemExit: 0; prompt 'sort " in capsys.readouterr().out
    assert sum(row["reward/errors"] for row in lines(tmp_path / "run")[1:]) > 0
    with pytest.raises(RewardError, match="raised SystemExit: 3"):
        check_reward("mine", lambda example, completion: sys.exit(3))(EXAMPLE, "c")


class Strange(float):
    """A number, and an error, of which nothing can be read."""

    def __float__(self) -> float:
        raise KeyError("no")

    __repr__ = __str__ = lambda self: sys.exit(0)  # type: ignore[assignment]


class StrangeError(Exception):
    __repr__ = __str__ = lambda self: 1 / 0  # type: ignore[assignment]


def test_an_invalid_reward_is_an_error() -> None:
    """Numbers that exceed a float, or whose squares do; objects that raise on every operation."""

    def fails(error: BaseException) -> Any:
        raise error

    rewards: dict[str, Any] = {
        f"returns {value!r:.20}": lambda value=value: value
        for value in (1e308, -1e308, 1e30, 10**400, -(10**400), math.nan, math.inf, None, "1", [1])
    }
    rewards |= {
        "returns 10**5000": lambda: 10**5000,
        "returns a strange number": lambda: Strange(0.5),
        "returns a strange object": StrangeError,
        "raises a strange error": lambda: fails(StrangeError()),
        "raises an error of strange words": lambda: fails(ValueError("\ud800", StrangeError())),
        "leaves": lambda: sys.exit(0),
        "leaves with a strange code": lambda: sys.exit(StrangeError()),  # type: ignore[arg-type]
    }
    results = {}
    for name, function in rewards.items():
        try:
            value = check_reward("mine", lambda example, completion: function())(EXAMPLE, "c")  # noqa: B023
            results[name] = f"accepted: {value}"
        except RewardError as error:
            results[name] = "" if "the reward 'mine' " in str(error) else str(error)
        except BaseException as error:
            results[name] = f"raised {type(error).__name__}"
    assert_all_handled(results, least=17)
    assert check_reward("mine", lambda example, completion: -1e15)(EXAMPLE, "c") == -1e15


def test_a_reward_cannot_end_the_process() -> None:
    """By os._exit(0) the run would end as if all were done. A process that the reward forked may
    end itself so.
    """

    def ends(example: Example, completion: str) -> float:
        if os.fork() == 0:
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
        os._exit(0)

    child = os.fork()
    if child == 0:
        code = 1
        try:
            check_reward("mine", ends)(EXAMPLE, "c")
        except RewardError as error:
            code = 7 if "raised SystemExit: os._exit(0)" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os._exit is posix._exit


def spin() -> None:
    while True:
        pass


def swallow() -> None:
    while True:
        with contextlib.suppress(Exception):
            time.sleep(60)


HANGS = {
    "python": spin,
    "a call that waits": lambda: time.sleep(60),
    "a lock": lambda: threading.Lock().acquire() and threading.Event().wait(),
    "a process": lambda: subprocess.run(["sleep", "60"], check=True),
    "a regular expression": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "one that swallows exceptions": swallow,
}


@pytest.mark.parametrize("kind", HANGS)
def test_a_reward_that_hangs_is_interrupted(kind: str) -> None:
    task = Task(
        "mine", [], [], check_reward("mine", lambda example, completion: HANGS[kind]() or 1.0)
    )
    began, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(
        RewardError,
        match=r"the reward 'mine' took longer than 0\.2 s \(--reward-timeout\); prompt 'p'",
    ):
        score_completion(task, EXAMPLE, "c", 0.2)
    assert time.monotonic() - began < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert call_within(5, lambda: 7) == 7


def test_a_run_goes_on_after_a_reward_that_hangs(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its completions are left out, and the others are the same bits as ever."""
    options = {"model": model, "steps": 2, "eval_every": 0, "eval_prompts": 1, "group_size": 2}
    assert (
        train(
            tmp_path / "hangs",
            **options,
            reward="train_faults_work:hangs_sometimes",
            reward_timeout=0.05,
        )
        == 0
    )
    assert "took longer than 0.05 s" in capsys.readouterr().out
    assert train(tmp_path / "raises", **options, reward="train_faults_work:raises_sometimes") == 0
    assert (tmp_path / "hangs" / "metrics.jsonl").read_bytes() == (
        tmp_path / "raises" / "metrics.jsonl"
    ).read_bytes()
    assert sum(row["reward/errors"] for row in lines(tmp_path / "hangs")[1:]) > 0


def test_somebody_elses_alarm_goes_on() -> None:
    rang: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: rang.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        assert call_within(5, lambda: time.sleep(0.05) or 3) == 3
        assert rang == []
        time.sleep(0.3)
        assert rang == [signal.SIGALRM]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def test_an_alarm_that_comes_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the end of the function and the end of its alarm."""
    setitimer = signal.setitimer

    def ringing(which: int, seconds: float, interval: float = 0.0) -> Any:
        if not seconds:
            signal.raise_signal(signal.SIGALRM)
        return setitimer(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", ringing)
    assert call_within(5, lambda: 3) == 3


def test_many_calls_are_watched_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog restarts after a second or for another limit, and is off after the calls."""
    told: list[float | None] = []
    now = [100.0]
    fault = time_limit.faulthandler
    monkeypatch.setattr(fault, "dump_traceback_later", lambda s, **_: told.append(s))
    monkeypatch.setattr(fault, "cancel_dump_traceback_later", lambda: told.append(None))
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: now[0])
    with time_limit.many_calls():
        for _ in range(5):
            now[0] += 0.1
            assert call_within(9.0, abs, -3) == 3
        assert told == [29.0]
        now[0] += 1.0
        call_within(9.0, abs, -3)
        call_within(30.0, abs, -3)
        assert told == [29.0, 29.0, 90.0]
    assert told == [29.0, 29.0, 90.0, None]
    call_within(9.0, abs, -3)
    call_within(9.0, abs, -3)
    assert told[4:] == [29.0, None, 29.0, None]


def test_native_code_that_never_returns_ends_the_process() -> None:
    """`sum` of a long range looks at no signal: no Python can run until it is done, and yet the
    process ends, with its stack.
    """
    work = str(Path(train_faults_work.__file__))
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, work, "native"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "in native_hang" in done.stderr
    assert "unreachable" not in done.stdout
    assert time.monotonic() - began < 40
    assert time_limit.HARD_S == 20  # only the other process made it shorter


def test_zero_is_no_limit() -> None:
    assert call_within(0, lambda: signal.getitimer(signal.ITIMER_REAL)) == (0.0, 0.0)
    with pytest.raises(TimeIsUp):
        call_within(0.05, spin)


# ---------------------------------------------------------------- a heartbeat, and ranks that stall


def test_a_heartbeat_names_the_wait() -> None:
    said: list[str] = []
    with Watch(Ranks(0, 1, torch.device("cpu")), said.append, 0.3) as watch:
        watch.at("step 3, scoring")
        time.sleep(0.9)
        first = len(said)
        for _ in range(10):
            watch.at("step 4, learning")
            time.sleep(0.02)
    assert 1 <= first <= 3
    assert all(text.startswith("still running; step 3, scoring, for ") for text in said)
    assert len(said) == first  # what moves is not spoken of
    assert not watch._thread.is_alive()


@pytest.mark.slow
def test_a_rank_that_stalls_is_named(tmp_path: Path) -> None:
    """The reward of rank 1 hangs without a limit; rank 0 reports it while it waits, and gives up
    after --rank-timeout.
    """
    began = time.monotonic()
    train_faults_work.start_two_ranks(tmp_path)
    assert time.monotonic() - began < 150
    rank_0 = (tmp_path / "said0").read_text()
    assert (
        "still running; waiting for rank 1. rank 0: step 1, gathering the completions of all "
        "ranks, for" in rank_0
    )
    assert "rank 1: step 1, scoring, for" in rank_0
    assert (
        "policyloss: rank 0 lost another rank while step 1, gathering the completions of all "
        "ranks: waiting for rank 1." in rank_0
    )
    assert "The last good checkpoint is" in rank_0
    assert (tmp_path / "code0").read_text() == "2"
