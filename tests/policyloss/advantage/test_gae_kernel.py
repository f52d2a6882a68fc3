"""The GAE kernel against the eager `policyloss.gae` in float64:
padded and packed, masked, ragged, empty, with NaN.

Without a GPU it runs in Triton's interpreter. Blocks are smaller than the sequences, so that the
carry between them is met.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from interpreted import DEVICE
from test_gae import batch, pack
from torch import Tensor
from walk import walked

from policyloss.advantage import returns
from policyloss.functional import gae_kernel
from policyloss.functional.gae_kernel import gae

# The interpreter computes with NumPy, which warns of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
BLOCK = 8


def blocks_of(size: int | None) -> Any:
    """A context in which the kernel takes so many tokens at once; None leaves its choice."""
    sizes = {} if size is None else {"SHORTEST_BLOCK": size, "LONGEST_BLOCK": size}
    return mock.patch.multiple(gae_kernel, **sizes) if sizes else nullcontext()


def both(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float = 0.97,
    lam: float = 0.9,
    **kwargs: Any,
) -> tuple[tuple[Tensor, Tensor], returns.GAE]:
    """The kernel's result (on the GPU if there is one) and the eager one, both on the CPU."""
    cu_seqlens, last = kwargs.get("cu_seqlens"), kwargs.get("last_values")
    given = [None if x is None else x.to(DEVICE) for x in (rewards, values, mask, cu_seqlens, last)]
    dtype = torch.float64 if torch.float64 in (rewards.dtype, values.dtype) else torch.float32
    with blocks_of(kwargs.pop("block", BLOCK)):
        a, g = gae(*given[:3], gamma, lam, *given[3:], dtype)  # type: ignore[arg-type]
    return (a.cpu(), g.cpu()), returns.gae(rewards, values, mask, gamma, lam, **kwargs)


def assert_same(pair: tuple[tuple[Tensor, Tensor], returns.GAE], atol: float = 1e-12) -> None:
    for got, want in zip(*pair, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=atol, equal_nan=True)


def test_by_hand() -> None:
    """One row, the second token masked, V after the end = 2, γ = 0.9, λ = 0.5.

    δ₃ = 3 + 0.9·2 − 1.5 = 3.3 = A₃;  δ₁ = 1 + 0.9·1.5 − 0.5 = 1.85, A₁ = 1.85 + 0.45·3.3 = 3.335.
    """
    rewards, values = (
        torch.tensor([x], dtype=torch.float64, device=DEVICE)
        for x in ([1.0, 2.0, 3.0], [0.5, 1.0, 1.5])
    )
    mask, last = (
        torch.tensor([[1, 0, 1]], device=DEVICE),
        torch.tensor([2.0], dtype=torch.float64, device=DEVICE),
    )
    with blocks_of(2):
        a, g = gae(rewards, values, mask, 0.9, 0.5, None, last, torch.float64)
    assert a.tolist() == [pytest.approx([3.335, 0.0, 3.3], abs=1e-14)]
    assert g.tolist() == [pytest.approx([3.835, 0.0, 4.8], abs=1e-14)]


@walked(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.7)])
@walked("with_last", [False, True])
def test_padded_rows(gamma: float, lam: float, with_last: bool) -> None:
    b = batch(3, rows=4)
    assert_same(
        both(b.rewards, b.values, b.mask, gamma, lam, last_values=b.last if with_last else None)
    )


@walked("seed", range(2))
def test_one_reward_per_sequence_goes_to_the_last_valid_token(seed: int) -> None:
    b = batch(seed, rows=5)
    for rewards in (b.per_sequence, b.per_sequence[:, None]):
        assert_same(both(rewards, b.values, b.mask, last_values=b.last if seed else None))


@walked("per_token", [True, False])
@walked("offsets", [torch.int32, torch.int64])
def test_packs_with_empty_sequences(per_token: bool, offsets: torch.dtype) -> None:
    b = batch(5)
    lengths = torch.tensor([0, 29, 1, 8, 0, 17, 0])
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(offsets)
    rewards, values, mask = (pack(x, lengths) for x in (b.rewards, b.values, b.mask))
    mask[10:20] = True
    assert_same(
        both(
            rewards if per_token else b.per_sequence,
            values,
            mask,
            cu_seqlens=cu_seqlens,
            last_values=b.last,
        )
    )


@walked("length", [1, 7, 8, 9, 16, 17])
def test_lengths_around_the_block(length: int) -> None:
    b = batch(length, rows=3)
    assert_same(
        both(
            b.rewards[:, :length], b.values[:, :length], b.mask[:, :length], last_values=b.last[:3]
        )
    )


@walked("block", [4, 32, 256])
def test_the_block_does_not_change_the_result(block: int) -> None:
    b = batch(8, rows=3)
    assert_same(both(b.rewards, b.values, b.mask, block=block))


