"""A callback that diagnoses the log of a trainer during the run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from policyloss_lab.diagnosis.run_doctor import LogWatch
from policyloss_lab.diagnosis.symptoms import Finding


@cache
def _callback_class() -> type:
    """`DoctorCallback`, a `TrainerCallback` of transformers, which TRL's trainers take."""
    base: Any = import_module("transformers").TrainerCallback

    class DoctorCallback(base):  # type: ignore[misc]  # its base is known only at run time
        """Warns once of each symptom. every: the number of logged steps between two diagnoses."""

        def __init__(self, every: int = 10) -> None:
            self.watch = LogWatch(every)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            """Add the logged numbers, and diagnose them if it is time."""
            _warn(self.watch.read(state.global_step, logs or {}))

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Diagnose the complete log."""
            _warn(self.watch.look())

    return DoctorCallback


def _warn(findings: Sequence[Finding]) -> None:
    for finding in findings:
        warnings.warn(f"{finding.cause}: {finding.evidence}. {finding.remedy}", stacklevel=3)


def __getattr__(name: str) -> Any:
    if name == "DoctorCallback":
        return _callback_class()
    raise AttributeError(f"policyloss_lab.trl has no {name!r}; there is DoctorCallback.")
