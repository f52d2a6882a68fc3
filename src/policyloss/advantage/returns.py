"""Credit over time: generalised advantage estimation and discounted returns, without a loop.

Legend: token-shaped is `[B, T]`, or packed `[N]` with `cu_seqlens`; S sequences. Masked tokens are
*bridged*: time runs over the valid tokens of a sequence only, as if masked tokens (tool output,
padding) were removed. With context parallel, every rank gathers the valid tokens of a sequence in
the order of `positions`, scans them, and keeps the results of its own tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description, is_compiling, is_number
from policyloss.errors import InputError
from policyloss.functional.context_parallel import WholeSequences, checked_positions
from policyloss.functional.exact import is_exact, stays_eager
from policyloss.functional.masking import accumulator_dtype, compute_dtype, fill
from policyloss.functional.recurrence import linear_recurrence_reverse
from policyloss.functional.segments import Sequences, check_cu_seqlens
from policyloss.functional.triton_modules import kernels
from policyloss.tokens import as_mask

KERNEL = "policyloss.functional.gae_kernel"


class GAE(NamedTuple):
    """The result of `gae`: two tensors `[B, T]` or `[N]`, 0 at masked tokens, without gradient."""

    advantages: Tensor
    returns: Tensor


@stays_eager
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    lam: float | Tensor = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    last_values: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> GAE:
    """Generalised advantage estimation over the valid tokens; returns (advantages, returns).

    `A_t = δ_t + γλ·A_{t+1}`, `δ_t = r_t + γ·V_{t+1} − V_t`, `returns = A + V`, where t+1 is the
    next *valid* token. Both results are token-shaped, 0 at masked tokens.

    values, mask: token-shaped (`[B, T]`, or packed `[N]`). rewards: token-shaped, or `[S]`, one per
    sequence, which is placed on the sequence's last valid token.
    lam: one λ, or one per sequence `[S]` (`advantage.adaptive_lam` makes them from lengths).
    last_values: `[S]`, the value after a sequence's last valid token (a truncated episode); 0 if
    not given.
    Rewards, values and positions of masked tokens are ignored. A NaN or inf at a valid token makes
    its whole sequence NaN, but no other sequence.
    Half precision is computed in float32. The advantages are not whitened; see `whiten`.
    cp_group: the process group over which each sequence's tokens are spread (context parallel).
    Then pass positions, token-shaped integers: the index of each token in its whole sequence
    (with or without counting masked tokens: only the order matters); and every rank must pass the
    same `[S]` tensors.
    Source: Schulman et al., arXiv 1506.02438; masked tokens between valid ones are skipped, as in
    verl's gae.
    """
    _check_discount("gamma", gamma)
    if isinstance(lam, Tensor):
        check_tensor("lam", lam, "float")
    else:
        _check_discount("lam", lam)
    check_tensor("rewards", rewards)
    check_tensor("values", values)
    if cp_group is not None:
        layout, mask = _check_layout("values", values, mask, cu_seqlens, cp_group)
        dtype = compute_dtype(rewards, values)
        pack, reward = whole_sequences(rewards, mask, layout, positions, dtype, values)
        where = {"cu_seqlens": pack.cu_seqlens, "last_values": last_values}
        result = gae(reward, pack.columns[0], pack.mask, gamma, lam, **where)
        return GAE(*map(pack.on_this_rank, result))
    if not isinstance(lam, Tensor) and _runs_as_kernel(rewards, values, mask, last_values):
        return _gae_by_kernel(rewards, values, mask, gamma, lam, cu_seqlens, last_values)
    with torch.no_grad():
        layout, mask = _check_layout("values", values, mask, cu_seqlens)
        dtype = compute_dtype(rewards, values)
        value = fill(values, mask, dtype)
        reward = token_rewards(rewards, mask, layout, dtype)
        returns = _lambda_returns(reward, value, mask, gamma, lam, layout, last_values)
        return GAE(returns - value, returns)


@stays_eager
@torch.no_grad()
def discounted_returns(
    rewards: Tensor,
    mask: Tensor,
    gamma: float = 1.0,
    *,
    cu_seqlens: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`G_t = r_t + γ·G_{t+1}` over the valid tokens of each sequence; with γ = 1, the reward-to-go.

    mask and the result: `[B, T]` or `[N]`; masked tokens get 0. rewards: the same shape, or one per
    sequence `[S]`, which is put on the last valid token. cp_group, positions: as in `gae`.
    """
    _check_discount("gamma", gamma)
    check_tensor("rewards", rewards)
    layout, mask = _check_layout("mask", mask, mask, cu_seqlens, cp_group)
    if cp_group is not None:
        pack, reward = whole_sequences(rewards, mask, layout, positions, compute_dtype(rewards))
        returns = discounted_returns(reward, pack.mask, gamma, cu_seqlens=pack.cu_seqlens)
        return pack.on_this_rank(returns)
    reward = token_rewards(rewards, mask, layout, compute_dtype(rewards))
    return _lambda_returns(reward, reward, mask, gamma, 1.0, layout)


