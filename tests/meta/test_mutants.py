"""The tests can fail: each one-line mistake of `mutants.py` is caught by the test it names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import accumulate as running_total
from types import ModuleType

import pytest
from mutants import CLEAN, MUTANTS, SOURCE, TESTS, places_of

from policyloss.functional import correction as functional_correction
from policyloss.parts import aggregate, correction, kl, ratio, trust

GROUPS = 6
HANGS_S = 1500  # a group takes three minutes of an idle core, and more on a busy or slow one


def exit_codes(names: list[str]) -> dict[str, int]:
    """The exit code of each mutant's test, from one process for all of them."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers/mutants.py"), *names],
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        timeout=HANGS_S,
    )
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    assert list(codes) == names
    return codes


@pytest.mark.slow
def test_the_named_tests_pass_on_an_unchanged_copy():
    assert exit_codes([CLEAN]) == {CLEAN: 0}


@pytest.mark.slow
@pytest.mark.parametrize("group", range(GROUPS))
def test_every_mutant_dies(group):
    mutants = MUTANTS[group::GROUPS]
    codes = exit_codes([m.name for m in mutants])
    survivors = [
        f"{m.name}: {m.test} did not fail on {m.new!r} in {m.file} (exit code {codes[m.name]})"
        for m in mutants
    ]
    survivors = [line for m, line in zip(mutants, survivors, strict=True) if codes[m.name] != 1]
    assert not survivors, "\n".join(survivors)


def spans_of(file: str, names: set[str]) -> dict[str, tuple[int, int]]:
    """Where each of the named classes and functions of a file begins and ends,
    as positions in its text.
    """
    text = (SOURCE / file).read_text(encoding="utf-8")
    begins = [0, *running_total(len(line) for line in text.splitlines(keepends=True))]
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    return {
        n.name: (begins[n.lineno - 1], begins[n.end_lineno or n.lineno])
        for n in nodes
        if n.name in names
    }


def public_functions(module: ModuleType) -> set[str]:
    """The functions that a module defines and does not hide."""
    return {
        n
        for n, f in vars(module).items()
        if getattr(f, "__module__", "") == module.__name__ and not n.startswith("_")
    }


VARIANTS = [part for slot in (ratio, trust, correction, kl, aggregate) for part in slot.VARIANTS]
FILES = {
    part.__name__: f"policyloss/parts/{part.__module__.split('.')[-1]}.py" for part in VARIANTS
}
SLOTS = {file: {name for name, home in FILES.items() if home == file} for file in FILES.values()}
DEMANDED = {**SLOTS, "policyloss/functional/correction.py": public_functions(functional_correction)}


@pytest.mark.parametrize("file", DEMANDED)
def test_every_part_has_a_mutant(file):
    """A part without one could be wrong unnoticed: somewhere inside its own lines a mistake must
    make a test fail.
    """
    text = (SOURCE / file).read_text(encoding="utf-8")
    places = [places_of(m, text)[0][0] for m in MUTANTS if m.file == file]
    spans = spans_of(file, DEMANDED[file])
    assert spans.keys() == DEMANDED[file]
    assert {
        name for name, (start, stop) in spans.items() if not any(start <= p < stop for p in places)
    } == set()


def test_mutants_are_up_to_date():
    """Each occurs once in the current source, and has its own name."""
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 18
    sources = {m.file: (SOURCE / m.file).read_text(encoding="utf-8") for m in MUTANTS}
    counts = {m.name: len(places_of(m, sources[m.file])) for m in MUTANTS}
    assert {name: n for name, n in counts.items() if n != 1} == {}
    assert all(
        m.old != m.new and "\n" not in m.old.rstrip("\n") + m.new.rstrip("\n") for m in MUTANTS
    )
