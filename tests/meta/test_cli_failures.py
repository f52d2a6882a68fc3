"""Whatever a command is given or meets, it fails with one sentence and exit code 2: nothing ends in
a traceback, waits for ever, or reaches the terminal as a command to it.
"""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from policyloss import cli
from policyloss.catalogue import LARGEST_FILE, read_json
from policyloss.cli import main

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and /dev/full")
# The commands that read the file of a loss, or of options.
READERS = (
    ("explain",),
    ("explain-trl",),
    ("diff", "dapo"),
    ("explore", "--no-open", "--out", "page.html"),
)


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line on stderr; nothing is on stdout."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, f"one line, not {err!r}"
    return err.removeprefix("policyloss: ").rstrip("\n")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**30)  # without a byte on the disk


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "deep": (lambda path: path.write_text("[" * 100_000), " is nested too deeply"),
    "pipe": (pipe, ": it is a named pipe"),
    "folder": (Path.mkdir, ": it is a folder"),
    "large": (large, f": it is larger than {LARGEST_FILE // 2**20} MiB"),
    "long number": (lambda path: path.write_text("9" * 5000), " is not JSON"),
}


@posix
@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("command", READERS, ids=lambda command: command[0])
def test_a_file_of_a_loss_that_cannot_be_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make, words = BROKEN[kind]
    make(tmp_path / "loss.json")
    assert f"loss.json{words}" in failure(capsys, *command, "loss.json")
    assert not (tmp_path / "page.html").exists()


def test_a_path_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is too long, or that holds a zero byte, is not a preset either."""
    assert "File name too long" in failure(capsys, "explain", "x" * 5000 + ".json")
    assert "unknown preset" in failure(capsys, "explain", "x" * 5000)
    assert "null" in failure(capsys, "explain", "loss\0.json")


def test_a_name_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a file is shown; a line break or a command to the terminal in it does nothing."""
    path = tmp_path / "two\nlines\x1b[31m\x07.json"
    message = failure(capsys, "explain", str(path))
    assert message.endswith("two lines\\u001b[31m\\u0007.json: No such file or directory.")


def loop(path: Path) -> None:
    path.symlink_to(path)


NOWHERE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "run.jsonl"),
    "loop": (loop, "run.jsonl"),
    "pipe": (pipe, "run.jsonl"),
    "long name": (lambda path: None, "r" * 5000),
}


@posix
@pytest.mark.parametrize("kind", NOWHERE)
@pytest.mark.parametrize("command", ["doctor", "report", "what-if"])
def test_a_run_that_is_not_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make, name = NOWHERE[kind]
    make(tmp_path / "run.jsonl")
    assert name in failure(capsys, command, name)
    assert {file.name for file in tmp_path.iterdir()} <= {"run.jsonl"}


def test_a_wrong_argument_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the tables of the explorer nor the tokens of a run are read for nothing."""

    def work(*arguments: object) -> None:
        raise AssertionError("it began to work")

    monkeypatch.setattr("policyloss_lab.explore.page.template", work)
    monkeypatch.setattr("policyloss_lab.whatif.command.read", work)
    folder = str(tmp_path)
    assert "--out" in failure(capsys, "explore", "--no-open", "--out", folder)
    assert "did you mean 'dapo'" in failure(capsys, "explore", "--no-open", "dapoo")
    for option, words in (("--presets", "dapo"), ("--loss", "dapo"), ("--out", "folder")):
        value = folder if option == "--out" else "dapoo"
        assert words in failure(capsys, "what-if", folder, option, value)
    assert "--step takes a whole number" in failure(capsys, "what-if", folder, "--step", "9" * 5000)


@posix
@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_line() -> None:
    """Python flushes once more when it ends, which must not add a second complaint."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "policyloss", "presets"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == b"policyloss: cannot write the output: No space left on device.\n"


def test_the_buffer_is_written_before_a_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that prints without flushing fails while it can still report the error."""

    with (tmp_path / "output").open("w") as file:

        class Full(io.StringIO):
            def flush(self) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            def fileno(self) -> int:
                return file.fileno()

        def prints(arguments: object) -> int:
            print("a verdict")
            return 0

        module = SimpleNamespace(doctor_command=prints)
        monkeypatch.setattr(cli, "import_module", lambda name: module)
        monkeypatch.setattr(sys, "stdout", Full())
        assert main(["doctor"]) == 2
    assert "cannot write the output: No space left" in capsys.readouterr().err


def test_a_loss_of_losses_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON allows more levels than the reader of parts can go down."""
    side = '{"type": "BySign", "positive": '
    path = tmp_path / "loss.json"
    path.write_text('{"trust": ' + side * 400 + "1" + "}" * 401)
    assert "is nested too deeply" in failure(capsys, "explain", str(path))


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    path = tmp_path / "loss.json"
    path.write_text(json.dumps({"a": 1}) + " " * (LARGEST_FILE - 8))
    assert read_json(str(path)) == {"a": 1}
