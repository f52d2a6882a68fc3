"""What OpenRLHF counts and reports beside its loss: shares, which are 0 if nothing was counted,
filtered tokens and rows, and a capped weight.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.functional.masking import accumulator_dtype
from policyloss.functional.stats import count
from policyloss.tokens import Tokens


def mean_or_zero(total: Tensor, n: Tensor) -> Tensor:
    """`total / n`, 0-dim, in a dtype that need not round it; 0 where nothing was counted."""
    wide = accumulator_dtype(total.device)
    return total.to(wide) / n.to(wide).clamp(min=1)


@torch.no_grad()
def rejected_share(part: Any, t: Tokens, per: Literal["token", "sequence"] = "token") -> Tensor:
    """The share that a correction rejects: of the valid tokens, or of this call's sequences. A
    sequence is rejected if it has no valid token left, also if it had none before. 0-dim, in a
    dtype that need not round it; 0 if nothing was counted.
    """
    keep = part(t).keep
    kept = t.mask if keep is None else t.mask & keep
    if per == "sequence":
        left = t.sequences.sum(kept.to(t.dtype)) > 0
        kept, of = left, torch.ones_like(left)
    else:
        of = t.mask
    return mean_or_zero(count(of & ~kept), count(of))


def capped_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """`min(exp(log_ratio), cap)` without gradient: the weight of an unbiased KL's gradient, bounded
    so that it cannot explode.
    """
    return log_ratio.detach().exp().clamp(max=cap)


def positions_in(attention_mask: Tensor) -> Tensor:
    """The position of each token in its row, counted from the row's first token; 1 at padding."""
    return (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)


def where_acted(logp: Tensor, action_mask: Tensor) -> Tensor:
    """The log-probabilities of the last tokens, as many as `action_mask` has, 0 where it is 0."""
    return logp[:, logp.shape[1] - action_mask.shape[1] :] * action_mask.float()
