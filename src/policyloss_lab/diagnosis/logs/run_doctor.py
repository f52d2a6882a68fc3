"""`doctor_run`: what the logs of a run say is wrong, as a `RunDiagnosis`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policyloss import notebook
from policyloss.errors import InputError
from policyloss_lab.diagnosis.logs.curves import Curve, Log, LogThresholds
from policyloss_lab.diagnosis.logs.read import read_log
from policyloss_lab.diagnosis.logs.symptoms import DETECTORS, Finding, not_finite
from policyloss_lab.logs.names import NAMES, canonical, step_of

ROLLOUT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class RunDiagnosis:
    """findings: what is wrong, causes before what they may lead to. steps: how many were judged.
    metrics: the curves that were recognised.
    """

    findings: tuple[Finding, ...]
    steps: int
    metrics: tuple[str, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        rows = [finding._asdict() for finding in self.findings]
        return {"findings": rows, "steps": self.steps, "metrics": list(self.metrics)}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        looked = [f"  looked at: {', '.join(self.metrics)}"]
        if missing := sorted(set(NAMES) - set(self.metrics)):
            looked.append(f"  not in the log, so not judged: {', '.join(missing)}")
        if self.healthy:
            return "\n".join([f"healthy: no symptom in {self.steps} steps", *looked])
        lines = [f"{_count(self.findings)} in {self.steps} steps"]
        for f in self.findings:
            since = f", from step {f.step}" if f.step else ""
            lines += ["", f.cause + since, f"  {f.evidence}", f"  remedy: {f.remedy}"]
        return "\n".join([*lines, "", *looked])

    def _repr_html_(self) -> str:
        rows = [(f.cause, f.step, f.evidence, f.remedy) for f in self.findings]
        title = "healthy" if self.healthy else _count(rows)
        return notebook.heading(title) + notebook.table(
            ("symptom", "from step", "evidence", "remedy"), rows
        )


def _count(findings: Sequence[object]) -> str:
    return f"{len(findings)} symptom{'s' if len(findings) > 1 else ''}"


def doctor_run(path: str | Path, thresholds: LogThresholds | None = None) -> RunDiagnosis:
    """What the logs in `path` say is wrong. docs/doctor.md lists the formats and the symptoms."""
    return diagnose_rows(read_log(path), thresholds, _rollouts(Path(path)))


def diagnose_rows(
    rows: Sequence[Mapping[str, float]],
    thresholds: LogThresholds | None = None,
    rollouts: Sequence[Mapping[str, Any]] = (),
) -> RunDiagnosis:
    """The same from rows of numbers, each with its step."""
    limits = thresholds or LogThresholds()
    curves: dict[str, Curve] = {}
    raw: dict[str, Curve] = {}
    steps: set[int] = set()
    for row in rows:
        step = step_of(row)
        if step is None or step < 0:
            continue
        steps.add(step)
        for name, value in canonical(row).items():
            curves.setdefault(name, []).append((step, value))
        for name, value in row.items():
            raw.setdefault(name, []).append((step, float(value)))
    longest = max((len(curve) for curve in curves.values()), default=0)
    log = Log(curves, raw, rollouts, limits)
    detectors = DETECTORS if longest >= limits.least_steps else (not_finite,)
    findings = [finding for test in detectors if (finding := test(log)) is not None]
    if not curves and not findings:
        raise InputError(
            "no metric of these logs is known here; they need at least one of reward, entropy, "
            "grad_norm, length, clip fractions or KL."
        )
    if longest < limits.least_steps and not findings:
        raise InputError(
            f"a verdict needs at least {limits.least_steps} steps, and this log has {longest}."
        )
    return RunDiagnosis(tuple(findings), longest or len(steps), tuple(sorted(curves)))


def _rollouts(path: Path) -> list[dict[str, Any]]:
    """Stored completions beside the metrics of a run of ours; none if there is no such file."""
    file = (path if path.is_dir() else path.parent) / "rollouts.jsonl"
    if not file.is_file() or file.is_symlink() or file.stat().st_size > ROLLOUT_BYTES:
        return []
    rows = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
