"""The interface of a hypothesis: it takes a `Case` and yields each `Fit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.pairs import Pairs


@dataclass(frozen=True)
class Case:
    """The input of a diagnosis. scorer: the model with the sequences of `pairs`, token by token in
    the same order, if a model was passed.
    """

    pairs: Pairs
    scorer: Scorer | None = None

    @property
    def sides(self) -> tuple[tuple[str, int], ...]:
        """The sides that may be wrong, each with the sign of its effect on the difference.

        With a model, the side that is much nearer to it is right.
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
        """A fit of each side that may be wrong. sentence: with "{side}" in it. effect: the change
        of that side's log-probabilities.
        """
        for side, sign in self.sides:
            numbers = {**(details or {}), "side": side}
            yield Fit(cause, sentence.format(side=side), sign * effect, details=numbers, **options)

    def realigned(self, source: Tensor) -> Case:
        """The case with each number of the engine moved to its token."""
        pairs = self.pairs.with_rollout_from(source)
        return Case(pairs, None if self.scorer is None else self.scorer.select(source >= 0))


@dataclass(frozen=True)
class Fit:
    """A fitted hypothesis.

    cause: a name of `CAUSES`, or two joined by "+". sentence: the hypothesis in words. prediction:
    `rollout_logp - old_logp` of each token, NaN if unknown; None is 0. shape: the relative size of
    noise at each token; None is `1 - p`. source: for a hypothesis about order, the index of the
    engine's number that belongs to each token (−1: none). freedom: the number of fitted numbers.
    share: the field of `Thresholds` that limits the share of the scale it leaves. details: the
    fitted numbers by name.
    """

    cause: str
    sentence: str
    prediction: Tensor | None = None
    shape: Tensor | None = None
    source: Tensor | None = None
    freedom: int = 0
    share: str = "explains"
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def masks_edges(self) -> bool:
        """Whether it removes tokens at the edges of rows, at their scale of noise."""
        return self.shape is not None and self.source is not None

    @property
    def is_law(self) -> bool:
        """Whether it predicts where differences are large."""
        return self.shape is not None and self.source is None


class Hypothesis(Protocol):
    """A family of explanations with one fitting method."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Yield its best members; none if the case lacks the tensors that it needs."""
