"""How much a hypothesis leaves unexplained: a Student-t likelihood with a scale that is fitted, and
a penalty for every number that the hypothesis was free to choose.

A residual `e_t` has the density of Student's t with 4 degrees of freedom and the scale `σ·h_t`.
The shape `h_t` says where noise is large: an error in the logits moves the log-probability of a
token by about `1 - p` of it, so a likely token has little noise. Heavy tails keep a few wild tokens
from deciding. The score is `-2·log likelihood + k·log n`, as in the BIC; smaller is better.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

DEGREES = 4.0
ROUNDING = 2.0**-23  # no scale is smaller than float32 can tell apart
QUIET = 0.02  # the least shape: a token that is certain still has some noise
_CONSTANT = (
    math.lgamma((DEGREES + 1) / 2) - math.lgamma(DEGREES / 2) - 0.5 * math.log(DEGREES * math.pi)
)


class Misfit(NamedTuple):
    """What is left. scale: σ of the residual. score: the penalised criterion."""

    scale: float
    score: float


def noise_shape(logp: Tensor) -> Tensor:
    """`max(1 - p, 0.02)` of each token: where an error in the logits shows."""
    return (-torch.expm1(logp)).clamp(min=QUIET)


def misfit(residual: Tensor, shape: Tensor, freedom: int) -> Misfit:
    """The fitted scale and the score of residuals `[n]` under noise of this shape `[n]`.

    Tokens of which the hypothesis says nothing (NaN) count like the average of the others.
    """
    known = ~residual.isnan()
    n = residual.numel()
    x = (residual[known] / shape[known]).double()
    if x.numel() == 0:
        return Misfit(math.inf, math.inf)
    squares = x * x
    spread = shape[known].double().log().mean()
    scale, density = max(
        (_likelihood(squares, start) for start in (squares.median(), squares.mean())),
        key=lambda pair: pair[1],
    )
    score = -2 * n * (density - float(spread)) + (freedom + 1) * math.log(max(n, 2))
    return Misfit(scale, score)


def _likelihood(squares: Tensor, start: Tensor) -> tuple[float, float]:
    """The scale that expectation maximisation reaches from a variance, and its mean log-density.

    Where most residuals are exact and some are not, there are two such scales; the start decides.
    """
    variance = max(float(start), ROUNDING**2)
    for _ in range(30):
        weight = (DEGREES + 1) / (DEGREES + squares / variance)
        before, variance = variance, max(float((weight * squares).mean()), ROUNDING**2)
        if abs(variance - before) <= 1e-3 * before:
            break
    tails = torch.log1p(squares / (DEGREES * variance)).mean()
    return math.sqrt(variance), _CONSTANT - 0.5 * (
        (DEGREES + 1) * float(tails) + math.log(variance)
    )


def roughness(residual: Tensor, shape: Tensor) -> float:
    """A cheap stand-in for the scale, to search with: the mean root of the sizes."""
    return float((residual / shape).abs().sqrt().mean())
