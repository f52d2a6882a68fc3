"""The operations of a traced loss, sorted by the axis they act on, and each as a line of Triton."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from policyloss.arguments import tracing

# The shape that graphs are traced with: distinct primes, so a shape identifies the axis.
ROWS, WIDTH = 5, 7


class UnfitGraphError(Exception):
    """The reason why a graph cannot become two kernels."""


def trace_graph(function: Callable[..., list[Tensor]], examples: Sequence[Tensor]) -> GraphModule:
    """The operations of `function(*examples)`.

    The function runs once, on stand-ins that have shapes but no values, so it must not read a
    value; it may use autograd.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad(), tracing():
        graph: GraphModule = make_fx(function, tracing_mode="fake")(*examples)
    return graph


def _kind(x: Any) -> str:
    """The axis of a traced tensor: "tokens", "rows" or, without one, "number"."""
    shapes = {(ROWS, WIDTH): "tokens", (ROWS,): "rows", (ROWS, 1): "rows", (): "number"}
    kind = shapes.get(tuple(x.shape)) if isinstance(x, Tensor) else None
    if kind is None:
        raise UnfitGraphError("it holds tensors that are neither tokens, nor rows, nor numbers")
    return kind


_TYPES = {torch.float64: "tl.float64", torch.int64: "tl.int64", torch.bool: "tl.int1"}
_TYPES |= dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), "tl.float32")
_TYPES |= dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), "tl.int32")
FLOATS = ("tl.float32", "tl.float64")
_VIEWS = ("alias", "detach", "expand", "reshape", "squeeze", "unsqueeze", "_unsafe_view", "view")
_SAME = (*_VIEWS, "clone", "contiguous", "_to_copy")
_FILLED = {"zeros_like": 0, "new_zeros": 0, "zeros": 0, "ones_like": 1, "ones": 1, "new_ones": 1}
_GIVEN = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}  # where the value stands
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_BOTH = {"bitwise_and": "&", "logical_and": "&", "bitwise_or": "|", "logical_or": "|"}
REDUCTIONS = ("sum", "amax", "amin")
PROPAGATE = ", propagate_nan=tl.PropagateNan.ALL"
# x is the first argument, y the second, in the type of the result.
_ELEMENTWISE = {
    "add": "{x} + {y}",
    "sub": "{x} - {y}",
    "rsub": "{y} - {x}",
    "mul": "{x} * {y}",
    "div": "{x} / {y}",
    "neg": "-{x}",
    "abs": "tl.abs({x})",
    "exp": "tl.exp({x})",
    "log": "tl.log({x})",
    "expm1": "_expm1({x})",
    "reciprocal": "1.0 / {x}",
    "sigmoid": "1.0 / (1.0 + tl.exp(-{x}))",
    "sigmoid_backward": "{x} * (1.0 - {y}) * {y}",
    "sign": "_sign({x})",
    "sgn": "_sign({x})",
    "maximum": "tl.maximum({x}, {y}" + PROPAGATE + ")",
    "minimum": "tl.minimum({x}, {y}" + PROPAGATE + ")",
    "fmax": "tl.maximum({x}, {y})",
    "bitwise_xor": "{x} ^ {y}",
}
HELPERS = '''
@triton.jit
def _expm1(x):
    """A series where eˣ − 1 would cancel."""
    t = 1 + x / 6 * (1 + x / 7 * (1 + x / 8 * (1 + x / 9)))
    small = x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * t))))
    return tl.where(tl.abs(x) < 0.5, small, tl.exp(x) - 1)


@triton.jit
def _sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)
'''


def name_of(node: Node) -> str:
    """The operation of a node, in place or not."""
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", str(node.target))
    return name.rstrip("_") if not name.startswith("__") else name


