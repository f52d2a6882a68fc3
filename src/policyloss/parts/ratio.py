"""The `ratio` slot: which probability ratio? A part returns the *log*-ratio, not yet clamped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from policyloss.functional.context_parallel import turns
from policyloss.functional.masking import LogClamp, bound
from policyloss.functional.ratio import mean_log_ratio
from policyloss.parts.validate import Part, Positive, log_clamp
from policyloss.parts.wording import ANCHORS, Condition, number
from policyloss.tokens import Tokens

Anchor = Literal["old", "rollout", "teacher", "ref", "current"]

ON_POLICY = "exactly 1, with the gradient of logp (the anchor is logp itself)"


def _sentence(anchor: str, words: str) -> str:
    """The ratio in words, in which {} stands for the anchor."""
    return ON_POLICY if anchor == "current" else words.format(ANCHORS[anchor])


@dataclass(frozen=True)
class TokenRatio(Part):
    """`ratio_t = exp(logp_t - anchor_logp_t)`.

    anchor, the policy in the denominator: "old" (the trainer's before its first update on this
    batch), "rollout" (the inference engine's), "teacher" (for tokens that a teacher wrote), "ref"
    (the reference model), or "current" (`sg[logp]`, where sg stops the gradient: the ratio is
    exactly 1, and its gradient is that of logp). log_clamp: clamps the log-ratio to ±log_clamp, or
    to a pair (low, high), before `exp`; None: no clamp.
    """

    reach: ClassVar[str] = "token"
    shared_over: ClassVar[str | None] = None
    traits: ClassVar[tuple[str, ...]] = ("token_ratio",)
    anchor: Anchor = "old"
    log_clamp: Annotated[LogClamp, log_clamp] = 20.0

    def __call__(self, t: Tokens) -> Tensor:
        return t.log_ratio_to(self.anchor)

    def sentence(self) -> str:
        return _sentence(self.anchor, "each token's own probability ratio to {}")


@dataclass(frozen=True)
class SequenceRatio(Part):
    """GSPO's ratio, the geometric mean of a sequence: `exp(mean_t(logp_t - anchor_logp_t))`.

    Source: arXiv 2507.18071.
    grad="sequence": the gradient goes through the mean (GSPO). grad="token": the ratio is
    `sg[s]·exp(logp_t - sg[logp_t])`, with s the sequence's ratio and sg stopping the gradient, so
    each token keeps its own gradient (GSPO-token). The two give the same gradient if the advantage
    is constant within a sequence and all its tokens weigh the same. anchor: as in `TokenRatio`.
    log_clamp: as there, applied to the mean.
    """

    reach: ClassVar[str] = "sequence"
    grad: Literal["sequence", "token"] = "sequence"
    anchor: Anchor = "old"
    log_clamp: Annotated[LogClamp, log_clamp] = 20.0

    def __call__(self, t: Tokens) -> Tensor:
        mean = t.sequence_mean(t.log_ratio_to(self.anchor))
        if self.grad == "sequence":
            return t.sequences.expand(mean)
        return t.sequences.expand(mean.detach()) + t.log_ratio_to("current")

    @property
    def shared_over(self) -> str | None:
        """`"sequence"` if the tokens of a sequence share one gradient, else None."""
        return "sequence" if self.grad == "sequence" else None

    @property
    def traits(self) -> tuple[str, ...]:
        return "sequence_ratio", f"sequence_ratio_{self.grad}", "other_ratio"

    def sentence(self) -> str:
        tail = "" if self.grad == "sequence" else ", each token with its own gradient"
        words = "the geometric mean over the sequence of the probability ratios to {}"
        return _sentence(self.anchor, words + tail)


@dataclass(frozen=True)
class SequenceProduct(Part):
    """The likelihood ratio of the whole sequence: `exp(Σ_t(logp_t - anchor_logp_t))`.

    As an importance weight of the sequence it is unbiased where no clamp acts, but its variance is
    large for long sequences.

    anchor: as in `TokenRatio`. log_clamp: as there, applied to the sum. token_clamp: each token's
    log-ratio is held within ±token_clamp before the sum (VESPO: 20). None: no clamp.
    """

    reach: ClassVar[str] = "sequence"
    shared_over: ClassVar[str | None] = "sequence"
    traits: ClassVar[tuple[str, ...]] = ("product_ratio",)
    anchor: Anchor = "old"
    log_clamp: Annotated[LogClamp, log_clamp] = 20.0
    token_clamp: Positive | None = None

    def __call__(self, t: Tokens) -> Tensor:
        return t.sequences.expand(
            t.sequences.sum(bound(t.log_ratio_to(self.anchor), self.token_clamp))
        )

    def sentence(self) -> str:
        words = (
            "the likelihood ratio of the whole sequence to {}: the product of its tokens' ratios"
        )
        return _sentence(self.anchor, words)

    def no_slope(self) -> tuple[Condition, ...]:
        """The condition under which `token_clamp` stops a token's gradient."""
        if self.token_clamp is None or math.isinf(self.token_clamp) or self.anchor == "current":
            return ()
        beyond = f"abs(logp - {ANCHORS[self.anchor]}) > {number(self.token_clamp)}"
        return (Condition(beyond, "its own log-ratio is beyond token_clamp"),)


@dataclass(frozen=True)
class SegmentRatio(Part):
    """GSPO's ratio within each turn of a dialogue: `exp(mean of the log-ratio over the turn)`.

    A turn is the valid tokens of a sequence that share one of `turn_ids`; without `turn_ids`, a
    contiguous run of valid tokens. A turn may span the ranks of a context-parallel group; without
    `turn_ids`, it is then a run of consecutive `positions` (which count masked tokens too). anchor,
    log_clamp: as in `TokenRatio`.
    """

    reach: ClassVar[str] = "sequence"
    shared_over: ClassVar[str | None] = "run"
    traits: ClassVar[tuple[str, ...]] = ("turn_ratio",)
    anchor: Anchor = "old"
    log_clamp: Annotated[LogClamp, log_clamp] = 20.0

    def __call__(self, t: Tokens) -> Tensor:
        runs = turns(t.sequences, t.mask, t.positions, t.turn_ids)
        total, length = runs.sums(t.log_ratio_to(self.anchor), t.mask)
        return runs.expand(total / length.clamp(min=1))

    def sentence(self) -> str:
        words = "the geometric mean over each turn (unbroken run of the mask) of the probability "
        return _sentence(self.anchor, words + "ratios to {}")


@dataclass(frozen=True)
class MixedRatio(Part):
    """The mean of the token's ratio r and its sequence's GSPO ratio s (OpenPipe ART).

    mean: "arithmetic" is `(r + s) / 2` (ART's "average"), "geometric" is `√(r·s)` (its
    "geometric_average"). The gradient goes through both ratios. anchor, log_clamp: as in
    `TokenRatio`.
    """

    reach: ClassVar[str] = "sequence"
    shared_over: ClassVar[str | None] = "sequence"
    traits: ClassVar[tuple[str, ...]] = ("mixed_ratio", "other_ratio")
    mean: Literal["arithmetic", "geometric"] = "arithmetic"
    anchor: Anchor = "old"
    log_clamp: Annotated[LogClamp, log_clamp] = 20.0

    def __call__(self, t: Tokens) -> Tensor:
        d = t.log_ratio_to(self.anchor)
        return mean_log_ratio(d, t.sequences.expand(t.sequence_mean(d)), self.mean)

    def formula(self, anchor: str) -> list[tuple[str, str]]:
        """The formula's lines for `explain`: name and expression."""
        both = {"arithmetic": "log((exp(d) + exp(s)) / 2)", "geometric": "(d + s) / 2"}
        d = f"logp - {ANCHORS[self.anchor]}"
        return [("d", d), ("s", "seq_mean(d)"), ("log_ratio", both[self.mean])]

    def sentence(self) -> str:
        words = f"the {self.mean} mean of each token's own probability ratio to {{}} and of the "
        return _sentence(self.anchor, words + "geometric mean of these over its sequence")


VARIANTS = (TokenRatio, SequenceRatio, SequenceProduct, SegmentRatio, MixedRatio)
