"""`Tokens`: what a slot of the pipeline may read — every tensor of one call, upcast, detached and masked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.functional.context_parallel import checked_positions
from policyloss.functional.masking import bound, compute_dtype, difference, fill
from policyloss.functional.ratio import LogClamp
from policyloss.functional.segments import Sequences

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


def _token_shaped(name: str, x: Any, like: Tensor, called: str) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(x).__name__}.")
    if x.shape != like.shape:
        raise InputError(f"{name} has shape {tuple(x.shape)} but {called} has {tuple(like.shape)}; they must be equal.")


def as_mask(mask: Tensor, like: Tensor) -> Tensor:
    """`mask` as bool, checked: the shape of `like`, and 0/1 if it is not bool (values are read only on a CPU)."""
    if not isinstance(mask, Tensor):
        raise InputError(f"mask must be a tensor, got {type(mask).__name__}.")
    if mask.shape != like.shape:
        raise InputError(f"mask has shape {tuple(mask.shape)} but the tokens have {tuple(like.shape)}; give one entry per token.")
    if mask.dtype == torch.bool:
        return mask
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        try:
            torch._assert_async(torch.count_nonzero(mask * (1 - mask)) == 0)
        except RuntimeError:
            raise InputError(
                "mask must be bool or hold only 0 and 1 (1 = train on this token); to weight tokens, scale the advantages."
            ) from None
    return mask != 0


def check_group_ids(group_ids: Any, sequences: Sequences) -> None:
    """Raise unless `group_ids` is one integer per sequence."""
    if not isinstance(group_ids, Tensor) or group_ids.is_floating_point() or tuple(group_ids.shape) != (sequences.count,):
        kind = isinstance(group_ids, Tensor)
        seen = f"shape {tuple(group_ids.shape)} and dtype {group_ids.dtype}" if kind else type(group_ids).__name__
        raise InputError(f"group_ids must be a tensor of one integer per sequence, ({sequences.count},), got {seen}.")


def expand_advantages(advantages: Tensor, sequences: Sequences, called: str = "advantages") -> Tensor:
    """Advantages as one number per token: accepts token-shaped, or one per sequence (`[S]`, `[S, 1]`)."""
    shape = sequences.shape
    if tuple(advantages.shape) == shape:
        return advantages
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
    known_lengths: Tensor | None = None

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
        if not isinstance(logp, Tensor) or not logp.is_floating_point():
            kind = f"dtype {logp.dtype}" if isinstance(logp, Tensor) else type(logp).__name__
            raise InputError(f"{called[0]} must be a floating-point tensor, got {kind}.")
        sequences = Sequences.of(logp, cu_seqlens, cp_group)
        mask = as_mask(mask, logp)
        for name, x in others.items():
            if x is not None:
                _token_shaped(name, x, logp, called[0])
        dtype = compute_dtype(logp, *(others.get(name) for name in LOGP_ARGUMENTS.values()))
        # Upcast once, here: several slots may read logp, and their gradients must add up before they are rounded to half precision.
        raw: dict[str, Tensor | None] = {"logp": logp.to(dtype)}
        for name, x in others.items():
            raw[name] = x if x is None or name == "entropy" else x.detach()
        if not isinstance(advantages, Tensor):
            raise InputError(f"{called[1]} must be a tensor, got {type(advantages).__name__}.")
        if group_ids is not None and tuple(group_ids.shape) != (sequences.count,):
            raise InputError(f"group_ids has shape {tuple(group_ids.shape)}; give one integer per sequence, ({sequences.count},).")
        return cls(
            mask=mask,
            sequences=sequences,
            advantages=fill(expand_advantages(advantages.detach(), sequences, called[1]), mask, dtype),
            dtype=dtype,
            raw=raw,
            group_ids=group_ids,
            positions=None if positions is None else checked_positions(positions, logp, "this loss"),
        )

    def with_mask(self, mask: Tensor) -> Tokens:
        """The same call with fewer tokens: as if `mask` had been given."""
        return replace(self, mask=mask, advantages=fill(self.advantages, mask), known_lengths=None)

    @property
    def lengths(self) -> Tensor:
        """Valid tokens of each sequence `[S]`, counted when first asked for: with context parallel that is an all-reduce."""
        if self.known_lengths is None:
            self.known_lengths = self.sequences.sum(self.mask.to(self.dtype))
        return self.known_lengths

    def read(self, name: str) -> Tensor:
        """The tensor argument `name`, or an error that says which argument is missing."""
        x = self.raw.get(name)
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
        if self.known_lengths is not None:
            return self.sequences.sum(x) / self.known_lengths.clamp(min=1)
        total, lengths = self.sequences.sums(x, self.mask.to(self.dtype))
        self.known_lengths = lengths.detach()  # in one all-reduce with the sum, whose gradient is not theirs
        return total / self.known_lengths.clamp(min=1)
