"""The two losses of docs/custom.md: a callable in a slot,
and a whole loss from `policyloss.functional`.
"""

import torch
from torch import Tensor

import policyloss as pl
from policyloss import functional as F


def half_clip(t: pl.Tokens) -> Tensor:
    """PPO's clip where the advantage is positive, nothing where it is negative."""
    free = -t.advantages * t.ratio
    return torch.where(t.advantages > 0, torch.maximum(free, -t.advantages * 1.2), free)


def my_loss(logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    sequences = F.Sequences.of(logp)
    lengths = sequences.sum(mask.float())
    log_ratio = F.difference(logp, old_logp, mask, torch.float32)
    ratio = F.bounded_exp(log_ratio, 20.0)
    loss = F.clipped(ratio, F.fill(advantages, mask), 0.2, 0.28, dual=3.0)
    weight = F.per_sequence_mean(lengths, sequences) / (lengths > 0).sum().clamp(min=1)
    return F.weighted_sum(F.fill(loss, mask), weight)


if __name__ == "__main__":
    print(pl.check_loss(half_clip))
