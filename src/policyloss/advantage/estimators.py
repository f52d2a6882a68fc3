"""The named advantage estimators of the field.

Each is a thin layer over `group_advantages`, `whiten` and `discounted_returns`.
Legend: S sequences; rewards, group_ids, lengths and (unless noted otherwise) results are `[S]`;
pass a result to `policy_loss` unchanged. n is the size of a group, μ its mean reward, σ its
standard deviation. Nothing carries a gradient.
Common rules of `group_advantages`: the advantage is exactly 0 in a constant group; in a group of
one it is 0, or with `single="raw"` the raw reward, as in verl; a spread of exactly 0 does not
divide.
`group` is a process group with shared statistics: the samples of a prompt may lie on several ranks,
and ids are global; "local" (and None, with a warning if there are other ranks) is this rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.advantage.distillation import iw_opd, opd
from policyloss.advantage.groups import (
    RankedGroups,
    Single,
    check_rewards,
    group_advantages,
    of_all_ranks,
    per_sequence,
    whiten,
    whiten_by,
)
from policyloss.advantage.optimal_baseline import optimal_token_baseline
from policyloss.advantage.pass_at_k import passk_combinatorial, passk_max_gap
from policyloss.advantage.returns import discounted_returns, gae
from policyloss.arguments import (
    check_choice,
    check_like,
    check_number,
    check_tensor,
    description,
)
from policyloss.errors import InputError, match_name, unknown_name
from policyloss.functional.collectives import gather_rows, statistics_group
from policyloss.functional.masking import compute_dtype
from policyloss.functional.segments import group_index, group_sum


def grpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    eps: float = 1e-6,
    ddof: int = 1,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """GRPO: `(r − μ) / (σ + eps)`.

    Source: Shao et al., arXiv 2402.03300; eps and ddof as in verl (TRL: eps 1e-4; open-instruct:
    eps 1e-8, ddof 0).
    Constant group: 0. Group of one: 0, or `r / (1 + eps)` with `single="raw"` (verl).
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    return group_advantages(rewards, group_ids, eps=eps, ddof=ddof, single=single, group=group)


def dr_grpo(
    rewards: Tensor, group_ids: Tensor, *, single: Single = "zero", group: Any = None
) -> Tensor:
    """Dr. GRPO: `r − μ`; no division, so easy and hard prompts weigh the same.

    Source: Liu et al., arXiv 2503.20783. Constant group: 0. Group of one: 0, or r with
    `single="raw"`.
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    return group_advantages(rewards, group_ids, scale=None, single=single, group=group)


def rloo(
    rewards: Tensor, group_ids: Tensor, *, single: Single = "zero", group: Any = None
) -> Tensor:
    """RLOO: `r_i − mean reward of the group's other members = (r_i − μ)·n/(n−1)`.

    Source: Ahmadian et al., arXiv 2402.14740. Constant group: 0. Group of one: 0 (verl's
    rloo_vectorized, SkyRL), or r with `single="raw"` (verl's rloo). group: the process
    group that a prompt's samples may span, as in `group_advantages`.
    """
    return group_advantages(
        rewards, group_ids, center="loo", scale=None, single=single, group=group
    )


def grpo_loo(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6, group: Any = None) -> Tensor:
    """Leave-one-out GRPO: `(r_i − mean of the others) / (std of the others + eps)`.

    The others are the group's other rewards; their standard deviation uses ddof=1.
    Source: NeMo-RL's GRPO with its default leave-one-out baseline. If the others are all equal (for
    the only winner of a group, or in a group of two), their std is exactly 0 here (a rounding
    residue would inflate the advantage by thousands), and `r_i − mean of the others` is not
    divided. Constant group, group of one: 0.
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    return group_advantages(rewards, group_ids, center="loo", scale="loo_std", eps=eps, group=group)


