"""Trust regions: limits on how far one step may change a token's probability.

Pure functions of token-shaped tensors; the result is a loss to minimise.

Legend: `ratio` = π/π_anchor (carries the gradient), `logp` carries the gradient, `advantages` is a
constant; all token-shaped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from policyloss.functional.correction import nan_where_undecided
from policyloss.functional.exact import arithmetic
from policyloss.functional.kl import binary_divergence
from policyloss.functional.masking import accumulator_dtype, where_equal
from policyloss.functional.precomputed import first_derivative_only
from policyloss.functional.segments import Sequences

# How many roundings a mean may be off by: some of its sum, and one of each number in it.
ROUNDINGS = 16


def _choose(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """One of two numbers per token; `torch.where` of two floats would round to float32."""
    return torch.full_like(like, no, requires_grad=False).masked_fill(condition, yes)


def _clip_formula(
    r: Tensor, a: Tensor, low: float, high: float, cap: float | None, dual: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`max(-A·min(r, cap), -A·clip(r, low, high))`, and at most `dual·|A|`.

    The dual bound binds only where A < 0, because the rest is ≤ 0 elsewhere. The second result is
    `-A·r`, the loss without limits; the third is `-A`.
    """
    push = -a
    free = push * r
    capped = free if cap is None else push * r.clamp(max=cap)
    loss = torch.maximum(capped, push * r.clamp(low, high))
    if dual is not None and dual != math.inf:
        loss = torch.minimum(loss, dual * a.abs())
    return loss, free, push


class _Clipped(torch.autograd.Function):
    """`_clip_formula` with its slope in r: −A where the loss equals −A·r, else 0.

    The slope is saved for the backward; autograd would save six tensors to compute it again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        r: Tensor,
        a: Tensor,
        low: float,
        high: float,
        cap: float | None,
        dual: float | None,
    ) -> Tensor:
        loss, free, push = _clip_formula(r, a, low, high, cap, dual)
        ctx.save_for_backward(where_equal(loss, free).mul_(push))
        return loss

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Any) -> Any:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope, None, None, None, None, None


def clipped(
    ratio: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    dual: float | None = None,
    *,
    cap: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate: `max(-A·r, -A·clip(r, 1-eps_low, 1+eps_high))`.

    dual: the loss is at most `-A·dual` where A < 0. cap: the unclipped term is `-A·min(r, cap)`.
    Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2019 (arXiv 1912.09729).
    """
    low, high = 1 - eps_low, 1 + eps_high
    # torch.compile derives and fuses the slope by itself, and a symbol has none.
    if torch.compiler.is_compiling() or not isinstance(ratio, Tensor):
        return _clip_formula(ratio, advantages, low, high, cap, dual)[0]
    loss: Tensor = _Clipped.apply(ratio, advantages, low, high, cap, dual)  # type: ignore[no-untyped-call]
    return loss


def two_sided_clipped(
    ratio: Tensor, advantages: Tensor, delta: float, eps_low: float, eps_high: float
) -> Tensor:
    """INTELLECT-2's clip: `-min(min(r, delta)·A, clip(r, 1-eps_low, 1+eps_high)·A)`.

    Source: arXiv 2505.07291.
    If delta ≥ 1+eps_high, this equals the dual clip with dual = delta.
    """
    return clipped(ratio, advantages, eps_low, eps_high, cap=delta)


def detached_clipped(
    ratio: Tensor,
    logp: Tensor,
    advantages: Tensor,
    ratio_min: float,
    ratio_max: float,
    outside: str = "clip",
    weight: str = "ratio",
) -> Tensor:
    """CISPO: `-sg[clip(r, ratio_min, ratio_max)]·A·logp`, where sg stops the gradient.

    Source: arXiv 2506.13585.
    outside: "clip" keeps the gradient of every token; "zero_by_sign" sets the loss to 0 where PPO
    would clip (A>0 and r>max, or A<0 and r<min); "zero" does so wherever r is outside the bounds.
    weight: "ratio", or "one": the loss of other tokens is `-A·logp` (REC, arXiv 2509.24203).
    """
    r = ratio.detach()
    w = r.clamp(min=ratio_min, max=ratio_max) if weight == "ratio" else nan_where_undecided(r)
    if outside == "zero_by_sign":
        dropped = ((advantages > 0) & (r > ratio_max)) | ((advantages < 0) & (r < ratio_min))
        w = torch.where(dropped, 0, w)
    elif outside == "zero":
        dropped = (r > ratio_max) | (r < ratio_min)
        w = torch.where(dropped, 0, w)
    return -w * advantages * logp


