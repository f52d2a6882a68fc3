"""`doctor_run`: names the symptoms in the logs of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policyloss import notebook
from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.diagnosis.curves import Curve, Log, LogThresholds
from policyloss_lab.diagnosis.symptoms import Finding, find_symptoms
from policyloss_lab.logs.names import TITLES, canonical, step_of
from policyloss_lab.logs.scalars import rows_of
from policyloss_lab.logs.trackers import Row
from policyloss_lab.reading import open_file, parse_object


@dataclass(frozen=True)
class RunDiagnosis:
    """The result of `doctor_run`: the symptoms in the log of a run.

    findings: sorted, causes before effects. steps: how many were examined. metrics: the names of
    the curves that were recognised.
    """

    findings: tuple[Finding, ...]
    steps: int
    metrics: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is no symptom."""
        return not self.findings

    @property
    def missing(self) -> tuple[str, ...]:
        """The usual curves that the log lacks; those of a critic only if the log has any."""
        critic = {"value_loss", "value_mean", "value_explained"} & set(self.metrics)
        usual = (name for name in TITLES if critic or not name.startswith("value"))
        return tuple(name for name in usual if name not in self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain data."""
        names = {"metrics": list(self.metrics), "missing": list(self.missing)}
        return {"findings": [f._asdict() for f in self.findings], "steps": self.steps, **names}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        lines = [self._title()] + [
            f"  {f.severity}: {f.cause} from step {f.step}: {f.evidence}. Remedy: {f.remedy}"
            for f in self.findings
        ]
        curves = {"Checked": self.metrics, "Not in the log, so not checked": self.missing}
        for words, names in curves.items():
            lines.append(f"  {words}: {', '.join(TITLES[name] for name in names) or 'nothing'}.")
        return "\n".join(lines)

    def _title(self) -> str:
        count = len(self.findings)
        title = f"{count} symptom{'s' if count > 1 else ''}" if count else "healthy: no symptom"
        return f"{title} in {self.steps} steps"

    def _repr_html_(self) -> str:
        rows = [(f.severity, f.cause, f.step, f.evidence, f.remedy) for f in self.findings]
        head = ("severity", "symptom", "from step", "evidence", "remedy")
        return notebook.heading(self._title()) + notebook.table(head, rows)


def doctor_run(path: str | Path, thresholds: LogThresholds | None = None) -> RunDiagnosis:
    """Diagnose a run by its logs, a file or folder (formats and symptoms: docs/doctor.md)."""
    return diagnose_rows(read_log(path), thresholds, _rollouts(Path(path)))


def diagnose_rows(
    rows: Sequence[Mapping[str, float]],
    thresholds: LogThresholds | None = None,
    rollouts: Sequence[Mapping[str, Any]] = (),
) -> RunDiagnosis:
    """Diagnose rows of numbers, each with its step."""
    limits = thresholds or LogThresholds()
    curves: dict[str, Curve] = {}
    raw: dict[str, Curve] = {}
    for row in rows:
        step = step_of(row)
        if step is None or step < 0:
            continue
        for name, value in canonical(row).items():
            curves.setdefault(name, []).append((step, value))
        for name, value in row.items():
            raw.setdefault(name, []).append((step, float(value)))
    log = Log(curves, raw, rollouts, limits)
    findings = find_symptoms(log)
    if not curves and not findings:
        raise InputError(
            "these logs have no known metric; they need at least one of reward, entropy, "
            "grad_norm, length, clip fractions or KL."
        )
    if log.steps < limits.least_steps and not findings:
        raise InputError(
            f"a verdict needs at least {limits.least_steps} steps, and this log has {log.steps}."
        )
    return RunDiagnosis(tuple(findings), log.steps or len(rows), tuple(sorted(curves)))


def _rollouts(path: Path) -> list[dict[str, Any]]:
    """The stored completions of a run directory of ours; [] if there are none."""
    path = (path if path.is_dir() else path.parent) / "rollouts.jsonl"
    try:
        with open_file(path, limits.ROLLOUT_BYTES) as file:
            return [row for line in file if (row := parse_object(line)) is not None]
    except (InputError, OSError):
        return []


def read_log(path: str | Path) -> list[Row]:
    """One row of numbers for each step, in order; an `InputError` if `path` is not a log.

    path: a run directory of ours or of TRL, or a file: metrics.jsonl, trainer_state.json, verl's
    JSONL or console output, TensorBoard events, a CSV export of W&B or trackio.
    """
    merged: dict[int, Row] = {}
    for file in _log_files(Path(path)):
        first: str | None = None
        try:
            with open_file(file, limits.LOG_BYTES) as handle:
                for run, step, row in rows_of(handle, str(file)):
                    if first not in (None, run):
                        both = f"{first!r} and {run!r}"
                        raise InputError(
                            f"{file}: the table holds the runs {both}; export one run."
                        )
                    first = run
                    merged.setdefault(step, {"step": float(step)}).update(row)
                    if len(merged) > limits.LOG_STEPS:
                        most = f"{limits.LOG_STEPS:,} steps"
                        raise InputError(f"{file} holds more than {most}; give a part of it.")
        except OSError as error:
            raise InputError(f"{file} cannot be read: {type(error).__name__}.") from error
    if not merged:
        raise InputError(f"{path} has no row with a step and numbers; it is not the log of a run.")
    return [merged[step] for step in sorted(merged)]


def _log_files(path: Path) -> list[Path]:
    """The log of a directory; TensorBoard writes one file for each start of a run."""
    if not path.is_dir():
        return [path]
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    for file in (path / "metrics.jsonl", path / "trainer_state.json", *states[-1:]):
        if file.exists():
            return [file]
    if events := sorted(path.glob("events.out.tfevents*")):
        return events
    raise InputError(
        f"{path} holds neither metrics.jsonl, trainer_state.json nor TensorBoard events."
    )
