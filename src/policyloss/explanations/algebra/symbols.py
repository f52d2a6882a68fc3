"""Symbols that stand for tensors: run on them, a part records its computation.

`Symbol` takes part in arithmetic and in torch's functions (through `__torch_function__`) and
records an `Expression`. `Written` is a number that remembers how it was computed, so that `1 -
eps_low` is printed as `1 - 0.2`. An unsupported operation raises an error; then the formula is not
derived.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from policyloss.explanations.algebra import expression as algebra


class NotDerivableError(Exception):
    """A computation that symbols cannot follow."""


class Written(float):
    """A float that remembers the expression it comes from."""

    expression: algebra.Expression

    def __new__(cls, value: float, expression: algebra.Expression | None = None) -> Written:
        """`value`, printed as `expression`, or as a number without one."""
        self = super().__new__(cls, value)
        plain = expression is None or math.isinf(value)
        self.expression = algebra.constant(value) if plain or expression is None else expression
        return self

    def __neg__(self) -> Written:
        return Written(-float(self), algebra.negative(self.expression))


def _compute(operator: str, a: Any, b: Any) -> Any:
    if not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        return NotImplemented
    x, y = float(a), float(b)
    value = {"+": x + y, "-": x - y, "*": x * y, "/": x / y if y else math.nan}[operator]
    return Written(value, algebra.Expression(operator, (expression_of(a), expression_of(b))))


def expression_of(x: Any) -> algebra.Expression:
    """The expression of a symbol or a number."""
    if isinstance(x, (Symbol, Written)):
        return x.expression
    if isinstance(x, bool):
        return algebra.boolean(x)
    if isinstance(x, (int, float)):
        return algebra.constant(x)
    raise NotDerivableError(f"a {type(x).__name__} is neither a symbol nor a number")


class Symbol:
    """Stands for a tensor with one number (or True or False) per valid token."""

    dtype, device = torch.float64, torch.device("cpu")
    __hash__ = None  # type: ignore[assignment]  # `==` compares token by token

    def __init__(self, expression: algebra.Expression) -> None:
        # Results under `torch.no_grad()` have no gradient.
        self.expression = expression if torch.is_grad_enabled() else algebra.stop(expression)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called = getattr(func, "__name__", str(func))
        if called not in _FUNCTIONS:
            raise NotDerivableError(f"torch.{called} is no function of the printed formulas")
        return _FUNCTIONS[called](*args, **(kwargs or {}))

    def __getattr__(self, called: str) -> Callable[..., Any]:
        if called not in _FUNCTIONS:
            raise AttributeError(f"a symbol has no {called}")
        return partial(_FUNCTIONS[called], self)

    def __bool__(self) -> bool:
        raise NotDerivableError("which way to go depends on the data")

    def __neg__(self) -> Symbol:
        return Symbol(algebra.negative(self.expression))

    def __invert__(self) -> Symbol:
        return Symbol(algebra.invert(self.expression))

    def __abs__(self) -> Symbol:
        return _call("abs", self)


def _binary(operator: str, a: Any, b: Any) -> Symbol:
    return Symbol(algebra.binary(operator, expression_of(a), expression_of(b)))


_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


def _define(owner: type, compute: Callable[..., Any], operators: dict[str, str]) -> None:
    """Give `owner` these operators, computed by `compute(operator, left, right)`."""
    for method, operator in operators.items():
        result = partial(compute, operator)
        setattr(owner, f"__{method}__", lambda left, right, f=result: f(left, right))
        if method in _ARITHMETIC:
            setattr(owner, f"__r{method}__", lambda right, left, f=result: f(left, right))


_define(Written, _compute, _ARITHMETIC)
_define(Symbol, _binary, {**_ARITHMETIC, **_COMPARISONS, "and": "&", "or": "|", "pow": "**"})


def _call(called: str, *arguments: Any) -> Symbol:
    return Symbol(algebra.function(called, *(expression_of(x) for x in arguments)))


def _clamp(x: Any, *limits: Any, **named: Any) -> Symbol:
    """`x.clamp(low, high)`, or with `min=` and `max=`."""
    both = {**dict(zip(("min", "max"), limits, strict=False)), **named}
    ends = (both.get(end) for end in ("min", "max"))
    low, high = (None if end is None else expression_of(end) for end in ends)
    return Symbol(algebra.clamp(expression_of(x), low, high))


def _convert(x: Symbol, *args: Any, **kwargs: Any) -> Symbol:
    if any(isinstance(a, Symbol) for a in args):
        raise NotDerivableError("a symbol is converted to the dtype of another")
    return x


def _constant(expression: algebra.Expression) -> Callable[..., Symbol]:
    return lambda *args, **kwargs: Symbol(expression)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        called: partial(_call, called)
        for called in ("exp", "log", "abs", "sigmoid", "sign", "where")
    },
    **{called: partial(_call, "max") for called in ("max", "maximum")},
    **{called: partial(_call, "min") for called in ("min", "minimum")},
    **dict.fromkeys(("clamp", "clip"), _clamp),
    **dict.fromkeys(("to", "float", "double", "contiguous"), _convert),
    "clamp_min": lambda x, least: _clamp(x, min=least),
    "clamp_max": lambda x, most: _clamp(x, max=most),
    "relu": lambda x: _clamp(x, min=0),
    "expm1": lambda x: _binary("-", _call("exp", x), 1),
    "square": lambda x: x**2,
    "pow": lambda x, y: _binary("**", x, y),
    "neg": lambda x: -x,
    "add": partial(_binary, "+"),
    "sub": partial(_binary, "-"),
    "mul": partial(_binary, "*"),
    "div": partial(_binary, "/"),
    "logical_and": partial(_binary, "&"),
    "logical_or": partial(_binary, "|"),
    "logical_not": lambda x: ~x,
    "detach": lambda x: Symbol(algebra.stop(expression_of(x))),
    "masked_fill": lambda x, condition, value: _call("where", condition, value, x),
    "full_like": lambda x, value, **kwargs: Symbol(expression_of(value)),
    "ones_like": lambda x, dtype=None, **kwargs: Symbol(
        algebra.TRUE if dtype is torch.bool else algebra.ONE
    ),
    "zeros_like": lambda x, dtype=None, **kwargs: Symbol(
        algebra.FALSE if dtype is torch.bool else algebra.ZERO
    ),
    # Guards against NaN and infinities are not printed.
    "isnan": _constant(algebra.FALSE),
    "isinf": _constant(algebra.FALSE),
    "isfinite": _constant(algebra.TRUE),
}


class SymbolicSequences:
    """Stands for `Sequences`. over: "seq" for the sequences, "run" for the runs of the mask."""

    cp_group = offsets = ids = None

    def __init__(self, over: str = "seq") -> None:
        self.over = over

    def sum(self, x: Any) -> Symbol:
        """The sum of `x`; of the mask, the number of tokens."""
        counted = expression_of(x) == algebra.TRUE
        return Symbol(algebra.LENGTHS[self.over]) if counted else _call(f"{self.over}_sum", x)

    def sums(self, *xs: Any) -> tuple[Symbol, ...]:
        """The `sum` of each."""
        return tuple(self.sum(x) for x in xs)

    def max(self, x: Any) -> Symbol:
        """The largest `x`; not differentiable."""
        return Symbol(algebra.stop(_call(f"{self.over}_max", x).expression))

    def expand(self, x: Any) -> Any:
        """Return `x`: a number per sequence is written like a number per token."""
        return x

    def runs(self, mask: Any) -> SymbolicSequences:
        """The runs of the mask."""
        return SymbolicSequences("run")
