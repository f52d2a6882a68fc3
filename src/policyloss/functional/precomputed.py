"""Values with gradients that were computed beforehand and are passed to autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.functional.triton_modules import kernels


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd.function.once_differentiable`, without its cost where it has nothing to do.

    The gradients are constants, so a second derivative would be wrong and is an error. Only a
    backward with `create_graph=True` could need one.
    """
    refusing = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def of_gradients(ctx: Any, *grads: Any) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return of_gradients


class _KnownGradients(torch.autograd.Function):
    """Gives autograd the gradients of several inputs, scaled by the gradient of the value."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        gradients: Sequence[Tensor],
        again: Callable[[], Sequence[Tensor]],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.gradients, ctx.again = gradients, again
        ctx.save_for_backward(*inputs)
        return value.clone()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = ctx.saved_tensors  # raises if one was changed since, or if this graph was freed
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            gradients = ctx.again()
        pairs = zip(gradients, inputs, strict=True)
        return None, None, None, *(_scaled_gradient(g, grads[0], x.dtype) for g, x in pairs)


def _scaled_gradient(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`x · factor` in `dtype`, written over `x` if it has that dtype.

    Otherwise it is rounded in the same pass, so that there are never two float32 copies.
    """
    if x.dtype == dtype and factor.device.type == "cpu" and factor == 1:
        return x
    out = x if x.dtype == dtype else torch.empty_like(x, dtype=dtype)
    narrow = x.device.type == "cuda" and x.is_contiguous() and x.dtype != torch.float64
    kernel = kernels("policyloss.functional.scale_kernel") if narrow else None
    if kernel is not None:
        kernel.write_scaled(x, factor, out)
    else:
        torch.mul(x, factor, out=out)
    return out


def with_known_gradients(
    value: Tensor,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    again: Callable[[], Sequence[Tensor]],
) -> Tensor:
    """`value` (0-dim) as a function of `inputs` whose gradients are `gradients`.

    gradients: one for each input, of its shape and any float type. The backward scales them in
    place, so they must not be used again. again: computes them once more, for a second backward
    through a retained graph.
    """
    out: Tensor = _KnownGradients.apply(value, gradients, again, *inputs)  # type: ignore[no-untyped-call]
    return out
