"""`policy_loss`, `logprobs` and `explain_plan` of a model and a batch of token ids.

Everything is aligned with the predicted tokens, `input_ids[:, 1:]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from policyloss.arguments import description, fits_kind
from policyloss.errors import InputError, unknown_name
from policyloss.head import loss as head_loss
from policyloss.head.head import LogProbs
from policyloss.head.linear import linear_logprobs
from policyloss.head.logits import logprobs as logprobs_of_logits
from policyloss.head.loss import HeadOutput, linear_policy_loss
from policyloss.head.plans import Plan
from policyloss.hf.forward import Scores, run
from policyloss.hf.layouts import check_layout, counted_positions
from policyloss.hf.output_head import (
    Matrices,
    Transformation,
    UnknownHeadError,
    language_model,
)
from policyloss.inputs import SharedTensors, takes_tensors
from policyloss.loss import policy_loss as policy_loss_of_logp
from policyloss.presets import PresetName
from policyloss.spec import LossSpec
from policyloss.totals import Totals

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11

HEADS = ("fused", "auto", "logits")
HeadName = Literal["fused", "auto", "logits"]


@takes_tensors
def policy_loss(
    model: Any,
    spec: LossSpec | PresetName | str,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    old_logp: Tensor | Literal["current"] | None,
    advantages: Tensor,
    mask: Tensor,
    logits_to_keep: int | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    totals: Totals | Literal["local"] | None = None,
    vocab_group: Any = None,
    plan: str | Plan = "auto",
    skip_zero_advantage: bool = False,
    **tensors: Unpack[SharedTensors],
) -> HeadOutput:
    """The loss `spec` describes, of a causal language model: its body runs, with
    `linear_policy_loss` in the place of its output head, so that no logits are held.

    **Alignment.** `mask`, `old_logp` and every other token-shaped tensor belong to the *predicted*
    tokens `input_ids[:, 1:]`: they are `[B, T-1]` for input_ids `[B, T]`, and entry t is about the
    token `input_ids[:, t+1]`. With logits_to_keep=n they belong to the last n tokens and are
    `[B, n]`. The shift is made here.

    model: a model of Hugging Face, wrapped or not (PEFT, DDP, FSDP, ZeRO-3). Its head may have a
    bias, be tied, frozen or adapted by LoRA; its logits may be scaled or capped.
    attention_mask: `[B, T]`, 0 at padding on either side. With padding on the left, positions are
    counted from each row's first token.
    cu_seqlens: `[S+1]`, for a pack `[1, N]` of several sequences: where each begins in input_ids.
    position_ids then begin at 0 with each. Token-shaped tensors are `[1, N-1]`, and mask is False
    at the first token of a sequence, which nothing predicts.
    position_ids: passed to the model as they are. model_inputs: what else it takes (pixel_values).
    head: "fused"; "logits" computes from the logits that the model makes itself; "auto" does so
    where the head cannot be replaced, which is an error with "fused".
    Other arguments as in `linear_policy_loss`. An MoE model's router loss is not part of it.
    """
    call = _Call.of(
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        position_ids,
        model_inputs,
        tensors.get("cu_seqlens"),
    )
    arguments = call.aligned(
        {"old_logp": old_logp, "advantages": advantages, "mask": mask, **tensors}
    )
    call.check_boundaries(arguments["mask"])
    options: dict[str, Any] = {"totals": totals}
    fused = {
        "vocab_group": vocab_group,
        "plan": plan,
        "skip_zero_advantage": skip_zero_advantage,
    }

    def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> HeadOutput:
        at, weight = call.predicting(hidden), _shard(parts.weight, vocab_group)
        scaled = known.options(call.of_tokens(temperature))
        return linear_policy_loss(
            spec, at, weight, call.ids, bias=parts.bias, **arguments, **options, **fused, **scaled
        )

    def from_logits(logits: Tensor) -> HeadOutput:
        out = logprobs_of_logits(
            call.predicting(logits),
            call.ids,
            call.of_tokens(temperature),
            entropy=True,
            mask=arguments["mask"],
        )
        logp = out.logp
        loss = policy_loss_of_logp(spec, logp, entropy=out.entropy, **arguments, **options)
        return HeadOutput(loss.loss, loss.metrics, logp.detach(), out.entropy.detach())

    out: HeadOutput = call.result(head, scores, from_logits)
    return replace(out, logp=call.shaped(out.logp), entropy=call.shaped(out.entropy))


@overload
def logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    entropy: Literal[False] = False,
    mask: Tensor | None = None,
    logits_to_keep: int | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    vocab_group: Any = None,
    plan: str | Plan = "auto",
) -> Tensor: ...
@overload
def logprobs(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    entropy: Literal[True],
    mask: Tensor | None = None,
    logits_to_keep: int | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    vocab_group: Any = None,
    plan: str | Plan = "auto",
) -> LogProbs: ...
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
    temperature: float | Tensor = 1.0,
    head: HeadName = "fused",
    vocab_group: Any = None,
    plan: str | Plan = "auto",
) -> Tensor | LogProbs:
    """The log-probability of every predicted token `input_ids[:, 1:]`, and its entropy if asked.

    mask: `[B, T-1]` (with logits_to_keep=n `[B, n]`), the predicted tokens to compute; by default
    those that attention_mask holds. Others are 0. Other arguments as in `policy_loss` of this
    module and in `linear_logprobs`, which takes the place of the model's head.
    → `[B, T-1]` or `[B, n]`, float32; with entropy=True, `LogProbs(logp, entropy)`.
    """
    call = _Call.of(
        model, input_ids, attention_mask, logits_to_keep, position_ids, model_inputs, cu_seqlens
    )
    live = call.aligned({"mask": call.default_mask(attention_mask) if mask is None else mask})
    call.check_boundaries(live["mask"])

    def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> LogProbs:
        scaled = known.options(call.of_tokens(temperature))
        at, weight = call.predicting(hidden), _shard(parts.weight, vocab_group)
        shared = {"bias": parts.bias, "vocab_group": vocab_group, "plan": plan, **live, **scaled}
        return _pair(linear_logprobs(at, weight, call.ids, entropy=entropy, **shared))

    def from_logits(logits: Tensor) -> LogProbs:
        at, warmth = call.predicting(logits), call.of_tokens(temperature)
        return _pair(logprobs_of_logits(at, call.ids, warmth, entropy=entropy, **live))

    out: LogProbs = call.result(head, scores, from_logits)
    logp = call.shaped(out.logp)
    return LogProbs(logp, call.shaped(out.entropy)) if entropy else logp


def explain_plan(
    model: Any,
    spec: LossSpec | PresetName | str | None,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    logits_to_keep: int | None = None,
    position_ids: Tensor | None = None,
    model_inputs: Mapping[str, Any] | None = None,
    temperature: float | Tensor = 1.0,
    head: HeadName = "auto",
    **arguments: Any,
) -> Plan:
    """What `policy_loss` of this module does with these very arguments, and why; with spec None,
    what `logprobs` does.

    The model's body runs, and what the model does to its logits is looked at again. Where its head
    cannot be replaced, the plan is named "logits", and its reason says what was looked for.
    """
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    options = {name: x for name, x in arguments.items() if name not in tensors}
    call = _Call.of(
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        position_ids,
        model_inputs,
        tensors.get("cu_seqlens"),
    )
    aligned = call.aligned(tensors)

    def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> Plan:
        at, weight = call.predicting(hidden), _shard(parts.weight, options.get("vocab_group"))
        scaled = known.options(call.of_tokens(temperature))
        return head_loss.explain_plan(
            spec, at, weight, call.ids, bias=parts.bias, **aligned, **options, **scaled
        )

    try:
        _check_choice(head)
        if head != "logits":
            plan: Plan = call.fused(scores, check=True)
            return plan
        why = "asked for"
    except UnknownHeadError as error:
        if head == "fused":
            raise
        why = str(error)
    tokens = call.ids.numel()
    return Plan("logits", tokens, 0, tokens=tokens, computed=tokens, reason=why)


@dataclass(frozen=True)
class _Call:
    """One call. inputs: what the model is called with. ids: the predicted tokens, `[B, n]`, or
    `[N-1]` of a pack, whose sequences begin at `cu_seqlens`. counts_positions: whether the layout
    is ours to check, and whether positions are passed; None if the caller lays out.
    """

    model: Any
    inputs: dict[str, Any]
    ids: Tensor
    row: tuple[int, int]
    cu_seqlens: Tensor | None
    counts_positions: bool | None

    @classmethod
    def of(
        cls,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        logits_to_keep: int | None,
        position_ids: Tensor | None,
        model_inputs: Mapping[str, Any] | None,
        cu_seqlens: Tensor | None,
    ) -> _Call:
        """The arguments, checked, as the model takes them."""
        tokens, count = _checked_ids(input_ids, logits_to_keep, cu_seqlens)
        _check_like("attention_mask", attention_mask, tokens)
        packed = cu_seqlens is not None
        taken = inspect.signature(language_model(model).forward).parameters
        inputs = {"input_ids": tokens, "attention_mask": attention_mask, **(model_inputs or {})}
        open_ended = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in taken.values())
        if "use_cache" in taken or open_ended:
            inputs["use_cache"] = False
        if position_ids is not None:
            inputs["position_ids"] = position_ids
        elif cu_seqlens is not None:
            inputs["position_ids"] = _positions_in(cu_seqlens, tokens)
        elif attention_mask is not None and "position_ids" in taken and not model_inputs:
            counted = counted_positions(attention_mask)
            inputs |= {} if counted is None else {"position_ids": counted}
        inputs = {name: x for name, x in inputs.items() if x is not None}
        ids = tokens[:, tokens.shape[1] - count :]
        row = (ids.shape[0], ids.shape[1])
        own_layout = position_ids is not None or bool(model_inputs)
        tried = None if own_layout else "position_ids" in taken
        return cls(model, inputs, ids.reshape(-1) if packed else ids, row, cu_seqlens, tried)

    def predicting(self, x: Tensor) -> Tensor:
        """What predicts `ids`, out of one row per token of input_ids: `[B, T, X]` → `[B, n, X]`."""
        count = self.row[1]
        if x.shape[:2] != self.inputs["input_ids"].shape:
            raise InputError(
                f"{type(language_model(self.model)).__name__} has {tuple(x.shape)} before its head "
                f"or as logits; [B, T, …] with [B, T] = {tuple(self.inputs['input_ids'].shape)}, "
                "the shape of input_ids, was looked for."
            )
        kept = x[:, x.shape[1] - count - 1 : -1]
        return kept if self.cu_seqlens is None else kept.reshape(-1, x.shape[-1])

    def aligned(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call, checked to belong to the predicted tokens; of a pack flat, with
        the `cu_seqlens` that belong to them.
        """
        for name, x in tensors.items():
            if name == "mask" or name.endswith("_logp"):
                self._check_token_shaped(name, x)
        extras = tensors.get("extras") or {}
        for name, x in extras.items():
            self._check_token_shaped(f"extras[{name!r}]", x)
        if self.cu_seqlens is None:
            return dict(tensors)
        flat = {name: self._flat(x) for name, x in tensors.items()}
        if extras:
            flat["extras"] = {name: self._flat(x) for name, x in extras.items()}
        if "cu_seqlens" in tensors:
            flat["cu_seqlens"] = self.cu_seqlens.clamp(max=self.row[1])
        return flat

    def of_tokens(self, x: float | Tensor) -> Any:
        """A temperature, flat if it is one per token of a pack."""
        return self._flat(x)

    def _flat(self, x: Any) -> Any:
        token_shaped = isinstance(x, Tensor) and tuple(x.shape) == self.row
        return x.reshape(-1) if self.cu_seqlens is not None and token_shaped else x

    def _check_token_shaped(self, name: str, x: Any) -> None:
        if isinstance(x, Tensor) and tuple(x.shape) != self.row:
            raise InputError(
                f"{name} has shape {tuple(x.shape)}, but {self.row} tokens are predicted: "
                "everything is aligned with input_ids[:, 1:] (with logits_to_keep=n, with the last "
                f"n tokens), so {name}[:, t] is about the token input_ids[:, t+1]."
            )

    def check_boundaries(self, mask: Any) -> None:
        """Raise if the first token of a packed sequence counts: nothing in the pack predicts it."""
        if self.cu_seqlens is None or not isinstance(mask, Tensor):
            return
        first = (self.cu_seqlens[1:-1] - 1).long()
        wrong = first[mask.reshape(-1)[first].bool()]
        if wrong.numel():
            raise InputError(
                f"mask is True at {int(wrong[0])}, which is the first token of a packed sequence "
                "(cu_seqlens), and nothing predicts it; make it False there."
            )

    def default_mask(self, attention_mask: Tensor | None) -> Tensor:
        """The predicted tokens that are tokens."""
        live = torch.ones(self.row, dtype=torch.bool, device=self.ids.device)
        if attention_mask is not None:
            live = attention_mask[:, attention_mask.shape[1] - self.row[1] :].bool()
        if self.cu_seqlens is not None:
            live = live.clone()
            live[:, (self.cu_seqlens[1:-1] - 1).long()] = False
        return live

    def shaped(self, x: Tensor) -> Tensor:
        """One number per predicted token, in their shape."""
        return x.view(self.row)

    def fused(self, scores: Scores, check: bool = False) -> Any:
        """With `scores` in the place of the model's head."""
        if self.counts_positions is not None:
            packed = self.cu_seqlens is not None
            check_layout(self.model, self.inputs, packed, self.counts_positions)
        return run(self.model, self.inputs, scores, check=check).result

    def result(self, head: str, scores: Scores, from_logits: Any) -> Any:
        """By the head that was asked for."""
        _check_choice(head)
        if head != "logits":
            try:
                return self.fused(scores)
            except UnknownHeadError:
                if head == "fused":
                    raise
        output = self.model(**self.inputs)
        return from_logits(output.logits if hasattr(output, "logits") else output[0])


