"""The formula of every part with parameters for its numbers, so that a page can insert any numbers.

A part is made with numbers that occur in no formula, its lines are derived as `explain` derives
them, and each such number is replaced by a parameter: a name that begins with "$". A part has
different lines for different choices, so there is a variant for each combination of its choices,
and of numbers or None. A combination that the class refuses is a variant with its error.
The lines that join the slots (`weight * surrogate + …`) are taken from `explain` in the same way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, get_args

from policyloss.errors import PolicyLossError
from policyloss.explanations.algebra.derive import Lines
from policyloss.explanations.algebra.expression import Expression, name, negative
from policyloss.explanations.formula import FormulaLine, lines_by_slot
from policyloss.explanations.framework_names import ELSEWHERE
from policyloss.explanations.traits import traits
from policyloss.parts.aggregate import TokenSum
from policyloss.parts.correction import Band, Corrected, SelfNormalise, Truncate, Veto
from policyloss.parts.kl import KL
from policyloss.parts.ratio import Anchor, TokenRatio
from policyloss.parts.trust import BySign, Unbounded
from policyloss.spec import LossSpec
from policyloss.tokens import Tokens
from policyloss_lab.explore.fields import (
    distinct_numbers,
    fields_of,
    limits,
    numbers_of,
    slot_of,
    start,
    start_number,
)

ANCHORS = get_args(Anchor)
# Bounds of a clamp, which may be a number, a pair or None: always written as two bounds.
_CLAMP = (-17.317, 19.319)
_WORDS = {word.removeprefix("-") for entry in ELSEWHERE for word in entry.needs.split()}


class Variant(NamedTuple):
    """A part with one combination of its choices.

    lines: its formula, the last line named for its result. words: the traits by which frameworks'
    names are chosen. error: why the class refuses the combination, or "".
    """

    lines: Lines
    words: tuple[str, ...] = ()
    error: str = ""


class Template(NamedTuple):
    """A class of parts. keys: the fields that choose a variant, with their options; the key "anchor
    of the ratio" is a field of the ratio. variants: by the values of these fields.
    words_if_infinite: the traits that an infinite number adds.
    """

    part: type
    keys: dict[str, tuple[Any, ...]]
    variants: dict[tuple[Any, ...], Variant]
    words_if_infinite: dict[str, tuple[str, ...]]


RATIO_ANCHOR = "anchor of the ratio"


@cache
def template(part: type) -> Template:
    """The variants of a class of parts, by the choices that make a difference."""
    axes: dict[str, tuple[Any, ...]] = {
        field.name: field.options if field.options else (None, "number")
        for field in fields_of(part)
        if field.options or field.optional
    }
    if slot_of(part) == "trust" and part is not BySign:
        axes[RATIO_ANCHOR] = ANCHORS
    variants = {
        values: _variant(part, dict(zip(axes, values, strict=True)))
        for values in itertools.product(*axes.values())
    }
    keys = list(axes)
    for key in axes:
        i = keys.index(key)
        shorter = {values[:i] + values[i + 1 :]: v for values, v in variants.items()}
        if all(shorter[values[:i] + values[i + 1 :]] == v for values, v in variants.items()):
            variants = shorter
            keys.remove(key)
    return Template(part, {key: axes[key] for key in keys}, variants, _words_if_infinite(part))


def _words_if_infinite(part: type) -> dict[str, tuple[str, ...]]:
    first = start(part)
    usual = set(_words(slot_of(part), first))
    added = {
        field.name: tuple(
            set(_words(slot_of(part), replace(first, **{field.name: math.inf}))) - usual
        )
        for field in numbers_of(part)
        if limits(part, field).infinite and not field.optional
    }
    return {name: words for name, words in added.items() if words}


def _variant(part: type, choices: dict[str, Any]) -> Variant:
    anchor = choices.pop(RATIO_ANCHOR, "old")
    try:
        _with_choices(part, choices, {f.name: start_number(part, f) for f in numbers_of(part)})
        instance = _with_choices(part, choices, distinct_numbers(part))
    except PolicyLossError as error:
        return Variant([], error=str(error))
    spec = _spec_with(instance, anchor)
    lines = _side_lines() if part is BySign else _part_lines(spec, slot_of(part))
    opened = [(line.name, _open(line.tree, part)) for line in lines]
    return Variant(opened, _words(slot_of(part), instance))


def _with_choices(part: type, choices: dict[str, Any], numbers: dict[str, float]) -> Any:
    """The initial part with these choices and numbers."""
    first = vars(start(part)) | choices
    clamps = {field.name: _CLAMP for field in fields_of(part) if field.kind == "clamp"}
    known = {name: x for name, x in numbers.items() if first[name] is not None}
    return part(**{**first, **clamps, **known})


def _spec_with(part: Any, anchor: str = "old") -> LossSpec:
    """A loss with this part, and with no other part that could be mistaken for it."""
    kind: type = type(part)
    slot = slot_of(kind)
    if slot == "trust":
        return LossSpec(ratio=TokenRatio(anchor), trust=part)  # type: ignore[arg-type]
    if isinstance(part, SelfNormalise):
        return LossSpec(trust=Unbounded(), correction=(Truncate(2.0), part))
    return LossSpec(trust=Unbounded()).replace(**{slot: part})


def _part_lines(spec: LossSpec, slot: str) -> list[FormulaLine]:
    """The lines that a part adds to the formula."""
    if slot == "aggregate":
        return lines_by_slot(spec)["loss"][0][-1:]
    if any(isinstance(part, SelfNormalise) for part in spec.correction):
        return []  # see `joints`
    return lines_by_slot(spec)[slot][0]


def _side_lines() -> list[FormulaLine]:
    """The line of `BySign`, with "positive" and "negative" for the losses of its sides."""
    sides = {"positive": Unbounded("ratio"), "negative": Unbounded("logp")}
    both = lines_by_slot(LossSpec(trust=BySign(**sides)))["trust"][0][-1]
    meanings = {
        lines_by_slot(LossSpec(trust=side))["trust"][0][-1].tree: name(word)
        for word, side in sides.items()
    }
    return [FormulaLine(both.name, str(both.tree.substitute(meanings.get)))]


def _open(x: Expression, part: type) -> Expression:
    """`x` with parameters in place of the distinct numbers of a class."""
    parameters = {value: name(f"${field}") for field, value in distinct_numbers(part).items()}
    for field in fields_of(part):
        if field.kind == "clamp":
            low, high = _CLAMP
            parameters |= {low: name(f"${field.name}.low"), high: name(f"${field.name}.high")}
    return _replace_parameters(x, parameters)


def _replace_parameters(x: Expression, parameters: dict[float, Expression]) -> Expression:
    def change(node: Expression) -> Expression | None:
        if node.operator != "number":
            return None
        value = float(node.value)
        if -value in parameters and value not in parameters:
            return negative(parameters[-value])
        return parameters.get(value)

    return x.substitute(change)


def _words(slot: str, part: Any) -> tuple[str, ...]:
    """The traits that a part adds to a loss of plain functions."""

    def function(t: Tokens) -> Any:
        return t.logp

    nothing = LossSpec(trust=function, aggregate=function)
    if isinstance(part, SelfNormalise):
        return ("SelfNormalise",)
    spec = nothing.replace(**{slot: part})
    words = traits(spec) if slot == "ratio" else traits(spec) - traits(nothing)
    return tuple(sorted(words & _WORDS))


def joints() -> dict[str, Any]:
    """The lines that join the slots, taken from losses that have them.

    weight, keep: of a second correction with the names `weight_2` and `keep_2`. rejected: added by
    each treatment of rejected tokens. normalised: added by `SelfNormalise`, by its unit and whether
    tokens can be rejected. token_loss: by the presence of a weight, of a rejection that
    still counts its tokens in the average, the number of pulls, and the presence of an entropy
    bonus; empty if the token loss is the surrogate alone.
    """

    def weigh(t: Tokens) -> Corrected:
        return Corrected(weight=t.extra("weight_2"))

    def reject(t: Tokens) -> Corrected:
        return Corrected(keep=t.extra("keep_2"))

    def last(*corrections: Any) -> Lines:
        return _trees(_correction_lines(*corrections)[-1:])

    def after(first: Any, *more: Any, **slots: Any) -> Lines:
        lines = _correction_lines(first, *more, **slots)
        return _trees(lines[len(_correction_lines(first)) :])

    band, truncate, veto = Band(0.5, 2.0), Truncate(2.0), Veto()
    ways: tuple[Any, ...] = ("keep", "renormalise", "drop_sequence")
    counts: tuple[Any, ...] = ("tokens", "sequences")
    return {
        "weight": last(truncate, weigh),
        "keep": last(veto, reject),
        "rejected": {way: after(veto, rejected=way) for way in ways},
        "normalised": {
            f"{over},{int(rejects)}": after(band if rejects else truncate, SelfNormalise(over))
            for over in counts
            for rejects in (False, True)
        },
        "token_loss": dict(_token_losses()),
    }


def _correction_lines(*corrections: Any, **slots: Any) -> list[FormulaLine]:
    return lines_by_slot(LossSpec(correction=corrections, **slots))["correction"][0]


def _token_losses() -> Iterator[tuple[str, Lines]]:
    coefficients = {"$kl.coef": 0.731371, "$kl_2.coef": 0.931393, "$entropy_coef": 0.531353}
    parameters = {value: name(word) for word, value in coefficients.items()}
    first, second, entropy = coefficients.values()
    pulls = (KL("k1", first), KL("k2", second))
    corrections = {(True, False): Truncate(2.0), (False, True): Veto(), (True, True): Band(0.5, 2)}
    for weighs, rejects, count, bonus in itertools.product(
        (False, True), (False, True), range(3), (False, True)
    ):
        spec = LossSpec(
            correction=corrections.get((weighs, rejects), ()),
            kl=pulls[:count],
            entropy_coef=entropy if bonus else 0.0,
            aggregate=TokenSum(),
        )
        lines = _trees(lines_by_slot(spec)["loss"][0][:-1])
        key = f"{int(weighs)},{int(rejects)},{count},{int(bonus)}"
        yield key, [(label, _replace_parameters(x, parameters)) for label, x in lines]


def _trees(lines: list[FormulaLine]) -> Lines:
    return [(line.name, line.tree) for line in lines]
