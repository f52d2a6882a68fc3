"""Policy and critic: from tokens to hidden states, then to log-probabilities, loss or values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import policyloss as pl
from policyloss_train.attention import Attention
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.models import merged_weights, observe_head

Head = Callable[[Tensor, Tensor, Tensor | None, float | None], Any]
# The plan of each head that works in windows.
PLANS: dict[str, str | pl.Plan] = {"fused": "auto", "sparse": "sparse"}


class Policy(nn.Module):
    """A causal language model for the loss, with one forward, so that DDP and FSDP can wrap it.

    attention: the way in which sequences run through the model.
    """

    def __init__(self, model: Any, attention: Attention) -> None:
        super().__init__()
        self.model, self.attention = model, attention
        self.transformation = observe_head(model)

    def forward(self, micro: Any, head: Head) -> Any:
        """`head(hidden, weight, bias, softcap)` of the tokens of a micro-batch; hidden: `[N, H]`.

        The head is called here because a sharded weight is complete only inside a forward.
        """
        output, (scale, softcap) = self.model.get_output_embeddings(), self.transformation
        hidden = self.attention.hidden(self.model.base_model, micro)
        hidden = hidden if scale == 1 else hidden * scale
        return head(hidden, output.weight, getattr(output, "bias", None), softcap)


class Critic(nn.Module):
    """A copy of a model's body with a linear head. The value of token t is
    `V_t = w · hidden_t + b`, which is 0 before training.
    """

    def __init__(self, model: Any, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        weight = model.get_output_embeddings().weight
        self.body = copy.deepcopy(model.base_model).requires_grad_(True)
        self.head = nn.Linear(weight.shape[1], 1, dtype=weight.dtype, device=weight.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro: Mapping[str, Any]) -> Tensor:
        """The values `[N]` of the tokens of a micro-batch."""
        values: Tensor = self.head(self.attention.hidden(self.body, micro)).squeeze(-1)
        return values

    def start_from(self, model: Any) -> None:
        """Copy the current weights of the model's body."""
        self.body.load_state_dict(merged_weights(model.base_model))


def logprobs(policy: nn.Module, micro: Any, temperature: float) -> Tensor:
    """The log-probabilities of the targets of a micro-batch under a policy, `[N]`."""

    def head(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Any:
        options: dict[str, Any] = {"entropy": True, "mask": micro["mask"], "softcap": softcap}
        options["support"] = micro["support"]
        return pl.linear_logprobs(hidden, weight, micro["targets"], bias, temperature, **options)

    logp: Tensor = policy(micro, head).logp
    return logp


def loss_and_numbers(
    policy: nn.Module,
    micro: Any,
    step: pl.Accumulation,
    config: TrainConfig,
    teacher: nn.Module | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a micro-batch of `step`, and the log-probabilities and entropies of its tokens;
    the metrics are merged into those of `step`. Without `old_logp`, the current policy is the
    old one. teacher: used if the loss compares distributions.
    """
    divergence, targets, mask = step.spec.divergence, micro["targets"], micro["mask"]
    support = micro["support"]  # the tokens that the sampler kept
    more: dict[str, Any] = {} if "old_logp" in micro else {"old_logp": "current"}
    warmth = config.temperature

    def head(hidden: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Any:
        # One micro-batch at a time, so that only its teacher states are in memory.
        taught: pl.Teacher | None = None
        if teacher is not None and divergence is not None:
            with torch.no_grad():
                taught = teacher(micro, lambda h, w, b, cap: pl.Teacher(h, w, b, warmth, cap))
        logits_of: dict[str, Any] = {"temperature": warmth, "softcap": softcap}
        if config.head in PLANS:
            options = {**micro.arguments(), **more, **logits_of, "teacher": taught}
            options |= {"support": support, "plan": PLANS[config.head]}
            out = pl.linear_policy_loss(step.spec, hidden, weight, targets, bias=bias, **options)
            step.add(out.metrics)
            return out.loss, out.logp, out.entropy.detach()
        logits = nn.functional.linear(hidden, weight, bias)
        now = pl.logprobs(logits, targets, entropy=True, mask=mask, support=support, **logits_of)
        if divergence is not None and taught is not None:
            measure = divergence.measure._asdict()
            more["divergence"] = pl.linear_divergence(
                hidden, weight, taught, **measure, mask=mask, bias=bias, **logits_of
            )
        loss = micro.loss(now.logp, entropy=now.entropy, **more)
        assert now.entropy is not None
        return loss, now.logp.detach(), now.entropy.detach()

    loss, logp, entropy = policy(micro, head)
    return loss, logp, entropy


class Routing:
    """Counts how often each layer's router chooses each expert, in forwards that record gradients.
    A model without experts has nothing to count.
    """

    def __init__(self, model: Any) -> None:
        body = model.base_model
        recorder = (getattr(body, "_can_record_outputs", None) or {}).get("router_logits")
        kind: Any = getattr(recorder, "target_class", ())
        self._place = getattr(recorder, "index", 0)
        config = model.config.get_text_config()
        self._chosen: int = getattr(config, "num_experts_per_tok", None) or 1
        self._counts: dict[Any, Tensor] = {}
        for router in body.modules():
            if isinstance(router, kind):
                router.register_forward_hook(self._count)

    def _count(self, router: Any, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        logits = (output[self._place] if isinstance(output, tuple) else output).detach()
        logits = logits.flatten(0, -2)
        experts = logits.topk(self._chosen, dim=-1).indices.flatten()
        counts = torch.bincount(experts, minlength=logits.shape[-1])
        self._counts[router] = self._counts.get(router, 0) + counts

    def busiest(self, ranks: Ranks) -> dict[str, float]:
        """The metric `router_busiest` over all ranks: the load of a layer's busiest expert over an
        even load, mean over layers. Resets the counts to 0.
        """
        if not self._counts:
            return {}
        counts = ranks.sum(torch.stack(list(self._counts.values())).double())
        self._counts.clear()
        load = counts / counts.sum(-1, keepdim=True)
        return {"router_busiest": float((load.amax(-1) * load.shape[-1]).mean())}
