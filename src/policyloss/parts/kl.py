"""The `kl` slot: a pull to another policy (`KL`), or to a teacher's whole distribution
(`Divergence`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from torch import Tensor

from policyloss.arguments import description
from policyloss.errors import SpecError
from policyloss.functional import kl
from policyloss.functional.divergence import KINDS, ONE_ENTRY, KindName, Measure, Rest, Top
from policyloss.functional.masking import LogClamp, bound
from policyloss.parts.validate import Part, Positive, bounds, log_clamp
from policyloss.parts.wording import bounds_in_words, spoken
from policyloss.tokens import Tokens


@dataclass(frozen=True)
class KL(Part):
    """`coef · estimate of KL(current‖anchor)` per token, with d = anchor_logp − logp.

    sg stops the gradient. estimator: k1 = −d, abs = |d|, k2 = ½d², k3 = eᵈ−d−1. grad: "value" is
    the estimate's own gradient; "k2" keeps the estimate's value, but takes the gradient of k2
    (straight-through); "score" adds the score-function term to the estimate's own gradient.
    weight: "ratio" multiplies by the ratio of the spec, gradient included (DeepSeek-V3.2's unbiased
    KL); "detached_ratio" multiplies by `sg[ratio]`, or with weight_max by `sg[min(ratio,
    weight_max)]`. clamp: d is clamped to ±clamp; value_clamp: the estimate is clamped to
    ±value_clamp. Beyond either bound, the estimate's own gradient is 0; grad="k2" ignores both.
    anchor: "ref", "teacher" (with grad="k2" this is distillation on the sampled tokens: the
    gradient is that of `−sg[d]·logp`), or "old"/"rollout" for a proximal penalty.
    """

    reach: ClassVar[str] = "token"

    estimator: Literal["k1", "k2", "k3", "abs"]
    coef: Annotated[
        float, bounds(least=0, finite=True, hint="to leave the penalty out, use kl=None.")
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
        """Whether the anchor is a teacher."""
        return self.anchor == "teacher"

    @property
    def reads_ratio(self) -> bool:
        """Whether the penalty is multiplied by the spec's ratio."""
        return self.weight is not None

    def __call__(self, t: Tokens) -> Tensor:
        """The per-token penalty before `coef`, token-shaped."""
        raw = -t.log_ratio_to(self.anchor)
        d = bound(raw, self.clamp)
        value = kl.with_gradient(bound(self.estimate(d), self.value_clamp), raw, t.logp, self.grad)
        weight = self.ratio_weight(t)
        return value if weight is None else value * weight

    def estimate(self, d: Tensor) -> Tensor:
        """The KL estimate of each token, from d = anchor_logp − logp."""
        return kl.estimate(d, self.estimator)

    def ratio_weight(self, t: Tokens) -> Tensor | None:
        """The ratio that multiplies the penalty, or None."""
        if self.weight == "detached_ratio":
            return bound(t.ratio.detach(), (None, self.weight_max))
        return None if self.weight is None else t.ratio

    def weight_sentence(self) -> str | None:
        """The ratio that multiplies the penalty, in words, or None."""
        if self.weight == "detached_ratio":
            most = "" if self.weight_max is None else f", at most {spoken(self.weight_max)}"
            return f"the ratio{most}, without its gradient"
        return None if self.weight is None else "the ratio"

    def sentence(self) -> str:
        """The term in words, for `explain`."""
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


def _name_or_none(owner: Any, field: str) -> None:
    value = getattr(owner, field)
    if value is not None and (not isinstance(value, str) or not value):
        raise SpecError(
            f'Divergence.{field} must be None, "ratio" or the name of a tensor of extras, got '
            f"{description(value)}."
        )


