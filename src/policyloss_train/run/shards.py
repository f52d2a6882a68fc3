"""The rows of a tensor: each rank writes its own rows, the index names the file of each piece, and
any number of ranks can read the rows.

A DTensor is sharded in its first dimension over all ranks, as by FSDP2, evenly or not. A plain
tensor has all its rows on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from policyloss_lab.runs.files import StorageError


class Share(NamedTuple):
    """One rank's rows of a tensor of `shape`."""

    shape: list[int]
    dtype: str
    sharded: bool
    first: int
    rows: int


_OLDER = "Use an older checkpoint."
# The open files by name; each returns a tensor by name, as a slice of safetensors.
Files = Mapping[str, Callable[[str], Any]]


def file_of(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank{rank:05d}.safetensors"


def local_part(x: Tensor) -> Tensor:
    """The part of a tensor on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def share_of(x: Tensor) -> Share:
    """The rows of `x` on this rank. Rows are split as by `torch.chunk`: rank i of k has the rows
    from i·⌈n/k⌉ to (i+1)·⌈n/k⌉.
    """
    first, rows, sharded = 0, x.shape[0] if x.dim() else 1, isinstance(x, DTensor)
    if isinstance(x, DTensor):
        size = math.ceil(rows / x.device_mesh.size())
        first = min(x.device_mesh.get_local_rank() * size, rows)
        rows = min(size, rows - first)
    return Share(list(x.shape), str(x.dtype).removeprefix("torch."), sharded, first, rows)


def locate_pieces(plans: Sequence[Mapping[str, Share]]) -> dict[str, Any]:
    """The shape, dtype and pieces of each tensor, from the shares of each rank."""
    entries: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        file = file_of(rank)
        for name, share in plan.items():
            known = name in entries
            new = {"shape": share.shape, "dtype": share.dtype, "pieces": []}
            entry = entries.setdefault(name, new)
            if share.rows and (share.sharded or not known):
                entry["pieces"].append({"file": file, "first": share.first, "rows": share.rows})
    return entries


def check_pieces(files: Files, name: str, entry: Mapping[str, Any]) -> None:
    """Raise unless the pieces cover all rows of the tensor once, and the files hold them in these
    shapes; called before any memory of the sizes in the index is allocated.
    """
    shape, next_row = entry["shape"], 0
    for piece in sorted(entry["pieces"], key=lambda piece: piece["first"]):
        stored = list(files[piece["file"]](name).get_shape())
        wanted = [piece["rows"], *shape[1:]] if shape else []
        if stored != wanted:
            shapes = f"{stored} in {piece['file']}, but {wanted} in the index"
            raise StorageError(f"{name} has the shape {shapes}. {_OLDER}")
        if piece["first"] != next_row:
            where = f"begins at row {piece['first']}, where row {next_row} is next"
            raise StorageError(f"{name}: a piece {where}. {_OLDER}")
        next_row += piece["rows"]
    rows = shape[0] if shape else 1
    if next_row != rows:
        raise StorageError(f"{name}: {next_row} of {rows} rows are in the files. {_OLDER}")


def read_like(
    files: Files, name: str, entry: Mapping[str, Any], templates: Mapping[str, Tensor]
) -> Tensor:
    """The rows of this rank, as a DTensor like the template of this name or the nearest name above
    it; without a template, all rows, on the CPU.
    """
    above = name
    while above and above not in templates:
        above = above.rpartition("/")[0]
    shape, like = entry["shape"], templates.get(above)
    if not isinstance(like, DTensor) or list(like.shape) != shape:
        return _read(files, name, entry, 0, shape[0] if shape else 1)
    share = share_of(like)
    local = _read(files, name, entry, share.first, share.rows).to(like.to_local().device)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _read(files: Files, name: str, entry: Mapping[str, Any], first: int, rows: int) -> Tensor:
    """Rows first to first + rows of a tensor, from the pieces that hold some of them."""
    shape, end = entry["shape"], first + rows
    out = torch.empty([rows, *shape[1:]] if shape else [], dtype=getattr(torch, entry["dtype"]))
    for piece in entry["pieces"]:
        begin, stop = max(first, piece["first"]), min(end, piece["first"] + piece["rows"])
        if begin < stop:
            # A tensor without dimensions has no rows: its index is ().
            here = slice(begin - first, stop - first) if shape else ()
            there = slice(begin - piece["first"], stop - piece["first"]) if shape else ()
            out[here] = files[piece["file"]](name)[there]
    return out
