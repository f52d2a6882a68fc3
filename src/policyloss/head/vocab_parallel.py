"""A vocabulary split over the ranks of a process group.

Each rank holds some rows of the weight, and all ranks hold the same hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.collectives import all_gather
from policyloss.head.softmax_rows import Partials


class Vocabulary(NamedTuple):
    """A vocabulary of `size` entries. This rank holds a range that starts at `first`.

    group: None if this rank holds all entries.
    largest: entries of the largest shard. free: bytes of memory that every rank has; None without a
    group. Plans are made from `largest` and `free`, which are the same on every rank, because all
    ranks must split their rows into the same windows: each window is summed over ranks.
    """

    size: int
    largest: int
    first: int = 0
    group: Any = None
    free: int | None = None

    @classmethod
    def of(cls, weight: Tensor, group: Any, tokens: int, free: Callable[[], int]) -> Vocabulary:
        """The vocabulary of which this rank holds the shard `weight` `[V_r, D]`.

        Shards follow each other in the order of ranks, and need not have the same size.
        """
        if group is None:
            return cls(weight.shape[0], weight.shape[0])
        here = torch.tensor([weight.shape[0], tokens, free()], device=weight.device)
        sizes, rows, bytes_free = torch.stack(all_gather(here, group)).t().tolist()
        # Known to all ranks now, so all of them raise.
        if min(sizes) == 0:
            raise InputError(
                f"weight has no entries on rank {sizes.index(0)} of vocab_group; each rank must "
                "hold at least one."
            )
        if len(set(rows)) > 1:
            raise InputError(
                f"hidden must be the same on every rank of vocab_group, but they hold {rows} "
                "tokens."
            )
        first = sum(sizes[: dist.get_rank(group)])
        return cls(sum(sizes), max(sizes), first, group, min(bytes_free))

    def merge(self, p: Partials, ids: Tensor, entries: int) -> Partials:
        """The partials of whole rows, in two all-reduces of a few numbers per row; on one rank,
        `p`. ids: counted from this rank's first entry. entries: how many this rank holds.
        """
        if self.group is None:
            return p
        here = (ids >= 0) & (ids < entries)
        top = p.max.clone()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
        # A shard in which all entries are −inf has sum 0 and counts for nothing.
        distance = torch.where(p.max == -torch.inf, 0, p.max - top)
        shrink = distance.exp()
        parts = [p.sum * shrink, torch.where(here, p.target + distance, 0)]
        if p.moment is not None:
            parts.append((p.moment + distance * p.sum) * shrink)
        together = torch.stack(parts)
        dist.all_reduce(together, group=self.group)
        moment = None if p.moment is None else together[2]
        return Partials(top, together[0], moment, together[1])

    def top(self, x: Tensor, k: int) -> Tensor:
        """The global ids `[R, k]` of the k largest entries of rows that are split over ranks."""
        values, ids = x.topk(min(k, x.shape[1]), -1)
        if self.group is None:
            return ids
        missing = (0, k - ids.shape[1])  # every rank sends k, and a small shard has fewer
        values = torch.nn.functional.pad(values, missing, value=-torch.inf)
        ids = torch.nn.functional.pad(ids + self.first, missing)
        values, ids = (torch.cat(all_gather(x, self.group), -1) for x in (values, ids))
        return ids.gather(-1, values.topk(k, -1).indices)

    def sum_shares(self, x: Tensor) -> Tensor:
        """`x` summed over the shards, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x