def token_rewards(rewards: Tensor, mask: Tensor, layout: Sequences, dtype: torch.dtype) -> Tensor:
    """Rewards per token, 0 at masked tokens; a sequence's reward goes to its last valid token."""
    rewards = _check_rewards(rewards, layout, mask)
    if tuple(rewards.shape) in _token_shapes(layout):
        return fill(rewards.reshape(layout.shape), mask, dtype)
    n = mask.numel()
    position = torch.arange(n, device=mask.device, dtype=accumulator_dtype(mask.device)).view(
        layout.shape
    )
    last = layout.max(torch.where(mask, position, -1))
    # A sequence without a valid token has no place for its reward: slot n, which is dropped.
    index = torch.where(last >= 0, last, n).long()
    return _place_at(rewards.reshape(-1).to(dtype), index, n).view(layout.shape)


def _lambda_returns(
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    layout: Sequences,
    last_values: Tensor | None = None,
    in_rows: bool = False,
) -> Tensor:
    """The λ-returns `G_t = r_t + γ·z_{t+1}`, with `z_t = (1−λ)·V_t + λ·G_t`.

    At masked tokens, `z_t = z_{t+1}`.
    This is `A + V` of GAE, rearranged so that one scan, over z, also carries the next valid value
    across masked tokens. in_rows: the rows are laid out for the exact
    mode: each begins with its first valid token.
    """
    if is_exact() and not in_rows:
        # The chunks of the scan follow from the place of a token, so each sequence becomes a row
        # that begins with its first valid token.
        place = torch.arange(mask.numel(), device=mask.device).view(layout.shape)
        pack = WholeSequences.of(layout, mask, place, reward, value)
        inside = valid = pack.inside
        reward, value = (pack.padded(x) for x in pack.columns)
        if last_values is not None:
            # One more token; its reward is the value after the last.
            after = _per_sequence(last_values, layout, reward).to(reward.dtype).unsqueeze(1)
            end = pack.cu_seqlens.diff().unsqueeze(1)
            longer = torch.nn.functional.pad
            reward, value = (longer(x, (0, 1)).scatter(1, end, after) for x in (reward, value))
            valid = longer(inside, (0, 1)).scatter(1, end, True)
        rows = Sequences(tuple(valid.shape))
        returns = _lambda_returns(reward, value, valid, gamma, lam, rows, in_rows=True)
        return pack.on_this_rank(returns[:, : inside.shape[1]][inside])
    n = reward.numel()
    if n == 0:
        return reward
    if isinstance(lam, Tensor):
        lam = layout.expand(_per_sequence(lam, layout, reward, "lam").detach().to(reward.dtype))
        per_token = gamma * lam
    else:
        per_token = reward.new_full((), gamma * lam)
    x = torch.lerp(reward, value, 1 - lam).reshape(-1)
    decay = torch.where(mask, per_token, 1).reshape(-1)
    ends = _ends(layout, x.device)
    after = x.new_zeros(layout.count)
    if last_values is not None:
        after = _per_sequence(last_values, layout, x).to(x.dtype)
        x = x + decay * _place_at(after, ends, n)
    # 0·nan would leak a NaN into the sequence before, so the scan runs on finite numbers, and NaN
    # is put back by sequence.
    poison = layout.expand(layout.sum(x.view(layout.shape)) * 0)
    decay.index_fill_(0, ends.clamp(max=n - 1), 0)
    x, decay = x.nan_to_num_(0, 0, 0).view(layout.shape), decay.view(layout.shape)
    z = linear_recurrence_reverse(x, decay).reshape(-1)
    after_each = torch.nn.functional.pad(z[1:], (0, 2)).index_copy_(0, ends, after)
    following = after_each[:n].view(layout.shape)
    return fill(following.mul_(gamma).add_(reward).add_(poison), mask)


def _ends(layout: Sequences, device: torch.device) -> Tensor:
    """The flat position `[S]` of each sequence's last token, valid or not; n if it is empty."""
    if layout.offsets is None:
        rows, length = layout.shape
        return torch.arange(1, rows + 1, device=device) * length - 1
    start, stop = layout.offsets[:-1], layout.offsets[1:]
    return torch.where(stop > start, stop - 1, layout.shape[0]).long()


def _place_at(s: Tensor, index: Tensor, n: int) -> Tensor:
    """n zeros, with `s[i]` at `index[i]`; index n is dropped."""
    return s.new_zeros(n + 1).index_copy_(0, index, s)[:n]


