"""The corrections of OpenRLHF's `PolicyLoss`: its two families of arguments (`is_correction_*` from
0.11.2, `vllm_is_*` before), the parts that they choose, and the shares that it reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.arguments import at_least
from policyloss.errors import SpecError
from policyloss.functional.masking import accumulator_dtype, count
from policyloss.parts.correction import Band, DivergenceMask, SequenceMask, Truncate
from policyloss.tokens import Tokens

# Supported: the releases from OLDEST to before UNKNOWN.
OLDEST, CURRENT, UNKNOWN = "0.11.0", "0.11.2", "0.11.3"
LAST_WITH_VLLM_NAMES = "0.11.1"
BINARY_FLOOR = 1e-6  # the smallest probability in a binary KL

Threshold = Sequence[float] | None
# The defaults of is_correction_{level, mode, gating, threshold}.
NEWER_DEFAULTS = ("off", "mask", "ratio", (0.5, 5.0))
_DIVERGENCES: dict[str, Literal["kl", "tv"]] = {"binary_kl": "kl", "tv": "tv"}
# vllm_is_correction_type of 0.11.0 and 0.11.1 as level and mode of 0.11.2.
VLLM_TYPES = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
}


class Gate(NamedTuple):
    """A correction, described by the arguments of 0.11.2."""

    level: str
    mode: str = "mask"
    gating: str = "ratio"
    threshold: Threshold = None

    @property
    def bounds(self) -> tuple[float, float]:
        """The threshold as (low, high)."""
        threshold = self.threshold
        if not isinstance(threshold, Sequence) or len(threshold) != 2:
            raise SpecError(
                "is_correction_threshold (vllm_is_truncated_threshold up to 0.11.1) must be bounds "
                f"(low, high), got {threshold!r}."
            )
        return threshold[0], threshold[1]

    def check(self) -> None:
        """Raise for the combinations that OpenRLHF 0.11.2 refuses."""
        valid = {
            "level": ("off", "token", "seq"),
            "mode": ("mask", "clip"),
            "gating": ("ratio", "binary_kl", "tv"),
        }
        for name, words in valid.items():
            check_choice(f"is_correction_{name}", getattr(self, name), words, SpecError)
        if self.mode == "clip" and (self.level == "seq" or self.gating != "ratio"):
            raise SpecError(
                'is_correction_mode="clip" clamps the ratio of a token: it needs '
                'is_correction_level="token" and gating="ratio".'
            )
        if self.gating != "ratio" and self.level != "off" and self.bounds[0] > 0:
            raise SpecError(
                f"is_correction_threshold={self.threshold!r}: {self.gating} takes an upper bound "
                "only; pass (0, high)."
            )

    def part(self) -> Truncate | Band | SequenceMask | DivergenceMask:
        """The part of the correction slot. OpenRLHF does not clamp the logarithm of its weight."""
        low, high = self.bounds
        if self.gating != "ratio":
            level: Literal["sequence", "token"] = "sequence" if self.level == "seq" else "token"
            return DivergenceMask(
                _DIVERGENCES[self.gating], high, low, level, floor=BINARY_FLOOR, log_clamp=None
            )
        if self.level == "seq":
            return SequenceMask(low, high, log_clamp=None)
        if self.mode == "clip":
            return Truncate(high, low, log_clamp=None)
        return Band(low, high, log_clamp=None)


def older_by_position(newer: tuple[Any, ...], older: tuple[Any, ...]) -> tuple[Any, ...]:
    """The `vllm_is_*` arguments of a call by position, in the order of OpenRLHF up to 0.11.1.

    The sixth argument of such a call is a bool, and they arrive as the first three of `newer`.
    """
    enable, threshold, kind, fourth = newer
    if older != (None, None, None) or fourth != NEWER_DEFAULTS[3]:
        raise SpecError(
            f"is_correction_level={enable!r}: a bool as sixth argument is "
            "enable_vllm_is_correction, followed by vllm_is_truncated_threshold and "
            "vllm_is_correction_type; pass no other correction argument with them."
        )
    return enable, None if threshold == "mask" else threshold, None if kind == "ratio" else kind


def release_of(newer: tuple[Any, ...], older: tuple[Any, ...], release: str | None) -> str:
    """The release to follow: `release`, or the last release with the arguments that were passed."""
    has_newer, has_older = newer != NEWER_DEFAULTS, older != (None, None, None)
    if has_newer and has_older:
        raise SpecError(
            "is_correction_level, is_correction_mode, is_correction_gating, "
            "is_correction_threshold (OpenRLHF 0.11.2) and enable_vllm_is_correction, "
            "vllm_is_truncated_threshold, vllm_is_correction_type (earlier releases) describe the "
            "same correction; pass one of the two families."
        )
    if release is None:
        return LAST_WITH_VLLM_NAMES if has_older else CURRENT
    check_release(release)
    if has_older and at_least(release, CURRENT):
        raise SpecError(
            f"OpenRLHF {release} has no enable_vllm_is_correction and vllm_is_*; use "
            "is_correction_level and the others."
        )
    if has_newer and not at_least(release, CURRENT):
        raise SpecError(
            f"OpenRLHF {release} has no is_correction_*; use enable_vllm_is_correction and the "
            "others."
        )
    return release


def check_release(release: str) -> None:
    """Raise if this release is not supported."""
    if not at_least(release, OLDEST) or at_least(release, UNKNOWN):
        raise SpecError(
            f"OpenRLHF {release} is not supported; releases from {OLDEST} to {CURRENT} are."
        )


def mean_or_zero(total: Tensor, n: Tensor) -> Tensor:
    """`total / n`, 0-dim, in the accumulator's dtype; 0 where nothing was counted."""
    wide = accumulator_dtype(total.device)
    return total.to(wide) / n.to(wide).clamp(min=1)


@torch.no_grad()
def filter_ratio(gate: Gate, t: Tokens, dtype: torch.dtype) -> Tensor:
    """The share outside the threshold, 0-dim: of the valid tokens, in `dtype`, or at sequence level
    of the rows, in float32. A row without a valid token counts as outside.
    """
    keep = gate._replace(mode="mask").part()(t).keep
    assert keep is not None
    kept = t.mask & keep
    if gate.level == "seq":
        left = t.sequences.sum(kept.to(t.dtype)) > 0
        return mean_or_zero(count(~left), torch.tensor(left.numel())).float()
    return mean_or_zero(count(t.mask & ~kept), count(t.mask)).to(dtype)


def capped_weight(log_ratio: Tensor, cap: float) -> Tensor:
    """`min(exp(log_ratio), cap)` without gradient: the weight of an unbiased KL's gradient."""
    return log_ratio.detach().exp().clamp(max=cap)
