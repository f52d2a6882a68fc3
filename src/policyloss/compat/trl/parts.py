"""TRL's variants of the library's parts: its rounding of k3, the ratio that weighs its KL, and the
rollout weight in VESPO's ratio.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional import kl
from policyloss.functional.correction import importance_weight, within
from policyloss.functional.masking import bound, fill
from policyloss.functional.ratio import bounded_exp
from policyloss.parts.data import framework_part
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SequenceProduct
from policyloss.parts.validate import NotNegative, Positive, not_below
from policyloss.tokens import Tokens

# The bounds of one token's log rollout weight in a product; a weight of 0 gets the lower one.
ROLLOUT_LOG_BOUNDS = (math.log(1e-8), 20.0)


@framework_part("kl", "trl")
@dataclass(frozen=True)
class WrittenKL(KL):
    """`KL` with TRL's rounding: k3 term by term, which near d = 0 leaves only the rounding of eᵈ.

    ratio_level: also multiply by a ratio to the anchor of the ratio slot, including its gradient,
    whatever part fills that slot: "token" is the token's ratio, and "sequence" is the geometric
    mean over its sequence. `clamp` bounds the logarithm of that ratio too.
    """

    ratio_level: Literal["token", "sequence"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_level is not None and self.weight is not None:
            raise SpecError(
                "WrittenKL: weight and ratio_level would both multiply the penalty by a ratio; "
                "give one."
            )

    @property
    # `KL` has one reach for all its values; here it depends on a field.
    def reach(self) -> str:  # type: ignore[override]
        """Whether a penalty depends on its "token" alone or on its "sequence"."""
        return "sequence" if self.ratio_level == "sequence" else "token"

    @property
    def reads_ratio(self) -> bool:
        """Whether the penalty is multiplied by a ratio."""
        return self.weight is not None or self.ratio_level is not None

    def estimate(self, d: Tensor) -> Tensor:
        return kl.estimate(d, self.estimator, as_written="exp(d) - d - 1")

    def ratio_weight(self, t: Tokens) -> Tensor | None:
        if self.ratio_level is None:
            return super().ratio_weight(t)
        log_ratio = t.log_ratio_to(t.anchor)
        if self.ratio_level == "sequence":
            log_ratio = t.sequences.expand(t.sequence_mean(log_ratio))
        return bounded_exp(log_ratio, self.clamp)

    def weight_sentence(self) -> str | None:
        """What the penalty is multiplied by, in words; None for what `KL` says."""
        words = {
            "token": "the token's own ratio",
            "sequence": "the geometric mean of the sequence's ratios",
        }
        return super().weight_sentence() if self.ratio_level is None else words[self.ratio_level]


@framework_part("ratio", "trl")
@dataclass(frozen=True)
class RolloutProduct(SequenceProduct):
    """`SequenceProduct` to the engine that sampled: each token's ratio is also multiplied by its
    rollout weight `w = exp(old_logp - rollout_logp)`. outside: "truncate" clamps w to [low, high];
    "mask" replaces a w outside of it by 1e-8. log w is clamped to [log 1e-8, 20].
    """

    reads: ClassVar[tuple[str, ...]] = ("rollout_logp",)
    outside: Literal["truncate", "mask"] = "truncate"
    low: NotNegative = 0.0
    high: Annotated[Positive, not_below("low")] = math.inf

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.anchor != "old":
            raise SpecError(
                "RolloutProduct leads from old_logp to rollout_logp: anchor must be 'old', not "
                f"{self.anchor!r}."
            )

    def __call__(self, t: Tokens) -> Tensor:
        of_tokens = bound(t.log_ratio_to(self.anchor), self.token_clamp)
        total, rollout = t.sequences.sums(of_tokens, self._log_rollout_weight(t))
        return t.sequences.expand(total + rollout)

    def _log_rollout_weight(self, t: Tokens) -> Tensor:
        weight = importance_weight(t.log_weight(), None)
        if self.outside == "truncate":
            weight = weight.clamp(min=self.low, max=self.high)
        else:
            weight = torch.where(within(weight, self.low, self.high), weight, 0)
        return fill(bound(weight.log(), ROLLOUT_LOG_BOUNDS), t.mask)

    def sentence(self) -> str:
        """What the ratio is, in words."""
        to = (
            f"to rollout_logp, through old_logp with weights within [{self.low:.10g}, "
            f"{self.high:.10g}]"
        )
        return f"the likelihood ratio of the whole sequence {to}: the product of its tokens' ratios"
