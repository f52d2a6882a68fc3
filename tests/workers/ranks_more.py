"""The work of the processes of `test_ranks` other than losses:
advantages, the collectives that a loss makes, and errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import policyloss as pl
from policyloss import advantage

# --------------------------------------------------------------------------------------- advantages
# Each takes the tensors of a share and where its tokens lie.
# One number per token, or one per sequence.

Where = dict[str, Any]
Estimator = Callable[[dict[str, Any], Where], Tensor]


def _tokens(x: dict[str, Any], where: Where) -> dict[str, Any]:
    """The arguments of a scan over time."""
    return {
        "mask": x["mask"],
        "cu_seqlens": x["cu_seqlens"],
        "cp_group": where["cp_group"],
        "positions": x["positions"],
    }


def _of_sequences(x: dict[str, Any]) -> Tensor:
    """One reward per sequence, in the form that is not taken for one per token where a rank holds
    as many tokens as sequences.
    """
    rewards: Tensor = x["rewards"]
    return rewards if x["cu_seqlens"] is None else rewards.unsqueeze(1)


def _of_tokens(x: dict[str, Any]) -> Tensor:
    """One reward per token, in the form that is not taken for one per sequence there."""
    rewards: Tensor = x["advantages"]
    return rewards if x["cu_seqlens"] is None else rewards.unsqueeze(0)


PER_TOKEN: dict[str, Estimator] = {
    "gae": lambda x, w: (
        advantage.gae(
            _of_tokens(x), x["old_values"], gamma=0.9, lam=0.8, **_tokens(x, w)
        ).advantages
    ),
    "gae returns": lambda x, w: (
        advantage.gae(_of_tokens(x), x["old_values"], gamma=0.9, lam=0.8, **_tokens(x, w)).returns
    ),
    "gae, reward of a sequence": lambda x, w: (
        advantage.gae(_of_sequences(x), x["old_values"], lam=0.8, **_tokens(x, w)).advantages
    ),
    "gae, cut off": lambda x, w: (
        advantage.gae(
            _of_tokens(x), x["old_values"], gamma=0.9, last_values=x["rewards"], **_tokens(x, w)
        ).advantages
    ),
    "discounted returns": lambda x, w: advantage.discounted_returns(
        _of_tokens(x), gamma=0.9, **_tokens(x, w)
    ),
    "reinforce_pp": lambda x, w: advantage.reinforce_pp(
        _of_sequences(x), gamma=0.9, group=w["group"], **_tokens(x, w)
    ),
    "whiten": lambda x, w: advantage.whiten(
        x["advantages"], x["mask"], group=w["group"], cp_group=w["cp_group"]
    ),
    "whiten, mean kept": lambda x, w: advantage.whiten(x["advantages"], x["mask"], mean=False, **w),
}


def _of_groups(x: dict[str, Any], where: Where) -> dict[str, Any]:
    return {"rewards": x["rewards"], "group_ids": x["group_ids"], "group": where["group"]}


PER_SEQUENCE: dict[str, Estimator] = {
    "grpo": lambda x, w: advantage.grpo(**_of_groups(x, w)),
    "dr_grpo": lambda x, w: advantage.dr_grpo(**_of_groups(x, w)),
    "rloo": lambda x, w: advantage.rloo(**_of_groups(x, w)),
    "grpo_loo": lambda x, w: advantage.grpo_loo(**_of_groups(x, w)),
    "gpg": lambda x, w: advantage.gpg(**_of_groups(x, w)),
    "maxrl": lambda x, w: advantage.maxrl(**_of_groups(x, w)),
    "passk_max_gap": lambda x, w: advantage.passk_max_gap(**_of_groups(x, w)),
    "opo": lambda x, w: advantage.opo(lengths=x["lengths"], **_of_groups(x, w)),
    "reinforce_pp_baseline": lambda x, w: advantage.reinforce_pp_baseline(
        lengths=x["lengths"], **_of_groups(x, w)
    ),
    "passk_combinatorial": lambda x, w: advantage.passk_combinatorial(k=2, **_of_groups(x, w)),
    "gdpo": lambda x, w: advantage.gdpo(
        **{**_of_groups(x, w), "rewards": torch.stack((x["rewards"], x["rewards"] ** 2), 1)}
    ),
    "batch_std": lambda x, w: advantage.group_advantages(scale="batch_std", **_of_groups(x, w)),
    "weighted": lambda x, w: advantage.group_advantages(weights=x["lengths"], **_of_groups(x, w)),
}


def optimal_baseline(x: dict[str, Any], where: Where) -> Tensor:
    """Padded rows only; the sum of squared probabilities is made up of numbers at hand."""
    squares = (2 * x["old_logp"]).exp() + 0.1
    return advantage.optimal_token_baseline(
        mask=x["mask"], old_logp=x["old_logp"], sum_pi_squared=squares, **_of_groups(x, where)
    )


# -------------------------------------------------------------------------------------- collectives

_BASE = pl.LossSpec()
COUNTED = {
    "token": _BASE.replace(aggregate=pl.TokenMean()),
    "token, mean of a sequence": _BASE.replace(aggregate=pl.SeqMeanTokenMean()),
    "sequence": _BASE.replace(ratio=pl.SequenceRatio(), aggregate=pl.TokenMean()),
    "sequence, mean of a sequence": _BASE.replace(
        ratio=pl.SequenceRatio(), aggregate=pl.SeqMeanTokenMean()
    ),
    "sequence, gradient of a token": _BASE.replace(
        ratio=pl.SequenceRatio(grad="token"), aggregate=pl.SeqMeanTokenMean()
    ),
    "product": _BASE.replace(ratio=pl.SequenceProduct(), aggregate=pl.TokenMean()),
    "geometric mean": _BASE.replace(
        trust=pl.GeometricClip(0.2, 0.2), aggregate=pl.SeqMeanTokenMean()
    ),
    "corrected by token": _BASE.replace(correction=pl.Truncate(2.0), aggregate=pl.TokenMean()),
    "corrected by sequence": _BASE.replace(
        correction=pl.SequenceMask(0.9, 1.1), aggregate=pl.SeqMeanTokenMean()
    ),
    "dropped by sequence": _BASE.replace(
        correction=pl.Band(0.8, 1.2), rejected="drop_sequence", aggregate=pl.SeqMeanTokenMean()
    ),
}


class Collectives(TorchDispatchMode):
    """Records every collective, for any caller: its name and how many numbers this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [
                t
                for a in args
                for t in (a if isinstance(a, (list, tuple)) else [a])
                if isinstance(t, Tensor)
            ]
            self.seen.append(
                [func.overloadpacket.__name__.rstrip("_"), sum(t.numel() for t in tensors[:1])]
            )
        return func(*args, **(kwargs or {}))


def counted(forward: Callable[[], Tensor], leaf: Tensor) -> dict[str, list[list[Any]]]:
    """The collectives of a loss, and of its backward to `leaf`."""
    with Collectives() as there:
        loss = forward()
    with Collectives() as back:
        torch.autograd.grad(loss, leaf)
    return {"forward": there.seen, "backward": back.seen}


# ------------------------------------------------------------------------------------------- errors


def error(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except pl.InputError as refused:
        return str(refused)
    return "no error"


def warned(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught]


def where(groups: dict[str, Any], data_parallel: int) -> Where:
    """The groups of a cut as the estimators take them:
    "local" where no other rank holds other sequences.
    """
    if data_parallel == 1:
        return {"group": "local", "cp_group": groups["cp_group"]}
    return {"group": groups["group"] or dist.group.WORLD, "cp_group": groups["cp_group"]}
