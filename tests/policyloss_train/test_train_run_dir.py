"""The directory of a run: lines that survive kill -9, one process at a time,
and the display while it trains.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import policyloss as pl
from policyloss.errors import InputError, PolicyLossError
from policyloss_lab.report import collect
from policyloss_lab.runs.files import StorageError, from_json, replace_file, to_json
from policyloss_lab.runs.lock import Lock
from policyloss_lab.runs.records import JsonLines, line_of
from policyloss_train.config import TrainConfig
from policyloss_train.loop import _run_directory
from policyloss_train.run.checkpoint import latest, save
from policyloss_train.run.directory import RunDir
from policyloss_train.view.display import Display
from policyloss_train.view.track import Tracker, service_module

CONFIG, SPEC = {"lr": 1e-5, "clip": math.inf}, {"trust": {"type": "clip"}}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(tmp_path / "run", CONFIG, SPEC) as made:
        yield made


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


# --------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "value", [0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, 2**70, math.inf, -math.inf]
)
def test_json_keeps_every_number(value: float) -> None:
    back = from_json(to_json({"x": [value]}, "numbers"))["x"][0]
    assert (back, math.copysign(1, back), type(back)) == (
        value,
        math.copysign(1, value),
        type(value),
    )


def test_json_keeps_nan_and_any_reader_takes_it() -> None:
    data = to_json({"x": math.nan, "y": {"float": "a dict of the user's own"}}, "numbers")
    assert json.loads(data, parse_constant=refuse) == {
        "x": {"float": "nan"},
        "y": {"float": "a dict of the user's own"},
    }
    back = from_json(data)
    assert math.isnan(back["x"])
    assert back["y"] == {"float": "a dict of the user's own"}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [{1, 2}]}, r"numbers\['a'\]\[0\] is a set"),
        ({3: "x"}, r"has the key 3.*str\(key\)"),
        (b"", "numbers is a bytes"),
    ],
)
def test_json_refuses_values_it_would_change(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        to_json(value, "numbers")


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    replace_file(path, b"old")

    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(
        StorageError,
        match=r"config\.json: No space left on device\. The old contents.*Free some space",
    ):
        replace_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert path.read_bytes() == b"old"


# -------------------------------------------------------------------------------------------- lines


def test_a_line_stores_values_that_json_cannot_hold() -> None:
    line = line_of({"kl": 0.5, "step": 3, "grad": math.nan, "hist": {"counts": [1.0, -math.inf]}})
    assert line == (
        b'{"step": 3, "kl": 0.5, "grad": null, "hist": {"counts": [1.0, null]}, '
        b'"nonfinite": {"grad": "nan", "hist/counts/1": "-inf"}}'
    )
    with pytest.raises(InputError, match="step 3 holds something that JSON cannot"):
        line_of({"step": 3, "x": {1}})


@pytest.mark.parametrize(
    "tail", [b"", b'{"step": 4, "x": 0.', b'{"step": 4}', b"\0\0\0\0\n", b'{"x": 1}\n{"st']
)
def test_truncation_keeps_the_bytes_of_earlier_lines(tmp_path: Path, tail: bytes) -> None:
    """Manually added spaces stay; later rows and the rest of a line after a crash are removed."""
    path = tmp_path / "metrics.jsonl"
    kept = b'{"step": 1, "x": 0.1}\n{"x":  0.25,"step":2}\n{"step": 2, "x": 1e-07}\n'
    path.write_bytes(kept + b'{"step": 3, "x": 3}\n' + tail)
    lines = JsonLines(path)
    assert lines.last == 3
    assert path.read_bytes() == kept + b'{"step": 3, "x": 3}\n'
    lines.truncate(2)
    assert lines.last == 2
    assert path.read_bytes() == kept
    lines.append([{"step": 3, "x": 4}])
    assert path.read_bytes() == kept + b'{"step": 3, "x": 4}\n'
    lines.truncate(-1)
    assert path.read_bytes() == b""
    lines.close()


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append([{"step": 1}])
    write = os.write

    def half(handle: int, data: bytes) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(
        StorageError, match=r"metrics\.jsonl: No space left.*Its old contents are kept"
    ):
        lines.append([{"step": 2, "x": 1.5}])
    monkeypatch.undo()
    assert lines.path.read_bytes() == b'{"step": 1}\n'
    lines.append([{"step": 2}])
    assert lines.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    lines.close()


def test_steps_never_go_back(run: RunDir) -> None:
    run.append("rollouts", [{"step": 2, "prompt": "a"}, {"prompt": "b", "step": 2}])
    with pytest.raises(InputError, match=r"step 1 after step 3 in .*rollouts"):
        run.append("rollouts", [{"step": 3}, {"step": 1}])
    with pytest.raises(InputError, match="needs a step, an integer ≥ 0, got None"):
        run.append("rollouts", [{"prompt": "a"}])
    assert [row["prompt"] for row in rows_of(run.path / "rollouts.jsonl")] == ["a", "b"]


# ---------------------------------------------------------------------------------------- directory


def test_a_run_keeps_the_options_of_its_start(run: RunDir) -> None:
    import policyloss

    contents = RunDir.read_config(run.path)
    assert contents == {"policyloss": policyloss.__version__, "config": CONFIG, "loss": SPEC}
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith(
        sys.modules["torch"].__version__.partition("+")[0]
    )
    assert environment["resumed"] == []
    assert run.config == CONFIG


def test_a_resumed_run_has_the_bytes_of_one_that_was_not(tmp_path: Path) -> None:
    def log(run: RunDir, steps: range) -> None:
        for step in steps:
            run.log(step, {"reward/mean": 0.1 * step, "grad_norm": math.nan}, {"step_s": 1.0})
            run.append("rollouts", [{"step": step, "completion": "\u2028é\ud800"}])

    with RunDir.create(tmp_path / "whole", CONFIG, SPEC) as whole:
        log(whole, range(6))
    with RunDir.create(tmp_path / "cut", CONFIG, SPEC) as cut:
        log(cut, range(5))
    with open(cut.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "rewa')
    with RunDir.open(cut.path) as again:
        again.truncate(2)
        log(again, range(3, 6))
    for name in ("metrics.jsonl", "timing.jsonl", "rollouts.jsonl"):
        assert (cut.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert [row["step"] for row in rows_of(cut.path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert len(json.loads((cut.path / "environment.json").read_text())["resumed"]) == 1


def test_going_back_sets_later_checkpoints_aside(run: RunDir) -> None:
    for step in range(4):
        run.log(step, {}, {})
        save(run.checkpoints, step, {}, {}, keep=None)
    run.truncate(1)
    assert latest(run.checkpoints) == run.checkpoints / "step_000001"
    assert [row["step"] for row in rows_of(run.path / "metrics.jsonl")] == [0, 1]


def test_lines_that_are_missing_are_reported(run: RunDir) -> None:
    run.log(0, {}, {})
    with pytest.warns(UserWarning, match="ends at step 0, before step 4"):
        run.truncate(4)


def test_a_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    RunDir.create(tmp_path, CONFIG, SPEC).close()
    save(tmp_path / "checkpoints", 0, {}, {}, keep=None)
    with pytest.raises(InputError, match=r"holds a run already.*resume it"):
        RunDir.create(tmp_path, {"lr": 2}, SPEC)
    assert RunDir.read_config(tmp_path)["config"] == CONFIG
    assert not (tmp_path / "lock").exists()
    with pytest.raises(InputError, match="holds no run: there is no"):
        RunDir.open(tmp_path / "elsewhere")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="lacks policyloss, config or loss"):
        RunDir.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StorageError, match=r"cannot read .*config\.json"):
        RunDir.open(tmp_path)


def test_a_start_that_was_killed_before_there_was_a_run_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"pid": 99')
    with RunDir.create(tmp_path, CONFIG, SPEC) as run:
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        run.log(0, {}, {})
    assert not (tmp_path / "lock").exists()


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not write .*file/run"):
        RunDir.create(tmp_path / "file" / "run", CONFIG, SPEC)


# --------------------------------------------------------------------------------------------- lock


HOLDS = """
import os, sys, time
from pathlib import Path
from policyloss_lab.runs.lock import Lock
lock = Lock(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(60)  # a child that outlives the process
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_live_process_keeps_its_lock_and_a_killed_one_loses_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as holder:
        assert holder.stdout is not None
        try:
            assert int(holder.stdout.readline()) == holder.pid
            with pytest.raises(StorageError, match=f"in use by process {holder.pid} on this host"):
                Lock(tmp_path)
            os.kill(holder.pid, signal.SIGKILL)
            # It has ended, and its exit code has not been read.
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
            lock = Lock(tmp_path)
            assert json.loads(lock.path.read_text())["pid"] == os.getpid()
            with pytest.raises(StorageError, match=f"in use by process {os.getpid()}"):
                Lock(tmp_path)
            lock.release()
            assert not lock.path.exists()
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


def test_a_lock_that_was_deleted_by_hand_is_not_released_twice(tmp_path: Path) -> None:
    first = Lock(tmp_path)
    first.path.unlink()
    second = Lock(tmp_path)
    first.release()
    assert second.path.exists()
    second.release()
    assert not second.path.exists()


def test_a_lock_of_another_host_is_refused_until_it_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text('{"pid": 1, "host": "elsewhere.example", "began": null}')
    with pytest.raises(StorageError, match=r"locked by process 1 on elsewhere\.example.*delete"):
        Lock(tmp_path)
    assert "elsewhere" in (tmp_path / "lock").read_text()
    (tmp_path / "lock").unlink()
    taken = Lock(tmp_path)
    assert "elsewhere" not in taken.path.read_text()
    taken.path.write_text('{"pid": 1, "host": "elsewhere.example"}')
    taken.release()
    assert taken.path.exists(), "another process' lock is not ours to release"


# ----------------------------------------------------------------------------------------- trackers


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    histogram = {"edges": [0.5, 1.0, 2.0], "counts": [3, 1]}
    with RunDir.create(tmp_path, CONFIG, SPEC) as run:
        for step in range(4):
            run.log(step, {"reward/mean": float(step), "ratio": histogram}, {"step_s": 2.0})
    with RunDir.open(tmp_path) as run:
        run.truncate(1)
        for step in range(2, 4):
            run.log(step, {"reward/mean": 10.0 * step}, {})
    found = events(tmp_path / "tensorboard")
    assert [(e.step, e.value) for e in found.Scalars("reward/mean")] == [
        (0, 0.0),
        (1, 1.0),
        (2, 20.0),
        (3, 30.0),
    ]
    assert found.Scalars("timing/step_s")[0].value == 2.0
    assert "ratio" not in found.Tags()["scalars"]


def stand_in(calls: list[Any], fails: bool = False) -> Any:
    def log(metrics: dict[str, float], step: int) -> None:
        calls.append(("log", step, metrics))
        if fails:
            raise ConnectionError("no network")

    return SimpleNamespace(
        init=lambda **about: calls.append(("init", about)),
        log=log,
        finish=lambda: calls.append(("finish",)),
    )


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_service_gets_numbers_and_continues_a_resumed_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, name, stand_in(calls))
    with RunDir.create(tmp_path / "run", CONFIG, SPEC) as run:
        run.track(name)
        run.log(0, {"accuracy": 0.5, "ratio": {"edges": [0, 1], "counts": [1]}}, {"step_s": 2.0})
    with RunDir.open(tmp_path / "run") as run:
        run.track(name)
    (_, first), logged, finished, (_, second), _ = calls
    assert first == second, "the id is the run directory's, so that the service continues the run"
    assert first["project"] == "policyloss"
    assert first["config"] == CONFIG
    assert first["resume"] == "allow"
    assert first.get("id", first["name"]).endswith(
        json.loads((run.path / "track.json").read_text())["id"]
    )
    assert logged == ("log", 0, {"accuracy": 0.5, "timing/step_s": 2.0})
    assert finished == ("finish",)


