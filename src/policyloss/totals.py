"""`Totals`: the counts of the whole optimizer step, which every average divides by.

A loss that divides by the tokens of its own micro-batch depends on how the batch was split. Here
every loss divides by a number that was counted over the whole step: all micro-batches, all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import check_group, check_like, check_tensor, description, is_number
from policyloss.errors import InputError
from policyloss.functional.collectives import all_sum, several_ranks
from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import accumulator_dtype, count, fill
from policyloss.functional.segments import Sequences, group_index
from policyloss.tokens import as_mask, check_group_ids, expand_advantages

Number = int | float | Tensor


@dataclass(frozen=True)
class GroupTokens:
    """The number of valid `tokens` `[G]` of each prompt group of a step; `ids` `[G]`, sorted."""

    ids: Tensor
    tokens: Tensor

    def __post_init__(self) -> None:
        check_tensor("GroupTokens.ids", self.ids, "integer")
        check_like("GroupTokens.tokens", self.tokens, ("GroupTokens.ids", self.ids))
        if self.ids.dim() != 1:
            raise InputError(
                "GroupTokens.ids must be 1-D, the ids of the groups in rising order, got "
                f"{description(self.ids)}."
            )


@dataclass(frozen=True)
class Totals:
    """Counts of the whole optimizer step, over all micro-batches and ranks.

    tokens: valid tokens. sequences: sequences with at least one valid token. groups: for
    `PromptMean`, a `GroupTokens`, or the number of prompt groups if no micro-batch or rank splits a
    group. weights: for `WeightMean`, the sum of the weights of the valid tokens.
    dp_size: the number of ranks over which the framework *averages* gradients (DDP, FSDP); the loss
    is multiplied by dp_size, so that the average is the gradient of the whole batch. Pass 1 for an
    engine that sums gradients.
    statistics: batch-wide numbers that some losses need, by name; `measure` computes them.
    streams: for a `Mixture`, the totals of each stream by its name.
    """

    tokens: Number
    sequences: Number
    groups: Number | GroupTokens | None = None
    dp_size: int = 1
    statistics: dict[str, Tensor] | None = field(default=None, compare=False)
    weights: Number | None = None
    streams: Mapping[str, Totals] | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "dp_size"):
            value = getattr(self, name)
            _check_count(f"Totals.{name}", value, "a count")
        if self.groups is not None and not isinstance(self.groups, GroupTokens):
            _check_count("Totals.groups", self.groups, "a number of groups, a GroupTokens or None")
        if self.weights is not None:
            _check_count("Totals.weights", self.weights, "a sum of weights or None")
        ranks: Any = self.dp_size
        if not isinstance(ranks, Tensor) and (not isinstance(ranks, int) or ranks < 1):
            raise InputError(f"Totals.dp_size must be a number of ranks, got {description(ranks)}.")
        numbers = self.statistics
        if numbers is not None and not (
            isinstance(numbers, dict) and all(isinstance(x, Tensor) for x in numbers.values())
        ):
            raise InputError(
                "Totals.statistics must be a dict of tensors, as policyloss.measure makes it, got "
                f"{description(numbers)}."
            )
        streams: Any = self.streams
        totals = streams.values() if isinstance(streams, Mapping) else [streams]
        if streams is not None and not all(isinstance(x, Totals) for x in totals):
            raise InputError(
                "Totals.streams must be a mapping of names to Totals, as policyloss.measure makes "
                f"it, got {description(streams)}."
            )

    @classmethod
    def count(
        cls,
        mask: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        group_ids: Tensor | None = None,
        weights: Tensor | None = None,
        group: Any = None,
        cp_group: Any = None,
        dp_size: int | None = None,
    ) -> Totals:
        """Count all micro-batches of the step on this rank, then sum the counts over all ranks.

        mask: `[B, T]`, or `[N]` with `cu_seqlens`, of *all* these micro-batches (concatenate the
        masks, or add the `Totals` of each: `a + b`). group_ids: `[S]`, the prompt group of each
        sequence; only `PromptMean` needs it. weights: as in `policy_loss`; only `WeightMean` needs
        their sum. group: the process group of data-parallel ranks, each with its own sequences;
        None is the default group if there is one. cp_group: the process group of ranks that hold
        different tokens of the *same* sequences. dp_size: by default the product of the sizes of
        both groups, as DDP and FSDP average over all these ranks; pass 1 if your engine sums
        gradients.
        """
        check_tensor("mask", mask)
        sequences = Sequences.of(mask, cu_seqlens, cp_group, "mask")
        lengths = sequences.sum(as_mask(mask, mask))
        groups = None
        if group_ids is not None:
            check_group_ids(group_ids, sequences)
            check_tensor("group_ids", group_ids, like=("mask", mask))
            groups = group_tokens(group_ids, lengths)
        counts = cls(lengths.sum(), count(lengths > 0), groups)
        counts = counts.all_reduce(group, cp_group=cp_group, dp_size=dp_size)
        if weights is None:
            return counts
        weights = expand_advantages(weights, sequences, "weights", ("mask", mask))
        ranks = (cp_group, data_parallel_group(group, cp_group))
        return replace(counts, weights=sum_weights(weights, mask, *ranks))

    @classmethod
    def of_call(cls, mask: Tensor, dp_size: int = 1) -> Totals:
        """The counts of one padded `[B, T]` mask alone, as with `totals="local"`."""
        check_tensor("mask", mask)
        valid = as_mask(mask, mask)
        tokens = count(valid).to(accumulator_dtype(mask.device))
        return cls(tokens, count(valid.any(-1)), dp_size=dp_size)

    def all_reduce(
        self, group: Any = None, *, cp_group: Any = None, dp_size: int | None = None
    ) -> Totals:
        """The counts summed over all data-parallel ranks; unchanged on one rank."""
        self._refuse_streams("summed over ranks")
        group = data_parallel_group(group, cp_group)
        cp_size = 1 if cp_group is None else dist.get_world_size(cp_group)
        if group is None:
            return replace(self, dp_size=cp_size if dp_size is None else dp_size)
        if not isinstance(self.tokens, Tensor) or not isinstance(self.sequences, Tensor):
            raise InputError("all_reduce needs tensor counts, as Totals.count makes them.")
        pair = torch.stack([self.tokens.to(torch.int64), self.sequences.to(torch.int64)])
        dist.all_reduce(pair, group=group)
        groups = self.groups
        if isinstance(groups, GroupTokens):
            shares: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(shares, (groups.ids.cpu(), groups.tokens.cpu()), group=group)
            ids, tokens = (torch.cat([s[i] for s in shares]).to(pair.device) for i in (0, 1))
            groups = group_tokens(ids, tokens)
        size = dist.get_world_size(group) * cp_size if dp_size is None else dp_size
        weights = self.weights
        if weights is not None:
            weights = all_sum(torch.as_tensor(weights, device=pair.device), group)
        tokens, sequences = pair
        counts = replace(self, tokens=tokens, sequences=sequences, groups=groups, dp_size=size)
        return replace(counts, weights=weights)

    def _refuse_streams(self, change: str) -> None:
        if self.streams is not None:
            raise InputError(
                f"the totals of a Mixture cannot be {change}: make them of the whole step at once, "
                "with policyloss.accumulate or policyloss.measure."
            )

    def __add__(self, other: Totals) -> Totals:
        if not isinstance(other, Totals):
            return NotImplemented
        self._refuse_streams("added")
        other._refuse_streams("added")
        if self.dp_size != other.dp_size:
            raise InputError(
                f"cannot add totals of different dp_size ({self.dp_size} and {other.dp_size})."
            )
        if self.statistics or other.statistics:
            raise InputError(
                "measured statistics do not add up; call policyloss.measure once, on the tensors "
                "of the whole step."
            )
        a, b = self.groups, other.groups
        groups: Number | GroupTokens | None
        if isinstance(a, GroupTokens) and isinstance(b, GroupTokens):
            groups = group_tokens(torch.cat([a.ids, b.ids]), torch.cat([a.tokens, b.tokens]))
        elif a is None or b is None:
            groups = None
        elif isinstance(a, GroupTokens) or isinstance(b, GroupTokens):
            raise InputError(
                "cannot add a number of groups to a GroupTokens; count both the same way."
            )
        else:
            groups = a + b
        tokens, sequences = self.tokens + other.tokens, self.sequences + other.sequences
        u, v = self.weights, other.weights
        weights = None if u is None or v is None else u + v
        return replace(self, tokens=tokens, sequences=sequences, groups=groups, weights=weights)


def _check_count(name: str, value: Any, wanted: str) -> None:
    """Raise unless `value` is a number that is not negative, or a tensor that holds one number."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise InputError(f"{name} must be one number, got a tensor of {description(value)}.")
    elif not is_number(value) or not value >= 0:
        raise InputError(f"{name} must be {wanted}, got {description(value)}.")


