"""OpenRLHF's actor with the head of this library: its log-probabilities and entropies without
logits.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.compat.openrlhf.counts import positions_in, where_acted
from policyloss.head.head import LogProbs
from policyloss.head.linear import linear_logprobs
from policyloss.hf.forward import run_with
from policyloss.hf.output_head import Matrices, Transformation, output_head

ACTOR = "openrlhf.models.actor"
_replaced: list[Any] = []


def install_head() -> None:
    """Let OpenRLHF's `Actor` compute log-probabilities and entropies by the head of this library.

    Calls that ask for logits, and models of images and text, stay as they are. A second call
    changes nothing; `uninstall_head` undoes it.
    """
    actor = import_module(ACTOR).Actor
    if not _replaced:
        _replaced.append(actor.forward)
        actor.forward = wraps(actor.forward)(actor_forward)


def uninstall_head() -> None:
    """Restore OpenRLHF's actor."""
    if _replaced:
        import_module(ACTOR).Actor.forward = _replaced.pop()


def actor_forward(
    self: Any,
    sequences: Tensor,
    action_mask: Tensor | None = None,
    attention_mask: Any = None,
    return_output: bool = False,
    allgather_logits: bool = False,
    return_logprobs: bool = False,
    ring_attn_group: Any = None,
    packed_seq_lens: list[int] | None = None,
    return_entropy: bool = False,
    **mm_inputs: Any,
) -> Any:
    """`Actor.forward`, with its arguments and results; the logits of the output are None."""
    asks_for_logits = action_mask is None and not return_logprobs
    if asks_for_logits or getattr(self, "is_vlm", False):
        their_forward = _replaced[0] if _replaced else import_module(ACTOR).Actor.forward
        return their_forward(
            self,
            sequences,
            action_mask=action_mask,
            attention_mask=attention_mask,
            return_output=return_output,
            allgather_logits=allgather_logits,
            return_logprobs=return_logprobs,
            ring_attn_group=ring_attn_group,
            packed_seq_lens=packed_seq_lens,
            return_entropy=return_entropy,
            **mm_inputs,
        )
    theirs = import_module(ACTOR)
    packed = getattr(self, "packing_samples", False)
    if packed:
        tokens, positions, labels, *layout = theirs.unpad_and_slice_tensor(
            sequences, attention_mask, ring_attn_group
        )
        inputs = {"attention_mask": None, "position_ids": positions}
    else:
        tokens, labels = sequences, sequences.roll(-1, 1)
        inputs = {"attention_mask": attention_mask, "position_ids": positions_in(attention_mask)}

    def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> LogProbs:
        softmax = known.options(self.temperature)
        temperature, softcap = softmax["temperature"], softmax["softcap"]
        return linear_logprobs(
            hidden, parts.weight, labels, parts.bias, temperature, entropy=True, softcap=softcap
        )

    def of_sequences(x: Tensor) -> Tensor:
        """One number per token as a row per sequence, without the last, which predicts nothing."""
        if packed:
            pad_len, indices = layout
            x = theirs.gather_and_pad_tensor(x, ring_attn_group, pad_len, indices, *sequences.shape)
        return x[:, :-1]

    scored = run_with(
        self.model,
        output_head(self.model),
        lambda: self.model(tokens, **inputs, **mm_inputs),
        scores,
    )
    output = scored.output
    output["logits"] = None
    if return_entropy:
        output.entropy = of_sequences(scored.result.entropy)
    logp = of_sequences(scored.result.logp)
    if action_mask is not None:
        logp = where_acted(logp, action_mask)
    return (logp, output) if return_output else logp
