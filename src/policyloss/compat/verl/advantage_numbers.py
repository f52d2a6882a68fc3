"""Statistics and sums of verl's advantages (verl/trainer/ppo/core_algos.py) where they differ from
those of `policyloss.advantage`.

`policyloss.advantage` computes statistics in float64, gives a constant group exactly 0 and puts 0
at masked tokens. verl computes them in the dtype of the rewards and adds small constants to them.
Division by a deviation amplifies the rounding of a mean: float32 rewards around 3 that differ by
0.01 get advantages that differ by 1e-3. Use `policyloss.advantage` unless you need verl's numbers.

Legend: S sequences; `rewards`, `group_ids` `[S]`; token-shaped is `[B, T]`; `mask` may be bool or
0/1 in any dtype, and that dtype matters where verl divides by its sum. Nothing carries a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from policyloss.advantage.groups import check_rewards, rows_by_size
from policyloss.advantage.returns import GAE
from policyloss.arguments import check_tensor, description
from policyloss.errors import InputError
from policyloss.functional.masking import fill
from policyloss.functional.segments import group_index
from policyloss.tokens import as_mask


@dataclass(frozen=True)
class PlainGroups:
    """Rewards and the statistics of their groups (size, mean, sample standard deviation), all
    `[S]`, in row order. A group of one has mean 0 and deviation 1, so it keeps its raw reward.
    """

    rewards: Tensor
    size: Tensor
    mean: Tensor
    std: Tensor

    @classmethod
    @torch.no_grad()
    def stacked(cls, rewards: Tensor, group_ids: Tensor) -> PlainGroups:
        """`torch.mean` and `torch.std` of each group as a vector.

        Groups of the same size are reduced at once, so the sizes are read back to the host.
        """
        check_rewards(rewards, group_ids)
        rewards = rewards.detach()
        order, size, by_size = rows_by_size(group_ids)
        mean = torch.zeros_like(rewards)
        std = torch.ones_like(rewards)
        for rows in by_size:
            members = rewards[rows]
            mean[rows] = members.mean(1, keepdim=True).expand_as(members)
            std[rows] = members.std(1, keepdim=True).expand_as(members)
        return cls(rewards, torch.empty_like(size).scatter(0, order, size), mean, std)

    @classmethod
    @torch.no_grad()
    def indexed(cls, rewards: Tensor, group_ids: Tensor) -> PlainGroups:
        """Statistics in float32 as `index_add_` computes them, one row after the other."""
        check_rewards(rewards, group_ids)
        rewards = rewards.detach()
        order, groups = group_index(group_ids)
        r = rewards[order].float()
        assert groups.offsets is not None
        count = groups.offsets.diff().to(r.dtype)
        mean = _segment_sums(r, groups.offsets) / count.clamp(min=1)
        squares = _segment_sums((r - groups.expand(mean)).square(), groups.offsets)
        std = (squares / (count - 1).clamp(min=1)).sqrt()
        alone = count == 1
        statistics = (count, torch.where(alone, 0, mean), torch.where(alone, 1, std))
        in_rows = (torch.empty_like(r).scatter(0, order, groups.expand(x)) for x in statistics)
        return cls(rewards, *in_rows)

    @property
    def centered(self) -> Tensor:
        """`r − μ`, and r itself for a group of one."""
        return self.rewards - self.mean

    def scale(self, x: Tensor, eps: float) -> Tensor:
        """`x / (σ + eps)`; for a group of one, `1 + eps` is rounded to float32."""
        alone = (torch.ones((), device=x.device) + eps).to(x.dtype)
        return x / torch.where(self.size == 1, alone, self.std + eps)

    def per_nonzero(self, f_norm: float = 1.0) -> Tensor:
        """GPG: `α·(r − μ) / f_norm` with the float32 number α = S / max(nonzero rewards, 1)."""
        used = torch.count_nonzero(self.rewards).clamp(min=1)
        return self.rewards.shape[0] / used * self.centered / f_norm

    def zero_alone(self, x: Tensor) -> Tensor:
        """`x` `[S]`, but 0 for a group of one."""
        return torch.where(self.size > 1, x, 0)


def _segment_sums(x: Tensor, offsets: Tensor) -> Tensor:
    """Sums of segments, one number after another in the dtype of `x`."""
    return torch.segment_reduce(x, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)


@torch.no_grad()
def sequence_scores(token_rewards: Tensor) -> Tensor:
    """The sum of a row's token rewards, masked ones included, in their dtype. `[B, T]` → `[B]`."""
    check_tensor("token_level_rewards", token_rewards, "float")
    if token_rewards.dim() != 2:
        raise InputError(
            f"token_level_rewards must be a tensor [B, T], got {description(token_rewards)}."
        )
    return token_rewards.detach().sum(dim=-1)


