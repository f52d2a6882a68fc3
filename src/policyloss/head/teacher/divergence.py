"""`linear_divergence` and `divergence`: how far a student's distributions are from a teacher's.

Both return a number per token, with its gradient, from hidden states or from computed logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_tensor
from policyloss.errors import InputError
from policyloss.functional.divergence import KindName, Rest, Top
from policyloss.head.head import Head, HeadRows
from policyloss.head.linear import Outputs, head_and_sources, rows_with_gradient
from policyloss.head.plans import Plan
from policyloss.head.softmax_rows import Statistics
from policyloss.head.teacher.comparison import Comparison, comparison_of
from policyloss.head.validate import check_logits, check_mask, check_softcap, inverse_temperature
from policyloss.head.vocab_parallel import Vocabulary
from policyloss.parts.kl import Divergence
from policyloss.teacher import Teacher, TopK


def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher: Teacher | TopK | Tensor,
    *,
    kind: KindName,
    beta: float = 0.5,
    rest: Rest = "entry",
    top: Top | None = None,
    k: int | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_group: Any = None,
    plan: str | Plan = "auto",
) -> Tensor:
    """The divergence between student and teacher at each token, from the student's hidden states.

    With `s = log_softmax((hidden @ weight.T + bias) / temperature)` and t the log-probabilities of
    the teacher, kind="forward" is `(t.exp() * (t - s)).sum(-1)`, "reverse" is
    `(s.exp() * (s - t)).sum(-1)`, and "jsd" is GKD's Jensen–Shannon divergence with the mixture
    (1−beta)·student + beta·teacher. For the other kinds, and for beta, rest, top and k, see
    `Divergence`. Both models' logits are computed in float32, in chunks of tokens. The student's
    hidden, weight and bias get a gradient, the teacher none.

    hidden: `[..., D]`. weight: `[V, D]`. teacher: a `Teacher` (hidden states of any width, and a
    head), a `TopK`, or computed logits `[..., V]`. mask, bias, temperature, softcap, vocab_group:
    as in `linear_logprobs`, for the student alone: a `Teacher` has its own temperature and softcap,
    and teacher logits are used unchanged. With a vocab_group, pass this rank's slice of the
    teacher's weight or logits; the ids of a `TopK` index the whole vocabulary. plan: "recompute"
    (six matmuls in forward and backward together, two of them the teacher's; least memory), "stash"
    (four matmuls; keeps every logit's gradient, in the dtype of weight), "auto" (chooses one), or a
    `Plan`.
    Returns `[...]`, float32 (float64 for float64 inputs), 0 where mask is False.
    """
    check_tensor("hidden", hidden, "float")
    tokens = tuple(hidden.shape[:-1])
    # No token is looked up, so any id does.
    ids = torch.zeros(tokens, dtype=torch.int64, device=hidden.device)
    options = (mask, bias, temperature, softcap, vocab_group)
    head, sources, _ = head_and_sources(hidden, weight, ids, *options)
    part = Divergence(kind, 1.0, beta=beta, rest=rest, top=top, k=k)
    comparison = comparison_of(teacher, part.measure, head, tokens)
    outputs = Outputs(logp=False, comparison=comparison)
    flat = rows_with_gradient(sources, head, mask, plan, outputs)[2]
    numbers: Tensor = flat.view(tokens)
    return numbers


def divergence(
    logits: Tensor,
    teacher: TopK | Tensor,
    *,
    kind: KindName,
    beta: float = 0.5,
    rest: Rest = "entry",
    top: Top | None = None,
    k: int | None = None,
    mask: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """The divergence between `logits` `[..., V]` and the teacher, per token; differentiable.

    teacher: logits of the same shape, or a `TopK`. The other arguments are as in
    `linear_divergence`. → `[...]` in float32 (float64 for float64 logits), 0 where mask is False.
    """
    check_logits(logits)
    if isinstance(teacher, Teacher):
        raise InputError(
            "divergence compares logits that exist; with a Teacher use linear_divergence, which "
            "makes the logits of both models a window at a time."
        )
    check_softcap(softcap)
    tokens = tuple(logits.shape[:-1])
    z = logits.reshape(-1, logits.shape[-1])
    rate = inverse_temperature(temperature, tokens, z)
    ids = torch.zeros(z.shape[0], dtype=torch.int64, device=z.device)
    part = Divergence(kind, 1.0, beta=beta, rest=rest, top=top, k=k)
    # The logits take the place of a weight, of which the head reads the number of rows only.
    head = Head(z, z.t(), ids, None, rate, softcap, Vocabulary(z.shape[1], z.shape[1]))
    comparison = comparison_of(teacher, part.measure, head, tokens)
    valid = check_mask(mask, ids.view(tokens))
    numbers: Tensor = _Divergence.apply(z, head, comparison, valid)  # type: ignore[no-untyped-call]
    counts = comparison.counts(valid)
    if counts is not None:
        comparison.refuse(counts.tolist())
    return numbers.view(tokens)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, head: Head, comparison: Comparison, valid: Tensor | None
    ) -> Tensor:
        everywhere = slice(None)
        rows = HeadRows(z, head.ids, head.scaling(everywhere))
        s, compared = comparison.compare_rows(
            head, rows, everywhere, z.detach(), None, entropy=False
        )
        ctx.save_for_backward(z, valid)
        ctx.rows, ctx.s = rows._replace(hidden=head.hidden, compared=compared), s
        value = compared.numbers.divergence
        return value.clone() if valid is None else torch.where(valid, value, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        z, valid = ctx.saved_tensors
        s: Statistics = ctx.s
        slope = grads[0] if valid is None else torch.where(valid, grads[0], 0)
        out = torch.empty_like(z, memory_format=torch.contiguous_format)
        ctx.rows.write_gradient(z, out, s, (None, None, slope.to(s.lse.dtype)))
        return out, None, None, None
