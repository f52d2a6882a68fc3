"""A first-order linear recurrence along the last dimension, in log₂(T) vector steps instead of T scalar ones."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def linear_recurrence_reverse(x: Tensor, decay: Tensor) -> Tensor:
    """Solve `y_t = x_t + c_t·y_{t+1}` from the end, with `y_T = 0`: reward-to-go, discounted returns, GAE. Carries no gradient.

    x, decay (c): `[..., T]`, same shape and dtype, not modified → y: `[..., T]`.
    Doubling (Hillis and Steele, "Data parallel algorithms", 1986): after the step of width w, `y_t` covers the terms t … t+2w−1,
    and `c_t` is the product of their 2w decays, so ⌈log₂ T⌉ steps cover everything.
    A decay of 0 cuts the line into independent pieces, as long as `x` is finite: `0·nan` is `nan`.
    """
    length = x.shape[-1]
    y, target, spare = x, torch.empty_like(x), torch.empty_like(x)
    reach, width = decay[..., : max(length - 1, 0)], 1
    while width < length:
        # Positions closer to the end than `width` are complete already; two buffers, because a step reads what it would overwrite.
        torch.addcmul(y[..., :-width], reach, y[..., width:], out=target[..., :-width])
        target[..., -width:] = y[..., -width:]
        y, target, spare = target, spare, target
        reach = reach[..., :-width] * reach[..., width:]
        width *= 2
    return y.clone() if y is x else y
