"""What a spec is made of, in short words (`traits`), and so what each framework calls its parts."""

from __future__ import annotations

import dataclasses
from typing import Any

from policyloss.explain.formula import rejects
from policyloss.explain.framework_names import ELSEWHERE, Elsewhere
from policyloss.spec import LossSpec, is_part


def traits(spec: LossSpec) -> frozenset[str]:
    """Short words for what a spec is made of; names and traps are chosen by them."""
    words = {
        f"anchor_{getattr(spec.ratio, 'anchor', 'old')}",
        *getattr(spec.ratio, "traits", ("other_ratio",)),
    }
    words |= _trust_traits(spec.trust) | {
        type(spec.aggregate).__name__,
        *(word for part in spec.pulls for word in getattr(part, "traits", ())),
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
    """The name of the part, its choices as `field_choice`, and what it says of itself."""
    if not is_part("trust", part):
        return {"own_trust"}
    choices = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    words = {f"{field}_{choice}" for field, choice in choices.items() if isinstance(choice, str)}
    return {type(part).__name__, *words, *getattr(part, "traits", ())}


def fits(needs: str, words: frozenset[str]) -> bool:
    """Whether every trait in `needs` holds (those with a leading "-": does not hold)."""
    needed = [(word.removeprefix("-"), not word.startswith("-")) for word in needs.split()]
    return all((word in words) is wanted for word, wanted in needed)


def elsewhere(spec: LossSpec) -> tuple[Elsewhere, ...]:
    """The entries of `ELSEWHERE` that apply to `spec`."""
    words = traits(spec)
    return tuple(entry for entry in ELSEWHERE if fits(entry.needs, words))
