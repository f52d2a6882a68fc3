"""The expressions of a printed formula: a small tree that can be built, printed, parsed and walked.

The operators are all there is; a printer of another notation needs a case for each of these:

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

from policyloss.parts.wording import number as number_text

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
# Python's own precedences: a comparison binds weakest, a power strongest.
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
    """One node: see the table of operators above. Equal if built alike; `str()` is its text."""

    operator: str
    arguments: tuple[Expression, ...] = ()
    value: str | float = ""

    def __str__(self) -> str:
        return _text(self)

    @property
    def is_leaf(self) -> bool:
        """Whether it is a name, a number or True or False."""
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

    def replaced(self, change: Callable[[Expression], Expression | None]) -> Expression:
        """A copy with subexpressions replaced, from the top.

        change: returns what to put in the place of a subexpression, or None to go on below it.
        """
        other = change(self)
        if other is not None:
            return other
        arguments = tuple(argument.replaced(change) for argument in self.arguments)
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
        text = number_text(float(x.value))
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
    """The expression that `text` stands for."""
    return _parsed(ast.parse(text, mode="eval").body)


def _parsed(node: ast.expr) -> Expression:
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return Expression(_BINARY[type(node.op)], (_parsed(node.left), _parsed(node.right)))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
        sides = (_parsed(node.left), _parsed(node.comparators[0]))
        return Expression(_BINARY[type(node.ops[0])], sides)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Invert)):
        inner = _parsed(node.operand)
        if isinstance(node.op, ast.Invert):
            return Expression("~", (inner,))
        if inner.operator == "number":
            return constant(-float(inner.value))
        return Expression("negative", (inner,))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return call(node.func.id, *(_parsed(argument) for argument in node.args))
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return boolean(node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return constant(node.value)
    if isinstance(node, (ast.Name, ast.Attribute)):
        text = ast.unparse(node)
        return constant(math.inf) if text == "inf" else name(text)
    raise ValueError(f"{ast.unparse(node)!r} is not an expression of the printed formulas.")
