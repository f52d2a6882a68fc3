"""Rollout corrections: the inference engine's log-probabilities are not the trainer's. Pure functions, all detached.

Legend: `log_weight` = old_logp − rollout_logp, token-shaped, 0 at masked positions; a weight is `exp` of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from policyloss.functional.kl import k3
from policyloss.functional.masking import bound
from policyloss.functional.segments import Sequences


def at_level(log_weight: Tensor, level: str, lengths: Tensor, sequences: Sequences, epsilon: float = 0.0) -> Tensor:
    """The log-weight at a level: "token" as it is; "geomean" the sequence's mean; "product" the sequence's sum.

    epsilon is added to the sequence's length before dividing by it.
    """
    if level == "token":
        return log_weight
    total = sequences.sum(log_weight)
    return sequences.expand(total / _divisor(lengths, epsilon) if level == "geomean" else total)


def _divisor(lengths: Tensor, epsilon: float) -> Tensor:
    return lengths + epsilon if epsilon else lengths.clamp(min=1)


def importance_weight(log_weight: Tensor, log_clamp: float | None) -> Tensor:
    """`exp(clamp(log_weight))`: finite whatever the engine reported."""
    return bound(log_weight, log_clamp).exp()


def geometric_mean_weight(
    weight: Tensor, mask: Tensor, lengths: Tensor, sequences: Sequences, floor: float = 0.0, epsilon: float = 0.0
) -> Tensor:
    """`exp(Σ log(w + floor) / (L + epsilon))` over each sequence's valid tokens, given back to every token."""
    total = sequences.sum(torch.where(mask, (weight + floor).log(), 0))
    return sequences.expand((total / _divisor(lengths, epsilon)).exp())


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


def divergence(log_weight: Tensor, estimator: str, *, as_written: bool = False) -> Tensor:
    """Per-token estimate of KL(rollout‖old) from a rollout token: k1 = −d, k2 = ½d², k3 = eᵈ − 1 − d, with d the log-weight.

    as_written: compute k3 term by term as verl does, which near d = 0 leaves only the rounding of eᵈ; else to full precision.
    """
    if estimator == "k1":
        return -log_weight
    if estimator == "k2":
        return 0.5 * log_weight**2
    return log_weight.exp() - 1 - log_weight if as_written else k3(log_weight)


def choice_divergence(rollout_logp: Tensor, old_logp: Tensor, divergence: str, floor: float) -> Tensor:
    """Divergence from rollout p to old q of the choice "this token or another", per token and from its probability alone.

    "tv": `|p − q|`; "kl": `p·log(p/q) + (1−p)·log((1−p)/(1−q))`. Probabilities are held in [floor, 1 − floor] first, so that the
    logarithms are finite. Rounding can leave a "kl" of two nearly equal probabilities a hair below 0.
    """
    p, q = (logp.exp().clamp(floor, 1 - floor) for logp in (rollout_logp, old_logp))
    if divergence == "tv":
        return (p - q).abs()
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def reduced(x: Tensor, reduce: str, mask: Tensor, lengths: Tensor, sequences: Sequences, epsilon: float = 0.0) -> Tensor:
    """`x` per token, or its sum, mean or maximum over each sequence's valid tokens, given back to every token.

    epsilon is added to the sequence's length before dividing by it.
    """
    if reduce == "token":
        return x
    if reduce == "max":
        return sequences.expand(sequences.max(torch.where(mask, x, float("-inf"))))
    total = sequences.sum(x)
    return sequences.expand(total / _divisor(lengths, epsilon) if reduce == "mean" else total)


def any_in_sequence(hit: Tensor, sequences: Sequences) -> Tensor:
    """True at every token of a sequence in which `hit` is True anywhere."""
    return sequences.expand(sequences.sum(hit)) > 0
