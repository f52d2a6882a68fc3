"""Hooks into an installed OpenRLHF: `install` replaces its losses (`openrlhf.models.loss` and
`.utils`), and `install_head` the forward of its `Actor` (`openrlhf.models.actor`), which then
computes log-probabilities and entropies without logits.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.compat.hooks import Patch, installed_version
from policyloss.compat.openrlhf import losses
from policyloss.compat.openrlhf.corrections import check_release
from policyloss.head.head import LogProbs
from policyloss.head.linear import linear_logprobs
from policyloss.hf.forward import run_forward
from policyloss.hf.output_head import Matrices, Transformation, output_head

ACTOR = "openrlhf.models.actor"
_patch = Patch("openrlhf")
_their_forward: list[Any] = []


def install(release: str | None = None) -> str:
    """Replace PolicyLoss, ValueLoss, aggregate_loss and compute_approx_kl in every module of
    OpenRLHF, also in modules imported later; returns the release whose numbers they reproduce.

    release: OpenRLHF's version, if the package has no metadata. A second call changes nothing;
    `uninstall` undoes it.
    """
    version = release or installed_version("openrlhf")
    check_release(version)
    if not _patch.pairs:
        loss, utils = import_module("openrlhf.models.loss"), import_module("openrlhf.models.utils")
        described = {"__doc__": losses.PolicyLoss.__doc__, "__module__": losses.__name__}
        of_release = {**described, "default_release": version}
        ours_here = type("PolicyLoss", (losses.PolicyLoss,), of_release)
        of_loss = (ours_here, losses.ValueLoss, losses.aggregate_loss)
        ours = [*((loss, new) for new in of_loss), (utils, losses.compute_approx_kl)]
        _patch.pairs.extend((getattr(m, new.__name__), new) for m, new in ours)
    _patch.apply()
    return version


def uninstall() -> None:
    """Restore OpenRLHF's classes and functions."""
    _patch.undo()


def install_head() -> None:
    """Make OpenRLHF's `Actor` compute log-probabilities and entropies with this library's head.

    Calls that return logits, and multimodal models, still use OpenRLHF's forward.
    `uninstall_head` undoes the change.
    """
    actor = import_module(ACTOR).Actor
    if not _their_forward:
        _their_forward.append(actor.forward)
        actor.forward = wraps(actor.forward)(actor_forward)


def uninstall_head() -> None:
    """Restore OpenRLHF's actor."""
    if _their_forward:
        import_module(ACTOR).Actor.forward = _their_forward.pop()


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
    returns_logits = action_mask is None and not return_logprobs
    if returns_logits or getattr(self, "is_vlm", False):
        their_forward = _their_forward[0] if _their_forward else import_module(ACTOR).Actor.forward
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
        # Counted from the row's first token; 1 at padding.
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        inputs = {"attention_mask": attention_mask, "position_ids": positions}

    def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> LogProbs:
        softmax = known.options(self.temperature)
        return linear_logprobs(hidden, parts.weight, labels, parts.bias, entropy=True, **softmax)

    def of_sequences(x: Tensor) -> Tensor:
        """One row per sequence, without the last token, which predicts nothing."""
        if packed:
            pad_len, indices = layout
            x = theirs.gather_and_pad_tensor(x, ring_attn_group, pad_len, indices, *sequences.shape)
        return x[:, :-1]

    scored = run_forward(
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
    if action_mask is not None:  # the actions are the last tokens of a row
        logp = logp[:, logp.shape[1] - action_mask.shape[1] :] * action_mask.float()
    return (logp, output) if return_output else logp
