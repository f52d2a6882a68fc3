"""`policy_loss`, `logprobs` and `explain_plan` of a model and a batch of token ids.

Everything is aligned with the predicted tokens, `input_ids[:, 1:]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.catalogue import AnyLoss
from policyloss.head import loss as head_loss
from policyloss.head.head import LogProbs
from policyloss.head.linear import linear_logprobs
from policyloss.head.logits import logprobs as logprobs_of_logits
from policyloss.head.loss import HeadOutput, linear_policy_loss
from policyloss.head.plans import Plan
from policyloss.hf.one_call import HEADS, ModelCall
from policyloss.hf.output_head import UnknownHeadError
from policyloss.inputs import SharedTensors, StandIn, takes_tensors
from policyloss.loss import policy_loss as policy_loss_of_logp
from policyloss.mixture import Mixture
from policyloss.policy_metrics import MetricsLevel
from policyloss.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11

HeadName = Literal["fused", "auto", "logits"]


@takes_tensors
def policy_loss(
    model: Any,
    spec: AnyLoss | Mixture,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    old_logp: Tensor | StandIn | None,
    advantages: Tensor,
    mask: Tensor,
    logits_to_keep: int | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    index: Tensor | None = None,
    ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    totals: Totals | Literal["local"] | None = None,
    vocab_group: Any = None,
    plan: str | Plan = "auto",
    skip_zero_advantage: bool = False,
    metrics: MetricsLevel = "all",
    **tensors: Unpack[SharedTensors],
) -> HeadOutput:
    """The loss `spec` of a causal language model. `linear_policy_loss` replaces the model's output
    head, so that the full logits are never in memory.

    **Alignment.** `mask`, `old_logp` and every other per-token tensor belong to the *predicted*
    tokens `input_ids[:, 1:]`: these tensors are `[B, T-1]` for input_ids `[B, T]`, and entry t
    belongs to the token `input_ids[:, t+1]`. With logits_to_keep=n they belong to the last n tokens
    and are `[B, n]`. This function shifts the hidden states.

    model: a model of Hugging Face, wrapped or not (PEFT, DDP, FSDP, ZeRO-3). Its head may have a
    bias, be tied, frozen or adapted by LoRA; its logits may be scaled or capped.
    attention_mask: `[B, T]`, 0 at padding on either side. With padding on the left, positions are
    counted from each row's first token; the mask of that token must be False, because only padding
    predicts it. cu_seqlens: `[S+1]`, for a pack `[1, N]` of several sequences: the index in
    input_ids at which each sequence begins. position_ids then begin at 0 in each sequence,
    per-token tensors are `[1, N-1]`, and the mask must be False at the first token of a sequence,
    which no token predicts.
    position_ids: passed to the model unchanged. model_inputs: other arguments of the model
    (pixel_values). head: "fused" replaces the model's head, and raises an error if it cannot;
    "logits" computes the loss from the model's own logits; "auto" is "fused" if the head can be
    replaced, else "logits".
    index, ids: `[M]`, or any other shape, the same for both. ids: the token of each loss term.
    index: the position, in the flattened input_ids, whose hidden state predicts that token. Nothing
    is shifted then, every per-token tensor has the shape of index, and cu_seqlens split the terms
    into sequences. This trains a tree of trajectories with common prefixes in one row: pass each
    token's depth in position_ids, and the tree's attention mask in model_inputs.
    Other arguments as in `linear_policy_loss`. The loss does not include the router loss of an MoE
    model.
    """
    cu_seqlens = tensors.get("cu_seqlens")
    inputs = (input_ids, attention_mask, logits_to_keep, position_ids, model_inputs)
    call = ModelCall.of(model, *inputs, cu_seqlens, index, ids)
    first = {"old_logp": old_logp, "advantages": advantages, "mask": mask}
    arguments = call.check_tensors({**first, **tensors})
    options: dict[str, Any] = {"totals": totals, "metrics": metrics}
    fused = {**options, "plan": plan, "skip_zero_advantage": skip_zero_advantage}

    def scores(*head: Any) -> HeadOutput:
        operands = call.operands(temperature, vocab_group, *head)
        return linear_policy_loss(spec, **operands, **arguments, **fused)

    def from_logits(logits: Tensor) -> HeadOutput:
        at, warmth = call.predicting(logits), call.flat(temperature)
        out = logprobs_of_logits(at, call.ids, warmth, entropy=True, mask=arguments["mask"])
        loss = policy_loss_of_logp(spec, out.logp, entropy=out.entropy, **arguments, **options)
        assert out.entropy is not None
        return HeadOutput(loss.loss, loss.metrics, out.logp.detach(), out.entropy.detach())

    out: HeadOutput = call.result(head, arguments["mask"], scores, from_logits)
    return replace(out, logp=call.per_token(out.logp), entropy=call.per_token(out.entropy))


def logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    entropy: bool = False,
    mask: Tensor | None = None,
    logits_to_keep: int | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    index: Tensor | None = None,
    ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    vocab_group: Any = None,
    plan: str | Plan = "auto",
) -> LogProbs:
    """The log-probability of every predicted token `input_ids[:, 1:]`, and the entropy.

    mask: `[B, T-1]` (with logits_to_keep=n `[B, n]`), the tokens to compute; the result is 0 at the
    others. By default, all tokens except padding and each sequence's first, which no token
    predicts; with `index`, all terms. Other arguments as in `policy_loss` of this module and in
    `linear_logprobs`, which replaces the model's head.
    Returns `LogProbs(logp, entropy)`, `[B, T-1]` or `[B, n]` each, float32; entropy is None without
    `entropy=True`.
    """
    inputs = (input_ids, attention_mask, logits_to_keep, position_ids, model_inputs)
    call = ModelCall.of(model, *inputs, cu_seqlens, index, ids)
    live = call.check_tensors({"mask": call.default_mask() if mask is None else mask})

    def scores(*head: Any) -> LogProbs:
        operands = call.operands(temperature, vocab_group, *head)
        return linear_logprobs(**operands, entropy=entropy, plan=plan, **live)

    def from_logits(logits: Tensor) -> LogProbs:
        at, warmth = call.predicting(logits), call.flat(temperature)
        return logprobs_of_logits(at, call.ids, warmth, entropy=entropy, **live)

    out: LogProbs = call.result(head, live["mask"], scores, from_logits)
    spread = None if out.entropy is None else call.per_token(out.entropy)
    return LogProbs(call.per_token(out.logp), spread)


def explain_plan(
    model: Any,
    spec: AnyLoss | Mixture | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    logits_to_keep: int | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    index: Tensor | None = None,
    ids: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "auto",
    vocab_group: Any = None,
    **arguments: Any,
) -> Plan:
    """How `policy_loss` of this module would compute the head for these arguments, and why; with
    spec None, how `logprobs` would.

    This runs the model without its head, to find out how it transforms its logits (scale, cap). If
    the head cannot be replaced, the plan is named "logits", and its reason is the error.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    cu_seqlens = tensors.get("cu_seqlens")
    inputs = (input_ids, attention_mask, logits_to_keep, position_ids, model_inputs)
    call = ModelCall.of(model, *inputs, cu_seqlens, index, ids)
    aligned = call.check_tensors(tensors)

    def scores(*head: Any) -> Plan:
        operands = call.operands(temperature, vocab_group, *head)
        return head_loss.explain_plan(spec, **operands, **aligned, **options)

    try:
        check_choice("head", head, HEADS)
        if head != "logits":
            plan: Plan = call.run_without_head(scores, check=True)
            return plan
        why = "chosen by the caller"
    except UnknownHeadError as error:
        if head == "fused":
            raise
        why = str(error)
    tokens = call.ids.numel()
    return Plan("logits", tokens, 0, tokens=tokens, computed=tokens, reason=why)
