"""Reductions over a process group; with `group=None` they are what they say on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_sum(x: Tensor, group: Any = None) -> Tensor:
    """`x` summed over the ranks of `group`."""
    if group is None:
        return x
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def kth_largest(score: Tensor, tie: Tensor, k: Tensor, *groups: Any) -> tuple[Tensor, Tensor]:
    """The k-th largest pair (score, tie) in the order of score, then tie (int64); k ≥ 1, a 0-dim tensor.

    Over the ranks of every group given. If there are fewer than k pairs, the lowest. On one rank nothing is read back to the host;
    across ranks only each rank's own k largest travel.
    """
    score, tie = score.reshape(-1), tie.reshape(-1)
    if score.numel() == 0:
        score, tie = score.new_full((1,), -torch.inf), tie.new_full((1,), _LOWEST)
    score, tie = _descending(score, tie)
    for group in groups:
        if group is None:
            continue
        want = int(k)
        score, tie = _descending(_gather(score[:want], want, -torch.inf, group), _gather(tie[:want], want, _LOWEST, group))
    index = (k - 1).clamp(0, score.shape[0] - 1).reshape(1)
    return score.gather(0, index).squeeze(0), tie.gather(0, index).squeeze(0)


def at_least(score: Tensor, tie: Tensor, least: tuple[Tensor, Tensor]) -> Tensor:
    """Where the pair (score, tie) is not below `least`."""
    return (score > least[0]) | ((score == least[0]) & (tie >= least[1]))


_LOWEST = torch.iinfo(torch.int64).min


def _descending(score: Tensor, tie: Tensor) -> tuple[Tensor, Tensor]:
    by_tie = tie.argsort(descending=True)
    score, order = score[by_tie].sort(descending=True, stable=True)
    return score, tie[by_tie][order]


def _gather(top: Tensor, want: int, lowest: float, group: Any) -> Tensor:
    """The `want` largest of every rank, one after another; a rank with fewer fills up with `lowest`."""
    top = torch.nn.functional.pad(top, (0, want - top.shape[0]), value=lowest).contiguous()
    shares = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shares, top, group=group)
    return torch.cat(shares)
