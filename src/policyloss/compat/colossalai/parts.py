"""ColossalChat's KL term, which the caller computes, one number per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from policyloss.tokens import Tokens


@dataclass(frozen=True, eq=False)
class GivenKL:
    """`beta` times a token-shaped penalty. If the penalty carries a gradient, it is kept."""

    kl: Tensor
    beta: float

    def __call__(self, t: Tokens) -> Tensor:
        return self.beta * self.kl.to(t.dtype)
