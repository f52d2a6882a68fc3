"""`compiled_loss`: `torch.compile` over `policy_loss`, for one spec.

Inside that compilation the loss is one node (see `in_graph`), traced from the eager source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import is_compiling, refuse_transforms
from policyloss.catalogue import AnyLoss
from policyloss.compiled.fused import fused_gradients
from policyloss.functional.exact import is_exact
from policyloss.functional.masking import accumulator_dtype
from policyloss.inputs import DIFFERENTIATED, CallTensors, Inputs, StandIn, takes_tensors
from policyloss.loss import LossOutput, policy_loss, ready_spec
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.totals import Totals, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11


def compiled_loss(
    spec: AnyLoss,
    *,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    metrics: MetricsLevel = "all",
) -> CompiledLoss:
    """`policy_loss` for one spec under `torch.compile`: create it once, then call it with the
    arguments of `policy_loss` that follow the spec.

    Loss, metrics and gradients equal the results of `policy_loss` up to rounding. The first call
    compiles (seconds; it needs a C++ compiler, or Triton on a GPU). On a GPU try `policy_loss`
    first: it runs Triton kernels there, which were faster than this, `backward()` included.
    dynamic, options: as in `torch.compile`.
    metrics: "all", "basic" or "none", as in `policy_loss`.

    A call runs eagerly, with the same result, if the spec holds a callable (a graph would freeze
    the state of the callable), if `cp_group` is given (collectives), or within `exact()`.
    """
    return CompiledLoss(spec, dynamic, options, metrics)


class Gradients(NamedTuple):
    """`d loss / d (logp, entropy, divergence)`, each like its tensor; None for an absent tensor."""

    logp: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None


class CompiledLoss:
    """`policy_loss` of one spec, compiled; call it with the tensors. See `compiled_loss`."""

    def __init__(
        self,
        spec: AnyLoss,
        dynamic: bool | None = None,
        options: dict[str, Any] | None = None,
        metrics: MetricsLevel = "all",
    ) -> None:
        from policyloss.compiled.in_graph import gradients_in_graph  # it imports the compiler

        check_level(metrics)
        self.spec, self.metrics = ready_spec(spec), metrics
        self._loss, self._gradients = (
            torch.compile(_copy_of(function), dynamic=dynamic, options=options)
            for function in (policy_loss, gradients_in_graph)
        )

    @takes_tensors
    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor | StandIn | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        totals: Totals | Literal["local"] | None = None,
        **tensors: Unpack[CallTensors],
    ) -> LossOutput:
        """`policy_loss(spec, …)`: the same arguments, loss, gradients and metrics."""
        arguments = (self.spec, logp, old_logp, advantages, mask)
        options: Any = {"metrics": self.metrics, **tensors}
        if not self._can_compile(tensors):
            return policy_loss(*arguments, totals=totals, **options)
        out = self._loss(*arguments, totals=_as_tensors(totals, logp), **options)
        return _refuse_invalid(out)

    @takes_tensors
    def value_and_gradient(
        self,
        logp: Tensor,
        old_logp: Tensor | StandIn | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        totals: Totals | Literal["local"] | None = None,
        **tensors: Unpack[CallTensors],
    ) -> tuple[LossOutput, Gradients]:
        """Loss, metrics and gradients at once, without autograd: for code that starts the model's
        backward from the gradient of `logp`.

        The arguments are those of `policy_loss` without `spec`. `logp.backward(gradients.logp)`
        afterwards has the effect of `loss.backward()`, at less cost per step. The returned loss is
        detached. On a GPU it runs the Triton kernels of `policy_loss`, where they support the call.
        """
        carried: Any = {"logp": logp, **{name: tensors.get(name) for name in DIFFERENTIATED}}
        there = {name: x for name, x in carried.items() if isinstance(x, Tensor)}
        leaves = {name: x.detach().requires_grad_() for name, x in there.items()}
        others: Any = {**tensors, **leaves}
        first = others.pop("logp", logp)
        results = None
        if self._can_compile(tensors):
            if isinstance(logp, Tensor) and logp.is_cuda:
                inputs = Inputs.of(first, old_logp, advantages, mask, others)
                with torch.enable_grad():
                    results = fused_gradients(self.spec, inputs, resolve(totals), self.metrics)
            if results is None:
                step = _as_tensors(totals, logp)
                with torch.no_grad():
                    results = self._gradients(
                        self.spec, logp, old_logp, advantages, mask, step, self.metrics, tensors
                    )
        if results is not None:
            return _refuse_invalid(results[0]), Gradients(**results[1])
        with torch.enable_grad():
            out = self(first, old_logp, advantages, mask, totals=totals, **others)
            gradients = torch.autograd.grad(
                out.loss, list(leaves.values()), materialize_grads=True, allow_unused=True
            )
        by_name = dict(zip(leaves, gradients, strict=True))
        return LossOutput(out.loss.detach(), out.metrics), Gradients(**by_name)

    def _can_compile(self, tensors: CallTensors) -> bool:
        refuse_transforms()  # which a compiler cannot see
        return self.spec.is_data and tensors.get("cp_group") is None and not is_exact()


def _as_tensors(totals: Any, logp: Any) -> Any:
    """`totals` with tensors for its numbers, which would be constants of the graph."""
    if not isinstance(totals, Totals) or not isinstance(logp, Tensor):
        return totals
    counts = {name: getattr(totals, name) for name in ("tokens", "sequences", "groups", "weights")}
    wide: Any = {"device": logp.device, "dtype": accumulator_dtype(logp.device)}
    plain = {name: x for name, x in counts.items() if isinstance(x, (int, float))}
    numbers: Any = {name: torch.full((), float(x), **wide) for name, x in plain.items()}
    return replace(totals, **numbers)


def _refuse_invalid(out: LossOutput) -> LossOutput:
    """`out`, if the values of the mask and of cu_seqlens are valid; on a GPU, reading the metrics
    checks them, because here the host would have to wait.
    """
    if out.loss.device.type == "cpu" and not is_compiling():
        out.metrics.refuse_invalid()
    return out


def _copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object.

    torch limits how often it recompiles each code object, and every spec would recompile a shared
    one.
    """
    copy = FunctionType(function.__code__.replace(), function.__globals__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
