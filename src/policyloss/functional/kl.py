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
    k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ − 1 − d. A KL penalty has p = the current policy
    and q = the one that it is compared with; a rollout correction has p = rollout and q = old.
    as_written: evaluate k3 in the order of this text, as frameworks do; near d = 0 only the
    rounding error of eᵈ is then left. None computes k3 in full precision.
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
    """Divergence between two policies' choices of "this token or another". Detached.

    p = exp(logp) and p₀ = exp(anchor_logp) are the token's probabilities under the two policies.
    kind: "tv" is `|p − p₀|`; "kl" is `KL(p₀‖p) = p₀·log(p₀/p) + (1−p₀)·log((1−p₀)/(1−p))`. floor:
    clamp p and p₀ to [floor, 1 − floor], which keeps the logarithms finite; rounding can then make
    the "kl" of nearly equal p and p₀ slightly negative. None adds 1e-8 to 1 − p₀ and 1 − p instead,
    which keeps the second logarithm finite at probability one.
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
    """`value`, a KL estimate from d = anchor_logp − logp, with the gradient that `grad` selects.

    "value" keeps its own gradient. "k2" replaces it by that of ½d² (straight-through). "score"
    multiplies by `exp(logp − sg[logp])`, where sg stops the gradient: the factor is 1 and adds
    `value·∇logp`, so the gradient is that of the expectation, not only of the integrand (arXiv
    2506.09477). weight: a factor on k2's gradient, detached, `[B, T]` or `[N]`; if it is the ratio
    to the policy that sampled the token, k2's gradient is that of the KL off-policy too.
    """
    if grad == "value":
        return value
    if grad == "score":
        return value * (logp - logp.detach()).exp()
    pull = 0.5 * d**2 if weight is None else weight.detach() * (0.5 * d**2)
    return value.detach() + (pull - pull.detach())
