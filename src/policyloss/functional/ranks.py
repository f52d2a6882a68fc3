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


def kth_largest(score: Tensor, k: Tensor, *groups: Any) -> Tensor:
    """The k-th largest number of `score` (k ≥ 1, a 0-dim tensor), over the ranks of every group given; the lowest if too few.

    On one rank nothing is read back to the host. Across ranks only each rank's own k largest travel.
    """
    top = score.reshape(-1).sort(descending=True).values
    for group in groups:
        if group is None:
            continue
        want = int(k)
        lowest = -torch.inf if score.is_floating_point() else torch.iinfo(score.dtype).min
        top = torch.nn.functional.pad(top[:want], (0, max(want - top.shape[0], 0)), value=lowest).contiguous()
        shares = [torch.empty_like(top) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shares, top, group=group)
        top = torch.cat(shares).sort(descending=True).values
    return top.gather(0, (k - 1).clamp(0, max(top.shape[0] - 1, 0)).reshape(1)).squeeze(0)
