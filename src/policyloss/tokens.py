"""`Layout`: which tokens of a call count, and which sequence each token belongs to.

`Tokens`: a layout, and every tensor of a policy loss that a part may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_like, check_tensor, description, fits_kind, is_compiling
from policyloss.errors import InputError
from policyloss.functional.aggregate import weighted_sum
from policyloss.functional.context_parallel import checked_positions
from policyloss.functional.masking import (
    LogClamp,
    bound,
    can_be_read,
    compute_dtype,
    count,
    difference,
    fill,
    holds,
    shared_zero,
)
from policyloss.functional.segments import Sequences, group_index

if TYPE_CHECKING:
    from typing_extensions import Self  # part of typing since Python 3.11

    from policyloss.totals import Totals

# The argument that holds the log-probabilities of each policy.
LOGP_ARGUMENTS = {
    "old": "old_logp",
    "rollout": "rollout_logp",
    "ref": "ref_logp",
    "teacher": "teacher_logp",
}


def as_mask(
    mask: Tensor, like: Tensor, called: str = "mask", like_called: str = "tokens"
) -> Tensor:
    """`mask` as bool, checked: the shape of `like`, and 0/1 (values are read only on a CPU)."""
    return checked_mask(mask, like, called, like_called)[0]


def checked_mask(
    mask: Tensor, like: Tensor, called: str = "mask", like_called: str = "tokens"
) -> tuple[Tensor, Tensor | None]:
    """`as_mask`, and the number of values other than 0 and 1 if the host cannot check them."""
    check_tensor(called, mask, like=(like_called, like))
    if mask.shape != like.shape:
        raise InputError(
            f"{called} has shape {tuple(mask.shape)} but {like_called} {tuple(like.shape)}; give "
            "one entry per token."
        )
    if mask.dtype == torch.bool:
        return mask, None
    invalid = count(mask * (1 - mask) != 0)  # m·(1 − m) is 0 only at 0 and 1
    if not can_be_read(mask):
        return mask != 0, invalid
    if not holds(invalid == 0):
        raise InputError(
            f"{called} must be bool or hold only 0 and 1 (1 = train on this token); to weight "
            "tokens, pass weights=."
        )
    return mask != 0, None


def check_group_ids(group_ids: Any, sequences: Sequences) -> None:
    """Raise unless `group_ids` is one integer per sequence."""
    check_tensor("group_ids", group_ids, "any")
    if not fits_kind(group_ids, "integer") or tuple(group_ids.shape) != (sequences.count,):
        raise InputError(
            f"group_ids must be a tensor of one integer per sequence, ({sequences.count},), got "
            f"{description(group_ids)}."
        )


def expand_advantages(
    advantages: Any,
    sequences: Sequences,
    called: str = "advantages",
    like: tuple[str, Tensor] | None = None,
) -> Tensor:
    """Advantages per token, from token-shaped, `[1, N]`, or one per sequence `[S]`, `[S, 1]`.

    The result is detached. called: the name of the advantages in errors. like: the name and tensor
    of an argument; advantages must be on its device.
    """
    check_tensor(called, advantages, like=like)
    clear: Tensor = sequences.with_clear_shape(advantages.detach(), called)
    shape = sequences.shape
    if tuple(clear.shape) == shape or (
        sequences.offsets is not None and tuple(clear.shape) == (1, *shape)
    ):
        return clear.reshape(shape)
    per_sequence = (sequences.count,)
    if tuple(clear.shape) in (per_sequence, (*per_sequence, 1)):
        return sequences.spread(clear.reshape(per_sequence))
    layout = "packed [N]" if sequences.offsets is not None else "padded [B, T]"
    raise InputError(
        f"{called} has shape {tuple(clear.shape)}; with {layout} tokens of shape {shape} give "
        f"one per token {shape} or one per sequence {per_sequence}."
    )


def token_weights(
    weights: Any,
    layout: dict[str, Any],
    dtype: torch.dtype,
    zero: Tensor | float,
    like: tuple[str, Tensor],
) -> Tensor | None:
    """`weights` per token, 0 where masked; None without weights. A negative weight is an error, or
    is counted among the invalid values of `layout` if reading it would wait for the device.
    """
    if weights is None:
        return None
    expanded = expand_advantages(weights, layout["sequences"], "weights", like)
    expanded = fill(expanded, layout["mask"], dtype, zero)
    message = (
        "weights must not be negative: they scale the loss of a token, KL and entropy included; "
        "the sign of a token's policy term belongs to its advantage."
    )
    _refuse(layout["invalid"], "negative_weights", count(expanded < 0), message)
    return expanded


def check_ages(ages: Any, layout: dict[str, Any], like: tuple[str, Tensor]) -> None:
    """Raise unless `ages` are token-shaped integers, none of them negative at a valid token."""
    check_like("ages", ages, like, "integer", "give one age per token")
    message = (
        "ages must not be negative where mask is True: an age is the version of the current "
        "weights minus that of the weights that sampled the token."
    )
    _refuse(layout["invalid"], "negative_ages", count(layout["mask"] & (ages < 0)), message)


def _refuse(invalid: dict[str, Tensor], name: str, number: Tensor, message: str) -> None:
    """Raise unless `number` is 0; if reading it would wait for the device, keep it in `invalid`."""
    if not can_be_read(number):
        invalid[name] = number
    elif not holds(number == 0):
        raise InputError(message)


@dataclass(kw_only=True)
class Layout:
    """The layout of a call: which tokens count, and which sequence each belongs to.

    Legend: `x` token-shaped (`[B, T]` or packed `[N]`), `[S]` one per sequence. dtype: of the
    computation, float32 or float64. weights: of the tokens, in `dtype`, 0 where `mask` is False, or
    None if all are 1. turn_ids: the turn of each token, read where `mask` is True; None if turns
    are the runs of the mask. positions: each token's index in its whole sequence, for parts that
    depend on the order of tokens; read if a sequence's tokens are on several ranks. zero: the 0
    that `fill` writes where `mask` is False (see `shared_zero`). step: the counts of the whole
    optimizer step, or "local" if this call is the whole step; parts read these counts as `totals`.
    invalid: counts of certainly wrong values that could not be checked without waiting for the
    device, by the name of their metric. memo: numbers that are computed once, when first read.
    """

    mask: Tensor
    sequences: Sequences
    dtype: torch.dtype
    group_ids: Tensor | None = None
    weights: Tensor | None = None
    turn_ids: Tensor | None = None
    positions: Tensor | None = None
    zero: Tensor | float = 0
    step: Totals | Literal["local"] | None = None
    invalid: dict[str, Tensor] = field(default_factory=dict)
    memo: dict[str, Tensor] = field(default_factory=dict)
    names: ClassVar[tuple[str, ...]]  # of the fields

    @classmethod
    def of(
        cls, tokens: Tensor, mask: Tensor, *, called: str, weights: Any = None, **where: Any
    ) -> Layout:
        """The layout of the tokens of the argument `called`. where: as in `layout_fields`."""
        layout, dtype = layout_fields(tokens, mask, called=called, **where), compute_dtype(tokens)
        zero = shared_zero(tokens, dtype)
        layout["weights"] = token_weights(weights, layout, dtype, zero, (called, tokens))
        return cls(**layout, dtype=dtype, zero=zero)

    @property
    def totals(self) -> Totals | LocalTotals:
        """The counts of the whole step; only an aggregation may read them."""
        if self.step is None:
            raise InputError(
                "only the aggregation may read the totals of the step; this part runs before it."
            )
        return LocalTotals(self) if self.step == "local" else self.step

    def replace(self, **changes: Any) -> Self:
        """The same call with other values under some names.

        (`dataclasses.replace` takes ten times as long, and adds four guards per field under
        torch.compile.)
        """
        if is_compiling():
            return self.__class__(**{**{n: getattr(self, n) for n in self.names}, **changes})
        changed: Self = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **changes)
        return changed

    def with_totals(self, step: Totals | None) -> Self:
        """The same layout with the counts of the whole step; None: this call is the whole step."""
        return self.replace(step="local" if step is None else step)

    def fill(self, x: Tensor) -> Tensor:
        """`x` as numbers to compute with: in `dtype`, and 0 where `mask` is False."""
        return fill(x, self.mask, self.dtype, self.zero)

    def weighted(self, x: Tensor) -> Tensor:
        """`x` times the weight of each token."""
        return x if self.weights is None else x * self.weights

    @property
    def count(self) -> Tensor:
        """Valid tokens of this call, on this rank, 0-dim."""
        if "count" not in self.memo:
            self.memo["count"] = count(self.mask)
        return self.memo["count"]

    @property
    def counts(self) -> Tensor:
        """Valid tokens of each sequence `[S]`, int64; an all-reduce with context parallel."""
        if "counts" not in self.memo:
            self.memo["counts"] = self.sequences.sum(self.mask)
        return self.memo["counts"]

    @property
    def lengths(self) -> Tensor:
        """`counts` as numbers to divide by: in the dtype of the loss, rounded once."""
        return self.memo["lengths"] if "lengths" in self.memo else self.counts.to(self.dtype)

    def with_lengths(self, lengths: Tensor) -> Self:
        """The same layout with other numbers `[S]` as its `lengths`."""
        return self.replace(memo={**self.memo, "lengths": lengths})

    def sequence_mean(self, x: Tensor) -> Tensor:
        """The mean of `x` over the valid tokens of each sequence. Token-shaped → `[S]`.

        It is 0 for a sequence without valid tokens. `x` must be 0 at masked positions, as every
        tensor read from this object is.
        """
        if "counts" in self.memo:
            total = self.sequences.sum(x)
        else:
            total, self.memo["counts"] = self.sequences.sums(x, self.mask)  # in one all-reduce
        return total / self.lengths.clamp(min=1)


@dataclass
class LocalTotals:
    """The counts of a call that is the whole step, each computed when it is read.

    Most averages read one of these counts. The counts are tensors, and reading them costs no host
    sync.
    """

    dp_size: ClassVar[int] = 1
    layout: Layout

    @property
    def tokens(self) -> Tensor:
        """Valid tokens."""
        layout = self.layout
        return layout.count if layout.sequences.cp_group is None else layout.counts.sum()

    @property
    def sequences(self) -> Tensor:
        """Sequences with at least one valid token."""
        return count(self.layout.counts > 0)

    @property
    def weights(self) -> Tensor | None:
        """The sum of the weights of the valid tokens; None without weights."""
        w = self.layout.weights
        return None if w is None else self.layout.sequences.across(weighted_sum(w, w.new_ones(())))

    @property
    def groups(self) -> Tensor | None:
        """Prompt groups with at least one valid token; None without group_ids."""
        if self.layout.group_ids is None:
            return None
        order, members = group_index(self.layout.group_ids)
        return count(members.sum((self.layout.counts > 0)[order]) > 0)


def layout_fields(
    tokens: Tensor,
    mask: Tensor,
    *,
    called: str,
    cu_seqlens: Tensor | None = None,
    group_ids: Tensor | None = None,
    turn_ids: Tensor | None = None,
    cp_group: Any = None,
    positions: Tensor | None = None,
) -> dict[str, Any]:
    """The fields of the `Layout` of `tokens` except dtype and zero, checked against each other.

    called: the name of `tokens` in errors.
    """
    sequences = Sequences.of(tokens, cu_seqlens, cp_group, called)
    mask, invalid_mask = checked_mask(mask, tokens, like_called=called)
    if group_ids is not None:
        check_group_ids(group_ids, sequences)
        check_tensor("group_ids", group_ids, like=(called, tokens))
    if positions is not None:
        positions = checked_positions(positions, tokens, "this loss")
    invalid = {}
    if invalid_mask is not None:
        invalid["invalid_mask_values"] = invalid_mask
    if sequences.invalid is not None:
        invalid["invalid_cu_seqlens"] = sequences.invalid
    if turn_ids is not None:
        check_like("turn_ids", turn_ids, (called, tokens), "integer", "give one turn per token")
        message = (
            "turn_ids must not be negative where mask is True: −1 marks tokens that the "
            "environment wrote, which the policy is not trained on; mask them, too."
        )
        _refuse(invalid, "tokens_without_turn", count(mask & (turn_ids < 0)), message)
    where = {"sequences": sequences, "group_ids": group_ids, "positions": positions}
    return {"mask": mask, **where, "turn_ids": turn_ids, "invalid": invalid}


@dataclass(kw_only=True)
class Tokens(Layout):
    """The tensors of one `policy_loss` call, which every part of a `LossSpec` receives.

    Read `t.logp`, `t.old_logp`, `t.ratio`, `t.advantages` and so on (docs/custom.md): they are
    float32 (or float64), 0 where `mask` is False, and detached unless they depend on `logp`.
    anchor: the policy that the probability ratio divides by: "old", "rollout", "ref", "teacher" or
    "current". raw: the caller's tensors, by the name of the argument. measured: batch-wide numbers
    from `measure`, or None. flags: whether the metrics read the flags of a `Surrogate`.
    """

    advantages: Tensor
    raw: dict[str, Tensor | None]
    anchor: str = "old"
    raw_log_ratio: Tensor | None = None
    log_clamp: LogClamp = None
    ratio_value: Tensor | None = None
    measured: dict[str, Tensor] | None = None
    flags: bool = True

    def with_mask(self, mask: Tensor) -> Tokens:
        """The same tensors with another mask, of fewer valid tokens."""
        advantages = fill(self.advantages, mask, zero=self.zero)
        weights = None if self.weights is None else fill(self.weights, mask, zero=self.zero)
        return self.replace(mask=mask, advantages=advantages, weights=weights, memo={})

    def has(self, name: str) -> bool:
        """Whether the caller passed the tensor argument `name`."""
        return self.raw.get(name) is not None

    @property
    def ratio(self) -> Tensor:
        """The probability ratio of the spec, `[B, T]` or `[N]`; carries the gradient."""
        if self.ratio_value is None:
            raise InputError(f"this loss reads the ratio to {self.anchor}_logp, which is missing.")
        return self.ratio_value

    def extra(self, name: str) -> Tensor:
        """The tensor that the caller passed as `extras[name]`, detached."""
        if not self.has(f"extras.{name}"):
            raise InputError(
                f"this loss reads extras[{name!r}], which is missing; pass extras={{{name!r}: …}}."
            )
        return self.fill(self.read(f"extras.{name}"))

    def read(self, name: str) -> Tensor:
        """The tensor argument `name`; raise if it is missing."""
        x = self.raw.get(name)
        # The head alone leaves logp out, while the log-probabilities are not computed.
        if x is None and name == "logp":
            raise InputError(
                "a part with reads_logp = False read logp: leave that attribute out, so that the "
                "head computes the log-probabilities before it calls the part."
            )
        if x is None:
            raise InputError(
                f"this loss reads {name}, which is missing; pass {name}= to policy_loss."
            )
        return x

    @property
    def logp(self) -> Tensor:
        """The current policy's log-probability; carries the gradient."""
        return self.fill(self.read("logp"))

    @property
    def log_ratio(self) -> Tensor:
        """The logarithm of `ratio`, after the clamp."""
        if self.raw_log_ratio is None:
            raise InputError(f"this loss reads the ratio to {self.anchor}_logp, which is missing.")
        return bound(self.raw_log_ratio, self.log_clamp)

    @property
    def entropy(self) -> Tensor:
        """The current policy's entropy at each token; may carry a gradient."""
        return self.fill(self.read("entropy"))

    @property
    def ages(self) -> Tensor:
        """The number of policy updates since each token was sampled."""
        return self.fill(self.read("ages"))

    @property
    def divergence(self) -> Tensor:
        """The divergence from the teacher's distribution at each token; may carry a gradient."""
        if not self.has("divergence"):
            raise InputError(
                "this loss has a Divergence, which reads the divergence of each token; pass "
                "divergence= to policy_loss (policyloss.linear_divergence and "
                "policyloss.divergence make it), or teacher= to linear_policy_loss."
            )
        return self.fill(self.read("divergence"))

    def anchor_logp(self, anchor: str) -> Tensor:
        """The log-probability of a frozen policy: "old", "rollout", "ref", "teacher", or "current"
        for `logp` itself, detached.
        """
        return self.fill(self._anchor(anchor))

    def log_ratio_to(self, anchor: str) -> Tensor:
        """`logp - anchor_logp`, upcast before subtraction, 0 at masked positions."""
        logp, anchor_logp = self.read("logp"), self._anchor(anchor)
        return difference(logp, anchor_logp, self.mask, self.dtype, self.zero)

    def log_weight(self) -> Tensor:
        """`old_logp - rollout_logp`: trainer minus inference engine, at the same parameters."""
        old, rollout = self.read("old_logp"), self.read("rollout_logp")
        return difference(old, rollout, self.mask, self.dtype, self.zero)

    def _anchor(self, anchor: str) -> Tensor:
        if anchor == "current":
            return self.read("logp").detach()
        return self.read(LOGP_ARGUMENTS[anchor])

    def batch_statistics(self, part: Any) -> dict[str, Tensor]:
        """The batch-wide numbers that `part` needs: `measured`, or else computed from this call."""
        if self.measured is not None:
            return self.measured
        numbers: dict[str, Tensor] = part.statistics(self)
        return numbers


for _kind in (Layout, Tokens):
    _kind.names = tuple(f.name for f in fields(_kind))
