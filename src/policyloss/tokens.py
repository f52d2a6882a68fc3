"""`Tokens`: what a slot of the pipeline may read — every tensor of one call, upcast, detached and masked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from policyloss.arguments import check_like, check_tensor, fits_kind, seen
from policyloss.errors import InputError
from policyloss.functional.context_parallel import checked_positions
from policyloss.functional.masking import bound, can_be_read, compute_dtype, difference, fill, holds
from policyloss.functional.ratio import LogClamp
from policyloss.functional.segments import Sequences
from policyloss.functional.stats import neither_0_nor_1

if TYPE_CHECKING:
    from policyloss.totals import Totals

# Which policy a log-probability comes from, and the argument that carries it.
LOGP_ARGUMENTS = {"old": "old_logp", "rollout": "rollout_logp", "ref": "ref_logp"}


class NeedsStatistics(Protocol):
    """A slot whose numbers depend on the whole batch, not on its own token or sequence (see `measure`)."""

    statistics_names: ClassVar[tuple[str, ...]]

    def statistics(self, t: Tokens, group: Any = None) -> dict[str, Tensor]:
        """Measure `t`, a whole step, over the ranks of `group`."""
        ...


def as_mask(mask: Tensor, like: Tensor, called: str = "mask", like_called: str = "tokens") -> Tensor:
    """`mask` as bool, checked: the shape of `like`, and 0/1 if it is not bool (values are read only
    on a CPU).
    """
    return checked_mask(mask, like, called, like_called)[0]


def checked_mask(mask: Tensor, like: Tensor, called: str = "mask", like_called: str = "tokens") -> tuple[Tensor, Tensor | None]:
    """`as_mask`, and how many values are neither 0 nor 1 if they may not be read here; None if they
    were, or need not be.
    """
    check_tensor(called, mask, like=(like_called, like))
    if mask.shape != like.shape:
        raise InputError(f"{called} has shape {tuple(mask.shape)} but {like_called} {tuple(like.shape)}; give one entry per token.")
    if mask.dtype == torch.bool:
        return mask, None
    invalid = neither_0_nor_1(mask)
    if not can_be_read(mask):
        return mask != 0, invalid
    if not holds(invalid == 0):
        raise InputError(
            f"{called} must be bool or hold only 0 and 1 (1 = train on this token); to weight tokens, scale the advantages."
        )
    return mask != 0, None


def check_group_ids(group_ids: Any, sequences: Sequences) -> None:
    """Raise unless `group_ids` is one integer per sequence."""
    check_tensor("group_ids", group_ids, "any")
    if not fits_kind(group_ids, "integer") or tuple(group_ids.shape) != (sequences.count,):
        raise InputError(f"group_ids must be a tensor of one integer per sequence, ({sequences.count},), got {seen(group_ids)}.")


def expand_advantages(advantages: Tensor, sequences: Sequences, called: str = "advantages") -> Tensor:
    """Advantages as one number per token: accepts token-shaped (packed also `[1, N]`), or one per
    sequence (`[S]`, `[S, 1]`).
    """
    check_tensor(called, advantages)
    advantages = sequences.with_clear_shape(advantages, called)
    shape = sequences.shape
    if tuple(advantages.shape) == shape or (sequences.offsets is not None and tuple(advantages.shape) == (1, *shape)):
        return advantages.reshape(shape)
    per_sequence = (sequences.count,)
    if tuple(advantages.shape) in (per_sequence, (*per_sequence, 1)):
        return sequences.expand(advantages.reshape(per_sequence))
    layout = "packed [N]" if sequences.offsets is not None else "padded [B, T]"
    raise InputError(
        f"{called} has shape {tuple(advantages.shape)}; with {layout} tokens of shape {shape} give one per token {shape} or "
        f"one per sequence {per_sequence}."
    )


@dataclass
class Tokens:
    """The tensors of one `policy_loss` call, ready for arithmetic. Legend: `x` token-shaped, `[S]` one per sequence.

    Every log-probability read through a property is float32 (or float64), 0 where `mask` is False, and detached unless it is
    `logp`. `ratio`, `log_ratio` (the ratio slot's, clamped) and `anchor` are set before the trust region is called; `totals` before
    the aggregation. `known` holds batch-wide numbers measured beforehand, or None. `positions`: each token's place in its whole
    sequence, for parts that depend on the order of tokens where those lie on several ranks.
    `invalid`: counts, by the name of the
    metric that shows them, of values that are certainly wrong but could not be checked without
    waiting for the device.
    """

    mask: Tensor
    sequences: Sequences
    advantages: Tensor
    dtype: torch.dtype
    raw: dict[str, Tensor | None]
    group_ids: Tensor | None = None
    positions: Tensor | None = None
    totals: Totals | None = None
    anchor: str = "old"
    raw_log_ratio: Tensor | None = None
    log_clamp: LogClamp = None
    ratio: Tensor | None = None
    known: dict[str, Tensor] | None = None
    known_counts: Tensor | None = None
    invalid: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        others: dict[str, Tensor | None],
        called: tuple[str, str] = ("logp", "advantages"),
        cu_seqlens: Tensor | None = None,
        group_ids: Tensor | None = None,
        cp_group: Any = None,
        positions: Tensor | None = None,
    ) -> Tokens:
        """Check the arguments against each other and lay them out. `others` are the optional token-shaped tensors by name.

        called: what the caller calls its first two arguments, for error messages.
        """
        check_tensor(called[0], logp, "float")
        sequences = Sequences.of(logp, cu_seqlens, cp_group, called[0])
        mask, invalid_mask = checked_mask(mask, logp, like_called=called[0])
        for name, x in others.items():
            if x is not None:
                check_like(name, x, (called[0], logp))
        dtype = compute_dtype(logp, *(others.get(name) for name in LOGP_ARGUMENTS.values()))
        # Upcast once, here: several slots may read logp, and their gradients must add up before they are rounded to half precision.
        raw: dict[str, Tensor | None] = {"logp": logp.to(dtype)}
        for name, x in others.items():
            raw[name] = x if x is None or name == "entropy" else x.detach()
        check_tensor(called[1], advantages, like=(called[0], logp))
        if group_ids is not None:
            check_group_ids(group_ids, sequences)
            check_tensor("group_ids", group_ids, like=(called[0], logp))
        invalid = {"invalid_mask_values": invalid_mask, "invalid_cu_seqlens": sequences.invalid}
        return cls(
            mask=mask,
            sequences=sequences,
            advantages=fill(expand_advantages(advantages.detach(), sequences, called[1]), mask, dtype),
            dtype=dtype,
            raw=raw,
            group_ids=group_ids,
            positions=None if positions is None else checked_positions(positions, logp, "this loss"),
            invalid={name: x for name, x in invalid.items() if x is not None},
        )

    def with_mask(self, mask: Tensor) -> Tokens:
        """The same call with fewer tokens: as if `mask` had been given."""
        return replace(self, mask=mask, advantages=fill(self.advantages, mask), known_counts=None)

    @property
    def counts(self) -> Tensor:
        """Valid tokens of each sequence `[S]`, exact (int64), counted when first asked for: with context parallel an all-reduce."""
        if self.known_counts is None:
            self.known_counts = self.sequences.sum(self.mask)
        return self.known_counts

    @property
    def lengths(self) -> Tensor:
        """`counts` as numbers to divide by: in the dtype of the loss, rounded once."""
        return self.counts.to(self.dtype)

    def read(self, name: str) -> Tensor:
        """The tensor argument `name`, or an error that says which argument is missing."""
        x = self.raw.get(name)
        if x is None and name == "logp":  # left out by the head alone, while the log-probabilities are not computed
            raise InputError(
                "a part that says reads_logp = False read logp: leave that attribute out, so that the head computes the "
                "log-probabilities before it asks that part."
            )
        if x is None:
            raise InputError(f"this loss reads {name}, which was not given; pass {name}= to policy_loss.")
        return x

    @property
    def logp(self) -> Tensor:
        """The current policy's log-probability; carries the gradient."""
        return fill(self.read("logp"), self.mask, self.dtype)

    @property
    def log_ratio(self) -> Tensor:
        """The ratio slot's log-ratio within its clamp."""
        if self.raw_log_ratio is None:
            raise InputError(f"this loss reads the ratio to {self.anchor}_logp, which was not given.")
        return bound(self.raw_log_ratio, self.log_clamp)

    @property
    def entropy(self) -> Tensor:
        """The current policy's entropy at each token; may carry a gradient."""
        return fill(self.read("entropy"), self.mask, self.dtype)

    def anchor_logp(self, anchor: str) -> Tensor:
        """The log-probability of a frozen policy: "old", "rollout", "ref", or "current" for `logp` itself, detached."""
        return fill(self._anchor(anchor), self.mask, self.dtype)

    def log_ratio_to(self, anchor: str) -> Tensor:
        """`logp - anchor_logp`, upcast before subtraction, 0 at masked positions."""
        return difference(self.read("logp"), self._anchor(anchor), self.mask, self.dtype)

    def log_weight(self) -> Tensor:
        """`old_logp - rollout_logp`: the trainer against the inference engine, on the same frozen weights."""
        return difference(self.read("old_logp"), self.read("rollout_logp"), self.mask, self.dtype)

    def _anchor(self, anchor: str) -> Tensor:
        return self.read("logp").detach() if anchor == "current" else self.read(LOGP_ARGUMENTS[anchor])

    def batch_statistics(self, slot: NeedsStatistics) -> dict[str, Tensor]:
        """The batch-wide numbers `slot` needs: those measured for the whole step if given, else this call's own."""
        return slot.statistics(self) if self.known is None else self.known

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Mean of `x` over the valid tokens of each sequence (0 for one that has none). Token-shaped → `[S]`.

        `x` must be 0 at masked positions, as everything read from here is.
        """
        if self.known_counts is None:
            total, self.known_counts = self.sequences.sums(x, self.mask)  # in one all-reduce
        else:
            total = self.sequences.sum(x)
        return total / self.lengths.clamp(min=1)
