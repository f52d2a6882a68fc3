"""A command that only prints starts as fast as Python does, and all helps have one layout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

import policyloss as pl
from policyloss.choose import read_losses
from policyloss.cli import all_commands, main
from policyloss.commands import OPTIONS, flag

PRINTED = (
    [],
    ["--help"],
    ["--version"],
    ["presets"],
    ["presets", "--json"],
    ["choose"],
    ["choose", "--json", "--model", "moe", "--updates", "stale"],
    ["trian"],
    ["choose", "--model", "sparse"],
    *([name, "--help"] for name in all_commands()),
)
WITHOUT_TORCH = """
import json, sys
from policyloss.cli import main
with_torch = []
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit:
        pass
    if "torch" in sys.modules:
        with_torch.append(words)
print(json.dumps(with_torch[:1]))
"""


def python(*words: str) -> tuple[str, float]:
    """The output of a fresh Python, and the seconds of processor time that it took."""
    before = os.times()
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    after = os.times()
    spent = after.children_user + after.children_system
    return done.stdout, spent - before.children_user - before.children_system


def test_neither_a_help_nor_a_list_imports_torch() -> None:
    out, _ = python("-c", WITHOUT_TORCH, json.dumps(PRINTED))
    assert json.loads(out.splitlines()[-1]) == []


def test_a_list_is_printed_about_as_soon_as_python_starts() -> None:
    """0.09 s of processor time where this was written, and 0.02 s for Python alone. An import of
    torch takes more than a second.
    """
    _, bare = python("-c", "pass")
    out, seconds = python("-m", "policyloss", "presets")
    assert out.startswith("ppo ")
    assert seconds - bare < 0.4


def test_the_stored_losses_are_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    stored = read_losses()["presets"]
    assert list(stored) == list(pl.presets())
    for name, row in stored.items():
        explained = pl.explain(name)
        assert (row["title"], row["paper"]) == (explained.title, explained.paper), name
        assert pl.LossSpec.from_dict(row["spec"]) == pl.preset(name), name
        assert row["advantages"] == explained.advantages, name
    for code, row in read_losses()["chosen"].items():
        spec = eval(code, {"pl": pl})
        assert (pl.LossSpec.from_dict(row["spec"]), row["reads"]) == (spec, list(spec.reads)), code


def test_the_command_alone_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for words in ([], ["--help"], ["-h"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]
    listed = re.findall(r"^  ([a-z][\w-]*) ", texts[0], re.MULTILINE)
    assert listed == list(all_commands())


def test_every_help_has_the_same_layout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A usage line, a sentence, the arguments, then the options with their meaning and default."""
    monkeypatch.setenv("COLUMNS", "300")
    wrong = {}
    for name, command in all_commands().items():
        assert main([name, "--help"]) == 0
        text = capsys.readouterr().out
        usage, about, *blocks = text.split("\n\n")
        titles = [block.partition(":\n")[0] for block in blocks]
        shown = "".join(text.split())  # a line may end after a hyphen
        places = [a for a in command.arguments if a.place]
        groups = list(dict.fromkeys(a.title for a in command.arguments if not a.place))
        groups = ["arguments"] * bool(places) + [t for t in groups if t != OPTIONS] + [OPTIONS]
        faults = {
            "usage": not usage.startswith(f"usage: policyloss {name} ")
            or not usage.endswith("[options]")
            or not all(a.place in usage for a in places),
            "sentence": " ".join(about.split()) != command.about or about[-1] != ".",
            "groups": titles != groups,
            "width": max(map(len, text.splitlines())) > 100,
            **{
                a.name: "".join(
                    (a.meaning + (f"(default:{x})" if (x := a.shown_default) else "")).split()
                )
                not in shown
                or not a.meaning.endswith(".")
                or (a.place or flag(a.name)) not in shown
                for a in command.arguments
            },
        }
        if any(faults.values()):
            wrong[name] = [fault for fault, is_there in faults.items() if is_there]
    assert wrong == {}