def soft_gated(
    ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """SAPO: `-A·(4/τ)·sigmoid(τ·(r-1))`, τ by the sign of A (arXiv 2511.20347).

    Its derivative in r is −A at r = 1, and nears 0 on both sides.
    """
    tau = _choose(advantages > 0, tau_positive, tau_negative, ratio)
    return -advantages * (4 / tau) * arithmetic().sigmoid(tau * (ratio - 1))


def outside_band(
    logp: Tensor,
    anchor_logp: Tensor,
    advantages: Tensor,
    kind: str,
    low: float,
    high: float,
    both_sides: bool = False,
) -> Tensor:
    """True where a token diverges from the anchor by more than `high` upward or `low` downward.

    The divergence is `binary_divergence(logp, anchor_logp, kind)`. Without `both_sides`, only the
    direction in which the advantage pushes is tested: upward where A > 0, downward elsewhere.
    """
    distance = binary_divergence(logp, anchor_logp, kind)
    up = (logp > anchor_logp) & (distance > high)
    down = (logp < anchor_logp) & (distance > low)
    return up | down if both_sides else torch.where(advantages > 0, up, down)


def geometric_clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    eps_low: float,
    eps_high: float,
    lengths: Tensor,
    sequences: Sequences,
) -> Tensor:
    """GMPO: `-A·exp(mean_t c_t)`, the mean over the sequence's valid tokens (arXiv 2507.20673).

    c is the token's log-ratio d, clipped only on the side that the advantage pushes it to:
    `c = sgn(A)·min(sgn(A)·d, sgn(A)·clip(d, -eps_low, eps_high))`. lengths: valid tokens, `[S]`.
    """
    c = geometric_log_ratio(log_ratio, advantages, eps_low, eps_high)
    return -advantages * sequences.expand((sequences.sum(c) / lengths.clamp(min=1)).exp())


