"""Any loss of this library as a custom loss of prime-rl.

prime-rl calls a loss with one sample at a time and divides the sum of all samples by the trained
tokens of the step. So a loss here is a sum over tokens, and its average must be `TokenMean`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from policyloss.catalogue import AnyLoss, preset
from policyloss.compat.engines import fitting_spec, means, sampled_logp
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import TokenMean, TokenSum

__all__ = ["loss", "loss_of"]

LOSS = "prime_rl.trainer.rl.loss"


def loss(inputs: Any, preset: str, **numbers: float) -> Any:
    """A preset as the target of `import_path`, with changed numbers by their names in `kwargs`."""
    return _loss_of_preset(preset, **numbers)(inputs)


def loss_of(loss: AnyLoss) -> Callable[[Any], Any]:
    """`loss` as a function of `LossInputs` that returns `LossOutputs`. In a module of yours,
    `my_loss = loss_of(spec)` is a target of `import_path`.

    The sampler's log-probabilities are the anchor of the ratio (`old_logp`). `loss_weights` weigh
    the whole loss of each token.
    """
    passes = ("old_logp", "rollout_logp", "ref_logp")
    spec = fitting_spec("prime-rl", loss, passes, (TokenMean,), sampler_is_old=True)
    spec = spec.replace(aggregate=TokenSum())

    def custom_loss(inputs: Any) -> Any:
        tokens = {
            "logp": inputs.trainer_logprobs,
            **sampled_logp(spec, inputs.inference_logprobs),
            "ref_logp": inputs.ref_logprobs,
            "advantages": inputs.advantages,
            "mask": inputs.loss_mask,
            "weights": inputs.loss_weights,
        }
        row: dict[str, Any] = {
            name: None if x is None else x.unsqueeze(0) for name, x in tokens.items()
        }
        out = policy_loss(spec, **row, totals="local")
        return import_module(LOSS).LossOutputs(loss=out.loss, metrics=means(out.metrics))

    return custom_loss


@cache
def _loss_of_preset(name: str, **numbers: float) -> Callable[[Any], Any]:
    return loss_of(preset(name, **numbers))
