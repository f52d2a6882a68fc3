"""The run of the frameworks' own tests: calls are noted, results are spoiled,
and tests that notice are counted.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from conformance import upstream
from conformance.environments import PEERS
from conformance.upstream import Reached, drop_ins, run_tests, spoil


def test_every_number_is_spoiled_wherever_it_is() -> None:
    x = torch.tensor([0.0, 2.0])
    loss, metrics, mask, none = spoil(
        (x, {"kl": 1.0, "name": "k3"}, torch.tensor([True, False]), None)
    )
    assert loss.tolist() == [0.25, 3.25]  # x·1.5 + 0.25, so that a 0 changes too
    assert metrics == {"kl": 1.75, "name": "k3"}
    assert mask.tolist() == [False, True]
    assert none is None
    assert spoil(torch.tensor([3])).tolist() == [4]


def test_calls_are_recorded_and_only_the_chosen_one_is_spoiled() -> None:
    reached = Reached(test="a")
    double, half = (
        reached.watch(name, function)
        for name, function in (("double", lambda x: 2 * x), ("half", lambda x: x / 2))
    )
    assert (double(1.0), half(1.0)) == (2.0, 0.5)
    reached.test, reached.spoiled = "b", "half"
    assert (double(1.0), half(1.0)) == (2.0, 1.0)
    assert reached.tests == {"double": {"a", "b"}, "half": {"a", "b"}}


def test_the_drop_ins_are_all_that_stand_in_for_something() -> None:
    assert set(drop_ins(PEERS["openrlhf"])) == {
        "PolicyLoss",
        "ValueLoss",
        "aggregate_loss",
        "compute_approx_kl",
    }
    of_verl = drop_ins(PEERS["verl"])
    assert {
        "compute_policy_loss",
        "agg_loss",
        "compute_gae_advantage_return",
        "compute_rollout_rejection_mask",
    } <= set(of_verl)
    assert not {"register", "install", "check_config", "POLICY_LOSSES"} & set(of_verl)


def test_a_test_that_checks_the_result_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "test_it.py").write_text(
        textwrap.dedent("""
            def double(x): return 2 * x
            def test_looks(): assert double(1.0) == 2.0
            def test_looks_away(): double(1.0)
            def test_something_else(): pass
        """)
    )
    (folder / "test_missing.py").write_text("import no_such_package\n")
    monkeypatch.setattr(upstream, "tests_folder", lambda: folder)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    reached = Reached()
    ours = reached.watch("double", lambda x: 2 * x)

    def place() -> None:
        sys.modules["tests.test_it"].double = ours  # type: ignore[attr-defined]

    try:
        plain = run_tests([str(folder)], reached, place)
        assert {name.split("::")[1] for name in plain.passed} == {
            "test_looks",
            "test_looks_away",
            "test_something_else",
        }
        assert [Path(path).name for path in plain.unimported] == ["test_missing.py"]
        assert {name.split("::")[1] for name in reached.tests["double"]} == {
            "test_looks",
            "test_looks_away",
        }
        assert upstream.noticed(reached, "double", place) == 1
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