@dataclass(frozen=True)
class Divergence(Part):
    """`coef · divergence` between the teacher's and the student's distributions, per token.

    kind: "forward" KL(teacher‖student), "reverse" KL(student‖teacher), "jsd" with the mixture m =
    (1−beta)·student + beta·teacher (beta 0 is the forward and 1 the reverse KL, as in GKD),
    "skew_forward" KL(teacher‖m) (DistiLLM's with lam = beta), "skew_reverse" KL(student‖m)
    (DistiLLM's with lam = 1−beta), "tv" ½Σ|p_s − p_t|, or "generalised", Σ p_s(log p_s − log p_t) −
    p_s + p_t, which is least at p_s = p_t even if entries are left out. p_s and p_t are the
    probabilities of student and teacher.
    weight: None, "ratio" for the ratio of the spec, or the name of a tensor of `extras`; the
    weight, limited to `weight_max`, multiplies the divergence and carries no gradient.
    clamp: the divergence is clamped to ±clamp, or to a pair (low, high) with None for no bound; its
    gradient is 0 beyond the bounds.
    top: None compares every vocabulary entry that the teacher provides; "student", "teacher",
    "union" or "intersection" compares the k most probable entries of the student, those of the
    teacher, their union or their intersection.
    rest: "entry" adds up the probabilities of all other entries (those beyond the k, or those that
    a `TopK` teacher does not provide) as one more entry; "drop" leaves them out; "renormalise"
    leaves them out and divides the probabilities of each model by their sum over the compared
    entries (which must be two or more, or the divergence would always be 0). For "generalised",
    "entry" means "drop".

    `linear_policy_loss(…, teacher=…)` computes the divergence with these settings. For
    `policy_loss(…, divergence=…)`, compute it by `linear_divergence` or `divergence`, and pass the
    same kind, beta, rest, top and k there.
    """

    reach: ClassVar[str] = "token"
    teaches: ClassVar[bool] = True

    kind: KindName
    coef: Annotated[float, bounds(least=0, finite=True, hint="to leave it out, use kl=None.")]
    beta: Annotated[float, bounds(least=0, most=1, hint="0: forward KL, 1: reverse KL.")] = 0.5
    weight: Annotated[str | None, _name_or_none] = None
    clamp: Annotated[LogClamp, log_clamp] = None
    weight_max: Positive | None = None
    rest: Rest = "entry"
    top: Top | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k > 0
        if (self.top is None) != (self.k is None) or not (self.k is None or counts):
            raise SpecError(
                f"Divergence has top={self.top!r} and k={description(self.k)}; give both, k as a "
                "positive number of entries, or neither."
            )
        if self.rest == "renormalise" and self.k == 1 and self.top != "union":
            raise SpecError(f"Divergence has top={self.top!r}, k=1 and {ONE_ENTRY}")
        if self.weight_max is not None and self.weight is None:
            raise SpecError(
                f"Divergence.weight_max={self.weight_max!r} bounds a weight, and there is none."
            )

    @property
    def measure(self) -> Measure:
        """The settings of the divergence to compute: kind, beta, rest, top and k."""
        return Measure(self.kind, self.beta, self.rest, self.top, self.k)

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The names of the fields that have no effect with this kind and rest."""
        kind = KINDS[self.kind]
        beta = () if kind.reads_beta else ("beta",)
        return beta if kind.takes_tail or self.rest == "renormalise" else (*beta, "rest")

    @property
    def reads_ratio(self) -> bool:
        """Whether the divergence is multiplied by the spec's ratio."""
        return self.weight == "ratio"

    def __call__(self, t: Tokens) -> Tensor:
        """The divergence of each token before `coef`, token-shaped."""
        value = bound(t.divergence, self.clamp)
        if self.weight is None:
            return value
        weight = t.ratio.detach() if self.reads_ratio else t.extra(self.weight)
        return value * bound(weight, (None, self.weight_max))

    def sentence(self) -> str:
        """The term in words, for `explain`."""
        of = KINDS[self.kind].words.format(beta=self.beta)
        limit = self.clamp
        low, high = (-limit, limit) if isinstance(limit, (int, float)) else limit or (None, None)
        clamp = " and ".join(bounds_in_words(low, high)).removeprefix("at ")
        limited = f", held at {clamp}" if clamp else ""
        weight = "the ratio" if self.reads_ratio else self.weight
        most = "" if self.weight_max is None else f", at most {spoken(self.weight_max)}"
        by = "" if weight is None else f", times {weight}{most}, without its gradient"
        over = self._entries_in_words()
        each = f"{of} of each token's distribution{over}"
        return f"plus {spoken(self.coef)} times {each}{limited}{by}"

    def _entries_in_words(self) -> str:
        if self.top is None:
            return ""
        both = {"union": "the student's or the teacher's", "intersection": "both models'"}
        whose = both.get(self.top, f"the {self.top}'s")
        rest = " and one for the rest" if self.measure.has_tail else ""
        rest = ", normalised over them" if self.rest == "renormalise" else rest
        return f" over {whose} {self.k} most probable entries{rest}"

    @property
    def traits(self) -> tuple[str, ...]:
        """Keywords for `explain`: the kind, its entries and its weight."""
        weight = "ratio" if self.reads_ratio else "extra"
        tail = () if self.rest != "drop" else ("divergence_no_tail",)
        top = () if self.top is None else (f"divergence_top_{self.top}",)
        by = () if self.weight is None else (f"divergence_weight_{weight}",)
        return "Divergence", f"divergence_{self.measure.computed_kind.name}", *tail, *top, *by


VARIANTS = (KL, Divergence)
