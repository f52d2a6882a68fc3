"""One call of a loss as data: its tensors by name, and the results that a graph is traced from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.functional.masking import accumulator_dtype, compute_dtype
from policyloss.functional.precomputed import first_derivative_only
from policyloss.inputs import DIFFERENTIATED, Inputs
from policyloss.loss import pipeline
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.policy_metrics import MetricsLevel
from policyloss.spec import LossSpec
from policyloss.tokens import LOGP_ARGUMENTS, Tokens
from policyloss.totals import GroupTokens, Totals


class Call(NamedTuple):
    """One call: its tensors, the constant `dp_size`, and the names of the tensors with gradient."""

    tensors: dict[str, Tensor]
    dp_size: int | None
    leaves: tuple[str, ...]


class _WithGradients(torch.autograd.Function):
    """Gives `value` a backward that returns the known gradients of `leaves` (see `scale_known`)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, known: Sequence[Tensor], *leaves: Tensor) -> Tensor:
        ctx.save_for_backward(*known)
        ctx.count = len(leaves)
        return value.detach()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *scale_known(ctx.saved_tensors, ctx.count, grads[0])


def with_gradients(value: Tensor, known: Sequence[Tensor], leaves: Sequence[Tensor]) -> Tensor:
    """`value` as a function of `leaves`, whose gradients are `known` (see `scale_known`)."""
    out: Tensor = _WithGradients.apply(value, known, *leaves)  # type: ignore[no-untyped-call]
    return out


def scale_known(known: Sequence[Tensor], count: int, grad: Tensor | None) -> list[Tensor]:
    """The first `count` tensors of `known`, multiplied by `grad` and by the scale that may follow
    them in `known`: one product over the tokens for each.
    """
    factors = [x for x in (grad, *known[count:]) if x is not None]
    if not factors:
        return list(known[:count])
    factor = factors[0] if len(factors) == 1 else factors[0] * factors[1]
    return [gradient * factor for gradient in known[:count]]


def requiring_grad(inputs: Inputs) -> tuple[str, ...]:
    """The names of the tensors that carry a gradient in this call."""
    if not torch.is_grad_enabled():
        return ()
    tensors = {name: getattr(inputs, name) for name in ("logp", *DIFFERENTIATED)}
    return tuple(name for name, x in tensors.items() if x is not None and x.requires_grad)


def totals_tensors(totals: Totals, device: torch.device) -> dict[str, Tensor]:
    """The totals as tensors, because their values change from step to step."""
    numbers: dict[str, Any] = {"totals.tokens": totals.tokens, "totals.sequences": totals.sequences}
    if isinstance(totals.groups, GroupTokens):
        numbers.update({"groups.ids": totals.groups.ids, "groups.tokens": totals.groups.tokens})
    elif totals.groups is not None:
        numbers["totals.groups"] = totals.groups
    if totals.weights is not None:
        numbers["totals.weights"] = totals.weights
    numbers.update({f"statistics.{name}": x for name, x in (totals.statistics or {}).items()})
    wide = accumulator_dtype(device)
    return {
        name: x.to(device)
        if isinstance(x, Tensor)
        else torch.full((), float(x), device=device, dtype=wide)
        for name, x in numbers.items()
    }


def tokens_and_totals(call: Call) -> tuple[Tokens, Totals | None]:
    """The arguments as the pipeline takes them."""
    x = call.tensors

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): y for name, y in x.items() if name.startswith(prefix)}

    named = {name: value for name, value in x.items() if "." not in name}
    tokens = Inputs(**named, extras=under("extras.")).tokens()
    if call.dp_size is None:
        return tokens, None
    counts: dict[str, Any] = under("totals.")
    of_groups = under("groups.")
    groups = GroupTokens(**of_groups) if of_groups else counts.pop("groups", None)
    statistics = under("statistics.") or None
    return tokens, Totals(**counts, groups=groups, dp_size=call.dp_size, statistics=statistics)


class Results(NamedTuple):
    """The loss of a call without a graph, its metrics, and the gradients of its leaves.

    known: the gradients, as the argument `known` of `scale_known`.
    """

    loss: Tensor
    metrics: Metrics
    known: list[Tensor]

    def pack(self) -> Tensor:
        """The metrics as one tensor, and the loss, because there may be no metrics."""
        return RecordPlaces.pack(self.metrics, self.loss)


def results_of(spec: LossSpec, level: MetricsLevel, call: Call) -> Results:
    """The eager pipeline, its metrics and its gradients."""
    x = call.tensors
    # Upcast first: a gradient is rounded to half precision after the backward has scaled it.
    wide = compute_dtype(*(x.get(name) for name in ("logp", *LOGP_ARGUMENTS.values())))
    leaves = {name: x[name].to(wide).detach().requires_grad_() for name in call.leaves}
    with torch.enable_grad():
        tokens, totals = tokens_and_totals(call._replace(tensors={**x, **leaves}))
        parts = pipeline(spec, tokens, totals, level)
        known = [torch.zeros_like(leaf) for leaf in leaves.values()]
        if known and parts.total.requires_grad:  # else the total depends on no leaf
            inputs = list(leaves.values())
            known = list(torch.autograd.grad(parts.total, inputs, materialize_grads=True))
    if parts.scale is not None and totals is not None:
        # The totals fix the scale, so the gradient is written once, scaled.
        known = [gradient * parts.scale for gradient in known]
    elif parts.scale is not None:
        # The scale divides by a count of this batch: the backward applies it, so that the loop over
        # the tokens does not wait for the count.
        known.append(parts.scale)
    return Results(parts.loss.detach(), parts.metrics, known)
