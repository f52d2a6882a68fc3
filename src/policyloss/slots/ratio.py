"""The `ratio` slot: which probability ratio? Each is called with `Tokens` and returns the *log*-ratio, not yet clamped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from policyloss.functional.context_parallel import turns
from policyloss.functional.masking import bound
from policyloss.functional.ratio import LogClamp
from policyloss.slots import checks
from policyloss.tokens import Tokens

Anchor = Literal["old", "rollout", "current"]
ANCHORS = ("old", "rollout", "current")


@dataclass(frozen=True)
class TokenRatio:
    """`ratio_t = exp(logp_t - anchor_logp_t)`.

    anchor: "old" (the trainer's frozen policy), "rollout" (the inference engine's), or "current" (`sg[logp]`: exactly on-policy,
    the ratio is 1 and its gradient that of logp). log_clamp: the log-ratio is held within ±this before `exp`; a pair is (low,
    high); None is no clamp.
    """

    reach: ClassVar[str] = "token"
    anchor: Anchor = "old"
    log_clamp: LogClamp = 20.0

    def __post_init__(self) -> None:
        checks.choice(self, "anchor", ANCHORS)
        checks.log_clamp(self)

    def __call__(self, t: Tokens) -> Tensor:
        return t.log_ratio_to(self.anchor)


@dataclass(frozen=True)
class SequenceRatio:
    """GSPO's ratio, the geometric mean over the sequence: `exp(mean_t(logp_t - anchor_logp_t))` (arXiv 2507.18071).

    grad="sequence": the gradient goes through the mean (GSPO). grad="token": `sg[s]·exp(logp_t - sg[logp_t])`, each token keeps
    its own gradient (GSPO-token). Equal when the advantage is constant within a sequence and each token counts 1/length.
    """

    reach: ClassVar[str] = "sequence"
    grad: Literal["sequence", "token"] = "sequence"
    anchor: Anchor = "old"
    log_clamp: LogClamp = 20.0

    def __post_init__(self) -> None:
        checks.choice(self, "grad", ("sequence", "token"))
        checks.choice(self, "anchor", ANCHORS)
        checks.log_clamp(self)

    def __call__(self, t: Tokens) -> Tensor:
        mean = t.sequence_mean(t.log_ratio_to(self.anchor))
        if self.grad == "sequence":
            return t.sequences.expand(mean)
        return t.sequences.expand(mean.detach()) + t.log_ratio_to("current")


@dataclass(frozen=True)
class SequenceProduct:
    """The likelihood ratio of the whole sequence: `exp(Σ_t(logp_t - anchor_logp_t))`. Unbiased, and wild for long sequences.

    token_clamp: each token's log-ratio is held within ±this before they are added up (VESPO: 20); None is no clamp.
    """

    reach: ClassVar[str] = "sequence"
    anchor: Anchor = "old"
    log_clamp: LogClamp = 20.0
    token_clamp: float | None = None

    def __post_init__(self) -> None:
        checks.choice(self, "anchor", ANCHORS)
        checks.log_clamp(self)
        checks.number(self, "token_clamp", above=0, optional=True)

    def __call__(self, t: Tokens) -> Tensor:
        return t.sequences.expand(t.sequences.sum(bound(t.log_ratio_to(self.anchor), self.token_clamp)))


@dataclass(frozen=True)
class SegmentRatio:
    """GSPO's ratio within each contiguous run of the mask (a turn of a dialogue): `exp(mean over the run)`.

    Where a context-parallel group holds the sequences, a turn is a run of consecutive `positions` and may cross ranks.
    """

    reach: ClassVar[str] = "sequence"
    anchor: Anchor = "old"
    log_clamp: LogClamp = 20.0

    def __post_init__(self) -> None:
        checks.choice(self, "anchor", ANCHORS)
        checks.log_clamp(self)

    def __call__(self, t: Tokens) -> Tensor:
        runs = turns(t.sequences, t.mask, t.positions)
        return runs.expand(runs.sum(t.log_ratio_to(self.anchor)) / runs.lengths.clamp(min=1))


VARIANTS = (TokenRatio, SequenceRatio, SequenceProduct, SegmentRatio)
