"""From log-ratio to ratio: one clamp, one `exp`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from policyloss.functional.masking import LogClamp, bound, compute_dtype, where_equal
from policyloss.functional.precomputed import first_derivative_only


class _BoundedExp(torch.autograd.Function):
    """`exp(clamp(d))`, with its slope saved for the backward.

    The slope is the value inside the bounds, and 0 beyond. Saving it takes less memory than the
    tensors from which autograd would compute it. Without a (tight) clamp the value may
    overflow; a token that a trust region cut off (gradient 0) then keeps gradient 0 instead of
    0·inf.
    """

    @staticmethod
    def forward(ctx: Any, d: Tensor, limit: LogClamp) -> Tensor:
        inside = bound(d, limit)
        value = inside.exp()
        ctx.may_overflow = _may_overflow(d, limit)
        ctx.save_for_backward(value if limit is None else where_equal(inside, d).mul_(value))
        return value

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Any) -> Any:
        (slope,) = ctx.saved_tensors
        product = grads[0] * slope
        return torch.where(grads[0] == 0, 0, product) if ctx.may_overflow else product, None


def _may_overflow(d: Tensor, limit: LogClamp) -> bool:
    high = limit if limit is None or isinstance(limit, (int, float)) else limit[1]
    finfo = torch.finfo(d.dtype)
    # One rounding less: the bound is rounded to the dtype of `d`, perhaps upward.
    return high is None or high > math.log(finfo.max) * (1 - finfo.eps)


def bounded_exp(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """`exp(log_ratio)`, the log-ratio clamped first (`bound`); no gradient beyond the clamp."""
    # torch.compile derives and fuses the slope by itself, and a symbol has none.
    compiling = torch.compiler.is_compiling() and not _may_overflow(log_ratio, limit)
    if compiling or not isinstance(log_ratio, Tensor):
        return bound(log_ratio, limit).exp()
    ratio: Tensor = _BoundedExp.apply(log_ratio, limit)  # type: ignore[no-untyped-call]
    return ratio


def mean_log_ratio(first: Tensor, second: Tensor, mean: str) -> Tensor:
    """The logarithm of a mean of two ratios, from the logarithms a and b of the ratios.

    mean: "arithmetic" for `log((eᵃ + eᵇ) / 2)`, "geometric" for `(a + b) / 2`.
    """
    if mean == "geometric":
        return (first + second) / 2
    # Exactly 0 where both are 0, and finite wherever they are.
    lower = torch.expm1(-(first - second).abs())
    return torch.maximum(first, second) + torch.log1p(lower / 2)


def loglinear_logp(logp: Tensor, rollout_logp: Tensor, ages: Tensor) -> Tensor:
    """The proximal policy, one update before the current one, without a forward of its own:
    `rollout_logp + α·(logp − rollout_logp)` with `α = (age − 1) / age`, detached.

    A token of age 0 or 1 has α = 0: the policy that sampled it is not older than the proximal one.
    Source: AReaL, prox_logp_method="loglinear".
    """
    dtype = compute_dtype(logp, rollout_logp)
    now, then = logp.detach().to(dtype), rollout_logp.detach().to(dtype)
    return then + (1 - 1 / ages.clamp(min=1).to(dtype)) * (now - then)
