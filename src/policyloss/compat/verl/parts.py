"""verl's variants of the library's parts, with statistics of one call and 1e-8 added to a count,
and the means and shares of its report.

Statistics of one call depend on how the batch is split. `CovClip` and `CovKL` are the same losses
with statistics of the optimizer step; use them unless you must reproduce a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policyloss.functional import trust
from policyloss.functional.masking import accumulator_dtype, outside_clamp
from policyloss.parts.correction import Corrected, GivenWeight
from policyloss.parts.trust import CovClip, CovKL, GeometricClip, Surrogate
from policyloss.tokens import Tokens


def masked_mean(x: Tensor, mask: Tensor, epsilon: float = 0.0) -> Tensor:
    """`Σ x / (n + epsilon)` over the n valid tokens, 0-dim.

    It has the dtype of x; for flags, the dtype of the accumulator.
    """
    x = x.to(accumulator_dtype(x.device)) if x.dtype == torch.bool else x
    return torch.where(mask, x, 0).sum() / (mask.sum().to(x.dtype) + epsilon)


def outside_by_sign(
    log_ratio: Tensor,
    eps_low: float,
    eps_high: float,
    advantages: Tensor,
    mask: Tensor,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The shares of valid tokens outside [-eps_low, eps_high] with A > 0, and with A < 0.

    epsilon: as in `masked_mean`.
    """
    outside = outside_clamp(log_ratio, (-eps_low, eps_high))
    positive, negative = outside & (advantages > 0), outside & (advantages < 0)
    return masked_mean(positive, mask, epsilon), masked_mean(negative, mask, epsilon)


def share_of_gradient(x: Tensor, ranks: int) -> Tensor:
    """`x`, with its gradient divided by the number of ranks.

    Each rank computes the complete gradient, and verl adds up the gradients of all ranks.
    """
    share = x.view_as(x)
    if share.requires_grad:
        share.register_hook(lambda grad: grad / ranks)  # type: ignore[no-untyped-call]
    return share


@dataclass(frozen=True)
class OfThisCall:
    """A part that needs statistics of the step, computed with statistics of this call instead."""

    part: CovClip | CovKL

    def __call__(self, t: Tokens) -> Surrogate:
        return self.part(replace(t, measured=None))


@dataclass(frozen=True)
class LocalCovClip:
    """Clip-Cov over one call; `torch.randperm` draws the tokens to drop, as in verl.

    epsilon: added to the number of tokens in the two means (verl: 1e-8).
    """

    part: CovClip
    epsilon: float = 0.0

    def __call__(self, t: Tokens) -> Surrogate:
        clip = self.part
        means = (masked_mean(x, t.mask, self.epsilon) for x in (t.logp.detach(), t.advantages))
        places = clip.candidates(t, trust.covariance(t.logp, t.advantages, *means)).nonzero()
        k = max(int(clip.fraction * int(t.mask.sum())), 1)
        dropped = torch.zeros_like(t.mask)
        if len(places) > 0:  # the generator advances only when there is something to draw
            chosen = places[torch.randperm(len(places)).to(places.device)[:k]]
            dropped[tuple(chosen.unbind(1))] = True
        s = clip.surrogate(t)
        return s._replace(loss=torch.where(dropped, 0, s.loss), dropped=dropped)


@dataclass(frozen=True)
class MeanAdvantageGeometricClip:
    """GMPO with the mean advantage of each sequence: `-(Σ A / (L + epsilon))·ratio`, as in verl.
    epsilon is also added to the length in the geometric mean of the ratio. Averaged over a sequence
    it is `GeometricClip`, with verl's rounding where its advantages nearly cancel.
    """

    part: GeometricClip
    epsilon: float

    def __call__(self, t: Tokens) -> Surrogate:
        clip, lengths = self.part, t.lengths + self.epsilon
        clipped = trust.geometric_log_ratio(t.log_ratio, t.advantages, clip.eps_low, clip.eps_high)
        ratio = (t.sequences.sum(clipped) / lengths).exp()
        mean = t.sequences.sum(t.advantages) / lengths
        return Surrogate(-t.sequences.expand(mean) * t.sequences.expand(ratio))


@dataclass(frozen=True, eq=False)
class GeometricMeanWeight(GivenWeight):
    """The geometric mean over each sequence of the weight w that the caller passes.

    It is `exp(Σ log(w + floor) / (L + epsilon))`.
    """

    floor: float
    epsilon: float

    def __call__(self, t: Tokens) -> Corrected:
        logs = torch.where(t.mask, (self.weight.detach().to(t.dtype) + self.floor).log(), 0)
        return Corrected(
            t.sequences.expand((t.sequences.sum(logs) / (t.lengths + self.epsilon)).exp())
        )


@dataclass(frozen=True)
class LocalCovKL:
    """KL-Cov over one call: it chooses exactly k tokens and breaks ties as `torch.topk` does."""

    part: CovKL

    def __call__(self, t: Tokens) -> Surrogate:
        a, logp = t.advantages[t.mask], t.logp.detach()[t.mask]
        chosen = torch.zeros_like(t.mask)
        if len(a) > 0:
            k = max(1, int(len(a) * self.part.fraction))
            top = trust.covariance(logp, a, logp.mean(), a.mean()).topk(k).indices
            chosen[tuple(t.mask.nonzero()[top].unbind(1))] = True
        return self.part.penalise(t, chosen)
