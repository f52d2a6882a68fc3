"""Traces a function of tensors, its autograd included, and compiles it to a few kernels."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule


class Fused(NamedTuple):
    """`run(*tensors)`: the compiled function. `fits(tensors)`: whether it may run on shapes it was
    not made for.

    `run` takes no gradients, and believes that the tensors have the dtypes and devices of the
    examples.
    """

    run: Callable[..., list[Tensor]]
    fits: Callable[[Sequence[Tensor]], bool]


def fused(
    function: Callable[..., list[Tensor]],
    examples: Sequence[Tensor],
    *,
    dynamic: bool,
    options: dict[str, Any] | None = None,
    rewrite: Callable[[GraphModule], GraphModule] | None = None,
) -> Fused:
    """Compile `function(*tensors) → list of tensors` for tensors like `examples`, with fixed or
    with `dynamic` shapes.

    The function runs once, on stand-ins that have shapes but no values, so it must not read a value
    back; it may use autograd. A size of 1 stays fixed, because it broadcasts. options: Inductor's
    (see `torch._inductor.config`). rewrite: what is done to the traced graph before it is compiled.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._inductor import compile as inductor
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, static_shapes=not dynamic)

    def stand_in(x: Tensor) -> FakeTensor:
        # Where x begins in its storage is no matter.
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        if not dynamic:
            return mode.from_tensor(x)
        sizes = [DimDynamic.STATIC if size == 1 else DimDynamic.DYNAMIC for size in x.shape]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    with torch.no_grad():
        stand_ins = [stand_in(x) for x in examples]
        # The dispatcher in Python knows operations with symbols for sizes that the one in C++ would
        # fix to a number.
        with _tracing(), mode, enable_python_dispatcher():
            graph = make_fx(function)(*stand_ins)
        graph = graph if rewrite is None else rewrite(graph)
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
    # All that was assumed about the sizes, by the function (equal shapes) and by the compiler
    # (32-bit indices).
    assumed = shapes.produce_guards_expression(stand_ins, ignore_static=False) or "True"

    def fits(tensors: Sequence[Tensor]) -> bool:
        outlines = [torch.empty_strided(x.shape, x.stride(), device="meta") for x in tensors]
        return bool(shapes.evaluate_guards_expression(assumed, outlines))

    return Fused(run, fits)


class _InThisThread:
    """True in the thread that made it: torch's flag is one for all, and others do not trace."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


@contextmanager
def _tracing() -> Iterator[None]:
    """Set `torch.compiler.is_compiling()`: values cannot be checked on stand-ins."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = _InThisThread()  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before
