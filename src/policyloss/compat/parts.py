"""Parts that several frameworks' drop-ins share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policyloss.parts import validate
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.parts.data import framework_part
from policyloss.parts.wording import number
from policyloss.tokens import Layout


@framework_part("aggregate", "parts")
@dataclass(frozen=True)
class GuardedSeqMeanTokenMean(SeqMeanTokenMean):
    """`SeqMeanTokenMean` with `epsilon` added to every length: `1 / (B·(L_i + epsilon))`, as verl
    and OpenRLHF divide.
    """

    epsilon: float

    def __post_init__(self) -> None:
        validate.number(self, "epsilon", above=0, finite=True)

    def __call__(self, t: Layout) -> Tensor:
        return super().__call__(t.with_lengths(t.lengths + self.epsilon))

    def averaged(self, x: str) -> str:
        """The mean of the per-token expression `x`, as `explain` prints it."""
        return f"sum({x} / (L + {number(self.epsilon)})) / B"


def seq_mean_token_mean(epsilon: float) -> SeqMeanTokenMean:
    """The mean over sequences of their token means, guarded unless `epsilon` is 0."""
    return GuardedSeqMeanTokenMean(epsilon) if epsilon else SeqMeanTokenMean()
