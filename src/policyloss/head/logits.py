"""`logprobs`: log-probabilities and entropies from computed logits.

The forward reads the logits once, and the backward takes one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.exact import is_exact, stays_eager
from policyloss.functional.masking import compute_dtype
from policyloss.head import validate
from policyloss.head.head import Head, LogProbs, windows
from policyloss.head.matmul import Room
from policyloss.head.softmax_rows import (
    Partials,
    Scaling,
    Statistics,
    row_gradient,
    row_partials,
    row_statistics,
)
from policyloss.head.support import Support, SupportArgument
from policyloss.head.tiles import Tiles
from policyloss.head.vocab_parallel import Vocabulary

COPY_BYTES = 256 << 20  # of logits that are restricted to a support at a time


@stays_eager
def logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    *,
    mask: Tensor | None = None,
    softcap: float | None = None,
    overwrite_logits: bool = False,
    support: SupportArgument | None = None,
) -> LogProbs:
    """Log-probability of each token under `softmax(logits / temperature)`, and the entropy.

    `log_softmax(logits.float() / temperature, -1).gather(-1, ids)` with float32 statistics, reading
    the logits once. The gradient reaches the logits, through the log-probabilities and through the
    entropy.

    logits: `[..., V]`. ids, mask: `[...]`. temperature: a number, or one per token `[...]`. mask:
    where it is False, logp, entropy and gradient are 0, and logits and ids may hold any values.
    softcap: logits are `softcap·tanh(logits/softcap)` before the temperature.
    overwrite_logits: if True, the backward writes the gradient into the memory of the logits; do
    not use the logits afterwards. support: `(ids, offsets)`, the vocabulary entries that the
    sampler kept at each token, as in `linear_logprobs`.
    Returns `LogProbs(logp, entropy)`, `[...]` each, float32 (float64 for float64); entropy is None
    without `entropy=True`.
    """
    validate.check_logits(logits)
    if hasattr(logits, "full_tensor"):
        raise InputError(
            "logits is a DTensor; pass logits.full_tensor(), or use linear_logprobs with "
            "vocab_group=."
        )
    steps = zip(logits.stride(), logits.shape, strict=True)
    if overwrite_logits and any(step == 0 and size > 1 for step, size in steps):
        raise InputError(
            "overwrite_logits needs a place for each gradient, but logits is expanded; pass "
            "logits.contiguous()."
        )
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    tokens = tuple(logits.shape[:-1])
    validate.check_ids(ids, "logits", logits)
    validate.check_softcap(softcap)
    valid = validate.check_mask(mask, ids)
    rate = validate.inverse_temperature(temperature, tokens, logits)
    vocabulary = Vocabulary(logits.shape[-1], logits.shape[-1])
    flat, kept = ids.reshape(-1).to(torch.int64), Support.of(support, ids)
    # The check of values reads ids and temperatures from a head.
    head = Head(logits, logits, flat, None, rate, softcap, vocabulary, kept)
    scaling = head.scaling(slice(None))
    moment = torch.cuda.current_stream(logits.device).record_event() if logits.is_cuda else None
    outputs = _Logprobs.apply(logits, flat, valid, scaling, kept, entropy, overwrite_logits)  # type: ignore[no-untyped-call]
    # Check the values after the launch, so that the device has work, and on another stream, so that
    # the host need not wait for that work.
    with validate.side_stream(moment, logits.device):
        read = validate.read_later(validate.value_summary(head, valid))
    validate.refuse_values(read(), head, valid)
    return LogProbs(outputs[0].view(tokens), outputs[1].view(tokens) if entropy else None)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        valid: Tensor | None,
        scaling: Scaling,
        support: Support | None,
        entropy: bool,
        overwrite: bool,
    ) -> tuple[Tensor, Tensor | None]:
        parts = [
            row_statistics(_partials(z, ids[at], scaling.of_rows(at), entropy))
            for z, at, _ in _restricted_matrices(logits, support)
        ]
        logp, lse = _concatenate([p.logp for p in parts]), _concatenate([p.lse for p in parts])
        spreads = [p.entropy for p in parts if p.entropy is not None]
        spread = _concatenate(spreads) if entropy else None
        logp, spread = _at_valid(logp, valid), _at_valid(spread, valid)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, ids, valid, logp, lse, spread)
        ctx.scaling, ctx.support, ctx.overwrite = scaling, support, overwrite
        return logp, spread

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, ids, valid, logp, lse, spread = ctx.saved_tensors
        dlogp, dentropy = grads
        dlogp = torch.zeros_like(lse) if dlogp is None else dlogp
        dlogp, dentropy = _at_valid(dlogp, valid), _at_valid(dentropy, valid)
        out = logits
        if not ctx.overwrite:
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for z, at, home in _restricted_matrices(logits, ctx.support):
            dz = home if ctx.overwrite else out.view(-1, out.shape[-1])[at]
            s = Statistics(logp[at], None if spread is None else spread[at], lse[at])
            of_entropy = None if dentropy is None else dentropy[at]
            row_gradient(z, dz, ids[at], s, dlogp[at], of_entropy, ctx.scaling.of_rows(at))
        if ctx.overwrite:
            # Autograd does not notice the writes of a kernel. With a new version, another backward
            # that saved these logits fails instead of reading them.
            torch.autograd.graph.increment_version(logits)
        return out, None, None, None, None, None, None


def _partials(z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool) -> Partials:
    """`row_partials`; in the exact mode, with the head's order of sums."""
    if not is_exact():
        return row_partials(z, ids, scaling, entropy)
    vocabulary = Vocabulary(z.shape[1], z.shape[1])
    tiles = Tiles.of_vocabulary(vocabulary, z.t())
    cuts = [slice(None)]
    aligned = (z.stride(0) * z.element_size()) % 16 == 0 == z.data_ptr() % 16
    if z.is_cuda and not aligned:
        # A kernel is compiled for the alignment of rows, and one for another sums in another order.
        cuts = windows(z.shape[0], max(1, COPY_BYTES // (z.shape[1] * z.element_size())))
    parts = []
    for cut in cuts:
        rows = z[cut]
        if z.is_cuda and not aligned:
            rows = Room(rows.shape[0], rows.shape[1], z, z.dtype).logits(*rows.shape).copy_(rows)
        parts.append(tiles.partials(rows, ids[cut], scaling.of_rows(cut), entropy))
    return tiles.merge(torch.cat(parts, -1), ids, vocabulary)


def _at_valid(x: Any, valid: Tensor | None) -> Any:
    """`x` with 0 at masked tokens; None for None."""
    return x if x is None or valid is None else torch.where(valid, x, 0)


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _restricted_matrices(
    logits: Tensor, support: Support | None
) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """The matrices of `logits`, each with its slice of all rows, and the part of `logits` it shows.

    With a support, the matrices are copies of some rows, without the entries outside the support.
    """
    if support is None:
        for z, at in _matrices(logits):
            yield z, at, z
        return
    dtype = compute_dtype(logits)
    rows = max(1, COPY_BYTES // (logits.shape[-1] * dtype.itemsize))
    for matrix, place in _matrices(logits):
        for part in windows(matrix.shape[0], rows) or [slice(0, 0)]:
            z = matrix[part].to(dtype, copy=True)
            at = slice(place.start + part.start, place.start + part.stop)
            support.of_rows(at, 0).restrict(z)
            yield z, at, matrix[part]


def _matrices(x: Tensor, first: int = 0) -> Iterator[tuple[Tensor, slice]]:
    """`x` `[..., V]` as matrices `[R, V]` that share its memory, each with its slice of all rows.

    One matrix where the layout allows it; a slice like `logits[:, :-1]` is one per leading index,
    never a copy.
    """
    if x.dim() == 2:
        yield x, slice(first, first + x.shape[0])
        return
    try:
        yield from _matrices(x.view(-1, x.shape[-1]), first)
    except RuntimeError:  # no single stride leads from row to row
        for part in x.unbind():
            yield from _matrices(part, first)
            first += math.prod(part.shape[:-1])
