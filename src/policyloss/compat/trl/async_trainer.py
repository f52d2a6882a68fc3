"""TRL's AsyncGRPOTrainer with the policy loss of this library. It has no method for the loss alone,
so `compute_loss` is TRL's own, run with advantages of 0, and our loss is put into its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.engines import fitting_spec, means
from policyloss.compat.hooks import default_of
from policyloss.compat.trl.parts import offsets_of, replace_term
from policyloss.compat.trl.trainer import CONFIG_METRICS, checked_trl, config_of
from policyloss.errors import SpecError
from policyloss.loss import policy_loss
from policyloss.parts.aggregate import TokenMean
from policyloss.spec import LossSpec
from policyloss.totals import Totals

if TYPE_CHECKING:
    _Parent = Any
else:
    _Parent = object  # `async_trainer_class` adds TRL's trainer as the second base

CALLED, OLDEST = "TRL's AsyncGRPOTrainer", "1.16"


class _Scored:
    """The model of a call. It keeps its log-probabilities, and returns them without gradient."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        outputs = self.model(**inputs)
        self.logp = outputs.log_probs
        outputs.log_probs = self.logp.detach()
        return outputs


class WithOurAsyncLoss(_Parent):  # type: ignore[misc]  # TRL has no types
    """TRL's AsyncGRPOTrainer with the loss `policy_loss`, a `LossSpec` or the name of a preset.

    Generation, packing, router loss and the other metrics remain TRL's. The sampler's
    log-probabilities are the anchor of the ratio. TRL counts the tokens of one micro-batch over
    all ranks, so the average must be `TokenMean`, and gradient_accumulation_steps 1.
    """

    def __init__(self, *args: Any, policy_loss: AnyLoss, **kwargs: Any) -> None:
        config = config_of(*args, **kwargs)
        if config is not None:  # before TRL loads models and starts engines
            checked_async_loss(policy_loss, config)
        super().__init__(*args, **kwargs)
        self.policy_loss = checked_async_loss(policy_loss, self.args)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The share of this rank in the loss of a micro-batch."""
        scored, advantages = _Scored(model), inputs["advantages"]
        others: Tensor = super().compute_loss(
            scored, {**inputs, "advantages": torch.zeros_like(advantages)}
        )
        kept = inputs["token_index"] >= 0
        sampled = "rollout_logp" if "rollout_logp" in self.policy_loss.reads else "old_logp"
        logp = scored.logp.flatten()[inputs["token_index"][kept]]
        tensors: dict[str, Any] = {"old_logp": None, sampled: inputs["old_log_probs"][kept]}
        out = policy_loss(
            self.policy_loss,
            logp,
            **tensors,
            advantages=advantages[kept].unsqueeze(0),
            mask=torch.ones_like(logp, dtype=torch.bool),
            cu_seqlens=offsets_of(inputs["segment_id"][kept]),
            totals=Totals(inputs["global_n_tokens"][0], 1, dp_size=self.accelerator.num_processes),
        )
        logs = self._metrics["train"]
        for name in [name for name in logs if name.startswith(CONFIG_METRICS)]:
            del logs[name]
        for name, value in means(out.metrics).items():
            logs[name].append(value.item())
        return replace_term(others, torch.zeros_like(out.loss), out.loss)


def checked_async_loss(policy_loss: AnyLoss, config: Any) -> LossSpec:
    """The spec of `policy_loss`; an error if the trainer cannot run it with `config`."""
    passes = ("old_logp", "rollout_logp")
    spec = fitting_spec(CALLED, policy_loss, passes, (TokenMean,), sampler_is_old=True)
    calls = config.gradient_accumulation_steps
    if calls != 1:
        raise SpecError(
            f"{CALLED} divides every micro-batch by its own tokens, so that "
            f"gradient_accumulation_steps={calls} would not average over the tokens of the step; "
            "use 1, and token_budget for the size of a step."
        )
    for name in ("epsilon", "epsilon_high"):
        value = getattr(config, name)
        if value != default_of(config, name, value):
            raise SpecError(
                f"policy_loss has its own bounds, so {name}={value!r} would have no effect; leave "
                "it at its default, and change the bounds of the loss."
            )
    return spec


@cache
def async_trainer_class() -> type[Any]:
    """A subclass of the installed TRL's AsyncGRPOTrainer."""
    checked_trl("AsyncGRPOTrainer", OLDEST)
    parent = import_module("trl.experimental.async_grpo").AsyncGRPOTrainer
    described = {"__doc__": WithOurAsyncLoss.__doc__, "__module__": __name__}
    return type("AsyncGRPOTrainer", (WithOurAsyncLoss, parent), described)
