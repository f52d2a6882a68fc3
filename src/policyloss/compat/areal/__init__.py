"""Any loss of this library in AReaL's PPO actors.

AReaL calls a loss with one micro-batch, packed. It multiplies the mean by a weight of the
micro-batch and divides by the sum of these weights over all ranks; the weight is the number that
the spec's average divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.engines import COUNTED, check_settings, fitting_spec, means
from policyloss.compat.hooks import Parent
from policyloss.compat.parts import denominator
from policyloss.errors import InputError, SpecError
from policyloss.loss import policy_loss, ready_spec

__all__ = ["ArealLoss", "WithOurLoss"]

TRACKER = "areal.utils.stats_tracker"
# The argument of `policy_loss`, and the key of AReaL's data.
KEYS = {"old_logp": "prox_logp", "rollout_logp": "logprobs"}
# The settings of AReaL's own loss that must keep these values, because a spec does not read them.
UNUSED = {
    "eps_clip_higher": None,
    "c_clip": None,
    "rejection_sampling": None,
    "m2_threshold": None,
    "importance_sampling_level": "token",
    "use_sapo_loss": False,
}


class ArealLoss:
    """`loss` as the two functions of `TrainEngine.train_batch`."""

    def __init__(self, loss: AnyLoss) -> None:
        self.spec = fitting_spec("AReaL", ready_spec(loss), (*KEYS, "entropy"), COUNTED)

    def loss_fn(
        self, logprobs: Tensor, entropy: Tensor, input_data: Mapping[str, Any], **_: Any
    ) -> Tensor:
        """The loss of a micro-batch, divided by `loss_weight_fn`. All tokens are packed, `[N]`;
        further arguments are numbers of the logits that AReaL logs.
        """
        tensors: dict[str, Any] = {name: input_data.get(key) for name, key in KEYS.items()}
        if missing := [name for name in self.spec.reads if tensors.get(name, entropy) is None]:
            raise InputError(
                f"this loss reads {KEYS.get(missing[0], 'entropy')}, which AReaL did not compute; "
                "see actor.recompute_logprob, actor.use_decoupled_loss and actor.prox_logp_method."
            )
        if input_data.get("teacher_logp") is not None:
            raise SpecError("AReaL's teacher has no effect on this loss; unset teacher.")
        out = policy_loss(
            self.spec,
            logprobs,
            advantages=input_data["advantages"],
            mask=input_data["loss_mask"].bool(),
            cu_seqlens=input_data.get("cu_seqlens"),
            entropy=entropy if self.spec.entropy_coef else None,
            totals="local",
            **tensors,
        )
        logged = {key: x.item() for key, x in means(out.metrics).items()}
        import_module(TRACKER).scalar(**logged)
        return out.loss

    def loss_weight_fn(self, input_data: Mapping[str, Any]) -> Tensor:
        """The tokens or sequences of a micro-batch, 0-dim."""
        mask = input_data["loss_mask"].bool()
        return denominator(self.spec.aggregate, mask, input_data.get("cu_seqlens"))


_cached_loss = cache(ArealLoss)


class WithOurLoss(Parent):  # type: ignore[misc]  # AReaL has no types
    """`class Actor(WithOurLoss, FSDPPPOActor): policy_loss = "dapo"`, in a module of yours."""

    policy_loss: ClassVar[AnyLoss]

    def train_batch(
        self, input_: Any, loss_fn: Callable[..., Tensor], loss_weight_fn: Any
    ) -> dict[str, float]:
        """AReaL's step with `policy_loss` instead of the loss that `PPOActor` passes."""
        settings = getattr(loss_fn, "keywords", {})
        check_settings("AReaL", settings.get, UNUSED)
        ours = _cached_loss(self.policy_loss)
        result: dict[str, float] = super().train_batch(input_, ours.loss_fn, ours.loss_weight_fn)
        return result
