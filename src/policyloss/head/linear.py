"""`linear_logprobs`: log-probabilities and entropies from hidden states, a window at a time.

The logits of all tokens never exist at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from policyloss.arguments import check_group
from policyloss.functional.masking import compute_dtype
from policyloss.head.backward import (
    Wanted,
    gradients_by_columns,
    gradients_from_stash,
    keep_probabilities,
)
from policyloss.head.head import Head, LogProbs, operands, windows
from policyloss.head.plans import Plan, Work, free_bytes, logprob_plan
from policyloss.head.softmax_rows import Statistics
from policyloss.head.support import Support, SupportArgument
from policyloss.head.validate import (
    check_ids,
    check_mask,
    check_matrices,
    check_softcap,
    check_vocabulary,
    inverse_temperature,
    later,
    refuse_strays,
    strays,
)
from policyloss.head.vocab_parallel import Vocabulary


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: Literal[False] = False,
    mask: Tensor | None = None,
    plan: str | Plan = "auto",
    *,
    softcap: float | None = None,
    vocab_group: Any = None,
    support: SupportArgument | None = None,
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    *,
    entropy: Literal[True],
    mask: Tensor | None = None,
    plan: str | Plan = "auto",
    softcap: float | None = None,
    vocab_group: Any = None,
    support: SupportArgument | None = None,
) -> LogProbs: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
    plan: str | Plan = "auto",
    *,
    softcap: float | None = None,
    vocab_group: Any = None,
    support: SupportArgument | None = None,
) -> Tensor | LogProbs: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    mask: Tensor | None = None,
    plan: str | Plan = "auto",
    *,
    softcap: float | None = None,
    vocab_group: Any = None,
    support: SupportArgument | None = None,
) -> Tensor | LogProbs:
    """Log-probability of each token under `softmax(hidden @ weight.T)`, and its entropy if asked.

    `log_softmax((hidden @ weight.T + bias).float() / temperature, -1).gather(-1, ids)`, computed
    window by window with float32 logits. The gradient reaches hidden, weight and bias, through the
    log-probabilities and through the entropy.

    hidden: `[..., D]`. weight: `[V, D]`. bias: `[V]`. ids, mask: `[...]`. temperature: a number, or
    one per token `[...]`.
    mask: tokens to compute; others are not (nor are their hidden states read): logp and entropy 0,
    gradient 0. softcap: logits are `softcap·tanh(logits/softcap)` before the temperature. plan:
    "auto", "recompute" (4 matmuls, least memory), "stash" (3, keeps probabilities in the type of
    the weight), or a `Plan`. vocab_group: the process group over which the vocabulary is cut;
    weight and bias are then this rank's entries, ids count over all of them, hidden is the same on
    every rank and its gradient is complete on each. support: `(ids, offsets)`, the vocabulary
    entries that the sampler of each token kept, those of token i (counted over all tokens, row by
    row) at `ids[offsets[i]:offsets[i+1]]`; the softmax, its entropy and its gradient are then over
    these alone.
    → `[...]` float32 (float64 for float64); with `entropy=True`, `LogProbs(logp, entropy)`.
    """
    head = head_of(hidden, weight, ids, bias, temperature, softcap, vocab_group, support)
    valid = check_mask(mask, ids)
    index = live_rows(valid)
    chosen = logprob_plan(head, work_of(hidden, weight, bias, head, index), plan)

    def ask() -> Callable[[], None]:
        stray = later(strays(head, valid))
        return lambda: refuse_strays(stray(), head, valid)

    outputs = _LinearLogprobs.apply(hidden, weight, bias, head, index, chosen, entropy, ask)  # type: ignore[no-untyped-call]
    logp: Tensor = outputs[0].view(ids.shape)
    return LogProbs(logp, outputs[1].view(ids.shape)) if entropy else logp


def head_of(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    softcap: float | None,
    vocab_group: Any,
    support: SupportArgument | None,
) -> Head:
    """The head of these arguments. All is checked except the values of the ids (see `strays`)."""
    check_matrices(hidden, weight, bias)
    check_group("vocab_group", vocab_group)
    if vocab_group is None:  # with a group, all ranks raise together
        check_vocabulary("weight", weight, weight.shape[0])
    tokens = tuple(hidden.shape[:-1])
    check_ids(ids, tokens, "hidden", hidden.device)
    check_softcap(softcap)
    x, w, b = operands(hidden, weight, bias)
    rate = inverse_temperature(temperature, tokens, compute_dtype(x), x.device)
    vocabulary = Vocabulary.of(weight, vocab_group, x.shape[0], lambda: free_bytes(hidden))
    flat = ids.reshape(-1).to(torch.int64)
    return Head(x, w, flat, b, rate, softcap, vocabulary, Support.of(support, flat))


def live_rows(valid: Tensor | None) -> Tensor | None:
    """The rows to compute, or None for all of them. Reads their number back to the host."""
    if valid is None:
        return None
    index = valid.nonzero().squeeze(-1)
    return None if index.shape[0] == valid.shape[0] else index


def work_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, index: Tensor | None
) -> Work:
    """The work of a call, as far as its arguments determine it."""
    n = head.hidden.shape[0]
    computed = n if index is None else index.shape[0]
    wanted = torch.is_grad_enabled()
    other = weight.requires_grad or (bias is not None and bias.requires_grad)
    return Work(n, computed, computed, wanted and hidden.requires_grad, wanted and other)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        index: Tensor | None,
        plan: Plan,
        entropy: bool,
        ask: Callable[[], Callable[[], None]],
    ) -> tuple[Tensor, Tensor | None]:
        n = head.hidden.shape[0]
        live = n if index is None else index.shape[0]
        logp, spread, lse = (
            torch.zeros(n, device=hidden.device, dtype=head.dtype) for _ in range(3)
        )
        stash = head.weight.new_empty(live, head.weight.shape[0]) if plan.name == "stash" else None
        room = head.room(min(plan.rows, live))
        check = None
        for w in windows(live, plan.rows):
            at = w if index is None else index[w]
            rows = head.rows(at)
            z, s = head.forward(rows, room, entropy)
            logp[at], lse[at] = s.logp, s.lse
            if s.entropy is not None:
                spread[at] = s.entropy
            if stash is not None:
                keep_probabilities(z, stash[w], rows, s)
            if check is None:
                check = ask()  # copies ids to check; the device has work by now
        if check is not None:
            check()
        ctx.set_materialize_grads(False)
        # Saved tensors, so that a weight changed before the backward is an error. A stash is not
        # saved: the backward overwrites it.
        ctx.save_for_backward(
            head.hidden, head.weight, head.ids, head.bias, index, logp, lse, spread
        )
        ctx.rest = (head.inverse_temperature, head.softcap, head.vocabulary, head.support)
        ctx.plan, ctx.shape, ctx.stash = plan, hidden.shape, stash
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        return logp, spread if entropy else None

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, ids, bias, index, logp, lse, spread = ctx.saved_tensors
        head = Head(hidden, weight, ids, bias, *ctx.rest)
        wanted = Wanted(
            *(
                d if need else None
                for d, need in zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
            )
        )
        dlogp, dentropy = grads
        dlogp = torch.zeros_like(logp) if dlogp is None else dlogp
        # A second backward through a retained graph has no stash, and computes the logits again.
        stash, ctx.stash = ctx.stash, None
        if stash is None:
            index = _rows_with_gradient(index, dlogp, dentropy)
        at = slice(None) if index is None else index
        rows = head.rows(at)
        s = Statistics(logp[at], None if dentropy is None else spread[at], lse[at])
        derivatives = (dlogp[at], None if dentropy is None else dentropy[at])
        if stash is None:
            gradients = gradients_by_columns(head, rows, s, *derivatives, ctx.plan.columns, wanted)
        else:
            gradients = gradients_from_stash(head, rows, s, *derivatives, stash, wanted)
        dhidden = (
            None
            if gradients.hidden is None
            else at_rows(gradients.hidden, index, ids.shape[0]).view(ctx.shape)
        )
        return dhidden, gradients.weight, gradients.bias, None, None, None, None, None


def _rows_with_gradient(
    index: Tensor | None, dlogp: Tensor, dentropy: Tensor | None
) -> Tensor | None:
    """The computed rows that have a gradient, None for all; others are not worth a matmul.

    Reads their number back to the host.
    """
    has_gradient = dlogp != 0 if dentropy is None else (dlogp != 0) | (dentropy != 0)
    return live_rows(has_gradient) if index is None else index[has_gradient[index]]


def at_rows(x: Tensor, index: Tensor | None, n: int) -> Tensor:
    """`x` `[R, D]` as rows `index` of `[n, D]`, the others 0; x itself if it holds all rows."""
    return x if index is None else x.new_zeros(n, x.shape[1]).index_copy_(0, index, x)
