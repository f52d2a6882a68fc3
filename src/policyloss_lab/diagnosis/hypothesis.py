"""A hypothesis takes a `Case` and yields a `Fit`; `misfit` measures the differences it leaves.

The measure is a Student-t likelihood with a fitted scale, and a penalty for every fitted number. A
residual `e_t` has the density of Student's t with 4 degrees of freedom and the scale `σ·h_t`. The
shape `h_t` is the relative size of noise: an error in the logits changes the log-probability of a
token by about `1 - p` times the error, so a likely token has little noise. Because of the heavy
tails, a few wild tokens do not decide the fit. The score is `-2·log likelihood + k·log n`, as in
the BIC; smaller is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.pairs import Pairs


@dataclass(frozen=True)
class Case:
    """The input of a diagnosis. scorer: the model with the tokens of `pairs`, in their order."""

    pairs: Pairs
    scorer: Scorer | None = None

    @cached_property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """The sides that may be wrong, each with the sign of its effect on the difference.

        With a model, a side that is much nearer to the model than the other side is right.
        """
        both = (("rollout_logp", 1), ("old_logp", -1))
        if self.scorer is None:
            return both
        gaps = [
            float((x - self.scorer.logp).abs().mean())
            for x in (self.pairs.rollout, self.pairs.trainer)
        ]
        if gaps[1] < 0.5 * gaps[0]:
            return both[:1]
        return both[1:] if gaps[0] < 0.5 * gaps[1] else both

    def fit_sides(
        self, cause: str, sentence: str, effect: Tensor, details: Any = None, **options: Any
    ) -> Iterator[Fit]:
        """A fit of each side that may be wrong. sentence: contains "{side}" for the name of the
        side. effect: the change of that side's log-probabilities.
        """
        for side, sign in self.sides:
            numbers = {**(details or {}), "side": side}
            yield Fit(cause, sentence.format(side=side), sign * effect, details=numbers, **options)

    @cached_property
    def first(self) -> Misfit:
        """The misfit without a hypothesis."""
        return self.misfit(Fit("healthy", ""))

    def misfit(self, fit: Fit) -> Misfit:
        """The scale of the residuals of a fit as noise of shape `1 - p`, and the better score of
        that noise and of noise that is the same everywhere.
        """
        residual = fit.residual(self.pairs)
        noise = misfit(residual, self.pairs.shape, fit.freedom)
        flat = misfit(residual, torch.ones_like(residual), fit.freedom)
        return Misfit(noise.scale, min(noise.score, flat.score))

    def realigned(self, source: Tensor) -> Case:
        """The case with each number of the engine moved to its token."""
        moved = replace(self.pairs, rollout=self.pairs.rollout[source.clamp(min=0)])
        return Case(moved, self.scorer).select(source >= 0)

    def select(self, chosen: Tensor) -> Case:
        """Some of the tokens, by flag."""
        scorer = None if self.scorer is None else self.scorer.select(chosen)
        return Case(self.pairs.select(chosen), scorer)


@dataclass(frozen=True)
class Fit:
    """A fitted hypothesis.

    cause: a name of `CAUSES`, or two joined by "+". sentence: the hypothesis in words. prediction:
    `rollout_logp - old_logp` of each token, NaN where the hypothesis excludes the token without a
    prediction; None means 0. source: for a hypothesis about order, the index of the
    engine's log-probability that belongs to each token, −1 if there is no such number. freedom: the
    number of fitted parameters. share: the field of `Thresholds` that holds the largest share of
    the difference that the fit may leave unexplained. details: the fitted numbers by name.
    """

    cause: str
    sentence: str
    prediction: Tensor | None = None
    source: Tensor | None = None
    freedom: int = 0
    share: str = "explains"
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def masks(self) -> bool:
        """Whether the fit only claims that some tokens do not count."""
        return self.prediction is not None and bool(self.prediction.isnan().any())

    def residual(self, pairs: Pairs) -> Tensor:
        """The differences that the fit does not predict; NaN for tokens that do not count."""
        if self.source is not None:
            rollout = pairs.rollout[self.source.clamp(min=0)]
            return torch.where(self.source >= 0, rollout - pairs.trainer, torch.nan)
        return pairs.difference - (0 if self.prediction is None else self.prediction)


# Takes a case, and its scorer if the hypothesis needs a model; yields the best fits.
Hypothesis = Callable[..., Iterator[Fit]]

DEGREES = 4.0
ROUNDING = 2.0**-23  # the smallest scale: float32 cannot resolve a smaller one
_CONSTANT = (
    math.lgamma((DEGREES + 1) / 2) - math.lgamma(DEGREES / 2) - 0.5 * math.log(DEGREES * math.pi)
)


class Misfit(NamedTuple):
    """The size of the residuals. scale: their σ. score: the penalised criterion."""

    scale: float
    score: float


def misfit(residual: Tensor, shape: Tensor, freedom: int) -> Misfit:
    """The fitted scale and the score of residuals `[n]` under noise of this shape `[n]`.

    Tokens without a prediction (NaN) count like the average of the others.
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
    """The scale that expectation maximisation reaches from the variance `start`, and the mean
    log-density at that scale.

    If most residuals are exact and some are not, there are two such scales; the start decides.
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
