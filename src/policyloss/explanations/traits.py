"""A description of a spec: a sentence for every slot, its traits as short words, and the names of
its parts in frameworks, which the traits select.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from policyloss.explanations.formula import callable_name, rejects
from policyloss.explanations.framework_names import ELSEWHERE, FrameworkNames
from policyloss.parts.data import is_part
from policyloss.parts.wording import spoken
from policyloss.spec import SLOTS, LossSpec

_REJECTED = {
    "keep": "a rejected token keeps its place in the denominator",
    "renormalise": "a rejected token leaves the mask, so the denominator counts the survivors",
    "drop_sequence": (
        "one rejected token removes its whole sequence from the mask and the denominator"
    ),
}


def describe(spec: LossSpec) -> dict[str, str]:
    """A sentence for each slot of `spec`; slots that do nothing are left out."""
    sentences = {slot: describe_slot(spec, slot) for slot in SLOTS}
    if not spec.reads_ratio:
        sentences["ratio"] = ""
    return {slot: text for slot, text in sentences.items() if text}


def describe_slot(spec: LossSpec, slot: str) -> str:
    """A sentence for one slot of `spec`; "" if it does nothing."""
    part = getattr(spec, slot)
    if isinstance(part, tuple):
        return "; and ".join(_sentence(one) for one in part)
    if slot == "rejected":
        return _REJECTED[part] if rejects(spec) else ""
    if slot == "entropy_coef":
        return f"minus {spoken(part)} times the entropy of the policy at each token" if part else ""
    return "" if part is None else _sentence(part)


def _sentence(part: Any) -> str:
    function = f"your own function {callable_name(part)}"
    return part.sentence() if hasattr(part, "sentence") else function


def traits(spec: LossSpec) -> frozenset[str]:
    """The traits of a spec, short words that select names and traps."""
    words = {
        f"anchor_{getattr(spec.ratio, 'anchor', 'old')}",
        *getattr(spec.ratio, "traits", ("other_ratio",)),
    }
    words |= _trust_traits(spec.trust) | {
        type(spec.aggregate).__name__,
        *(word for part in spec.kl_parts for word in getattr(part, "traits", ())),
    }
    for part in spec.correction:
        words |= {type(part).__name__, *getattr(part, "traits", ())}
        if hasattr(part, "level"):
            words.add(f"{type(part).__name__}_{part.level}")
    if spec.correction:
        words |= {"correction", spec.rejected}
    holds = {
        "rejects": rejects(spec),
        "entropy": bool(spec.entropy_coef),
        "reads_ratio": spec.reads_ratio,
    }
    return frozenset(words | {word for word, true in holds.items() if true})


def _trust_traits(part: Any) -> set[str]:
    """The name of the part, its choices as `field_choice`, and its attribute `traits`."""
    if not is_part("trust", part):
        return {"own_trust"}
    choices = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    words = {f"{field}_{choice}" for field, choice in choices.items() if isinstance(choice, str)}
    return {type(part).__name__, *words, *getattr(part, "traits", ())}


def fits(needs: str, words: frozenset[str]) -> bool:
    """Whether every trait in `needs` holds, and none with a leading "-" does."""
    needed = [(word.removeprefix("-"), not word.startswith("-")) for word in needs.split()]
    return all((word in words) is wanted for word, wanted in needed)


def elsewhere(spec: LossSpec) -> tuple[FrameworkNames, ...]:
    """The entries of `ELSEWHERE` that apply to `spec`."""
    words = traits(spec)
    return tuple(entry for entry in ELSEWHERE if fits(entry.needs, words))
