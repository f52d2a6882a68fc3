"""GAE and discounted returns: hand numbers, a plain loop over the valid tokens, layouts, masks;
and no loop over time.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from walk import walked

import policyloss as pl
from policyloss.advantage import discounted_returns, gae
from policyloss.functional.recurrence import linear_recurrence_reverse

DISCOUNTS = [(1.0, 1.0), (0.99, 0.95), (1.0, 0.95), (0.9, 0.0), (0.0, 0.7), (0.5, 1.0)]


def tensor(*rows, dtype=torch.float64):
    return torch.tensor(rows if len(rows) > 1 else rows[0], dtype=dtype)


def loop_gae(rewards, values, gamma, lam, last=0.0):
    """The textbook recurrence over one sequence's valid tokens,
    as lists of numbers → (advantages, returns).
    """
    advantages, next_value, next_advantage = [], last, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        next_advantage = r + gamma * next_value - v + gamma * lam * next_advantage
        next_value = v
        advantages.append(next_advantage)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def reference(rewards, values, mask, gamma, lam, last_values=None):
    """`loop_gae` on each padded row, masked tokens cut out and put back as 0."""
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(values.shape[0]):
        keep = mask[row].nonzero().flatten()
        last = 0.0 if last_values is None else last_values[row].item()
        a, g = loop_gae(rewards[row, keep].tolist(), values[row, keep].tolist(), gamma, lam, last)
        advantages[row, keep], returns[row, keep] = (
            torch.tensor(a, dtype=values.dtype),
            torch.tensor(g, dtype=values.dtype),
        )
    return advantages, returns


def batch(seed, rows=7, length=29):
    """Ragged multi-turn rows: prefix lengths with holes, one row full, one row empty,
    one with a single token.
    """
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=g) < 0.6
    mask &= torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=g)
    mask[0], mask[1], mask[2] = True, False, False
    mask[2, 5] = True
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return SimpleNamespace(
        rewards=draw(rows, length),
        values=draw(rows, length),
        mask=mask,
        last=draw(rows),
        per_sequence=draw(rows),
    )


def pack(x, lengths):
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


def test_gae_by_hand():
    out = gae(
        tensor([1.0, 2.0, 3.0]).view(1, 3),
        tensor([0.5, 1.0, 1.5]).view(1, 3),
        torch.ones(1, 3),
        gamma=0.9,
        lam=0.5,
    )
    # δ₃ = 3 − 1.5 = 1.5                      A₃ = 1.5
    # δ₂ = 2 + 0.9·1.5 − 1 = 2.35             A₂ = 2.35 + 0.45·1.5 = 3.025
    # δ₁ = 1 + 0.9·1 − 0.5 = 1.4              A₁ = 1.4 + 0.45·3.025 = 2.76125
    torch.testing.assert_close(
        out.advantages, tensor([2.76125, 3.025, 1.5]).view(1, 3), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        out.returns, tensor([3.26125, 4.025, 3.0]).view(1, 3), rtol=0, atol=1e-14
    )


def test_gae_bridges_a_masked_token():
    mask = torch.tensor([[True, False, True]])
    out = gae(
        tensor([1.0, 2.0, 3.0]).view(1, 3),
        tensor([0.5, 1.0, 1.5]).view(1, 3),
        mask,
        gamma=0.9,
        lam=0.5,
    )
    # The middle token is cut out: δ₁ = 1 + 0.9·1.5 − 0.5 = 1.85, A₁ = 1.85 + 0.45·1.5 = 2.525
    torch.testing.assert_close(
        out.advantages, tensor([2.525, 0.0, 1.5]).view(1, 3), rtol=0, atol=1e-14
    )
    torch.testing.assert_close(
        out.returns, tensor([3.025, 0.0, 3.0]).view(1, 3), rtol=0, atol=1e-14
    )


def test_last_value_comes_after_the_last_valid_token():
    mask = torch.tensor([[True, True, False]])
    out = gae(
        tensor([1.0, 2.0, 9.0]).view(1, 3),
        tensor([0.5, 1.0, 9.0]).view(1, 3),
        mask,
        0.9,
        0.5,
        last_values=tensor([2.0]).view(1),
    )
    # δ₂ = 2 + 0.9·2 − 1 = 2.8, A₂ = 2.8;  δ₁ = 1 + 0.9·1 − 0.5 = 1.4, A₁ = 1.4 + 0.45·2.8 = 2.66
    torch.testing.assert_close(
        out.advantages, tensor([2.66, 2.8, 0.0]).view(1, 3), rtol=0, atol=1e-14
    )


def test_discounted_returns_by_hand():
    rewards, mask = tensor([1.0, 5.0, 2.0, 4.0]).view(1, 4), torch.tensor([[1, 0, 1, 1]])
    # G₄ = 4; G₃ = 2 + 0.5·4 = 4; token 2 is masked; G₁ = 1 + 0.5·4 = 3
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[3.0, 0.0, 4.0, 4.0]]


@walked(("gamma", "lam"), DISCOUNTS)
@walked("seed", range(4))
def test_gae_equals_the_loop(gamma, lam, seed):
    b = batch(seed)
    for last in (None, b.last):
        out = gae(b.rewards, b.values, b.mask, gamma, lam, last_values=last)
        advantages, returns = reference(b.rewards, b.values, b.mask, gamma, lam, last)
        torch.testing.assert_close(out.advantages, advantages, rtol=0, atol=1e-12)
        torch.testing.assert_close(out.returns, returns, rtol=0, atol=1e-12)


@walked("length", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 1000])
def test_scan_equals_the_loop_at_every_length(length):
    g = torch.Generator().manual_seed(length)
    x, c = (
        torch.randn(3, length, generator=g, dtype=torch.float64),
        torch.rand(3, length, generator=g, dtype=torch.float64),
    )
    before = x.clone(), c.clone()
    y = linear_recurrence_reverse(x, c)
    expected, following = torch.empty_like(x), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        following = x[:, t] + c[:, t] * following
        expected[:, t] = following
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-13)
    assert torch.equal(x, before[0])
    assert torch.equal(c, before[1])
    assert y.data_ptr() != x.data_ptr()


def test_scan_of_nothing_is_nothing():
    assert linear_recurrence_reverse(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


@walked(("gamma", "lam"), DISCOUNTS)
def test_packed_equals_padded(gamma, lam):
    b = batch(11)
    # The pack holds the row up to its last valid token or beyond;
    # row 1 is an empty sequence, and the last too.
    lengths = [29, 0, 8, 29, 29, 29, 29]
    cu = torch.tensor([0, *lengths, 0]).cumsum(0)
    args = [pack(x, lengths) for x in (b.rewards, b.values, b.mask)]
    last = torch.cat((b.last, tensor([7.0]).view(1)))
    padded = gae(b.rewards, b.values, b.mask, gamma, lam, last_values=b.last)
    packed = gae(*args, gamma, lam, cu_seqlens=cu, last_values=last)
    for a, p in zip(padded, packed, strict=True):
        torch.testing.assert_close(pack(a, lengths), p, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        pack(discounted_returns(b.rewards, b.mask, gamma), lengths),
        discounted_returns(args[0], args[2], gamma, cu_seqlens=cu),
        rtol=0,
        atol=1e-12,
    )


@walked("shape", ["[S]", "[S, 1]"])
def test_a_reward_per_sequence_sits_on_the_last_valid_token(shape):
    b = batch(3)
    lengths = [29, 0, 8, 29, 29, 29, 29]
    on_tokens = torch.zeros_like(b.rewards)
    for row in range(7):
        if b.mask[row].any():
            on_tokens[row, b.mask[row].nonzero().max()] = b.per_sequence[row]
    given = b.per_sequence if shape == "[S]" else b.per_sequence.unsqueeze(1)
    expected = gae(on_tokens, b.values, b.mask, 0.99, 0.95)
    padded = gae(given, b.values, b.mask, 0.99, 0.95)
    assert torch.equal(padded.advantages, expected.advantages)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed = gae(given, pack(b.values, lengths), pack(b.mask, lengths), 0.99, 0.95, cu_seqlens=cu)
    torch.testing.assert_close(
        packed.advantages, pack(expected.advantages, lengths), rtol=0, atol=1e-12
    )


@walked("garbage", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_masked_positions_may_hold_anything(garbage):
    b = batch(5)
    clean = gae(b.rewards, b.values, b.mask, 0.99, 0.95)
    rewards, values = (torch.where(b.mask, x, garbage) for x in (b.rewards, b.values))
    dirty = gae(rewards, values, b.mask, 0.99, 0.95)
    for a, d in zip(clean, dirty, strict=True):
        assert torch.equal(a, d)
        assert (d[~b.mask] == 0).all()
    assert torch.equal(
        discounted_returns(rewards, b.mask, 0.9), discounted_returns(b.rewards, b.mask, 0.9)
    )


@walked("bad", [float("nan"), float("inf")])
@walked("where", ["rewards", "values", "last"])
@walked("packed", [False, True])
def test_a_bad_number_at_a_valid_token_shows_in_its_sequence_only(bad, where, packed):
    b = batch(6)
    kwargs = {"cu_seqlens": torch.arange(8) * 29} if packed else {}
    shape = (-1,) if packed else (7, 29)

    def call():
        tokens = [x.view(shape) for x in (b.rewards, b.values, b.mask)]
        return gae(*tokens, 0.99, 0.95, last_values=b.last, **kwargs).advantages.view(7, 29)

    clean = call()
    if where == "last":
        b.last[4] = bad
    else:
        getattr(b, where)[4, b.mask[4].nonzero().min()] = bad
    dirty = call()
    others = torch.arange(7) != 4
    assert torch.equal(dirty[others], clean[others])
    assert not dirty[4][b.mask[4]].isfinite().any()
    assert (dirty[4][~b.mask[4]] == 0).all()


def test_rows_are_independent_of_their_order():
    b, order = batch(8), torch.tensor([3, 6, 0, 2, 5, 1, 4])
    straight = gae(b.rewards, b.values, b.mask, 0.99, 0.95, last_values=b.last)
    shuffled = gae(
        b.rewards[order], b.values[order], b.mask[order], 0.99, 0.95, last_values=b.last[order]
    )
    assert torch.equal(straight.advantages[order], shuffled.advantages)


def test_without_discount_it_is_reward_to_go_minus_value():
    b = batch(9)
    out = gae(b.rewards, b.values, b.mask, 1.0, 1.0)
    to_go = torch.where(b.mask, b.rewards, 0).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(
        out.advantages, torch.where(b.mask, to_go - b.values, 0), rtol=0, atol=1e-12
    )
    assert torch.equal(out.returns, discounted_returns(b.rewards, b.mask, 1.0))


def test_with_lambda_zero_it_is_the_one_step_error():
    mask = torch.ones(2, 4)
    r, v = batch(1).rewards[:2, :4], batch(1).values[:2, :4]
    next_v = torch.nn.functional.pad(v[:, 1:], (0, 1))
    torch.testing.assert_close(
        gae(r, v, mask, 0.9, 0.0).advantages, r + 0.9 * next_v - v, rtol=0, atol=1e-14
    )


@walked("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    b = batch(2)
    rewards, values = b.rewards.to(dtype), b.values.to(dtype)
    out = gae(rewards, values, b.mask, 0.99, 0.95)
    wide = gae(rewards.float(), values.float(), b.mask, 0.99, 0.95)
    assert out.advantages.dtype == torch.float32
    assert torch.equal(out.advantages, wide.advantages)
    assert gae(rewards, b.values, b.mask).returns.dtype == torch.float64


def test_float32_keeps_its_precision_over_long_sequences():
    g = torch.Generator().manual_seed(0)
    r, v = torch.randn(4, 8192, generator=g), torch.randn(4, 8192, generator=g)
    mask = torch.ones(4, 8192, dtype=torch.bool)
    for gamma, lam in DISCOUNTS:
        low, high = (
            gae(r, v, mask, gamma, lam).advantages,
            gae(r.double(), v.double(), mask, gamma, lam).advantages,
        )
        # Rounding of a tree of depth 13: a few float32 epsilons of the largest number in play.
        assert (low - high).abs().max() <= 16 * torch.finfo(torch.float32).eps * high.abs().max()


def test_results_carry_no_gradient_and_inputs_are_untouched():
    b = batch(4)
    values = b.values.clone().requires_grad_()
    rewards = b.rewards.clone().requires_grad_()
    out = gae(rewards, values, b.mask.float(), 0.99, 0.95)
    assert not out.advantages.requires_grad
    assert not out.returns.requires_grad
    assert not discounted_returns(rewards, b.mask).requires_grad
    assert torch.equal(values, b.values)
    assert torch.equal(rewards, b.rewards)


@walked("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape):
    empty = torch.zeros(shape)
    assert gae(empty, empty, empty.bool()).advantages.shape == shape
    assert discounted_returns(torch.zeros(shape[0]), empty.bool()).shape == shape
    nothing = gae(
        torch.zeros(0), torch.zeros(0), torch.zeros(0).bool(), cu_seqlens=torch.tensor([0, 0, 0])
    )
    assert nothing.returns.shape == (0,)


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_no_loop_over_time():
    def ops(length, packed):
        x, mask = torch.zeros(2, length), torch.ones(2, length, dtype=torch.bool)
        with CountOps() as counter:
            if packed:
                gae(
                    x.view(-1),
                    x.view(-1),
                    mask.view(-1),
                    0.9,
                    0.9,
                    cu_seqlens=torch.tensor([0, length, 2 * length]),
                )
            else:
                gae(x, x, mask, 0.9, 0.9)
        return counter.ops

    for packed in (False, True):
        small, large = ops(64, packed), ops(64 * 64, packed)
        per_doubling = (large - small) / math.log2(64)
        assert 0 < per_doubling <= 16
        assert large < 300


def test_same_bits_every_time():
    b = batch(10)
    first, second = (
        gae(b.rewards.float(), b.values.float(), b.mask, 0.99, 0.95).advantages for _ in range(2)
    )
    assert torch.equal(first, second)


@walked(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3, 4)}, "one per sequence"),
        ({"mask": torch.ones(2, 4)}, "mask has shape"),
        ({"mask": torch.full((2, 5), 0.5)}, "0 and 1"),
        ({"values": torch.zeros(5)}, "cu_seqlens"),
        ({"values": [1.0]}, "values must be a tensor"),
        ({"gamma": 1.5}, "gamma must be between 0 and 1"),
        ({"lam": -0.1}, "lam must be between 0 and 1"),
        ({"gamma": float("nan")}, "gamma must be between 0 and 1"),
        ({"last_values": torch.zeros(3)}, "last_values has shape"),
    ],
)
def test_bad_input_is_named(change, message):
    call = {
        "rewards": torch.zeros(2, 5),
        "values": torch.zeros(2, 5),
        "mask": torch.ones(2, 5),
    } | change
    with pytest.raises(pl.InputError, match=message):
        gae(**call)
