"""A number whose gradient is known already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return grads[0] * gradient, None, None


def with_known_gradient(x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
    """`value` (0-dim), which depends on `x` with the given `gradient` (shaped like `x`)."""
    out: Tensor = _KnownGradient.apply(x, value, gradient)  # type: ignore[no-untyped-call]
    return out
