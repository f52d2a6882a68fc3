"""Checkpoints of a model that is spread over ranks: each rank writes its own rows, any number of ranks reads them back.

    checkpoints/step_000010/checkpoint.json       as ever, and for each tensor its shape and where its rows are
    checkpoints/step_000010/rank00000.safetensors, rank00001.safetensors, …

A DTensor may be sharded in its first dimension, as FSDP2 does, evenly or not, and replicated over other dimensions of the mesh
(HSDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import safetensors
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from policyloss.errors import InputError
from policyloss.train.run.atomic import StorageError, write_error
from policyloss.train.run.checkpoint import (
    TENSORS,
    State,
    begin,
    check_arguments,
    checked_index,
    finish,
    flatten,
    latest,
    prune,
    undone_on_error,
    write_tensors,
)

T = TypeVar("T")


def save_sharded(folder: Path, step: int, state: State, numbers: Mapping[str, Any], *, keep: int | None, group: Any = None) -> Path:
    """`save` by all ranks of `group` together: each must call it. If one cannot write, no checkpoint appears and every rank raises.

    Of a DTensor each rank writes its own rows. A plain tensor is written by the lowest rank that has one of its name: give it the
    same values on all ranks, or on each rank a name of its own. numbers: those of rank 0 are kept.
    """
    check_arguments(step, keep)
    rank = _rank(group)
    tensors: dict[str, Tensor] = {}

    def plan() -> dict[str, Share]:
        tensors.update(flatten(state))
        return {name: _share(name, x) for name, x in tensors.items()}

    plans = _on_every_rank(plan, group)
    pieces = _pieces(plans)  # of the same plans on every rank: all raise, or none
    own = {name: _local(tensors[name]) for name, entry in pieces.items() if any(p["file"] == _file(rank) for p in entry["pieces"])}
    with undone_on_error(folder, step) if rank == 0 else nullcontext():
        temporary = _on_rank_0(lambda: _explained(folder, lambda: begin(folder, step)), group)
        file = temporary / _file(rank)
        reports = _on_every_rank(lambda: _explained(file, lambda: write_tensors(file, own)) if own else None, group)
        contents = {
            "files": {_file(r): report for r, report in enumerate(reports) if report},
            "sharded": pieces,
            "numbers": numbers,
        }
        path = _on_rank_0(lambda: _explained(folder, lambda: finish(temporary, step, contents)), group)
    _on_rank_0(lambda: prune(folder, step, keep), group)
    return path


def load_sharded(path: Path, layout: State | None = None, *, group: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and numbers of a checkpoint, sharded or not, written by any number of ranks.

    layout: DTensors, named as in the state that was saved. What has the shape and name of one of them, or its shape and a name
    under its own (an optimizer's moments are `parameter/exp_avg`), is read as this rank's rows and becomes a DTensor laid out like
    it, on its device. Everything else is read whole, on the CPU: without a layout, one process reads what many wrote.
    Every rank of `group` must call it; if one cannot read its part, all raise. Sizes are checked, not sums: take the path from
    `latest_on_ranks`, which reads every byte.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        found["tensors"], found["numbers"] = _load(path, flatten(layout or {}))

    _on_every_rank(read, group)
    return found["tensors"], found["numbers"]


def _load(path: Path, templates: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    index = checked_index(path, sums=False)
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(safe_open(path / name, framework="pt")) for name in index["files"]}
            entries = index["sharded"] if "sharded" in index else _entries_of_one_file(files[TENSORS], index["same"])
            for name, entry in entries.items():
                _check_pieces(files, name, entry)
            tensors = {name: _read_like(files, name, entry, _template(templates, name)) for name, entry in entries.items()}
    except StorageError:
        raise
    except (
        safetensors.SafetensorError,
        OSError,
        KeyError,
        TypeError,
        AttributeError,
        ValueError,
        IndexError,
        RuntimeError,
    ) as error:
        raise StorageError(f"checkpoint {path} is damaged: {type(error).__name__}: {error}. Use an older one.") from error
    return tensors, index["numbers"]


def _check_pieces(files: Mapping[str, Any], name: str, entry: Mapping[str, Any]) -> None:
    """Raise if the files hold other shapes than the index says, before memory is asked for by what it says."""
    shape = entry["shape"]
    for piece in entry["pieces"]:
        stored = list(files[piece["file"]].get_slice(piece.get("name", name)).get_shape())
        wanted = [piece["rows"], *shape[1:]] if shape else []
        if stored != wanted:
            raise StorageError(
                f"{name} has the shape {stored} in {piece['file']}, but the index says {wanted}. Use an older checkpoint."
            )
    held = sum(piece["rows"] for piece in entry["pieces"])
    if shape and held < shape[0]:
        raise StorageError(f"{name}: {shape[0] - held} of {shape[0]} rows are in no file of the checkpoint. Use an older one.")


def latest_on_ranks(folder: Path, check: Callable[[Path], object] | None = None, *, group: Any = None) -> Path | None:
    """`latest` for all ranks of `group`: rank 0 looks, and all get its answer."""
    return _on_rank_0(lambda: latest(folder, check), group)


class Share(NamedTuple):
    """What one rank has of a tensor: rows first to first + rows of `shape`. writes: it is the one replica that writes them."""

    shape: list[int]
    dtype: str
    sharded: bool
    first: int
    rows: int
    writes: bool


def _share(name: str, x: Tensor) -> Share:
    """The rows of `x` on this rank. Rows are cut like `torch.chunk`: rank i of k has those from i·⌈n/k⌉ to (i+1)·⌈n/k⌉."""
    first, rows, writes = 0, x.shape[0] if x.dim() else 1, True
    placements: Any = x.placements if isinstance(x, DTensor) else ()
    for dim, placement in enumerate(placements):
        mesh: Any = x.device_mesh  # type: ignore[attr-defined]
        ranks, rank = mesh.size(dim), mesh.get_local_rank(dim)
        if isinstance(placement, Replicate):
            writes = writes and rank == 0
        elif type(placement) is Shard and placement.dim == 0:
            size = math.ceil(rows / ranks)
            begin = min(rank * size, rows)
            first, rows = first + begin, min(size, rows - begin)
        else:
            raise InputError(f"state[{name!r}] is laid out as {placements}; only shards of the first dimension can be written.")
    held = _local(x).shape[:1]
    if placements and x.dim() and held != (rows,):
        raise InputError(f"state[{name!r}]: this rank holds {tuple(held)} rows, but {rows} of {x.shape[0]} are its share.")
    return Share(list(x.shape), str(x.dtype).removeprefix("torch."), bool(placements), first, rows, writes)


def _pieces(plans: list[dict[str, Share]]) -> dict[str, Any]:
    """By tensor: its shape, its dtype, and its pieces, `{"file", "first", "rows"}` each."""
    entries: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for name, share in plan.items():
            known = name in entries
            entry = entries.setdefault(name, {"shape": share.shape, "dtype": share.dtype, "pieces": [], "by": rank})
            if (entry["shape"], entry["dtype"]) != (share.shape, share.dtype):
                raise InputError(
                    f"state[{name!r}] is {entry['dtype']} {entry['shape']} on rank {entry['by']} but {share.dtype} {share.shape} "
                    f"on rank {rank}; give what belongs to one rank a name with that rank in it."
                )
            if share.rows and (share.writes if share.sharded else not known):
                entry["pieces"].append({"file": _file(rank), "first": share.first, "rows": share.rows})
    return {name: {key: value for key, value in entry.items() if key != "by"} for name, entry in entries.items()}


def _entries_of_one_file(file: Any, same: Mapping[str, str]) -> dict[str, Any]:
    """A checkpoint of one process, described as if ranks had written it."""
    entries = {}
    for name in [*file.keys(), *same]:
        stored = same.get(name, name)
        shape = file.get_slice(stored).get_shape()
        piece = {"file": TENSORS, "first": 0, "rows": shape[0] if shape else 1, "name": stored}
        entries[name] = {"shape": shape, "dtype": str(file.get_tensor(stored).dtype).removeprefix("torch."), "pieces": [piece]}
    return entries


def _template(templates: Mapping[str, Tensor], name: str) -> Tensor | None:
    """The tensor of the layout that has this name, or the nearest one above it."""
    while name and name not in templates:
        name = name.rpartition("/")[0]
    return templates.get(name)


def _read_like(files: Mapping[str, Any], name: str, entry: Mapping[str, Any], like: Tensor | None) -> Tensor:
    shape = entry["shape"]
    if not isinstance(like, DTensor) or list(like.shape) != shape:
        return _read(files, name, entry, 0, shape[0] if shape else 1)
    share = _share(name, like)
    local = _read(files, name, entry, share.first, share.rows).to(like.to_local().device)
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def _read(files: Mapping[str, Any], name: str, entry: Mapping[str, Any], first: int, rows: int) -> Tensor:
    """Rows first to first + rows of a tensor, from the pieces that hold some of them."""
    shape, end = entry["shape"], first + rows
    out = torch.empty([rows, *shape[1:]] if shape else [], dtype=getattr(torch, entry["dtype"]))
    missing = rows
    for piece in entry["pieces"]:
        begin, stop = max(first, piece["first"]), min(end, piece["first"] + piece["rows"])
        if begin >= stop:
            continue
        file, stored = files[piece["file"]], piece.get("name", name)
        if shape:
            out[begin - first : stop - first] = file.get_slice(stored)[begin - piece["first"] : stop - piece["first"]]
        else:
            out.copy_(file.get_tensor(stored))
        missing -= stop - begin
    if missing:
        raise StorageError(f"{name}: {missing} of rows {first} to {end} are in no file of the checkpoint. Use an older one.")
    return out


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _file(rank: int) -> str:
    return f"rank{rank:05d}.safetensors"


def _explained(path: Path, action: Callable[[], T]) -> T:
    """`action()`; if it cannot write, an error that the other ranks understand too."""
    try:
        return action()
    except (OSError, safetensors.SafetensorError) as error:
        raise write_error(path, error, "Older checkpoints are untouched.") from error


def _rank(group: Any) -> int:
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def _on_every_rank(action: Callable[[], T], group: Any) -> list[T]:
    """Run `action` on every rank of `group` and return all results; if it fails on one, raise on every rank, so that none waits."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # told to the other ranks, and raised below
        error = raised
    said: list[Any] = [(result, error and f"{type(error).__name__}: {error}")]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        (mine,) = said
        said = [None] * dist.get_world_size(group)
        dist.all_gather_object(said, mine, group=group)
    elif error is not None:
        raise error  # nobody else has to hear of it
    failures = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(said) if why]
    if failures:
        raise StorageError(" ".join(failures)) from error
    return [one for one, _ in said]


def _on_rank_0(action: Callable[[], T], group: Any) -> T:
    """Run `action` on the first rank of `group` alone; every rank gets its result, or its failure."""
    results: list[Any] = _on_every_rank(lambda: action() if _rank(group) == 0 else None, group)
    first: T = results[0]
    return first
