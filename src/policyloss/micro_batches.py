"""Micro-batches end to end: what the optimizer step that they make up is counted from.

Legend: N tokens and S sequences of all micro-batches of a rank, one after another (padded rows
count as sequences of their width).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import check_tensor
from policyloss.errors import InputError
from policyloss.functional.collectives import all_gather
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask, check_group_ids
from policyloss.totals import GroupTokens, Totals


def check_micro_batches(micro_batches: Any) -> None:
    """Raise unless `micro_batches` is a sequence of mappings that hold a mask."""
    if not isinstance(micro_batches, Sequence):
        raise InputError(
            f"micro_batches must be a list of mappings, got {type(micro_batches).__name__}; the "
            "step is counted before it begins: collect an iterator's by list(…), and put a "
            "single micro-batch in a list."
        )
    for i, data in enumerate(micro_batches):
        if not isinstance(data, Mapping):
            raise InputError(
                f"micro_batches[{i}] must be a mapping of names to tensors, got "
                f"{type(data).__name__}."
            )
        if data.get("mask") is None:
            names = ", ".join(map(str, data)) or "nothing"
            raise InputError(f"micro_batches[{i}] has no mask (it has {names}); put it there.")
    with_groups = [data.get("group_ids") is not None for data in micro_batches]
    if any(with_groups) and not all(with_groups):
        raise InputError(
            f"micro_batches[{with_groups.index(False)}] has no group_ids, but others have; give "
            "all of them or none."
        )


@dataclass(frozen=True)
class Pack:
    """Micro-batches end to end, `[N]`, `[S+1]` and `[S]`, and where each has its sequences."""

    mask: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor | None
    layouts: list[Sequences]

    @classmethod
    def of(cls, micro_batches: Sequence[Mapping[str, Any]]) -> Pack:
        """Check and pack one micro-batch or more."""
        layouts, masks, lengths, groups = [], [], [], []
        for i, data in enumerate(micro_batches):
            mask, group_ids = data["mask"], data.get("group_ids")
            try:
                check_tensor("mask", mask)
                _check_values("mask", mask)
                masks.append(as_mask(mask, mask).reshape(-1))
                sequences = Sequences.of(mask, data.get("cu_seqlens"), called="mask")
                if group_ids is not None:
                    check_group_ids(group_ids, sequences)
                    _check_values("group_ids", group_ids)
                    groups.append(group_ids.to(mask.device))
            except InputError as error:
                raise InputError(f"micro_batches[{i}]: {error}") from None
            layouts.append(sequences)
            rows = torch.full(mask.shape[:1], mask.shape[-1], device=mask.device)
            ends = sequences.offsets
            lengths.append(rows if ends is None else ends.diff().to(torch.int64))
        offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        return cls(torch.cat(masks), offsets, torch.cat(groups) if groups else None, layouts)


def _check_values(name: str, x: Tensor) -> None:
    if x.is_meta:
        where = "the device 'meta', which holds no values to count"
        raise InputError(f"{name} is on {where}; move it to the loss's device.")


def counted_step(
    micro_batches: Sequence[Mapping[str, Any]], group: Any, cp_group: Any, dp_size: int | None
) -> tuple[Totals, int]:
    """The counts of the step, and the largest number of micro-batches on any rank of `group`."""
    if group is None:
        _check_numbers([len(micro_batches)])
        pack = Pack.of(micro_batches)
        layout = {"cu_seqlens": pack.cu_seqlens, "group_ids": pack.group_ids, "cp_group": cp_group}
        return Totals.count(pack.mask, **layout, dp_size=dp_size), len(micro_batches)
    share, members = _share(micro_batches, cp_group)
    tokens, sequences, numbers, with_ids = torch.stack(all_gather(share, group)).unbind(1)
    number_of_each, members_of_each = numbers.tolist(), with_ids.tolist()
    _check_numbers(number_of_each)
    groups = _groups(members, members_of_each, group) if max(members_of_each) >= 0 else None
    ranks = len(number_of_each) * (1 if cp_group is None else dist.get_world_size(cp_group))
    size = ranks if dp_size is None else dp_size
    return Totals(tokens.sum(), sequences.sum(), groups, size), max(number_of_each)


def _share(micro_batches: Sequence[Mapping[str, Any]], cp_group: Any) -> tuple[Tensor, Tensor]:
    """Tokens, sequences, micro-batches and group ids (−1: none given) of this rank as `[4]`; `[2,
    S]` ids and lengths if given.
    """
    if not micro_batches:
        return torch.tensor([0, 0, 0, -1]), torch.zeros(2, 0, dtype=torch.int64)
    pack = Pack.of(micro_batches)
    lengths = Sequences.of(pack.mask, pack.cu_seqlens, cp_group).sum(pack.mask)
    ids = pack.group_ids
    members = -1 if ids is None else ids.shape[0]
    numbers = torch.tensor([len(micro_batches), members], device=lengths.device)
    counts = torch.cat([torch.stack([lengths.sum(), (lengths > 0).sum()]), numbers])
    if ids is None:
        return counts, lengths.new_zeros(2, 0)
    return counts, torch.stack([ids.to(torch.int64), lengths])


def _check_numbers(numbers: list[int]) -> None:
    """Raise on every rank if one has no micro-batch to run a sharded model's forward on."""
    if 0 in numbers:
        raise InputError(
            f"rank {numbers.index(0)} of {len(numbers)} was given no micro-batch; every rank needs "
            "one in micro_batches, to run its forward on: give it one with an all-False mask, "
            "which adds nothing."
        )


def _groups(members: Tensor, members_of_each: list[int], group: Any) -> GroupTokens:
    """The tokens of each group over all ranks. members: ids and lengths `[2, S]` of this one."""
    if min(members_of_each) < 0:
        raise InputError(
            f"rank {members_of_each.index(-1)} of the group has no group_ids, but others have; "
            "give them on all ranks or on none."
        )
    missing = (0, max(members_of_each) - members.shape[1])
    shares = all_gather(torch.nn.functional.pad(members, missing), group)
    there = [share[:, :n] for share, n in zip(shares, members_of_each, strict=True)]
    ids, lengths = torch.cat(there, dim=1)
    each, place = torch.unique(ids, return_inverse=True)
    return GroupTokens(each, torch.zeros_like(each).index_add(0, place, lengths))
