"""On a GPU `policy_loss` computes loss, metrics and gradient in two Triton kernels.

They support padded tokens and losses built from the library's parts, in float32 or narrower, if
Triton is installed. The first call of a kind creates the kernels in seconds, for every shape. Other
calls run operation by operation, with the same result; `explain_path` returns the path of a call.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import is_compiling
from policyloss.catalogue import AnyLoss
from policyloss.compiled.call import (
    Call,
    requiring_grad,
    results_of,
    scale_known,
    totals_tensors,
    with_gradients,
)
from policyloss.compiled.token_graph import ROWS, WIDTH, UnfitGraphError, trace_graph
from policyloss.compiled.token_program import TokenKernels
from policyloss.errors import PolicyLossError
from policyloss.functional.collectives import outside_level
from policyloss.functional.exact import is_exact
from policyloss.functional.triton_modules import kernels
from policyloss.inputs import CallTensors, Inputs, StandIn, takes_tensors
from policyloss.loss import LossOutput, check_gradients, ready_spec
from policyloss.metrics import Metrics, RecordPlaces
from policyloss.parts.aggregate import PromptMean
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import Totals, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack  # part of typing since Python 3.11

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNSUPPORTED = ("cu_seqlens", "group_ids", "cp_group", "positions")
# Past this many specs the table of kernels is emptied.
MOST_SPECS = 256
_one_at_a_time = threading.Lock()
_switched = threading.local()


class _Kernels(NamedTuple):
    """The kernels of one kind of call, and the places of its metrics in their output."""

    run: TokenKernels
    places: RecordPlaces


# By the identity of a spec: the spec, and for each kind of call its kernels or the reason why it
# has none.
_cache: dict[int, tuple[LossSpec, dict[tuple[Any, ...], _Kernels | str]]] = {}


@contextmanager
def unfused() -> Iterator[None]:
    """A context in which `policy_loss` runs as separate operations, not in its two GPU kernels."""
    before = getattr(_switched, "off", False)
    _switched.off = True
    try:
        yield
    finally:
        _switched.off = before


@takes_tensors
def explain_path(
    spec: AnyLoss,
    logp: Tensor,
    old_logp: Tensor | StandIn | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    totals: Totals | Literal["local"] | None = None,
    metrics: MetricsLevel = "all",
    **tensors: Unpack[CallTensors],
) -> str:
    """A sentence: whether `policy_loss` runs as fused Triton kernels or eagerly here, and why."""
    check_level(metrics)
    spec, inputs = ready_spec(spec), Inputs.of(logp, old_logp, advantages, mask, tensors)
    check_gradients(spec, inputs)
    inputs.tokens()  # raises where the loss itself would
    tensors_here = inputs.tensors()
    reason = _reason_to_skip(inputs) or _refusal(spec, inputs, tensors_here)
    if not reason:
        ready = _kernels(spec, metrics, _call(spec, inputs, tensors_here, resolve(totals)))
        reason = ready if isinstance(ready, str) else ""
    if reason:
        return f"Operation by operation, because {reason}."
    return "Two Triton kernels for loss, metrics and gradient, made from the eager source."


def _reason_to_skip(inputs: Inputs) -> str:
    """The reason not to use the kernels, or ""."""
    if not inputs.logp.is_cuda:
        return f"logp is on {inputs.logp.device.type}, and the kernels are for a GPU"
    return "the call is made under policyloss.unfused()" if getattr(_switched, "off", False) else ""


def _refusal(spec: LossSpec, inputs: Inputs, tensors: dict[str, Tensor]) -> str:
    """The reason why the kernels cannot run a call, found without tracing; "" if they may."""
    logp = inputs.logp
    if not spec.is_data:
        return "a slot of the spec holds a callable, which may do anything"
    if is_exact():
        return "the exact mode is on"
    if is_compiling():
        return "a compiler traces the call"
    for name in _UNSUPPORTED:
        if getattr(inputs, name) is not None:
            return f"the call has {name}"
    if logp.dim() != 2 or logp.numel() == 0:
        return "there are no padded tokens [B, T]"
    for name, x in tensors.items():
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"{name} is not a plain tensor"
        if x.device != logp.device or x.layout != torch.strided:
            return f"{name} is on another device than logp, or sparse"
        if x.is_floating_point() and x.dtype not in _FLOATS:
            return f"{name} is {x.dtype}"
    return "" if kernels("triton") is not None else "Triton is not installed"


def fused_loss(
    spec: LossSpec, inputs: Inputs, step: Totals | None, level: MetricsLevel
) -> LossOutput | None:
    """`loss_of` by the kernels; None if they do not support the call."""
    return None if _reason_to_skip(inputs) else run_kernels(spec, inputs, step, level)


def run_kernels(
    spec: LossSpec, inputs: Inputs, step: Totals | None, level: MetricsLevel
) -> LossOutput | None:
    """`fused_loss` on any device: Triton's interpreter runs on a CPU."""
    results = _results(spec, inputs, step, level)
    if results is None:
        return None
    call, loss, metrics, known = results
    if call.leaves:
        loss = with_gradients(loss, known, [call.tensors[name] for name in call.leaves])
    return LossOutput(loss, metrics)