def _check_choice(head: str) -> None:
    if head not in HEADS:
        raise InputError(unknown_name("head", head, HEADS))


def _pair(out: Tensor | LogProbs) -> LogProbs:
    """Log-probabilities with or without entropies as one type."""
    return LogProbs(out, out.new_zeros(())) if isinstance(out, Tensor) else out


def _shard(weight: Tensor, vocab_group: Any) -> Tensor:
    """The entries of this rank, if the vocabulary is cut over ranks and the weight is a DTensor."""
    if vocab_group is not None and hasattr(weight, "to_local"):
        local: Tensor = weight.to_local()
        return local
    return weight


def _checked_ids(
    input_ids: Any, logits_to_keep: int | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, int]:
    """The tokens `[B, T]`, and how many of each row count as predicted."""
    if not isinstance(input_ids, Tensor) or not fits_kind(input_ids, "integer"):
        raise InputError(
            f"input_ids must be token ids [B, T] (integers), got {description(input_ids)}."
        )
    if input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise InputError(
            f"input_ids has shape {tuple(input_ids.shape)}; give [B, T] with at least two tokens, "
            "of which the first predicts the second (a pack is [1, N] with cu_seqlens)."
        )
    most = input_ids.shape[1] - 1
    if cu_seqlens is not None and (input_ids.shape[0] != 1 or logits_to_keep is not None):
        raise InputError(
            f"cu_seqlens cuts one row of tokens, and input_ids has shape {tuple(input_ids.shape)}"
            f", logits_to_keep={logits_to_keep!r}; give [1, N] and no logits_to_keep."
        )
    if logits_to_keep is None:
        return input_ids, most
    if not isinstance(logits_to_keep, int) or not 1 <= logits_to_keep <= most:
        raise InputError(
            f"logits_to_keep must be a whole number from 1 to {most}, the predicted tokens of a "
            f"row (its first is not predicted), got {description(logits_to_keep)}."
        )
    return input_ids, logits_to_keep


def _check_like(name: str, x: Any, tokens: Tensor) -> None:
    if x is not None and (not isinstance(x, Tensor) or x.shape != tokens.shape):
        raise InputError(
            f"{name} must have the shape of input_ids, {tuple(tokens.shape)}, got {description(x)}."
        )


def _positions_in(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """The position of each token in its own sequence, `[1, N]`."""
    every = torch.arange(tokens.shape[1], device=tokens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long().contiguous(), every, right=True)
    return (every - cu_seqlens.long()[sequence])[None]
