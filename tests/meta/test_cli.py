"""The `policyloss` command: its output, its exit codes, and that no input ends in a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import policyloss as pl
from policyloss import cli
from policyloss.cli import all_commands, main


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, f"one line, not {err!r}"
    assert err.startswith("policyloss: ")
    return err


def test_presets_lists_every_preset_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "presets").splitlines()
    assert [line.split()[0] for line in lines] == list(pl.presets())
    assert next(line for line in lines if line.startswith("luspo")).endswith("arXiv 2602.05261")


def test_presets_as_json_read_back_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(printed(capsys, "presets", "--json"))
    assert {row["name"]: pl.LossSpec.from_dict(row["spec"]) for row in rows} == {
        n: pl.preset(n) for n in pl.presets()
    }


def test_explain_prints_the_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "explain", "dapo") == str(pl.explain("dapo")) + "\n"
    assert json.loads(printed(capsys, "explain", "dapo", "--json")) == json.loads(
        json.dumps(pl.explain("dapo").to_dict())
    )


def test_explain_trl_reads_a_grpo_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"loss_type": "cispo", "epsilon_high": 5.0, "learning_rate": 1e-6}))
    text = printed(capsys, "explain-trl", str(path))
    assert "epsilon_high=5.0: the largest ratio itself" in text
    spec = pl.LossSpec.from_dict(json.loads(printed(capsys, "explain-trl", str(path), "--json")))
    assert spec.trust == pl.DetachedClip(0.0, 5.0)
    path.write_text(json.dumps({"loss_type": "cispoo"}))
    assert "did you mean 'cispo'?" in complaint(capsys, "explain-trl", str(path))
    path.write_text(json.dumps({"epsilon_hgih": 0.28}))
    assert "'epsilon_hgih'; did you mean 'epsilon_high'?" in complaint(
        capsys, "explain-trl", str(path)
    )
    path.write_text("[1]")
    assert "one JSON object" in complaint(capsys, "explain-trl", str(path))
    assert "No such file" in complaint(capsys, "explain-trl", str(tmp_path / "none.json"))


def test_the_output_of_explain_trl_can_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config's KL has TRL's own rounding, so the spec holds a part
    of `policyloss.compat.trl`.
    """
    config, spec = tmp_path / "config.json", tmp_path / "spec.json"
    config.write_text(json.dumps({"loss_type": "vespo", "beta": 0.04}))
    spec.write_text(printed(capsys, "explain-trl", str(config), "--json"))
    assert json.loads(spec.read_text())["kl"]["type"] == "trl.WrittenKL"
    text = printed(capsys, "explain", str(spec))
    assert "kl = (exp(d) - d - 1) * exp(logp - old_logp)" in text
    assert "times the token's own ratio" in text


def test_diff_prints_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "diff", "ppo", "dapo") == str(pl.diff("ppo", "dapo")) + "\n"
    changes = json.loads(printed(capsys, "diff", "ppo", "dapo", "--json"))["changes"]
    assert [c["slot"] for c in changes] == ["trust"]
    assert changes[0]["fields"] == [{"field": "eps_high", "a": 0.2, "b": 0.28}]


def test_a_loss_can_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = pl.preset("dapo").replace(trust=pl.Clip(0.1, float("inf")))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(spec.to_dict()))
    stored = pl.LossSpec.from_dict(spec.to_dict())  # it no longer holds the preset it began with
    assert printed(capsys, "explain", str(path)) == str(pl.explain(stored)) + "\n"
    assert "eps_low: 0.2 -> 0.1" in printed(capsys, "diff", "dapo", str(path))
    assert (
        json.loads(printed(capsys, "diff", "dapo", str(path), "--json"))["changes"][0]["fields"][1][
            "b"
        ]
        == "inf"
    )


def test_a_wrong_name_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'dapo'?" in complaint(capsys, "explain", "dappo")
    assert "unknown preset 'gspoo'" in complaint(capsys, "diff", "ppo", "gspoo")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "data must be a mapping, as LossSpec.to_dict makes it, got list"),
        ('{"trust": {"type": "Clip", "eps_high": 0.2}}', "Clip needs eps_low"),
        ('{"trusts": {}}', "unknown slot 'trusts'"),
        ('{"trust": {"type": "Clip", "eps_low": -1, "eps_high": 1}}', "eps_low must be >= 0"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert words in complaint(capsys, "explain", str(path))


def test_a_missing_or_binary_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in complaint(capsys, "explain", str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "is not JSON" in complaint(capsys, "explain", str(tmp_path / "binary.json"))


def test_the_version_and_words_that_are_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"policyloss {pl.__version__}\n"
    assert "unknown command 'trian'; did you mean 'train'?" in complaint(capsys, "trian")
    assert "unrecognized arguments: -x. See policyloss --help." in complaint(capsys, "-x")


def command(
    *argv: str, stdout: int = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, **environment}
    whole = [sys.executable, "-m", "policyloss", *argv]
    return subprocess.run(
        whole, stdout=stdout, stderr=subprocess.PIPE, env=env, timeout=120, check=False
    )


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = command("presets", stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_that_cannot_show_a_letter_gets_a_question_mark() -> None:
    done = command("explain", "clip_cov", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"draw(seed, ?)" in done.stdout


ROOT = Path(__file__).parents[2]


def extras(folder: Path) -> set[str]:
    """The extras of a pyproject.toml: the names in its section of optional dependencies.
    (Python 3.10 has no tomllib.)
    """
    text = (folder / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", section, flags=re.M))


def test_a_command_of_a_package_that_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.EXTRAS.keys() == all_commands().keys() - cli.OWN.keys()
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    monkeypatch.setattr(cli, "all_commands", cli.all_commands.__wrapped__)
    for command, extra in cli.EXTRAS.items():
        text = complaint(capsys, command)
        assert f"{command} needs another package; pip install 'policyloss[{extra}]'." in text
        assert extra in extras(ROOT)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "Needs pip install 'policyloss[train]'." in capsys.readouterr().out


def test_every_extra_that_the_packages_name_exists() -> None:
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    pairs = {
        pair for source in sources for pair in re.findall(r"(policyloss[\w-]*)\[([\w-]+)\]", source)
    }
    assert ("policyloss", "train") in pairs
    for package, extra in pairs:
        folder = ROOT if package == "policyloss" else ROOT / "packages" / package.replace("-", "_")
        assert extra in extras(folder)
