"""`lab.Recorder`: what any loop records is the run directory that the report reads."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from json_places import assert_all_handled

import policyloss as pl
from policyloss_lab import Recorder
from policyloss_lab.report import collect


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


def test_a_step_without_a_source_records_metrics_of_the_policy(tmp_path: Path) -> None:
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
    """Only tokens under the mask are stored, each with its own numbers."""
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
from policyloss_lab import Recorder
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


def test_completions_of_one_step_may_fill_the_file(tmp_path: Path) -> None:
    """There is no second step that could be dropped: later completions are left out."""
    with Recorder(tmp_path, rollout_bytes=10_000) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(40):
            recorder.completions(1, prompts=["p"], texts=["x" * 950])
        recorder.step({"a": 1})
    assert len(lines(tmp_path / "rollouts.jsonl")) == 9
    assert lines(tmp_path / "metrics.jsonl")[0]["completions_left_out"] == 31


@pytest.mark.skipif(sys.platform == "win32", reason="needs links")
def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("kept")
    (tmp_path / "run/metrics.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(pl.PolicyLossError, match="symbolic link"):
        Recorder(tmp_path / "run")
    assert (tmp_path / "other").read_text() == "kept"


# ---------------------------------------------------------------- arguments that make no sense


class Raises:
    """An object that raises whatever is done with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no")

    __float__ = __len__ = __iter__ = __repr__ = __str__ = lambda self: 1 / 0  # type: ignore[assignment]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
LOOP: dict[str, Any] = {}
LOOP["a"] = LOOP
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
META = torch.ones(2, device="meta")
OPENED: dict[str, tuple[Any, ...]] = {
    "path": (None, 3, b"x", "x\0y", "x" * 5000, [], Raises()),
    "spec": (3, [], Raises(), {"a": 1}),
    "config": (
        *(3, "x", [1], [("a",)], {1: 2}, {None: 1}, LOOP, {"a": CYCLE}, {"a": DEEP}),
        *({"a": 10**5000}, {"a": object()}, {"a": {1}}, {"a": b"x"}, {"a": META}, Raises()),
    ),
    "resume_after": ("x", 1.5, True, -1, 10**400, [1], math.nan),
    "rollout_bytes": ("x", None, -1, 1.5, True, math.nan, [1]),
}
STEPPED: dict[str, tuple[Any, ...]] = {
    "metrics": (
        *(None, 3, "x", [1], [("a", 1)], {1: 2}, {None: 1}, {"step": 3}, Raises()),
        *({"a": x} for x in (10**400, 10**5000, "x", None, [1], {}, object(), 1j, META, Raises())),
    ),
    "step": ("x", 1.5, True, -1, 10**400, 2**60, [1], math.nan, META, Raises()),
    "tokens": ("x", 1.5, True, -1, 10**400, [1], math.nan, Raises()),
    "seconds": ("x", True, -1, 10**400, [1], math.nan, math.inf, 1j, META, Raises()),
}
LISTS = (3, "xy", b"xy", {"a": 1, "b": 2}, [1], object(), META, CYCLE, Raises())
ENTRIES: tuple[Any, ...] = (object(), 1j, b"x", {}, {"a": 1}, DEEP, CYCLE, META[0], Raises())
NUMBERS = (*ENTRIES, "x", None, [[1.0]], 10**400, 10**5000)
TEXTS = (*ENTRIES, 3, 1.5, ["x"])
STORED: dict[str, tuple[Any, ...]] = {
    "step": STEPPED["step"],
    "prompts": (*LISTS, None, *([x, "b"] for x in (*TEXTS, None))),
    "texts": (*LISTS, *([x, "b"] for x in (*TEXTS, None))),
    "answers": (*LISTS, *([x, "b"] for x in TEXTS)),
    "finish_reasons": (*LISTS, *([x, "b"] for x in TEXTS)),
    "rewards": (*LISTS, *([x, 1.0] for x in NUMBERS if x is not None)),
    "advantages": (
        *LISTS,
        [[1.0], 1.0],
        [1.0, [1.0]],
        *([x, 1.0] for x in NUMBERS if x is not None),
    ),
    "groups": (*LISTS, *([x, 1] for x in (*ENTRIES, 1.5, [1], 10**5000))),
    "ids": (*LISTS, *([x, [1]] for x in (3, *(([y]) for y in (*NUMBERS, 1.5))))),
    "tokens": (*LISTS, *([x, ["b"]] for x in ("x", 3, *(([y]) for y in TEXTS)))),
    "mask": (*LISTS, *([x, [1]] for x in (3, "x", *(([y]) for y in (*ENTRIES, "x", None))))),
    "decode": (3, "x", [], lambda ids: 3, lambda ids: 1 / 0, lambda: "x", Raises()),
    **{
        name: (*LISTS, *([x, [1.0]] for x in (3, "x", *(([y]) for y in NUMBERS))))
        for name in ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp", "entropy")
    },
}


