"""`Inputs`: the tensors of one call of a policy loss, collected and checked once.

To add an input, add it to `CallTensors`, which type checkers and editors read, and to the fields of
`Inputs`. Every function with these tensors (`policy_loss`, `measure`, `compiled_loss`,
`linear_policy_loss`, `accumulate`) then takes the new input, and packing, windows and context
parallel pass it on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from torch import Tensor

from policyloss.arguments import check_like, check_tensor, description, refuse_transforms
from policyloss.errors import InputError, InputTypeError, unknown_name
from policyloss.functional.masking import compute_dtype, fill, shared_zero
from policyloss.functional.ratio import loglinear_logp
from policyloss.tokens import (
    LOGP_ARGUMENTS,
    Tokens,
    check_ages,
    expand_advantages,
    layout_fields,
    token_weights,
)

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])
# The words that `old_logp` may be. "current": the policy is still the old policy, as in the first
# update after sampling. "loglinear": `loglinear_logp`, between rollout and current policy.
StandIn = Literal["current", "loglinear"]
CURRENT = "current"


class SharedTensors(TypedDict, total=False):
    """The optional tensors that every loss function takes, `linear_policy_loss` included."""

    rollout_logp: Tensor | None
    ref_logp: Tensor | None
    teacher_logp: Tensor | None
    cu_seqlens: Tensor | None
    group_ids: Tensor | None
    weights: Tensor | None
    turn_ids: Tensor | None
    ages: Tensor | None
    cp_group: Any
    positions: Tensor | None
    extras: Mapping[str, Tensor] | None


class CallTensors(SharedTensors, total=False):
    """The optional tensors of a loss on log-probabilities that the caller computed."""

    entropy: Tensor | None
    divergence: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The tensors of one call, as the caller passed them.

    extras: token-shaped tensors of any name, for custom parts that read more tensors.
    """

    logp: Tensor
    advantages: Tensor
    mask: Tensor
    old_logp: Tensor | None = None
    rollout_logp: Tensor | None = None
    ref_logp: Tensor | None = None
    teacher_logp: Tensor | None = None
    entropy: Tensor | None = None
    divergence: Tensor | None = None
    cu_seqlens: Tensor | None = None
    group_ids: Tensor | None = None
    weights: Tensor | None = None
    turn_ids: Tensor | None = None
    ages: Tensor | None = None
    cp_group: Any = None
    positions: Tensor | None = None
    extras: Mapping[str, Tensor] | None = None

    @classmethod
    def of(
        cls, logp: Any, old_logp: Any, advantages: Any, mask: Any, tensors: Mapping[str, Any]
    ) -> Self:
        """Collect the arguments of a loss function; for an unknown name, suggest the nearest."""
        refuse_transforms()
        for name in tensors:
            if name not in OPTIONAL:
                raise InputTypeError(unknown_name("argument", name, OPTIONAL))
        if isinstance(old_logp, str):
            if old_logp not in get_args(StandIn):
                raise InputError(unknown_name("old_logp", old_logp, get_args(StandIn)))
            check_tensor("logp", logp, "float")
            rollout_logp, ages = tensors.get("rollout_logp"), tensors.get("ages")
            if old_logp != CURRENT:
                if rollout_logp is None or ages is None:
                    raise InputError(
                        f"old_logp={old_logp!r} is computed from rollout_logp and ages; pass both, "
                        "or a tensor as old_logp."
                    )
                check_like("rollout_logp", rollout_logp, ("logp", logp), "float")
                check_like("ages", ages, ("logp", logp), "integer")
            old_logp = stand_in_logp(old_logp, logp, rollout_logp, ages)
        extras = tensors.get("extras")
        if extras is not None and not isinstance(extras, Mapping):
            raise InputError(
                "extras must be a mapping of names to token-shaped tensors, got "
                f"{description(extras)}."
            )
        return cls(logp=logp, old_logp=old_logp, advantages=advantages, mask=mask, **tensors)

    def replace(self, **changes: Any) -> Self:
        """The same call with other tensors under some names."""
        return replace(self, **changes)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the call by name; a tensor of `extras` is called "extras.name"."""
        names = (f.name for f in fields(self) if f.name not in ("cp_group", "extras"))
        plain = {name: getattr(self, name) for name in names}
        extras = {f"extras.{name}": x for name, x in (self.extras or {}).items()}
        return {name: x for name, x in {**plain, **extras}.items() if x is not None}

    def tokens(self) -> Tokens:
        """Check the tensors against each other, and return them as the parts read them."""
        logp = self.logp
        check_tensor("logp", logp, "float")
        layout = layout_fields(
            logp,
            self.mask,
            called="logp",
            cu_seqlens=self.cu_seqlens,
            group_ids=self.group_ids,
            turn_ids=self.turn_ids,
            cp_group=self.cp_group,
            positions=self.positions,
        )
        like = ("logp", logp)
        raw: dict[str, Tensor | None] = {"logp": None}
        for name in (*TOKEN_SHAPED, "ages"):
            raw[name] = getattr(self, name)
        for name, extra in (self.extras or {}).items():
            raw[f"extras.{name}"] = extra
        for name, x in raw.items():
            if x is not None:
                check_like(name, x, like)
                raw[name] = x if name in DIFFERENTIATED else x.detach()
        if self.ages is not None:
            check_ages(self.ages, layout, like)
        dtype = compute_dtype(self.logp, *map(raw.get, LOGP_ARGUMENTS.values()))
        # Upcast once, here: several parts may read logp, and their gradients must add up before
        # they are rounded to half precision.
        raw["logp"] = logp.to(dtype)
        advantages = expand_advantages(self.advantages, layout["sequences"], like=like)
        zero = shared_zero(logp, dtype)
        advantages = fill(advantages, layout["mask"], dtype, zero)
        layout["weights"] = token_weights(self.weights, layout, dtype, zero, like)
        return Tokens(**layout, dtype=dtype, zero=zero, advantages=advantages, raw=raw)


def stand_in_logp(
    name: str, logp: Tensor, rollout_logp: Tensor | None, ages: Tensor | None
) -> Tensor:
    """The old log-probabilities that a word `old_logp` stands for, detached."""
    if name == CURRENT:
        return logp.detach()
    assert rollout_logp is not None  # `Inputs.of` has checked both
    assert ages is not None
    return loglinear_logp(logp, rollout_logp, ages)


# The tensors that carry a gradient, as logp does.
DIFFERENTIATED = ("entropy", "divergence")
TOKEN_SHAPED = tuple(
    f.name for f in fields(Inputs) if f.name.endswith("_logp") or f.name in DIFFERENTIATED
)
OPTIONAL = tuple(get_type_hints(CallTensors))


def takes_tensors(function: F) -> F:
    """Show the names of `**tensors` in the signature of `function`, for `help` and tools."""
    signature = inspect.signature(function)
    *shown, last = signature.parameters.values()
    names = SharedTensors if "Shared" in str(last.annotation) else CallTensors
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [
        inspect.Parameter(n, kind, default=None, annotation=h)
        for n, h in get_type_hints(names).items()
    ]
    function.__signature__ = signature.replace(parameters=[*shown, *more])  # type: ignore[attr-defined]
    return function
