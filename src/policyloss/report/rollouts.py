"""Sampled completions, token by token. A long run has more of them than a page can show, so some
steps are chosen and shown completely.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policyloss.logs.completions import PARTS
from policyloss.report import limits
from policyloss.report.limits import cut
from policyloss.report.reading import (
    Notes,
    finite,
    integer,
    json_lines,
    open_regular,
    row_at,
    step_of,
)

NUMBERS = ("logp", "old_logp", "rollout_logp", "ratio", "token_advantage")
TEXTS = ("prompt", "completion", "answer")
# step → (byte offset, size) of its rows, because a file may be larger than memory
Index = dict[int, list[tuple[int, int]]]


def read_rollouts(
    path: Path,
    notes: Notes,
    budget: int = limits.TOKEN_BUDGET,
    size: int = limits.ROLLOUT_BYTES,
) -> list[dict[str, Any]]:
    """The rows of `rollouts.jsonl`, cleaned, by step; at most about `budget` tokens. Of more than
    `size` bytes, parts are read that are evenly spaced.
    """
    index: Index = {}
    total = without = 0
    file = open_regular(path, notes)
    if file is None:
        return []
    with file:
        for offset, row in json_lines(file, path.name, notes, size, PARTS):
            step = step_of(row)
            if step is None:
                without += 1
                continue
            if total == limits.INDEXED:
                notes.append(
                    f"{path.name} has more than {limits.INDEXED:,} rows; what comes after them was "
                    "left out."
                )
                break
            total += 1
            index.setdefault(step, []).append((offset, _size(row)))
        chosen = _choose(index, budget)
        shorter = Shortened()
        rows = [
            _clean(row_at(file, offset), step, shorter)
            for step in sorted(chosen)
            for offset, _ in chosen[step]
        ]
    if len(rows) < total:
        steps = f"{len(chosen)} of {len(index)} steps"
        notes.append(
            f"{len(rows)} of {total} rollouts are shown, from {steps}, to keep the page small."
        )
    if without:
        notes.append(f"{path.name} has {without} line(s) without a step, left out.")
    notes += shorter.notes()
    return rows


def _size(row: dict[str, Any]) -> int:
    """How much of the budget a row takes, in tokens; its texts count, too."""
    characters = sum(min(len(_text(row.get(name))), limits.TEXT_LENGTH) for name in TEXTS)
    return (
        min(len(_list(row.get("tokens"))), limits.TOKEN_BUDGET)
        + characters // limits.CHARACTERS_PER_TOKEN
    )


def _choose(index: Index, budget: int) -> Index:
    """Every k-th step, counted back from the last, with the smallest k that fits. If a single step
    is too long, its first rows are chosen.
    """
    steps = sorted(index)
    sizes = {step: sum(size for _, size in rows) for step, rows in index.items()}
    stride = 1
    while stride < len(steps) and (
        sum(sizes[s] for s in steps[::-stride]) > budget
        or sum(len(index[s]) for s in steps[::-stride]) > limits.ROWS
    ):
        stride += 1
    chosen: Index = {}
    left, rows = budget, limits.ROWS
    for step in steps[::-stride]:
        for offset, size in index[step]:
            if (size <= left and rows > 0) or not chosen:
                chosen.setdefault(step, []).append((offset, size))
                left -= size
                rows -= 1
    return chosen


class Shortened:
    """Counts the texts that were cut to a maximal length."""

    def __init__(self) -> None:
        self.texts = self.tokens = self.rows = 0

    def notes(self) -> Notes:
        """What was left out, in sentences."""
        counts = {
            f"text(s) longer than {limits.TEXT_LENGTH:,} characters": self.texts,
            f"token(s) longer than {limits.TOKEN_LENGTH} characters": self.tokens,
            f"rollout(s) with more than {limits.TOKEN_BUDGET:,} tokens": self.rows,
        }
        return [
            f"{count:,} {what} are shown up to there; the rest is left out."
            for what, count in counts.items()
            if count
        ]


def _clean(row: dict[str, Any], step: int, shorter: Shortened) -> dict[str, Any]:
    """One row with every field of the schema: texts are strings, and each list is as long as
    `tokens`, None where unknown.
    """
    every = _list(row.get("tokens"))
    tokens = [_text(token) for token in every[: limits.TOKEN_BUDGET]]
    texts = {name: _text(row.get(name)) for name in TEXTS}
    shorter.rows += len(every) > len(tokens)
    shorter.tokens += sum(len(token) > limits.TOKEN_LENGTH for token in tokens)
    shorter.texts += sum(len(text) > limits.TEXT_LENGTH for text in texts.values())
    out: dict[str, Any] = {
        "step": step,
        "example": _label(row.get("example")),
        "group": _label(row.get("group")),
        "weights": integer(row.get("weights")),
    }
    out |= {name: cut(text, limits.TEXT_LENGTH) for name, text in texts.items()}
    out |= {name: finite(row.get(name)) for name in ("reward", "advantage")}
    out |= {
        "finished": None if row.get("finished") is None else bool(row["finished"]),
        "tokens": [cut(token, limits.TOKEN_LENGTH) for token in tokens],
    }
    out["ids"] = _fitted([integer(v) for v in _list(row.get("ids"))], len(tokens))
    out |= {
        name: _fitted([finite(v) for v in _list(row.get(name))], len(tokens)) for name in NUMBERS
    }
    out["clipped"] = [
        None if flag is None else bool(flag)
        for flag in _fitted(_list(row.get("clipped")), len(tokens))
    ]
    return out


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    """A text as it is, a number in digits, of a list or an object only its kind."""
    if isinstance(value, (dict, list)):
        return f"({type(value).__name__})"
    return value if isinstance(value, str) else "" if value is None else str(value)


def _label(value: Any) -> str | int | None:
    """The name or number of an example or a group."""
    return cut(value, limits.TOKEN_LENGTH) if isinstance(value, str) else integer(value)


def _fitted(values: list[Any], length: int) -> list[Any]:
    return (values[:length] + [None] * length)[:length]
