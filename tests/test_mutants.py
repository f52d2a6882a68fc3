"""The tests can fail: each one-line mistake of `mutants.py` is caught by the test it names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mutants import CLEAN, MUTANTS, PACKAGE, TESTS

GROUPS = 3


def exit_codes(names: list[str]) -> dict[str, int]:
    """The exit code of each mutant's test, from one process for all of them."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "mutants.py"), *names], capture_output=True, text=True, cwd=TESTS.parent, timeout=300
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert list(codes) == names
    return codes


def test_the_named_tests_pass_on_an_unchanged_copy():
    assert exit_codes([CLEAN]) == {CLEAN: 0}


@pytest.mark.parametrize("group", range(GROUPS))
def test_every_mutant_dies(group):
    mutants = MUTANTS[group::GROUPS]
    codes = exit_codes([m.name for m in mutants])
    survivors = [f"{m.name}: {m.test} did not fail on {m.new!r} in {m.file} (exit code {codes[m.name]})" for m in mutants]
    survivors = [line for m, line in zip(mutants, survivors, strict=True) if codes[m.name] != 1]
    assert not survivors, "\n".join(survivors)


def test_mutants_are_up_to_date():
    """Each stands once in today's source, on one line, under its own name."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 18
    found = {m.name: (PACKAGE / m.file).read_text(encoding="utf-8").count(m.old) for m in MUTANTS}
    assert {name: n for name, n in found.items() if n != 1} == {}
    assert all(m.old != m.new and "\n" not in m.old.rstrip("\n") + m.new.rstrip("\n") for m in MUTANTS)
