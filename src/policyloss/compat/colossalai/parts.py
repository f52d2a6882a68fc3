"""ColossalChat's numbers: a KL term that the caller computes, a mean over samples, and the mean and
maximum of the ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policyloss.compat.parts import seq_mean_token_mean
from policyloss.inputs import Inputs
from policyloss.parts.aggregate import SeqMeanTokenMean
from policyloss.tokens import Tokens

EPSILON = 1e-8  # added to the number of a sample's tokens, and to the tokens of the step


@dataclass(frozen=True, eq=False)
class GivenKL:
    """`beta` times a token-shaped penalty, which may carry a gradient."""

    kl: Tensor
    beta: float

    def __call__(self, t: Tokens) -> Tensor:
        return self.beta * self.kl.to(t.dtype)


def sample_mean(mask: Tensor | None) -> SeqMeanTokenMean:
    """The mean over samples of their token means. ColossalChat adds epsilon to a count in the
    mask's precision, where only float64 changes by it.
    """
    return seq_mean_token_mean(EPSILON if mask is not None and mask.dtype == torch.float64 else 0.0)


def ratio_mean_and_max(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and maximum of the ratio over all positions; a masked one has ratio 1."""
    tokens = Inputs(
        logp=log_probs.detach(), advantages=advantages, mask=mask, old_logp=old_log_probs
    ).tokens()
    ratio = tokens.log_ratio_to("old").exp()
    return ratio.mean(), ratio.max()