@walked("dtype", [torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_every_type(dtype: torch.dtype) -> None:
    b = batch(4, rows=3)
    assert_same(both(b.rewards, b.values, b.mask.to(dtype)))


@walked(("rewards", "values"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float16)])
def test_half_precision_is_computed_in_float32(rewards: torch.dtype, values: torch.dtype) -> None:
    b = batch(6, rows=3)
    # Sums of up to 29 numbers of size 1: a few roundings of 1e-6.
    assert_same(both(b.rewards.to(rewards), b.values.to(values), b.mask), atol=4e-6)


def test_a_nan_or_inf_makes_its_own_sequence_nan_and_no_other() -> None:
    b = batch(9)
    b.mask[3:] = torch.arange(29) % 3 != 1
    b.rewards[3, 21], b.values[4, 0], b.values[5, 27], b.last[6] = (
        math.nan,
        -math.inf,
        math.nan,
        math.inf,
    )
    pair = both(b.rewards, b.values, b.mask, last_values=b.last)
    assert_same(pair)
    (advantages, _), _ = pair
    assert advantages.isnan().any(-1).tolist() == [False, False, False, True, True, True, True]
    assert (advantages[3:].isnan() == b.mask[3:]).all()


def test_values_at_masked_tokens_are_ignored() -> None:
    b = batch(10, rows=4)
    clean = both(b.rewards, b.values, b.mask)
    garbage = torch.where(torch.arange(29) % 2 == 0, math.nan, math.inf)
    for x in (b.rewards, b.values):
        x[:] = torch.where(b.mask, x, garbage)
    dirty = both(b.rewards, b.values, b.mask)
    assert all(torch.equal(x, y) for x, y in zip(clean[0], dirty[0], strict=True))
    assert_same(dirty)


def test_a_nan_reward_of_a_sequence_without_tokens_is_dropped() -> None:
    b = batch(11, rows=3)
    assert not b.mask[1].any()
    b.per_sequence[1] = math.nan
    pair = both(b.per_sequence, b.values, b.mask)
    assert_same(pair)
    assert pair[0][0].isfinite().all()


def test_packed_sequences_do_not_leak_into_their_neighbours() -> None:
    """A NaN in the middle sequence of a pack, and a value after the end of each."""
    cu_seqlens = torch.tensor([0, 9, 20, 29])
    b = batch(12, rows=3)
    values = b.values[0].clone()
    values[9] = math.nan
    pair = both(
        b.rewards[0],
        values,
        torch.ones(29, dtype=torch.bool),
        cu_seqlens=cu_seqlens,
        last_values=b.last,
    )
    assert_same(pair)
    assert pair[0][1].isnan().tolist() == [9 <= t < 20 for t in range(29)]


def test_inputs_that_are_not_contiguous() -> None:
    b = batch(13, rows=3)
    wide = torch.stack([b.rewards, b.values], dim=-1)
    assert_same(
        both(
            wide[..., 0],
            wide[..., 1],
            b.mask.t().contiguous().t(),
            last_values=torch.stack([b.last] * 2, 1)[:, 1],
        )
    )


@walked("shape", [(0, 5), (4, 0)])
def test_nothing_gives_nothing(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape, device=DEVICE)
    a, g = gae(x, x, x.bool(), 0.9, 0.9, None, None, torch.float32)
    assert a.shape == g.shape == shape


def test_the_same_input_gives_the_same_bits() -> None:
    b = batch(14, rows=3)
    first, second = (both(b.rewards.float(), b.values.float(), b.mask)[0] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the default blocks at real lengths")
@walked("length", [500, 8192, 20000])
def test_long_sequences_with_the_default_block(length: int) -> None:
    b = batch(15, rows=5, length=length)
    assert_same(
        both(b.rewards, b.values, b.mask, 0.99, 0.95, last_values=b.last, block=None), atol=1e-10
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_gae_of_gpu_tensors_takes_the_kernel_and_checks_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    b = batch(16)
    given = {k: getattr(b, k).cuda() for k in ("rewards", "values", "mask")}
    by_kernel = returns.gae(**given, gamma=0.99, lam=0.95, last_values=b.last.cuda())
    with pytest.raises(Exception, match="rewards have shape"):
        returns.gae(given["rewards"][:, :4], given["values"], given["mask"])
    monkeypatch.setattr(returns, "kernels", lambda module: None)
    eager = returns.gae(**given, gamma=0.99, lam=0.95, last_values=b.last.cuda())
    torch.testing.assert_close(by_kernel.advantages, eager.advantages, rtol=0, atol=1e-12)
    assert not torch.equal(by_kernel.advantages, torch.zeros_like(by_kernel.advantages))
