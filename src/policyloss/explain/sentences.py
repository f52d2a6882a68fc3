"""One plain sentence for every slot of a loss, put together from those of its parts."""

from __future__ import annotations

from typing import Any

from policyloss.explain.formula import callable_name, rejects
from policyloss.parts.wording import spoken
from policyloss.spec import LossSpec

SLOTS = ("ratio", "trust", "correction", "rejected", "kl", "entropy_coef", "aggregate")
_REJECTED = {
    "keep": "a rejected token keeps its place in the denominator",
    "renormalise": "a rejected token leaves the mask, so the denominator counts the survivors",
    "drop_sequence": (
        "one rejected token removes its whole sequence from the mask and the denominator"
    ),
}


def describe(spec: LossSpec) -> dict[str, str]:
    """What each slot of `spec` does, slot by slot; slots that do nothing are left out."""
    sentences = {slot: describe_slot(spec, slot) for slot in SLOTS}
    if not spec.reads_ratio:
        sentences["ratio"] = ""
    return {slot: text for slot, text in sentences.items() if text}


def describe_slot(spec: LossSpec, slot: str) -> str:
    """What one slot of `spec` does; "" if nothing."""
    part = getattr(spec, slot)
    if isinstance(part, tuple):
        return "; and ".join(_sentence(one) for one in part)
    if slot == "rejected":
        return _REJECTED[part] if rejects(spec) else ""
    if slot == "entropy_coef":
        return f"minus {spoken(part)} times the entropy of the policy at each token" if part else ""
    return "" if part is None else _sentence(part)


def _sentence(part: Any) -> str:
    return (
        part.sentence() if hasattr(part, "sentence") else f"your own function {callable_name(part)}"
    )