def geometric_log_ratio(
    log_ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> Tensor:
    """GMPO's c_t: the log-ratio, clipped on the side that the advantage pushes it to."""
    side = advantages.sign()
    return side * torch.minimum(side * log_ratio, side * log_ratio.clamp(-eps_low, eps_high))


def influence(
    future: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    safe_ratio: float,
) -> Tensor:
    """FIPO's weight, detached: `clip(exp(future), low, high)`.

    It is held within [0.8, 1] where A < 0 and r > safe_ratio. future: the discounted sum of this
    and all later log-ratios of the sequence. Source: arXiv 2603.19835; 0.8 and 1 are ms-swift's.
    """
    weight = future.detach().exp().clamp(low, high)
    risky = (advantages < 0) & (ratio.detach() > safe_ratio)
    return torch.where(risky, weight.clamp(0.8, 1.0), weight)


def gamma_weighted(
    log_ratio: Tensor,
    logp: Tensor,
    advantages: Tensor,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """VESPO: `-sg[φ(W)]·A·logp`, with `φ(W) = e^λ·W^k·e^(-λW)`, so that φ(1) = 1.

    W = exp(log_ratio), the sequence's ratio. positive, negative: (k, λ) where A ≥ 0, and A < 0.
    """
    log_w = log_ratio.detach()
    k = _choose(advantages >= 0, positive[0], negative[0], log_w)
    rate = _choose(advantages >= 0, positive[1], negative[1], log_w)
    phi = (rate + k * log_w - rate * log_w.exp()).exp()
    return -phi * advantages * logp


def quadratic(log_ratio: Tensor, logp: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """DRO / Kimi k1.5: `-(A·logp - ½·beta·(log-ratio)²)` (arXiv 2405.19107, 2501.12599)."""
    return -(advantages * logp - 0.5 * beta * log_ratio**2)


def regression(log_ratio: Tensor, advantages: Tensor, beta: float) -> Tensor:
    """`(beta·log_ratio - A)²` (A*-PO, arXiv 2505.20686; SPPO, arXiv 2405.00675)."""
    return (beta * log_ratio - advantages) ** 2


def tapered_negative(
    ratio: Tensor, logp: Tensor, advantages: Tensor, ratio_max: float = 1.0
) -> Tensor:
    """TOPR (arXiv 2503.14286): `-A·logp` where A > 0, else `-min(sg[ratio], ratio_max)·A·logp`.

    sg stops the gradient.
    """
    r = ratio.detach()
    # A NaN shows even where it is not needed.
    weight = torch.where((advantages > 0) & ~r.isnan(), 1, r.clamp(max=ratio_max))
    return -weight * advantages * logp


def by_sign(positive: Tensor, negative: Tensor, advantages: Tensor) -> Tensor:
    """`positive` where A > 0, else `negative`; NaN where either is NaN."""
    take_positive = torch.where(advantages > 0, ~negative.isnan(), positive.isnan())
    return torch.where(take_positive, positive, negative)


def covariance(
    logp: Tensor, advantages: Tensor, logp_mean: Tensor, advantage_mean: Tensor
) -> Tensor:
    """Each token's term of the covariance of A and logp, `(A - Ā)·(logp - mean logp)`. Detached."""
    return (advantages - advantage_mean) * (logp.detach() - logp_mean)


def step_means(advantages: Tensor, logp: Tensor, mask: Tensor, *groups: Any) -> dict[str, Tensor]:
    """The number of valid tokens, and the mean and rounding of advantages and logp. All 0-dim.

    All are taken over the ranks of every group. A rounding is the largest difference that rounding
    can make between two equal numbers after a mean was subtracted: some units in the last place of
    the mean size. Advantages and logp must be 0 where masked.
    """
    wide = accumulator_dtype(mask.device)
    terms = (mask, advantages, logp, advantages.abs(), logp.abs())
    tokens, *sums = arithmetic().totals_over(groups, *terms, dtype=wide)
    means = (torch.stack(sums) / tokens.clamp(min=1)).to(logp.dtype)
    roundings = means[2:] * (ROUNDINGS * torch.finfo(logp.dtype).eps)
    of_advantages = {"advantage_mean": means[0], "advantage_rounding": roundings[0]}
    of_logp = {"logp_mean": means[1], "logp_rounding": roundings[1]}
    return {"tokens": tokens, **of_advantages, **of_logp}


def step_covariance(advantages: Tensor, logp: Tensor, means: dict[str, Tensor]) -> Tensor:
    """Each token's `covariance`, detached; exactly 0 for a number that equals its mean.

    Numbers that are equal up to rounding count as equal. A mean is rounded, differently for every
    layout of a batch: where all advantages are equal, their distances from it are that rounding
    alone, and an order by them would be an order by chance.
    """
    cov = covariance(logp, advantages, means["logp_mean"], means["advantage_mean"])
    at_mean = (advantages - means["advantage_mean"]).abs() <= means["advantage_rounding"]
    at_mean = at_mean | ((logp.detach() - means["logp_mean"]).abs() <= means["logp_rounding"])
    return torch.where(at_mean & ~cov.isnan(), 0, cov)


def draws(seed: int, *keys: Tensor) -> Tensor:
    """A non-negative random int64 for each token, made from `seed` and the bits of `keys` only.

    A token gets the same draw padded or packed, in any micro-batch and on any rank, which a random
    generator cannot ensure. (It is splitmix64 over the bits of the keys as float32, so float64 keys
    get the same draw.)
    """
    state = torch.full_like(keys[0], seed * 0x9E3779B9 + 0x1234567, dtype=torch.int64)
    for key in keys:
        bits = key.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
        state = _mix(state ^ (bits + 0x5851F42D4C957F2D))
    return state & 0x7FFFFFFFFFFFFFFF


def _mix(z: Tensor) -> Tensor:
    """splitmix64's finaliser; int64 products wrap, and the mask makes its shifts logical."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z ^ ((z >> 31) & 0x1FFFFFFFF)
