"""The named advantage estimators of the field, each a thin line over `group_advantages`, `whiten` and `discounted_returns`.

Legend: S sequences; rewards, group_ids, lengths and (unless said otherwise) results are `[S]`; hand a result to `policy_loss` as it
is. n is the size of a group, μ its mean reward, σ its standard deviation. Nothing carries a gradient.
Common rules, said once in `group_advantages`: a constant group gives exactly 0; a group of one gives 0, or with `single="raw"` the
raw reward, as in verl; a spread of exactly 0 divides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.advantages.baselines import (
    RankedGroups,
    Single,
    check_choice,
    check_numbers,
    check_rewards,
    divided,
    group_advantages,
    per_sequence,
    whiten,
    whitened,
)
from policyloss.advantages.optimal_baseline import optimal_token_baseline
from policyloss.advantages.returns import discounted_returns, gae
from policyloss.errors import InputError
from policyloss.functional.masking import accumulator_dtype, compute_dtype
from policyloss.functional.ranks import all_sum
from policyloss.functional.scan import linear_recurrence_reverse
from policyloss.functional.segments import group_index


def grpo(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, ddof: int = 1, single: Single = "zero") -> Tensor:
    """GRPO: `(r − μ) / (σ + eps)`.

    Source: Shao et al., arXiv 2402.03300; eps and ddof as in verl (TRL: eps 1e-4; open-instruct: eps 1e-8, ddof 0).
    Constant group: 0. Group of one: 0, or `r / (1 + eps)` with `single="raw"` (verl).
    """
    return group_advantages(rewards, group_ids, eps=eps, ddof=ddof, single=single)


def dr_grpo(rewards: Tensor, group_ids: Tensor, *, single: Single = "zero") -> Tensor:
    """Dr. GRPO: `r − μ`; no division, so easy and hard prompts weigh the same.

    Source: Liu et al., arXiv 2503.20783. Constant group: 0. Group of one: 0, or r with `single="raw"`.
    """
    return group_advantages(rewards, group_ids, scale=None, single=single)


def rloo(rewards: Tensor, group_ids: Tensor, *, single: Single = "zero") -> Tensor:
    """RLOO: `r_i − mean of the other members = (r_i − μ)·n/(n−1)`.

    Source: Ahmadian et al., arXiv 2402.14740. Constant group: 0. Group of one: 0 (verl's rloo_vectorized, SkyRL), or r with
    `single="raw"` (verl's rloo).
    """
    return group_advantages(rewards, group_ids, center="loo", scale=None, single=single)


def grpo_loo(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Leave-one-out GRPO: `(r_i − mean of the others) / (std of the others + eps)`, sample standard deviation.

    Source: NeMo-RL's GRPO with its default leave-one-out baseline. Where the others are all equal (one winner among losers; a group
    of two) their spread is exactly 0 and `r_i − mean of the others` stays undivided; computed as E[x²] − E[x]² in float32 that
    spread is rounding residue, which multiplied such an advantage by thousands. Constant group, group of one: 0.
    """
    return group_advantages(rewards, group_ids, center="loo", scale="loo_std", eps=eps)


def reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    group: Any = None,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++: discounted returns over the valid tokens, whitened over all valid tokens. Result token-shaped.

    rewards: token-shaped (any KL penalty included), or `[S]`, then put on the last valid token. mask: token-shaped.
    group: a process group whose ranks share the mean and variance. There are no groups of samples; a constant batch gives 0.
    Source: Hu et al., arXiv 2501.03262; verl's reinforce_plus_plus.
    """
    return whiten(discounted_returns(rewards, mask, gamma, cu_seqlens=cu_seqlens), mask, group=group, eps=eps)


def reinforce_pp_baseline(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor, *, single: Single = "zero", group: Any = None, eps: float = 1e-8
) -> Tensor:
    """REINFORCE++-baseline: `r − μ`, whitened over all valid *tokens*: a sequence counts once for each of its `lengths` tokens.

    Source: Hu et al., arXiv 2501.03262; verl's reinforce_plus_plus_baseline. Constant group, group of one: `r − μ` is 0 (r with
    `single="raw"`) before whitening. A sequence of length 0 does not count, and gets 0.
    """
    return _whitened_by_length(dr_grpo(rewards, group_ids, single=single), per_sequence("lengths", lengths, rewards), group, eps)


def remax(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """ReMax: `r − b`, with b `[S]` the reward of the greedy answer to the same prompt. There are no groups.

    Source: Li et al., arXiv 2310.10505. For rewards on every token, as in verl: `discounted_returns(rewards, mask) − b`.
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 1:
        raise InputError("rewards must be one number per sequence, a tensor [S].")
    b = per_sequence("baseline_rewards", baseline_rewards, rewards)
    dtype = compute_dtype(rewards, b)
    return rewards.detach().to(dtype) - b.to(dtype)


def opo(rewards: Tensor, group_ids: Tensor, lengths: Tensor, *, single: Single = "zero") -> Tensor:
    """OPO: `r − Σ l·r / Σ l` over the group, the variance-optimal baseline if a gradient's square grows with the length l.

    Source: Hao et al., arXiv 2505.23585. Constant group: 0. Group of one: 0, or r with `single="raw"` (verl).
    """
    return group_advantages(rewards, group_ids, scale=None, weights=per_sequence("lengths", lengths, rewards), single=single)


@torch.no_grad()
def gpg(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    f_norm: float = 1.0,
    valid: Literal["informative", "nonzero"] = "informative",
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """GPG: `α·(r − μ) / f_norm`, with α = S / (number of valid sequences), at least one.

    valid: "informative" counts the sequences of groups that are not constant (the paper: those that have a gradient), "nonzero"
    those whose reward is not 0 (verl). group: a process group over which both numbers are summed.
    Source: Chu et al., arXiv 2504.02546. Constant group: 0. Group of one: 0, or α·r/f_norm with `single="raw"` (verl).
    """
    check_choice("valid", valid, ("informative", "nonzero"))
    if not f_norm > 0:
        raise InputError(f"f_norm must be > 0, got {f_norm!r}.")
    centered = dr_grpo(rewards, group_ids, single=single)
    if valid == "nonzero" or rewards.numel() == 0:
        counts = rewards != 0
    else:
        g = RankedGroups.of(rewards, group_ids)
        counts = ~g.constant | ((g.size == 1) & (single == "raw"))
    used = counts.sum()
    total, used = all_sum(torch.stack((torch.full_like(used, counts.numel()), used)), group)
    alpha: Tensor = total.to(centered.dtype) / used.clamp(min=1)
    return centered * (alpha / f_norm)


@torch.no_grad()
def gdpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    weights: Sequence[float] | Tensor | None = None,
    lengths: Tensor | None = None,
    scale: Literal["std"] | None = "std",
    eps: float = 1e-6,
    ddof: int = 1,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """GDPO, for K rewards: each normalised in its group (`(r_k − μ_k)/(σ_k + eps)`), then summed with weights, then whitened.

    rewards: `[S, K]` → `[S]`. weights: K numbers, 1 by default. The whitening counts each sequence once, or, as verl, once for each
    of its `lengths` tokens. group: a process group that shares the whitening.
    Source: Liu et al., arXiv 2601.05242. A reward that is constant in a group adds 0 there; a group of one adds 0, or r with "raw".
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 2:
        raise InputError("rewards must be [S, K], one column per reward.")
    check_rewards(rewards[:, 0] if rewards.shape[1] else rewards.new_zeros(rewards.shape[0]), group_ids)
    s, k = rewards.shape
    dtype = compute_dtype(rewards)
    weight = rewards.new_ones(k, dtype=dtype) if weights is None else torch.as_tensor(weights)
    if tuple(weight.shape) != (k,):
        raise InputError(f"weights must hold one number per reward ({k},), got shape {tuple(weight.shape)}.")
    if s == 0:
        return rewards.new_zeros(0, dtype=dtype)
    # A group and a column together are one group of a longer batch.
    order, groups = group_index(group_ids)
    assert groups.ids is not None
    dense = torch.empty_like(groups.ids).scatter(0, order, groups.ids)
    ids = dense + s * torch.arange(k, device=dense.device).unsqueeze(1)
    parts = group_advantages(rewards.T.reshape(-1), ids.reshape(-1), scale=scale, eps=eps, ddof=ddof, single=single).view(k, s)
    summed = (weight.to(parts).unsqueeze(1) * parts).sum(0)
    counts = torch.ones_like(summed) if lengths is None else per_sequence("lengths", lengths, summed)
    return _whitened_by_length(summed, counts, group, 1e-8)


def maxrl(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, single: Single = "zero") -> Tensor:
    """MaxRL: `(r − μ) / (μ + eps)`, for rewards ≥ 0: the gradient of log pass-rate rather than of pass-rate.

    Source: Tajwar et al., arXiv 2602.02710; SkyRL's maxrl, prime-rl's max_rl. Constant group (all wrong too): 0. Group of one: 0,
    or r with `single="raw"` (SkyRL). A mean of exactly 0 divides nothing.
    """
    return group_advantages(rewards, group_ids, scale="mean", eps=eps, single=single)


@torch.no_grad()
def passk_max_gap(
    rewards: Tensor, group_ids: Tensor, *, scale: Literal["std"] | None = "std", eps: float = 1e-6, ddof: int = 1
) -> Tensor:
    """Pass@k by the winner's margin: the best of a group gets `(r_max − r_second) / (σ + eps)`, the others 0.

    Leaving the winner out would cost the group's maximum exactly that margin; here k is the size of the group.
    Source: Tang et al., arXiv 2503.19595; verl's grpo_passk. A tie for the best, a constant group, a group of one (an error in
    verl): 0.
    """
    _check_passk(rewards, group_ids, scale, eps, ddof)
    if rewards.numel() == 0:
        return rewards.new_zeros(0, dtype=compute_dtype(rewards))
    g = RankedGroups.of(rewards, group_ids)
    second = g.at((g.rank - 1).clamp(min=0))
    gap = torch.where(g.rank == g.size - 1, g.rewards - second, 0)
    return g.back(gap if scale is None else divided(gap, g.std(ddof), eps), compute_dtype(rewards))


@torch.no_grad()
def passk_combinatorial(
    rewards: Tensor, group_ids: Tensor, k: int, *, scale: Literal["std"] | None = "std", eps: float = 0.0
) -> Tensor:
    """Pass@k over all `C(n, k)` subsets of a group, each rewarded by its best member; exact, without making the subsets.

    `A_i = (mean of subsets with i − mean of all subsets) / (std of all subsets + eps)`, population standard deviation.
    With the rewards sorted and p the number of members below: the best of a subset is member p in `C(p, k−1)` subsets, and, among
    those that hold a lower i, in `C(p−1, k−2)`. For rewards 0/1 with m wrong: `R = 1 − C(m,k)/C(n,k)`, `σ² = R(1−R)`,
    `A_right = (1−R)/σ`, `A_wrong = (1 − R − C(m−1,k−1)/C(n−1,k−1))/σ`. With k = 1 it is GRPO with ddof 0.
    Source: Chen et al., arXiv 2508.10751 (there for 0/1 rewards). Where all subsets have the same best member's reward (a constant
    group, fewer than k wrong), or n ≤ k (a group of one): 0.
    """
    _check_passk(rewards, group_ids, scale, eps, 0)
    if not isinstance(k, int) or k < 1:
        raise InputError(f"k must be an integer >= 1, got {k!r}.")
    if rewards.numel() == 0:
        return rewards.new_zeros(0, dtype=compute_dtype(rewards))
    g = RankedGroups.of(rewards, group_ids)
    # All terms are shifted alike, so measure from the lowest; NaN is put back by group, as 0·nan would cross groups in the scan.
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
    advantage = advantage if scale is None else divided(advantage, torch.where(flat, 0, std), eps)
    return g.back(advantage + g.total(g.rewards * 0), compute_dtype(rewards))


def _choose_ratio(a: Tensor, b: int, n: Tensor, k: int) -> Tensor:
    """`C(a, b) / C(n, k)`, 0 where `C(a, b)` or `C(n, k)` is 0."""
    exists = (a >= b) & (n >= k) & (b >= 0)
    b, wide = max(b, 0), accumulator_dtype(a.device)
    a, n = a.clamp(min=b).to(wide), n.clamp(min=k).to(wide)

    def log_choose(top: Tensor, bottom: int) -> Tensor:
        return torch.lgamma(top + 1) - torch.lgamma(top - bottom + 1) - torch.lgamma(torch.full_like(top, bottom + 1))

    return torch.where(exists, (log_choose(a, b) - log_choose(n, k)).exp(), 0)


def _whitened_by_length(x: Tensor, lengths: Tensor, group: Any, eps: float) -> Tensor:
    return whitened(torch.where(lengths > 0, x, 0), lengths.to(x.dtype), group=group, eps=eps)


def _check_passk(rewards: Tensor, group_ids: Tensor, scale: str | None, eps: float, ddof: int) -> None:
    check_rewards(rewards, group_ids)
    check_choice("scale", scale, ("std", None))
    check_numbers(eps, ddof)


ESTIMATORS: dict[str, Callable[..., Any]] = {
    "dr_grpo": dr_grpo,
    "gae": gae,
    "gdpo": gdpo,
    "gpg": gpg,
    "grpo": grpo,
    "grpo_loo": grpo_loo,
    "maxrl": maxrl,
    "opo": opo,
    "optimal_token_baseline": optimal_token_baseline,
    "passk_combinatorial": passk_combinatorial,
    "passk_max_gap": passk_max_gap,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "rloo": rloo,
}
