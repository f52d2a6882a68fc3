"""From a part of a loss, such as its trust region, to the lines of its formula: run the part on
symbols, and name subexpressions that are used twice.

The names come from local variables of the part's code: if the code has a line `tau = …` and uses τ
twice, so does the formula. A part states its formula in a method `formula` if the derived one would
be hard to read, or if symbols cannot follow its code.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch

from policyloss.explanations.algebra.expression import TRUE, Expression, name, parse, without_stops
from policyloss.explanations.algebra.symbols import (
    Symbol,
    SymbolicSequences,
    Written,
    expression_of,
)
from policyloss.inputs import DIFFERENTIATED
from policyloss.parts.correction import Corrected
from policyloss.parts.data import has_fields
from policyloss.parts.trust import Surrogate
from policyloss.tokens import LOGP_ARGUMENTS, Tokens

Lines = list[tuple[str, Expression]]
# Every formula has lines for these two, so they are replaced wherever they occur.
_KNOWN = {
    parse("exp(log_ratio)"): name("ratio"),
    parse("old_logp - rollout_logp"): name("log_weight"),
}


@torch.enable_grad()
def symbolic_tokens(anchor: str) -> Tokens:
    """`Tokens` made of symbols. The mask is True: a formula is about valid tokens only."""
    arguments = ("logp", *DIFFERENTIATED, *LOGP_ARGUMENTS.values(), "ages")
    tokens: Any = {
        "mask": Symbol(TRUE),
        "sequences": SymbolicSequences(),
        "advantages": Symbol(name("advantages")),
        "dtype": torch.float64,
        "raw": _SymbolicExtras({argument: Symbol(name(argument)) for argument in arguments}),
        "anchor": anchor,
        "raw_log_ratio": Symbol(name("log_ratio")),
        "ratio_value": Symbol(name("ratio")),
    }
    return Tokens(**tokens)


class _SymbolicExtras(dict[str, Any]):
    """Arguments by name. A tensor of `extras`, which may have any name, is created when read."""

    def get(self, key: str, default: Any = None) -> Any:
        if key.startswith("extras."):
            return Symbol(name(key.removeprefix("extras.")))
        return super().get(key, default)


class _Recorder:
    """The names of the local variables of the functions that run, by the expressions they hold."""

    def __init__(self) -> None:
        self.labels: dict[Expression, str] = {}
        self.every_label: dict[str, Expression] = {}
        self.stated: set[Expression] = set()
        self.suffix = ""

    def record(self, expression: Expression, label: str) -> None:
        self.labels.setdefault(without_stops(expression), label + self.suffix)
        self.every_label[label + self.suffix] = without_stops(expression)

    def state(self, part: Any, t: Tokens) -> Surrogate | Corrected:
        """The result of a part that states its formula, in lines of text or of other parts."""
        lines: dict[str, Expression] = {}
        label = ""
        for label, line in part.formula(t.anchor):
            if isinstance(line, str):
                lines[label] = with_names(parse(line), lines)
            else:
                lines[label] = expression_of(_runnable(line, self)(t).loss)
            self.labels[without_stops(lines[label])] = label + self.suffix
            self.record(lines[label], label)
            self.stated.add(without_stops(lines[label]))
        last: Any = Symbol(lines[label])
        self.stated.discard(without_stops(lines[label]))
        return Corrected(keep=last) if label == "keep" else Surrogate(last)

    @contextmanager
    def inside(self, field: str) -> Iterator[None]:
        """While a part inside another part runs, append the name of its field to its names."""
        before, self.suffix = self.suffix, f"_{field}{self.suffix}"
        yield
        self.suffix = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the local variables of every function that returns."""

        def look(frame: FrameType, event: str, argument: Any) -> None:
            code, module = frame.f_code, str(frame.f_globals.get("__name__", ""))
            if event == "return" and not module.startswith(__package__):
                first = code.co_argcount + code.co_kwonlyargcount
                # The last name is the most descriptive.
                for label in reversed(code.co_varnames[first:]):
                    value = frame.f_locals.get(label)
                    if isinstance(value, Symbol):
                        self.record(value.expression, label)

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)


class DerivedFormula(NamedTuple):
    """The derived formula of a part.

    lines: for each result of the part ("loss" alone, or the fields of a `Corrected`) the lines that
    lead to it; the last one has the name of the result. other_names: the second name of a line that
    two parts inside a part share, and the name that is printed.
    """

    lines: dict[str, Lines]
    other_names: dict[str, str]


