"""`LogWatch`: reads the rows of a log as they are written, and names each symptom once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.diagnosis.logs.run_doctor import diagnose_rows
from policyloss_lab.diagnosis.logs.symptoms import Finding


class LogWatch:
    """every: how many rows lie between two looks."""

    def __init__(self, every: int = 10) -> None:
        self.every = every
        self.rows: list[dict[str, float]] = []
        self.named: set[str] = set()

    def read(self, step: int, row: Mapping[str, Any]) -> list[Finding]:
        """Keep the numbers of a row, and look at all rows now and then: what was not named yet."""
        numbers = {name: x for name, x in row.items() if isinstance(x, (int, float))}
        self.rows.append({**numbers, "step": step})
        return self.look() if len(self.rows) % self.every == 0 else []

    def look(self) -> list[Finding]:
        """The symptoms of all rows that were not named before; none while rows are too few."""
        try:
            verdict = diagnose_rows(self.rows)
        except InputError:
            return []
        new = [finding for finding in verdict.findings if finding.cause not in self.named]
        self.named.update(finding.cause for finding in new)
        return new
