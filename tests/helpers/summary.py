"""The last lines of a test run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def summary(
    seconds: float, skips: Iterable[str], markers: Iterable[str], expression: str
) -> list[str]:
    """The duration of the run and, one line each, the tests that did not run with the reason.

    skips: the reason of each skipped test. markers: each with its meaning, as pyproject.toml lists
    them. expression: of `pytest -m`.
    """
    minutes, rest = divmod(round(seconds), 60)
    reasons = Counter(reason.removeprefix("Skipped: ") for reason in skips).most_common()
    left_out = [m for m in markers if f"not {m.partition(':')[0]}" in expression]
    return [
        f"Took {minutes} min {rest} s",
        *(f"Skipped {count}: {reason}" for reason, count in reasons),
        *(f"Left out {marker}" for marker in left_out),
    ]
