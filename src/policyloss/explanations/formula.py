"""The printed formula of a loss: lines `name = expression` in the argument names of `policy_loss`.

Each expression is Python over the small vocabulary below, so a formula can be read and can be run:
a test evaluates the printed lines and compares loss and gradient with `policy_loss`. The lines of a
part, also of a user's function, are derived from its code (see `derive`), unless the part states
them. Every name means a number per valid token; masked tokens do not occur in a formula.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from policyloss.explanations.algebra.derive import (
    DerivedFormula,
    Lines,
    derive_formula,
    symbolic_tokens,
    with_names,
)
from policyloss.explanations.algebra.expression import Expression, clamp, constant, name, parse
from policyloss.parts.data import is_part
from policyloss.parts.wording import COMMON_NAMES, number
from policyloss.spec import LossSpec

_WORDS = """
sg(x): x with its gradient stopped
clip(x, low, high): x held between low and high
max(a, b): the larger of the two, token by token
min(a, b): the smaller of the two, token by token
where(c, a, b): a where c holds, else b
sigmoid(x): 1 / (1 + exp(-x))
sign(x): 1, 0 or -1
seq_mean(x): the mean of x over the token's sequence
seq_sum(x): the sum of x over the token's sequence
seq_max(x): the largest x of the token's sequence
seq_any(c): c holds for some token of the sequence
seq_all(c): c holds for every token of the sequence
run_mean(x): the mean of x over the token's unbroken run of the mask (a turn)
run_all(c): c holds for every token of the run
token_mean(x): the mean of x over all tokens of the step
sum(x): the sum of x over all tokens
kth_largest(x, k): the k-th largest x of the step (the smallest if there are fewer)
budget_bound(x, b): the largest bound below which the x of the step have a mean below b
future_sum(x, g): x plus g times the future_sum of the sequence's next token, without gradient
floor(x): x rounded down
draw(seed, …): a fixed pseudo-random number per token, made from the seed and the numbers given
divergence: of the teacher's distribution and the policy's at the token, as the words below say
inf: no bound
N: tokens of the whole step (1 if there are none)
B: sequences of the whole step that have a token (1 if there are none)
L: tokens of the token's sequence
G: prompt groups of the whole step that have a token (1 if there are none)
N_group: tokens of the token's prompt group in the whole step
L_turn: tokens of the token's turn
K: turns of the token's sequence
weights: the weight of the token in the call
ages: the number of updates since the policy that sampled the token
W: the sum of the weights of the whole step
horizon: the generation budget of the run in tokens, not set yet (spec.with_horizon)
n: tokens of this call alone (1 if there are none)
b: sequences of this call alone that have a token (1 if there are none)
"""
VOCABULARY = {
    re.split(r"\W", meaning)[0]: " ".join(meaning.split())
    for meaning in re.split(r"\n(?! )", _WORDS.strip())
}
# Names with a fixed meaning in every formula; a local variable of a part may not give them to a
# line.
_RESERVED = COMMON_NAMES | {"entropy", "log_weight", "weight", "surrogate", "kl", "token_loss"}
_RESERVED |= {"loss", "exp", "log", "tokens"}


class FormulaLine(NamedTuple):
    """One line of a formula."""

    name: str
    expression: str

    @property
    def tree(self) -> Expression:
        """The expression as a tree, to print it in another notation or to walk it."""
        return parse(self.expression)

    def __str__(self) -> str:
        return f"{self.name} = {self.expression}"


class CallableInSlot(NamedTuple):
    """A user's function without a derivable formula: its name, and how its docstring begins."""

    slot: str
    name: str
    doc: str