def _runs_as_kernel(
    rewards: Tensor, values: Tensor, mask: Tensor, last_values: Tensor | None
) -> bool:
    """Whether the kernel can run: floating-point tensors on a GPU where Triton is installed."""
    for x in (rewards, values) if last_values is None else (rewards, values, last_values):
        if not (isinstance(x, Tensor) and x.is_cuda and x.is_floating_point()):
            return False
    on_gpu = isinstance(mask, Tensor) and mask.is_cuda
    return on_gpu and not is_compiling() and not is_exact() and kernels(KERNEL) is not None


def _gae_by_kernel(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    cu_seqlens: Tensor | None,
    last_values: Tensor | None,
) -> GAE:
    """`gae` in one launch; its checks take no tensor operations, because microseconds count."""
    if cu_seqlens is None:
        layout = Sequences.of(values, called="values")
    else:
        check_cu_seqlens(cu_seqlens, values, "values")
        layout = Sequences(tuple(values.shape), cu_seqlens.to(values.device))
    if mask.shape != values.shape:
        mask = as_mask(mask, values)
    rewards = _check_rewards(rewards, layout, mask)
    if tuple(rewards.shape) in _token_shapes(layout):
        rewards = rewards.reshape(layout.shape)
    # Detached, because the kernel's launcher does not support gradients, and leaving gradient mode
    # costs more.
    last = None if last_values is None else _per_sequence(last_values.detach(), layout, values)
    rewards, values = (x.detach() if x.requires_grad else x for x in (rewards, values))
    rest = (gamma, lam, layout.offsets, last, compute_dtype(rewards, values))
    return GAE(*kernels(KERNEL).gae(rewards, values, mask, *rest))


def whole_sequences(
    rewards: Tensor,
    mask: Tensor,
    layout: Sequences,
    positions: Tensor | None,
    dtype: torch.dtype,
    *others: Tensor,
) -> tuple[WholeSequences, Tensor]:
    """The rewards and `others` (the columns) of whole sequences, from all context-parallel ranks.

    Rewards per sequence are known on every rank and are returned unchanged, as `[S, 1]`.
    """
    rewards = _check_rewards(rewards, layout, mask)
    at = checked_positions(positions, mask, "a scan over time")
    columns = [x.to(dtype) if x.is_floating_point() else x for x in others]
    if tuple(rewards.shape) not in _token_shapes(layout):
        pack = WholeSequences.of(layout, mask, at, *columns)
        return pack, rewards.detach().reshape(-1, 1).to(dtype)
    pack = WholeSequences.of(layout, mask, at, *columns, rewards.reshape(layout.shape).to(dtype))
    return pack, pack.columns[-1].unsqueeze(0)


def _check_layout(
    name: str, tokens: Tensor, mask: Tensor, cu_seqlens: Tensor | None, cp_group: Any = None
) -> tuple[Sequences, Tensor]:
    """The layout of the sequences of `tokens`, and the mask as bool; both are checked."""
    check_tensor(name, tokens)
    return Sequences.of(tokens, cu_seqlens, cp_group, name), as_mask(mask, tokens, like_called=name)


def _token_shapes(layout: Sequences) -> tuple[tuple[int, ...], ...]:
    """The shapes that mean one number per token: that of the tokens; for a pack also `[1, N]`."""
    return (layout.shape,) if layout.offsets is None else (layout.shape, (1, *layout.shape))


def _check_rewards(rewards: Tensor, layout: Sequences, mask: Tensor) -> Tensor:
    """`rewards` in an unambiguous shape: one per token, or one per sequence."""
    check_tensor("rewards", rewards, like=("mask", mask))
    if layout.cp_group is None:  # else all ranks compare their shapes, so that all of them raise
        rewards = layout.with_clear_shape(rewards, "rewards")
    if tuple(rewards.shape) not in (*_token_shapes(layout), (layout.count,), (layout.count, 1)):
        raise InputError(
            f"rewards have shape {tuple(rewards.shape)}; with tokens of shape {layout.shape} give "
            f"one per token, or one per sequence ({layout.count},)."
        )
    return rewards


def _per_sequence(x: Tensor, layout: Sequences, like: Tensor, name: str = "last_values") -> Tensor:
    check_tensor(name, x, like=("values", like))
    if tuple(x.shape) not in ((layout.count,), (layout.count, 1)):
        raise InputError(
            f"{name} has shape {tuple(x.shape)}; give one per sequence, ({layout.count},)."
        )
    return x.reshape(-1)


def _check_discount(name: str, x: float) -> None:
    if not is_number(x) or not 0 <= x <= 1:
        raise InputError(f"{name} must be between 0 and 1, got {description(x)}.")


@torch.no_grad()
def reward_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """The rewards of this and all later valid tokens, at masked tokens too. Token-shaped."""
    return fill(rewards, as_mask(mask, rewards)).flip(-1).cumsum(-1).flip(-1)
