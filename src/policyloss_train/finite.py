"""Which numbers of an update are not finite, in words, and the error if they are too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from policyloss.errors import PolicyLossError
from policyloss_train.batches import Pack

# What a loss reads of each token, in the order in which one follows from the other.
READ = ("rollout_logp", "old_logp", "ref_logp", "old_values", "advantages", "returns")
SHOWN = 4  # tokens, or weights, that a message names


class NotFiniteError(PolicyLossError):
    """Numbers that are not finite where training cannot go on with them."""


def nonfinite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold a NaN or an infinity, in this rank's part of them."""
    local = {name: x.to_local() if hasattr(x, "to_local") else x for name, x in tensors.items()}
    floats = {name: x for name, x in local.items() if x.is_floating_point()}
    return [name for name, x in floats.items() if not bool(torch.isfinite(x).all())]


def nonfinite_tokens(pack: Pack, chosen: Sequence[int], logp: Mapping[int, Tensor]) -> str:
    """The first quantity that is not finite at a token of the `chosen` sequences, and where; "" if
    all are. logp: the log-probabilities of the policy, by sequence, where they are known.
    """
    parts = {
        name: torch.split(pack.tokens[name], pack.lengths)
        for name in (*READ, "mask", "completion")
        if name in pack.tokens
    }
    for name in (*READ, "logp"):
        places = []
        for i in chosen:
            x = logp.get(i) if name == "logp" else parts[name][i] if name in parts else None
            if x is None:
                continue
            bad = ~torch.isfinite(x) & parts["mask"][i]
            first = int(parts["completion"][i].long().argmax()) if bad.any() else 0
            places += [(i, place - first) for place in bad.nonzero().flatten().tolist()]
        if places:
            return f"{name} is not finite at " + listed(
                [f"token {token} of completion {i}" for i, token in places]
            )
    return ""


def nonfinite_gradient(module: nn.Module) -> str:
    """Whose gradient is not finite; "" if all are."""
    bad = nonfinite_names(
        {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    )
    return f"the gradient of {listed(bad)} is not finite" if bad else ""


def listed(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
