"""A file of JSON lines, each with its step: appended atomically, truncated on resume."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss_lab.runs.files import from_json, open_plain, sync, write_error

_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')


class JsonLines:
    """Appends rows `{"step": …, …}` to a file. last: the step of the last row, or None.

    A row is written as a complete line or not at all; if a crash of the machine cut the last line
    short, opening the file drops it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise write_error(path, error, "Nothing was written.") from error
        self.last: int | None = None
        self.truncate(None)

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write `rows`; their steps must not decrease."""
        last = self.last
        for row in rows:
            step = row.get("step")
            if not isinstance(step, int) or step < 0:
                raise InputError(f"{self.path.name} needs a step, an integer ≥ 0, got {step!r}.")
            if last is not None and step < last:
                raise InputError(f"step {step} after step {last} in {self.path}; truncate first.")
            last = step
        data = b"".join(line_of(row) + b"\n" for row in rows)
        before = self.size
        try:
            while data:
                data = data[os.write(self._handle, data) :]
        except BaseException as error:
            os.ftruncate(self._handle, before)  # no half line
            if isinstance(error, OSError):
                raise write_error(self.path, error, "Its old contents are kept.") from error
            raise
        self.last = last

    def truncate(self, step: int | None) -> None:
        """Drop the rows after `step` (None: no row), and everything after the last readable row."""
        end, at, last = 0, 0, None
        # The open file, even if its name belongs to another file by now.
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            for line in file:
                at += len(line)
                row_step = _step_of(line)
                if row_step is None:
                    continue
                if step is not None and row_step > step:
                    break
                end, last = at, row_step
        if end < self.size:
            os.ftruncate(self._handle, end)
            os.fsync(self._handle)
        self.last = last

    @property
    def size(self) -> int:
        """The number of bytes of the rows."""
        return os.fstat(self._handle).st_size

    def thin(self) -> int:
        """Drop the rows of every second step, starting with the second; returns the number of
        dropped rows. A crash leaves the old file or the new one.
        """
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        steps, dropped, before = 0, 0, None
        try:
            temporary.unlink(missing_ok=True)
            with os.fdopen(os.dup(self._handle), "rb") as old, temporary.open("xb") as new:
                old.seek(0)
                for line in old:
                    step = _step_of(line)
                    steps, before = steps + (step != before), step
                    if steps % 2:
                        new.write(line)
                    else:
                        dropped += 1
                new.flush()
                os.fsync(new.fileno())
            os.close(self._handle)
            os.replace(temporary, self.path)
            self._handle = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise write_error(self.path, error, "Its old contents are kept.") from error
        return dropped

    def sync(self) -> None:
        """Sync the rows to the disk, so that they survive a crash of the machine."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Sync the rows to the disk and close the file."""
        self.sync()
        os.close(self._handle)
        sync(self.path.parent)


def line_of(row: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON, its step first.

    JSON has no NaN and no infinity: such a number is written as null, and `"nonfinite"` holds it by
    its path of keys ("a/b"): `{"step": 3, "grad_norm": null, "nonfinite": {"grad_norm": "nan"}}`.
    """
    row = {"step": row["step"], **row}
    try:
        return json.dumps(row, allow_nan=False).encode()
    except TypeError as error:
        reason = f"holds something that JSON cannot: {error}"
        raise InputError(f"a row of step {row['step']} {reason}.") from None
    except ValueError:
        were: dict[str, str] = {}
        finite = {key: _finite(value, key, were) for key, value in row.items()}
        return json.dumps({**finite, "nonfinite": were}, allow_nan=False).encode()


def _finite(value: Any, place: str, were: dict[str, str]) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        were[place] = repr(float(value))
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner, f"{place}/{key}", were) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner, f"{place}/{i}", were) for i, inner in enumerate(value)]
    return value


def _step_of(line: bytes) -> int | None:
    """The step of a complete line of JSON; None for any other line."""
    if not line.endswith(b"\n"):
        return None
    match = _STEP.match(line)
    # The form of `line_of`: parsing a long row for its first number would take far longer.
    if match and line.endswith(b"}\n"):
        return int(match[1])
    try:
        step = from_json(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if type(step) is int else None
