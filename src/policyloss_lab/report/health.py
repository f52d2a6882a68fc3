"""What the doctor says of the curves of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.diagnosis.logs.run_doctor import diagnose_rows


def health_of(
    metrics: Mapping[str, Mapping[str, Sequence[Any]]], rollouts: Sequence[Mapping[str, Any]]
) -> tuple[int, list[dict[str, Any]]]:
    """(how many steps were judged, 0 if too few to tell; [{"cause", "step", "evidence",
    "remedy"}]) of series as `Table.series` gives them.
    """
    rows: dict[int, dict[str, float]] = {}
    for name, curve in metrics.items():
        for step, value in zip(curve["step"], curve["value"], strict=True):
            row = rows.setdefault(step, {"step": float(step)})
            row[name] = math.nan if value is None else float(value)
    try:
        verdict = diagnose_rows([rows[step] for step in sorted(rows)], rollouts=rollouts)
    except InputError:
        return 0, []
    return verdict.steps, [finding._asdict() for finding in verdict.findings]
