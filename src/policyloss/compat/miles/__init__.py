"""Any loss of this library as the custom loss of miles, a fork of slime.

miles calls a custom loss with the arguments of slime; only its functions for log-probabilities and
for context-parallel ranks are others.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.slime import LAYOUT, Batch, CustomLoss, Scores, custom_loss

__all__ = ["loss_of"]

LOSS, PARALLEL = (f"miles.backends.training_utils.{name}" for name in ("loss", "parallel"))


def loss_of(loss: AnyLoss) -> CustomLoss:
    """`loss` with the arguments and results of miles's custom loss. In a module of yours,
    `my_loss = loss_of(spec)` is a target of `--custom-loss-function-path`.
    """
    return custom_loss("miles", loss, _scores)


def _scores(args: Any, batch: Batch, logits: Tensor, with_entropy: bool) -> Scores:
    computed = import_module(LOSS).get_log_probs_and_entropy(
        logits,
        args=args,
        **{name: batch[name] for name in LAYOUT},
        with_entropy=with_entropy,
        max_seq_lens=batch.get("max_seq_lens"),
    )
    ranks = import_module(PARALLEL).get_parallel_state().cp
    return computed, ranks.group if ranks.size > 1 else None
