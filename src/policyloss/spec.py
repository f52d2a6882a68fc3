"""`LossSpec`: a policy loss as a value. Seven slots, each filled by a part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypedDict

import torch
from torch import Tensor

from policyloss.arguments import description
from policyloss.errors import SpecError, safe_repr, unknown_name
from policyloss.parts import aggregate, correction, ratio, trust
from policyloss.parts.data import (
    VARIANTS,
    check_depth,
    check_part,
    field_paths,
    known_parts,
    part_as_data,
    part_from_data,
    with_value,
)
from policyloss.parts.kl import Divergence
from policyloss.parts.validate import Finite, Part
from policyloss.tokens import LOGP_ARGUMENTS, Tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11

Correction = Callable[[Tokens], correction.Corrected] | correction.SelfNormalise

_SETTINGS = ("rejected", "entropy_coef")  # the slots that hold no part
_NO_HORIZON = object()  # of an aggregation that divides by no constant

# The defaults are plain PPO: frozen values, safe to share.
_TOKEN_RATIO, _PPO_CLIP = ratio.TokenRatio(), trust.Clip(0.2, 0.2)
_TOKEN_MEAN = aggregate.TokenMean()


@dataclass(frozen=True)
class LossSpec(Part):
    """A policy loss. Each field, or slot, holds a part of the loss; the defaults are PPO.

    A spec is frozen and hashable; `spec.replace(trust=Clip(0.3))` returns a copy with another part.

    ratio: the probability ratio. trust: the trust region, which limits the change of the policy,
    for example by clipping. correction: one part or several that correct for the difference between
    rollout engine and trainer. rejected: the treatment of a token that a correction rejects.
    "keep": its policy term is 0, its KL and entropy terms stay, and it counts in the denominator;
    "renormalise": as if its mask were False; "drop_sequence": as if the mask of its sequence were
    False. kl: one penalty or several on the distance from a reference or a teacher, or None.
    entropy_coef: the weight of the entropy bonus. aggregate: how the losses of the tokens are
    combined into one number. Every field but `rejected` and `entropy_coef` also takes a function of
    `Tokens` (see docs/custom.md).
    """

    ratio: Any = _TOKEN_RATIO
    trust: Any = _PPO_CLIP
    correction: Any = ()
    rejected: Literal["keep", "renormalise", "drop_sequence"] = "keep"
    kl: Any = None
    entropy_coef: Finite = 0.0
    aggregate: Any = _TOKEN_MEAN
    # The name of the preset that this loss was made from; equal losses may have different names.
    origin: ClassVar[str | None] = None
    # Derived from the slots once, because the loss reads them in every call and older compilers
    # cannot trace how they are computed.
    kl_parts: ClassVar[tuple[Any, ...]]  # the parts of the slot `kl`: none, one or several
    divergence: ClassVar[Divergence | None]  # the part that compares with a teacher's distribution
    is_data: ClassVar[bool]  # all parts belong to the library or its drop-ins: no user's callable
    as_json: ClassVar[str | None]
    reads_ratio_value: ClassVar[bool]  # a part reads the ratio as the ratio slot computes it
    statistics_names: ClassVar[tuple[str, ...]]  # the batch-wide numbers that the parts read
    corrections_by_logp: ClassVar[tuple[Any, ...]]  # the corrections that read logp
    # A masked token, which has no advantage and ratio 1, has no loss either. (A ratio that tokens
    # share may overflow, and 0·inf is NaN.)
    is_zero_where_masked: ClassVar[bool]

    def __post_init__(self) -> None:
        parts = () if self.correction is None else self.correction
        self._set(correction=tuple(parts) if isinstance(parts, (tuple, list)) else (parts,))
        terms = () if self.kl is None else self.kl
        terms = tuple(terms) if isinstance(terms, (tuple, list)) else (terms,)
        self._set(kl=terms if terms[1:] else terms[0] if terms else None, kl_parts=terms)
        filled = [(slot, part) for slot in VARIANTS for part in self.parts_in(slot)]
        for slot, part in filled:
            check_part(slot, part)
        divergences = [part for part in terms if isinstance(part, Divergence)]
        self._set(
            divergence=divergences[0] if divergences else None,
            is_data=all(type(part) in known_parts(slot).values() for slot, part in filled),
            # The KL of a framework may be weighted by another ratio.
            reads_ratio_value=getattr(self.trust, "reads_ratio", True)
            or any(getattr(part, "weight", None) in ("ratio", "detached_ratio") for part in terms),
            statistics_names=tuple(
                name
                for part in (self.trust, *self.correction)
                for name in getattr(part, "statistics_names", ())
            ),
            corrections_by_logp=tuple(
                part for part in self.correction if getattr(part, "reads_logp", True)
            ),
        )
        super().__post_init__()
        self._set(
            is_zero_where_masked=self.is_data
            and isinstance(self.ratio, ratio.TokenRatio)
            and self.follows_advantage
            and getattr(self.trust, "reach", None) == "token"
        )
        self._check_fit(len(divergences))
        writable = self.is_data and not torch.compiler.is_compiling()
        self._set(as_json=json.dumps(self.to_dict()) if writable else None)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_fit(self, divergences: int) -> None:
        if hasattr(self.trust, "check_ratio"):
            self.trust.check_ratio(self.ratio)
        weighing = [type(c).__name__ for c in self.correction if getattr(c, "weighs", False)]
        if len(weighing) > 1:
            raise SpecError(
                f"{' and '.join(weighing)} would both multiply by the importance weight; keep one, "
                "and use Reject, Veto or SequenceMask(weight=None) to mask as well."
            )
        normalising = [c for c in self.correction if isinstance(c, correction.SelfNormalise)]
        custom = any(not isinstance(c, correction.VARIANTS) for c in self.correction)
        if normalising and (len(normalising) > 1 or not (weighing or custom)):
            raise SpecError(
                "SelfNormalise normalises one importance weight: use it once, together with "
                "Truncate, Band or SequenceMask."
            )
        if len(set(self.statistics_names)) < len(self.statistics_names):
            raise SpecError(
                "two parts of this loss measure a number of the same name over the step "
                f"({', '.join(self.statistics_names)}): keep one of them."
            )
        if divergences > 1:
            raise SpecError(
                "a loss has one Divergence at most, because a call carries one divergence per "
                "token; add up the divergences of several teachers before the call."
            )
        if self.rejected != "keep" and not self.correction:
            raise SpecError(
                f"rejected={self.rejected!r} has no effect without a correction that rejects; add "
                "one or use 'keep'."
            )

    def parts_in(self, slot: str) -> tuple[Any, ...]:
        """The parts in the slot (field) of this name: none, one, or several."""
        if slot == "kl":
            return self.kl_parts
        value = getattr(self, slot)
        return value if isinstance(value, tuple) else (value,)

    @property
    def reads_ratio(self) -> bool:
        """Whether a part of the loss uses the ratio (REINFORCE has no such part)."""
        weighted = any(getattr(part, "reads_ratio", False) for part in self.kl_parts)
        return self.reads_ratio_value or weighted

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments of `policy_loss` that this loss reads in addition to the required ones."""
        names = set()
        anchor = getattr(self.ratio, "anchor", "old")
        if self.reads_ratio and anchor != "current":
            names.add(f"{anchor}_logp")
        if self.reads_ratio_value:
            names.update(getattr(self.ratio, "reads", ()))
        for part in self.correction:
            names.update(getattr(part, "reads", ("old_logp", "rollout_logp")))
        for part in self.kl_parts:
            of = f"{getattr(part, 'anchor', 'ref')}_logp"
            names.add("divergence" if isinstance(part, Divergence) else of)
        if self.entropy_coef:
            names.add("entropy")
        if isinstance(self.aggregate, aggregate.PromptMean):
            names.add("group_ids")
        if isinstance(self.aggregate, aggregate.WeightMean):
            names.add("weights")
        order = (*LOGP_ARGUMENTS.values(), "ages", "entropy", "divergence", "group_ids", "weights")
        return tuple(name for name in order if name in names)

    @property
    def needs_statistics(self) -> bool:
        """Whether the totals must come from `measure`, because counting the mask is not enough."""
        return bool(self.statistics_names) or self.rejected != "keep"

    @cached_property
    def reach(self) -> Literal["token", "sequence", "batch"]:
        """The tokens whose log-probabilities enter the gradient of a token.

        "token": the token alone. "sequence": the tokens of its sequence (GSPO). "batch": any token.
        A user's callable without an attribute `reach` has the reach "batch"; so has a user's
        aggregation, unless it has `reads_logp = False`, and a rejection by `logp` that changes
        denominators.
        Batch-wide numbers (`needs_statistics`) do not count.
        """
        by_logp = self.corrections_by_logp
        parts = [self.ratio, self.trust, *by_logp, *self.kl_parts]
        reaches = {getattr(part, "reach", "batch") for part in parts}
        ours = isinstance(self.aggregate, aggregate.VARIANTS)
        fixed_average = ours or not getattr(self.aggregate, "reads_logp", True)
        if "batch" in reaches or not fixed_average or (by_logp and self.rejected != "keep"):
            return "batch"
        return "sequence" if "sequence" in reaches else "token"

    @property
    def follows_advantage(self) -> bool:
        """Whether a token with advantage 0 has loss 0: the trust region's loss is a multiple of A,
        and there is no KL or entropy term.
        """
        alone = self.kl is None and not self.entropy_coef
        return alone and getattr(self.trust, "follows_advantage", False)

    def with_fields(self, **numbers: Any) -> LossSpec:
        """A copy with other values of its parts' fields: `spec.with_fields(eps_high=0.3)`.

        `rejected` and `entropy_coef` are valid names, too. Raises a `SpecError` if no part, or more
        than one, has a field of the name.
        """
        changed = self
        for name, value in numbers.items():
            paths = field_paths(changed)
            valid = [path for path in paths if path[1:] or path[0] in _SETTINGS]
            places = [path for path in valid if path[-1] == name]
            if not places:
                names = {str(path[-1]) for path in valid}
                raise SpecError(unknown_name("number of this loss", name, names))
            if len(places) > 1:
                where = " and ".join(".".join(map(str, path)) for path in places)
                raise SpecError(
                    f"{name} is ambiguous: this loss has {where}; use spec.replace(slot=…)."
                )
            changed = with_value(changed, places[0], value)
        object.__setattr__(changed, "origin", self.origin)
        return changed

    @property
    def needs_horizon(self) -> bool:
        """Whether the aggregation divides by a length that is not set yet (see `with_horizon`)."""
        return getattr(self.aggregate, "horizon", _NO_HORIZON) is None

    def with_horizon(self, tokens: float) -> LossSpec:
        """The same loss with its token sums divided by `tokens`, the generation budget of your run.

        Raises a `SpecError` if the loss does not divide by such a constant.
        """
        if getattr(self.aggregate, "horizon", _NO_HORIZON) is _NO_HORIZON:
            raise SpecError(
                f"this loss has no horizon to set to {tokens!r}: {safe_repr(self.aggregate)} does "
                "not divide by the length of your run; SeqMeanTokenSumNorm and TokenSumNorm do."
            )
        if tokens is None:
            raise SpecError(
                "with_horizon needs the horizon, your generation budget in tokens; got None."
            )
        return self.replace(aggregate=dataclasses.replace(self.aggregate, horizon=tokens))

    def for_run(self, tokens: float) -> LossSpec:
        """`with_horizon(tokens)` if the loss needs a horizon that is not set yet, else the loss
        itself. tokens: the generation budget of your run.
        """
        return self.with_horizon(tokens) if self.needs_horizon else self

    def replace(self, **slots: Unpack[Slots]) -> LossSpec:
        """A copy with other parts or values in the named fields: `spec.replace(kl=None)`."""
        for name in slots:
            if name not in SLOTS:
                raise SpecError(unknown_name("slot", name, SLOTS))
        changed = dataclasses.replace(self, **slots)
        object.__setattr__(changed, "origin", self.origin)
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-ready): each part as {"type": its class name, …its fields}."""
        kl = [part_as_data("kl", part) for part in self.kl_parts]
        return {
            "ratio": part_as_data("ratio", self.ratio),
            "trust": part_as_data("trust", self.trust),
            "correction": [part_as_data("correction", c) for c in self.correction],
            "rejected": self.rejected,
            "kl": kl if len(kl) > 1 else kl[0] if kl else None,
            "entropy_coef": self.entropy_coef,
            "aggregate": part_as_data("aggregate", self.aggregate),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LossSpec:
        """The inverse of `to_dict`. The error for an unknown key or type lists the valid ones."""
        if not isinstance(data, Mapping):
            raise SpecError(
                f"data must be a mapping, as LossSpec.to_dict makes it, got {description(data)}."
            )
        check_depth(data)
        slots: dict[str, Any] = {}
        for key, value in data.items():
            if key not in SLOTS:
                raise SpecError(unknown_name("slot", key, SLOTS))
            if key == "correction" and not isinstance(value, (list, tuple)):
                raise SpecError(f"correction must be a list of parts, got {value!r}.")
            if key in ("correction", "kl") and isinstance(value, (list, tuple)):
                slots[key] = tuple(part_from_data(key, part) for part in value)
            elif key in VARIANTS and not (key == "kl" and value is None):
                slots[key] = part_from_data(key, value)
            else:
                slots[key] = value
        return cls(**slots)


class Slots(TypedDict, total=False):
    """The types of the slots, for type checkers: every part is a callable of `Tokens`."""

    ratio: Callable[[Tokens], Tensor]
    trust: Callable[[Tokens], trust.Surrogate | Tensor]
    correction: Correction | Sequence[Correction] | None
    rejected: Literal["keep", "renormalise", "drop_sequence"]
    kl: Callable[[Tokens], Tensor] | Sequence[Callable[[Tokens], Tensor]] | None
    entropy_coef: float
    aggregate: Callable[[Tokens], Tensor]


SLOTS = tuple(f.name for f in dataclasses.fields(LossSpec))
