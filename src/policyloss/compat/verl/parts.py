"""The library's parts with verl's numbers: batch-wide statistics of one call alone, and 1e-8 added
to a count.

Statistics of one call depend on how the batch is cut. `CovClip` and `CovKL` are the same losses
with statistics of the optimizer step; use those unless you must reproduce a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from policyloss.compat.verl.counts import masked_mean
from policyloss.functional import trust
from policyloss.parts.correction import Corrected
from policyloss.parts.precomputed import GivenWeight
from policyloss.parts.trust import CovClip, CovKL, GeometricClip, Surrogate
from policyloss.tokens import Tokens


@dataclass(frozen=True)
class OfThisCall:
    """A part that needs batch-wide statistics and gets those of this call alone."""

    part: CovClip | CovKL

    def __call__(self, t: Tokens) -> Surrogate:
        return self.part(replace(t, measured=None))


@dataclass(frozen=True)
class LocalCovClip:
    """Clip-Cov over one call. As in verl, torch's random generator draws the tokens to drop
    (`torch.randperm`).

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
    """GMPO with one advantage per sequence, the mean of its tokens':
    `-(Σ A / (L + epsilon))·ratio`, as verl computes it.

    Averaged over a sequence it is `GeometricClip`; where a sequence's advantages nearly cancel, its
    rounding is verl's.
    epsilon: also added to the length in the ratio's geometric mean.
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
    """The geometric mean over each sequence of a weight that the caller passes,
    `exp(Σ log(w + floor) / (L + epsilon))`.
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
        return self.part.penalised(t, chosen)
