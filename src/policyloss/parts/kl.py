"""The `kl` slot: a pull to another policy, with independent value, gradient, weight and clamps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional import kl
from policyloss.functional.masking import bound
from policyloss.parts.divergence import Divergence
from policyloss.parts.validate import Part, Positive, limits
from policyloss.parts.wording import spoken
from policyloss.tokens import Tokens


@dataclass(frozen=True)
class KL(Part):
    """`coef · estimate of KL(current‖anchor)` per token, with d = anchor_logp − logp.

    sg stops the gradient. estimator: k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ−d−1. grad: "value" is
    the estimate's own gradient; "k2" keeps the estimate's value, but takes the gradient of k2
    (straight-through); "score" adds the score-function term to the estimate's own gradient.
    weight: "ratio" multiplies by the ratio slot's ratio, gradient included (DeepSeek-V3.2's
    unbiased KL); "detached_ratio" multiplies by `sg[ratio]`, or with weight_max by
    `sg[min(ratio, weight_max)]`. clamp: d is held within ±clamp; value_clamp: the estimate is held
    within ±value_clamp (with grad="value" the gradient is 0 beyond either bound). anchor: "ref",
    "teacher" (with grad="k2" this is distillation on the sampled tokens: the gradient is that of
    `−sg[d]·logp`), or "old"/"rollout" for a proximal pull.
    """

    reach: ClassVar[str] = "token"

    estimator: Literal["k1", "k2", "k3", "abs"]
    coef: Annotated[
        float, limits(least=0, finite=True, hint="to leave the penalty out, use kl=None.")
    ]
    grad: Literal["value", "k2", "score"] = "value"
    weight: Literal["ratio", "detached_ratio"] | None = None
    clamp: Positive | None = 20.0
    value_clamp: Positive | None = None
    anchor: Literal["ref", "old", "rollout", "teacher"] = "ref"
    weight_max: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight_max is not None and self.weight != "detached_ratio":
            raise SpecError(
                f"KL.weight_max={self.weight_max!r} bounds a weight without gradient; "
                f"use it with weight='detached_ratio', not with weight={self.weight!r}."
            )

    @property
    def teaches(self) -> bool:
        """Whether the pull is to a teacher."""
        return self.anchor == "teacher"

    @property
    def reads_ratio(self) -> bool:
        """Whether the penalty is multiplied by a ratio."""
        return self.weight is not None

    def __call__(self, t: Tokens) -> Tensor:
        """The per-token penalty before `coef`, token-shaped."""
        raw = -t.log_ratio_to(self.anchor)
        d = bound(raw, self.clamp)
        value = kl.with_gradient(bound(self.estimate(d), self.value_clamp), raw, t.logp, self.grad)
        weight = self.ratio_weight(t)
        return value if weight is None else value * weight

    def estimate(self, d: Tensor) -> Tensor:
        """The estimate of each token, from its d."""
        return kl.estimate(d, self.estimator)

    def ratio_weight(self, t: Tokens) -> Tensor | None:
        """The ratio that multiplies the penalty; None if no ratio does."""
        if self.weight == "detached_ratio":
            return bound(t.ratio.detach(), (None, self.weight_max))
        return None if self.weight is None else t.ratio

    def weight_sentence(self) -> str | None:
        """The factor of the penalty in words; None without a weight."""
        if self.weight == "detached_ratio":
            most = "" if self.weight_max is None else f", at most {spoken(self.weight_max)}"
            return f"the ratio{most}, without its gradient"
        return None if self.weight is None else "the ratio"

    def sentence(self) -> str:
        """The added term in words."""
        gradient = {
            "value": "",
            "k2": ", with the gradient of k2",
            "score": ", with the score-function term",
        }[self.grad]
        by = self.weight_sentence()
        weight = "" if by is None else f", times {by}"
        of = f"an estimate of KL(current, {self.anchor}){weight}{gradient}"
        return f"plus {spoken(self.coef)} times {self.estimator}, {of}"

    @property
    def traits(self) -> tuple[str, ...]:
        weight = self.weight or ("other" if self.reads_ratio else None)
        choices = (self.estimator, f"grad_{self.grad}", f"weight_{weight}", f"anchor_{self.anchor}")
        return "KL", *(f"kl_{choice}" for choice in choices)


VARIANTS = (KL, Divergence)
