"""What a spec is made of, in short words (`traits`), and so what each framework calls its parts."""

from __future__ import annotations

import math
from typing import Any

from policyloss.explaining.elsewhere import LOSSES, Elsewhere
from policyloss.explaining.elsewhere_parts import PARTS
from policyloss.explaining.formulas import rejects
from policyloss.slots import correction, kl, ratio, trust
from policyloss.spec import LossSpec, kind

__all__ = ["ELSEWHERE", "Elsewhere", "elsewhere", "fits", "traits"]

ELSEWHERE: tuple[Elsewhere, ...] = (*LOSSES, *PARTS)


def traits(spec: LossSpec) -> frozenset[str]:
    """Short words for what a spec is made of, to hang names and traps on."""
    found = {*_ratio_traits(spec.ratio), *_trust_traits(spec.trust), *_kl_traits(spec), kind(spec.aggregate).__name__}
    for part in spec.correction:
        found |= _correction_traits(part)
    if spec.correction:
        found |= {"correction", spec.rejected}
    if rejects(spec):
        found.add("rejects")
    if spec.entropy_coef:
        found.add("entropy")
    if spec.reads_ratio:
        found.add("reads_ratio")
    return frozenset(found)


def fits(needs: str, found: frozenset[str]) -> bool:
    """Whether every trait in `needs` holds (those with a leading "-": does not hold)."""
    return all((word[1:] not in found) if word.startswith("-") else (word in found) for word in needs.split())


def elsewhere(spec: LossSpec) -> tuple[Elsewhere, ...]:
    """The entries of `ELSEWHERE` that apply to `spec`."""
    found = traits(spec)
    return tuple(entry for entry in ELSEWHERE if fits(entry.needs, found))


def _ratio_traits(part: Any) -> set[str]:
    kinds = {ratio.TokenRatio: "token_ratio", ratio.SequenceProduct: "product_ratio", ratio.SegmentRatio: "turn_ratio"}
    found = {f"anchor_{getattr(part, 'anchor', 'old')}", kinds.get(kind(part), "other_ratio")}
    if isinstance(part, ratio.SequenceRatio):
        found |= {"sequence_ratio", f"sequence_ratio_{part.grad}"}
    return found


def _trust_traits(part: Any) -> set[str]:
    found = {type(part).__name__} if isinstance(part, trust.VARIANTS) else {"own_trust"}
    for field in ("outside", "divergence", "form", "sides"):
        if hasattr(part, field):
            found.add(f"{field}_{getattr(part, field)}")
    if isinstance(part, trust.Clip):
        found |= set() if part.dual is None else {"dual"}
        if math.isinf(part.eps_low) and part.dual == 1 + part.eps_high:
            found.add("aipo")
        if part.eps_low != part.eps_high:
            found.add("asymmetric")
    return found


def _correction_traits(part: Any) -> set[str]:
    found = {type(part).__name__}
    if hasattr(part, "level"):
        found.add(f"{type(part).__name__}_{part.level}")
    if isinstance(part, correction.Truncate) and math.isinf(part.high):
        found.add("untruncated")
    return found


def _kl_traits(spec: LossSpec) -> set[str]:
    if not isinstance(spec.kl, kl.KL):
        return set()
    return {
        "KL",
        f"kl_{spec.kl.estimator}",
        f"kl_grad_{spec.kl.grad}",
        f"kl_weight_{spec.kl.weight or ('other' if spec.kl.reads_ratio else None)}",
        f"kl_anchor_{spec.kl.anchor}",
    }
