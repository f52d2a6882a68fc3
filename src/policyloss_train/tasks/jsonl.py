"""Tasks from a file of JSON lines: `{"prompt": …, "answer": …}`, or with "messages" in place of the
prompt, and with `"split": "held_out"` in held-out lines if the file has its own split.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from policyloss.errors import InputError
from policyloss.output import open_regular
from policyloss_train.tasks.base import (
    Example,
    Reward,
    Task,
    is_text,
    normalise_spaces,
    number_examples,
)

HELD_OUT_SHARE = 0.1  # of the different prompts of a file without a split
SPLITS = ("train", "held_out")


def file_task(path: Path, score: Reward) -> Task:
    """The task in the file at `path`. Training prompts are never held out."""
    rows = list(_rows(path))
    if not rows:
        raise InputError(f'{path} has no examples; write {{"prompt": …, "answer": …}} per line.')
    if not any(split == "held_out" for split, _ in rows):
        prompts = _share({normalise_spaces(example.prompt) for _, example in rows})
        rows = [
            ("held_out" if normalise_spaces(e.prompt) in prompts else "train", e) for _, e in rows
        ]
    train = [example for split, example in rows if split != "held_out"]
    trained = {normalise_spaces(example.prompt) for example in train}
    held_out = [example for _, example in rows if normalise_spaces(example.prompt) not in trained]
    for name, examples in (("train on", train), ("hold out", held_out)):
        if not examples:
            raise InputError(
                f"{path} leaves no prompt to {name}: it needs different prompts for training and "
                "for evaluation."
            )
    return Task(str(path), number_examples(train), number_examples(held_out), score)


def _share(prompts: set[str]) -> set[str]:
    """The held-out tenth of the prompts, at least one: the prompts with the smallest hashes."""
    ordered = sorted(prompts, key=lambda prompt: sha256(prompt.encode()).digest())
    return set(ordered[: max(1, round(HELD_OUT_SHARE * len(ordered)))])


def _rows(path: Path) -> Iterator[tuple[str | None, Example]]:
    """The split that each line names, or None, and its example, without the final id."""
    try:
        with os.fdopen(open_regular(path, follow=True), "rb") as file:
            data = file.read()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read the task {path}: {why}.") from error
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield _row(line, f"{path}, line {number}")


def _row(line: bytes, where: str) -> tuple[str | None, Example]:
    try:
        data = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}).") from error
    if not isinstance(data, dict):
        raise InputError(
            f'{where}: {type(data).__name__} where an object {{"prompt": …, "answer": …}} belongs.'
        )
    messages = _messages(data, where)
    if messages:
        data["prompt"] = "\n".join(message["content"] for message in messages)
    for key in ("prompt", "answer"):
        if key not in data:
            raise InputError(
                f"{where}: the key {key!r} is missing; there are: "
                f"{', '.join(map(repr, data)) or 'none'}."
            )
        if not isinstance(data[key], str):
            raise InputError(f'{where}: {key!r} is {data[key]!r}; write a string, "{key}": "…".')
        if not is_text(data[key]):
            raise InputError(
                f"{where}: {key!r} has half of a surrogate pair, which is no character: "
                f"{data[key]!r:.80}."
            )
    if not data["prompt"].strip():
        raise InputError(f"{where}: the prompt is empty.")
    split = data.get("split")
    if split is not None and split not in SPLITS:
        raise InputError(f"{where}: 'split' is {split!r}; valid are 'train' and 'held_out'.")
    named = ("prompt", "messages", "answer", "split")
    meta = {key: item for key, item in data.items() if key not in named}
    return split, Example(data["prompt"], data["answer"], meta=meta, messages=messages)


def _messages(row: dict[str, Any], where: str) -> tuple[dict[str, str], ...]:
    """The messages of a row; () if the row has a prompt."""
    if "messages" not in row:
        return ()
    messages, keys = row["messages"], {"role", "content"}
    if "prompt" in row:
        raise InputError(f"{where}: there are both 'prompt' and 'messages'; leave one out.")
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: 'messages' is {messages!r:.80}; write a list of messages.")
    for message in messages:
        if (
            not isinstance(message, dict)
            or set(message) != keys
            or not all(isinstance(x, str) for x in message.values())
        ):
            raise InputError(
                f"{where}: the message {message!r:.80} is not of the form "
                '{"role": "user", "content": "…"}.'
            )
    if messages[-1]["role"] == "assistant":
        raise InputError(
            f"{where}: the last message is the assistant's; it must be a message to answer."
        )
    return tuple(messages)
