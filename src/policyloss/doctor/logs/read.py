"""Reads the scalar logs of a run: ours, TRL's, verl's, TensorBoard's, or a CSV export.

A log may come from anybody. Only regular files are read, nothing in them is executed, and what is
kept is bounded.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import kind_of

Row = dict[str, float]
FILE_BYTES = 256 * 2**20
ROWS = 200_000
_CONSOLE = re.compile(r"step:(\d+) - (\S+:\S+)")


def read_log(path: str | Path) -> list[Row]:
    """One row of numbers for each step, in the order of steps; an `InputError` if `path` is no log.

    path: a run directory of ours or of TRL, or a file: metrics.jsonl, trainer_state.json, verl's
    JSONL or console output, TensorBoard events, a CSV export of W&B or trackio.
    """
    merged: dict[int, Row] = {}
    for file in _log_files(Path(path)):
        data = _contents(file)
        if file.name.startswith("events.out.tfevents") or b"brain.Event:" in data[:64]:
            rows = _tensorboard(data)
        else:
            rows = _text(data.decode("utf-8", "replace"), file)
        for step, row in rows:
            merged.setdefault(step, {"step": float(step)}).update(row)
            if len(merged) > ROWS:
                raise InputError(f"{file} holds more than {ROWS:,} steps; give a part of it.")
    if not merged:
        raise InputError(f"{path} holds no row with a step and numbers; it is no log of a run.")
    return [merged[step] for step in sorted(merged)]


def _log_files(path: Path) -> list[Path]:
    """The log of a directory: of TensorBoard there is one file for each time that the run began."""
    if not path.is_dir():
        return [path]
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=os.path.getmtime)
    for file in (path / "metrics.jsonl", path / "trainer_state.json", *states[-1:]):
        if file.exists():
            return [file]
    if events := sorted(path.glob("events.out.tfevents*")):
        return events
    raise InputError(
        f"{path} holds neither metrics.jsonl, trainer_state.json nor TensorBoard events."
    )


def _contents(file: Path) -> bytes:
    try:
        kind = kind_of(os.lstat(file).st_mode)
        if kind is not None:
            raise InputError(f"{file} is a {kind}; give a file.")
        with file.open("rb") as handle:
            data = handle.read(FILE_BYTES + 1)
    except FileNotFoundError:
        raise InputError(f"{file} does not exist.") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {type(error).__name__}.") from error
    if len(data) > FILE_BYTES:
        raise InputError(f"{file} is larger than {FILE_BYTES // 2**20} MiB; give a part of it.")
    return data


def _text(text: str, file: Path) -> Iterator[tuple[int, Row]]:
    first = text.lstrip()[:1]
    if first == "{" and file.suffix != ".jsonl" and (state := _object(text)) is not None:
        history = state.get("log_history")
        if not isinstance(history, list):
            raise InputError(f"{file} has no log_history; give the trainer_state.json of a run.")
        yield from (pair for entry in history if (pair := _numbers(entry)) is not None)
    elif first == "{":
        for line in text.splitlines():
            row = _object(line)
            if row is not None:
                inner = row.get("data")  # verl writes {"step": …, "data": {…}}
                flat = {**row, **inner} if isinstance(inner, dict) else row
                if (pair := _numbers(flat)) is not None:
                    yield pair
    elif _CONSOLE.search(text):
        yield from _console(text)
    else:
        yield from _csv(text)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _numbers(entry: Any) -> tuple[int, Row] | None:
    from policyloss.doctor.logs.metric_names import step_of

    if not isinstance(entry, dict):
        return None
    row = {str(k): x for k, v in entry.items() if (x := _number(v)) is not None}
    if isinstance(bad := entry.get("nonfinite"), dict):  # where ours writes null
        row |= {str(k): x for k, v in bad.items() if (x := _number(v)) is not None}
    step = step_of(row)
    return None if step is None else (step, row)


def _number(value: Any) -> float | None:
    """A JSON number, or the text of one that is not finite."""
    if isinstance(value, bool) or value is None or isinstance(value, (dict, list)):
        return None
    if isinstance(value, str) and len(value) > 40:
        return None
    try:
        return float(value)
    except (ValueError, TypeError, OverflowError):
        return None


def _console(text: str) -> Iterator[tuple[int, Row]]:
    """Lines such as `step:3 - actor/entropy:0.5 - actor/grad_norm:1.2`, as verl prints them."""
    for line in text.splitlines():
        match = _CONSOLE.search(line)
        if match is None:
            continue
        row: Row = {}
        for part in line[match.start() :].split(" - ")[1:]:
            name, _, value = part.strip().rpartition(":")
            number = _number(re.sub(r"^np\.float\d+\((.*)\)$", r"\1", value))
            if name and number is not None:
                row[name] = number
        yield int(match.group(1)), row


def _csv(text: str) -> Iterator[tuple[int, Row]]:
    reader = csv.reader(io.StringIO(text))
    try:
        columns = next(reader, [])
        # W&B writes "run name - metric" as the head of a column.
        names = [column.rpartition(" - ")[2].strip() for column in columns]
        names = ["step" if name.lower() == "step" else name for name in names]
        for place, name in enumerate(names):
            if name and (first := names.index(name)) != place:
                raise InputError(
                    f"the columns {columns[first]!r} and {columns[place]!r} are the same metric of "
                    "several runs; export one run."
                )
        for values in reader:
            cells = zip(names, values, strict=False)
            pair = _numbers({name: value for name, value in cells if name and value})
            if pair is not None:
                yield pair
    except csv.Error as error:
        raise InputError(
            f"line {reader.line_num} cannot be read as one of a table ({error}); it is no log of a "
            "run."
        ) from error


def _tensorboard(data: bytes) -> Iterator[tuple[int, Row]]:
    """Scalars of an events file: records of a length, a checksum, a message, a checksum."""
    place = 0
    while place + 12 <= len(data):
        (length,) = struct.unpack("<Q", data[place : place + 8])
        body = data[place + 12 : place + 12 + length]
        if len(body) < length:
            return
        place += 16 + length
        step = 0
        row: Row = {}
        for number, value in _fields(body):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                row |= dict(_scalars(value))
        if row:
            yield step, row


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, value in _fields(summary):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in _fields(value):
            if inner == 1 and isinstance(content, bytes):
                tag = content.decode("utf-8", "replace")
            elif inner == 2 and isinstance(content, float):
                scalar = content
            elif inner == 8 and isinstance(content, bytes):
                scalar = _tensor(content)
        if tag and scalar is not None:
            yield tag, scalar


def _tensor(message: bytes) -> float | None:
    """The number of a TensorProto that holds one float."""
    for number, value in _fields(message):
        if number == 5:
            if isinstance(value, float):
                return value
            if isinstance(value, bytes) and len(value) == 4:
                return float(struct.unpack("<f", value)[0])
        if number == 4 and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
    return None


def _fields(message: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """The fields of a protobuf message; it ends where something cannot be read."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
        elif kind == 1 and place + 8 <= len(message):
            yield key >> 3, float(struct.unpack("<d", message[place : place + 8])[0])
            place += 8
        elif kind == 2:
            length, place = _varint(message, place)
            yield key >> 3, message[place : place + length]
            place += length
        elif kind == 5 and place + 4 <= len(message):
            yield key >> 3, float(struct.unpack("<f", message[place : place + 4])[0])
            place += 4
        else:
            return


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(message) and shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, place
