"""A pull to a teacher's whole distribution, in the `kl` slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from policyloss.errors import SpecError
from policyloss.functional.divergence import KINDS, SUPPORTS, Measure
from policyloss.functional.masking import bound
from policyloss.functional.ratio import LogClamp
from policyloss.parts import validate
from policyloss.parts.wording import bounds_in_words, spoken
from policyloss.tokens import Tokens

_OF = {
    "forward": "KL(teacher, student)",
    "reverse": "KL(student, teacher)",
    "generalised": "the generalised KL(student, teacher)",
}


@dataclass(frozen=True)
class Divergence:
    """`coef · divergence of the teacher's and the student's distributions` per token.

    kind: "forward" KL(teacher‖student), "reverse" KL(student‖teacher), "jsd" with the mixture m =
    (1−beta)·student + beta·teacher (0 and 1 are the forward and the reverse KL, as in GKD), or
    "generalised", Σ p_s(log p_s − log p_t) − p_s + p_t, whose minimum is at equality on any
    support. weight: None, "ratio" for the ratio slot's ratio, or the name of a tensor of `extras`;
    it multiplies the divergence and is never differentiated. clamp: the divergence is held within
    ±this, or within a pair (low, high) with None for no bound; its gradient is 0 beyond.
    support: None compares every entry that the teacher knows; "student", "teacher", "union" or
    "intersection" compares the k most probable entries of the student, of the teacher, of either or
    of both. tail: the entries outside a support, or outside the ids of a `TopK`, count as one more
    entry; without it they are left out. The generalised kind never has a tail.

    The numbers come from `linear_divergence` or `divergence` (`policy_loss(…, divergence=…)`), or
    from the head (`linear_policy_loss(…, teacher=…)`), which reads kind, beta, support, k and tail.
    """

    reach: ClassVar[str] = "token"
    teaches: ClassVar[bool] = True

    kind: Literal["forward", "reverse", "jsd", "generalised"]
    coef: float
    beta: float = 0.5
    weight: str | None = None
    clamp: LogClamp = None
    tail: bool = True
    support: Literal["student", "teacher", "union", "intersection"] | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        validate.choice(self, "kind", KINDS)
        validate.number(
            self, "coef", least=0, finite=True, hint="to leave the pull out, use kl=None."
        )
        validate.number(self, "beta", least=0)
        if self.beta > 1:
            raise SpecError(
                f"Divergence.beta must be between 0 (forward KL) and 1 (reverse), got {self.beta}."
            )
        if self.weight is not None and (not isinstance(self.weight, str) or not self.weight):
            raise SpecError(
                'Divergence.weight must be None, "ratio" or the name of a tensor of extras, got '
                f"{self.weight!r}."
            )
        validate.log_clamp(self, "clamp")
        if not isinstance(self.tail, bool):
            raise SpecError(f"Divergence.tail must be True or False, got {self.tail!r}.")
        self._check_support()

    def _check_support(self) -> None:
        if self.support is not None:
            validate.choice(self, "support", SUPPORTS)
        counts = isinstance(self.k, int) and not isinstance(self.k, bool) and self.k > 0
        if (self.support is None) != (self.k is None) or not (self.k is None or counts):
            raise SpecError(
                f"Divergence has support={self.support!r} and k={self.k!r}; give both, k as a "
                "positive number of entries, or neither."
            )

    @property
    def measure(self) -> Measure:
        """What the head computes."""
        return Measure(self.kind, self.beta, self.tail, self.support, self.k)

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The fields that have no effect."""
        beta = () if self.kind == "jsd" else ("beta",)
        return (*beta, "tail") if self.kind == "generalised" else beta

    @property
    def reads_ratio(self) -> bool:
        """Whether the ratio weights the divergence."""
        return self.weight == "ratio"

    def __call__(self, t: Tokens) -> Tensor:
        """The divergence of each token before `coef`, token-shaped."""
        value = bound(t.divergence, self.clamp)
        if self.weight is None:
            return value
        return value * (t.ratio.detach() if self.reads_ratio else t.extra(self.weight))

    def sentence(self) -> str:
        """What it adds, in words."""
        of = _OF.get(self.kind, f"the JSD of student and teacher at beta {spoken(self.beta)}")
        over = "" if self.support is None else f" over {self._support_in_words()}"
        weight = "the ratio" if self.reads_ratio else self.weight
        by = "" if weight is None else f", times {weight}, which is not differentiated"
        limit = self.clamp
        low, high = (-limit, limit) if isinstance(limit, (int, float)) else limit or (None, None)
        clamp = " and ".join(bounds_in_words(low, high))
        held = f", held at {clamp.removeprefix('at ')}" if clamp else ""
        return f"plus {spoken(self.coef)} times {of} of each token's distribution{over}{held}{by}"

    def _support_in_words(self) -> str:
        whose = {
            "union": "the student's or the teacher's",
            "intersection": "both the student's and the teacher's",
        }.get(str(self.support), f"the {self.support}'s")
        tail = self.measure.has_tail
        return f"{whose} {self.k} most probable entries{' and one for the rest' if tail else ''}"

    @property
    def traits(self) -> tuple[str, ...]:
        weight = "ratio" if self.reads_ratio else "extra"
        tail = () if self.measure.has_tail else ("divergence_no_tail",)
        support = () if self.support is None else (f"divergence_support_{self.support}",)
        by = () if self.weight is None else (f"divergence_weight_{weight}",)
        return "Divergence", f"divergence_{self.measure.form}", *tail, *support, *by
