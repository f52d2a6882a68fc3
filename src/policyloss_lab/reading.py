"""Reads files of any origin: the lab opens no other file that it did not write.

Only regular files are opened, links are not followed, nothing in a file is executed, and memory and
time are bounded, however large a file or a line is. A run may still be writing the file. Contents
that cannot be read are left out, with a note.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from policyloss import output
from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.limits import MIB

Notes = list[str]
_NONFINITE = {"nan", "inf", "-inf", "infinity", "-infinity"}


def open_file(path: Path, limit: int | None = None, name: str = "") -> BinaryIO:
    """Open a regular file of up to `limit` bytes for reading; an `InputError` for anything else.
    name: of the file in the error; by default, the path.
    """
    name = name or str(path)
    try:
        file = os.fdopen(output.open_regular(path), "rb")
    except FileNotFoundError:
        raise InputError(f"{name} does not exist.") from None
    except output.NotRegularError as error:
        raise InputError(f"{name} is a {error.kind}; only regular files are read.") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {type(error).__name__}.") from error
    if limit is not None and os.fstat(file.fileno()).st_size > limit:
        file.close()
        raise InputError(f"{name} is larger than {limit // MIB} MiB; give a part of it.")
    return file


def open_noted(path: Path, notes: Notes) -> BinaryIO:
    """`open_file`; an empty file and a note instead of an error."""
    try:
        return open_file(path, name=path.name)
    except InputError as error:
        notes.append(str(error))
        return open(os.devnull, "rb")


def is_regular(path: Path) -> bool:
    """Whether `path` is a regular file, and no link to one."""
    try:
        return output.kind_of(os.lstat(path).st_mode) is None
    except OSError:
        return False


class Lines:
    """The lines of `file` with their offsets.

    A file of more than `budget` bytes is read in `parts` that are evenly spaced and include the
    first and the last line; each part consists of consecutive lines. size: of the file. sampled:
    whether only parts are read. longest: the largest number of bytes of a line that is read. long:
    the number of longer lines, which are left out. number: the number of lines read so far.
    """

    def __init__(self, file: BinaryIO, budget: int, parts: int) -> None:
        self._file, self._parts = file, parts
        self.size = os.fstat(file.fileno()).st_size
        self.sampled = self.size > budget
        self._room = budget // parts
        self.longest = limits.LINE_BYTES
        if self.sampled:
            self.longest = min(limits.LINE_BYTES, max(self._room, limits.LEAST_LINE))
            if hasattr(os, "posix_fadvise"):  # prevents reading far ahead of every part
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        self.long = self.number = 0

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        if not self.sampled:
            yield from self._lines(0, self.size)
            return
        for part in range(self._parts):
            start = offset = part * (self.size - self._room) // (self._parts - 1)
            if start:  # go to the first line that begins here or later
                self._file.seek(start - 1)
                if not self._file.readline(self.longest).endswith(b"\n"):
                    continue  # it is too far
                offset = self._file.tell()
            yield from self._lines(offset, start + self._room)

    def _lines(self, offset: int, end: int) -> Iterator[tuple[int, bytes]]:
        """The lines that begin at `offset` or later, and before `end`."""
        self._file.seek(offset)
        while offset < end and (line := self._file.readline(self.longest + 1)):
            self.number += 1
            length = len(line)
            if length > self.longest and not line.endswith(b"\n"):
                self.long += 1
                # To the end of the line, or about to `end`.
                while offset + length < end and (piece := self._file.readline(MIB)):
                    length += len(piece)
                    if piece.endswith(b"\n"):
                        break
            else:
                yield offset, line
            offset += length


def sampled_note(name: str, size: int, budget: int) -> str:
    """The note about a file of `size` bytes of which about `budget` are read."""
    return (
        f"{name} has {size // MIB:,} MiB; parts of it that are evenly spaced were read, about "
        f"{max(1, budget // MIB):,} MiB, and the rest was left out."
    )


def parse_object(text: Any) -> dict[str, Any] | None:
    """The JSON object in a text or in its bytes; None if there is none."""
    try:
        value = json.loads(text.decode("utf-8-sig", "replace") if isinstance(text, bytes) else text)
    except (ValueError, TypeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def json_object(path: Path, notes: Notes) -> dict[str, Any]:
    """The JSON object in `path`, as `strict` returns it; {} and a note if there is none."""
    try:
        with open_file(path, limits.OBJECT_BYTES, path.name) as file:
            value = json.loads(file.read(limits.OBJECT_BYTES).decode("utf-8", "replace"))
        if isinstance(value, dict):
            return strict(value, path.name, notes)
        notes.append(f"{path.name} holds a {type(value).__name__} instead of an object.")
    except InputError as error:
        notes.append(str(error))
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {type(error).__name__}.")
    return {}


def json_lines(
    file: BinaryIO, name: str, notes: Notes, budget: int, parts: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each object of a JSONL file with its byte offset. Broken, half-written and too long lines are
    left out, with a note. Of a file of more than `budget` bytes, evenly spaced `parts` are read.

    The notes are complete once the generator has ended or was closed.
    """
    lines = Lines(file, budget, parts)
    broken = first_broken = 0
    try:
        for offset, line in lines:
            if (row := parse_object(line)) is not None:
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


def row_at(file: BinaryIO, offset: int) -> dict[str, Any]:
    """The row that begins at `offset`; {} if the file was cut short since it was indexed."""
    try:
        file.seek(offset)
        return parse_object(file.readline(limits.LINE_BYTES + 1)) or {}
    except OSError:
        return {}


def strict(value: dict[str, Any], name: str, notes: Notes) -> dict[str, Any]:
    """The same JSON object with every NaN and infinity as a string, so that any JSON reader reads
    it. Values nested deeper than `limits.DEPTH` are left out; a note names the file, `name`.
    """
    deep = 0

    def copy(inner: Any, depth: int) -> Any:
        nonlocal deep
        if isinstance(inner, (dict, list)) and depth > limits.DEPTH:
            deep += 1
            return "…"
        if isinstance(inner, dict):
            return {key: copy(item, depth + 1) for key, item in inner.items()}
        if isinstance(inner, list):
            return [copy(item, depth + 1) for item in inner]
        return str(inner) if isinstance(inner, float) and not math.isfinite(inner) else inner

    kept: dict[str, Any] = copy(value, 1)
    if deep:
        levels = f"{limits.DEPTH} levels"
        notes.append(f"{name} holds {deep} value(s) nested deeper than {levels}, left out.")
    return kept


def number_of(value: object) -> float | None:
    """A JSON number, or the text of one, as a float; None for everything else."""
    if isinstance(value, bool) or (isinstance(value, str) and len(value) > 40):
        return None
    try:
        return float(value) if isinstance(value, (float, int, str)) else None
    except (OverflowError, ValueError):
        return None


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number, finite or not (`NaN`, or "nan" in strict JSON)."""
    return isinstance(value, (int, float)) or (
        isinstance(value, str) and len(value) < 10 and value.lower() in _NONFINITE
    )


def finite(value: Any) -> float | int | None:
    """A finite number up to `limits.LARGEST`, else None, because strict JSON has no NaN."""
    if isinstance(value, bool):
        return int(value)
    fits = isinstance(value, (int, float)) and -limits.LARGEST <= value <= limits.LARGEST
    return value if fits else None


def integer(value: Any) -> int | None:
    """The value if it is an integer that a browser can hold, else None."""
    known = isinstance(value, int) and not isinstance(value, bool)
    return value if known and abs(value) < limits.LARGEST_STEP else None
