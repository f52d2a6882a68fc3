"""The `kl` slot: a pull to another policy. Value, gradient, weight and clamps are separate choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional import kl
from policyloss.functional.masking import bound
from policyloss.functional.ratio import bounded_exp
from policyloss.slots import checks
from policyloss.slots.wording import spoken
from policyloss.tokens import Tokens

ESTIMATORS = ("k1", "k2", "k3", "abs")
# What each weight is, in words.
WEIGHTS = {
    "ratio": "the ratio",
    "token_ratio": "the token's own ratio",
    "sequence_ratio": "the geometric mean of the sequence's ratios",
}


@dataclass(frozen=True)
class KL:
    """`coef · estimate of KL(current‖anchor)` per token, with d = anchor_logp − logp.

    estimator: k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ−d−1. grad: "value", the gradient of that number itself; "k2", straight
    through, the value of the estimator with the gradient of k2; "score", the score-function term added. weight="ratio" multiplies
    by the ratio slot's ratio, gradient included (DeepSeek-V3.2's unbiased KL); "token_ratio" by the token's own ratio and
    "sequence_ratio" by its sequence's geometric mean, to the ratio slot's anchor, whatever ratio that slot makes. clamp: d (and the
    logarithm of these two) within ±this; value_clamp: the estimate within ±this (with grad="value" the gradient is 0 beyond
    either). anchor: "ref", or "old"/"rollout" for a proximal pull. as_written: compute k3 term by term, as TRL does, for the same
    rounding; else to full precision near d = 0.
    """

    estimator: Literal["k1", "k2", "k3", "abs"]
    coef: float
    grad: Literal["value", "k2", "score"] = "value"
    weight: Literal["ratio", "token_ratio", "sequence_ratio"] | None = None
    clamp: float | None = 20.0
    value_clamp: float | None = None
    anchor: Literal["ref", "old", "rollout"] = "ref"
    as_written: bool = False

    def __post_init__(self) -> None:
        checks.choice(self, "estimator", ESTIMATORS)
        checks.number(self, "coef", least=0, finite=True, hint="to leave the penalty out, use kl=None.")
        checks.choice(self, "grad", ("value", "k2", "score"))
        if self.weight is not None:
            checks.choice(self, "weight", WEIGHTS)
        checks.number(self, "clamp", above=0, optional=True)
        checks.number(self, "value_clamp", above=0, optional=True)
        checks.choice(self, "anchor", ("ref", "old", "rollout"))
        if not isinstance(self.as_written, bool):
            raise SpecError(f"KL.as_written must be True or False, got {self.as_written!r}.")

    @property
    def reach(self) -> str:
        """Whose numbers a token's penalty depends on: its own, or those of its sequence (see `LossSpec.reach`)."""
        return "sequence" if self.weight == "sequence_ratio" else "token"

    def __call__(self, t: Tokens) -> Tensor:
        """The per-token penalty before `coef`, token-shaped."""
        raw = -t.log_ratio_to(self.anchor)
        d = bound(raw, self.clamp)
        value = bound(kl.estimate(d, self.estimator, as_written=self.as_written), self.value_clamp)
        value = kl.with_gradient(value, raw, t.logp, self.grad)
        return value if self.weight is None else value * self._weight(t)

    def _weight(self, t: Tokens) -> Tensor:
        if self.weight == "ratio":
            assert t.ratio is not None, "the ratio slot runs before the KL slot"
            return t.ratio
        log_ratio = t.log_ratio_to(t.anchor)
        if self.weight == "sequence_ratio":
            log_ratio = t.sequences.expand(t.sequence_mean(log_ratio))
        return bounded_exp(log_ratio, self.clamp)

    def sentence(self) -> str:
        """What it adds, in words."""
        gradient = {"value": "", "k2": ", with the gradient of k2", "score": ", with the score-function term"}[self.grad]
        weight = "" if self.weight is None else f", times {WEIGHTS[self.weight]}"
        return f"plus {spoken(self.coef)} times {self.estimator}, an estimate of KL(current, {self.anchor}){weight}{gradient}"

    @property
    def traits(self) -> tuple[str, ...]:
        """Short words for what it is (see `policyloss.explain.traits`)."""
        choices = (self.estimator, f"grad_{self.grad}", f"weight_{self.weight}", f"anchor_{self.anchor}")
        return "KL", *(f"kl_{choice}" for choice in choices)


VARIANTS = (KL,)