def reinforce_pp(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    group: Any = None,
    eps: float = 1e-8,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """REINFORCE++: discounted returns over the valid tokens, whitened over all valid tokens.

    mask and the result: `[B, T]` or `[N]`. rewards: the same shape (any KL penalty included), or
    one per sequence `[S]`, which is put on the last valid token.
    group: ranks with other sequences, which share the mean and variance, as in `whiten`. cp_group,
    positions: ranks with other tokens of the same sequences, as in `gae`; these ranks share mean
    and variance too. Samples are not grouped by prompt. Constant batch: all advantages are 0.
    Source: Hu et al., arXiv 2501.03262; verl's reinforce_plus_plus.
    """
    where = {"cu_seqlens": cu_seqlens, "cp_group": cp_group, "positions": positions}
    returns = discounted_returns(rewards, mask, gamma, **where)
    return whiten(returns, mask, group=group, eps=eps, cp_group=cp_group)


def reinforce_pp_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    *,
    single: Single = "zero",
    group: Any = None,
    eps: float = 1e-8,
) -> Tensor:
    """REINFORCE++-baseline: `r − μ` (μ: the group mean), whitened over all valid *tokens*.

    One value per sequence; in the whitening, a sequence of n tokens (`lengths`) counts n times.
    Source: Hu et al., arXiv 2501.03262; verl's reinforce_plus_plus_baseline. In a constant group or
    a group of one, `r − μ` is 0 before whitening; with `single="raw"`, a group of one keeps r. A
    sequence of length 0 does not count, and gets 0.
    group: ranks that share the means of prompts and the whitening, as in `group_advantages`.
    """
    check_rewards(rewards, group_ids)
    counts = per_sequence("lengths", lengths, rewards)
    (r, ids, counts), this_rank = of_all_ranks(group, rewards, group_ids, counts)
    centred = dr_grpo(r, ids, single=single, group="local")
    return _whitened_by_length(centred, counts, eps)[this_rank].to(compute_dtype(rewards))


def remax(rewards: Tensor, baseline_rewards: Tensor) -> Tensor:
    """ReMax: `r − b`, with b `[S]` the reward of the greedy answer to the same prompt.

    Source: Li et al., arXiv 2310.10505. For rewards on every token, as in verl:
    `discounted_returns(rewards, mask) − b`.
    """
    check_tensor("rewards", rewards)
    if rewards.dim() != 1:
        raise InputError(
            f"rewards must be one number per sequence, a tensor [S], got {description(rewards)}."
        )
    b = per_sequence("baseline_rewards", baseline_rewards, rewards)
    dtype = compute_dtype(rewards, b)
    return rewards.detach().to(dtype) - b.to(dtype)


