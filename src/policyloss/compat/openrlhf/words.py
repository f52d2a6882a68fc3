"""OpenRLHF's two families of correction arguments, and the parts that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from policyloss.arguments import check_choice
from policyloss.compat.releases import at_least
from policyloss.errors import SpecError
from policyloss.parts.correction import Band, DivergenceMask, SequenceMask, Truncate

# Releases from OLDEST to before UNKNOWN are served.
OLDEST, CURRENT, UNKNOWN = "0.9.0", "0.11.2", "0.11.3"
LAST_WITH_VLLM_NAMES = "0.11.1"
BINARY_FLOOR = 1e-6  # the smallest probability in a binary KL

Threshold = float | Sequence[float] | None
_DIVERGENCES: dict[str, Literal["kl", "tv"]] = {"binary_kl": "kl", "tv": "tv"}
# The corrections of the releases up to 0.11.1, in the words of 0.11.2: level and mode, gated by the
# ratio.
VLLM_TYPES = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
    "mis": ("seq", "mask"),
}


class Gate(NamedTuple):
    """A correction in the words of 0.11.2."""

    level: str
    mode: str = "mask"
    gating: str = "ratio"
    threshold: Threshold = None


def by_place(
    words: tuple[Any, ...], vllm: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arguments in the order of the releases up to 0.11.1, whose sixth is a bool."""
    enable, threshold, kind, fourth = words
    if vllm != (None, None, None) or fourth != (0.5, 5.0):
        raise SpecError(
            f"is_correction_level={enable!r}: a bool in the sixth place is "
            "enable_vllm_is_correction, followed by vllm_is_truncated_threshold and "
            "vllm_is_correction_type; give nothing beside these three."
        )
    vllm_words = (
        enable,
        None if threshold == "mask" else threshold,
        None if kind == "ratio" else kind,
    )
    return ("off", "mask", "ratio", (0.5, 5.0)), vllm_words


def family(words: tuple[Any, ...], vllm: tuple[Any, ...], release: str | None) -> str:
    """The release to follow: `release`, or the last one that has the arguments that were passed."""
    has_words, has_vllm = words != ("off", "mask", "ratio", (0.5, 5.0)), vllm != (None, None, None)
    if has_words and has_vllm:
        raise SpecError(
            "is_correction_level, is_correction_mode, is_correction_gating, "
            "is_correction_threshold (OpenRLHF 0.11.2) and enable_vllm_is_correction, "
            "vllm_is_truncated_threshold, vllm_is_correction_type (earlier releases) say the same "
            "thing in two ways; give one of them."
        )
    if release is None:
        return LAST_WITH_VLLM_NAMES if has_vllm else CURRENT
    check_release(release)
    if has_vllm and at_least(release, CURRENT):
        raise SpecError(
            f"OpenRLHF {release} has no enable_vllm_is_correction and vllm_is_*; use "
            "is_correction_level and the others."
        )
    if has_words and not at_least(release, CURRENT):
        raise SpecError(
            f"OpenRLHF {release} has no is_correction_*; use enable_vllm_is_correction and the "
            "others."
        )
    return release


def check_release(release: str) -> None:
    """Raise unless the numbers and arguments of this release are known."""
    if not at_least(release, OLDEST) or at_least(release, UNKNOWN):
        raise SpecError(
            f"OpenRLHF {release} is not known here; releases from {OLDEST} to {CURRENT} are."
        )


def check_gate(gate: Gate) -> None:
    """Check the four words of 0.11.2 as OpenRLHF does."""
    valid = {
        "level": ("off", "token", "seq"),
        "mode": ("mask", "clip"),
        "gating": ("ratio", "binary_kl", "tv"),
    }
    for name, words in valid.items():
        check_choice(f"is_correction_{name}", getattr(gate, name), words, SpecError)
    if gate.mode == "clip" and (gate.level == "seq" or gate.gating != "ratio"):
        raise SpecError(
            'is_correction_mode="clip" clamps the ratio of a token: it needs '
            'is_correction_level="token" and gating="ratio".'
        )
    if gate.gating != "ratio" and gate.level != "off" and bounds(gate.threshold)[0] > 0:
        raise SpecError(
            f"is_correction_threshold={gate.threshold!r}: {gate.gating} takes an upper bound only; "
            "give (0, high)."
        )


def bounds(threshold: Threshold) -> tuple[float, float]:
    """A threshold as (low, high); a single number, as up to 0.9.0, is an upper bound."""
    if isinstance(threshold, (int, float)):
        return 0.0, threshold
    if threshold is None or len(threshold) != 2:
        raise SpecError(
            "is_correction_threshold (vllm_is_truncated_threshold up to 0.11.1) must be bounds "
            f"(low, high), got {threshold!r}."
        )
    return threshold[0], threshold[1]


def correction(gate: Gate) -> Truncate | Band | SequenceMask | DivergenceMask:
    """The part of a correction. OpenRLHF does not clamp the logarithm of its weight."""
    low, high = bounds(gate.threshold)
    if gate.gating != "ratio":
        level: Literal["sequence", "token"] = "sequence" if gate.level == "seq" else "token"
        return DivergenceMask(
            _DIVERGENCES[gate.gating], high, low, level, floor=BINARY_FLOOR, log_clamp=None
        )
    if gate.level == "seq":
        return SequenceMask(low, high, log_clamp=None)
    return (
        Truncate(high, low, log_clamp=None)
        if gate.mode == "clip"
        else Band(low, high, log_clamp=None)
    )
