"""Tasks from a file of JSON lines, `{"prompt": …, "answer": …}`, with `"split": "held_out"` where
the file has its own split.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.train.tasks.base import ListTask, Reward, normalised, numbered

HELD_OUT_SHARE = 0.1  # of the different prompts of a file without a split
SPLITS = ("train", "held_out")


@dataclass(frozen=True)
class Row:
    """One line. split: None if it does not say."""

    prompt: str
    answer: str
    split: str | None
    meta: dict[str, Any]


def file_task(path: Path, reward: Reward) -> ListTask:
    """The task in the file at `path`. Prompts that are also trained on are left out of what
    is held out.
    """
    rows = list(_rows(path))
    if not rows:
        raise InputError(
            f'{path} has no examples; write one {{"prompt": …, "answer": …}} per line.'
        )
    if any(row.split == "held_out" for row in rows):
        chosen = [row.split == "held_out" for row in rows]
    else:
        held = _share({normalised(row.prompt) for row in rows})
        chosen = [normalised(row.prompt) in held for row in rows]
    train = [row for row, is_held in zip(rows, chosen, strict=True) if not is_held]
    trained = {normalised(row.prompt) for row in train}
    held_out = [
        row
        for row, is_held in zip(rows, chosen, strict=True)
        if is_held and normalised(row.prompt) not in trained
    ]
    for name, split in (("train on", train), ("hold out", held_out)):
        if not split:
            raise InputError(
                f"{path} leaves no prompt to {name}: it needs different prompts for training and "
                "for evaluation."
            )
    return ListTask(
        str(path),
        numbered((row.prompt, row.answer, row.meta) for row in train),
        numbered((row.prompt, row.answer, row.meta) for row in held_out),
        reward,
    )


def _share(prompts: set[str]) -> set[str]:
    """A tenth of the prompts, at least one: those with the smallest hashes, so that neither their
    order nor a seed matters.
    """
    ordered = sorted(
        prompts, key=lambda prompt: sha256(prompt.encode("utf-8", "surrogatepass")).digest()
    )
    return set(ordered[: max(1, round(HELD_OUT_SHARE * len(ordered)))])


def _rows(path: Path) -> Iterator[Row]:
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"the task {path} is no plain file; give one of JSON lines.")
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the task {path}: {error.strerror or error}.") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield _row(line, f"{path}, line {number}")


def _row(line: bytes, where: str) -> Row:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}).") from error
    if not isinstance(found, dict):
        raise InputError(
            f'{where}: {type(found).__name__} where an object {{"prompt": …, "answer": …}} belongs.'
        )
    for key in ("prompt", "answer"):
        if key not in found:
            raise InputError(
                f"{where}: the key {key!r} is missing; there are: "
                f"{', '.join(map(repr, found)) or 'none'}."
            )
        if not isinstance(found[key], str):
            raise InputError(
                f'{where}: {key!r} is {found[key]!r}; write it as a string, "{key}": "…".'
            )
    if not found["prompt"].strip():
        raise InputError(f"{where}: the prompt is empty.")
    split = found.get("split")
    if split is not None and split not in SPLITS:
        raise InputError(
            f"{where}: 'split' is {split!r}; valid are {' and '.join(map(repr, SPLITS))}."
        )
    meta = {key: value for key, value in found.items() if key not in ("prompt", "answer", "split")}
    return Row(found["prompt"], found["answer"], split, meta)
