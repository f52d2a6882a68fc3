"""KL penalties. The estimator gives the value; where the gradient comes from is a separate choice.

Legend: `d` = anchor_logp − logp (carries the gradient through logp), token-shaped.
"""

from __future__ import annotations

import torch
from torch import Tensor


def estimate(d: Tensor, estimator: str, *, as_written: bool = False) -> Tensor:
    """Per-token estimate of KL(current‖anchor): k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ − d − 1. (Schulman, "Approximating KL".)

    as_written: compute k3 term by term, as frameworks do, which near d = 0 leaves only the rounding of eᵈ; else to full precision.
    """
    if estimator == "k1":
        return -d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d**2
    return d.exp() - d - 1 if as_written else k3(d)


def k3(d: Tensor) -> Tensor:
    """`eᵈ − 1 − d`, infinite where d is (eᵈ − d alone would be inf − inf)."""
    endless = d == torch.inf
    d = torch.where(endless, 0, d)
    return torch.where(endless, torch.inf, torch.expm1(d) - d)


def with_gradient(value: Tensor, d: Tensor, logp: Tensor, grad: str, weight: Tensor | None = None) -> Tensor:
    """`value` with the gradient of: itself ("value"), k2 ("k2", straight-through), or itself plus the score term ("score").

    "score" multiplies by `exp(logp − sg logp)`, which is 1 and adds `value·∇logp`: together the gradient of the expectation, not
    only of the integrand (arXiv 2506.09477). weight: a factor on k2's gradient, token-shaped and not differentiated; with the
    ratio to the policy that sampled the token, k2's gradient is that of the KL off-policy too.
    """
    if grad == "value":
        return value
    if grad == "score":
        return value * (logp - logp.detach()).exp()
    pull = 0.5 * d**2 if weight is None else weight.detach() * (0.5 * d**2)
    return value.detach() + (pull - pull.detach())
