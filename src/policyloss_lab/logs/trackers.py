"""Files of trackers: TensorBoard events and the `.wandb` file of Weights & Biases (records of
protobuf messages), and the project database of trackio
(`~/.cache/huggingface/trackio/<project>.db`, SQLite).

A file may come from anybody. Nothing in it is executed and too long records are skipped. A database
is opened read-only, its schema is not trusted, and a query that does not end is stopped.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.reading import parse_object

Item = TypeVar("Item")
Row = dict[str, float]
Field = tuple[int, "int | float | bytes"]
WANDB_HEAD = b":W&B"
_BLOCK = 2**15  # a record of W&B is cut where a block ends
_FULL, _FIRST, _LAST = 1, 2, 4
_GOLDEN = 0.6180339887498949


def is_tensorboard(head: bytes) -> bool:
    """Whether a file that begins with `head` holds events of TensorBoard."""
    return b"brain.Event:" in head[:64]


def events(file: BinaryIO, share: float = 1.0) -> Iterator[tuple[int, Row]]:
    """The scalars of an events file by step. share: the share of the records to read."""
    for body in sample(_event_records(file), share):
        step = 0
        row: Row = {}
        for number, value in fields(body):
            if number == 2 and isinstance(value, int):
                step = value
            elif number == 5 and isinstance(value, bytes):
                row |= dict(_scalars(value))
        if row:
            yield step, row


def sample(records: Iterator[Item], share: float) -> Iterator[Item]:
    """About `share` of the records. Logs repeat the same metrics in the same order, so every
    k-th record could always be the same metric; steps of the golden ratio reach all metrics.
    """
    for place, record in enumerate(records):
        if share >= 1 or place * _GOLDEN % 1.0 < share:
            yield record


def _event_records(file: BinaryIO) -> Iterator[bytes]:
    """Records of a length, a checksum, a message, a checksum; the last one may be half-written."""
    size = os.fstat(file.fileno()).st_size
    while len(head := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", head[:8])
        if file.tell() + length > size:
            return
        if length > limits.LINE_BYTES:
            file.seek(length + 4, 1)
            continue
        yield file.read(length + 4)[:length]


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    for number, value in fields(summary):
        if number != 1 or not isinstance(value, bytes):
            continue
        tag, scalar = "", None
        for inner, content in fields(value):
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
    for number, value in fields(message):
        if number == 5:
            if isinstance(value, float):
                return value
            if isinstance(value, bytes) and len(value) == 4:
                return float(struct.unpack("<f", value)[0])
        if number == 4 and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
    return None


def wandb_history(file: BinaryIO, share: float = 1.0) -> Iterator[dict[str, object]]:
    """The rows of a `.wandb` file, with each value parsed as JSON. share: as for `events`."""
    for body in sample(_wandb_records(file), share):
        for number, history in fields(body):
            if number == 2 and isinstance(history, bytes):
                yield _without_media(dict(_wandb_items(history)))


def wandb_config(file: BinaryIO) -> dict[str, object]:
    """The settings of a run from the first record of a `.wandb` file that has any."""
    for body in _wandb_records(file):
        for number, run in fields(body):
            if number != 17 or not isinstance(run, bytes):
                continue
            configs = [x for field, x in fields(run) if field == 4 and isinstance(x, bytes)]
            return {
                name: value
                for config in configs
                for name, value in _wandb_items(config)
                if not name.startswith("_")
            }
    return {}


def _without_media(row: dict[str, object]) -> dict[str, object]:
    """A row without the descriptions of tables and pictures (`completions.nrows`)."""
    media = {name.removesuffix("._type") for name in row if name.endswith("._type")}
    return {name: value for name, value in row.items() if name.rpartition(".")[0] not in media}


def _wandb_items(message: bytes) -> Iterator[tuple[str, object]]:
    """(name, value) of each item: key = 1, nested_key = 2, value_json = 16."""
    for number, item in fields(message):
        if number != 1 or not isinstance(item, bytes):
            continue
        names, text = [], b""
        for inner, content in fields(item):
            if inner in (1, 2) and isinstance(content, bytes) and content:
                names.append(content.decode("utf-8", "replace"))
            elif inner == 16 and isinstance(content, bytes):
                text = content
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if names:
            yield ".".join(names), value


def _wandb_records(file: BinaryIO) -> Iterator[bytes]:
    """Blocks of 32 KiB, of pieces with a checksum, a length and a kind (whole, first, middle,
    last), as LevelDB writes its log.
    """
    file.seek(7)  # ":W&B", a magic number, a version
    place, record = 7, b""
    while True:
        left = _BLOCK - place % _BLOCK
        if left < 7:
            place += len(file.read(left))
            continue
        head = file.read(7)
        if len(head) < 7:
            return
        length, kind = struct.unpack("<HB", head[4:])
        piece = file.read(length)
        if len(piece) < length:
            return
        place += 7 + length
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if len(record) > limits.LINE_BYTES:
            record = b""
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a protobuf message, up to the first unreadable one."""
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


SQLITE_HEAD = b"SQLite format 3\x00"
_MOST_STEPS = 2_000  # each of a million instructions of SQLite's virtual machine


def run_names(path: Path) -> list[str]:
    """The names of the runs in a database, in the order in which they began."""
    query = "SELECT run_name FROM metrics GROUP BY run_name ORDER BY min(id) LIMIT 1000"
    return [str(name) for (name,) in _rows(path, query, ())]


def trackio_rows(path: Path, run: str, budget: int) -> Iterator[dict[str, Any]]:
    """The rows of a run, each with its "step". More than about `budget` bytes of JSON are sampled
    evenly.
    """
    where = "FROM metrics WHERE run_name = ? AND length(metrics) < ?"
    (size,) = next(_rows(path, f"SELECT sum(length(metrics)) {where}", (run, limits.LINE_BYTES)))
    share = budget / max(1, size or 0)
    order = f"SELECT step, metrics {where} ORDER BY id"
    for step, text in sample(_rows(path, order, (run, limits.LINE_BYTES)), share):
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
        raise InputError(f"{path.name} is not a readable project of trackio: {error}.") from None
