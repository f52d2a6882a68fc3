"""Traces a function of tensors, its autograd included, and compiles it to a few kernels.

What is used of torch beyond its public interface stands in `NEEDED_OF_TORCH`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from policyloss.arguments import tracing

# Functions of torch that have no public name yet, and what they are used for.
NEEDED_OF_TORCH = {
    "torch.fx.experimental.proxy_tensor.make_fx": "traces a function and its gradient to a graph",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.produce_guards_expression": (
        "says what a graph for every shape assumes about sizes"
    ),
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression": (
        "says whether other sizes fit that"
    ),
    "torch._inductor.compile": "compiles a graph that was traced",
    "torch._dynamo.utils.get_metrics_context": (
        "counts what compiling takes, without which torch 2.6 does not read its cache"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": "cuts sums in two while they are traced",
    "torch._assert_async": "reads a condition on a CPU without a graph break",
    "torch._C._are_functorch_transforms_active": "tells whether torch.func transforms a call",
    "torch._foreach_copy_": "fills the memory of a recorded CUDA graph by one kernel",
}


def missing_of_torch() -> list[str]:
    """Those of `NEEDED_OF_TORCH` that the installed torch does not have."""
    return [name for name in NEEDED_OF_TORCH if not _exists(name)]


def _exists(name: str) -> bool:
    module, *rest = name.rsplit(".", 2 if ".ShapeEnv." in name else 1)
    try:
        thing: Any = import_module(module)
        for attribute in rest:
            thing = getattr(thing, attribute)
    except (ImportError, AttributeError):
        return False
    return callable(thing)


class Fused(NamedTuple):
    """`run(*tensors)`: the compiled function. `fits(tensors)`: whether it may run on shapes it was
    not made for.

    `run` takes no gradients, and believes that the tensors have the dtypes and devices of the
    examples.
    """

    run: Callable[..., list[Tensor]]
    fits: Callable[[Sequence[Tensor]], bool]


def traced(
    function: Callable[..., list[Tensor]], examples: Sequence[Tensor], *, dynamic: bool = False
) -> GraphModule:
    """The operations of `function(*examples)`, with fixed or with `dynamic` sizes.

    The function runs once, on stand-ins that have shapes but no values, so it must not read a value
    back; it may use autograd. A size of 1 stays fixed, because it broadcasts.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    # Where a tensor begins in its storage is no matter.
    outlines = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in examples
    ]
    with torch.no_grad(), tracing():
        trace = make_fx(function, tracing_mode="symbolic" if dynamic else "fake")
        graph: GraphModule = trace(*outlines)
    return graph


def fused(
    function: Callable[..., list[Tensor]],
    examples: Sequence[Tensor],
    *,
    dynamic: bool,
    options: dict[str, Any] | None = None,
) -> Fused:
    """Compile `function(*tensors) → list of tensors` for tensors like `examples`.

    options: Inductor's (see `torch._inductor.config`).
    """
    from torch._dynamo.utils import get_metrics_context
    from torch._inductor import compile as inductor

    graph = traced(function, examples, dynamic=dynamic)
    stand_ins = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad(), get_metrics_context():
        try:
            run = inductor(graph, list(stand_ins), options=options)
        except RuntimeError as problem:  # Inductor's and Triton's own failures are of this kind
            last = str(problem).strip().splitlines()[-1]
            warnings.warn(
                f"torch's compiler failed ({last}); the operations run one by one, as traced.",
                stacklevel=2,
            )
            run = graph
    if not dynamic:
        return Fused(run, lambda tensors: False)
    shapes: Any = graph.shape_env
    # All that was assumed about the sizes, by the function (equal shapes) and by the compiler
    # (32-bit indices).
    assumed = shapes.produce_guards_expression(stand_ins, ignore_static=False) or "True"

    def fits(tensors: Sequence[Tensor]) -> bool:
        outlines = [torch.empty_strided(x.shape, x.stride(), device="meta") for x in tensors]
        return bool(shapes.evaluate_guards_expression(assumed, outlines))

    return Fused(run, fits)
