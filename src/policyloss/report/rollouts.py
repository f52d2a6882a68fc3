"""Sampled completions, token by token. A long run has more of them than a page can hold, so whole steps are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policyloss.report.reading import Notes, finite, json_lines, parsed

NUMBERS = ("logp", "old_logp", "rollout_logp", "ratio", "token_advantage")
TOKEN_BUDGET = 60_000


def read_rollouts(path: Path, notes: Notes, budget: int = TOKEN_BUDGET) -> list[dict[str, Any]]:
    """The rows of `rollouts.jsonl`, cleaned, in the order of their steps; at most about `budget` tokens of them."""
    index: dict[int, list[tuple[int, int]]] = {}  # step → (byte offset, tokens) of its rows: a file may be larger than memory
    for offset, row in json_lines(path, notes):
        step = row.get("step")
        if isinstance(step, int):
            index.setdefault(step, []).append((offset, len(_list(row.get("tokens")))))
    chosen = _choose(index, budget)
    kept, total = sum(map(len, chosen.values())), sum(map(len, index.values()))
    if kept < total:
        notes.append(f"{kept} of {total} rollouts are shown, from {len(chosen)} of {len(index)} steps, to keep the page small.")
    rows = []
    if chosen:
        with path.open("rb") as file:
            for step in sorted(chosen):
                for offset, _ in chosen[step]:
                    file.seek(offset)
                    rows.append(_clean(parsed(file.readline()) or {}))
    return rows


def _choose(index: dict[int, list[tuple[int, int]]], budget: int) -> dict[int, list[tuple[int, int]]]:
    """Every k-th step back from the last, with the smallest k that fits; of a single step that is too long, its first rows."""
    steps = sorted(index)
    stride = 1
    while stride < len(steps) and sum(n for s in steps[::-stride] for _, n in index[s]) > budget:
        stride += 1
    chosen: dict[int, list[tuple[int, int]]] = {}
    left = budget
    for step in steps[::-stride]:
        for offset, tokens in index[step]:
            if tokens <= left or not chosen:
                chosen.setdefault(step, []).append((offset, tokens))
                left -= tokens
    return chosen


def _clean(row: dict[str, Any]) -> dict[str, Any]:
    """One row with every field of the schema: texts are strings, and each list is as long as `tokens`, None where unknown."""
    tokens = [str(t) for t in _list(row.get("tokens"))]
    out: dict[str, Any] = {name: row.get(name) for name in ("step", "example", "group")}
    out |= {name: _text(row.get(name)) for name in ("prompt", "completion", "answer")}
    out |= {name: finite(row.get(name)) for name in ("reward", "advantage")}
    out |= {"finished": bool(row.get("finished")), "tokens": tokens}
    out["ids"] = _fitted(_list(row.get("ids")), len(tokens))
    out |= {name: _fitted([finite(v) for v in _list(row.get(name))], len(tokens)) for name in NUMBERS}
    out["clipped"] = [None if flag is None else bool(flag) for flag in _fitted(_list(row.get("clipped")), len(tokens))]
    return out


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _fitted(values: list[Any], length: int) -> list[Any]:
    return (values + [None] * length)[:length]