def sequence_lengths(mask: Tensor) -> Tensor:
    """The number of valid tokens of each row. `[B, T]` → `[B]`."""
    return as_mask(mask, mask).sum(dim=-1)


def over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """The sequence's number at each valid token, 0 at the others. `[B]`, `[B, T]` → `[B, T]`,
    in the dtype of their product: a float64 mask makes float32 numbers float64.
    """
    spread = x.to(torch.promote_types(x.dtype, mask.dtype)).unsqueeze(-1).expand_as(mask)
    return fill(spread, as_mask(mask, spread))


@torch.no_grad()
def plain_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, count_eps: float = 1e-8) -> Tensor:
    """`(x − mean) / √(variance + eps)` with mean and unbiased variance over the valid tokens;
    masked tokens are transformed too.

    count_eps is added to the number of tokens before a sum is divided by it. Fewer than two valid
    tokens have no variance and raise an error.
    """
    valid = as_mask(mask, x)
    n = mask.sum()
    if n < 2:
        raise InputError(
            f"whitening needs at least two valid tokens, got {int(n)}: one token has no variance."
        )
    mean = fill(x, valid).sum() / (n + count_eps)
    centered = x - mean
    variance = fill(centered.square(), valid).sum() / (n + count_eps) * (n / (n - 1))
    return centered * (variance + eps).rsqrt()


@torch.no_grad()
def plain_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> GAE:
    """GAE, one token after the other from the end, not whitened. All token-shaped.

    A masked token gets the advantage of the next valid token, 0 without one. Its return is that
    advantage plus its value.
    """
    valid = as_mask(mask, values)
    running, next_value, backwards = values.new_zeros(()), values.new_zeros(()), []
    for reward, value, keep in _from_the_end(rewards, values, valid):
        delta = reward + gamma * next_value - value
        running = torch.where(keep, delta + gamma * lam * running, running)
        next_value = torch.where(keep, value, next_value)
        backwards.append(running)
    advantages = torch.stack(backwards[::-1], dim=1)
    return GAE(advantages, advantages + values)


@torch.no_grad()
def plain_returns(
    rewards: Tensor, mask: Tensor, gamma: float = 1.0, *, holes: Literal["bridge", "cut"] = "bridge"
) -> Tensor:
    """Discounted returns, one token after the other from the end. All token-shaped.

    holes: "bridge" sums over the valid tokens and is 0 at masked ones. "cut": a masked token has
    the return `r_t + γ·G_{t+1}`, but the token before it gets nothing from it, so each turn of a
    row is credited separately.
    """
    valid = as_mask(mask, rewards)
    running, backwards = rewards.new_zeros(()), []
    for reward, keep in _from_the_end(rewards, valid):
        backwards.append(reward + gamma * running)
        running = torch.where(keep, backwards[-1], running if holes == "bridge" else 0)
    returns = torch.stack(backwards[::-1], dim=1)
    return fill(returns, valid) if holes == "bridge" else returns


def _from_the_end(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The columns of `[B, T]` tensors, the last one first."""
    return zip(*(reversed(x.unbind(1)) for x in tensors), strict=True)


@torch.no_grad()
def less_baseline(returns: Tensor, baseline: Tensor, mask: Tensor) -> Tensor:
    """`returns − b` at valid tokens, the returns at masked ones; b `[B]` per sequence."""
    return returns - over_tokens(baseline.detach(), mask)


@torch.no_grad()
def combine_rewards(parts: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """`Σ_k w_k·x_k`, added in this order, with float32 weights (default: 1)."""
    weights = [1.0] * len(parts) if weights is None else weights
    if len(weights) != len(parts):
        raise InputError(
            f"weights must have one number per reward ({len(parts)}), got {len(weights)}."
        )
    total = torch.zeros_like(parts[0])
    factors = torch.tensor(weights, dtype=torch.float32, device=total.device)
    for w, x in zip(factors, parts, strict=True):
        total = total + w * x
    return total
