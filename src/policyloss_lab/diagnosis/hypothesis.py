"""What a hypothesis is, and what fitting it to a batch returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.pairs import Pairs


@dataclass(frozen=True)
class Case:
    """What is known. scorer: the model with its sequences, if one was passed; its tokens are those
    of `pairs`, in the same order.
    """

    pairs: Pairs
    scorer: Scorer | None = None

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """The sides that may be the odd one, with the sign of its effect on the difference.

        With a model, the side that is much nearer to it is the sound one.
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

    def realigned(self, source: Tensor) -> Case:
        """The case with the engine's numbers at the tokens they belong to."""
        pairs = self.pairs.with_rollout_from(source)
        return Case(pairs, None if self.scorer is None else self.scorer.select(source >= 0))


@dataclass(frozen=True)
class Fit:
    """One hypothesis, fitted.

    prediction: `rollout_logp - old_logp` of each token, NaN where it says nothing; None is 0.
    shape: where it expects noise; None is `1 - p`. source: for a hypothesis about order, the index
    of the engine's number that belongs to each token (−1: none). freedom: how many numbers were
    chosen. share: the field of `Thresholds` that says how much of the scale it may leave. details:
    those numbers, by name. sentence: what it says.
    """

    cause: str
    sentence: str
    prediction: Tensor | None = None
    shape: Tensor | None = None
    source: Tensor | None = None
    freedom: int = 0
    share: str = "explains"
    details: Mapping[str, Any] = field(default_factory=dict)


class Hypothesis(Protocol):
    """A family of explanations that one method fits."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Its best members; none if the case holds nothing that it could be fitted to."""
