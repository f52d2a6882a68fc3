"""`Sequences`: the bounds of sequences, from which every number per sequence is computed.

Tokens are either padded rows `[B, T]` (a row is a sequence) or a pack `[N]` split by `cu_seqlens`
`[S+1]`. With a context-parallel group, each rank holds some tokens of each of the same S sequences,
and an all-reduce adds up the ranks' sums. A layout that is added here works in every loss.

Legend: S sequences, `x` token-shaped (`[B, T]` or `[N]`), `s` one number per sequence (`[S]`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_group, check_like, check_tensor, description
from policyloss.errors import InputError
from policyloss.functional.collectives import all_max, all_sum
from policyloss.functional.exact import arithmetic
from policyloss.functional.masking import accumulator_dtype, can_be_read, count, holds


class _SegmentSum(torch.autograd.Function):
    """`out[i] = x[offsets[i]:offsets[i+1]].sum()`; its adjoint is `_Spread`.

    There are no atomics, so the bits never vary.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return torch.segment_reduce(x, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        offsets, ids = ctx.saved_tensors
        return _Spread.apply(grads[0], offsets, ids), None, None  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    """`out[t] = s[ids[t]]`; its adjoint is `_SegmentSum`.

    (The adjoint of plain indexing is a scatter-add, which uses atomics on a GPU.)
    """

    @staticmethod
    def forward(ctx: Any, s: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, ids)
        return s[ids]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        offsets, ids = ctx.saved_tensors
        return segment_sum(grads[0].contiguous(), offsets, ids), None, None


def segment_sum(x: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """The sum of each segment of `x` `[N]`, differentiable, `[S]`.

    It is taken in float64 and rounded once, because a float32 count on a CPU would stop at 2²⁴. The
    two casts stand outside the autograd function, inside which torch 2.11 compiled them to a wrong
    gradient.
    """
    total: Tensor = _SegmentSum.apply(x.to(accumulator_dtype(x.device)), offsets, ids)  # type: ignore[no-untyped-call]
    return total.to(sum_dtype(x))


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a sum of `x`: int64 for flags and integers (exact counts), else `x.dtype`."""
    return x.dtype if x.is_floating_point() else torch.int64


class _AllReduceSum(torch.autograd.Function):
    """The sum over ranks. Every rank's loss reads it, so the backward sums gradients, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _AllReduceSum.apply(grads[0].contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


def check_cu_seqlens(cu_seqlens: Tensor, tokens: Tensor, called: str = "tokens") -> None:
    """Raise unless `tokens` are packed `[N]` and `cu_seqlens` `[S+1]` rises from 0 to N.

    Values are read only on a CPU (no sync). called: the name of the tokens in errors.
    """
    check_tensor("cu_seqlens", cu_seqlens, "any")
    if tokens.dim() != 1:
        raise InputError(
            f"with cu_seqlens, {called} must be packed [N], got shape {tuple(tokens.shape)}; "
            "squeeze a [1, N] batch first."
        )
    n = tokens.shape[0]
    if cu_seqlens.is_meta != tokens.is_meta:
        raise InputError(
            f"cu_seqlens is on {cu_seqlens.device} and {called} on {tokens.device}; move them to "
            "one device."
        )
    if (
        cu_seqlens.dim() != 1
        or cu_seqlens.numel() < 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
    ):
        raise InputError(
            "cu_seqlens must be a 1-D int32/int64 tensor of S+1 offsets, got shape "
            f"{tuple(cu_seqlens.shape)} and dtype {cu_seqlens.dtype}; for lengths L use "
            "torch.nn.functional.pad(L.cumsum(0), (1, 0))."
        )
    if can_be_read(cu_seqlens) and not holds(_rises(cu_seqlens, n)):
        raise InputError(
            "cu_seqlens must be S+1 offsets that rise from 0 to the number of packed tokens "
            f"({n}), got {cu_seqlens.tolist()[:8]}{'…' if cu_seqlens.numel() > 8 else ''}."
        )


def _rises(cu_seqlens: Tensor, n: int) -> Tensor:
    """Whether offsets rise from 0 to `n`. 0-dim bool."""
    return (cu_seqlens[0] == 0) & (cu_seqlens[-1] == n) & (cu_seqlens.diff() >= 0).all()


@dataclass(frozen=True)
class Sequences:
    """Sums over sequences, and the expansion to tokens, for padded rows and for packs.

    Make one with `Sequences.of(tokens, cu_seqlens, cp_group)`. offsets: `cu_seqlens`. ids: each
    token's sequence index, `[N]`. Both are None for padded rows.
    invalid: None if the offsets were checked. If the check needs a host sync, it is deferred, and
    invalid is a tensor: 1 if the offsets are wrong, else 0. Wrong offsets are replaced, so that no
    index is out of range: the first sequence then holds all tokens.
    """

    shape: tuple[int, ...]
    offsets: Tensor | None = None
    ids: Tensor | None = None
    cp_group: Any = None
    invalid: Tensor | None = None

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        cp_group: Any = None,
        called: str = "tokens",
    ) -> Sequences:
        """The layout of tokens, `[B, T]` or `[N]` with `cu_seqlens`. called: its name in errors."""
        check_group("cp_group", cp_group)
        check_tensor(called, tokens)
        if cu_seqlens is None:
            if tokens.dim() != 2:
                raise InputError(
                    f"expected padded tokens [B, T] in {called}, got shape {tuple(tokens.shape)}; "
                    "for packed tokens [N] pass cu_seqlens=."
                )
            return cls(tuple(tokens.shape), cp_group=cp_group)
        check_cu_seqlens(cu_seqlens, tokens, called)
        n = tokens.shape[0]
        offsets, invalid = cu_seqlens.to(tokens.device), None
        if not can_be_read(cu_seqlens):
            right = _rises(offsets, n)
            in_one = torch.nn.functional.pad(offsets.new_full((offsets.shape[0] - 1,), n), (1, 0))
            offsets, invalid = torch.where(right, offsets, in_one), count(~right)
        # The sequence of each token. (Given n, nothing is read back to the host.)
        ids = torch.repeat_interleave(offsets.diff().to(torch.int64), output_size=n)
        return cls(tuple(tokens.shape), offsets, ids, cp_group, invalid)

    @property
    def count(self) -> int:
        """S, the number of sequences (empty ones included)."""
        return self.shape[0] if self.offsets is None else self.offsets.shape[0] - 1

    def with_clear_shape(self, x: Tensor, called: str) -> Tensor:
        """`x`, one number per token or per sequence, in a shape that is not ambiguous.

        If a pack has as many tokens as sequences, `[N]` and `[S]` are the same shape. If every
        sequence has one token, both meanings agree, and `x` becomes `[1, N]`. Otherwise, or if the
        lengths cannot be read without a host sync, it is an error.
        With a context-parallel group, N is the size of a shard and differs between ranks; an error
        on some ranks alone would leave the others waiting. So a 1-D `x` of a pack is then always
        one number per token; one per sequence must be `[S, 1]`.
        """
        n = self.shape[0]
        if self.offsets is None or x.dim() != 1:
            return x
        ways = (
            f"{called}.unsqueeze(1), shape ({self.count}, 1), is one per sequence; "
            f"{called}.unsqueeze(0), shape (1, {n}), is one per token."
        )
        if self.cp_group is not None:
            if x.shape[0] == self.count != n:
                raise InputError(
                    f"{called} has shape ({self.count},), one per sequence, but with cp_group the "
                    f"1-D numbers of a pack are one per token, ({n},). Say which: {ways}"
                )
            return x.unsqueeze(0) if x.shape[0] == n else x
        if x.shape[0] != n or self.count != n:
            return x
        if n and not (can_be_read(self.offsets) and holds((self.offsets.diff() == 1).all())):
            raise InputError(
                f"{called} has shape ({n},), which may mean one per token or one per sequence: "
                f"this pack has {n} of both. Say which: {ways}"
            )
        return x.unsqueeze(0)

    def sum(self, x: Tensor) -> Tensor:
        """Per-sequence sums of `x`, over all ranks of the context-parallel group.

        `x` `[B, T]` or `[N]` → `[S]`. The sums of flags and integers are exact int64 counts.
        """
        return arithmetic().sequence_sum(x, self)

    def sums(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """`sum` of each of `xs`; with a context-parallel group, in one all-reduce for all."""
        return arithmetic().sequence_sums(xs, self)

    def sum_here(self, x: Tensor) -> Tensor:
        """Per-sequence sums of this rank's tokens, by torch's own sum even within `exact()`."""
        if self.offsets is None or self.ids is None:
            return x.sum(dim=-1, dtype=sum_dtype(x))
        return segment_sum(x.reshape(-1), self.offsets, self.ids)

    def across(self, s: Tensor) -> Tensor:
        """`s` summed over the ranks of the context-parallel group, with its gradient."""
        if self.cp_group is None:
            return s
        total: Tensor = _AllReduceSum.apply(s, self.cp_group)  # type: ignore[no-untyped-call]
        return total

    def max(self, x: Tensor) -> Tensor:
        """Per-sequence maxima `[S]` of `x`, −inf for an empty sequence. Not differentiable."""
        x = x.detach()
        if self.offsets is None:
            s = x.amax(dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))
        else:
            how: Any = {"offsets": self.offsets, "axis": 0, "unsafe": True}
            s = torch.segment_reduce(x.reshape(-1), "max", **how, initial=float("-inf"))
        return s if self.cp_group is None else all_max(s, self.cp_group)

    def expand(self, s: Tensor) -> Tensor:
        """Copy each sequence's number to its tokens. `[S]` → `[B, T]` or `[N]`."""
        return arithmetic().expand(s, self) if s.requires_grad else self.spread(s)

    def spread(self, s: Tensor) -> Tensor:
        """`expand`, but its backward uses torch's own sum even within `exact()`."""
        if self.offsets is None or self.ids is None:
            return s.unsqueeze(-1).expand(self.shape)
        spread: Tensor = _Spread.apply(s, self.offsets, self.ids)  # type: ignore[no-untyped-call]
        return spread.view(self.shape)

    def runs(self, mask: Tensor) -> Sequences:
        """The same tokens of this rank, split into the contiguous runs of `mask` (turns).

        A masked token belongs to the run before it; set it to 0 in sums. There are at most as
        many runs as tokens, so the shapes do not depend on the data and nothing is read back to the
        host; unused runs are empty.
        """
        flat = mask.reshape(-1)
        n = flat.shape[0]
        before = torch.nn.functional.pad(flat[:-1], (1, 0))
        if self.offsets is None or self.ids is None:
            first = torch.arange(n, device=flat.device) % max(self.shape[-1], 1) == 0
        else:
            first = torch.nn.functional.pad(self.ids.diff() != 0, (1, 0), value=True)[:n]
        ids = ((flat & (first | ~before)).to(torch.int64).cumsum(0) - 1).clamp(min=0)
        runs = torch.arange(n + 1, device=flat.device, dtype=torch.int64)
        return Sequences(self.shape, torch.searchsorted(ids, runs), ids)


def group_index(group_ids: Tensor) -> tuple[Tensor, Sequences]:
    """Sort order `[S]` of equal ids (any integers), and a `Sequences` over `ids[order]`."""
    ordered, order = torch.sort(group_ids, stable=True)
    n = ordered.shape[0]
    dense = torch.nn.functional.pad((ordered.diff() != 0).to(torch.int64), (1, 0))[:n].cumsum(0)
    offsets = torch.searchsorted(dense, torch.arange(n + 1, device=dense.device, dtype=torch.int64))
    return order, Sequences((n,), offsets, dense)


def group_sum(x: Tensor, group_ids: Tensor) -> Tensor:
    """For each element, the sum of `x` over the elements with the same id. `[S]`, `[S]` → `[S]`."""
    check_tensor("x", x)
    check_like("group_ids", group_ids, ("x", x), "integer")
    if x.dim() != 1:
        raise InputError(f"x must be one number per element, [S], got {description(x)}.")
    order, groups = group_index(group_ids)
    total = groups.expand(groups.sum(x[order]))
    return torch.empty_like(total).scatter(0, order, total)
