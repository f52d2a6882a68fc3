"""Rewards relative to their group (`group_advantages`) or to the batch (`whiten`).

The code has no loop over groups.
Legend: S sequences; `rewards`, `group_ids` are `[S]`; a group is the set of sequences with the same
id (the samples of one prompt). Statistics are computed in float64 and in an order that does not
depend on the order of the rows.
Over several ranks: `group` is a process group; its ranks hold different sequences, of the same or
of different prompts. Rewards and ids of all ranks are gathered, and each rank gets the advantages
of its own rows. An id must mean the same prompt on every rank.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import (
    check_choice,
    check_flag,
    check_group,
    check_like,
    check_number,
    check_tensor,
    description,
)
from policyloss.errors import InputError
from policyloss.functional.collectives import Gathered, gather_rows, outside_level, statistics_group
from policyloss.functional.exact import arithmetic, stays_eager
from policyloss.functional.masking import accumulator_dtype, can_be_read, compute_dtype, fill, holds
from policyloss.functional.segments import Sequences, group_index
from policyloss.tokens import as_mask

Center = Literal["mean", "loo"] | None
Scale = Literal["std", "loo_std", "batch_std", "mad", "mean"] | None
Single = Literal["zero", "raw"]
CENTERS: tuple[Center, ...] = ("mean", "loo", None)
SCALES: tuple[Scale, ...] = ("std", "loo_std", "batch_std", "mad", "mean", None)


@dataclass(frozen=True)
class RankedGroups:
    """The sequences laid out group after group, and by rising reward inside a group.

    All tensors `[S]`, in that order.

    rewards: float64. order: the row that each element came from. size: the size of the element's
    group. rank: the element's index in its group, 0 for the lowest reward. first: the index at
    which its group begins. To test whether all rewards of a group are equal, compare its first and
    last reward: this is exact, while "std ≈ 0" is not.
    """

    rewards: Tensor
    order: Tensor
    groups: Sequences
    size: Tensor
    rank: Tensor
    first: Tensor

    @classmethod
    def of(cls, rewards: Tensor, group_ids: Tensor) -> RankedGroups:
        """Sort the rewards and split them into groups; S ≥ 1."""
        wide = rewards.detach().to(accumulator_dtype(rewards.device))
        by_reward = wide.argsort(stable=True)
        by_group, groups = group_index(group_ids[by_reward])
        order = by_reward[by_group]
        assert groups.offsets is not None
        assert groups.ids is not None
        first, stop = groups.offsets[groups.ids], groups.offsets[groups.ids + 1]
        rank = torch.arange(len(order), device=order.device) - first
        return cls(wide[order], order, groups, stop - first, rank, first)

    @property
    def lowest(self) -> Tensor:
        """The smallest reward of the element's group."""
        return self.at(torch.zeros_like(self.rank))

    @property
    def highest(self) -> Tensor:
        """The largest reward of the element's group (NaN if there is a NaN)."""
        return self.at(self.size - 1)

    @property
    def constant(self) -> Tensor:
        """Whether all rewards of the element's group are exactly equal; true for a group of one."""
        return self.highest == self.lowest

    def at(self, rank: Tensor) -> Tensor:
        """The reward with this rank in the element's group."""
        return self.rewards[self.first + rank]

    def total(self, x: Tensor) -> Tensor:
        """The sum of `x` over the element's group."""
        return self.groups.expand(self.groups.sum(x))

    def mean(self, weight: Tensor | None = None) -> Tensor:
        """The (weighted) mean reward of the element's group; 0 for a group without weight."""
        if weight is None:
            return self.total(self.rewards) / self.size
        weight_total = self.total(weight)
        return self.total(weight * self.rewards) / torch.where(weight_total > 0, weight_total, 1)

    def std(self, ddof: int) -> Tensor:
        """The standard deviation of the element's group; exactly 0 if its rewards are all equal."""
        deviation = self.rewards - self.mean()
        variance = self.total(deviation**2) / (self.size - ddof).clamp(min=1)
        return torch.where(self.constant, 0, variance.sqrt())

    def mean_deviation(self) -> Tensor:
        """The mean of |r − μ| over the element's group; exactly 0 if its rewards are all equal."""
        deviation = self.total((self.rewards - self.mean()).abs()) / self.size
        return torch.where(self.constant, 0, deviation)

    def std_of_others(self, ddof: int) -> Tensor:
        """The standard deviation of the group's other elements; exactly 0 if they are equal."""
        deviation = self.rewards - self.mean()
        # Σ_{j≠i} (r_j − mean of the others)² = Σ d² − d_i²·n/(n−1), with d measured from the mean
        # of all.
        squares = self.total(deviation**2) - deviation**2 * self.size / (self.size - 1).clamp(min=1)
        variance = squares.clamp(min=0) / (self.size - 1 - ddof).clamp(min=1)
        alone = self.size <= 2
        low = self.at((self.rank == 0).long().minimum(self.size - 1))
        high = self.at((self.size - 1 - (self.rank == self.size - 1).long()).clamp(min=0))
        return torch.where(alone | (low == high), 0, variance.sqrt())

    def back(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`x` in the order of the input's rows."""
        x = x.to(dtype)
        return torch.empty_like(x).scatter(0, self.order, x)


@stays_eager
@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    center: Center = "mean",
    scale: Scale = "std",
    eps: float = 1e-6,
    ddof: int = 1,
    weights: Tensor | None = None,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """Rewards relative to their group: `(r − baseline) / (spread + eps)`.

    rewards: `[S]`; group_ids: `[S]`, any integers in any order. The result is `[S]`, without
    gradient; S may be 0.

    center, the baseline: "mean" is the group's mean, "loo" the mean of the *other* members, None
    is 0. weights, `[S]`: of the rewards in the "mean" baseline; the spread ignores them.
    scale, the spread: "std" is the standard deviation of the group, "loo_std" of the other members,
    "batch_std" of all rewards, each with `ddof`; "mad" is the group's mean |r − μ| (DGPO, arXiv
    2601.20614: the sum of |A| over a prompt is then its number of samples); "mean" is the group's
    mean. With scale=None, or where the spread is exactly 0, nothing is divided.
    single, for a group of one: "zero" gives 0; "raw", as in verl, takes 0 as the baseline and 1 as
    the spread (with "batch_std", the spread is still the batch's).
    With a center, a constant group (all rewards exactly equal) gives exactly 0. A NaN reward makes
    its whole group NaN.
    group: the process group whose ranks share the batch. A prompt's samples may lie on several of
    them, if its id is the same on every rank; each rank has its own S, which may be 0. With context
    parallel, pass the data-parallel group: ranks that hold the same sequences would count them
    twice. "local" uses this rank alone; None does too, but warns if there are other ranks.
    """
    check_rewards(rewards, group_ids)
    check_choice("center", center, CENTERS)
    check_choice("scale", scale, SCALES)
    check_choice("single", single, ("zero", "raw"))
    check_scale(eps, ddof)
    if weights is not None and center != "mean":
        raise InputError(f'weights belong to center="mean", not center={center!r}.')
    dtype = compute_dtype(rewards)
    columns = () if weights is None else (per_sequence("weights", weights, rewards),)
    gathered, this_rank = of_all_ranks(group, rewards, group_ids, *columns)
    rewards, group_ids, *weight_column = gathered
    if rewards.numel() == 0:
        return rewards.new_zeros(0, dtype=dtype)
    g = RankedGroups.of(rewards, group_ids)
    silent = center is not None and single == "zero" and g.size.numel() > 1
    if silent and can_be_read(g.size) and holds(g.size.max() == 1):
        warnings.warn(
            f"group_ids: all {g.size.numel()} ids are different, so every group is of one sequence "
            "and every advantage is 0. Give the samples of one prompt the same id, or pass "
            'single="raw" for the rewards themselves.',
            stacklevel=outside_level(),
        )
    weight = weight_column[0][g.order] if weight_column else None
    alone_raw = (g.size == 1) & (single == "raw")
    advantage = torch.where(alone_raw, g.rewards, _center_rewards(g, center, weight))
    if scale is not None:
        spread = _spread(g, scale, ddof)
        if scale != "batch_std":
            spread = torch.where(alone_raw, 0 if scale == "mean" else 1, spread)
        advantage = divide_by(advantage, spread, eps)
    return g.back(advantage, dtype)[this_rank]


def of_all_ranks(group: Any, rewards: Tensor, group_ids: Tensor, *more: Tensor) -> Gathered:
    """The columns of all ranks that share a statistic, in float64; ids keep their dtype."""
    wide = accumulator_dtype(rewards.device)
    columns = [rewards.to(wide), group_ids, *(x.to(wide) for x in more)]
    return gather_rows(columns, statistics_group(group))


def _center_rewards(g: RankedGroups, center: Center, weight: Tensor | None) -> Tensor:
    if center is None:
        return g.rewards
    deviation = g.rewards - g.mean(weight)
    if center == "loo":
        # r_i − mean of the others = (r_i − mean)·n/(n−1)
        deviation = deviation * g.size / (g.size - 1).clamp(min=1)
    return torch.where(g.constant, 0, deviation)


def _spread(g: RankedGroups, scale: Scale, ddof: int) -> Tensor:
    if scale == "std":
        return g.std(ddof)
    if scale == "loo_std":
        return g.std_of_others(ddof)
    if scale == "mad":
        return g.mean_deviation()
    if scale == "mean":
        return g.mean()
    _, variance = moments(g.rewards, torch.ones_like(g.rewards), ddof)
    return variance.sqrt().expand_as(g.rewards)


def divide_by(x: Tensor, spread: Tensor, eps: float) -> Tensor:
    """`x / (spread + eps)`, and `x` itself where the spread is exactly 0."""
    return torch.where(spread == 0, x, x / torch.where(spread == 0, 1, spread + eps))


def moments(x: Tensor, weight: Tensor, ddof: int, *groups: Any) -> tuple[Tensor, Tensor]:
    """Mean and variance of `x`, each element counted `weight` times; 0-dim, in float64.

    They are taken over the ranks of every group. `x` must be finite where its weight is 0. There
    are two passes, because E[x²] − E[x]² cancels.
    """
    wide = accumulator_dtype(x.device)
    x, weight = x.to(wide), weight.to(wide)
    n, total = arithmetic().scaled_totals_over(groups, weight, x * weight)
    mean = total / n.clamp(min=1)
    (squares,) = arithmetic().scaled_totals_over(groups, (x - mean) ** 2 * weight)
    # The mean of equal numbers may be off by a rounding error; that is no variance.
    rounding = n * (4 * torch.finfo(wide).eps * mean) ** 2
    return mean, torch.where(squares <= rounding, 0, squares) / (n - ddof).clamp(min=1)


@stays_eager
@torch.no_grad()
def whiten(
    x: Tensor,
    mask: Tensor,
    *,
    mean: bool = True,
    group: Any = None,
    eps: float = 1e-8,
    cp_group: Any = None,
) -> Tensor:
    """`(x − mean) / √(variance + eps)` over all valid tokens, with the unbiased variance.

    x may have any shape. The result is 0 at masked tokens and has no gradient.
    mean: False keeps the original mean (it is added back after scaling). group: a process group
    whose ranks share mean and variance; "local" uses this rank alone; None does too, but warns if
    there are other ranks. cp_group: the context-parallel group, if `group` leaves out its
    ranks; mean and variance then cover both. For a constant x or a single valid token
    the result is 0 (plus the mean if it is kept); without any valid token it is all zeros.
    Source: the masked whitening of verl and TRL's PPO (which have no defined result for fewer than
    two tokens).
    """
    check_tensor("x", x, "float")
    check_flag("mean", mean)
    mask = as_mask(mask, x, like_called="x")
    numbers, groups = fill(x.detach(), mask, compute_dtype(x)), shared_groups(group, cp_group)
    return whiten_by(numbers, mask.to(accumulator_dtype(x.device)), *groups, mean=mean, eps=eps)


def shared_groups(group: Any, cp_group: Any) -> tuple[Any, Any]:
    """The process groups of a statistic over tokens: data ranks, context-parallel ranks."""
    check_group("cp_group", cp_group)
    if (
        group is None
        and cp_group is not None
        and dist.get_world_size(cp_group) == dist.get_world_size()
    ):
        group = "local"  # all ranks belong to cp_group
    return statistics_group(group), cp_group


def whiten_by(
    x: Tensor, weight: Tensor, *groups: Any, mean: bool = True, eps: float = 1e-8
) -> Tensor:
    """`whiten` for elements that count `weight` times, as an advantage counts once per token."""
    check_scale(eps, 1)
    center, variance = moments(x, weight, 1, *groups)
    # Centred in float64: in float32 a mean far from 0 would be rounded before it is subtracted.
    centred = x.to(center.dtype) - center
    result = torch.where(variance == 0, 0 * centred, centred * (variance + eps).rsqrt())
    return fill(result if mean else result + center, weight > 0, x.dtype)


def check_rewards(rewards: Tensor, group_ids: Tensor) -> None:
    """Raise unless rewards are `[S]` numbers and group_ids `[S]` integers."""
    check_tensor("rewards", rewards)
    if rewards.dim() != 1:
        raise InputError(
            f"rewards must be one number per sequence, a tensor [S], got {description(rewards)}; "
            "sum token rewards first."
        )
    check_like("group_ids", group_ids, ("rewards", rewards), "integer", "give one id each")


def check_scale(eps: float, ddof: int) -> None:
    """Raise unless eps ≥ 0 and ddof is 0 or 1."""
    check_number("eps", eps, least=0)
    if isinstance(ddof, bool) or not isinstance(ddof, int) or ddof not in (0, 1):
        raise InputError(f"ddof must be 0 (population) or 1 (sample), got {description(ddof)}.")


def per_sequence(name: str, x: Tensor, rewards: Tensor) -> Tensor:
    """`x`, checked to hold one number per sequence, as `rewards` `[S]` does."""
    check_like(name, x, ("rewards", rewards), fix="give one number per sequence")
    return x.detach()


def rows_by_size(group_ids: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The rows sorted by group `[S]`, the size of each one's group `[S]`, and the rows by size.

    The rows by size are one tensor `[groups, n]` for each group size n above one.
    """
    order, groups = group_index(group_ids)
    assert groups.offsets is not None
    assert groups.ids is not None
    size = groups.offsets[groups.ids + 1] - groups.offsets[groups.ids]
    sizes = [n for n in torch.unique(size).tolist() if n > 1]
    return order, size, [order[size == n].view(-1, n) for n in sizes]
