"""Crashes of the machine: a simulated disk loses everything that was not synced, and runs continue
from the rest.
"""

from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_loop_ranks import lines, resume, train

from policyloss_lab.runs.files import replace_file
from policyloss_lab.runs.lock import Lock
from policyloss_lab.runs.records import JsonLines
from policyloss_train.run.checkpoint import latest, load, save
from policyloss_train.run.directory import RunDir


class Disk:
    """Follows `os.fsync` below `root`. A file's bytes, and the names in a folder,
    are safe from their last fsync on.

    `after_a_crash` writes the files that a machine finds after a power loss now: the synced names,
    each with its synced bytes. A rename or a new file changes names, which last once their folder
    is synced.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.bytes, self.names = (
            root,
            dict[int, bytes](),
            dict[int, dict[str, tuple[int, bool]]](),
        )
        self.fsync = os.fsync
        root.mkdir()
        self._keep_names(root)
        patch.setattr(os, "fsync", self._synced)

    def _synced(self, handle: int) -> None:
        self.fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        number = os.fstat(handle)
        if stat.S_ISDIR(number.st_mode):
            self._keep_names(path)
        else:
            self.bytes[number.st_ino] = path.read_bytes()

    def _keep_names(self, folder: Path) -> None:
        self.names[folder.stat().st_ino] = {
            entry.name: (entry.inode(), entry.is_dir()) for entry in os.scandir(folder)
        }

    def after_a_crash(self, where: Path) -> Path:
        def write(number: int, folder: Path) -> None:
            folder.mkdir()
            for name, (inner, is_folder) in self.names.get(number, {}).items():
                if is_folder:
                    write(inner, folder / name)
                else:
                    (folder / name).write_bytes(self.bytes.get(inner, b""))

        write(self.root.stat().st_ino, where)
        return where


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path / "disk", monkeypatch)


def put(folder: Path, step: int, value: float | None = None) -> Path:
    value = float(step) if value is None else value
    return save(folder, step, {"policy": {"w": torch.full((4,), value)}}, {"value": value}, keep=2)


def value_of(folder: Path) -> float:
    """The contents of the last intact checkpoint; its tensors and its numbers agree."""
    path = latest(folder)
    assert path is not None
    tensors, numbers = load(path)
    assert tensors["policy/w"].tolist() == [numbers["value"]] * 4
    value: float = numbers["value"]
    return value


def test_the_disk_loses_unsynced_bytes(disk: Disk, tmp_path: Path) -> None:
    """The tool itself: bytes and names are lost one without the other."""
    (disk.root / "bytes").write_bytes(b"12")
    with open(disk.root / "both", "wb") as file:
        file.write(b"34")
        file.flush()
        os.fsync(file.fileno())
    handle = os.open(disk.root, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    (disk.root / "both").rename(disk.root / "renamed")
    (disk.root / "late").write_bytes(b"56")
    found = {
        path.name: path.read_bytes() for path in disk.after_a_crash(tmp_path / "after").iterdir()
    }
    assert found == {"bytes": b"", "both": b"34"}


def test_a_checkpoint_that_is_written_outlives_a_crash(disk: Disk, tmp_path: Path) -> None:
    """New ones, and one in the place of another; after each, the machine loses its power."""
    folder = disk.root / "checkpoints"
    for i, (step, value) in enumerate([(1, 1.0), (2, 2.0), (2, 20.0), (3, 3.0)]):
        put(folder, step, value)
        assert value_of(disk.after_a_crash(tmp_path / str(i)) / "checkpoints") == value


def test_a_crash_while_a_checkpoint_is_written_leaves_an_intact_one(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every fsync and rename on the way. The older checkpoint must not go before the newer one
    is safe.
    """
    folder = disk.root / "checkpoints"
    put(folder, 1)
    put(folder, 2)
    seen: list[float] = []

    def crash() -> None:
        seen.append(value_of(disk.after_a_crash(tmp_path / str(len(seen))) / "checkpoints"))

    def crashing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            crash()
            result = real(*arguments)
            crash()
            return result

        return call

    monkeypatch.setattr(os, "replace", crashing(os.replace))
    monkeypatch.setattr(os, "fsync", crashing(os.fsync))
    put(folder, 3)
    put(folder, 3, 30.0)
    assert set(seen) == {2.0, 3.0, 30.0}
    assert seen == sorted(seen)  # it never goes back