def sum_weights(weights: Tensor, mask: Tensor, *groups: Any) -> Tensor:
    """The sum of the token-shaped `weights` where `mask`, over the ranks of all groups, 0-dim."""
    wide = fill(weights, as_mask(mask, mask), accumulator_dtype(mask.device))
    ranks = [group for group in groups if group is not None]
    return arithmetic().scaled_totals_over(ranks, wide)[0]


def data_parallel_group(group: Any, cp_group: Any) -> Any:
    """The ranks with other sequences: `group`, by default all ranks; None if there is only one."""
    check_group("group", group)
    check_group("cp_group", cp_group)
    if group is not None or not several_ranks():
        return group
    if cp_group is None:
        return dist.group.WORLD
    if dist.get_world_size(cp_group) == dist.get_world_size():
        return None
    raise InputError(
        "with cp_group, name the ranks that hold other sequences: pass the data-parallel group as "
        "group=."
    )


def group_tokens(group_ids: Tensor, tokens: Tensor) -> GroupTokens:
    """Sum `tokens` by id. This syncs with the host, which is fine while counting."""
    order, groups = group_index(group_ids)
    ids = torch.unique(group_ids, sorted=True)
    return GroupTokens(ids, groups.sum(tokens[order])[: ids.shape[0]])


def resolve(totals: Totals | Literal["local"] | None) -> Totals | None:
    """The caller's `Totals`; None if this call is the whole batch ("local", or on one rank)."""
    if isinstance(totals, Totals):
        return totals
    if totals is not None and not (isinstance(totals, str) and totals == "local"):
        raise InputError(f'totals must be a Totals, "local" or None, got {description(totals)}.')
    if totals is None and several_ranks():
        raise InputError(
            f"torch.distributed runs on {dist.get_world_size()} ranks, so this call does not see "
            "the denominator of the whole step. Count it once per step: totals = "
            "policyloss.Totals.count(mask_of_the_whole_step, group=data_parallel_group), and "
            'pass totals= to every call; or pass totals="local" if this call really is the whole '
            "batch."
        )
    return None