TRACKED = """
import os, sys
from pathlib import Path
os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": sys.argv[2]}
from policyloss_train.run.directory import RunDir
name, out = sys.argv[1], Path(sys.argv[2])
with RunDir.create(out / "run", {"loss": "ppo"}, {}) as run:
    run.track(name)
    for step in (1, 2):
        run.log(step, {"reward/mean": step / 4}, {"step_s": 1.0})
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_real_service_gets_the_numbers(name: str, tmp_path: Path) -> None:
    """The package itself writes them, offline. The report reads a file of trackio; a binary file of
    W&B holds names and numbers as text.
    """
    pytest.importorskip(name)
    done = subprocess.run(
        [sys.executable, "-c", TRACKED, name, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stderr, done.stderr
    if name == "wandb":
        (stored,) = tmp_path.glob("run/wandb/offline-run-*/*.wandb")
        text = stored.read_bytes()
        assert text.count(b"reward/mean") >= 2
        assert b"0.25" in text
        assert b"0.5" in text
        return
    (stored,) = tmp_path.glob("*.db")
    (found,) = collect([stored])["runs"]
    assert found["metrics"]["reward/mean"] == {"step": [1, 2], "value": [0.25, 0.5]}


def test_a_service_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in(calls, fails=True))
    tracker = Tracker("wandb", tmp_path, CONFIG)
    with pytest.warns(UserWarning, match=r"wandb failed \(no network\); the run continues"):
        tracker.log(0, {"x": 1.0})
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert len(calls) == 2


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(PolicyLossError, match="pip install trackio"):
        service_module("trackio")


# ------------------------------------------------------------------------------------------ display


def show(console: Console, total: int = 40) -> Display:
    with Display(total, console=console) as display:
        for step in range(total + 1):
            metrics: dict[str, Any] = {
                "reward/mean": 0.5,
                "accuracy": 0.25,
                "policy/kl_old_k3": 0.00123,
                "grad_norm": 1.2345,
            }
            if step == 0:
                metrics = {"eval/accuracy": 0.5}
            if step == 3:
                metrics["eval/accuracy"] = 0.875
                display.say(
                    "a [bold]line[/bold] of the log that is much longer than the sixty columns of "
                    "this console"
                )
            display.update(
                step, metrics, {"step_s": 100.0 if step <= 1 else 10.0, "tokens_per_s": 1234.6}
            )
    return display


def test_plain_lines() -> None:
    out = io.StringIO()
    show(Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    both = "reward 0.500  accuracy 0.250  "
    # By default every ⌈40/20⌉ = 2 steps, and the first, the last, and those with a held-out
    # accuracy. Time left after step 1: 39·100 s; after 2: 38·(100 + 10)/2 = 2090 s; after 3:
    # 37·120/3 = 1480 s; after 22, the last 20 of 10 s each: 18·10 s.
    assert lines[:5] == [
        "step  0/40  held-out 0.500  tokens/s 1,235  ETA ?",
        f"step  1/40  {both}KL old 0.0012  grad norm 1.23  tokens/s 1,235  ETA 1:05:00",
        f"step  2/40  {both}KL old 0.0012  grad norm 1.23  tokens/s 1,235  ETA 0:34:50",
        (
            "a [bold]line[/bold] of the log that is much longer than the sixty columns of this "
            "console"
        ),
        (
            f"step  3/40  {both}held-out 0.875  KL old 0.0012  grad norm 1.23  tokens/s 1,235  ETA "
            "0:24:40"
        ),
    ]
    assert [line.split()[1] for line in lines[5:]] == [f"{step}/40" for step in range(4, 41, 2)]
    assert (
        lines[14] == f"step 22/40  {both}KL old 0.0012  grad norm 1.23  tokens/s 1,235  ETA 0:03:00"
    )
    assert lines[-1].endswith("ETA 0:00:00")


def test_the_live_table() -> None:
    out = io.StringIO()
    display = show(Console(file=out, width=100, force_terminal=True))
    said = out.getvalue()
    assert "a [bold]line[/bold] of the log" in said
    assert said.count("held-out") < 40, "drawn at most ten times a second, or it flickers"
    recorder = Console(file=io.StringIO(), record=True, width=100)
    recorder.print(display.view())
    bar, *table = recorder.export_text().splitlines()
    assert set(bar) <= {"━", " "}
    rows = [line.split() for line in table]
    assert rows[0] == [
        "step",
        "reward",
        "accuracy",
        "held-out",
        "KL",
        "old",
        "grad",
        "norm",
        "tokens/s",
        "ETA",
    ]
    assert [row[0] for row in rows[1:]] == [f"{step}/40" for step in range(33, 41)]
    assert rows[-1] == ["40/40", "0.500", "0.250", "0.875", "0.0012", "1.23", "1,235", "0:00:00"]


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(2, quiet=True) as display:
        display.say("text")
        display.update(0, {"accuracy": 1.0}, {"step_s": 1.0})
    assert capsys.readouterr().out == ""


def test_warm_up_and_warnings() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    for out, console in (
        (plain, Console(file=plain)),
        (terminal, Console(file=terminal, force_terminal=True, color_system=None)),
    ):
        display = Display(1, console=console)
        progress = display.warmup(100)
        for done in range(1, 101):
            progress(done, 2.0 / done)
        display.warn("a reward was [nan]")
        assert out.getvalue().splitlines()[-1] == "warning: a reward was [nan]"
    assert plain.getvalue().splitlines()[:4] == [
        "warm-up  25/100  loss 0.080",
        "warm-up  50/100  loss 0.040",
        "warm-up  75/100  loss 0.027",
        "warm-up 100/100  loss 0.020",
    ]
    assert terminal.getvalue().count("\r") == 99, "one line, written over"


def test_a_step_without_its_time_has_no_time_left() -> None:
    out = io.StringIO()
    with Display(10, console=Console(file=out)) as display:
        display.update(1, {"reward/mean": math.nan, "accuracy": None}, {})
    assert out.getvalue() == "step  1/10  reward nan  ETA ?\n"


def test_a_start_that_failed_does_not_block_its_directory(tmp_path: Path) -> None:
    """Without a checkpoint there is nothing to resume;
    but what no run has written is never deleted.
    """
    first = RunDir.create(tmp_path / "run", {"steps": 1}, {})
    first.log(0, {"eval/accuracy": 0.5}, {"step_s": 1.0})
    first.close()
    second = RunDir.create(tmp_path / "run", {"steps": 2}, {})
    second.log(0, {"eval/accuracy": 0.25}, {"step_s": 1.0})
    second.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 1
    assert RunDir.read_config(tmp_path / "run")["config"] == {"steps": 2}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("mine")
    with pytest.raises(InputError, match="holds a run already"):
        RunDir.create(tmp_path / "other", {"steps": 1}, {})
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == "mine"


def test_more_steps_are_written_down(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", {"steps": 1}, {"trust": 1})
    run.rewrite({"steps": 5})
    run.close()
    assert RunDir.read_config(tmp_path / "run")["config"] == {"steps": 5}
    assert RunDir.read_config(tmp_path / "run")["loss"] == {"trust": 1}


def test_the_trainer_stores_its_defaults(tmp_path: Path) -> None:
    config = TrainConfig(out=tmp_path / "run", lr=0.25)
    _run_directory(config, pl.preset("dapo")).close()
    (run,) = collect([tmp_path / "run"])["runs"]
    assert run["config"]["lr"] == 0.25
    assert run["defaults"]["lr"] == TrainConfig().lr
    assert run["defaults"].keys() == run["config"].keys()
