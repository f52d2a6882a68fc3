"""Reading what a run wrote, also while it is still writing: what cannot be read is left out and said in a note, never hidden."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Notes = list[str]
_NONFINITE = {"nan", "inf", "-inf", "infinity", "-infinity"}


def json_object(path: Path, notes: Notes) -> dict[str, Any]:
    """The JSON object in `path`; {} and a note if there is none."""
    try:
        data = json.loads(path.read_bytes().decode("utf-8", "replace"))
    except FileNotFoundError:
        notes.append(f"There is no {path.name}.")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
        return {}
    if not isinstance(data, dict):
        notes.append(f"{path.name} holds a {type(data).__name__} instead of an object.")
        return {}
    return data


def json_lines(path: Path, notes: Notes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object of a JSONL file with its byte offset. A half-written last line and broken lines are left out, with a note."""
    broken: list[int] = []
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                row = parsed(line)
                if row is not None:
                    yield offset, row
                elif line.strip() and not line.endswith(b"\n"):
                    notes.append(f"The last line of {path.name} is half-written and was left out.")
                elif line.strip():
                    broken.append(number)
                offset += len(line)
    except FileNotFoundError:
        notes.append(f"There is no {path.name}.")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
    if broken:
        notes.append(f"{path.name} has {len(broken)} line(s) that are no JSON object, left out; the first is line {broken[0]}.")


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, or None."""
    try:
        row = json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def is_number(value: Any) -> bool:
    """Whether a JSON value stands for a number, finite or not (`NaN`, or the string "nan" of writers that keep to strict JSON)."""
    return isinstance(value, (int, float)) or (isinstance(value, str) and value.lower() in _NONFINITE)


def finite(value: Any) -> float | int | None:
    """The number itself if it is finite, else None: strict JSON has no NaN."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return value if abs(value) < 2**1000 else None  # beyond it, no float can hold it
    return value if isinstance(value, float) and math.isfinite(value) else None


def strict(value: Any) -> Any:
    """The same JSON value with every NaN and infinity as a string, so that any JSON reader can read it."""
    if isinstance(value, dict):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
