"""`linear_logprobs`: log-probabilities and entropies from hidden states, a window at a time.

The logits of all tokens are never in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_group
from policyloss.errors import InputError
from policyloss.functional.exact import is_exact, stays_eager
from policyloss.head import validate
from policyloss.head.backward import BackwardInputs, GradientTypes, keep_probabilities
from policyloss.head.head import Head, Index, LogProbs, operands, windows
from policyloss.head.plans import RECOMPUTE, STASH, Plan, Work, free_bytes, logprob_plan
from policyloss.head.softmax_rows import Partials, Statistics, row_statistics
from policyloss.head.support import Support, SupportArgument
from policyloss.head.teacher.comparison import Comparison, compute_rows, start_checks
from policyloss.head.teacher.rows import Entries, PairStatistics
from policyloss.head.terms import distinct_rows
from policyloss.head.tiles import Tiles
from policyloss.head.vocab_parallel import Vocabulary


@stays_eager
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
    index: Tensor | None = None,
) -> LogProbs:
    """Log-probability of each token under `softmax(hidden @ weight.T)`, and the entropy.

    `log_softmax((hidden @ weight.T + bias).float() / temperature, -1).gather(-1, ids)`, computed in
    chunks of tokens, with float32 logits. The gradient reaches hidden, weight and bias, through the
    log-probabilities and through the entropy.

    hidden: `[..., D]`; each state predicts the id at the same place in ids. weight: `[V, D]`. bias:
    `[V]`. ids, mask: `[...]`. temperature: a number, or one per token `[...]`.
    mask: where it is False, the hidden state is not read, and logp, entropy and gradient are 0.
    softcap: logits are `softcap·tanh(logits/softcap)` before the temperature. plan: "recompute" (4
    matmuls in forward and backward together, least memory), "stash" (3 matmuls, keeps probabilities
    in the dtype of weight), "auto" (chooses one), or a `Plan`. vocab_group: the process group
    over which the vocabulary is split; weight and bias are then this rank's entries, ids index the
    whole vocabulary, hidden is the same on every rank, and every rank gets the complete gradient of
    hidden. support: `(ids, offsets)`, the vocabulary entries that the sampler kept for each token:
    `ids[offsets[i]:offsets[i+1]]` for token i (a flat index over all tokens, row by row); softmax,
    entropy and gradient are then over the kept entries alone.
    index: for each id, the flat index of the hidden state that predicts it (over all states, row by
    row), in any shape. Use it if several loss terms share a hidden state (a tree of trajectories
    with common prefixes). ids, mask, temperature and the results then have the shape of index, and
    terms with the same hidden state, id and temperature are computed once.
    Returns `LogProbs(logp, entropy)`, `[...]` each, float32 (float64 for float64); entropy is None
    without `entropy=True`.
    """
    options = (bias, temperature, softcap, vocab_group, support, index)
    head, sources, rows = head_and_sources(hidden, weight, ids, mask, *options)
    outputs = rows_with_gradient(sources, head, rows, plan, Outputs(entropy=entropy))
    logp, spread = (None if x is None else head.of_terms(x).view(ids.shape) for x in outputs[:2])
    assert logp is not None
    return LogProbs(logp, spread)


class Outputs(NamedTuple):
    """The numbers to compute for each row. comparison: the teacher, if a divergence is wanted."""

    logp: bool = True
    entropy: bool = False
    comparison: Comparison | None = None


# Hidden states, weight and bias of the caller, to which the gradients go.
Sources = tuple[Tensor, Tensor, Tensor | None]
# The options of `head_and_sources`.
HEAD_OPTIONS = ("bias", "temperature", "softcap", "vocab_group", "support", "index")


def rows_with_gradient(
    sources: Sources, head: Head, mask: Tensor | None, plan: str | Plan, outputs: Outputs
) -> Any:
    """logp, entropy and divergence of every row, flat, each with its gradient.

    One that is not wanted is None. head: the head of `sources`.
    """
    valid = validate.check_mask(mask, head.ids.view(sources[0].shape[:-1]))
    index = live_rows(valid)
    chosen = logprob_plan(head, work_of(sources, head, index, outputs), plan)
    start = partial(start_checks, head, outputs.comparison, valid)
    return _LinearLogprobs.apply(*sources, head, index, chosen, outputs, start)  # type: ignore[no-untyped-call]


def head_and_sources(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    vocab_group: Any = None,
    support: SupportArgument | None = None,
    index: Tensor | None = None,
) -> tuple[Head, Sources, Tensor | None]:
    """The head of a call, checked except for the values of the ids (`value_summary`), its sources,
    and the mask of its rows: with an index, of the distinct rows that its terms read.
    """
    validate.check_matrices(hidden, weight, bias)
    terms = None
    if index is not None:
        if support is not None:
            raise InputError(
                "index and support were passed together, but the terms of a row may have several "
                "supports; leave out one of them."
            )
        distinct = distinct_rows(index, hidden, ids, temperature, mask)
        hidden, ids, temperature, mask, terms = distinct
    check_group("vocab_group", vocab_group)
    if vocab_group is None:  # with a group, all ranks raise together
        validate.check_vocabulary("weight", weight, weight.shape[0])
    tokens = tuple(hidden.shape[:-1])
    validate.check_ids(ids, "hidden", hidden)
    validate.check_softcap(softcap)
    x, w, b = operands(hidden, weight, bias)
    rate = validate.inverse_temperature(temperature, tokens, x)
    vocabulary = Vocabulary.of(weight, vocab_group, x.shape[0], lambda: free_bytes(hidden))
    flat = ids.reshape(-1).to(torch.int64)
    tiles, kept = None, Support.of(support, flat)
    if is_exact():
        if 1 not in w.stride() or w.data_ptr() % 64:
            # The trial of a shape (`Tiles`) multiplies a weight that begins at such an address.
            w = w.clone(memory_format=torch.contiguous_format)
        tiles = Tiles.of(x, w, vocabulary)
    head = Head(x, w, flat, b, rate, softcap, vocabulary, kept, tiles, terms)
    return head, (hidden, weight, bias), mask


def live_rows(valid: Tensor | None) -> Tensor | None:
    """The rows to compute, or None for all of them. Reads their number back to the host."""
    if valid is None:
        return None
    index = valid.nonzero().squeeze(-1)
    return None if index.shape[0] == valid.shape[0] else index


def work_of(sources: Sources, head: Head, index: Tensor | None, outputs: Outputs) -> Work:
    """The work of a call that computes the rows at `index`."""
    n = head.hidden.shape[0]
    computed = n if index is None else index.shape[0]
    wanted = GradientTypes.of(*sources)
    return Work(wanted, n, computed, computed, outputs.comparison, outputs.logp)


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
        outputs: Outputs,
        start: Callable[[], Callable[[], None]],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        n = head.hidden.shape[0]
        live = n if index is None else index.shape[0]
        comparison = outputs.comparison
        zeros = torch.zeros(n, device=hidden.device, dtype=head.dtype)
        logp, spread, lse = zeros, zeros.clone(), zeros.clone()
        kept = [plan.kind is STASH and x for x in (outputs.logp, comparison is not None)]
        shape = (live, head.weight.shape[0])
        stash, slopes = (head.weight.new_empty(shape) if keep else None for keep in kept)
        room = head.room(min(plan.rows, live))
        teacher_room = None if comparison is None else comparison.room(min(plan.rows, live))
        known: PairStatistics | Entries | None = None
        parts: list[tuple[Tensor, Partials | Tensor]] = []
        finish_checks = None
        for w in windows(live, plan.rows, head.tiles):
            at = w if index is None else index[w]
            if comparison is None and stash is None:
                # Defer the statistics: one merge for all windows.
                rows = head.rows(at)
                z = head.logits(rows, room)
                parts.append((rows.ids, head.window_partials(rows, z, outputs.entropy)))
            else:
                rows, z, s = compute_rows(head, comparison, at, room, teacher_room, outputs.entropy)
                if rows.compared is not None:
                    known = write_at(rows.compared.numbers, at, known, n)
                    if slopes is not None:
                        rows.write_gradient(z, slopes[w], s, (None, None, torch.ones_like(s.lse)))
                logp[at], lse[at] = s.logp, s.lse
                if s.entropy is not None:
                    spread[at] = s.entropy
                if stash is not None:
                    keep_probabilities(z, stash[w], rows, s)
            if finish_checks is None:
                finish_checks = start()
        if parts:
            s = row_statistics(head.merge(parts))
            logp, lse = at_rows(s.logp, index, n), at_rows(s.lse, index, n)
            spread = spread if s.entropy is None else at_rows(s.entropy, index, n)
        if finish_checks is not None:
            finish_checks()
        ctx.set_materialize_grads(False)
        # Saved tensors, so that a weight that changes before the backward is an error. A stash is
        # not saved, because the backward overwrites it.
        of_head = (head.hidden, head.weight, head.ids, head.bias)
        ctx.save_for_backward(*of_head, index, logp, lse, spread)
        numbers = (head.inverse_temperature, head.softcap)
        ctx.rest = (*numbers, head.vocabulary, head.support, head.tiles)
        ctx.plan, ctx.shape, ctx.stash = plan, hidden.shape, (stash, slopes)
        ctx.comparison, ctx.known = comparison, known
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        divergence = None
        if comparison is not None:  # `known` is None if there was no window
            divergence = torch.zeros_like(logp) if known is None else known.divergence
        return logp, spread if outputs.entropy else None, divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        hidden, weight, ids, bias, index, logp, lse, spread = ctx.saved_tensors
        head = Head(hidden, weight, ids, bias, *ctx.rest)
        needed = zip(ctx.dtypes, ctx.needs_input_grad, strict=False)
        wanted = GradientTypes(*(dtype if need else None for dtype, need in needed))
        dlogp, dentropy, ddivergence = grads
        if dlogp is None and (ddivergence is None or ctx.known is None):
            dlogp = torch.zeros_like(logp)
        derivatives = (dlogp, dentropy, ddivergence)
        plan, stash = ctx.plan, ctx.stash
        if plan.kind is STASH:
            # The gradient overwrites the stash: a second backward recomputes the logits.
            ctx.plan, ctx.stash = replace(plan, name=RECOMPUTE.name), (None, None)
        else:
            # The rows without a gradient need no matmul; their number is read back to the host.
            live = reduce(torch.bitwise_or, [d != 0 for d in derivatives if d is not None])
            index = live_rows(live) if index is None else index[live[index]]
        inputs = BackwardInputs(
            head,
            wanted,
            index,
            Statistics(logp, None if dentropy is None else spread, lse),
            derivatives,
            plan,
            stash,
            ctx.comparison,
            ctx.known,
        )
        routine = plan.kind.backward if head.tiles is None else plan.kind.exact
        assert routine is not None
        gradients = routine(inputs)
        dhidden = gradients.hidden
        if dhidden is not None:
            dhidden = at_rows(dhidden, index, ids.shape[0]).view(ctx.shape)
        return dhidden, gradients.weight, gradients.bias, None, None, None, None, None


def write_at(numbers: Any, at: Index, known: Any, n: int) -> Any:
    """Write the numbers of the rows `at` into `known`, which holds all n rows; None at first."""
    if known is None:
        known = type(numbers)(*(x.new_zeros(n, *x.shape[1:]) for x in numbers))
    for everywhere, x in zip(known, numbers, strict=True):
        everywhere[at] = x
    return known


def at_rows(x: Tensor, index: Tensor | None, n: int) -> Tensor:
    """`x` `[R, …]` as rows `index` of `[n, …]`, the others 0; x itself if it holds all rows."""
    return x if index is None else x.new_zeros(n, *x.shape[1:]).index_copy_(0, index, x)