def derive_formula(part: Any, t: Tokens, taken: Callable[[str], bool]) -> DerivedFormula | None:
    """The formula of a part's result; None if symbols cannot follow. taken: is a name in use?"""
    recorder = _Recorder()
    try:
        with torch.enable_grad(), recorder.watching():
            result = _runnable(part, recorder)(t)
        if isinstance(result, Surrogate):
            result = result.loss
        fields = result._asdict() if hasattr(result, "_asdict") else {"loss": result}
        roots = {key: _simplify(expression_of(x)) for key, x in fields.items() if x is not None}
    except Exception:  # a user's function may do anything; then it is printed as its name
        return None
    labels = {_simplify(expression): label for expression, label in recorder.labels.items()}
    stated = {_simplify(expression) for expression in recorder.stated}
    usable = {x: label for x, label in labels.items() if label.isidentifier() and not taken(label)}
    chosen = _choose_lines(roots, usable, stated)
    every = {label: chosen.get(_simplify(x), label) for label, x in recorder.every_label.items()}
    return DerivedFormula(
        _in_order(roots, chosen), {label: line for label, line in every.items() if label != line}
    )


def with_names(x: Expression, meanings: dict[str, Expression]) -> Expression:
    """`x` with each name that has a meaning replaced by it."""
    return x.substitute(lambda y: meanings.get(str(y.value)) if y.operator == "name" else None)


def _simplify(x: Expression) -> Expression:
    return x.substitute(_KNOWN.get)


def _runnable(part: Any, recorder: _Recorder) -> Any:
    """`part` with numbers that store their expression, or a function of its stated lines."""
    if hasattr(part, "formula"):
        return partial(recorder.state, part)
    if not has_fields(part):
        return part
    written = copy.copy(part)
    for field in dataclasses.fields(part):
        value = _write(field.name, getattr(part, field.name), recorder)
        object.__setattr__(written, field.name, value)
    return written


def _write(field: str, value: Any, recorder: _Recorder) -> Any:
    if isinstance(value, tuple):
        return tuple(_write(field, v, recorder) for v in value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Written(value)
    if callable(value) and has_fields(value):
        inner = _runnable(value, recorder)

        def run(t: Tokens) -> Surrogate:
            with recorder.inside(field):
                result = inner(t)
            return result if isinstance(result, Surrogate) else Surrogate(result)

        return run
    return value


def _choose_lines(
    roots: dict[str, Expression], labels: dict[Expression, str], stated: set[Expression]
) -> dict[Expression, str]:
    """The subexpressions that get a line of their own, each with the name of that line.

    They have a label, and they were stated, are used twice, or join several tests.
    """
    uses: Counter[Expression] = Counter()

    def count(x: Expression) -> None:
        uses[x] += 1
        if uses[x] == 1 or without_stops(x) not in labels:
            for argument in x.arguments:
                count(argument)

    for root in roots.values():
        count(root)
    chosen: dict[Expression, str] = {}
    for x in uses:
        label = labels.get(without_stops(x))
        trivial = x.is_leaf or x.operator == "negative" or x.calls("sg")
        if label is None or label in chosen.values() or trivial:
            continue
        joins_tests = (x.calls("where") and x.is_boolean) or x.operator in ("&", "|")
        inside = joins_tests and x not in roots.values()
        if uses[x] > 1 or inside or without_stops(x) in stated:
            chosen[x] = label
    return chosen


def _in_order(roots: dict[str, Expression], chosen: dict[Expression, str]) -> dict[str, Lines]:
    """The chosen subexpressions and the roots as lines, each after the lines it uses."""
    written: set[str] = set()

    def short(x: Expression, lines: Lines) -> Expression:
        if x in chosen:
            if chosen[x] not in written:
                written.add(chosen[x])
                lines.append((chosen[x], body(x, lines)))
            return name(chosen[x])
        return body(x, lines)

    def body(x: Expression, lines: Lines) -> Expression:
        arguments = tuple(short(argument, lines) for argument in x.arguments)
        return Expression(x.operator, arguments, x.value)

    result: dict[str, Lines] = {}
    for key, root in roots.items():
        result[key] = []
        last = short(root, result[key])
        result[key].append((key, last))
    return result
