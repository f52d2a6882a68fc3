"""Reads the numbers of a run, step by step: from JSON lines, `trainer_state.json`, verl's console
output, TensorBoard events, or a CSV export.

A log may come from anybody. Nothing in it is executed, and memory is bounded. The format
follows from the first bytes of a file, not from its name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.names import step_of
from policyloss_lab.logs.tables import table_rows
from policyloss_lab.logs.trackers import NOT_READ, WANDB_HEAD, Row, events, is_tensorboard
from policyloss_lab.reading import Lines, number_of, parse_object

EVERYTHING = 2**62  # bytes
_CONSOLE = re.compile(r"step:(\d+) - (\S+:\S+)")


def rows_of(file: BinaryIO, name: str, budget: int = EVERYTHING) -> Iterator[tuple[int, Row]]:
    """(step, numbers by name) of each row, in the order of the file; the same step may come again.

    file: open, at its beginning. name: of the file, for errors. A file of more than about `budget`
    bytes is sampled evenly.
    """
    head = file.read(4096)
    file.seek(0)
    share = budget / max(1, os.fstat(file.fileno()).st_size)
    if is_tensorboard(head):
        return events(file, name, share)
    if head.startswith(WANDB_HEAD):
        raise InputError(f"{name} {NOT_READ}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    # One JSON object over many lines.
    document = b'"log_history"' in head or head.lstrip().partition(b"\n")[0].rstrip() == b"{"
    if start == b"{" and (name.endswith("trainer_state.json") or document):
        return numbered(_history(file, name))
    lines = (line for _, line in Lines(file, budget, limits.NUMBER_PARTS))
    texts = (line.decode("utf-8", "replace") for line in lines)
    if start == b"{":
        return numbered(row for text in texts if (row := parse_object(text)) is not None)
    if b"\x00" in head:
        return iter(())
    if _CONSOLE.search(head.decode("utf-8", "replace")) or b"," not in head.partition(b"\n")[0]:
        return _console(texts)
    return _of_one_run(table_rows(texts))


def numbered(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[int, Row]]:
    """(step, numbers) of each entry that has a step; other values are left out."""
    for entry in entries:
        inner = entry.get("data")  # verl writes {"step": …, "data": {…}}
        flat = {**entry, **inner} if isinstance(inner, dict) else entry
        row = {k: x for k, v in flat.items() if (x := number_of(v)) is not None}
        if isinstance(bad := flat.get("nonfinite"), dict):  # where ours writes null
            row |= {str(k): x for k, v in bad.items() if (x := number_of(v)) is not None}
        step = step_of(row)
        if step is not None:
            yield step, row


def _history(file: BinaryIO, name: str) -> Iterator[dict[str, Any]]:
    """The entries of "log_history" in a trainer_state.json, up to the first unreadable one."""
    text = file.read(limits.LOG_BYTES).decode("utf-8", "replace")
    key = re.search(r'"log_history"\s*:\s*\[', text)
    if key is None:
        raise InputError(f"{name} has no log_history; give the trainer_state.json of a run.")
    decoder, between, place = json.JSONDecoder(), re.compile(r"[\s,]*"), key.end()
    while (gap := between.match(text, place)) and text[gap.end() : gap.end() + 1] not in ("", "]"):
        try:
            entry, place = decoder.raw_decode(text, gap.end())
        except (ValueError, RecursionError):
            return
        if isinstance(entry, dict):
            yield entry


def _console(lines: Iterable[str]) -> Iterator[tuple[int, Row]]:
    """Lines such as `step:3 - actor/entropy:0.5 - actor/grad_norm:1.2`, as verl prints them."""
    for line in lines:
        match = _CONSOLE.search(line)
        if match is None:
            continue
        row: Row = {}
        for part in line[match.start() :].split(" - ")[1:]:
            name, _, value = part.strip().rpartition(":")
            number = number_of(re.sub(r"^np\.float\d+\((.*)\)$", r"\1", value))
            if name and number is not None:
                row[name] = number
        step = step_of({"step": float(match.group(1)[:20])})
        if step is not None:
            yield step, row


def _of_one_run(rows: Iterable[tuple[str, int, Row]]) -> Iterator[tuple[int, Row]]:
    first: str | None = None
    for run, step, row in rows:
        if first not in (None, run):
            raise InputError(f"the table holds the runs {first!r} and {run!r}; export one run.")
        first = run
        yield step, row
