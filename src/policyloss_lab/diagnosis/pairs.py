"""The input of a diagnosis: each valid token's log-probabilities by engine and by trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import check_like, check_tensor
from policyloss.errors import InputError

LEAST_TOKENS = 16  # with fewer, a verdict would be a guess
QUIET = 0.02  # the least shape: even a certain token has some noise
POSITIVE = 1e-3  # values above this are not log-probabilities; half precision may round up to 0


def noise_shape(logp: Tensor) -> Tensor:
    """`max(1 - p, 0.02)` of each token, the relative size of noise: an error in the logits
    hardly changes the log-probability of a likely token.
    """
    return (-torch.expm1(logp)).clamp(min=QUIET)


@dataclass(frozen=True)
class Pairs:
    """The valid tokens of a batch, flat, in the order of rows. `[n]` each, on the CPU.

    row, column: the indices of a token in the batch. ids, earlier (logp of older weights): None
    unless passed. impossible: the number of valid tokens with a `rollout_logp` of −inf, which are
    left out. twins: the number of different values that both sides share outside of the mask.
    """

    rollout: Tensor
    trainer: Tensor
    row: Tensor
    column: Tensor
    ids: Tensor | None = None
    earlier: Tensor | None = None
    impossible: int = 0
    twins: int = 0

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.trainer.numel()

    @property
    def difference(self) -> Tensor:
        """`d = rollout_logp - old_logp`."""
        return self.rollout - self.trainer

    @property
    def shape(self) -> Tensor:
        """The relative size of noise at each token."""
        return noise_shape(self.trainer)

    @property
    def starts(self) -> Tensor:
        """The index of the first token of each nonempty row, followed by n."""
        new = torch.ones(self.size, dtype=torch.bool)
        new[1:] = self.row[1:] != self.row[:-1]
        return torch.cat([new.nonzero().flatten(), torch.tensor([self.size])])

    @property
    def rank(self) -> Tensor:
        """The number of valid tokens before each token in its row."""
        starts = self.starts
        return torch.arange(self.size) - torch.repeat_interleave(starts[:-1], starts.diff())

    @property
    def remaining(self) -> Tensor:
        """The number of valid tokens after each token in its row."""
        starts = self.starts
        return torch.repeat_interleave(starts[1:], starts.diff()) - torch.arange(self.size) - 1

    def select(self, chosen: Tensor) -> Pairs:
        """Some of the tokens, by index or by flag."""
        tensors: dict[str, Any] = {
            name: x[chosen] for name, x in vars(self).items() if isinstance(x, Tensor)
        }
        return replace(self, **tensors)


def read_pairs(
    rollout_logp: Any,
    trainer_logp: Any,
    mask: Any,
    *,
    trainer_name: str = "old_logp",
    ids: Any = None,
    earlier: Any = None,
    cu_seqlens: Any = None,
) -> Pairs:
    """The valid tokens of padded `[B, T]` or packed `[N]` tensors (with `cu_seqlens`), checked."""
    check_tensor("rollout_logp", rollout_logp, "float")
    like = ("rollout_logp", rollout_logp)
    check_like(trainer_name, trainer_logp, like, "float")
    if earlier is not None:
        check_like("earlier_logp", earlier, like, "float")
    if ids is not None:
        check_like("ids", ids, like, "integer")
    mask = torch.ones_like(rollout_logp, dtype=torch.bool) if mask is None else mask
    check_like("mask", mask, like)
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise InputError("mask has values other than 0 and 1; pass True where a token counts.")
    row, column = _places(rollout_logp, cu_seqlens)
    valid = mask.bool().flatten().cpu()
    rollout, trainer = (x.detach().flatten().cpu().double() for x in (rollout_logp, trainer_logp))
    twins = (rollout == trainer) & (rollout != 0) & ~valid
    pairs = Pairs(
        rollout[valid],
        trainer[valid],
        row.flatten()[valid],
        column.flatten()[valid],
        None if ids is None else ids.flatten().cpu()[valid],
        None if earlier is None else earlier.detach().flatten().cpu().double()[valid],
        twins=int(torch.unique(rollout[twins]).numel()),
    )
    return _finite(pairs, trainer_name)


def _places(x: Tensor, cu_seqlens: Any) -> tuple[Tensor, Tensor]:
    """The row and the column of each token."""
    if x.dim() == 2 and cu_seqlens is None:
        row, column = (torch.arange(n) for n in x.shape)
        return row[:, None].expand(x.shape), column.expand(x.shape)
    if x.dim() != 1:
        raise InputError(
            f"rollout_logp must be [B, T], or [N] with cu_seqlens, got shape {tuple(x.shape)}."
        )
    bounds = torch.tensor([0, x.numel()]) if cu_seqlens is None else cu_seqlens
    check_tensor("cu_seqlens", bounds, "integer")
    bounds = bounds.cpu().long()
    lengths = bounds.diff()
    if bounds.dim() != 1 or bounds[0] != 0 or bounds[-1] != x.numel() or (lengths < 0).any():
        raise InputError(f"cu_seqlens must rise from 0 to {x.numel()}, the number of tokens.")
    row = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    return row, torch.arange(x.numel()) - bounds[:-1][row]


def _finite(pairs: Pairs, trainer_name: str) -> Pairs:
    """The pairs without impossible tokens; an error for invalid numbers or too few tokens."""
    if pairs.size == 0:
        raise InputError("mask has no valid token; there is nothing to diagnose.")
    for name, x in (("rollout_logp", pairs.rollout), (trainer_name, pairs.trainer)):
        wrong = x.isnan() | (x == torch.inf)
        if name == trainer_name:
            wrong |= x == -torch.inf
        if wrong.any():
            raise InputError(
                f"{name} is NaN or infinite at {int(wrong.sum())} of {pairs.size} valid tokens, "
                f"{_where(pairs, wrong)}; leave them out of the mask, or fix the code that writes "
                "them."
            )
        if (x > POSITIVE).double().mean() > 0.5:
            raise InputError(
                f"{name} is above 0 at most valid tokens, so it holds no log-probabilities; pass "
                "log-probabilities, not losses or probabilities."
            )
    possible = pairs.rollout != -torch.inf
    kept = replace(pairs.select(possible), impossible=int((~possible).sum()))
    if kept.size < LEAST_TOKENS:
        raise InputError(
            f"{kept.size} valid tokens are too few for a verdict; pass at least {LEAST_TOKENS}, "
            "better some hundred."
        )
    return kept


def _where(pairs: Pairs, wrong: Tensor) -> str:
    if not (wrong & (pairs.rank > 0)).any():
        return "all of them the first of their row"
    if not (wrong & (pairs.remaining > 0)).any():
        return "all of them the last of their row"
    first = int(wrong.nonzero()[0])
    return f"the first in row {int(pairs.row[first])}, column {int(pairs.column[first])}"