@dataclass(frozen=True)
class Formula:
    """The lines of a loss in the order they are computed; the last one is `loss`.

    callables: functions whose formula could not be derived.
    """

    lines: tuple[FormulaLine, ...]
    callables: tuple[CallableInSlot, ...] = ()
    # Second names of lines that two parts inside a part share.
    other_names: dict[str, str] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether every line can be evaluated."""
        return not self.callables

    @property
    def vocabulary(self) -> dict[str, str]:
        """The words of `VOCABULARY` that the lines use."""
        used = names_in(" ".join(line.expression for line in self.lines))
        return {word: meaning for word, meaning in VOCABULARY.items() if word in used}

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)


def names_in(expression: str) -> set[str]:
    """The identifiers of an expression."""
    return set(re.findall(r"[A-Za-z_]\w*", expression))


def formula(spec: LossSpec) -> Formula:
    """The formula of `spec`, with only the lines that lead to the loss."""
    slots = lines_by_slot(spec).values()
    lines = [line for slot_lines, _ in slots for line in slot_lines]
    callables = tuple(c for _, unknown in slots for c in unknown)
    of_trust = _derive("trust", spec.trust, getattr(spec.ratio, "anchor", "old"))
    return Formula(_live(lines), callables, {} if of_trust is None else of_trust.other_names)


def lines_by_slot(spec: LossSpec) -> dict[str, _Slot]:
    """All lines of the formula in the order of their computation, and each slot's callables.

    The lines of "loss" join the results of the slots, and average them.
    """
    anchor = getattr(spec.ratio, "anchor", "old")
    return {
        "correction": _corrections(spec),
        "ratio": _ratio(spec),
        "trust": _of_slot("trust", spec.trust, anchor, "surrogate"),
        "kl": _kl(spec),
        "loss": _loss(spec),
    }


# The lines of one slot, and the callables in it that could not be derived.
_Slot = tuple[list[FormulaLine], list[CallableInSlot]]


def callable_name(part: Any) -> str:
    """A name to print for a user's function."""
    called = getattr(part, "__name__", type(part).__name__)
    return called if called.isidentifier() else "your_function"


def _unknown(slot: str, part: Any) -> CallableInSlot:
    doc = (getattr(part, "__doc__", None) or "").strip().split("\n")[0]
    return CallableInSlot(slot, callable_name(part), doc)


def _live(lines: list[FormulaLine]) -> tuple[FormulaLine, ...]:
    """The lines that `loss` depends on."""
    needed, kept = {"loss"}, []
    for line in reversed(lines):
        # Every sum and count reads the mask, though it is not printed there.
        if line.name in needed or line.name == "mask":
            needed.discard(line.name)
            needed |= names_in(line.expression)
            kept.append(line)
    return tuple(reversed(kept))


def _derive(slot: str, part: Any, anchor: str = "old") -> DerivedFormula | None:
    """The formula of a part by its results; None if symbols cannot follow it."""
    # A part of the library is a value, so its lines never change; a user's function may read
    # anything.
    return (_derive_cached if is_part(slot, part) else _derive_uncached)(part, anchor)


def _derive_uncached(part: Any, anchor: str) -> DerivedFormula | None:
    reserved = {*_RESERVED, *VOCABULARY, *keyword.kwlist}
    return derive_formula(part, symbolic_tokens(anchor), reserved.__contains__)


_derive_cached = lru_cache(maxsize=1024)(_derive_uncached)


def _rename(lines: Lines, last: str) -> list[FormulaLine]:
    *before, (_, expression) = lines
    first = [FormulaLine(label, str(x)) for label, x in before]
    return [*first, FormulaLine(last, str(expression))]


def _of_slot(slot: str, part: Any, anchor: str, last: str) -> _Slot:
    """The lines of a part that returns one number per token; the last line is called `last`."""
    of_part = _derive(slot, part, anchor)
    if of_part is None or "loss" not in of_part.lines:
        return [FormulaLine(last, f"{callable_name(part)}(tokens)")], [_unknown(slot, part)]
    return _rename(of_part.lines["loss"], last), []


def raw_log_ratio(part: Any) -> Expression | None:
    """The ratio slot's log-ratio before its clamp, as one expression; None if not derivable."""
    of_part = _derive("ratio", part)
    if of_part is None:
        return None
    *before, (_, expression) = of_part.lines["loss"]
    return with_names(expression, dict(before))


def _ratio(spec: LossSpec) -> _Slot:
    limit = clamp_bounds(getattr(spec.ratio, "log_clamp", 20.0))
    low, high = (None if bound is None else constant(bound) for bound in limit)
    lines, callables = _of_slot("ratio", spec.ratio, "old", "log_ratio")
    clamped = clamp(lines[-1].tree, low, high)
    ratio = [FormulaLine("log_ratio", str(clamped)), FormulaLine("ratio", "exp(log_ratio)")]
    return [*lines[:-1], *ratio], callables


def clamp_bounds(limit: Any) -> tuple[float | None, float | None]:
    """The bounds of a `log_clamp`, None for no bound; a number means ±number."""
    if limit is None:
        return None, None
    return (-limit, limit) if isinstance(limit, (int, float)) else (limit[0], limit[1])


