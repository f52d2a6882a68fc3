"""Reads what a run wrote, also while it is still writing. What cannot be read is left out, and a
note says so.

A run directory may come from anybody. Links in it are not followed, only regular files are read,
and what is kept in memory is bounded, however large a file or a line is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from policyloss import output
from policyloss_lab.logs.lines import Lines
from policyloss_lab.report.limits import (
    DEPTH,
    LARGEST,
    LARGEST_STEP,
    LINE_BYTES,
    MIB,
    OBJECT_BYTES,
    SETTINGS,
)

Notes = list[str]
_NONFINITE = {"nan", "inf", "-inf", "infinity", "-infinity"}


def open_regular(path: Path, notes: Notes) -> BinaryIO | None:
    """The regular file `path`, open for reading; None and a note if there is none."""
    try:
        return os.fdopen(output.open_regular(path), "rb")
    except FileNotFoundError:
        notes.append(f"There is no {path.name}.")
    except output.NotRegularError as error:
        notes.append(f"{path.name} is a {error.kind}; it was not read.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
    return None


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file, and no link to one."""
    try:
        return output.kind_of(os.lstat(path).st_mode) is None
    except OSError:
        return False


def read_bytes(path: Path, limit: int, notes: Notes) -> bytes | None:
    """The contents of a file of up to `limit` bytes; None and a note if there are none."""
    file = open_regular(path, notes)
    if file is None:
        return None
    with file:
        try:
            data = file.read(limit + 1)
        except OSError as error:  # a disk that is broken, or gone
            notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
            return None
    if len(data) > limit:
        notes.append(f"{path.name} is larger than {limit // MIB} MiB and was left out.")
        return None
    return data


def json_object(path: Path, notes: Notes) -> dict[str, Any]:
    """The JSON object in `path`, as `strict` gives it; {} and a note if there is none."""
    data = read_bytes(path, OBJECT_BYTES, notes)
    if data is None:
        return {}
    try:
        value = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds a {type(value).__name__} instead of an object.")
        return {}
    kept: dict[str, Any] = strict(value, path.name, notes)
    return kept


def json_lines(
    file: BinaryIO, name: str, notes: Notes, budget: int, parts: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object of a JSONL file with its byte offset. What is broken, half-written or too long is
    left out, with a note. Of more than `budget` bytes, `parts` that are evenly spaced are read.

    The notes are complete once the generator has ended or was closed.
    """
    lines = Lines(file, budget, parts)
    broken = first_broken = 0
    try:
        for offset, line in lines:
            if (row := parsed(line)) is not None:
                yield offset, row
            elif line.strip() and not line.endswith(b"\n"):
                notes.append(f"The last line of {name} is half-written and was left out.")
            elif line.strip():
                broken += 1
                first_broken = first_broken or lines.number
    except OSError as error:
        notes.append(f"{name} cannot be read: {type(error).__name__}.")
    finally:
        if lines.sampled:
            notes.append(sampled_note(name, lines.size, budget))
        if lines.long:
            size = f"{lines.longest / MIB:.3g} MiB"
            notes.append(f"{name} has {lines.long} line(s) of more than {size}, left out.")
        if broken:
            where = "" if lines.sampled else f"; the first is line {first_broken}"
            notes.append(f"{name} has {broken} line(s) that are no JSON object, left out{where}.")


def sampled_note(name: str, size: int, budget: int) -> str:
    """What is said of a file of `size` bytes of which about `budget` are read."""
    return (
        f"{name} has {size // MIB:,} MiB; parts of it that are evenly spaced were read, about "
        f"{max(1, budget // MIB):,} MiB, and the rest was left out."
    )


def row_at(file: BinaryIO, offset: int) -> dict[str, Any]:
    """The row that begins at `offset`; {} if the file was cut short since it was indexed."""
    try:
        file.seek(offset)
        return parsed(file.readline(LINE_BYTES + 1)) or {}
    except OSError:
        return {}


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, or None."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_number(value: Any) -> bool:
    """Whether a JSON value stands for a number, finite or not (`NaN`, or the string "nan" of
    writers that keep to strict JSON).
    """
    return isinstance(value, (int, float)) or (
        isinstance(value, str) and len(value) < 10 and value.lower() in _NONFINITE
    )


def finite(value: Any) -> float | int | None:
    """A finite number up to `LARGEST`, else None, because strict JSON has no NaN."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)) and -LARGEST <= value <= LARGEST:
        return value
    return None


def step_of(row: dict[str, Any]) -> int | None:
    """The step of a row; None if it has none that can be used."""
    return integer(row.get("step"))


def integer(value: Any) -> int | None:
    """The value if it is an integer that a browser can hold, else None."""
    usable = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST_STEP
    return value if usable else None


def strict(value: Any, name: str, notes: Notes) -> Any:
    """The same JSON value with every NaN and infinity as a string, so that any JSON reader can read
    it.

    Values that are nested deeper than `DEPTH`, and those after the first `SETTINGS` values, are
    left out; a note names the file, `name`.
    """
    count = deep = 0

    def copy(inner: Any, depth: int) -> Any:
        nonlocal count, deep
        count += 1
        if isinstance(inner, (dict, list)) and depth > DEPTH:
            deep += 1
            return "…"
        if isinstance(inner, dict):
            return {key: copy(item, depth + 1) for key, item in inner.items() if count < SETTINGS}
        if isinstance(inner, list):
            return [copy(item, depth + 1) for item in inner if count < SETTINGS]
        return str(inner) if isinstance(inner, float) and not math.isfinite(inner) else inner

    kept = copy(value, 1)
    if count >= SETTINGS:
        notes.append(f"{name} holds more than {SETTINGS:,} values; the rest was left out.")
    if deep:
        notes.append(f"{name} holds {deep} value(s) nested deeper than {DEPTH} levels, left out.")
    return kept
