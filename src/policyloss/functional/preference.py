"""Scores of sequences, and losses of the margin between two scores, for preference losses.

Legend: `x` the log-probability or log-ratio of each sequence `[S]`, u = eˣ; `z` a scaled margin
`[P]`. Both carry the gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LARGEST_EXPONENT = 80.0  # e⁸⁰ fits into float32; an exponent beyond has no gradient


def power_score(x: Tensor, alpha: float) -> Tensor:
    """`(u^(α−1) − 1) / (α − 1)`, and its limit `x` for α = 1."""
    if alpha == 1:
        return x
    return torch.expm1(((alpha - 1) * x).clamp(max=LARGEST_EXPONENT)) / (alpha - 1)


def jensen_shannon_score(x: Tensor) -> Tensor:
    """`log(2u / (1 + u))`."""
    return math.log(2) + logsigmoid(x)


def log_odds(x: Tensor) -> Tensor:
    """`log(u / (1 − u))`, for x < 0."""
    return x - torch.log(-torch.expm1(x))


def logistic(z: Tensor, smoothing: float) -> Tensor:
    """`−(1 − ε)·log σ(z) − ε·log σ(−z)`, ε = smoothing."""
    loss = -logsigmoid(z)
    return loss if smoothing == 0 else (1 - smoothing) * loss - smoothing * logsigmoid(-z)


def reverse_kl(z: Tensor, smoothing: float) -> Tensor:
    """`KL(q‖p)` of q = (σ(z), σ(−z)) and p = (1 − ε, ε), ε = smoothing."""
    win = torch.sigmoid(z) * (logsigmoid(z) - math.log1p(-smoothing))
    return win + torch.sigmoid(-z) * (logsigmoid(-z) - math.log(smoothing))


def logistic_or_exponential(z: Tensor, tau: float) -> Tensor:
    """`−(1 − g)·log σ(z) + g·e⁻ᶻ`, g = σ(z/τ): exponential for large z, logistic for small."""
    gate = torch.sigmoid(z / tau)
    return gate * torch.exp((-z).clamp(max=LARGEST_EXPONENT)) - (1 - gate) * logsigmoid(z)


def matched_by_rank(a: Tensor, b: Tensor, valid: Tensor) -> Tensor:
    """`a` minus the entry of `b` that has the same rank; 0 where not `valid`. All `[P]`."""
    order = torch.where(valid, a, torch.inf).argsort(stable=True)
    rank = torch.empty_like(order).scatter(0, order, torch.arange(len(a), device=a.device))
    partner = torch.where(valid, b, torch.inf).sort().values[rank]
    return torch.where(valid, a - partner, 0)
