"""`compiled_loss`: a loss, all its metrics and its gradient as one fused function, compiled from
the eager `policy_loss`.

The eager pipeline and its autograd are traced once into one graph of tensor operations, which
Inductor turns into a few kernels: there is no second copy of any formula. A call looks up its graph
by the shapes and dtypes of its arguments, runs it, and hangs the known gradient on the loss, so
that the backward is one product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import is_compiling
from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compiled.call import (
    Call,
    loss_function,
    numbers_of,
    rebuilt,
    requiring_grad,
    scaled,
    with_gradients,
)
from policyloss.compiled.cuda_graph import Graphed, can_be_graphed
from policyloss.compiled.trace import fused
from policyloss.compiled.two_stage_sums import InTwoStages
from policyloss.functional.exact import is_exact
from policyloss.functional.masking import can_be_read
from policyloss.functional.segments import Sequences, check_cu_seqlens
from policyloss.inputs import DIFFERENTIATED, CallTensors, Inputs, takes_tensors
from policyloss.loss import LossOutput, check_gradients, loss_of, ready_spec
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask
from policyloss.totals import Totals, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11

# Past this many different shapes the table that finds a call's graph is emptied; the graphs
# themselves are kept.
MOST_SHAPES = 4096
MOST_RECORDED = 64  # where each holds GPU memory
# The compiler of torch has state that all threads share, so that one thread compiles at a time,
# whichever loss it is.
_ONE_AT_A_TIME = threading.Lock()


def compiled_loss(
    spec: AnyLoss,
    *,
    dynamic: bool | None = None,
    options: dict[str, Any] | None = None,
    two_stages: bool | None = None,
    cuda_graph: bool = False,
    metrics: MetricsLevel = "all",
) -> CompiledLoss:
    """A fused `policy_loss` for one spec: make it once, then call it with the arguments of
    `policy_loss` that follow the spec.

    Loss, metrics and gradients are those of the eager `policy_loss`, from its own source, in a few
    kernels; the metrics stay in one tensor until they are looked at. The first call compiles
    (seconds; it needs a C++ compiler, or Triton on a GPU).
    dynamic: as in `torch.compile` — None compiles the first shape as it is and, when another comes,
    once more for every shape; True is for every shape from the start; False compiles each shape.
    options: Inductor's (see `torch._inductor.config`).
    two_stages: write the sums over tokens so that all of them take two kernels; None does so on a
    GPU, where the time of a call is that of launching kernels (see
    `policyloss.compiled.two_stage_sums`).
    cuda_graph: on a GPU, record the kernels of each shape once and replay them: the least time per
    call, for shapes that come again (another shape is recorded anew). Each keeps a copy of its
    arguments in GPU memory.
    metrics: how much is measured, as in `policy_loss`.

    Runs eagerly instead, with the same result, where a graph could be wrong or cannot exist: a
    callable in a slot (it may do anything), `cp_group` (collectives), tensor subclasses, a batch
    without tokens, within `exact()`, and inside someone else's `torch.compile`.
    """
    return CompiledLoss(as_spec(spec), dynamic, options, two_stages, cuda_graph, metrics)


class Gradients(NamedTuple):
    """`d loss` by `logp`, `entropy` and `divergence`, each like its tensor; None without one."""

    logp: Tensor
    entropy: Tensor | None = None
    divergence: Tensor | None = None


@dataclass(eq=False, repr=False)
class CompiledLoss:
    """A `policy_loss` with its spec filled in, compiled. Made by `compiled_loss`."""

    spec: LossSpec
    dynamic: bool | None = None
    options: dict[str, Any] | None = None
    two_stages: bool | None = None
    cuda_graph: bool = False
    metrics: MetricsLevel = "all"

    def __post_init__(self) -> None:
        check_level(self.metrics)
        self.spec = ready_spec(self.spec)
        self._is_data = self.spec.is_data
        self._by_key: dict[tuple[Any, ...], _Graph] = {}
        self._by_kind: dict[tuple[Any, ...], list[_Graph]] = {}

    @property
    def graphs(self) -> int:
        """How many graphs have been compiled so far."""
        return sum(map(len, self._by_kind.values()))

    @takes_tensors
    def __call__(
        self,
        logp: Tensor,
        old_logp: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        totals: Totals | Literal["local"] | None = None,
        **tensors: Unpack[CallTensors],
    ) -> LossOutput:
        """`policy_loss(spec, …)`: the same arguments, loss, gradients and metrics."""
        inputs = Inputs.of(logp, old_logp, advantages, mask, tensors)
        check_gradients(self.spec, inputs)
        if not self._traceable(inputs):
            return loss_of(self.spec, inputs, resolve(totals), self.metrics)
        leaves = requiring_grad(inputs)
        graph, (loss, packed, *known) = self._run(inputs, totals, leaves)
        if leaves:
            loss = with_gradients(loss, known, [getattr(inputs, name) for name in leaves])
        return LossOutput(loss, Metrics.packed(graph.places, packed))

    @takes_tensors
    def value_and_gradient(
        self,
        logp: Tensor,
        old_logp: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        *,
        totals: Totals | Literal["local"] | None = None,
        **tensors: Unpack[CallTensors],
    ) -> tuple[LossOutput, Gradients]:
        """Loss, metrics and gradients at once, without autograd: for code that feeds the gradient
        on by itself.

        The arguments are those of a call. `logp.backward(gradients.logp)` afterwards is what
        `loss.backward()` would have done, at less cost per step. The loss that is returned has no
        graph behind it.
        """
        inputs = Inputs.of(logp, old_logp, advantages, mask, tensors)
        present = (name for name in DIFFERENTIATED if getattr(inputs, name) is not None)
        leaves = ("logp", *present)
        if not self._traceable(inputs):
            return self._eager_value_and_gradient(inputs, leaves, resolve(totals))
        graph, (loss, packed, *known) = self._run(inputs, totals, leaves)
        gradients = scaled(known, len(leaves), None)
        like = {
            name: x.to(getattr(inputs, name).dtype)
            for name, x in zip(leaves, gradients, strict=True)
        }
        return LossOutput(loss, Metrics.packed(graph.places, packed)), Gradients(**like)

    def _run(
        self, inputs: Inputs, totals: Totals | Literal["local"] | None, leaves: tuple[str, ...]
    ) -> tuple[_Graph, list[Tensor]]:
        """The graph of this call, and what it gives: loss, packed metrics, what `scaled` takes."""
        tensors = inputs.tensors()
        logp, mask, cu_seqlens = inputs.logp, inputs.mask, inputs.cu_seqlens
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, logp, "logp")
            tensors["cu_seqlens"] = cu_seqlens.to(logp.device)
            # A graph serves every pack of its shape, so that a shape must mean the same in all of
            # them.
            sequences = Sequences(tuple(logp.shape), tensors["cu_seqlens"])
            tensors["advantages"] = sequences.with_clear_shape(tensors["advantages"], "advantages")
        step_totals = resolve(totals)
        if step_totals is not None:
            tensors |= numbers_of(step_totals, logp.device)
        call = Call(tensors, None if step_totals is None else step_totals.dp_size, leaves)
        key = call.key
        graph = self._by_key.get(key) or self._graph(call, key)
        results = graph.run(*[x.detach() if x.requires_grad else x for x in tensors.values()])
        if mask.dtype != torch.bool and can_be_read(mask) and results[1][-1] != 0:
            as_mask(mask, logp)  # complains, as the eager loss does
        return graph, results

    def _eager_value_and_gradient(
        self, inputs: Inputs, names: tuple[str, ...], totals: Totals | None
    ) -> tuple[LossOutput, Gradients]:
        """Where there is no graph."""
        with torch.enable_grad():
            leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
            out = loss_of(self.spec, inputs.replace(**leaves), totals, self.metrics)
            gradients = torch.autograd.grad(
                out.loss, list(leaves.values()), materialize_grads=True, allow_unused=True
            )
        known = dict(zip(names, gradients, strict=True))
        return LossOutput(out.loss.detach(), out.metrics), Gradients(**known)

    def _traceable(self, inputs: Inputs) -> bool:
        """Whether a graph may stand for the call: plain tensors, tokens, nothing of a user's."""
        if is_exact() or inputs.cp_group is not None or not self._is_data or is_compiling():
            return False
        if not all(
            type(x) is Tensor or type(x) is torch.nn.Parameter for x in inputs.tensors().values()
        ):
            return False
        needed = (inputs.logp, inputs.advantages, inputs.mask)
        return all(x is not None for x in needed) and inputs.logp.numel() > 0

    def _graph(self, call: Call, key: tuple[Any, ...]) -> _Graph:
        """A graph that fits this call: one that was compiled for any shape, or a new one."""
        tensors = list(call.tensors.values())
        with _ONE_AT_A_TIME:
            if key in self._by_key:  # another thread compiled it in the meantime
                return self._by_key[key]
            known = self._by_kind.setdefault(call.kind, [])
            graph = next((g for g in known if g.fits(tensors)), None)
            if graph is None:
                rebuilt(call)  # complains about wrong shapes in this call's own numbers
                dynamic = bool(known) if self.dynamic is None else self.dynamic
                level, rest = self.metrics, (dynamic, self.options, self.two_stages)
                graph = _compile(self.spec, level, call, *rest)
                known.append(graph)
            if self.cuda_graph and can_be_graphed(tensors):
                with torch.no_grad():
                    graph = graph._replace(run=Graphed(graph.run, tensors))
            if len(self._by_key) >= (MOST_RECORDED if self.cuda_graph else MOST_SHAPES):
                self._by_key.clear()
            self._by_key[key] = graph
            return graph


class _Graph(NamedTuple):
    """A compiled graph: `run(*tensors)` → [loss, packed metrics, gradient …, their scale if they
    are not scaled yet].

    `fits`: whether it may run on other shapes.
    """

    run: Callable[..., list[Tensor]]
    fits: Callable[[Sequence[Tensor]], bool]
    places: RecordPlaces


def _compile(
    spec: LossSpec,
    level: MetricsLevel,
    call: Call,
    dynamic: bool,
    options: dict[str, Any] | None,
    two_stages: bool | None,
) -> _Graph:
    """The eager pipeline, its metrics and its gradients as one graph."""
    places: list[RecordPlaces] = []

    logp = call.tensors["logp"]
    # On a CPU a call looks at once.
    run_eagerly = loss_function(spec, level, call, places, looks=logp.device.type == "cpu")
    split = logp.is_cuda if two_stages is None else two_stages

    def in_stages(*tensors: Tensor) -> list[Tensor]:
        with InTwoStages(logp.numel()) if split else nullcontext():
            return run_eagerly(*tensors)

    run, fits = fused(in_stages, list(call.tensors.values()), dynamic=dynamic, options=options)
    return _Graph(run, fits, places[0])
