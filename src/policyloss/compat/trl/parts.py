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
from policyloss.totals import Totals

# The bounds of one token's log rollout weight in a product; a weight of 0 gets the lower one.
ROLLOUT_LOG_BOUNDS = (math.log(1e-8), 20.0)


@framework_part("kl", "trl")
@dataclass(frozen=True)
class WrittenKL(KL):
    """`KL` with TRL's rounding: k3 is computed term by term, which near d = 0 leaves only the
    rounding of eᵈ.

    ratio_level: also multiply by a ratio to the anchor of the ratio slot, with its gradient, for
    any part in that slot: "token" is the token's ratio, "sequence" the geometric mean over its
    sequence. `clamp` bounds the logarithm of that ratio too.
    """

    ratio_level: Literal["token", "sequence"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ratio_level is not None and self.weight is not None:
            raise SpecError(
                "WrittenKL: weight and ratio_level would both multiply the penalty by a ratio; "
                "pass one of them."
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
        """The factor of the penalty in words, or the sentence of `KL`."""
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
                "RolloutProduct multiplies by the ratio of old_logp to rollout_logp: anchor must "
                f"be 'old', not {self.anchor!r}."
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
        """The ratio in words."""
        to = (
            f"to rollout_logp, through old_logp with weights within [{self.low:.10g}, "
            f"{self.high:.10g}]"
        )
        return f"the likelihood ratio of the whole sequence {to}: the product of its tokens' ratios"


def step_totals(
    mask: Tensor, items: Tensor | None, *, calls: int, generated: int, ranks: int
) -> Totals:
    """The totals of a step of `calls` micro-batches per rank, empty rows included.

    items: the valid tokens of the generation batch of `generated` micro-batches per rank; None if
    every micro-batch has the tokens (at least 1) of `mask`, `[B, T]`.
    """
    if items is None:
        tokens = mask.sum().clamp(min=1).to(accumulator_dtype(mask.device)) * calls * ranks
    else:
        tokens = tokens_of_window(items, ranks, calls, generated)
    return Totals(tokens=tokens, sequences=mask.shape[0] * calls * ranks, dp_size=ranks)


def tokens_of_window(items: Tensor, ranks: int, calls: int, generated: int) -> Tensor:
    """The tokens of one accumulation window over all ranks, `max(items, 1)·calls / generated`.

    The result is 0-dim. items: the valid tokens of the generation batch over all ranks. That batch
    is cut into `generated` micro-batches per rank, of which `calls` are accumulated into one step.
    The share of one rank is rounded to float32, as in TRL, then multiplied by the ranks.
    """
    share = items.clamp(min=1.0) / ranks * calls / generated
    return share.to(accumulator_dtype(items.device)) * ranks


def where_scored(logp: Tensor, instead: Tensor) -> Tensor:
    """`logp`, or `instead` where the engine reported NaN. Token-shaped."""
    return torch.where(logp.isnan(), instead.to(logp.dtype), logp)


def replace_term(total: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """`total − old + new`, where `total` contains the value of `old`, but not its gradient."""
    return total + (new - old.detach())


def offsets_of(segment_id: Tensor) -> Tensor:
    """The offsets of packed sequences, from the number of the sequence of each token, rising."""
    return torch.nn.functional.pad(segment_id.bincount().cumsum(0), (1, 0))


def likelihood_loss(
    logp: Tensor, mask: Tensor, items: Tensor | int | None, aux: Tensor | None, coef: float
) -> Tensor:
    """The loss that TRL's fused head returns: `−Σ logp / items` plus `coef` times the router loss.

    items: by default the tokens of `mask`. aux: the router loss.
    """
    count = mask.sum().clamp(min=1) if items is None else items
    loss = -logp.sum() / count
    return loss if aux is None else loss + coef * aux


def last(x: Tensor, count: int) -> Tensor:
    """The last `count` entries of each row. `[B, T, …]` → `[B, count, …]`."""
    return x[:, x.shape[1] - count :]


def at_the_end(x: Tensor, like: Tensor) -> Tensor:
    """`x` at the end of rows of the length of `like`, 0 before. `[B, n]` → `[B, T]`."""
    return torch.nn.functional.pad(x, (like.shape[1] - x.shape[1], 0))
