"""A traced loss as two Triton kernels: one pass over the tokens, and one over its partial sums.

The graph is traced from the eager source, so no formula is written twice: each of its operations
becomes a line of Triton. That takes seconds, where a general compiler may take a minute, because
all programs have one shape:

1. a program per span of tokens (a row, if the graph sums over rows; else `SPAN` tokens) writes the
   gradient of its tokens and one partial result of every sum over all tokens;
2. a single program adds these up and computes loss, scale and metrics from them.

Other graphs raise an `UnfitGraphError` with the reason: the numbers of a token may not depend on
sums over all tokens of the same call, nor on anything but elementwise operations and sums of rows.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Sequence
from functools import partial as with_arguments
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from policyloss.compiled.token_graph import (
    FLOATS,
    HELPERS,
    PROPAGATE,
    TokenGraph,
    UnfitGraphError,
    Writer,
    name_of,
)
from policyloss.functional.triton_modules import kernels, on_device_of

# A thread keeps BLOCK / (32·WARPS) partial results of every sum in registers.
BLOCK, SPAN, LAST_BLOCK, WARPS = 512, 4096, 256, 4
_NEUTRAL = {"sum": 0, "amax": -math.inf, "amin": math.inf}


def _first_kernel(
    graph: TokenGraph, gradients: list[Node], by_rows: bool
) -> tuple[str, list[Node]]:
    """The text of the first kernel, and its inputs.

    For each sum over rows, in the order in which the sums are needed, the kernel makes a pass over
    the tokens. The last pass writes the gradients and the partial sums. by_rows: whether a span is
    a row.
    """
    writer = Writer(graph)
    summed = [n.args[0] for n in graph.totals]
    everything = graph.dependencies([*gradients, *summed])
    inputs = [n for n in everything if n.op == "placeholder"]
    lines = writer.lines
    for i, node in enumerate(inputs):
        if graph.kinds[node] != "tokens":
            at = " + span" if graph.kinds[node] == "rows" else ""
            writer.assign(node, _load_text(graph, node, f"in{i}{at}"), "    ")

    def loop(targets: list[Node], finish: Callable[[str], None]) -> None:
        """Write a pass over the span that computes `targets` and all nodes they depend on."""
        parts = graph.dependencies(targets, writer.names)
        apart = [n for n in parts if graph.kinds[n] != "tokens"]
        writer.write(apart, "    ")
        before = dict(writer.names)
        lines.append("    for at_first in range(first, last, BLOCK):")
        lines.append("        at = at_first + tl.arange(0, BLOCK)")
        lines.append("        live = at < last")
        for i, node in enumerate(inputs):
            if node in parts and graph.kinds[node] == "tokens":
                writer.assign(node, _load_text(graph, node, f"in{i} + at", True), "        ")
        writer.write(parts, "        ")
        finish("        ")
        writer.names.clear()
        writer.names.update(before)

    for n, node in enumerate(graph.row_sums):
        if node not in everything:
            continue
        lines.append(f"    a{n} = {_beginning(graph, node)}")
        loop([node.args[0]], with_arguments(_gather, writer, node, f"a{n}"))
        writer.names[node] = f"r{n}"
        lines.append(f"    r{n} = {_reduction_text(node, f'a{n}')}.to({graph.type_of(node)})")
    tokens = [n for n in graph.totals if graph.kinds[n.args[0]] == "tokens"]
    for n, node in enumerate(graph.totals):
        if node in tokens:
            lines.append(f"    s{n} = {_beginning(graph, node)}")

    def last_loop(indent: str) -> None:
        for i, node in enumerate(gradients):
            value = writer.value(node, "tl.float32")
            lines.append(f"{indent}tl.store(out{i} + at, {value}, mask=live)")
        for n, node in enumerate(graph.totals):
            if node in tokens:
                _gather(writer, node, f"s{n}", indent)

    loop([*gradients, *(n.args[0] for n in tokens)], last_loop)
    for n, node in enumerate(graph.totals):
        if node in tokens:
            value = _reduction_text(node, f"s{n}")
        else:
            writer.write(graph.dependencies([node.args[0]], writer.names), "    ")
            value = writer.value(node.args[0], _sum_type(graph, node))
        lines.append(f"    tl.store(partial + {n} * spans + span, ({value}).to(tl.float32))")
    arguments = [f"in{i}" for i in range(len(inputs))]
    arguments += [f"out{i}" for i in range(len(gradients))]
    step = "width" if by_rows else "SPAN"
    text = [
        "@triton.jit(do_not_specialize=['spans'])",
        f"def tokens({', '.join(arguments)}, partial, n, width, spans, "
        "BLOCK: tl.constexpr, SPAN: tl.constexpr):",
        "    span = tl.program_id(0).to(tl.int64)",
        f"    first = span * {step}",
        f"    last = tl.minimum(first + {step}, n)",
        *lines,
    ]
    return "\n".join(text), inputs


def _load_text(graph: TokenGraph, node: Node, where: str, masked: bool = False) -> str:
    mask = ", mask=live, other=0" if masked else ""
    kind = graph.type_of(node)
    # Flags are passed as bytes.
    tail = " != 0" if kind == "tl.int1" else f".to({kind})"
    return f"tl.load({where}{mask}){tail}"


def _sum_type(graph: TokenGraph, node: Node) -> str:
    """The type of the partial results of a sum."""
    return "tl.float32" if graph.type_of(node) in FLOATS else "tl.int32"


def _beginning(graph: TokenGraph, node: Node) -> str:
    return f"tl.full([BLOCK], {_start(node)}, {_sum_type(graph, node)})"


def _start(node: Node) -> str:
    value = _NEUTRAL[name_of(node)]
    return f"float('{value}')" if isinstance(value, float) else "0"


def _gather(writer: Writer, node: Node, into: str, indent: str) -> None:
    """Add the tokens of a block to the partial results of a sum."""
    kind = _sum_type(writer.graph, node)
    value = f"tl.where(live, {writer.value(node.args[0], kind)}, {_start(node)})"
    value = f"{value}.to({kind})" if name_of(node) == "sum" else value
    writer.lines.append(f"{indent}{into} = {_merge_text(node, into, value)}")


def _merge_text(node: Node, a: str, b: str) -> str:
    """Two partial results of a sum, maximum or minimum as one."""
    if name_of(node) == "sum":
        return f"{a} + {b}"
    return f"tl.{name_of(node)[1:]}imum({a}, {b}{PROPAGATE})"


def _reduction_text(node: Node, block: str) -> str:
    """The reduction of a block to one number. (Triton's maximum of a block ignores NaN.)"""
    if name_of(node) == "sum":
        return f"tl.sum({block})"
    bad = f"tl.sum(({block} != {block}).to(tl.int32))"
    return f"tl.where({bad} > 0, float('nan'), tl.{name_of(node)[1:]}({block}))"


def _second_kernel(graph: TokenGraph, numbers: list[Node]) -> tuple[str, list[Node]]:
    """The text of the pass over the partial results, and its inputs."""
    writer = Writer(graph)
    targets = graph.dependencies([*numbers, *graph.packed], graph.totals)
    inputs = [n for n in targets if n.op == "placeholder"]
    lines = writer.lines
    for i, node in enumerate(inputs):
        writer.assign(node, _load_text(graph, node, f"in{i}"), "    ")
    for n, node in enumerate(graph.totals):
        lines.append(f"    s{n} = tl.full([BLOCK], {_start(node)}, tl.float64)")
    lines.append("    for at_first in range(0, spans, BLOCK):")
    lines.append("        at = at_first + tl.arange(0, BLOCK)")
    for n, node in enumerate(graph.totals):
        where = f"partial + {n} * spans + at, mask=at < spans, other={_start(node)}"
        value = f"tl.load({where}).to(tl.float64)"
        lines.append(f"        s{n} = {_merge_text(node, f's{n}', value)}")
    for n, node in enumerate(graph.totals):
        writer.names[node] = f"t{n}"
        lines.append(f"    t{n} = {_reduction_text(node, f's{n}')}.to({graph.type_of(node)})")
    writer.write(targets, "    ")
    for i, node in enumerate(numbers):
        lines.append(f"    tl.store(numbers + {i}, {writer.value(node, 'tl.float32')})")
    for i, node in enumerate(graph.packed):
        lines.append(f"    tl.store(packed + {i}, {writer.value(node, 'tl.float64')})")
    arguments = [f"in{i}" for i in range(len(inputs))]
    text_lines = [
        "@triton.jit(do_not_specialize=['spans'])",
        f"def finish({', '.join([*arguments, 'partial', 'numbers', 'packed', 'spans'])}, "
        "BLOCK: tl.constexpr):",
        *lines,
    ]
    return "\n".join(text_lines), inputs


class TokenKernels:
    """The kernels of a graph, which Triton compiles when they first run.

    Raises `UnfitGraphError` if the graph does not fit.
    """

    def __init__(self, module: GraphModule) -> None:
        graph = TokenGraph(module)
        gradients = [n for n in graph.outputs if graph.kinds[n] == "tokens"]
        numbers = [n for n in graph.outputs if graph.kinds[n] != "tokens"]
        if any(graph.kinds[n] != "number" for n in (*numbers, *graph.packed)):
            raise UnfitGraphError("it returns numbers of rows")
        self.by_rows = "rows" in graph.kinds.values()  # a span is a row
        first, early = _first_kernel(graph, gradients, self.by_rows)
        second, late = _second_kernel(graph, numbers)
        # The indices of the graph's arguments that the first and the second kernel read.
        self.early, self.late = ([graph.inputs.index(n) for n in nodes] for nodes in (early, late))
        self.gradients, self.partials = len(gradients), len(graph.totals)
        self.numbers, self.packed = len(numbers), len(graph.packed)
        self.text = text = f"{HELPERS}\n\n{first}\n\n{second}\n"
        # Triton reads the source of a kernel by its file name.
        name = f"<policyloss kernels {abs(hash(text)):x}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        names = {"triton": kernels("triton"), "tl": kernels("triton.language")}
        space: dict[str, Any] = {**names, "__name__": __name__}
        exec(compile(text, name, "exec"), space)
        self._tokens, self._finish = space["tokens"], space["finish"]
        self.has_run = False

    def __call__(self, tensors: Sequence[Tensor], shape: torch.Size) -> list[Tensor]:
        """The outputs of the graph: [loss, packed, *gradients, *scale].

        tensors: the arguments of the graph. shape: the shape of the tokens.
        """
        n, device = math.prod(shape), tensors[0].device
        spans = shape[0] if self.by_rows else -(-n // SPAN)
        partial = torch.empty(self.partials * spans, dtype=torch.float32, device=device)
        numbers = torch.empty(self.numbers, dtype=torch.float32, device=device)
        packed = torch.empty(self.packed, dtype=torch.float64, device=device)
        gradients = [
            torch.empty(shape, dtype=torch.float32, device=device) for _ in range(self.gradients)
        ]
        read = [_readable(x) for x in tensors]
        first = [read[i] for i in self.early]
        second = [read[i] for i in self.late]
        with on_device_of(tensors[0]):
            sizes: Any = {"BLOCK": BLOCK, "SPAN": SPAN, "num_warps": WARPS}
            self._tokens[(spans,)](*first, *gradients, partial, n, shape[-1], spans, **sizes)
            self._finish[(1,)](
                *second, partial, numbers, packed, spans, BLOCK=LAST_BLOCK, num_warps=WARPS
            )
        self.has_run = True
        loss, *scale = numbers.unbind()
        return [loss, packed, *gradients, *scale]


def _readable(x: Tensor) -> Tensor:
    """`x` in the form that a kernel reads: contiguous, and flags as bytes."""
    x = x if x.is_contiguous() else x.contiguous()
    return x.view(torch.uint8) if x.dtype == torch.bool else x
