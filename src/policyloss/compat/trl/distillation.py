"""TRL's divergences with their arguments and results: `generalized_jsd_loss` of GKDTrainer, the
chunked kernel, and the loss of DistillationTrainer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.compat.arguments import drop_in
from policyloss.functional.divergence import Measure, terms
from policyloss.head.linear import linear_logprobs
from policyloss.head.teacher.divergence import linear_divergence
from policyloss.teacher import Teacher


@drop_in
def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | float | None = None,
) -> Tensor:
    """`GKDTrainer.generalized_jsd_loss`: the JSD of two `[B, T, V]` logits, reduced as TRL does.

    labels: `[B, T]`, −100 where a token does not count. reduction: "batchmean" divides by the
    tokens that count (without labels, by B), "sum" adds up, "mean" averages over tokens *and*
    vocabulary entries, any other value returns the terms `[…, V]`. num_items_in_batch: divide the
    sum by this instead.
    """
    student, teacher = ((x / temperature).log_softmax(-1) for x in (student_logits, teacher_logits))
    each = terms(student, teacher, Measure("jsd", beta))
    valid = None if labels is None else labels != -100
    each = each if valid is None else each[valid]
    if num_items_in_batch is not None:
        return each.sum() / num_items_in_batch
    if reduction == "batchmean":
        count = max(each.shape[0], 1) if valid is None else valid.sum().clamp(min=1)
        return each.sum() / count
    if reduction == "mean":
        return each.mean()
    return each.sum() if reduction == "sum" else each


def chunked_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    student_bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float = 1.0,
    student_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_final_logit_softcapping: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`ChunkedDivergenceFunction.apply`: the GKD divergence of each token, from hidden states, and
    the student's entropy, which has no gradient. `[N]` each.

    hidden: `[N, D]` of either model, weight: `[V, D]`, bias: `[V]`. The scale multiplies a model's
    logits, bias included, before its softcap.
    """
    hidden, bias = _scale(student_hidden, student_bias, student_logit_scale)
    states, offsets = _scale(teacher_hidden, teacher_bias, teacher_logit_scale)
    teacher = Teacher(states, teacher_weight, offsets, temperature, teacher_final_logit_softcapping)
    softcap = student_final_logit_softcapping
    divergence = linear_divergence(
        hidden,
        student_weight,
        teacher,
        kind="jsd",
        beta=beta,
        bias=bias,
        temperature=temperature,
        softcap=softcap,
    )
    with torch.no_grad():
        ids = torch.zeros(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        out = linear_logprobs(
            hidden, student_weight, ids, bias, temperature, entropy=True, softcap=softcap
        )
    assert out.entropy is not None
    return divergence, out.entropy


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | float | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """DistillationTrainer's loss: (loss, summed entropy, number of tokens that count), 0-dim each.

    hidden states: `[B, T, D]`. completion_mask: `[B, T]`. The loss is divided by
    num_items_in_batch, or by the tokens of this call (at least one). Weights sharded by FSDP2 are
    gathered.
    """
    valid = completion_mask.reshape(-1) != 0
    hidden, of_teacher = (
        x.reshape(-1, x.shape[-1])[valid] for x in (student_hidden_states, teacher_hidden_states)
    )
    divergence, entropy = chunked_divergence(
        hidden,
        _gather(student_lm_head_weight, hidden),
        _gather(student_lm_head_bias, hidden),
        of_teacher,
        _gather(teacher_lm_head_weight, of_teacher),
        _gather(teacher_lm_head_bias, of_teacher),
        beta,
        temperature,
        student_logit_scale,
        student_final_logit_softcapping,
        teacher_logit_scale,
        teacher_final_logit_softcapping,
    )
    count = valid.sum()
    items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return divergence.sum() / items, entropy.sum(), count


def _gather(x: Any, like: Tensor) -> Any:
    """The complete tensor of a DTensor in the dtype of `like`; other values are unchanged."""
    return x.full_tensor().to(like.dtype) if hasattr(x, "full_tensor") else x


def _scale(hidden: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """Hidden states and bias that give logits `scale` times as large."""
    if scale == 1:
        return hidden, bias
    return hidden * scale, None if bias is None else bias * scale
