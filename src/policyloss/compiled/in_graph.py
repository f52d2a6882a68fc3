"""The way that `policy_loss` takes inside somebody's own `torch.compile`: one node of their graph.

Dynamo, which reads Python, would walk through all of the pipeline, and guard on hundreds of values
that are looked at again before every call. It sees one function of tensors and constants here. The
compiler behind it traces that function by running it: loss, metrics and gradient become operations
of the user's graph, fused with what stands around them. There is no graph break.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from policyloss.arguments import tracing
from policyloss.catalogue import as_spec
from policyloss.compiled.call import Call, numbers_of, results_of, scaled, with_gradients
from policyloss.compiled.two_stage_sums import InTwoStages
from policyloss.errors import PolicyLossError
from policyloss.functional.exact import is_exact
from policyloss.inputs import CURRENT, DIFFERENTIATED, Inputs
from policyloss.loss import LossOutput, check_gradients, ready_spec
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import resolve

_REQUIRED = ("logp", "old_logp", "advantages", "mask")
# By the kind of a call: where its metrics lie in what the graph returns.
_places: dict[str, RecordPlaces] = {}


def loss_in_graph(*arguments: Any) -> LossOutput | None:
    """`policy_loss` as one node, from the arguments of `_results`; None for a call that Dynamo must
    trace line by line: with a callable of a user's, with collectives, with `extras`, or wrong (the
    error is raised there, where Dynamo passes it on).
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
            tensors = {**tensors, **numbers_of(step, logp.device)}
    names = tuple(tensors)
    # All that the names of the metrics depend on.
    kind = f"{text} {level} {dp_size} {leaves} {names} {mask.dtype}"
    results = _node(kind, text, level, dp_size, leaves, differentiable, names, *tensors.values())
    if results is None:
        return None
    loss, packed, *gradients = results
    output = LossOutput(loss, Metrics.packed(_places_of(kind), packed))
    return output, dict(zip(leaves, gradients, strict=False))


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
    """The loss, the packed metrics, and unless the loss is differentiable, its gradients; None if
    the call is wrong.

    It runs on stand-ins for tensors, once for Dynamo and once for the compiler behind it.
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
    packed = results.packed()
    if not differentiable:
        gradients = scaled(results.known, len(leaves), None)
        return loss, packed, *(g.to(x.dtype) for g, x in zip(gradients, of_leaves, strict=True))
    return with_gradients(loss, results.known, of_leaves) if leaves else loss, packed
