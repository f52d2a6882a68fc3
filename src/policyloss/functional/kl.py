"""Divergences between two policies, from the log-probabilities of a sampled token.

For a penalty, the estimator gives the value; where the gradient comes from is a separate choice.
Legend: `d` = anchor_logp − logp (carries the gradient through logp), token-shaped.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "abs")
K3Terms = Literal["exp(d) - 1 - d", "exp(d) - d - 1"]


def estimate(d: Tensor, estimator: str, *, as_written: K3Terms | None = None) -> Tensor:
    """Estimate KL(p‖q) per token, from d = log q − log p of a token that was drawn from p.

    Source: Schulman, "Approximating KL".
    k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ − 1 − d. A penalty has p = current and q = anchor; a
    rejection by the rollout weight has p = rollout and q = old. as_written: compute k3 term by term
    in this order, as frameworks do; near d = 0 the result is then only the rounding error of eᵈ.
    None computes k3 in full precision.
    """
    if estimator == "k1":
        return -d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d**2
    if as_written is None:
        return k3(d)
    return d.exp() - 1 - d if as_written == "exp(d) - 1 - d" else d.exp() - d - 1


def k3(d: Tensor) -> Tensor:
    """`eᵈ − 1 − d`, infinite where d is (eᵈ − d alone would be inf − inf)."""
    endless = d == torch.inf
    d = torch.where(endless, 0, d)
    return torch.where(endless, torch.inf, torch.expm1(d) - d)


def binary_divergence(
    logp: Tensor, anchor_logp: Tensor, kind: str, floor: float | None = None
) -> Tensor:
    """Divergence of two policies in the choice "this token or another". Detached.

    It is computed from the two probabilities of the token alone.
    With p₀ the anchor's probability of the token and p the other's: "tv" is `|p − p₀|`; "kl" is
    `KL(p₀‖p) = p₀·log(p₀/p) + (1−p₀)·log((1−p₀)/(1−p))`. floor: hold both probabilities in [floor,
    1 − floor], which keeps the logarithms finite; rounding can then leave the "kl" of two nearly
    equal probabilities a hair below 0. None adds 1e-8 to 1 − p₀ and 1 − p instead, which keeps the
    second logarithm finite at probability one.
    """
    logp = logp.detach()
    p, p0 = (
        x.exp() if floor is None else x.exp().clamp(floor, 1 - floor) for x in (logp, anchor_logp)
    )
    if kind == "tv":
        return (p - p0).abs()
    if floor is not None:
        return p0 * (p0 / p).log() + (1 - p0) * ((1 - p0) / (1 - p)).log()
    eps = 1e-8
    return p0 * (anchor_logp - logp) + (1 - p0) * torch.log((1 - p0 + eps) / (1 - p + eps))


def with_gradient(
    value: Tensor, d: Tensor, logp: Tensor, grad: str, weight: Tensor | None = None
) -> Tensor:
    """`value` with another gradient.

    grad: "value", its own; "k2", that of k2 (straight-through); "score", its own plus the score
    term.
    "score" multiplies by `exp(logp − sg logp)`, which is 1 and adds `value·∇logp`: together the
    gradient of the expectation, not only of the integrand (arXiv 2506.09477). weight: a factor on
    k2's gradient, token-shaped and not differentiated; with the ratio to the policy that sampled
    the token, k2's gradient is that of the KL off-policy too.
    """
    if grad == "value":
        return value
    if grad == "score":
        return value * (logp - logp.detach()).exp()
    pull = 0.5 * d**2 if weight is None else weight.detach() * (0.5 * d**2)
    return value.detach() + (pull - pull.detach())
