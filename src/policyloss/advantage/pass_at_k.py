"""Advantages for pass@k: the contribution of a sample to the best of its group.

Legend and common rules: see `estimators.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.advantage.groups import (
    RankedGroups,
    check_rewards,
    check_scale,
    divide_by,
    of_all_ranks,
)
from policyloss.arguments import check_choice, check_integer
from policyloss.functional.masking import accumulator_dtype, compute_dtype
from policyloss.functional.recurrence import linear_recurrence_reverse


@torch.no_grad()
def passk_max_gap(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: Literal["std"] | None = "std",
    eps: float = 1e-6,
    ddof: int = 1,
    group: Any = None,
) -> Tensor:
    """Pass@k advantage: the best of a group gets `(r_max − r_second) / (σ + eps)`, the others 0.

    Without its best member, the group's maximum would be lower by exactly `r_max − r_second`; here
    k is the size of the group. σ: the standard deviation of the group's rewards; scale=None does
    not divide. All members get 0 if two share the best reward, or if the group has one member
    (where verl raises an error). group: the process group that a prompt's samples may span, as in
    `group_advantages`.
    Source: Tang et al., arXiv 2503.19595; verl's grpo_passk.
    """
    _check_passk(rewards, group_ids, scale, eps, ddof)
    dtype = compute_dtype(rewards)
    (r, ids), this_rank = of_all_ranks(group, rewards, group_ids)
    if r.numel() == 0:
        return r.to(dtype)
    g = RankedGroups.of(r, ids)
    second = g.at((g.rank - 1).clamp(min=0))
    gap = torch.where(g.rank == g.size - 1, g.rewards - second, 0)
    return g.back(gap if scale is None else divide_by(gap, g.std(ddof), eps), dtype)[this_rank]


@torch.no_grad()
def passk_combinatorial(
    rewards: Tensor,
    group_ids: Tensor,
    k: int,
    *,
    scale: Literal["std"] | None = "std",
    eps: float = 0.0,
    group: Any = None,
) -> Tensor:
    """Pass@k over all `C(n, k)` subsets of a group, each rewarded by its best member.

    In closed form, without enumerating subsets:
    `A_i = (mean reward of the subsets with i − mean of all) / (std of all + eps)`, with the
    population standard deviation; scale=None does not divide.
    For rewards 0/1 with m wrong, the mean over subsets is `R = 1 − C(m,k)/C(n,k)`, their variance
    `σ² = R(1−R)`, `A_right = (1−R)/σ`, `A_wrong = (1 − R − C(m−1,k−1)/C(n−1,k−1))/σ`. With k = 1
    this is GRPO with ddof 0.
    Source: Chen et al., arXiv 2508.10751, which covers 0/1 rewards. If the best reward is the same
    in all subsets (a constant group, fewer than k wrong), or if n ≤ k, the result is 0.
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    _check_passk(rewards, group_ids, scale, eps, 0)
    check_integer("k", k, 1)
    dtype = compute_dtype(rewards)
    (rewards, group_ids), this_rank = of_all_ranks(group, rewards, group_ids)
    if rewards.numel() == 0:
        return rewards.to(dtype)
    g = RankedGroups.of(rewards, group_ids)
    # All terms are shifted alike, so measure from the lowest; NaN is put back by group, as 0·nan
    # would cross groups in the scan.
    r = (g.rewards - g.lowest).nan_to_num(0, 0, 0)
    best = _choose_ratio(g.rank, k - 1, g.size, k)
    mean = g.total(best * r)
    std = g.total(best * (r - mean) ** 2).sqrt()
    above = _choose_ratio(g.rank - 1, k - 2, g.size - 1, k - 1) * r
    inside = (g.rank < g.size - 1).to(r.dtype)
    above_sum = inside * linear_recurrence_reverse(above, inside).roll(-1)
    mean_with = _choose_ratio(g.rank, k - 1, g.size - 1, k - 1) * r + above_sum
    # The k-th lowest is the worst a subset's best can be (and with n ≤ k, the highest is).
    flat = g.at((g.size - 1).clamp(max=k - 1)) == g.highest
    advantage = torch.where(flat, 0, mean_with - mean)
    advantage = advantage if scale is None else divide_by(advantage, torch.where(flat, 0, std), eps)
    return g.back(advantage + g.total(g.rewards * 0), dtype)[this_rank]


def _choose_ratio(a: Tensor, b: int, n: Tensor, k: int) -> Tensor:
    """`C(a, b) / C(n, k)`, 0 where `C(a, b)` or `C(n, k)` is 0."""
    exists = (a >= b) & (n >= k) & (b >= 0)
    b, wide = max(b, 0), accumulator_dtype(a.device)
    a, n = a.clamp(min=b).to(wide), n.clamp(min=k).to(wide)

    def log_choose(top: Tensor, bottom: int) -> Tensor:
        of_bottom = torch.lgamma(torch.full_like(top, bottom + 1))
        return torch.lgamma(top + 1) - torch.lgamma(top - bottom + 1) - of_bottom

    return torch.where(exists, (log_choose(a, b) - log_choose(n, k)).exp(), 0)


def _check_passk(
    rewards: Tensor, group_ids: Tensor, scale: str | None, eps: float, ddof: int
) -> None:
    check_rewards(rewards, group_ids)
    check_choice("scale", scale, ("std", None))
    check_scale(eps, ddof)
