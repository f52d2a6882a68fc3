"""Reductions over a process group, and rows gathered from its ranks; None is this rank alone."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import check_group
from policyloss.errors import InputError


def statistics_group(group: Any) -> Any:
    """The group whose ranks share a statistic, or None for this rank alone.

    `"local"` means this rank alone. So does None, with a warning if there are other ranks; the
    warning points at the line that called the package.
    """
    if isinstance(group, str):
        if group != "local":
            raise InputError(
                f'group must be a process group, "local" (this rank alone) or None, got {group!r}.'
            )
        return None
    check_group("group", group)
    if group is None and several_ranks():
        warnings.warn(
            f"torch.distributed runs on {dist.get_world_size()} ranks, but these statistics are of "
            'this rank alone; pass group= for those of all its ranks, or group="local" if a rank '
            "alone is meant.",
            UserWarning,
            stacklevel=outside_level(),
        )
    return group


def outside_level() -> int:
    """The `stacklevel` of a warning that should point at the line that called the package.

    It counts the frames from the calling function up to the first one outside of this package and
    of torch's decorators.
    """
    level = 1
    while sys._getframe(level).f_globals.get("__name__", "").split(".")[0] in (
        "policyloss",
        "torch",
    ):
        level += 1
    return level


class Gathered(NamedTuple):
    """The rows of all ranks, one rank after another, and the slice that belongs to this rank."""

    columns: list[Tensor]
    this_rank: slice


def gather_rows(columns: Sequence[Tensor], group: Any = None, **alike: int) -> Gathered:
    """The rows of all ranks, without gradient.

    columns: `[n]` or `[n, k]` each, with the same n; each becomes `[Σn]` or `[Σn, K]`. Ranks may
    have different n, also 0, and different k: narrower columns are filled up with 0 (or False) to
    the width K of the widest.
    alike: numbers that must be equal on all ranks, by name. If they differ, every rank raises an
    error.
    This takes two collectives: the sizes, then all columns together. Numbers travel as 64 bits
    each, which keeps them exactly.
    """
    columns = [x.detach() for x in columns]
    n = columns[0].shape[0]
    if group is None:
        return Gathered(columns, slice(0, n))
    device = collective_device(group, columns[0].device)
    widest = max(x.shape[1] if x.dim() == 2 else 1 for x in columns)
    here = torch.tensor([n, widest, len(columns), *alike.values()], device=device)
    sizes = all_gather(here, group)
    table = torch.stack(sizes).tolist()
    for i, what in enumerate(("numbers per row", *alike), start=2):
        if len({row[i] for row in table}) > 1:
            hint = "" if i > 2 else _PER_TOKEN
            raise InputError(
                f"every rank must give as many {what}, but the ranks gave "
                f"{[row[i] for row in table]}{hint}."
            )
    rows, width = max(row[0] for row in table), max(row[1] for row in table)
    bits = torch.zeros(rows, len(columns), width, dtype=torch.int64, device=device)
    for i, x in enumerate(columns):
        wide = x.to(device, torch.float64 if x.is_floating_point() else torch.int64)
        bits[:n, i, : x.shape[1] if x.dim() == 2 else 1] = (
            wide.view(torch.int64).view(n, -1) if n else wide.new_zeros(0, 1)
        )
    shares = zip(all_gather(bits, group), table, strict=True)
    all_bits = torch.cat([share[: row[0]] for share, row in shares])
    before = sum(row[0] for row in table[: dist.get_rank(group)])
    rows_of_all = [_from_bits(all_bits[:, i], x) for i, x in enumerate(columns)]
    return Gathered(rows_of_all, slice(before, before + n))


_PER_TOKEN = (
    "; if they are per token on one rank and per sequence on another because both shapes are the "
    "same there: padded tokens take numbers per sequence as [S], packed ones as [S, 1]"
)


def _from_bits(bits: Tensor, like: Tensor) -> Tensor:
    """The numbers that `bits` stand for, in the dtype of `like` and with as many dimensions."""
    bits = bits.contiguous() if like.dim() == 2 else bits[:, 0].contiguous()
    numbers = bits.view(torch.float64) if like.is_floating_point() else bits
    return numbers.to(like.device, like.dtype)


def all_gather(x: Tensor, group: Any) -> list[Tensor]:
    """`x` of every rank, on the device of `x`; its shape must be the same on all ranks."""
    here = x.to(collective_device(group, x.device)).contiguous()
    shares = [torch.empty_like(here) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, here, group=group)
    return [share.to(x.device) for share in shares]


def collective_device(group: Any, otherwise: torch.device) -> torch.device:
    """The device where the group's backend works: CPU for gloo, GPU for NCCL, else `otherwise`."""
    return {"gloo": torch.device("cpu"), "nccl": torch.device("cuda")}.get(
        dist.get_backend(group), otherwise
    )


