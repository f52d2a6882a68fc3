"""TRL's variants of the library's parts (its rounding of k3, the ratio that weighs its KL, the
rollout weight in VESPO's ratio), and the counts and sums of its trainer.
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
from policyloss.functional.masking import accumulator_dtype, bound, fill
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


def tokens_in(mask: Tensor, calls: int = 1, ranks: int = 1) -> Tensor:
    """The tokens of a step of `calls` micro-batches on `ranks` ranks, if each has as many as `mask`
    (at least 1). 0-dim.
    """
    return mask.sum().clamp(min=1).to(accumulator_dtype(mask.device)) * calls * ranks


def rows_in(mask: Tensor, calls: int = 1, ranks: int = 1) -> int:
    """Rows of such a step, empty ones included. mask: padded `[B, T]`."""
    return mask.shape[0] * calls * ranks


def tokens_of_window(items: Tensor, ranks: int, calls: int, generated: int) -> Tensor:
    """Tokens of one accumulation window over all ranks, from those of a generation batch:
    `max(items, 1)·calls / generated`. 0-dim.

    items: valid tokens of the generation batch over all ranks. It is cut into `generated`
    micro-batches per rank, of which `calls` are accumulated into one step. The share of one rank is
    rounded to float32, as TRL computes it, then counted for all of them.
    """
    share = items.clamp(min=1.0) / ranks * calls / generated
    return share.to(accumulator_dtype(items.device)) * ranks


def where_scored(logp: Tensor, instead: Tensor) -> Tensor:
    """`logp`, or `instead` where the engine reported NaN for a token. Token-shaped."""
    return torch.where(logp.isnan(), instead.to(logp.dtype), logp)


def exchanged(total: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """A sum with one of its terms replaced: `total − old + new`. `old` is the value that `total`
    contains, without its gradient.
    """
    return total + (new - old.detach())


def likelihood_loss(
    logp: Tensor, mask: Tensor, items: Tensor | int | None, aux: Tensor | None, coef: float
) -> Tensor:
    """The loss that TRL's fused head returns: `−Σ logp / items`, the router loss added. items: by
    default the tokens of `mask`.
    """
    count = mask.sum().clamp(min=1) if items is None else items
    loss = -logp.sum() / count
    return loss if aux is None else loss + coef * aux


def last(x: Tensor, count: int) -> Tensor:
    """The last `count` entries of each row. `[B, T, …]` → `[B, count, …]`"""
    return x[:, x.shape[1] - count :]


def at_the_end(x: Tensor, like: Tensor) -> Tensor:
    """`x` at the end of rows as long as those of `like`, 0 before. `[B, n]` → `[B, T]`"""
    return torch.nn.functional.pad(x, (like.shape[1] - x.shape[1], 0))
