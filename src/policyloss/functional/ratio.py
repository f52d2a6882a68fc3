"""From log-ratio to ratio: one clamp, one `exp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.functional.masking import bound

LogClamp = float | tuple[float | None, float | None] | None


class _BoundedExp(torch.autograd.Function):
    """`exp(clamp(d))`. The slope is known with the value (the value itself inside the bounds, 0 beyond), so it is kept instead of
    what autograd would need to find it again. Without a clamp the value may overflow; a token that a trust region cut off
    (gradient 0) then stays at 0 instead of 0·inf.
    """

    @staticmethod
    def forward(ctx: Any, d: Tensor, limit: LogClamp) -> Tensor:
        inside = bound(d, limit)
        value = inside.exp()
        ctx.may_overflow = limit is None
        ctx.save_for_backward(value if limit is None else value * torch.eq(inside, d, out=torch.empty_like(d)))
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (slope,) = ctx.saved_tensors
        product = grads[0] * slope
        return torch.where(grads[0] == 0, 0, product) if ctx.may_overflow else product, None


def bounded_exp(log_ratio: Tensor, limit: LogClamp) -> Tensor:
    """`exp(log_ratio)`, the log-ratio clamped first (see `bound`); the gradient is 0 beyond the clamp."""
    if limit is not None and torch.compiler.is_compiling():  # a compiler derives and fuses the slope by itself
        return bound(log_ratio, limit).exp()
    ratio: Tensor = _BoundedExp.apply(log_ratio, limit)  # type: ignore[no-untyped-call]
    return ratio
