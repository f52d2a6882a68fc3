"""Reads a project database of trackio (`~/.cache/huggingface/trackio/<project>.db`, SQLite).

A database may come from anybody: it is opened for reading only, its schema is not trusted, and a
query that does not end is given up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.logs.records import chosen
from policyloss_lab.reading import parse_object

SQLITE_HEAD = b"SQLite format 3\x00"
_MOST_STEPS = 2_000  # of a million instructions of SQLite's machine each


def run_names(path: Path) -> list[str]:
    """The names of the runs in a database, in the order in which they began."""
    query = "SELECT run_name FROM metrics GROUP BY run_name ORDER BY min(id) LIMIT 1000"
    return [str(name) for (name,) in _rows(path, query, ())]


def trackio_rows(path: Path, run: str, budget: int) -> Iterator[dict[str, Any]]:
    """The rows of a run, each with its "step". Of more than about `budget` bytes of JSON, rows are
    chosen that are evenly spread.
    """
    where = "FROM metrics WHERE run_name = ? AND length(metrics) < ?"
    (size,) = next(_rows(path, f"SELECT sum(length(metrics)) {where}", (run, limits.LINE_BYTES)))
    share = budget / max(1, size or 0)
    order = f"SELECT step, metrics {where} ORDER BY id"
    for step, text in chosen(_rows(path, order, (run, limits.LINE_BYTES)), share):
        if (row := parse_object(text)) is not None:
            yield {**row, "step": step}


def trackio_config(path: Path, run: str) -> dict[str, Any]:
    """The settings of a run; {} if there are none."""
    query = "SELECT config FROM configs WHERE run_name = ? AND length(config) < ? LIMIT 1"
    for (text,) in _rows(path, query, (run, limits.LINE_BYTES)):
        config = parse_object(text) or {}
        return {name: value for name, value in config.items() if not name.startswith("_")}
    return {}


def _rows(path: Path, query: str, values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    left = _MOST_STEPS

    def stop() -> bool:
        nonlocal left
        left -= 1
        return left < 0

    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            base.set_progress_handler(stop, 1_000_000)
            yield from base.execute(query, values)
    except sqlite3.Error as error:
        raise InputError(
            f"{path.name} is no project of trackio that can be read: {error}."
        ) from None
