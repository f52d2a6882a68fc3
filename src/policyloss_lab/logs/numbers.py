"""What counts as a number in a log."""

from __future__ import annotations


def number_of(value: object) -> float | None:
    """A JSON number, or the text of one, as a float; None for everything else."""
    if isinstance(value, (float, int)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        return float(value)
    except ValueError:
        return None
