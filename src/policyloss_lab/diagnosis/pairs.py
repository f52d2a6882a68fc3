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

    row, column: the indices of a token in the batch. ids, entropy, later (logp after the
    update), earlier (of older weights): None unless passed. impossible: the number of valid tokens
    with a `rollout_logp` of −inf, which are left out. twins: the number of different values that
    both sides share at tokens outside of the mask.
    """

    rollout: Tensor
    trainer: Tensor
    row: Tensor
    column: Tensor
    ids: Tensor | None = None
    entropy: Tensor | None = None
    later: Tensor | None = None
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
        rest = {
            name: x[chosen]
            for name in ("ids", "entropy", "later", "earlier")
            if (x := getattr(self, name)) is not None
        }
        return replace(
            self,
            rollout=self.rollout[chosen],
            trainer=self.trainer[chosen],
            row=self.row[chosen],
            column=self.column[chosen],
            **rest,
        )


def read_pairs(
    rollout_logp: Any,
    trainer_logp: Any,
    mask: Any,
    *,
    trainer_name: str = "old_logp",
    ids: Any = None,
    entropy: Any = None,
    later: Any = None,
    earlier: Any = None,
    cu_seqlens: Any = None,
) -> Pairs:
    """The valid tokens of padded `[B, T]` or packed `[N]` tensors (with `cu_seqlens`), checked."""
    check_tensor("rollout_logp", rollout_logp, "float")
    like = ("rollout_logp", rollout_logp)
    check_like(trainer_name, trainer_logp, like, "float")
    floats = {"entropy": entropy, "logp": later, "earlier_logp": earlier}
    for name, x in {"ids": ids, **floats}.items():
        if x is not None:
            check_like(name, x, like, "float" if name in floats else "integer")
    mask = torch.ones_like(rollout_logp, dtype=torch.bool) if mask is None else mask
    check_like("mask", mask, like)
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise InputError("mask has values other than 0 and 1; pass True where a token counts.")
    row, column = _places(rollout_logp, cu_seqlens)
    valid = mask.bool().flatten().cpu()

    def kept(x: Tensor) -> Tensor:
        return x.detach().flatten().cpu()[valid]

    pairs = Pairs(
        kept(rollout_logp).double(),
        kept(trainer_logp).double(),
        row.flatten()[valid],
        column.flatten()[valid],
        None if ids is None else kept(ids),
        None if entropy is None else kept(entropy).double(),
        None if later is None else kept(later).double(),
        None if earlier is None else kept(earlier).double(),
        twins=_twins(rollout_logp.detach().flatten().cpu()[~valid], trainer_logp, ~valid),
    )
    return _finite(pairs, trainer_name)


def _places(x: Tensor, cu_seqlens: Any) -> tuple[Tensor, Tensor]:
    if x.dim() == 2 and cu_seqlens is None:
        rows, columns = x.shape
        return (
            torch.arange(rows)[:, None].expand(rows, columns),
            torch.arange(columns)[None].expand(rows, columns),
        )
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
    """The pairs without impossible tokens; an error for other invalid numbers and for too few
    tokens.
    """
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


def _twins(rollout: Tensor, trainer: Tensor, outside: Tensor) -> int:
    """The number of different values, not 0, that both sides hold at the same tokens outside."""
    equal = (rollout == trainer.detach().flatten().cpu()[outside]) & (rollout != 0)
    return int(torch.unique(rollout[equal]).numel())


def on_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A flag for each number that a 16-bit type holds exactly."""
    return x.to(dtype).double() == x
