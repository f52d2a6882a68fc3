"""Reads token-level pairs from JSON lines, safetensors, or the batch of a known trainer."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_lab import limits
from policyloss_lab.reading import open_file, parse_object

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_TYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool, "U8": torch.uint8} | _FLOATS
_TYPES["BF16"] = torch.bfloat16


def read_tokens(path: str | Path) -> dict[str, Any]:
    """The arguments of `lab.doctor` in a file: padded tensors, and prompts as lists.

    A line of a .jsonl file is a row: lists of one length under `rollout_logp`, `old_logp` or
    `logp`, and optionally `ids`, `mask`, `prompt_ids` (docs/doctor.md lists other names). A
    .safetensors file holds `[B, T]` tensors of these names.
    """
    file = Path(path)
    if file.suffix == ".safetensors":
        tensors = read_safetensors(file)
        columns = columns_of(tensors)
        return {
            argument: tensors[name] for argument, name in columns.items() if argument != "prompts"
        }
    return _pad_rows(read_rows(file), file)


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file: a length, a JSON header (dtype, shape, offsets), the numbers."""
    with open_file(file, limits.TOKEN_FILE_BYTES) as handle:
        data = handle.read()
    try:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        start = 8 + length
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                body = bytearray(data[start + first : start + last])
                flat = torch.frombuffer(body, dtype=_TYPES[entry["dtype"]])
                tensors[name] = flat.reshape(entry["shape"])
        return tensors
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{file} is not a valid safetensors file: {type(error).__name__}."
        ) from error


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; a file without any raises an `InputError`."""
    rows: list[dict[str, Any]] = []
    with open_file(file, limits.TOKEN_FILE_BYTES) as handle:
        for number, line in enumerate(handle, 1):
            row = parse_object(line)
            if row is not None:
                rows.append(row)
            elif line.strip():
                raise InputError(
                    f"{file}, line {number}, is not a JSON object; write one object per line."
                )
    if not rows:
        raise InputError(f"{file} is empty; write one JSON object per line.")
    return rows


def _pad_rows(rows: list[dict[str, Any]], file: Path) -> dict[str, Any]:
    """Rows of different lengths as tensors `[B, T]` under the names of `lab.doctor`."""
    columns = columns_of(rows[0])
    prompts = columns.pop("prompts", None)
    for i, row in enumerate(rows, 1):
        for name in columns.values():
            if not isinstance(row.get(name), list):
                raise InputError(f"{file}, row {i}, has no list under {name!r}.")
        length = len(row[columns["rollout_logp"]])
        for name in columns.values():
            if len(row[name]) != length:
                raise InputError(
                    f"{file}, row {i}: {name} has {len(row[name])} numbers and "
                    f"{columns['rollout_logp']} {length}; they must be equal."
                )
    lengths = torch.tensor([len(row[columns["rollout_logp"]]) for row in rows])
    valid = torch.arange(int(lengths.max())) < lengths[:, None]
    out: dict[str, Any] = {}
    for argument, name in columns.items():
        kind = torch.long if argument == "ids" else torch.float32
        out[argument] = torch.zeros(valid.shape, dtype=kind)
        try:
            out[argument][valid] = torch.tensor([x for row in rows for x in row[name]], dtype=kind)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"{file}: {name} holds more than numbers.") from error
    out["mask"] = out["mask"].bool() & valid if "mask" in out else valid
    if prompts is not None and all(isinstance(row.get(prompts), list) for row in rows):
        out["prompts"] = [row[prompts] for row in rows]
    return out


# Ours, verl's, TRL's, OpenRLHF's, prime-rl's.
COLUMNS: dict[str, tuple[str, ...]] = {
    "rollout_logp": (
        *("rollout_logp", "rollout_log_probs", "sampling_per_token_logps", "rollout_logprobs"),
        "inference_logprobs",
    ),
    "old_logp": (
        *("old_logp", "old_log_probs", "old_per_token_logps", "action_log_probs"),
        "trainer_logprobs",
    ),
    "logp": ("logp", "log_probs"),
    "ids": ("ids", "responses", "completion_ids", "token_ids"),
    "mask": ("mask", "response_mask", "completion_mask", "action_mask", "loss_mask"),
    "prompts": ("prompts", "prompt_ids", "prompt_token_ids"),
}


def first_names(table: Mapping[str, Sequence[str]], known: Iterable[str]) -> dict[str, str]:
    """{our name: the first of its names in `table` that is known}."""
    names = set(known)
    in_order = {ours: [name for name in others if name in names] for ours, others in table.items()}
    return {ours: there[0] for ours, there in in_order.items() if there}


def columns_of(names: Any) -> dict[str, str]:
    """{argument of `doctor`: the name of its column}; an `InputError` if a side is missing."""
    known = list(names)
    columns = first_names(COLUMNS, known)
    for side, needed in (("engine", ("rollout_logp",)), ("trainer", ("old_logp", "logp"))):
        if not any(argument in columns for argument in needed):
            wanted = [name for argument in needed for name in COLUMNS[argument]]
            raise InputError(
                f"the {side}'s log-probabilities are missing: none of "
                f"{', '.join(wanted)} among {', '.join(map(str, known[:20])) or 'no columns'}."
            )
    return columns
