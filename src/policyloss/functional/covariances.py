"""Covariances of advantage and log-probability over a whole step.

Numbers that are equal up to rounding are equal. A mean is rounded, and differently for every layout
of the same batch. Where all advantages are equal, their distances from their mean are that rounding
and nothing else, and an order by them would be an order by chance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import accumulator_dtype
from policyloss.functional.trust import covariance

# How many roundings a mean may be off by: some of its sum, and one of each number in it.
ROUNDINGS = 16


def step_means(advantages: Tensor, logp: Tensor, mask: Tensor, *groups: Any) -> dict[str, Tensor]:
    """The number of valid tokens, and the mean and rounding of advantages and logp. All 0-dim.

    They are taken over the ranks of every group. A rounding is how far two equal numbers may lie
    apart once a mean was subtracted: some units in the last place of the mean size. Both tensors
    must be 0 where masked.
    """
    wide = accumulator_dtype(mask.device)
    terms = (mask, advantages, logp, advantages.abs(), logp.abs())
    tokens, *sums = arithmetic().totals_over(groups, *terms, dtype=wide)
    means = (torch.stack(sums) / tokens.clamp(min=1)).to(logp.dtype)
    roundings = means[2:] * (ROUNDINGS * torch.finfo(logp.dtype).eps)
    return {
        "tokens": tokens,
        "advantage_mean": means[0],
        "logp_mean": means[1],
        "advantage_rounding": roundings[0],
        "logp_rounding": roundings[1],
    }


def step_covariance(advantages: Tensor, logp: Tensor, means: dict[str, Tensor]) -> Tensor:
    """Each token's `covariance`, detached; exactly 0 for a number that equals its mean."""
    cov = covariance(logp, advantages, means["logp_mean"], means["advantage_mean"])
    at_mean = (advantages - means["advantage_mean"]).abs() <= means["advantage_rounding"]
    at_mean = at_mean | ((logp.detach() - means["logp_mean"]).abs() <= means["logp_rounding"])
    return torch.where(at_mean & ~cov.isnan(), 0, cov)
