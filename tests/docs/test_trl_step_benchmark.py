"""The benchmark of TRL's step: its errors, the summary of its turns, and the table of its JSON."""

from __future__ import annotations

import pytest
from benchmarks import trl_step

from docs import performance_page

THEIRS, OURS = trl_step.ARMS


def turn(theirs: float, ours: float) -> dict[str, dict[str, float]]:
    """One step of each arm, of so many seconds; the peaks are in the same ratio."""
    return {
        arm: {"seconds": seconds, "peak_bytes": 1e9 * seconds, "loss": 0.5, "norm": 2.0}
        for arm, seconds in ((THEIRS, theirs), (OURS, ours))
    }


def test_ratios_compare_runs_of_one_turn() -> None:
    """Turns of 4 : 2, 9 : 3 and 10 : 1 are 2, 3 and 10 times as fast; the median of the first arm
    over that of the second would be 9 / 2.
    """
    row = trl_step.summary([turn(4, 2), turn(9, 3), turn(10, 1)])
    assert row["faster"] == 3
    assert row["median_s"] == {THEIRS: 9, OURS: 2}
    assert row["of_memory"] == pytest.approx(0.3)


@pytest.mark.parametrize("name", ["loss", "norm"])
def test_arms_that_differ_are_not_timed(name: str) -> None:
    first = turn(1, 1)
    trl_step.check(first)
    first[OURS][name] += 1e-3
    with pytest.raises(RuntimeError, match=f"{name}: .* nothing is timed"):
        trl_step.check(first)


def test_the_page_shows_both_arms() -> None:
    run = {
        "environment": {"gpu": None, "torch": "2", "cores": 2, "threads": 1, "machine": "x"},
        "sizes": {"tiny": {"size": [60, 8, 4, 16], **trl_step.summary([turn(4, 1)])}},
    }
    page = performance_page.performance_page({"trl_step_cpu": run})
    assert "| tiny, 64 tokens | 4 s, 3.7 GiB | 1 s, 0.9 GiB | 4.00 | 0.25 |" in page
