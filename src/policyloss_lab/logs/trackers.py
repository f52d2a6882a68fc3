"""Files of trackers: TensorBoard events, and the project database of trackio
(`~/.cache/huggingface/trackio/<project>.db`, SQLite).

A file may come from anybody. Nothing in it is executed and too long records are skipped. A database
is opened read-only, its schema is not trusted, and a query that does not end is stopped.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.reading import parse_object

Item = TypeVar("Item")
Row = dict[str, float]
WANDB_HEAD = b":W&B"
NOT_READ = (
    "is a binary log of Weights & Biases, which is not read; run `wandb sync`, and export the "
    "charts of the run as CSV or its history as JSON lines."
)
_GOLDEN = 0.6180339887498949


def is_tensorboard(head: bytes) -> bool:
    """Whether a file that begins with `head` holds events of TensorBoard."""
    return b"brain.Event:" in head[:64]


def events(file: BinaryIO, name: str, share: float = 1.0) -> Iterator[tuple[int, Row]]:
    """The scalars of an events file by step; damaged records are left out. name: of the file, for
    errors. share: the share of the records to read.
    """
    try:
        event: Any = import_module("tensorboard.compat.proto.event_pb2").Event()
    except ModuleNotFoundError:
        install = "pip install 'policyloss-lab[tensorboard]'"
        raise InputError(f"{name} needs tensorboard: {install}.") from None
    for body in sample(_event_records(file), share):
        try:
            event.ParseFromString(body)
        except Exception:  # DecodeError of protobuf, which only tensorboard requires
            continue
        if row := {value.tag: x for value in event.summary.value for x in _scalar(value)}:
            yield event.step, row


def _scalar(value: Any) -> list[float]:
    """The number of a scalar in the old or the new form; [] for histograms, texts and pictures."""
    if value.HasField("simple_value"):
        return [value.simple_value]
    tensor = value.tensor
    numbers = list(tensor.float_val)
    if len(tensor.tensor_content) == 4:
        numbers += struct.unpack("<f", tensor.tensor_content)
    return numbers[:1]


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


SQLITE_HEAD = b"SQLite format 3\x00"
_MOST_STEPS = 2_000  # each of a million instructions of SQLite's virtual machine


def run_names(path: Path) -> list[str]:
    """The names of the runs in a database, in the order in which they began."""
    query = "SELECT run_name FROM metrics GROUP BY run_name ORDER BY min(id) LIMIT 1000"
    return [str(name) for (name,) in _rows(path, query, ())]


def trackio_rows(path: Path, run: str, budget: int) -> Iterator[dict[str, Any]]:
    """The rows of a run, each with its "step"; evenly sampled above about `budget` bytes."""
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
    steps = itertools.count()
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            base.execute("PRAGMA trusted_schema = OFF")
            base.set_progress_handler(lambda: next(steps) >= _MOST_STEPS, 1_000_000)
            yield from base.execute(query, values)
    except sqlite3.Error as error:
        raise InputError(f"{path.name} is not a readable project of trackio: {error}.") from None
