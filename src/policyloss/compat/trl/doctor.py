"""A callback that reads what a trainer logs, and says what is wrong with the run while it runs."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from typing import Any

from policyloss.doctor.logs.run_doctor import diagnose_rows
from policyloss.errors import InputError


@cache
def callback_class() -> type:
    """`DoctorCallback`, a `TrainerCallback` of transformers, which TRL's trainers take."""
    base: Any = import_module("transformers").TrainerCallback

    class DoctorCallback(base):  # type: ignore[misc]  # a class that is known at run time
        """Warns once of each symptom. every: how many logged steps lie between two looks."""

        def __init__(self, every: int = 10) -> None:
            self.every = every
            self.rows: list[dict[str, float]] = []
            self.named: set[str] = set()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
        ) -> None:
            """Keep the numbers, and look at all of them now and then."""
            numbers = {k: v for k, v in (logs or {}).items() if isinstance(v, (int, float))}
            self.rows.append({**numbers, "step": state.global_step})
            if len(self.rows) % self.every == 0:
                self.look()

        def on_train_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            """A last look."""
            self.look()

        def look(self) -> None:
            """Warn of symptoms that were not named before."""
            try:
                verdict = diagnose_rows(self.rows)
            except InputError:  # too few steps yet
                return
            for finding in verdict.findings:
                if finding.cause not in self.named:
                    self.named.add(finding.cause)
                    text = f"{finding.cause}: {finding.evidence}. {finding.remedy}"
                    warnings.warn(text, stacklevel=2)

    return DoctorCallback
