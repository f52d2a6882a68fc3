"""Parts that hold a tensor the caller has made: a weight or a penalty per token, where a slot would compute one.

They are callables, not data: a spec that holds one belongs to one batch and cannot be written as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from policyloss.functional.correction import geometric_mean_weight
from policyloss.slots.correction import Corrected
from policyloss.tokens import Tokens


@dataclass(frozen=True, eq=False)
class GivenWeight:
    """A correction: the policy term is multiplied by this weight, token-shaped, gradient stopped.

    level="geomean": by the geometric mean of the weight over each sequence, `exp(Σ log(w + floor) / (L + epsilon))`.
    """

    weighs: ClassVar[bool] = True
    weight: Tensor
    level: Literal["token", "geomean"] = "token"
    floor: float = 0.0
    epsilon: float = 0.0

    def __call__(self, t: Tokens) -> Corrected:
        weight = self.weight.detach().to(t.dtype)
        if self.level == "geomean":
            weight = geometric_mean_weight(weight, t.mask, t.lengths, t.sequences, self.floor, self.epsilon)
        return Corrected(weight)


@dataclass(frozen=True, eq=False)
class GivenKL:
    """A KL part: `coef` times this penalty, token-shaped. Its own gradient, if it has one, is kept."""

    kl: Tensor
    coef: float

    def __call__(self, t: Tokens) -> Tensor:
        return self.kl.to(t.dtype)