class Writer:
    """Writes the lines of one kernel. names: the variables of nodes that are written already."""

    def __init__(self, graph: TokenGraph) -> None:
        self.graph = graph
        self.names: dict[Node, str] = {}
        self.lines: list[str] = []

    def write(self, nodes: Iterable[Node], indent: str) -> None:
        """Write the lines of `nodes`, which are in order, unless they are written already."""
        for node in nodes:
            if node not in self.names and node.op != "placeholder":
                self.assign(node, self._expression(node), indent)

    def assign(self, node: Node, text: str, indent: str) -> None:
        """Write a line that gives `node` a variable with this value."""
        self.names[node] = f"v{len(self.names)}"
        self.lines.append(f"{indent}{self.names[node]} = {text}")

    def value(self, x: Any, kind: str) -> str:
        """An argument of an operation, in the Triton type `kind`."""
        if isinstance(x, Node) and x in self.graph.constants:
            x = self.graph.constants[x]
        if isinstance(x, Node):
            name = self.names[x]
            return name if self.graph.type_of(x) == kind else f"{name}.to({kind})"
        if kind in FLOATS:
            return f"float('{x}')" if math.isinf(x) or math.isnan(x) else repr(float(x))
        return repr(bool(x) if kind == "tl.int1" else int(x))

    def _expression(self, node: Node) -> str:
        name, kind, args = name_of(node), self.graph.type_of(node), node.args
        if name in _SAME:
            x, kinds = self.value(args[0], kind), self.graph.kinds
            spread = kinds[node] == "tokens" != kinds[args[0]]
            return f"tl.where(live, {x}, {x})" if spread else x
        if name == "where":
            x, y = self.value(args[1], kind), self.value(args[2], kind)
            return f"tl.where({self.value(args[0], 'tl.int1')}, {x}, {y})"
        if name == "masked_fill":
            x, y = self.value(args[0], kind), self.value(args[2], kind)
            return f"tl.where({self.value(args[1], 'tl.int1')}, {y}, {x})"
        if name in _COMPARE:
            wide = self.graph.common_type(args)
            return f"{self.value(args[0], wide)} {_COMPARE[name]} {self.value(args[1], wide)}"
        if name in _BOTH and kind == "tl.int1":
            return f"{self.value(args[0], kind)} {_BOTH[name]} {self.value(args[1], kind)}"
        if name in ("bitwise_not", "logical_not") and kind == "tl.int1":
            return f"{self.value(args[0], kind)} == 0"
        if name == "isnan":
            x = self.value(args[0], "tl.float32")
            return f"{x} != {x}"
        if name == "clamp":
            return self._clamp_text(node, kind)
        if name == "pow" and args[1] in (1, 2):
            x = self.value(args[0], kind)
            return x if args[1] == 1 else f"{x} * {x}"
        if name == "pow" and isinstance(args[0], (int, float)):
            return f"tl.exp({math.log(args[0])!r} * {self.value(args[1], kind)})"
        if name not in _ELEMENTWISE or node.kwargs.get("alpha", 1) != 1 or len(args) > 2:
            raise UnfitGraphError(f"it computes {name}")
        x = self.value(args[0], kind)
        y = self.value(args[1], kind) if len(args) > 1 else ""
        return _ELEMENTWISE[name].format(x=x, y=y)

    def _clamp_text(self, node: Node, kind: str) -> str:
        """The text of a clamp. A NaN stays NaN, because no comparison with it holds."""
        bounds = dict(zip(("x", "min", "max"), node.args, strict=False)) | node.kwargs
        text = x = self.value(bounds["x"], kind)
        for bound, sign in (("min", "<"), ("max", ">")):
            if bounds.get(bound) is not None:
                limit = self.value(bounds[bound], kind)
                text = f"tl.where({x} {sign} {limit}, {limit}, {text})"
        return text


class TokenGraph:
    """The nodes of a graph by axis, and whether they are inputs, sums of rows or totals."""

    def __init__(self, module: GraphModule) -> None:
        module.graph.eliminate_dead_code()
        self.nodes = [node for node in module.graph.nodes if node.op != "output"]
        (outputs,) = next(node for node in module.graph.nodes if node.op == "output").args
        self.outputs: list[Node] = []
        self.packed: list[Node] = []
        for node in outputs:
            if name_of(node) == "stack":
                self.packed = list(node.args[0])
                self.nodes.remove(node)
            else:
                self.outputs.append(node)
        self.constants = {node: x for node in self.nodes if (x := _constant(node)) is not None}
        for node in self.nodes:  # in order: the source of a view comes before it
            source = node.args[0] if node.args else None
            if name_of(node) in _SAME and source in self.constants:
                self.constants[node] = self.constants[source]
        self.kinds = {node: _kind(node.meta["val"]) for node in self.nodes}
        self.inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.totals = [n for n in self.nodes if self._reduces(n, "number")]
        self.row_sums = [n for n in self.nodes if self._reduces(n, "rows")]
        self._check()

    def _reduces(self, node: Node, to: str) -> bool:
        if name_of(node) not in REDUCTIONS or self.kinds[node] != to:
            return False
        return self.kinds[node.args[0]] != to

    def _check(self) -> None:
        late = set(self.totals)
        for node in self.nodes:
            in_place = node.op == "call_function" and str(node.target).split(".")[1].endswith("_")
            if in_place and (len(node.args[0].users) > 1 or node.args[0].op == "placeholder"):
                raise UnfitGraphError("it changes a tensor that is read again")
            if node not in self.constants and late & set(node.all_input_nodes):
                late.add(node)
            if node in late and self.kinds[node] != "number":
                raise UnfitGraphError("a token's numbers follow from sums over the whole call")
        wide = [n for n in self.nodes if n.meta["val"].dtype == torch.float64]
        if any(self.kinds[n] != "number" for n in wide):
            raise UnfitGraphError("it is computed in float64")

    def type_of(self, node: Node) -> str:
        """The Triton type that a node is computed in."""
        kind = _TYPES.get(node.meta["val"].dtype)
        if kind is None:
            raise UnfitGraphError(f"it holds numbers of {node.meta['val'].dtype}")
        return kind

    def common_type(self, args: Sequence[Any]) -> str:
        """The type in which two arguments are compared."""
        kinds = [self.type_of(x) for x in args if isinstance(x, Node)]
        kinds += ["tl.float32" for x in args if isinstance(x, float)]
        order = ("tl.float64", "tl.float32", "tl.int64", "tl.int32", "tl.int1")
        return next(kind for kind in order if kind in kinds)

    def dependencies(self, targets: Iterable[Node], known: Iterable[Node] = ()) -> list[Node]:
        """The nodes that `targets` depend on, in order, without `known` and nodes before them."""
        stop, wanted = set(known), set()
        left = list(targets)
        while left:
            node = left.pop()
            if node in wanted or node in stop:
                continue
            if node not in self.constants:
                wanted.add(node)
                left += node.all_input_nodes
        return [node for node in self.nodes if node in wanted]


def _constant(node: Node) -> float | None:
    name = name_of(node)
    if name in _FILLED:
        return _FILLED[name]
    if name not in _GIVEN:
        return None
    value = node.args[_GIVEN[name]]
    return value if isinstance(value, (int, float)) else None
