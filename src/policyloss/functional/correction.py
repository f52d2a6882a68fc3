"""Rollout corrections: the inference engine's log-probabilities are not the trainer's. Pure functions, all detached.

Legend: `log_weight` = old_logp − rollout_logp, token-shaped, 0 at masked positions; a weight is `exp` of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.kl import k3
from policyloss.functional.masking import bound
from policyloss.functional.segments import Sequences


def at_level(log_weight: Tensor, level: str, lengths: Tensor, sequences: Sequences) -> Tensor:
    """The log-weight at a level: "token" as it is; "geomean" the sequence's mean; "product" the sequence's sum."""
    if level == "token":
        return log_weight
    total = sequences.sum(log_weight)
    return sequences.expand(total / lengths.clamp(min=1) if level == "geomean" else total)


def importance_weight(log_weight: Tensor, log_clamp: float | None) -> Tensor:
    """`exp(clamp(log_weight))`: finite whatever the engine reported."""
    return bound(log_weight, log_clamp).exp()


def within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """Where low ≤ x ≤ high (bool); None does not bind. NaN counts as within, so that it is not dropped unseen."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        keep = keep & ~(x < low)
    if high is not None:
        keep = keep & ~(x > high)
    return keep


def nan_where_undecided(x: Tensor) -> Tensor:
    """The weight of a test on `x`: 1, but NaN where `x` is NaN, because such a token can be neither kept nor dropped."""
    return torch.where(x.isnan(), x, 1)


def divergence(log_weight: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(rollout‖old) from a rollout token: k1 = −d, k2 = ½d², k3 = eᵈ − 1 − d, with d the log-weight."""
    if estimator == "k1":
        return -log_weight
    if estimator == "k2":
        return 0.5 * log_weight**2
    return k3(log_weight)


def reduced(x: Tensor, reduce: str, mask: Tensor, lengths: Tensor, sequences: Sequences) -> Tensor:
    """`x` per token, or its sum, mean or maximum over each sequence's valid tokens, given back to every token."""
    if reduce == "token":
        return x
    if reduce == "max":
        return sequences.expand(sequences.max(torch.where(mask, x, float("-inf"))))
    total = sequences.sum(x)
    return sequences.expand(total / lengths.clamp(min=1) if reduce == "mean" else total)


def any_in_sequence(hit: Tensor, sequences: Sequences) -> Tensor:
    """True at every token of a sequence in which `hit` is True anywhere."""
    return sequences.expand(sequences.sum(hit.to(torch.float32))) > 0
