"""Data about sampled completions: the most informative groups (`choose_groups`), and the branch of
the loss that each token took (`token_branches`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.inputs import Inputs
from policyloss.loss import corrected_tokens, with_ratio
from policyloss.parts.trust import Surrogate

# The branches that `token_branches` numbers: a short name, and a sentence for a reader who does not
# know the loss.
BRANCHES = {
    "plain": (
        "plain",
        "Nothing limits this token: the loss is the trust region's formula between its bounds.",
    ),
    "no_advantage": (
        "no advantage",
        "The advantage is 0, so the policy term neither raises nor lowers this token.",
    ),
    "upper": (
        "at the upper bound",
        "The ratio is above the upper bound of the trust region, which limits this token.",
    ),
    "lower": (
        "at the lower bound",
        "The ratio is below the lower bound of the trust region, which limits this token.",
    ),
    "dual": (
        "dual clip",
        "The advantage is negative and the ratio is beyond the largest weight that the loss "
        "allows, so the loss stops there.",
    ),
    "dropped": ("dropped", "The trust region chose this token among others and dropped it."),
    "rejected": (
        "rejected",
        "The rollout correction rejected this token: the policies that sampled and trained it "
        "disagree too much, or the token is too old.",
    ),
    "masked": ("masked", "This token is not trained on."),
}
CODES = {name: code for code, name in enumerate(BRANCHES)}


@torch.no_grad()
def token_branches(
    spec: AnyLoss, logp: Tensor, old_logp: Any, advantages: Tensor, mask: Tensor, **rest: Any
) -> Tensor:
    """Which branch of the loss each token takes, token-shaped int64: its index in `BRANCHES`.

    Arguments as in `policy_loss`, of a whole step if the loss has batch-wide statistics. The KL and
    entropy terms have no branches, so their tensors may be left out. If several branches
    fit, the last of them in `BRANCHES` counts.
    """
    spec = as_spec(spec)
    before = Inputs.of(logp, old_logp, advantages, mask, rest).tokens()
    t, corrected = corrected_tokens(spec, before, None)
    t = with_ratio(spec, t)
    surrogate = spec.trust(t.with_totals(None))
    out = torch.full_like(before.mask, CODES["plain"], dtype=torch.int64)
    branches = {"no_advantage": before.advantages == 0}
    if isinstance(surrogate, Surrogate):
        branches |= {name: getattr(surrogate, name) for name in surrogate._fields[1:]}
    kept = t.mask if corrected.keep is None else t.mask & corrected.keep
    branches |= {"rejected": ~kept, "masked": ~before.mask}
    for name, flag in branches.items():
        if flag is not None:
            out = out.masked_fill(flag, CODES[name])
    return out


def spread(rewards: Sequence[float]) -> float:
    """The standard deviation of the rewards of a group (over n, not n − 1)."""
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((x - mean) ** 2 for x in rewards) / len(rewards))


def choose_groups(rewards: Sequence[Sequence[float]], count: int) -> list[int]:
    """Up to `count` groups of a step, the most informative first.

    Groups with the greatest spread of rewards come first, because a policy learns from them. The
    second group is the worst one without spread (all wrong), and the fourth is the best one without
    spread (all right), if there are such groups. rewards: the rewards of each group.
    """
    spreads = [spread(group) for group in rewards]
    places = range(len(rewards))
    informative = sorted((i for i in places if spreads[i] > 0), key=lambda i: (-spreads[i], i))
    by_reward = sorted((i for i in places if not spreads[i] > 0), key=lambda i: (rewards[i][0], i))
    worst = by_reward[:1]
    best = [i for i in by_reward[-1:] if rewards[i][0] > rewards[worst[0]][0]]
    others = [i for i in sorted(by_reward) if i not in (*worst, *best)]
    order = []
    for i, equal in zip(informative, [*worst, *best], strict=False):
        order += [i, equal]
    order += [i for i in (*informative, *worst, *best, *others) if i not in order]
    return order[:count]
