"""A user's script, as type checkers see it: `make lint` runs `mypy --strict` on it,
and nothing here needs a cast.

The tests do not run it; other tests cover the functions that it calls.
"""

from __future__ import annotations

import torch
from torch import Tensor

import policyloss as pl


def tapered(t: pl.Tokens) -> Tensor:
    """A loss of one's own in the trust slot."""
    return -t.advantages * t.ratio.clamp(max=2.0)


def step(
    hidden: Tensor, head: torch.nn.Linear, ids: Tensor, advantages: Tensor, mask: Tensor
) -> float:
    """Log-probabilities of either kind, a spec changed in every way,
    and the loss with its metrics.
    """
    old_logp: Tensor = pl.linear_logprobs(hidden, head.weight, ids, mask=mask).logp
    both: pl.LogProbs = pl.logprobs(head(hidden), ids, entropy=True, mask=mask)
    spec = pl.preset("dapo", eps_high=0.3).replace(
        correction=pl.Truncate(2.0), kl=None, entropy_coef=0.01
    )
    spec = spec.replace(trust=tapered).replace(trust=pl.Clip(0.2))
    out = pl.policy_loss(
        spec, both.logp, old_logp, advantages, mask, rollout_logp=old_logp, entropy=both.entropy
    )
    named = pl.policy_loss("gspo", both.logp, old_logp, advantages, mask)
    fused = pl.linear_policy_loss(
        "grpo", hidden, head.weight, ids, old_logp, advantages, mask, ref_logp=old_logp
    )
    metrics: dict[str, float] = (out.metrics + named.metrics).compute()
    total: Tensor = out.loss + fused.loss
    return metrics["loss"] + float(total)
