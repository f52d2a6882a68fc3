"""Completions as the page shows them: by group, with the numbers of each group, and compact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policyloss_lab.completions import CODES, spread
from policyloss_lab.report.limits import LARGEST
from policyloss_lab.report.rollouts import FLAGS, NUMBERS, group_of


def groups_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The groups of a run by step: those it was trained on, and answers to held-out prompts.

    Each has what its rows share, the mean reward, its spread, the mean length, how many were cut,
    and the rows.
    """
    groups = [
        *_grouped(run["rollouts"], held_out=False),
        *_grouped(run["answers"], held_out=True),
    ]
    return sorted(groups, key=lambda group: group["step"])


def _grouped(rows: Sequence[dict[str, Any]], held_out: bool) -> list[dict[str, Any]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["step"], group_of(row)), []).append(row)
    return [_group(inside, held_out) for inside in groups.values()]


def _group(rows: Sequence[dict[str, Any]], held_out: bool) -> dict[str, Any]:
    first = rows[0]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    lengths = [len(row["tokens"]) for row in rows if row["tokens"]]
    return {
        "step": first["step"],
        "held_out": held_out,
        "example": first["example"],
        "of": first["groups"],
        "prompt": first["prompt"],
        "answer": first["answer"],
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "spread": spread(rewards) if len(rewards) > 1 else None,
        "length": sum(lengths) / len(lengths) if lengths else None,
        "cut": sum(row["finished"] is False for row in rows),
        "rows": [_row(row) for row in rows],
    }


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One completion. A column with the same value at every token is that value alone."""
    named = ("completion", "reward", "advantage", "weights", "finished", "finish_reason")
    branch = [None if name is None else CODES[name] for name in row["branch"]]
    return {
        **{name: row[name] for name in named},
        "tokens": row["tokens"],
        "ids": _column(row["ids"]),
        **{name: _column(short(row[name])) for name in NUMBERS},
        **{name: _column(row[name]) for name in FLAGS},
        "branch": _column(branch),
    }


def _column(values: list[Any]) -> Any:
    if not values:
        return None
    first = values[0]
    # 1 and True are equal, but not the same in JSON.
    same = all(value == first and type(value) is type(first) for value in values)
    return first if same else values


def short(values: Sequence[Any]) -> list[Any]:
    """The values with six significant digits, more than a screen can show; tiny ones are 0."""
    return [
        v if v is None or isinstance(v, int) else float(f"{v:.6g}") if abs(v) > 1 / LARGEST else 0.0
        for v in values
    ]
