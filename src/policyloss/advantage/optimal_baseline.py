"""The optimal token baseline: a baseline for each token of a group's samples.

Each sample is weighted by the squared length of its gradient up to that token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.advantage.groups import RankedGroups, check_rewards, check_scale, rows_by_size
from policyloss.advantage.returns import reward_to_go, token_rewards, whole_sequences
from policyloss.arguments import check_flag, check_like, check_tensor, description
from policyloss.errors import InputError
from policyloss.functional.collectives import gather_rows, statistics_group
from policyloss.functional.masking import compute_dtype, fill
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    group_ids: Tensor,
    mask: Tensor,
    old_logp: Tensor,
    sum_pi_squared: Tensor,
    *,
    weights: Tensor | None = None,
    zero_tail: bool = True,
    bridge: bool = True,
    eps: float = 1e-8,
    group: Any = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Optimal token baseline: `A_t = G_t − Σ_i W_t·G_t / (Σ_i W_t + eps)`.

    The sums run over the sequences of the group that have a token t.
    G is the reward-to-go and W the squared norm of the gradient up to token t:
    `W_t = Σ_{j≤t} w_j²·(1 − 2π_j + Σ_v π_v²)`, where π is the old policy, π_j = exp(old_logp_j),
    and Σ_v π_v² runs over the vocabulary; the bracket is ‖onehot − π‖², the squared gradient of
    logp with respect to the logits. So the baseline is the mean return of the group at that token,
    weighted by W.

    rewards: `[B, T]`, or one per sequence `[B]`, which is put on the last valid token. group_ids:
    `[B]`. mask, old_logp, sum_pi_squared (`Σ_v π_v²`) and weights w (of a rollout correction, 1 by
    default): `[B, T]`. The result is `[B, T]`, 0 at masked tokens, without gradient.
    zero_tail: at the tokens that only the group's longest sequence has, True uses baseline 0 (A =
    G), False its own return (A = 0).
    bridge: True means that token t is the t-th valid token of its sequence. False (for single
    turns that start at column 0) means that token t is column t; zero_tail then acts from column n
    on, with n the second-largest number of valid tokens in the group.
    A group of one has baseline 0. The dtype is that of the inputs (float32 for half precision).
    group: the process group that a prompt's samples may span (T may differ between ranks), as in
    `group_advantages`; an id must mean the same prompt on every rank.
    cp_group, positions: ranks with other tokens of the same sequences, as in `gae`; only with
    `bridge=True`.
    Source: Li et al., arXiv 2602.07078, with its logit-gradient proxy; verl's
    optimal_token_baseline (`bridge=False`) and tir_optimal_token_baseline (`bridge=True`).
    """
    check_flag("zero_tail", zero_tail)
    check_flag("bridge", bridge)
    check_tensor("mask", mask)
    if mask.dim() != 2:
        raise InputError(
            f"mask must be padded tokens [B, T], got {description(mask)}; the optimal token "
            "baseline compares rows token by token."
        )
    check_rewards(mask[:, 0] if mask.shape[1] else mask.new_zeros(mask.shape[0]), group_ids)
    check_like("old_logp", old_logp, ("mask", mask))
    check_like("sum_pi_squared", sum_pi_squared, ("mask", mask))
    if weights is not None:
        check_like("weights", weights, ("mask", mask))
    check_tensor("rewards", rewards, like=("mask", mask))
    valid = as_mask(mask, mask)
    check_scale(eps, 1)
    dtype = compute_dtype(rewards, old_logp, sum_pi_squared)
    if cp_group is not None:
        if not bridge:
            raise InputError(
                "bridge=False compares columns, which with cp_group are the columns of a shard; "
                "pass bridge=True."
            )
        others = (old_logp, sum_pi_squared, *(() if weights is None else (weights,)))
        layout = Sequences.of(valid, None, cp_group)
        gathered, reward = whole_sequences(rewards, valid, layout, positions, dtype, *others)
        by_token = len(gathered.columns) > len(others)
        reward = gathered.padded(gathered.columns[-1]) if by_token else reward.squeeze(1)
        logp, squared, *weight = (gathered.padded(x) for x in gathered.columns[: len(others)])
        advantages = optimal_token_baseline(
            reward,
            group_ids,
            gathered.inside,
            logp,
            squared,
            weights=weight[0] if weight else None,
            zero_tail=zero_tail,
            eps=eps,
            group=group,
        )
        return gathered.on_this_rank(advantages[gathered.inside])
    reward = token_rewards(rewards.detach(), valid, Sequences.of(valid), dtype)
    returns = reward_to_go(reward, valid)
    energy = 1 - 2 * fill(old_logp, valid, dtype).exp() + fill(sum_pi_squared, valid, dtype)
    if weights is not None:
        energy = energy * fill(weights, valid, dtype) ** 2
    path = fill(energy, valid).cumsum(-1)
    rows, this_rank = gather_rows([returns, path, valid, group_ids], statistics_group(group))
    advantages = _less_baseline(*rows, zero_tail=zero_tail, bridge=bridge, eps=eps)
    return advantages[this_rank, : valid.shape[1]]


def _less_baseline(
    returns: Tensor,
    path: Tensor,
    valid: Tensor,
    group_ids: Tensor,
    *,
    zero_tail: bool,
    bridge: bool,
    eps: float,
) -> Tensor:
    """`returns` minus their baselines, for all rows that may share a group. path: W. `[B, T]`."""
    if valid.numel() == 0:
        return returns
    lengths = valid.sum(-1)
    if bridge:
        # Renumbered, so that each empty row is a group by itself.
        dense = torch.unique(group_ids, return_inverse=True)[1]
        alone = len(dense) + torch.arange(len(dense), device=dense.device)
        group_ids, width = torch.where(lengths == 0, alone, dense), max(int(lengths.max()), 1)
        place = (valid.long().cumsum(-1) - 1).clamp(min=0)
    else:
        width = valid.shape[1]
        place = torch.arange(width, device=valid.device).expand_as(valid)
    # The valid tokens of each row at the columns `place`, 0 elsewhere. `[B, T]` → `[B, width]`
    room, column = path.new_zeros(path.shape[0], width + 1), torch.where(valid, place, width)
    pair = (path * returns, path)
    weighted, weight = (room.scatter(1, column, x)[:, :width] for x in pair)
    baseline = torch.zeros_like(weighted)
    for rows in rows_by_size(group_ids)[2]:
        mean = weighted[rows].sum(1, keepdim=True) / (weight[rows].sum(1, keepdim=True) + eps)
        baseline[rows] = mean.expand(*rows.shape, width)
    token_baseline = baseline.gather(1, place)
    if zero_tail:
        token_baseline = torch.where(place < _tail(lengths, group_ids), token_baseline, 0)
    return fill(returns - token_baseline, valid)


def _tail(lengths: Tensor, group_ids: Tensor) -> Tensor:
    """The first index at which only the longest row of a group has a token. `[B, 1]`.

    For that row it is the second-largest length of the group, for all other rows inf.
    """
    g = RankedGroups.of(lengths, group_ids)
    second = g.at((g.size - 2).clamp(min=0))
    longest = (g.rank == g.size - 1) & (g.highest > second)
    return g.back(torch.where(longest, second, torch.inf), second.dtype).unsqueeze(-1)