def fused_gradients(
    spec: LossSpec, inputs: Inputs, step: Totals | None, level: MetricsLevel
) -> tuple[LossOutput, dict[str, Tensor]] | None:
    """`fused_loss` without autograd, and the gradients of the tensors that require one."""
    results = None if _reason_to_skip(inputs) else _results(spec, inputs, step, level)
    if results is None:
        return None
    call, loss, metrics, known = results
    gradients = dict(zip(call.leaves, scale_known(known, len(call.leaves), None), strict=True))
    return LossOutput(loss, metrics), {n: g.to(call.tensors[n].dtype) for n, g in gradients.items()}


def _results(
    spec: LossSpec, inputs: Inputs, step: Totals | None, level: MetricsLevel
) -> tuple[Call, Tensor, Metrics, list[Tensor]] | None:
    """The call, its loss, its metrics and `known` of `scale_known`; None if unsupported."""
    tensors_here = inputs.tensors()
    if _refusal(spec, inputs, tensors_here):
        return None
    call = _call(spec, inputs, tensors_here, step)
    ready = _kernels(spec, level, call)
    if isinstance(ready, str):
        return None
    if not ready.run.has_run and inputs.logp.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # nothing can be compiled while a CUDA graph is recorded
    tensors = [x.detach() if x.requires_grad else x for x in call.tensors.values()]
    try:
        loss, packed, *known = ready.run(tensors, inputs.logp.shape)
    except Exception as error:  # Triton's compiler may raise anything in the first call
        if ready.run.has_run:
            raise
        _of_spec(spec)[_key(level, call)] = _gave_up(error)
        return None
    return call, loss, Metrics.from_packed(ready.places, packed), known


def _gave_up(error: Exception) -> str:
    reason = f"its kernels could not be made ({type(error).__name__}: {error})"
    text = f"policy_loss runs operation by operation, because {reason}."
    warnings.warn(text, stacklevel=outside_level())
    return reason


def _call(spec: LossSpec, inputs: Inputs, tensors: dict[str, Tensor], step: Totals | None) -> Call:
    if step is not None:
        numbers = totals_tensors(step, inputs.logp.device)
        if not isinstance(spec.aggregate, PromptMean):  # the only one that reads them
            numbers = {name: x for name, x in numbers.items() if "groups" not in name}
        tensors = {**tensors, **numbers}
    return Call(tensors, None if step is None else step.dp_size, requiring_grad(inputs))


def _of_spec(spec: LossSpec) -> dict[tuple[Any, ...], _Kernels | str]:
    """The kernels of this spec, or the reason why it has none, by the kind of call."""
    entry = _cache.get(id(spec))
    if entry is None:
        if len(_cache) >= MOST_SPECS:
            _cache.clear()
        entry = _cache.setdefault(id(spec), (spec, {}))
    return entry[1]


def _key(level: MetricsLevel, call: Call) -> tuple[Any, ...]:
    """A key that is equal for calls that share kernels."""
    shape = call.tensors["logp"].shape
    kinds = tuple([(name, x.dtype, _outline(x, shape)) for name, x in call.tensors.items()])
    return level, call.dp_size, call.leaves, kinds


def _kernels(spec: LossSpec, level: MetricsLevel, call: Call) -> _Kernels | str:
    """The kernels of the call, or the reason why it has none."""
    known, key = _of_spec(spec), _key(level, call)
    ready = known.get(key)
    if ready is None:
        with _one_at_a_time:
            ready = known.get(key) or _new_kernels(spec, level, call)
            known[key] = ready
    return ready


def _outline(x: Tensor, tokens: torch.Size) -> tuple[int, ...]:
    """The shape of `x` in a call whose tokens are `[ROWS, WIDTH]`; (0,) for any other shape."""
    rows = tokens[0]
    shapes = {(rows, 1): (ROWS, 1), (rows,): (ROWS,), (): (), tuple(tokens): (ROWS, WIDTH)}
    return shapes.get(tuple(x.shape), (0,))


def _new_kernels(spec: LossSpec, level: MetricsLevel, call: Call) -> _Kernels | str:
    """Trace the call and write its kernels."""
    shape, places = call.tensors["logp"].shape, list[RecordPlaces]()
    outlines = {name: _outline(x, shape) for name, x in call.tensors.items()}
    if (0,) in outlines.values():
        return "a tensor has neither the shape of the tokens nor one number per sequence"
    tensors = {name: torch.zeros(outlines[name], dtype=x.dtype) for name, x in call.tensors.items()}

    def function(*tensors: Tensor) -> list[Tensor]:
        named = dict(zip(call.tensors, tensors, strict=True))
        results = results_of(spec, level, call._replace(tensors=named))
        places.append(RecordPlaces(results.metrics))
        return [results.loss, results.pack(), *results.known]

    try:
        run = TokenKernels(trace_graph(function, list(tensors.values())))
    except (UnfitGraphError, PolicyLossError) as error:  # the eager path refuses a wrong call
        return str(error)
    except Exception as error:  # torch may raise anything while it traces
        return _gave_up(error)
    return _Kernels(run, places[0])