def several_ranks() -> bool:
    """Whether torch.distributed runs on more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_sum(x: Tensor, group: Any = None) -> Tensor:
    """`x` summed over the ranks of `group`."""
    if group is None:
        return x
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def all_max(x: Tensor, group: Any) -> Tensor:
    """The largest `x` of the ranks of `group`, element by element; NaN where a rank has NaN."""
    # A maximum over ranks may lose a NaN, so a flag for NaN is reduced with it.
    pair = torch.stack([torch.where(x.isnan(), torch.inf, x), x.isnan().to(x.dtype)])
    dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
    return torch.where(pair[1] > 0, torch.nan, pair[0])


def kth_largest(score: Tensor, tie: Tensor, k: Tensor, *groups: Any) -> tuple[Tensor, Tensor]:
    """The k-th largest pair (score, tie), in the order of score, then tie (int64).

    k: at least 1, a 0-dim tensor; with fewer than k pairs, the lowest is returned. The pairs of all
    ranks of every group count. On one rank nothing is read back to the host; across ranks only the
    k largest of each rank travel.
    """
    score, tie = _largest(score, tie, k, groups)
    return score[0], tie[0]


def least_of_largest(score: Tensor, tie: Tensor, k: Tensor, *groups: Any) -> tuple[Tensor, Tensor]:
    """A threshold pair that the k largest pairs, and no others, reach (`reaches_threshold`).

    Its score is halfway between the k-th and the next score, because scores that are computed again
    may differ in their last digits. If these two are equal, it is the k-th pair. Arguments as in
    `kth_largest`.
    """
    (score, after), (tie, _) = (x.unbind() for x in _largest(score, tie, k, groups))
    middle = (score + after) / 2
    apart = torch.where((middle > after) | (after == -torch.inf), middle, score)
    return torch.where(score > after, apart, score), torch.where(score > after, _LOWEST, tie)


def _largest(
    score: Tensor, tie: Tensor, k: Tensor, groups: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Scores and ties `[2]` of the k-th and the next largest pair; the lowest is repeated."""
    score, tie = score.reshape(-1), tie.reshape(-1)
    if score.numel() == 0:
        score, tie = score.new_full((1,), -torch.inf), tie.new_full((1,), _LOWEST)
    score, tie = _descending(score, tie)
    for group in groups:
        if group is None:
            continue
        want = int(k) + 1
        missing = (0, max(want - score.shape[0], 0))  # where a rank has fewer
        score = torch.nn.functional.pad(score[:want], missing, value=-torch.inf)
        tie = torch.nn.functional.pad(tie[:want], missing, value=_LOWEST)
        score, tie = _descending(*(torch.cat(all_gather(x, group)) for x in (score, tie)))
    index = torch.stack([k - 1, k]).clamp(0, score.shape[0] - 1)
    return score.gather(0, index), tie.gather(0, index)


def reaches_threshold(score: Tensor, tie: Tensor, least: tuple[Tensor, Tensor]) -> Tensor:
    """Where the pair (score, tie) is not below `least`."""
    return (score > least[0]) | ((score == least[0]) & (tie >= least[1]))


_LOWEST = torch.iinfo(torch.int64).min


def _descending(score: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    by_tie = tie.argsort(descending=True)
    score, order = score[by_tie].sort(descending=True, stable=True)
    return score, tie[by_tie][order]
