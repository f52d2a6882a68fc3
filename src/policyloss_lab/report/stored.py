"""What a run left on disk: `StoredRun`, and how one is read from a run directory of ours."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policyloss_lab.report import limits
from policyloss_lab.report.reading import Notes, integer, json_object
from policyloss_lab.report.rollouts import as_stored, read_rollouts
from policyloss_lab.report.series import Table, read_table


@dataclass
class StoredRun:
    """source: who wrote it, or in which form. spec: of its loss, as JSON; None if it is not known.
    planned: how many steps the run was meant to take, if that is known.
    """

    source: str
    version: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    spec: Any = None
    planned: int | None = None
    table: Table = field(default_factory=Table)
    times: Table = field(default_factory=Table)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)


def read_our_run(folder: Path, notes: Notes, runs: int) -> StoredRun:
    """The run directory `folder`. runs: how many share the bounds on what is read."""
    contents = json_object(folder / "config.json", notes)
    config, version = contents.get("config"), contents.get("policyloss")
    config, defaults = (
        x if isinstance(x, dict) else {} for x in (config, contents.get("defaults"))
    )
    size = limits.bytes_of(limits.METRIC_BYTES, runs)
    tokens = limits.share(limits.ALL_TOKENS, limits.TOKEN_BUDGET, runs)
    rows = limits.bytes_of(limits.ROLLOUT_BYTES, runs)
    answers = folder / "answers.jsonl"  # that a run has stored none needs no note
    return StoredRun(
        "policyloss",
        version if isinstance(version, str) else "",
        config,
        defaults,
        spec=contents.get("loss"),
        planned=integer(config.get("steps")),
        table=read_table(folder / "metrics.jsonl", notes, size),
        times=read_table(folder / "timing.jsonl", notes, size),
        environment=json_object(folder / "environment.json", notes),
        rollouts=read_rollouts(folder / "rollouts.jsonl", notes, tokens, size=rows),
        answers=read_rollouts(answers, notes, tokens // limits.ANSWERS_SHARE, as_stored, rows)
        if os.path.lexists(answers)
        else [],
    )
