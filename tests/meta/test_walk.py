"""A walk runs every case, and names each that fails."""

from __future__ import annotations

import pytest
import walk
from walk import walked


@pytest.fixture(autouse=True)
def all_failures(monkeypatch):
    """Also where these tests run with `-x`."""
    monkeypatch.setattr(walk, "only_first", False)


def failure_of(test) -> str:
    with pytest.raises(pytest.fail.Exception) as caught:
        test()
    return str(caught.value)


def test_every_failing_case_is_reported_by_its_name_with_its_traceback():
    seen = []

    @walked("flag", [True, False])
    @walked(("name", "number"), [("low", 1), ("high", 3), ("odd", 5)])
    def test(name, number, flag):
        seen.append((name, number, flag))
        assert number < 3 or not flag, f"{number} is too large"

    text = failure_of(test)
    assert len(seen) == len(set(seen)) == 6
    assert text.startswith("2 of 6 cases failed\n")
    for name, number in (("high", 3), ("odd", 5)):
        assert f"[{name}-{number}-True]\nTraceback" in text
        assert f"AssertionError: {number} is too large" in text
    assert "[low-1-True]" not in text
    assert "[odd-5-False]" not in text


@pytest.mark.parametrize(
    "ends",
    [pytest.fail, pytest.skip, lambda case: pytest.raises(KeyError).__exit__(None, None, None)],
)
def test_no_case_ends_a_walk(ends):
    """Neither a skip nor a `pytest.raises` without an error, which are not of type `Exception`."""
    seen = []

    @walked("case", ["a", "b"])
    def test(case):
        seen.append(case)
        ends(case)

    assert failure_of(test).startswith("2 of 2 cases failed\n[a]\n")
    assert seen == ["a", "b"]


def test_a_walk_ends_at_its_first_failure_where_pytest_does(monkeypatch):
    monkeypatch.setattr(walk, "only_first", True)

    @walked("case", ["a", "b", "c"])
    def test(case):
        assert case == "a"

    text = failure_of(test)
    assert text.startswith("1 of 3 cases failed\n[b]\n")
    assert "[c]" not in text


def test_a_walk_without_a_case_fails():
    @walked("case", [])
    def test(case):
        pass

    with pytest.raises(AssertionError, match="no case"):
        test()


@walked("case", [{"a": 1}, {"a": 2}], ids=["one", "two"])
def test_fixtures_reach_every_case(case, tmp_path, request):
    assert tmp_path.is_dir()
    assert request.node.name == "test_fixtures_reach_every_case"


def test_names_are_given_by_a_function_or_a_list():
    def test(case):
        raise ValueError

    for ids in (["one", "two"], {1: "one", 2: "two"}.get):
        text = failure_of(walked("case", [1, 2], ids=ids)(test))
        assert "[one]" in text
        assert "[two]" in text
