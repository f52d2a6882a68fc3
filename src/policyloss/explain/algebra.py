"""Functions that build expressions: each returns one node, or something simpler.

What it returns is equal to the node in value and gradient. It leaves out what a reader does not
need: a bound that cannot bind, a guard against NaN, a stopped gradient of a constant.
"""

from __future__ import annotations

import math

from policyloss.explain.expression import (
    COMPARISONS,
    Expression,
    boolean,
    call,
    constant,
    name,
)

TRUE, FALSE, ZERO, ONE = boolean(True), boolean(False), constant(0), constant(1)
# How many tokens a sequence and a run of the mask have; both are at least 1 where a token is.
LENGTHS = {"seq": name("L"), "run": name("run_length")}
# What changes nothing on the right of each operator.
_NEUTRAL = {"+": ZERO, "-": ZERO, "*": ONE, "/": ONE, "**": ONE}
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}


def stop(x: Expression) -> Expression:
    """`x` with its gradient stopped."""
    return call("sg", unstopped(x)) if x.carries_gradient else x


def unstopped(x: Expression) -> Expression:
    """`x` as a value only: without any stopped gradient in it."""
    if x.is_leaf:
        return x
    arguments = [unstopped(argument) for argument in x.arguments]
    return arguments[0] if x.calls("sg") else _built(x, arguments)


def _built(x: Expression, arguments: list[Expression]) -> Expression:
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
        return call("sg", unstopped(node))
    return node


def where(condition: Expression, yes: Expression, no: Expression) -> Expression:
    """`yes` where `condition` holds, else `no`."""
    if condition.operator == "boolean" or yes == no:
        return yes if condition != FALSE else no
    if (yes, no) == (TRUE, FALSE):
        return condition
    node = call("where", condition, yes, no)
    if _stops_inside(yes, no) and not node.carries_gradient:
        return call("sg", call("where", condition, unstopped(yes), unstopped(no)))
    return node


def _stops_inside(*arguments: Expression) -> bool:
    """Whether a gradient is stopped somewhere inside one of `arguments`."""
    return any(x.calls("sg") for argument in arguments for x in argument.walk())


def bounded(x: Expression, low: Expression | None, high: Expression | None) -> Expression:
    """`x` within bounds; None, infinities and a bound that `x` cannot reach do not bind."""
    if low is not None and (_is(low, -math.inf) or _never_below(x, low)):
        low = None
    if high is not None and _is(high, math.inf):
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
        return _compared(operator, unstopped(a), unstopped(b))
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


def _compared(operator: str, a: Expression, b: Expression) -> Expression:
    if b.operator == "number":
        if a.operator == "number":
            x, y = _value(a), _value(b)
            results = {
                "<": x < y,
                "<=": x <= y,
                ">": x > y,
                ">=": x >= y,
                "==": x == y,
                "!=": x != y,
            }
            return boolean(results[operator])
        if math.isinf(_value(b)):  # infinite values are guarded against, and not printed
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


def _is(x: Expression, value: float) -> bool:
    return x.operator == "number" and _value(x) == value


def _value(x: Expression) -> float:
    assert x.operator == "number", f"{x} is not a number"
    return float(x.value)
