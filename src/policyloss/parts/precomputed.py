"""A part that holds a tensor of the caller's: a weight per token, for the correction slot.

It is a callable, not data: a spec that holds one belongs to one batch and cannot be written as
JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from policyloss.parts.correction import Corrected
from policyloss.tokens import Tokens


@dataclass(frozen=True, eq=False)
class GivenWeight:
    """A correction that multiplies the policy term by this weight, token-shaped and detached."""

    weighs: ClassVar[bool] = True
    weight: Tensor

    def __call__(self, t: Tokens) -> Corrected:
        return Corrected(self.weight.detach().to(t.dtype))
