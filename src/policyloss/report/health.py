"""What the doctor says of the curves of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policyloss.doctor.logs.run_doctor import diagnose_rows
from policyloss.errors import InputError


def symptoms(metrics: Mapping[str, Mapping[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    """[{"cause", "step", "evidence", "remedy"}] of series as `Table.series` gives them; [] if there
    is none, or the run has too few steps to tell.
    """
    rows: dict[int, dict[str, float]] = {}
    for name, curve in metrics.items():
        for step, value in zip(curve["step"], curve["value"], strict=True):
            row = rows.setdefault(step, {"step": float(step)})
            row[name] = math.nan if value is None else float(value)
    try:
        verdict = diagnose_rows([rows[step] for step in sorted(rows)])
    except InputError:
        return []
    return [finding._asdict() for finding in verdict.findings]
