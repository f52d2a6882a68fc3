"""A test run ends with its duration and the tests that it left out."""

from __future__ import annotations

from summary import summary

MARKERS = ["slow: trains; `make test-slow` runs them", "docs: reads pages", "hypothesis: random"]


def test_time_skips_and_deselected_tests_are_a_line_each() -> None:
    skips = ["Skipped: needs a GPU", "Skipped: no Chromium", "Skipped: needs a GPU"]
    assert summary(254.6, skips, MARKERS, "not slow and not docs") == [
        "Took 4 min 15 s",
        "Skipped 2: needs a GPU",
        "Skipped 1: no Chromium",
        "Left out slow: trains; `make test-slow` runs them",
        "Left out docs: reads pages",
    ]


def test_nothing_is_left_out_of_a_run_of_everything() -> None:
    assert summary(9, [], MARKERS, "slow or hypothesis") == ["Took 0 min 9 s"]
