"""The expressions of a printed formula: a small tree that can be built, printed, parsed and walked.

The functions that join expressions (`function`, `where`, `binary`, …) return a node, or something
simpler that is equal to it in value and gradient. They leave out details that a reader
does not need: a bound that cannot bind, a guard against NaN, a stopped gradient of a constant.

These are all operators; a printer of another notation needs a case for each:

| operator | arguments | value |
|---|---|---|
| "name" | none | the name: an argument of `policy_loss`, or a line of the formula |
| "number" | none | a float |
| "boolean" | none | True or False |
| "call" | its arguments | the name of a function of the vocabulary: exp, clip, where, seq_mean, … |
| "negative", "~" | one | "" |
| "+", "-", "*", "/", "**", "<", "<=", ">", ">=", "==", "!=", "&" and the bar | two | "" |

The text of an expression is Python, and `parse(str(x)) == x`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne

from policyloss.parts.wording import number

COMPARISONS = {"<": lt, "<=": le, ">": gt, ">=": ge, "==": eq, "!=": ne}
# Python's precedences: a comparison binds weakest, a power strongest.
_PRECEDENCE = {
    **dict.fromkeys(COMPARISONS, 1),
    "|": 2,
    "&": 3,
    **dict.fromkeys("+-", 4),
    **dict.fromkeys("*/", 5),
    **dict.fromkeys(("negative", "~"), 6),
    "**": 7,
}
_UNARY, _ATOM = 6, 8
# The names that carry a gradient; the others are constants of the loss.
_CARRY_GRADIENT = frozenset(("logp", "entropy", "divergence", "ratio", "log_ratio"))
_BOOLEAN_FUNCTIONS = ("seq_any", "seq_all", "run_all")


@dataclass(frozen=True)
class Expression:
    """One node: see the table of operators above. Compared by structure; `str()` is its text."""

    operator: str
    arguments: tuple[Expression, ...] = ()
    value: str | float = ""

    def __str__(self) -> str:
        return _text(self)

    @property
    def is_leaf(self) -> bool:
        """Whether it is a name, a number, True or False."""
        return self.operator in ("name", "number", "boolean")

    @property
    def is_boolean(self) -> bool:
        """Whether it is True or False for each token."""
        if self.operator in (*COMPARISONS, "&", "|", "~", "boolean"):
            return True
        if self.operator == "call" and self.value == "where":
            return self.arguments[1].is_boolean
        return self.operator == "call" and self.value in _BOOLEAN_FUNCTIONS

    @property
    def carries_gradient(self) -> bool:
        """Whether a gradient flows through it to `logp` or `entropy`."""
        if self.operator == "name":
            return self.value in _CARRY_GRADIENT
        if self.is_boolean or self.calls("sg"):
            return False
        return any(argument.carries_gradient for argument in self.arguments)

    def calls(self, function: str) -> bool:
        """Whether it is a call of `function`."""
        return self.operator == "call" and self.value == function

    def walk(self) -> Iterator[Expression]:
        """The expression and all subexpressions, parents first."""
        yield self
        for argument in self.arguments:
            yield from argument.walk()

    def substitute(self, change: Callable[[Expression], Expression | None]) -> Expression:
        """A copy with subexpressions replaced, from the top.

        change: returns the replacement of a subexpression, or None to descend into it.
        """
        other = change(self)
        if other is not None:
            return other
        arguments = tuple(argument.substitute(change) for argument in self.arguments)
        return Expression(self.operator, arguments, self.value)


def name(text: str) -> Expression:
    """A name, as an expression."""
    return Expression("name", (), text)


def constant(x: float) -> Expression:
    """A number, as an expression."""
    return Expression("number", (), float(x))


def boolean(x: bool) -> Expression:
    """True or False, as an expression."""
    return Expression("boolean", (), x)


def call(function: str, *arguments: Expression) -> Expression:
    """The call of a function of the vocabulary, as an expression."""
    return Expression("call", arguments, function)


def _text(x: Expression, least: int = 0) -> str:
    """The text of `x`, in brackets if it binds weaker than `least`."""
    precedence = _PRECEDENCE.get(x.operator, _ATOM)
    if x.operator in ("name", "boolean"):
        text = str(x.value)
    elif x.operator == "number":
        text = number(float(x.value))
        precedence = _UNARY if text.startswith("-") else _ATOM
    elif x.operator == "call":
        text = f"{x.value}({', '.join(_text(argument) for argument in x.arguments)})"
    elif len(x.arguments) == 1:
        sign = "-" if x.operator == "negative" else x.operator
        text = f"{sign}{_text(x.arguments[0], _UNARY)}"
    else:
        power, compares = x.operator == "**", x.operator in COMPARISONS
        left = _text(x.arguments[0], precedence + (power or compares))
        right = _text(x.arguments[1], _UNARY if power else precedence + 1)
        text = f"{left} {x.operator} {right}"
    return f"({text})" if precedence < least else text


_BINARY: dict[type, str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.Pow: "**",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}


def parse(text: str) -> Expression:
    """The expression with this text."""
    return _parse(ast.parse(text, mode="eval").body)


def _parse(node: ast.expr) -> Expression:
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return Expression(_BINARY[type(node.op)], (_parse(node.left), _parse(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
        sides = (_parse(node.left), _parse(node.comparators[0]))
        return Expression(_BINARY[type(node.ops[0])], sides)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        inner = _parse(node.operand)
        if isinstance(node.op, ast.Invert):
            return Expression("~", (inner,))
        if inner.operator == "number":
            return constant(-float(inner.value))
        return Expression("negative", (inner,))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return call(node.func.id, *(_parse(argument) for argument in node.args))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return boolean(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return constant(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        text = ast.unparse(node)
        return constant(math.inf) if text == "inf" else name(text)
    raise ValueError(f"{ast.unparse(node)!r} is not an expression of the printed formulas.")


TRUE, FALSE, ZERO, ONE = boolean(True), boolean(False), constant(0), constant(1)
# The number of tokens of a sequence and of a run of the mask; at least 1 at every token.
LENGTHS = {"seq": name("L"), "run": name("run_length")}
# The neutral element on the right of each operator.
_NEUTRAL = {"+": ZERO, "-": ZERO, "*": ONE, "/": ONE, "**": ONE}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def stop(x: Expression) -> Expression:
    """`x` with its gradient stopped."""
    return call("sg", without_stops(x)) if x.carries_gradient else x


def without_stops(x: Expression) -> Expression:
    """`x` without the stops of gradients in it: the same value."""
    if x.is_leaf:
        return x
    arguments = [without_stops(argument) for argument in x.arguments]
    if x.calls("sg"):
        return arguments[0]
    if x.operator == "call":
        return function(str(x.value), *arguments)
    if len(arguments) == 1:
        return negative(arguments[0]) if x.operator == "negative" else invert(arguments[0])
    return binary(x.operator, *arguments)


def function(called: str, *arguments: Expression) -> Expression:
    """A call; a function of stopped arguments becomes the stopped function of the arguments."""
    if called.endswith(("_mean", "_sum", "_max")) and arguments[0].operator == "number":
        return arguments[0] if arguments[0] == ZERO else call(called, *arguments)
    if called == "where":
        return where(*arguments)
    if called in ("min", "max") and arguments[0] == arguments[1]:
        return arguments[0]
    node = call(called, *arguments)
    if _stops_inside(*arguments) and not node.carries_gradient and not node.is_boolean:
        return call("sg", without_stops(node))
    return node


def where(condition: Expression, yes: Expression, no: Expression) -> Expression:
    """`yes` where `condition` holds, else `no`."""
    if condition.operator == "boolean" or yes == no:
        return yes if condition != FALSE else no
    if (yes, no) == (TRUE, FALSE):
        return condition
    node = call("where", condition, yes, no)
    if _stops_inside(yes, no) and not node.carries_gradient:
        return call("sg", call("where", condition, without_stops(yes), without_stops(no)))
    return node


def _stops_inside(*arguments: Expression) -> bool:
    """Whether a gradient is stopped somewhere inside one of `arguments`."""
    return any(x.calls("sg") for argument in arguments for x in argument.walk())


def clamp(x: Expression, low: Expression | None, high: Expression | None) -> Expression:
    """`x` within bounds; None, infinities and a bound that `x` cannot reach do not bind."""
    if low is not None and (low == constant(-math.inf) or _never_below(x, low)):
        low = None
    if high == constant(math.inf):
        high = None
    if x.operator == "number" and (low or high or ZERO).operator == "number":
        least = -math.inf if low is None else _value(low)
        return constant(min(max(_value(x), least), math.inf if high is None else _value(high)))
    if low is not None and high is not None:
        return function("clip", x, low, high)
    if high is not None:
        return function("min", x, high)
    return x if low is None else function("max", x, low)


def negative(x: Expression) -> Expression:
    """`x` with the opposite sign."""
    if x.operator == "number":
        return constant(-_value(x))
    if x.operator == "negative":
        return x.arguments[0]
    if x.operator == "-" and all(side.is_leaf or side.calls("sg") for side in x.arguments):
        return binary("-", x.arguments[1], x.arguments[0])
    return Expression("negative", (x,))


def invert(x: Expression) -> Expression:
    """`~x` of a condition."""
    if x.operator == "boolean":
        return boolean(x == FALSE)
    if x.operator == "~":
        return x.arguments[0]
    if x.operator in _OPPOSITE:
        return Expression(_OPPOSITE[x.operator], x.arguments)
    return Expression("~", (x,))


def binary(operator: str, a: Expression, b: Expression) -> Expression:
    """`a` and `b`, joined by an operator."""
    if operator in COMPARISONS:
        return _comparison(operator, without_stops(a), without_stops(b))
    if operator in ("&", "|"):
        neutral = TRUE if operator == "&" else FALSE
        if TRUE in (a, b) or FALSE in (a, b):
            rest = b if a.operator == "boolean" else a
            return rest if neutral in (a, b) else invert(neutral)
    elif b == _NEUTRAL[operator]:
        return a
    elif (operator, a) in (("+", ZERO), ("*", ONE)):
        return b
    elif operator == "-" and a == b and a.is_leaf:
        return ZERO
    elif operator == "/":
        for over, length in LENGTHS.items():
            if b == length and a.calls(f"{over}_sum"):
                return function(f"{over}_mean", *a.arguments)
    return Expression(operator, (a, b))


def _comparison(operator: str, a: Expression, b: Expression) -> Expression:
    if b.operator == "number":
        if a.operator == "number":
            return boolean(COMPARISONS[operator](_value(a), _value(b)))
        if math.isinf(_value(b)):  # guards against infinite values are not printed
            below = operator in ("<", "<=", "!=")
            return boolean(below if _value(b) > 0 or operator == "!=" else operator in (">", ">="))
        if operator == "<" and _never_below(a, b):
            return FALSE
        if operator == ">=" and _never_below(a, b):
            return TRUE
        if operator == ">" and b == ZERO and a.calls("seq_sum") and a.arguments[0].is_boolean:
            return call("seq_any", *a.arguments)
    return Expression(operator, (a, b))


def _never_below(x: Expression, least: Expression) -> bool:
    """Whether `x` is known to be at least `least`, a number."""
    if least.operator != "number":
        return False
    if x in LENGTHS.values():
        return _value(least) <= 1
    positive = x == name("ratio") or any(x.calls(f) for f in ("exp", "abs", "sigmoid"))
    if x.calls("sg"):
        return _never_below(x.arguments[0], least)
    return positive and _value(least) <= 0


def _value(x: Expression) -> float:
    assert x.operator == "number", f"{x} is not a number"
    return float(x.value)
