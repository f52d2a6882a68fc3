"""One micro-batch of TRL's GRPOTrainer as a call of `policy_loss`: the names of its tensors,
and its treatment of missing numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_like, check_tensor
from policyloss.compat.trl.parts import where_scored
from policyloss.head.loss import HeadOutput, linear_policy_loss
from policyloss.loss import LossOutput, policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.parts.correction import OPSM, Corrected
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens, as_mask
from policyloss.totals import Totals


def loss_mask(inputs: Mapping[str, Any]) -> Tensor:
    """The tokens to train on, bool `[B, T]`: written by the model, not by a tool."""
    completion: Tensor = inputs["completion_mask"]
    completion = as_mask(completion, completion, "completion_mask")
    return (
        torch.logical_and(completion, inputs["tool_mask"]) if "tool_mask" in inputs else completion
    )


def batch_loss(
    spec: LossSpec,
    logp: Tensor,
    inputs: Mapping[str, Any],
    *,
    totals: Totals | Literal["local"],
    entropy: Tensor | None = None,
    keep: Tensor | None = None,
) -> LossOutput:
    """`policy_loss` of one of the trainer's micro-batches.

    logp: `[B, T]` with its gradient. inputs: the result of TRL's `_generate_and_score_completions`.
    Without "old_per_token_logps" the batch is exactly on-policy. A token that vLLM could not score
    (NaN) has importance weight 1 and shows no drift, as in TRL.
    entropy: for the metrics. keep: `[B, T]`, False for tokens whose policy term is dropped
    (top_entropy_quantile).
    """
    check_tensor("logp", logp, "float")
    _check_inputs(inputs, ("logp", logp))
    arguments = _arguments(spec, inputs, logp.detach(), keep)
    entropy = None if entropy is None else entropy.detach()
    out = policy_loss(logp=logp, entropy=entropy, totals=totals, **arguments)
    # TRL divides by an average over its windows, which a single window may exceed.
    return LossOutput(
        out.loss, Metrics({name: x for name, x in out.metrics.items() if name != "beyond_totals"})
    )


def head_loss(
    spec: LossSpec,
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    inputs: Mapping[str, Any],
    *,
    totals: Totals | Literal["local"],
    **options: Any,
) -> HeadOutput:
    """`batch_loss` from hidden states in one pass: the loss with its gradient.

    hidden: `[B, T, D]`, the states that predict the completion. options: the options of the head.
    """
    _check_inputs(inputs, ("ids", ids))
    arguments = _arguments(spec, inputs, "current", None)
    return linear_policy_loss(
        hidden=hidden, weight=weight, ids=ids, totals=totals, **arguments, **options
    )


def _arguments(
    spec: LossSpec,
    inputs: Mapping[str, Any],
    on_policy: Tensor | Literal["current"],
    keep: Tensor | None,
) -> dict[str, Any]:
    """The arguments of `policy_loss` without logp.

    on_policy: the old log-probabilities of a batch that has none. keep: the tokens that keep a
    policy term; None for all.
    """
    spec = ready_spec(spec)
    old, sampling = inputs.get("old_per_token_logps"), inputs.get("sampling_per_token_logps")
    old = on_policy if old is None else old
    parts = [_on_engine_logp(part, sampling) for part in spec.correction]
    if keep is not None:

        def low_entropy(t: Tokens) -> Corrected:  # this name appears in the metrics
            return Corrected(keep=keep)

        parts.append(low_entropy)
    scored = None
    if isinstance(sampling, Tensor) and isinstance(old, Tensor):
        scored = where_scored(sampling, old)
    return {
        "spec": spec.replace(correction=parts),
        "old_logp": old,
        "advantages": inputs["advantages"],
        "mask": loss_mask(inputs),
        "rollout_logp": scored,
        "ref_logp": inputs.get("ref_per_token_logps"),
    }


def _check_inputs(inputs: Mapping[str, Any], like: tuple[str, Tensor]) -> None:
    for name in (
        "old_per_token_logps",
        "sampling_per_token_logps",
        "ref_per_token_logps",
        "completion_mask",
        "tool_mask",
    ):
        if inputs.get(name) is not None or name == "completion_mask":
            check_like(name, inputs.get(name), like)


def _on_engine_logp(part: Any, sampling: Tensor | None) -> Any:
    """`part`, changed if it is an `OPSM` on the engine's log-probabilities.

    A token without a score then has no drift, instead of the drift from old_logp.
    """
    if sampling is None or not isinstance(part, OPSM) or part.source != "rollout":
        return part

    def off_policy(t: Tokens) -> Corrected:
        scored = where_scored(sampling, t.read("logp").detach())
        return part(replace(t, raw={**t.raw, "rollout_logp": scored}))

    return off_policy
