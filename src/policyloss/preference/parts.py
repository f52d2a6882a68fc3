"""The parts of a preference loss: the score of a sequence, the margin of a pair, and the link.

Legend: w the chosen answer of a pair, l the rejected one; `x` `[S]` one number per sequence, `m`
`[P]` the margin of each pair. A link is called with `m` and returns a loss `[P]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor

from policyloss.errors import SpecError, safe_repr
from policyloss.functional import preference
from policyloss.parts.validate import Finite, Part, bounds

Scale: TypeAlias = Annotated[float, bounds(above=0, finite=True)]


@dataclass(frozen=True)
class Score(Part):
    """The score of a sequence, `shape(x)`, where x is a sum or a mean over its tokens.

    reference: "ref" takes `logp − ref_logp` of each token, None `logp`. length: whether x is the
    "sum" over tokens or their "mean". tail: the weight of the tokens beyond the length of the
    shorter answer of a pair (LD-DPO); a mean still divides by the number of tokens. shape, with
    u = eˣ: "power" `(u^(α−1) − 1)/(α − 1)`, which is x for alpha = 1, the reverse KL of f-DPO, and
    `1 − 1/u` for alpha = 0, its forward KL; "jensen_shannon" `log(2u/(1 + u))`; "log_odds"
    `log(u/(1 − u))` (ORPO). Only "power" reads alpha.
    """

    reference: Literal["ref"] | None = "ref"
    length: Literal["sum", "mean"] = "sum"
    tail: Annotated[float, bounds(least=0, most=1)] = 1.0
    shape: Literal["power", "jensen_shannon", "log_odds"] = "power"
    alpha: Finite = 1.0

    def shaped(self, x: Tensor) -> Tensor:
        """The scores `[S]` of sequences, from their sums or means."""
        if self.shape == "power":
            return preference.power_score(x, self.alpha)
        if self.shape == "jensen_shannon":
            return preference.jensen_shannon_score(x)
        return preference.log_odds(x)


@dataclass(frozen=True)
class Logistic(Part):
    """`−(1 − ε)·log σ(z) − ε·log σ(−z)` of `z = beta·m − target`: DPO's loss.

    ε = smoothing is the probability that a label is wrong. `−ε/(1 − 2ε)` in its place makes the
    loss unbiased under such labels (robust DPO). target: SimPO's γ.
    """

    beta: Scale
    smoothing: Annotated[float, bounds(most=1, finite=True)] = 0.0
    target: Finite = 0.0

    def __call__(self, m: Tensor) -> Tensor:
        return preference.logistic(self.beta * m - self.target, self.smoothing)


@dataclass(frozen=True)
class Hinge(Part):
    """`max(0, 1 − beta·m)` (SLiC)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return torch.relu(1 - self.beta * m)


@dataclass(frozen=True)
class Square(Part):
    """`(m − 1/(2·beta))²` (IPO, whose τ is beta)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return (m - 1 / (2 * self.beta)) ** 2


@dataclass(frozen=True)
class ReverseKL(Part):
    """`KL(q‖p)` of q = (σ(z), σ(−z)), `z = beta·m`, and p = (1 − ε, ε), ε = smoothing (EXO)."""

    beta: Scale
    smoothing: Annotated[float, bounds(above=0, below=1)]

    def __call__(self, m: Tensor) -> Tensor:
        return preference.reverse_kl(self.beta * m, self.smoothing)


@dataclass(frozen=True)
class LogisticOrExponential(Part):
    """`−(1 − g)·log σ(z) + g·e⁻ᶻ` of `z = beta·m`, with g = σ(z/tau) (DiscoPOP)."""

    beta: Scale
    tau: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return preference.logistic_or_exponential(self.beta * m, self.tau)


@dataclass(frozen=True)
class Sigmoid(Part):
    """`σ(−beta·m)`: bounded, so that a pair far off has little gradient (APO, KTO)."""

    beta: Scale

    def __call__(self, m: Tensor) -> Tensor:
        return torch.sigmoid(-self.beta * m)


LINKS = (Logistic, Hinge, Square, ReverseKL, LogisticOrExponential, Sigmoid)
# The margins of a sequence without a partner, and those for which all pairs are sorted.
ONE_SIDED, RANKED = ("chosen", "against_chosen", "rejected"), ("ranked_pair", "ranked_sides")


@dataclass(frozen=True)
class Term(Part):
    """One term of a preference loss: `weight · link(margin)`.

    link: a part of this module, or any callable `[P]` → `[P]`. margin, with the scores s_w and s_l
    and the baseline z of the call (0 if it has none): "pair" `s_w − s_l`; "chosen" `s_w − z`;
    "against_chosen" `z − s_w`; "rejected" `z − s_l`; and the two of AOT: "ranked_sides", s_w minus
    the rejected score of the same rank in the batch; "ranked_pair", the difference of
    log-probabilities of w and l minus the reference's difference of the same rank.
    """

    link: Any
    margin: Literal[
        "pair", "chosen", "against_chosen", "rejected", "ranked_pair", "ranked_sides"
    ] = "pair"
    score: Score = Score()
    weight: Finite = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.link, type) or not callable(self.link):
            names = ", ".join(link.__name__ for link in LINKS)
            raise SpecError(
                f"link must be one of {names}, or a callable, got {safe_repr(self.link)}."
            )
        if not isinstance(self.score, Score):
            raise SpecError(f"score must be a Score, got {safe_repr(self.score)}.")
        s = self.score
        if self.margin == "ranked_pair" and (s.reference, s.shape, s.alpha) != ("ref", "power", 1):
            raise SpecError(
                f'margin="ranked_pair" subtracts the reference itself; its score is {s!r}, and '
                'must have reference="ref", shape="power" and alpha=1.'
            )