def refusal(argument: str, call: Any) -> str:
    """ "" if a call raises an error that names the argument; else a description of its result."""
    try:
        call()
    except pl.PolicyLossError as error:
        named = argument in str(error) or "could not write" in str(error)
        return "" if named else f"not named: {error}"[:300]
    except BaseException as error:
        return f"raised {type(error).__name__}"
    return "accepted"


def test_arguments_that_make_no_sense_are_named(tmp_path: Path) -> None:
    """Whatever is passed, the error names the argument at the call, and nothing is written."""
    results = {}
    for name, values in OPENED.items():
        for i, value in enumerate(values):
            given = {"path": tmp_path / f"{name}{i}", name: value}
            results[f"{name} {i} of Recorder"] = refusal(
                name, lambda given=given: Recorder(**given)
            )
    with Recorder(tmp_path / "run") as recorder:
        for name, values in STEPPED.items():
            for i, value in enumerate(values):
                given = {"metrics": {"a": 1.0}, name: value}
                results[f"{name} {i} of step"] = refusal(
                    name, lambda given=given: recorder.step(**given)
                )
        for name, values in STORED.items():
            for i, value in enumerate(values):
                given = {"step": 1, "prompts": ["a", "b"], "ids": [[1], [2]], name: value}
                results[f"{name} {i} of completions"] = refusal(
                    name, lambda given=given: recorder.completions(**given)
                )
    for file in ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl"):
        results[f"{file} is empty"] = (tmp_path / "run" / file).read_text()[:300]
    assert_all_handled(results, least=350)


def test_numbers_of_other_packages_are_numbers(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with Recorder(tmp_path) as recorder:
        recorder.step({"a": numpy.float32(0.5)}, step=numpy.int64(3), tokens=torch.tensor(4))
        recorder.completions(
            torch.tensor(3),
            prompts=numpy.array(["a", "b"]),
            rewards=[numpy.float32(1), torch.tensor(0.5)],
            ids=[numpy.array([1, 2]), [torch.tensor(3)]],
            groups=(i for i in range(2)),
        )
    assert lines(tmp_path / "metrics.jsonl")[0] == {"step": 3, "a": 0.5, "tokens": 4}
    first, second = lines(tmp_path / "rollouts.jsonl")
    assert (first["step"], first["ids"], first["reward"], first["group"]) == (3, [1, 2], 1.0, 0)
    assert (second["ids"], second["reward"]) == ([3], 0.5)


# ---------------------------------------------------------------- faults during a training


def test_a_recorder_that_is_closed_or_cannot_write_lets_the_training_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It warns, and its folder is free."""

    def fails(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    faults: dict[str, Callable[[Recorder, pytest.MonkeyPatch], Any]] = {
        "closed": lambda recorder, patch: recorder.close(),
        "closed twice": lambda recorder, patch: (recorder.close(), recorder.close()),
        "a full disk": lambda recorder, patch: patch.setattr(os, "write", fails),
        "no disk": lambda recorder, patch: patch.setattr(os, "fstat", fails),
        "files that are closed": lambda recorder, patch: [
            os.close(one._handle) for one in recorder._lines.values()
        ],
    }
    for name, fault in faults.items():
        recorder = Recorder(tmp_path / name)
        recorder.step({"a": 1})
        with monkeypatch.context() as patch:
            fault(recorder, patch)
            for call in (
                lambda recorder=recorder: recorder.step({"a": 2}),
                lambda recorder=recorder: recorder.completions(2, prompts=["p"], texts=["x"]),
            ):
                with pytest.warns(UserWarning, match="is no longer recorded") as caught:
                    call()
                assert caught[0].filename == __file__, name
                assert str(tmp_path / name) in str(caught[0].message)
        recorder.close()
        assert len(lines(tmp_path / name / "metrics.jsonl")) == 1, name
        with Recorder(tmp_path / name, resume_after=1) as again:
            again.step({"a": 2})


def test_a_disk_that_fails_at_the_end_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: int) -> None:
        raise OSError(5, "Input/output error")

    recorder = Recorder(tmp_path)
    recorder.step({"a": 1})
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.warns(UserWarning, match=r"is no longer recorded: .*Input/output error"):
        recorder.close()
    assert not (tmp_path / "lock").exists()


def test_threads_lose_no_step(tmp_path: Path) -> None:
    with Recorder(tmp_path, rollout_bytes=20_000) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def record() -> None:
            for _ in range(50):
                recorder.step({"a": 1})
                recorder.completions(1, prompts=["p"], texts=["x" * 100])

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(record) for _ in range(4)]:
                done.result()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == list(range(1, 201))
    assert all(row["step"] == 1 for row in lines(tmp_path / "rollouts.jsonl"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_run_to_its_parent(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step({"a": 1})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                recorder.step({"a": 2})
                recorder.completions(2, prompts=["p"], texts=["x"])
                recorder.close()
            code = 0 if len(caught) == 2 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "lock").exists()
    with pytest.raises(pl.PolicyLossError, match="in use by process"):
        Recorder(tmp_path, resume_after=1)
    recorder.step({"a": 3})
    recorder.close()
    assert [row["a"] for row in lines(tmp_path / "metrics.jsonl")] == [1, 3]
    assert lines(tmp_path / "rollouts.jsonl") == []
