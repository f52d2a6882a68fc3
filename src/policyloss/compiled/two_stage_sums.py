"""Sums over all tokens of a traced graph, written so that a GPU needs two kernels for all of them
together.

Left alone, the compiler cuts each sum over n tokens in two by itself and fuses the first halves,
which read the same tokens. The second halves read nothing in common, so that each becomes a kernel
of its own, which takes longer to launch than to run. Here the cut is made in the graph, at the same
place for all, and the second halves are given something to share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten
# What reduces a whole tensor to a number, in a traced graph.
_WHOLE = (aten.sum.default, aten.amax.default, aten.amin.default)
# Partial results of a sum: enough to keep every processor busy in the first stage, few enough for
# one block in the second.
FEWEST, MOST = 512, 4096


def in_two_stages(module: GraphModule, n: int) -> GraphModule:
    """Write every sum, maximum and minimum over all `n` tokens as `[G, n/G] → [G] → 0-dim`, in
    place.

    The numbers are the same but for rounding. Rows whose number is a symbol are one partial result
    each; a pack whose length is a symbol, or has no divisor to cut it by, is left alone.
    """
    graph = module.graph
    cuts = {
        node: cut
        for node in graph.nodes
        if node.target in _WHOLE and (cut := _cut(node, n)) is not None
    }
    shared: dict[int | str, Node] = {}
    for node, cut in cuts.items():
        with graph.inserting_before(node):
            partial = _first_stage(graph, node, cut)
            total = _second_stage(graph, node, partial, shared.setdefault(cut, partial))
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    graph.lint()
    module.recompile()
    return module


def _cut(node: Node, n: int) -> int | str | None:
    """G, the number of partial results of a reduction or its symbol; None to leave it alone."""
    x = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if x is None or len(node.args) > 1:
        return None
    if not all(isinstance(size, int) for size in x.shape):
        return str(x.shape[0]) if x.dim() == 2 else None
    return partials(x.shape[0] if x.dim() > 1 else 1, n) or None if x.numel() == n else None


def partials(rows: int, n: int) -> int:
    """A divisor of n between FEWEST and MOST, made of rows cut or joined evenly; 0 if none."""
    if rows > MOST:
        return next(
            (
                rows // k
                for k in range(rows // MOST, rows // FEWEST + 1)
                if k and rows % k == 0 and rows // k <= MOST
            ),
            0,
        )
    width = n // rows
    fewest = -(-FEWEST // rows)
    return next(
        (rows * k for k in range(fewest, min(MOST // rows, width) + 1) if width % k == 0), 0
    )


def _first_stage(graph: Graph, node: Node, cut: int | str) -> Node:
    """`[G, n/G] → [G]`."""
    x = (
        node.args[0]
        if isinstance(cut, str)
        else graph.call_function(aten.reshape.default, (node.args[0], [cut, -1]))
    )
    whole_sum = node.target is aten.sum.default
    reduce: Any = aten.sum.dim_IntList if whole_sum else node.target
    return graph.call_function(reduce, (x, [1]), dict(node.kwargs))


def _second_stage(graph: Graph, node: Node, partial: Node, first: Node) -> Node:
    """`[G] → 0-dim`, reading `first` beside `partial` in a condition that always holds: what shares
    a read, the compiler fuses.
    """
    equal, unequal = (
        graph.call_function(compare, (first, first)) for compare in (aten.eq.Tensor, aten.ne.Tensor)
    )
    always = graph.call_function(aten.logical_or.default, (equal, unequal))
    never = graph.call_function(aten.zeros_like.default, (partial,))
    chosen = graph.call_function(aten.where.self, (always, partial, never))
    return graph.call_function(node.target, (chosen,), dict(node.kwargs))  # type: ignore[arg-type]
