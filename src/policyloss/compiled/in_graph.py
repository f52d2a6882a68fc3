"""Inside a user's `torch.compile`, `policy_loss` is one node of their graph.

Dynamo would trace the pipeline line by line and add hundreds of guards, which are checked before
every call. Here it sees one function of tensors and constants. The compiler behind it traces that
function by running it: loss, metrics and gradient become operations of the user's graph, fused with
their neighbours. There is no graph break.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from policyloss.arguments import tracing
from policyloss.catalogue import as_spec
from policyloss.compiled.call import Call, results_of, scale_known, totals_tensors, with_gradients
from policyloss.errors import PolicyLossError
from policyloss.functional.exact import is_exact
from policyloss.inputs import CURRENT, DIFFERENTIATED, Inputs
from policyloss.loss import LossOutput, check_gradients, ready_spec
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import resolve

_REQUIRED = ("logp", "old_logp", "advantages", "mask")
# By the kind of a call: the places of its metrics in the packed tensor.
_places: dict[str, RecordPlaces] = {}


def loss_in_graph(*arguments: Any) -> LossOutput | None:
    """`policy_loss` as one node of the graph, from the arguments of `_results`.

    None for a call that Dynamo must trace line by line: one with a user's callable, collectives,
    `extras`, or invalid arguments (the traced code raises the error, and Dynamo passes it on).
    """
    results = _results(True, *arguments)
    return None if results is None else results[0]


def gradients_in_graph(*arguments: Any) -> tuple[LossOutput, dict[str, Tensor]] | None:
    """`loss_in_graph` without autograd, and the gradients of logp, entropy and divergence."""
    return _results(False, *arguments)


def _results(
    differentiable: bool,
    spec: Any,
    logp: Any,
    old_logp: Any,
    advantages: Any,
    mask: Any,
    totals: Any,
    level: MetricsLevel,
    optional: Mapping[str, Any],
) -> tuple[LossOutput, dict[str, Tensor]] | None:
    """The output of the node, and the gradients unless the loss is differentiable."""
    text = as_spec(spec).as_json
    if text is None or is_exact():
        return None
    if isinstance(old_logp, str) and old_logp == CURRENT and isinstance(logp, Tensor):
        old_logp = logp  # the node detaches all of its inputs
    tensors = {"logp": logp, "advantages": advantages, "mask": mask}
    if old_logp is not None:
        tensors["old_logp"] = old_logp
    for name, x in optional.items():
        if x is not None:
            tensors[name] = x
    for x in tensors.values():
        if not isinstance(x, Tensor):
            return None
    leaves = [name for name in ("logp", *DIFFERENTIATED) if name in tensors]
    if differentiable:
        enabled = torch.is_grad_enabled()
        leaves = [name for name in leaves if enabled and tensors[name].requires_grad]
    dp_size = None
    if totals is not None:
        step = resolve(totals)
        if step is not None:
            dp_size = step.dp_size
            tensors = {**tensors, **totals_tensors(step, logp.device)}
    names = tuple(tensors)
    # All that the names of the metrics depend on.
    kind = f"{text} {level} {dp_size} {leaves} {names} {mask.dtype}"
    results = _node(kind, text, level, dp_size, leaves, differentiable, names, *tensors.values())
    if results is None:
        return None
    loss, packed, *gradients = results
    output = LossOutput(loss, Metrics.from_packed(_places_of(kind), packed))
    # Dynamo of torch 2.6 and 2.8 zips only equal lengths.
    return output, dict(zip(leaves if gradients else (), gradients, strict=True))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _places_of(kind: str) -> RecordPlaces:
    return _places[kind]


@lru_cache(maxsize=256)
def _spec_of(text: str) -> LossSpec:
    return LossSpec.from_dict(json.loads(text))


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _node(
    kind: str,
    text: str,
    level: MetricsLevel,
    dp_size: int | None,
    leaves: Sequence[str],
    differentiable: bool,
    names: Sequence[str],
    *tensors: Tensor,
) -> tuple[Tensor, ...] | None:
    """The loss, the packed metrics and, unless the loss is differentiable, its gradients.

    None if the call is wrong. It runs on stand-ins for tensors, once for Dynamo and once for the
    compiler behind it.
    """
    named = dict(zip(names, tensors, strict=True))
    logp = named["logp"]
    call = Call({name: x.detach() for name, x in named.items()}, dp_size, tuple(leaves))
    in_stages = InTwoStages(logp.numel()) if logp.is_cuda else nullcontext()
    try:
        check_level(level)
        spec = ready_spec(_spec_of(text))
        rest = {n: x for n, x in named.items() if "." not in n and n not in _REQUIRED}
        first, second, third, fourth = (named.get(name) for name in _REQUIRED)
        check_gradients(spec, Inputs.of(first, second, third, fourth, rest))
        with torch.no_grad(), tracing(), in_stages:
            results = results_of(spec, level, call)
    except PolicyLossError:
        return None
    _places[kind] = RecordPlaces(results.metrics)
    loss, of_leaves = results.loss, [named[name] for name in leaves]
    packed = results.pack()
    if not differentiable:
        gradients = scale_known(results.known, len(leaves), None)
        return loss, packed, *(g.to(x.dtype) for g, x in zip(gradients, of_leaves, strict=True))
    return with_gradients(loss, results.known, of_leaves) if leaves else loss, packed


# Sums over all tokens: the compiler splits each in two and fuses the first halves, which read the
# same tokens. The second halves share no input, so each would become a kernel that takes longer to
# launch than to run. `InTwoStages` splits all sums at the same place, so the second halves share
# an input.
aten = torch.ops.aten
# The operations that reduce a whole tensor to a number.
_WHOLE = (aten.sum.default, aten.amax.default, aten.amin.default)
# Partial results of a sum: enough to keep every processor busy in the first stage, few enough for
# one block in the second.
FEWEST, MOST = 512, 4096


class InTwoStages(TorchDispatchMode):
    """A context in which every sum, maximum and minimum over all `n` tokens takes two stages.

    The stages are `[G, n/G] → [G] → 0-dim`. The results are the same except for rounding. If the
    number of rows is a symbol, each row is one partial result. A pack is not split if its length is
    a symbol or has no suitable divisor.
    """

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = n
        # By the number of partial results, or its symbol: the first ones.
        self.shared: dict[int | str, Tensor] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        more = kwargs or {}
        cut = _cut(args[0], self.n) if operation in _WHOLE and len(args) == 1 else None
        if cut is None:
            return operation(*args, **more)
        rows = args[0] if isinstance(cut, str) else args[0].reshape(cut, -1)
        along: Any = aten.sum.dim_IntList if operation is aten.sum.default else operation
        partial = along(rows, [1], **more)
        # The second stage also reads the first partial results, in a condition that always holds,
        # because the compiler fuses operations that share an input.
        first = self.shared.setdefault(cut, partial)
        always = (first == first) | (first != first)
        return operation(torch.where(always, partial, torch.zeros_like(partial)), **more)


def _cut(x: Tensor, n: int) -> int | str | None:
    """The number G of partial results of a reduction, or its symbol; None for no split."""
    if not all(isinstance(size, int) for size in x.shape):
        return str(x.shape[0]) if x.dim() == 2 else None
    return partials(x.shape[0] if x.dim() > 1 else 1, n) or None if x.numel() == n else None


def partials(rows: int, n: int) -> int:
    """A divisor of n from FEWEST to MOST that cuts or joins rows evenly; 0 if n has none."""
    if rows > MOST:
        divisors = (k for k in range(rows // MOST, rows // FEWEST + 1) if k and rows % k == 0)
        return next((rows // k for k in divisors if rows // k <= MOST), 0)
    width = n // rows
    fewest = -(-FEWEST // rows)
    counts = range(fewest, min(MOST // rows, width) + 1)
    return next((rows * k for k in counts if width % k == 0), 0)
