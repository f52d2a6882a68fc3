"""The way that `policy_loss` takes inside somebody's own `torch.compile`: one node of their graph.

Dynamo, which reads Python, would walk through all of the pipeline, and guard on hundreds of values
that are looked at again before every call. It sees one function of tensors and constants here. The
compiler behind it traces that function by running it: loss, packed metrics and gradient become
operations of the user's graph, fused with what stands around them. There is no graph break.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from policyloss.arguments import tracing
from policyloss.compiled.call import (
    Call,
    loss_function,
    numbers_of,
    requiring_grad,
    with_gradients,
)
from policyloss.compiled.two_stage_sums import InTwoStages
from policyloss.errors import PolicyLossError
from policyloss.inputs import Inputs
from policyloss.loss import LossOutput
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.policy_metrics import MetricsLevel
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# By the kind of a call: where its metrics lie in what the graph returns.
_places: dict[str, RecordPlaces] = {}


def loss_in_graph(
    spec: LossSpec, inputs: Inputs, step: Totals | None, level: MetricsLevel
) -> LossOutput | None:
    """`loss_of` as one node; None for a call that is traced line by line: with a callable of a
    user's, with collectives, or wrong (the error is raised there, where Dynamo hands it on).
    """
    if spec.as_json is None or inputs.cp_group is not None:
        return None
    tensors = inputs.tensors()
    if step is not None:
        tensors = {**tensors, **numbers_of(step, inputs.logp.device)}
    dp_size = None if step is None else step.dp_size
    leaves, names = requiring_grad(inputs), tuple(tensors)
    # All that the names of the metrics depend on.
    kind = f"{spec.as_json} {level} {dp_size} {leaves} {names} {inputs.mask.dtype}"
    results = _node(kind, spec.as_json, level, dp_size, leaves, names, *tensors.values())
    if results is None:
        return None
    loss, packed = results
    return LossOutput(loss, Metrics.packed(_places_of(kind), packed))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _places_of(kind: str) -> RecordPlaces:
    return _places[kind]


@lru_cache(maxsize=256)
def _spec_of(text: str) -> LossSpec:
    return LossSpec.from_dict(json.loads(text))


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _node(
    kind: str,
    spec: str,
    level: MetricsLevel,
    dp_size: int | None,
    leaves: Sequence[str],
    names: Sequence[str],
    *tensors: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """The loss, which carries the gradients of `leaves`, and the packed metrics.

    It runs on stand-ins for tensors, once for Dynamo and once for the compiler behind it.
    """
    call = Call(dict(zip(names, tensors, strict=True)), dp_size, tuple(leaves))
    logp, places = call.tensors["logp"], list[RecordPlaces]()
    run = loss_function(_spec_of(spec), level, call, places, looks=False)
    try:
        with (
            torch.no_grad(),
            tracing(),
            InTwoStages(logp.numel()) if logp.is_cuda else nullcontext(),
        ):
            loss, packed, *known = run(*[x.detach() for x in tensors])
    except PolicyLossError:
        return None
    _places[kind] = places[0]
    if leaves:
        loss = with_gradients(loss, known, [call.tensors[name] for name in leaves])
    return loss, packed
