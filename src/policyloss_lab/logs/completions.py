"""Completions as other trainers store them, as rows of `rollouts.jsonl`.

TRL's `log_completions` (parquet), the tables that it logs to W&B (`*.table.json`) and trackio,
verl's dumps of rollouts and validation (`<step>.jsonl`), prime-rl's token exports
(`rank_<n>.jsonl`), and JSON lines with a prompt and a completion under usual names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.trackers import trackio_rows
from policyloss_lab.reading import Lines, number_of, parse_object

Rows = Iterator[dict[str, Any]]
PARQUET = b"PAR1"
NEEDS_PYARROW = "needs pyarrow: pip install 'policyloss-lab[parquet]'"
# Our field → its names in stored completions; the first that exists counts.
FIELDS = {
    "prompt": ("prompt", "input", "question", "query"),
    "completion": ("completion", "output", "response", "generation"),
    "answer": ("answer", "gts", "ground_truth", "reference", "target"),
    "reward": ("reward", "score", "rewards"),
    "advantage": ("advantage",),
    "group": ("group", "group_id", "uid"),
    "finish_reason": ("finish_reason", "stop_reason"),
    "finished": ("finished",),
}
_PRIME = {
    "logp": "trainer_logprobs",
    "rollout_logp": "inference_logprobs",
    "ratio": "importance_ratio",
    "token_advantage": "advantages",
    "entropy": "entropy",
    "clipped": "is_masked",
}
_STEP_IN_NAME = re.compile(r"(\d{1,15})(?=\D*$)")
_STEP_OF_TABLE = re.compile(r"_(\d{1,15})_\w+\.table\.json$")


def holds_completions(head: bytes) -> bool:
    """Whether a file that begins with `head` holds completions, judged by its first row."""
    if head.startswith(PARQUET):
        return True
    first, newline, _ = head.partition(b"\n")
    row = parse_object(first)
    if row is None and not newline and first.startswith(b"{"):  # it is longer than `head`
        row = {key.decode(): "" for key in re.findall(rb'"(\w{1,30})"\s*:', first)}
    if row is None:
        return False
    texts = [any(name in row for name in FIELDS[field]) for field in ("prompt", "completion")]
    return all(texts) or {"token_ids", "loss_mask"} <= row.keys() or {"columns", "data"} == set(row)


def step_in_name(path: Path) -> int:
    """The step in the name of a file or its folder, or 0: `completions_00010.parquet`, `10.jsonl`,
    `step_10/rank_0.jsonl`, `completions_10_<digest>.table.json`.
    """
    name = path.parent.name if path.stem.startswith("rank_") else path.name.partition(".")[0]
    match = _STEP_OF_TABLE.search(path.name) or _STEP_IN_NAME.search(name)
    return int(match[1]) if match else 0


def stored_completions(
    file: BinaryIO, path: Path, budget: int, rewards: Iterable[str] = ()
) -> tuple[Rows, bool]:
    """(rows of `rollouts.jsonl`, whether some were left out) of an open file.

    budget: the number of bytes to read. rewards: the names of TRL's reward functions; their columns
    are summed. Without names, every column of numbers is a reward.
    """
    head = file.read(4096)
    file.seek(0)
    if head.startswith(PARQUET):
        return _ours(_parquet(file, path), path, tuple(rewards)), False
    if head.startswith(b'{"columns"'):
        return _ours(_table(file), path, tuple(rewards)), False
    lines = Lines(file, budget, limits.COMPLETION_PARTS)
    parsed = (parse_object(line) for _, line in lines)
    return _ours((row for row in parsed if row is not None), path, ()), lines.sampled


def trackio_tables(path: Path, run: str, budget: int, rewards: Iterable[str]) -> Rows:
    """The rows of `rollouts.jsonl` of the tables with completions in a trackio project."""
    for entry in trackio_rows(path, run, budget):
        for table in entry.values():
            rows = table.get("_value") if isinstance(table, dict) else None
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                inside = ({"step": entry["step"], **row} for row in rows if isinstance(row, dict))
                yield from _ours(inside, path, tuple(rewards))


def _parquet(file: BinaryIO, path: Path) -> Rows:
    try:
        parquet: Any = import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise InputError(f"{path.name} {NEEDS_PYARROW}.") from None
    try:
        table = parquet.ParquetFile(file, thrift_string_size_limit=limits.LINE_BYTES)
        for place in range(table.metadata.num_row_groups):
            if table.metadata.row_group(place).total_byte_size > limits.TABLE_BYTES:
                continue
            for batch in table.iter_batches(batch_size=64, row_groups=[place]):
                yield from batch.to_pylist()
    except Exception as error:  # a file of any origin, read by another package
        raise InputError(f"{path.name} cannot be read: {type(error).__name__}.") from error


def _table(file: BinaryIO) -> Rows:
    """The rows of a table that W&B stored: {"columns": […], "data": [[…], …]}."""
    table = parse_object(file.read(limits.TABLE_BYTES)) or {}
    columns, data = table.get("columns"), table.get("data")
    for row in data if isinstance(data, list) else []:
        if isinstance(columns, list) and isinstance(row, list):
            yield dict(zip((str(column) for column in columns), row, strict=False))


def _ours(rows: Rows, path: Path, rewards: tuple[str, ...]) -> Rows:
    """The rows of a file in our form. Without groups, rows with the same prompt are a group."""
    groups: dict[tuple[int, str], int] = {}
    for row in rows:
        step = row.get("step")
        step = step if isinstance(step, int) and not isinstance(step, bool) else step_in_name(path)
        if {"token_ids", "loss_mask"} <= row.keys():
            out = _prime_rl(row)
        else:
            named = {ours: _first(row, names) for ours, names in FIELDS.items()}
            out = {**named, **{name: _text(named[name]) for name in ("prompt", "completion")}}
            if out["reward"] is None:
                out["reward"] = _sum_of_rewards(row, rewards)
        if out.get("group") is None and out.get("prompt"):
            out["group"] = groups.setdefault((step, out["prompt"]), len(groups))
        yield {"step": step, **{name: value for name, value in out.items() if value is not None}}


def _first(row: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _sum_of_rewards(row: Mapping[str, Any], rewards: tuple[str, ...]) -> float | None:
    named = rewards or [name for name in row if name not in ("step", "advantage")]
    numbers = [number_of(row[name]) for name in named if not isinstance(row.get(name), str | None)]
    known = [number for number in numbers if number is not None and number == number]
    return sum(known) if known else None


def _text(value: Any) -> str | None:
    """A text, or the messages of a conversation, one per line."""
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return "\n".join(f"{item.get('role', '')}: {item.get('content', '')}" for item in value)
    return value if isinstance(value, str) or value is None else str(value)


def _prime_rl(row: Mapping[str, Any]) -> dict[str, Any]:
    """A sequence of prime-rl's export; the tokens before the first trained one are the prompt."""
    ids, mask = row["token_ids"], row["loss_mask"]
    if not isinstance(ids, list) or not isinstance(mask, list):
        return {}
    start = next((i for i, trained in enumerate(mask) if trained), len(ids))
    out: dict[str, Any] = {
        "prompt": f"{start} tokens: " + " ".join(str(token) for token in ids[:start][-200:]),
        "ids": ids[start:],
        "tokens": [f"#{token}" for token in ids[start:]],
        "mask": mask[start:],
    }
    for ours, theirs in _PRIME.items():
        values = row.get(theirs)
        if isinstance(values, list) and any(value is not None for value in values):
            out[ours] = values[start:]
    known = [x for value in out.get("token_advantage", []) if (x := number_of(value)) is not None]
    return {**out, "advantage": sum(known) / len(known) if known else None}