def opo(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    *,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """OPO: `r − Σ l·r / Σ l` over the group, with l the length.

    This baseline minimises the variance of the policy gradient if a sequence's squared gradient
    norm is proportional to l.
    Source: Hao et al., arXiv 2505.23585. Constant group: 0. Group of one: 0, or r with
    `single="raw"` (verl).
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    check_rewards(rewards, group_ids)
    weights = per_sequence("lengths", lengths, rewards)
    return group_advantages(
        rewards, group_ids, scale=None, weights=weights, single=single, group=group
    )


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
    """GPG: `α·(r − μ) / f_norm`, with α = S / max(1, V) for V valid of S sequences.

    valid: "informative" counts the sequences of groups that are not constant (the paper's
    sequences with a gradient), "nonzero" counts the sequences with a reward other than 0 (verl).
    group: the ranks over which μ (the prompt's mean), S and V are computed; see `group_advantages`.
    Source: Chu et al., arXiv 2504.02546. Constant group: 0. Group of one: 0, or α·r/f_norm with
    `single="raw"` (verl).
    """
    check_choice("valid", valid, ("informative", "nonzero"))
    check_number("f_norm", f_norm, above=0)
    check_rewards(rewards, group_ids)
    (r, ids), this_rank = of_all_ranks(group, rewards, group_ids)
    centered = dr_grpo(r, ids, single=single, group="local")
    if valid == "nonzero" or r.numel() == 0:
        counts = r != 0
    else:
        g = RankedGroups.of(r, ids)
        counts = ~g.constant | ((g.size == 1) & (single == "raw"))
    alpha = counts.numel() / counts.sum().clamp(min=1).to(centered.dtype)
    return (centered * (alpha / f_norm))[this_rank].to(compute_dtype(rewards))


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
    """GDPO: normalise K rewards per group, sum them with weights, and whiten over the batch.

    Each reward is normalised as `(r_k − μ_k)/(σ_k + eps)`, or with scale=None as `r_k − μ_k`.
    rewards: `[S, K]`; the result is `[S]`. weights: K numbers, 1 by default. lengths: `[S]`, the
    numbers of tokens: in the whitening, a sequence counts by its length, as in verl; without
    lengths, all count equally. group: ranks that share the batch, as in `group_advantages`.
    Source: Liu et al., arXiv 2601.05242. A reward that is constant in a group adds 0 there; a group
    of one adds 0, or r with single="raw".
    """
    check_tensor("rewards", rewards)
    if rewards.dim() != 2:
        raise InputError(
            f"rewards must be [S, K], one column per reward, got {description(rewards)}."
        )
    check_rewards(
        rewards[:, 0] if rewards.shape[1] else rewards.new_zeros(rewards.shape[0]), group_ids
    )
    k, dtype = rewards.shape[1], compute_dtype(rewards)
    weight = _weights([1.0] * k if weights is None else weights, k, rewards.device)
    counts = torch.ones_like(group_ids)
    if lengths is not None:
        counts = per_sequence("lengths", lengths, group_ids)
    each_reward = rewards.unbind(1)
    (counts, group_ids, *columns), this_rank = of_all_ranks(group, counts, group_ids, *each_reward)
    s = counts.shape[0]
    if s == 0:
        return rewards.new_zeros(0, dtype=dtype)
    # A group and a column together are one group of a longer batch.
    order, groups = group_index(group_ids)
    assert groups.ids is not None
    dense = torch.empty_like(groups.ids).scatter(0, order, groups.ids)
    ids = dense + s * torch.arange(k, device=dense.device).unsqueeze(1)
    each = torch.cat([counts[:0], *columns])
    how: Any = {"scale": scale, "eps": eps, "ddof": ddof, "single": single}
    parts = group_advantages(each, ids.reshape(-1), **how, group="local")
    summed = (weight.to(parts).unsqueeze(1) * parts.view(k, s)).sum(0)
    return _whitened_by_length(summed, counts, 1e-8)[this_rank].to(dtype)


def maxrl(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    eps: float = 1e-6,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """MaxRL: `(r − μ) / (μ + eps)`, for rewards ≥ 0.

    The policy gradient then increases the log of the pass rate instead of the pass rate.
    Source: Tajwar et al., arXiv 2602.02710; SkyRL's maxrl, prime-rl's max_rl. A group of equal
    rewards, even all 0: 0. Group of one: 0, or r with `single="raw"` (SkyRL).
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    """
    return group_advantages(rewards, group_ids, scale="mean", eps=eps, single=single, group=group)


@torch.no_grad()
def asymre(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    shift: float = -0.1,
    single: Single = "zero",
    group: Any = None,
) -> Tensor:
    """AsymRE: `r − (μ + shift)`. A negative shift weights failures less than successes.

    μ is the mean of the group. A constant group or a group of one gives −shift; with `single="raw"`
    (Trinity), a group of one gives r.
    group: the process group that a prompt's samples may span, as in `group_advantages`.
    Source: Arnal et al., arXiv 2506.20520; shift as in Trinity-RFT's asymre.
    """
    check_number("shift", shift, finite=True)
    check_rewards(rewards, group_ids)
    (r, ids), this_rank = of_all_ranks(group, rewards, group_ids)
    centered = dr_grpo(r, ids, single=single, group="local")
    shifted = (group_sum(torch.ones_like(ids), ids) > 1) | (single == "zero")
    return torch.where(shifted, centered - shift, centered)[this_rank].to(compute_dtype(rewards))


def flash_reinforce(rewards: Tensor, *, group: Any = None) -> Tensor:
    """FlashREINFORCE: `r − mean reward of the whole batch`, for one sample per prompt.

    Equal rewards give 0. group: ranks that share the mean, as in `group_advantages`.
    Source: OpenRLHF's flash_reinforce.
    """
    return group_advantages(rewards, _one_group(rewards), scale=None, group=group)


def prpo(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 0, group: Any = None) -> Tensor:
    """PRPO: `(r − mean) / (std + eps)` with the mean and deviation of the whole batch.

    Equal rewards give 0. group: ranks that share the mean and deviation, as in
    `group_advantages`.
    Source: rLLM's prpo, with its eps and ddof.
    """
    return group_advantages(rewards, _one_group(rewards), eps=eps, ddof=ddof, group=group)


def _one_group(rewards: Tensor) -> Tensor:
    check_tensor("rewards", rewards)
    return torch.zeros_like(rewards, dtype=torch.int64)


@torch.no_grad()
def hierarchical_grpo(
    rewards: Tensor,
    group_ids: Tensor,
    episode_ids: Tensor,
    role_ids: Tensor,
    episode_roles: Tensor,
    *,
    group: Any = None,
) -> Tensor:
    """Hierarchical GRPO: `r − mean of r over sequences of the same role`.

    For a role in `episode_roles` (such as the solvers of a problem), the mean is over the role's
    sequences of the same episode and prompt; for any other role, over all episodes of the prompt. A
    sequence alone in its role gets 0. group_ids (prompts), episode_ids, role_ids: `[S]`.
    episode_roles: ids, `[R]`.
    group: the process group that a prompt's samples may span, as in `group_advantages`; an id must
    mean the same on every rank.
    Source: prime-rl's hierarchical_grpo.
    """
    check_rewards(rewards, group_ids)
    for name, ids in (("episode_ids", episode_ids), ("role_ids", role_ids)):
        check_like(name, ids, ("rewards", rewards), "integer", "give one id each")
    check_tensor("episode_roles", episode_roles, "integer", ("rewards", rewards))
    columns = [rewards, *(x.to(torch.int64) for x in (group_ids, episode_ids, role_ids))]
    (r, prompt, episode, role), this_rank = gather_rows(columns, statistics_group(group))
    inside = torch.isin(role, episode_roles)
    peers = torch.stack([prompt, role, inside.long(), torch.where(inside, episode, 0)])
    ids = torch.unique(peers, dim=1, return_inverse=True)[1]
    return dr_grpo(r, ids, group="local")[this_rank].to(compute_dtype(rewards))


def _weights(weights: Any, k: int, device: torch.device) -> Tensor:
    """`weights` as a tensor `[K]`, from a sequence of numbers or a tensor."""
    if isinstance(weights, Sequence) and not isinstance(weights, str):
        numbers = [float(check_number("weights", w)) for w in weights]
        weights = torch.tensor(numbers, dtype=torch.float64)
    check_tensor("weights", weights)
    assert isinstance(weights, Tensor)
    if tuple(weights.shape) != (k,) or weights.is_meta:
        raise InputError(
            f"weights must hold one number per reward ({k},), got {description(weights)}."
        )
    moved: Tensor = weights.to(device)
    return moved


def _whitened_by_length(x: Tensor, lengths: Tensor, eps: float) -> Tensor:
    return whiten_by(torch.where(lengths > 0, x, 0), lengths.to(x.dtype), eps=eps)


_NAMED: tuple[Callable[..., Any], ...] = (
    *(asymre, dr_grpo, flash_reinforce, gae, gdpo, gpg, grpo, grpo_loo, hierarchical_grpo, iw_opd),
    *(maxrl, opd, opo, optimal_token_baseline, passk_combinatorial, passk_max_gap, prpo),
    *(reinforce_pp, reinforce_pp_baseline, remax, rloo),
)
ESTIMATORS = {function.__name__: function for function in _NAMED}


def estimator(name: str) -> Callable[..., Any]:
    """Return the function `advantage.<name>`; an unknown name is an error that lists all."""
    known = match_name(name, ESTIMATORS)
    if known is None:
        raise InputError(unknown_name("estimator name", name, ESTIMATORS))
    return ESTIMATORS[known]
