"""The catalogue of losses: no compared function and no trainer is missing."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from conformance import public_controls, public_losses
from conformance.public_results import compare_all
from docs.catalogue_page import catalogue_page
from docs.catalogue_rows import COMPARED, HELPERS, REASONS, RUN
from docs.conformance_page import CALLED

from policyloss.explanations.framework_names import ELSEWHERE

pytestmark = pytest.mark.docs
RESULTS = Path(__file__).parents[2] / "conformance" / "results"
FILES = DROP_INS, PUBLIC, ENGINES = tuple(
    RESULTS / f"{name}.json" for name in ("conformance", "public", "engines")
)
TRAINERS = (
    *("TRL", "verl", "OpenRLHF", "SkyRL", "NeMo-RL", "AReaL", "slime", "miles", "prime-rl"),
    *("ROLL", "ms-swift", "Trinity-RFT", "ART", "Tinker", "torchtitan", "Liger", "Unsloth"),
)


def test_every_compared_function_is_a_loss_of_the_page_or_a_helper() -> None:
    for result in json.loads(DROP_INS.read_text(encoding="utf-8"))["results"]:
        peer = result["peer"]
        names = {f["name"] for f in result["functions"]}
        assert names - COMPARED[peer].keys() - HELPERS.get(peer, set()) == set(), peer


def test_every_function_of_an_engine_has_a_row_with_the_spec_that_was_run() -> None:
    ran = catalogue_page(*FILES).split("## Run: functions from files")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in ran.splitlines() if line.startswith("| ")]
    for result in json.loads(ENGINES.read_text(encoding="utf-8"))["results"]:
        peer = import_module(f"conformance.peers.{result['peer']}")
        assert list(peer.SPECS) == [function.name for function in peer.FUNCTIONS]
        for f in result["functions"]:
            (row,) = (r for r in rows if r[:2] == [CALLED[result["peer"]], f["name"]])
            assert row[3:5] == [result["release"], str(f["cases"])]
            assert ("(float32)" in row[5]) == (not f["worst"]["float64"])


def test_the_entries_that_were_run_exist() -> None:
    """A framework of which every entry was run needs no reason."""
    entries = {
        (framework, entry.what)
        for entry in ELSEWHERE
        if entry.part == "surrogate"
        for names in entry.names
        for framework in names.split(", ")
    }
    assert entries >= RUN
    unnamed = {name for name, _ in entries - RUN} - REASONS.keys()
    assert unnamed == {"TRL", "verl", "OpenRLHF", "ColossalChat"}  # the first table has them


def test_every_row_has_cases_or_a_reason() -> None:
    page = catalogue_page(*FILES)
    ran, read = page.split("## Read, not run")
    rows = [line.split(" | ") for line in ran.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0] not in ("| framework", "| ---")]
    assert len(rows) > 120
    assert all(int(row[4]) > 0 for row in rows)
    for line in (line for line in read.splitlines() if line.startswith("| ")):
        assert all(cell.strip() for cell in line.strip("|").split(" | ")), line
    assert [name for name in TRAINERS if f"| {name} |" not in page] == []


def test_the_recorded_differences_are_those_of_the_library() -> None:
    """The last digits depend on the processor."""
    written = json.loads(PUBLIC.read_text(encoding="utf-8"))
    assert written.keys() >= {*public_losses.SPECS, *public_controls.FUNCTIONS}
    found = compare_all()
    assert found.keys() == written.keys()
    for key, result in written.items():
        assert found[key]["cases"] == result["cases"]
        for kind in ("values", "gradients"):
            pair = found[key][kind], result[kind]
            assert pair == (None, None) or abs(pair[0] - pair[1]) < 1e-5, key
