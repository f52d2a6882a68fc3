"""Commands write regular files, completely or not at all; devices, pipes, links and folders do not
change.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from pathlib import Path

import pytest
from report_runs import write_run

from policyloss.cli import main
from policyloss.errors import InputError
from policyloss.output import write_output

ROOT = Path(__file__).resolve().parents[3]
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs named pipes and links")


def special(folder: Path, kind: str) -> Path:
    """A path of that kind in `folder`. Who may not make a device gets the system's own,
    and cannot harm it.
    """
    path = folder / kind.replace(" ", "_")
    if kind == "folder":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "symbolic link":
        (folder / "precious").write_text("precious")
        path.symlink_to(folder / "precious")
    elif kind == "dangling symbolic link":
        path.symlink_to(folder / "nowhere")
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 7))
        except OSError:
            path = Path("/dev/null")
    return path


KINDS = ["folder", "named pipe", "symbolic link", "dangling symbolic link", "device"]


@posix
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_written(tmp_path: Path, kind: str) -> None:
    path = special(tmp_path, kind)
    before = os.lstat(path)
    named = kind.removeprefix("dangling ")
    with pytest.raises(
        InputError, match=rf"page={re.escape(repr(str(path)))} is a {named}"
    ) as error:
        write_output(path, b"new", "page")
    assert "give the name of a regular file" in str(error.value)
    after = os.lstat(path)
    assert (before.st_ino, before.st_mode, before.st_rdev) == (
        after.st_ino,
        after.st_mode,
        after.st_rdev,
    )
    assert not (tmp_path / "nowhere").exists()
    assert not (tmp_path / "precious").exists() or (tmp_path / "precious").read_text() == "precious"
    # No temporary file is left.
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@posix
@pytest.mark.parametrize("option", ["--out", "--json"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_report_writes_regular_files_only(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    kind: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", [{"step": 0, "a": 1}])
    path = special(tmp_path, kind)
    before = os.lstat(path)
    assert main(["report", str(run), option, str(path)]) == 2
    after = os.lstat(path)
    assert (before.st_ino, stat.S_IFMT(before.st_mode)) == (
        after.st_ino,
        stat.S_IFMT(after.st_mode),
    )
    assert f"is a {kind.removeprefix('dangling ')}" in capsys.readouterr().err
    # Neither file is written if one of them cannot be.
    assert not (tmp_path / "report.html").exists()


def test_a_regular_file_gets_new_contents_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    write_output(path, b"old", "out")
    first = path.stat().st_ino
    write_output(path, b"new", "out")
    assert path.read_bytes() == b"new"
    # Another file took the name, so a reader of the old one is not disturbed.
    assert path.stat().st_ino != first
    assert sorted(p.name for p in path.parent.iterdir()) == ["page.html"]


def test_the_report_does_not_overwrite_its_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [{"step": 0, "a": 1}])
    before = (run / "metrics.jsonl").read_bytes()
    for arguments in (
        ["--out", f"{run}/metrics.jsonl"],
        ["--out", "x.html", "--json", f"{run}/../run/config.json"],
    ):
        assert main(["report", str(run), *arguments]) == 2
        assert "is a file of the run" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before
    both = str(tmp_path / "both")
    assert main(["report", str(run), "--out", both, "--json", both]) == 2
    assert "name the same file" in capsys.readouterr().err


@posix
def test_the_next_writer_removes_the_file_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    child = os.fork()
    if child == 0:
        os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        write_output(path, b"half")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert str(child) in left.name
    living = left.with_name(left.name.replace(str(child), str(os.getppid())))
    living.write_bytes(b"somebody writes it")
    (tmp_path / ".page.html.mine.tmp").write_bytes(b"of a user")
    write_output(path, b"whole")
    assert path.read_bytes() == b"whole"
    assert sorted(tmp_path.iterdir()) == sorted([living, path, tmp_path / ".page.html.mine.tmp"])