def test_a_file_that_is_replaced_outlives_a_crash(disk: Disk, tmp_path: Path) -> None:
    for text in (b"old", b"new"):
        replace_file(disk.root / "config.json", text)
        assert (disk.after_a_crash(tmp_path / text.decode()) / "config.json").read_bytes() == text


def test_lines_that_were_synced_or_closed_outlive_a_crash(disk: Disk, tmp_path: Path) -> None:
    rows = JsonLines(disk.root / "metrics.jsonl")
    rows.append([{"step": 1}])
    rows.close()
    assert (
        disk.after_a_crash(tmp_path / "closed") / "metrics.jsonl"
    ).read_bytes() == b'{"step": 1}\n'
    rows = JsonLines(disk.root / "metrics.jsonl")
    rows.append([{"step": 2}])
    assert (
        disk.after_a_crash(tmp_path / "open") / "metrics.jsonl"
    ).read_bytes() == b'{"step": 1}\n'
    rows.sync()
    assert (
        disk.after_a_crash(tmp_path / "synced") / "metrics.jsonl"
    ).read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    rows.truncate(1)
    assert (disk.after_a_crash(tmp_path / "cut") / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'
    rows.close()


def test_the_lines_of_a_run_are_safe_before_its_checkpoint(disk: Disk, tmp_path: Path) -> None:
    """A checkpoint of a step whose lines are lost could not be resumed to the same bytes;
    their names must last as well.
    """
    run = RunDir.create(disk.root / "run", {"lr": 1.0}, {})
    for step in (1, 2):
        run.log(step, {"x": step}, {"s": 1.0})
        run.append("rollouts", [{"step": step}])
        run.sync()
        after = disk.after_a_crash(tmp_path / f"lines {step}") / "run"
        assert RunDir.read_config(after)["config"] == {"lr": 1.0}
        for name in ("metrics", "timing", "rollouts"):
            assert [row["step"] for row in lines(after, name)] == list(range(1, step + 1)), name
        put(run.checkpoints, step)
        assert value_of(disk.after_a_crash(tmp_path / str(step)) / "run" / "checkpoints") == step
    run.close()


def test_one_that_stepped_aside_is_brought_back_before_anything_is_deleted(tmp_path: Path) -> None:
    """A crash between two renames left the only checkpoint as `.step_000002.old`;
    the next write must not remove it.
    """
    put(tmp_path, 2)
    (tmp_path / "step_000002").rename(tmp_path / ".step_000002.old")
    put(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000003"]
    assert load(tmp_path / "step_000002")[1] == {"value": 2.0}


def test_two_that_meet_a_dead_lock_take_it_one_after_the_other(tmp_path: Path) -> None:
    """While one process looks at the file, another one waits for a moment."""
    (tmp_path / "lock").write_text("")
    handle = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    taken = threading.Event()
    waiting = threading.Thread(target=lambda: (Lock(tmp_path), taken.set()))
    waiting.start()
    assert not taken.wait(0.3)
    os.close(handle)
    assert taken.wait(10)
    waiting.join()


def test_the_reference_of_a_resumed_run_is_the_one_it_had(tmp_path: Path) -> None:
    """It is the policy after warm-up, not a newly made model."""
    options = {
        "loss": "grpo",
        "model": "tiny",
        "warmup_steps": 2,
        "steps": 2,
        "checkpoint_every": 1,
        "eval_prompts": 2,
    }
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert train(whole, **options) == 0
    assert train(again, **{**options, "steps": 1}) == 0
    assert resume(again, extend=2) == 0
    assert lines(again)[2]["policy/kl_ref"] == lines(whole)[2]["policy/kl_ref"] > 0
    assert lines(again)[2] == lines(whole)[2]