def _kl(spec: LossSpec) -> _Slot:
    lines: list[FormulaLine] = []
    callables: list[CallableInSlot] = []
    for part, line in _pull_lines(spec):
        of_part, unknown = _of_slot("kl", part, getattr(spec.ratio, "anchor", "old"), line)
        lines += of_part
        callables += unknown
    return lines, callables


def _pull_lines(spec: LossSpec) -> list[tuple[Any, str]]:
    """The parts of the `kl` slot, each with the name of its line: kl, kl_2, …"""
    return [(part, f"kl_{i}" if i > 1 else "kl") for i, part in enumerate(spec.kl_parts, 1)]


class _Verdict(NamedTuple):
    """The lines of a correction's weight and of its test of which tokens to keep, or empty."""

    weight: list[FormulaLine]
    keep: list[FormulaLine]
    derived: bool = True


def _verdict(part: Any) -> _Verdict:
    of_part = _derive("correction", part)
    if of_part is None:
        before = FormulaLine("verdict", f"{callable_name(part)}(tokens)")
        weight, keep = ([before, FormulaLine(key, f"verdict.{key}")] for key in ("weight", "keep"))
        return _Verdict(weight, keep, derived=False)
    lines = of_part.lines
    weight, keep = (_rename(lines[key], key) if key in lines else [] for key in ("weight", "keep"))
    if weight and weight[-1].expression == "1":  # a guard that passes on NaN, not a weight
        weight = []
    if keep and keep[-1].expression == "True":
        keep = []
    return _Verdict(weight, keep)


def normalises(part: Any) -> bool:
    """Whether a correction divides the weights of the others, after all of them."""
    return hasattr(part, "weight_formula")


def _corrections(spec: LossSpec) -> _Slot:
    lines, callables = [FormulaLine("log_weight", "old_logp - rollout_logp")], []
    written: set[str] = set()
    for part in spec.correction:
        if normalises(part):
            continue
        verdict = _verdict(part)
        callables += [] if verdict.derived else [_unknown("correction", part)]
        for key, operator, stated in (("weight", "*", verdict.weight), ("keep", "&", verdict.keep)):
            if not stated:
                continue
            last = stated[-1].tree
            joined = Expression(operator, (name(key), last)) if key in written else last
            lines += [line for line in stated[:-1] if line not in lines[-4:]]
            lines.append(FormulaLine(key, str(joined)))
            written.add(key)
    if spec.rejected != "keep" and "keep" in written:
        if spec.rejected == "drop_sequence":
            lines.append(FormulaLine("keep", "~seq_any(~keep)"))
        lines.append(FormulaLine("mask", "mask & keep"))
    for part in spec.correction:
        if normalises(part):
            if "keep" in written:
                lines.append(FormulaLine("weight", "where(keep, weight, 0)"))
            lines.append(FormulaLine("weight", part.weight_formula("weight")))
    return lines, callables


def weighs(spec: LossSpec) -> bool:
    """Whether a correction multiplies the policy term by a weight."""
    return any(_verdict(c).weight for c in spec.correction if not normalises(c))


def rejects(spec: LossSpec) -> bool:
    """Whether a correction can reject a token."""
    return any(_verdict(c).keep for c in spec.correction if not normalises(c))


def _loss(spec: LossSpec) -> _Slot:
    policy = "weight * surrogate" if weighs(spec) else "surrogate"
    if rejects(spec) and spec.rejected == "keep":
        policy = f"where(keep, {policy}, 0)"
    for part, line in _pull_lines(spec):
        coef = part.coef if is_part("kl", part) else 1.0
        policy += f" + {number(coef)} * {line}"
    if spec.entropy_coef:
        policy += f" - {number(spec.entropy_coef)} * entropy"
    averaged = "surrogate" if policy == "surrogate" else "token_loss"
    lines = [] if policy == "surrogate" else [FormulaLine("token_loss", policy)]
    if hasattr(spec.aggregate, "averaged"):
        return [*lines, FormulaLine("loss", spec.aggregate.averaged(averaged))], []
    unknown = _unknown("aggregate", spec.aggregate)
    return [*lines, FormulaLine("loss", f"sum({unknown.name}(tokens) * {averaged})")], [unknown]
