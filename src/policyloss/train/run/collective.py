"""Work that ranks do together on files: if it fails on one of them, it fails on all, so that none
waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from policyloss.train.run.atomic import StorageError

T = TypeVar("T")


def rank_in(group: Any) -> int:
    """The place of this process in a group of processes; 0 without one."""
    return 0 if group is None else dist.get_rank(group)


def on_every_rank(action: Callable[[], T], group: Any) -> list[T]:
    """`action()` on every rank of `group`, and the results of all. If it fails on one rank, every
    rank raises.

    None is no group: this process works alone, and an error is the one that `action` raised.
    """
    if group is None:
        return [action()]
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # the other ranks hear of it, and it is raised below
        error = raised
    reports: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(
        reports, (result, error and f"{type(error).__name__}: {error}"), group=group
    )
    failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(reports) if reason]
    if failures:
        raise StorageError(" ".join(failures)) from error
    return [one for one, _ in reports]


def on_first_rank(action: Callable[[], T], group: Any) -> T:
    """`action()` on the first rank of `group` alone; every rank gets its result, or its failure."""
    results: list[Any] = on_every_rank(lambda: action() if rank_in(group) == 0 else None, group)
    first: T = results[0]
    return first
