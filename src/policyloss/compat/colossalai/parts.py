"""What ColossalChat's losses are made of: a KL term that the caller computes, its mean over
samples, and its largest ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policyloss.compat.parts import seq_mean_token_mean
from policyloss.inputs import Inputs
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.tokens import Tokens
from policyloss.totals import Totals

EPSILON = 1e-8  # added to the number of a sample's tokens, and to the tokens of the step


@dataclass(frozen=True, eq=False)
class GivenKL:
    """`beta` times a token-shaped penalty. If the penalty carries a gradient, it is kept."""

    kl: Tensor
    beta: float

    def __call__(self, t: Tokens) -> Tensor:
        return self.beta * self.kl.to(t.dtype)


def all_rows(tokens: Tensor) -> Totals:
    """Counts of a mean over the rows of `tokens`, of which empty ones count like any other."""
    return Totals(tokens.shape[0], tokens.shape[0])


def sample_mean(mask: Tensor | None) -> SeqMeanTokenMean:
    """The mean over a sample's tokens, which ColossalChat guards if there is a mask."""
    # ColossalChat adds it to a count in the mask's precision, and only float64 keeps it.
    return seq_mean_token_mean(EPSILON if mask is not None and mask.dtype == torch.float64 else 0.0)


def everything(like: Tensor) -> Tensor:
    """A mask that leaves nothing out."""
    return torch.ones_like(like, dtype=torch.bool)


def ratio_mean_and_max(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and maximum of the ratio over every position; a masked one has ratio 1."""
    tokens = Inputs(
        logp=log_probs.detach(), advantages=advantages, mask=mask, old_logp=old_log_probs
    ).tokens()
    ratio = tokens.log_ratio_to("old").exp()
    return ratio.mean(), ratio.max()
