"""The head of this library in TRL's two places for a fused head: `add_fused_lm_head`, which gives
its trainers (GRPO, RLOO, SFT, DPO, KTO) log-probabilities and entropies, and
`_chunked_divergence_loss`, the loss of its DistillationTrainer.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from policyloss.compat.hooks import Patch
from policyloss.compat.trl.distillation import chunked_divergence_loss
from policyloss.compat.trl.parts import at_the_end, last, likelihood_loss
from policyloss.errors import SpecError
from policyloss.head.linear import linear_logprobs
from policyloss.head.loss import HeadOutput
from policyloss.hf.forward import run_forward
from policyloss.hf.output_head import Matrices, Transformation, language_model

UTILS, DISTILLATION = "trl.trainer.utils", "trl.trainer.distillation_trainer"
OURS = {"log_probs", "entropy"}  # outputs of the head of this library


@dataclass(eq=False)
class OnePass:
    """A loss that the head computes in the next fused forward.

    score: a function of `(hidden, weight, ids, bias=, temperature=, softcap=)` for the last `count`
    tokens of each row. loss: the result of `score`.
    """

    score: Callable[..., HeadOutput]
    count: int
    loss: Tensor | None = None


_one_pass: WeakKeyDictionary[nn.Module, OnePass] = WeakKeyDictionary()
_patch = Patch("trl")


def add_fused_lm_head(
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Add TRL's fused forward, `model(…, labels=labels, fused_lm_head=True)`, to `model`, computed
    by the head of this library, with TRL's arguments, result and alignment.

    The model's own forward runs with its head replaced (`policyloss.hf`), so FSDP and ZeRO-3 gather
    its weight as for any forward, and factors and caps of its logits apply. For `outputs` other
    than log-probabilities and entropies TRL's head is used.
    """
    if not OURS.issuperset(outputs):
        theirs = _patch.pairs[0][0] if _patch.pairs else import_module(UTILS).add_fused_lm_head
        theirs(model, temperature, cast_lm_head_to_fp32, outputs)
        return
    output_class, in_float32 = import_module(UTILS).FusedCausalLMOutput, cast_lm_head_to_fp32
    own_forward = model.forward

    @wraps(type(model).forward)  # `generate` reads the signature
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            optional = {"labels": labels, "shift_labels": shift_labels}
            optional |= {"num_items_in_batch": num_items_in_batch}
            passed = {name: x for name, x in optional.items() if x is not None}
            return own_forward(*args, **passed, **kwargs)
        targets = shift_labels if labels is None or shift_labels is not None else labels[:, 1:]
        if targets is None:
            raise SpecError("fused_lm_head=True needs labels: the tokens to score, or −100.")
        mask, shifted = targets.ne(-100), shift_labels is None
        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)

        one_pass = _one_pass.get(self)

        def scores(hidden: Tensor, parts: Matrices, known: Transformation) -> Any:
            at = hidden[:, :-1] if shifted else hidden
            ids, options = targets, known.options(temperature)
            with torch.autocast(at.device.type, enabled=False) if in_float32 else nullcontext():
                at = at.float() if in_float32 else at
                if one_pass is None:
                    of_tokens = {"bias": parts.bias, "mask": mask, "entropy": True, **options}
                    return linear_logprobs(at, parts.weight, ids, **of_tokens)
                at, ids = last(at, one_pass.count), last(ids, one_pass.count)
                return one_pass.score(at, parts.weight, ids, bias=parts.bias, **options)

        called = {"use_cache": False, **kwargs}
        head = self.get_output_embeddings()
        scored = run_forward(self, head, lambda: own_forward(*args, **called), scores)
        aux_loss = getattr(scored.output, "aux_loss", None)
        coef = getattr(config, "router_aux_loss_coef", 0.0)
        per_token = (scored.result.logp, scored.result.entropy)
        logp, entropy = (at_the_end(x.float(), mask) for x in per_token)  # TRL's are float32
        loss = likelihood_loss(logp, mask, num_items_in_batch, aux_loss, coef)
        if one_pass is not None:  # also in the output, where wrappers look for the gradient
            loss = one_pass.loss = scored.result.loss
        return output_class(
            loss=loss,
            log_probs=logp,
            entropy=entropy if "entropy" in outputs else None,
            label_mask=mask,
            aux_loss=aux_loss,
        )

    model.forward = types.MethodType(forward, model)


def install_head() -> list[str]:
    """Let the trainers of the installed TRL that are constructed after this call compute
    log-probabilities, entropies and divergences with the head of this library; returns the names
    that were replaced. `uninstall_head` undoes it.
    """
    utils = import_module(UTILS)
    if not hasattr(utils, "add_fused_lm_head"):
        raise SpecError("this TRL has no add_fused_lm_head to replace; TRL 1.16 has it.")
    if not _patch.pairs:
        _patch.pairs.append((utils.add_fused_lm_head, add_fused_lm_head))
        theirs = import_module(DISTILLATION)._chunked_divergence_loss
        _patch.pairs.append((theirs, chunked_divergence_loss))
    return _patch.apply()


def uninstall_head() -> None:
    """Restore TRL's head for trainers that are constructed later."""
    _patch.undo()


@contextmanager
def installed_head() -> Iterator[None]:
    """Install the head for trainers constructed in this context; keep it if it was installed."""
    before = bool(_patch.pairs)
    install_head()
    try:
        yield
    finally:
        if not before:
            uninstall_head()


@contextmanager
def in_one_pass(model: Any, score: Callable[..., HeadOutput], count: int) -> Iterator[OnePass]:
    """In this context, fused forwards of `model` compute a loss of the last `count` tokens."""
    base = language_model(model)
    _one_pass[base] = OnePass(score, count)
    try:
        yield _one_pass[base]
    finally:
        del _one_pass[base]
