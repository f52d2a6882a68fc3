"""Generalised advantage estimation as one Triton launch, for padded rows and packs.

The reference is `advantage/returns.py`. Legend: token-shaped is `[B, T]`, or packed `[N]` with
`cu_seqlens`; S sequences. One program works on one sequence.
"""

from __future__ import annotations

from functools import lru_cache
from struct import pack, unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of

# Tokens of a sequence that a program takes at once: all of a short one; a longer one is walked from
# its end.
SHORTEST_BLOCK, LONGEST_BLOCK = 256, 8192
TOKENS_PER_THREAD = 8


@triton.jit
def _then(decay_after, x_after, decay, x):
    """Compose two steps `y → x + decay·y`: the step of the later tokens runs first."""
    return decay * decay_after, x + decay * x_after


@triton.jit
def _tokens(
    rewards_ptr, values_ptr, mask_ptr, at, inside, DTYPE: tl.constexpr, PER_TOKEN: tl.constexpr
):
    """Reward, value and validity of the tokens `at`; 0 where masked or not `inside`.

    The reward is 0 if there is one per sequence.
    """
    valid = tl.load(mask_ptr + at, mask=inside, other=0) != 0
    value = tl.where(valid, tl.load(values_ptr + at, mask=inside, other=0.0).to(DTYPE), 0.0)
    reward = tl.zeros_like(value)
    if PER_TOKEN:
        reward = tl.where(valid, tl.load(rewards_ptr + at, mask=inside, other=0.0).to(DTYPE), 0.0)
    return reward, value, valid


@triton.jit
def _store_poison(
    mask_ptr, advantages_ptr, returns_ptr, begin, end, blocks, poison, BLOCK: tl.constexpr
):
    """Write NaN to a whole sequence that holds a NaN or inf."""
    tl.debug_barrier()
    for i in range(blocks):
        at = begin + (blocks - 1 - i).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        valid = tl.load(mask_ptr + at, mask=at < end, other=0) != 0
        tl.store(returns_ptr + at, tl.where(valid, poison, 0.0), mask=at < end)
        tl.store(advantages_ptr + at, tl.where(valid, poison, 0.0), mask=at < end)


@triton.jit
def _gae_kernel(
    rewards_ptr, values_ptr, mask_ptr, offsets_ptr, last_ptr, advantages_ptr, returns_ptr, length,
    gamma_high, gamma_low, lam_high, lam_low,
    PACKED: tl.constexpr, PER_TOKEN: tl.constexpr, HAS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advantages and returns of one sequence.

    `for t in reversed(valid): A[t] = r[t] + gamma*V[t+1] - V[t] + gamma*lam*A[t+1]`,
    and `returns = A + V`.
    The scan computes `z_t = (1−λ)·V_t + λ·(r_t + γ·z_{t+1})` at valid tokens and `z_t = z_{t+1}`
    at masked ones; then `returns_t = r_t + γ·z_{t+1}`. At index t it reads token t+1, so its result
    at t is z_{t+1}.
    """
    sequence = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = returns_ptr.dtype.element_ty
    if PACKED:
        begin = tl.load(offsets_ptr + sequence).to(tl.int64)
        end = tl.load(offsets_ptr + sequence + 1).to(tl.int64)
    else:
        begin = sequence * length
        end = begin + length
    # The host passes numbers as float32, so a float64 comes as the sum of two.
    gamma = tl.full([], gamma_high, dtype) + tl.full([], gamma_low, dtype)
    lam = tl.full([], lam_high, dtype) + tl.full([], lam_low, dtype)
    after = tl.load(last_ptr + sequence).to(dtype) if HAS_LAST else tl.zeros([], dtype)
    once = tl.zeros([], dtype) if PER_TOKEN else tl.load(rewards_ptr + sequence).to(dtype)
    within = tl.arange(0, BLOCK)
    blocks = ((end - begin + BLOCK - 1) // BLOCK).to(tl.int32)
    carried = after
    poison = after * 0
    last_valid = begin - 1
    for i in range(blocks):
        at = begin + (blocks - 1 - i).to(tl.int64) * BLOCK + within
        reward, value, valid = _tokens(
            rewards_ptr, values_ptr, mask_ptr, at, at < end, dtype, PER_TOKEN
        )
        next_reward, next_value, next_valid = _tokens(
            rewards_ptr, values_ptr, mask_ptr, at + 1, at + 1 < end, dtype, PER_TOKEN
        )
        if not PER_TOKEN:
            # From the end, the first block with a valid token holds the last one; in the blocks
            # before it nothing is larger.
            last_valid = tl.maximum(last_valid, tl.max(tl.where(valid, at, begin - 1), axis=0))
            reward = tl.where(valid & (at == last_valid), once, 0.0)
            next_reward = tl.where(next_valid & (at + 1 == last_valid), once, 0.0)
        x = tl.where(next_valid, next_value + lam * (next_reward - next_value), 0.0)
        decay = tl.where(next_valid, gamma * lam, tl.full([], 1.0, dtype))
        decay_to_end, from_here = tl.associative_scan((decay, x), 0, _then, reverse=True)
        following = from_here + decay_to_end * carried
        total = reward + gamma * following
        tl.store(returns_ptr + at, tl.where(valid, total, 0.0), mask=at < end)
        tl.store(advantages_ptr + at, tl.where(valid, total - value, 0.0), mask=at < end)
        carried = tl.sum(tl.where(within == 0, following, 0.0), axis=0)
        poison += tl.sum(reward * 0 + value * 0, axis=0)
    if poison != poison:
        _store_poison(mask_ptr, advantages_ptr, returns_ptr, begin, end, blocks, poison, BLOCK)


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    cu_seqlens: Tensor | None,
    last_values: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, token-shaped, in `dtype` (float32 or float64).

    The arguments are those of `policyloss.gae`, checked.

    values, mask (any type; not 0 is valid): token-shaped. rewards: token-shaped or one per
    sequence. last_values: `[S]` or None.
    """
    rewards, values, mask = rewards.contiguous(), values.contiguous(), mask.contiguous()
    advantages, returns = (torch.empty_like(values, dtype=dtype) for _ in range(2))
    sequences, length = values.shape[0], values.shape[-1]
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
    if not sequences or not length:
        return advantages, returns
    # How long the sequences of a pack are is known on the device only; most are shorter than twice
    # the mean.
    typical = length if cu_seqlens is None else 2 * length // max(sequences, 1)
    # The least power of two that is not below it. (Triton's takes longer than all else here.)
    block = min(max(1 << max(typical - 1, 0).bit_length(), SHORTEST_BLOCK), LONGEST_BLOCK)
    with on_device_of(values):
        _gae_kernel[(sequences,)](
            rewards, values, mask, cu_seqlens,
            None if last_values is None else last_values.contiguous(),
            advantages, returns, length, *_in_two(float(gamma)), *_in_two(float(lam)),
            PACKED=cu_seqlens is not None, PER_TOKEN=rewards.shape == values.shape,
            HAS_LAST=last_values is not None, BLOCK=block,
            num_warps=max(1, min(32, block // (32 * TOKENS_PER_THREAD))),
        )  # fmt: skip
    return advantages, returns


@lru_cache(maxsize=64)
def _in_two(x: float) -> tuple[float, float]:
    """`x` as a sum of two numbers that are exact in float32."""
    high: float = unpack("f", pack("f", x))[0]
    return high, x - high
