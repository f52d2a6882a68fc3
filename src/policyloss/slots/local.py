"""Trust regions whose batch-wide numbers are those of one call, as frameworks compute them. They depend on how the batch is cut.

`CovClip` and `CovKL` are the same losses with numbers of the whole step; use those unless you must reproduce a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from policyloss.functional import trust
from policyloss.functional.stats import masked_mean
from policyloss.slots.trust import CovClip, CovKL, Surrogate
from policyloss.tokens import Tokens


@dataclass(frozen=True)
class OfThisCall:
    """A part that needs batch-wide numbers, given those of this call alone."""

    part: CovClip | CovKL

    def __call__(self, t: Tokens) -> Surrogate:
        return self.part(replace(t, known=None))


@dataclass(frozen=True)
class LocalCovClip:
    """Clip-Cov over one call, the tokens to drop drawn with torch's own random generator (`torch.randperm`), as verl draws them.

    epsilon: added to the number of tokens in the two means (verl: 1e-8).
    """

    part: CovClip
    epsilon: float = 0.0

    def __call__(self, t: Tokens) -> Surrogate:
        clip = self.part
        means = {
            "advantage_mean": masked_mean(t.advantages, t.mask, self.epsilon),
            "logp_mean": masked_mean(t.logp.detach(), t.mask, self.epsilon),
        }
        places = clip.candidates(t, means).nonzero()
        k = max(int(clip.fraction * int(t.mask.sum())), 1)
        dropped = torch.zeros_like(t.mask)
        if len(places) > 0:  # the generator advances only when there is something to draw
            chosen = places[torch.randperm(len(places)).to(places.device)[:k]]
            dropped[tuple(chosen.unbind(1))] = True
        s = clip.surrogate(t)
        return s._replace(loss=torch.where(dropped, 0, s.loss), dropped=dropped)


@dataclass(frozen=True)
class LocalCovKL:
    """KL-Cov over one call, exactly k tokens, ties broken as `torch.topk` breaks them."""

    part: CovKL

    def __call__(self, t: Tokens) -> Surrogate:
        a, logp = t.advantages[t.mask], t.logp.detach()[t.mask]
        chosen = torch.zeros_like(t.mask)
        if len(a) > 0:
            k = max(1, int(len(a) * self.part.fraction))
            top = trust.covariance(logp, a, logp.mean(), a.mean()).topk(k).indices
            chosen[tuple(t.mask.nonzero()[top].unbind(1))] = True
        return self.part.penalised(t, chosen)
