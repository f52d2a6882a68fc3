"""A pull to a teacher's whole distribution, in the `kl` slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor

from policyloss.arguments import description
from policyloss.errors import SpecError
from policyloss.functional.divergence import KINDS, KindName, Measure, Top
from policyloss.functional.masking import bound
from policyloss.functional.ratio import LogClamp
from policyloss.parts.validate import Part, Positive, log_clamp, within
from policyloss.parts.wording import bounds_in_words, spoken
from policyloss.tokens import Tokens


def _name_or_none(owner: Any, field: str) -> None:
    value = getattr(owner, field)
    if value is not None and (not isinstance(value, str) or not value):
        raise SpecError(
            f'Divergence.{field} must be None, "ratio" or the name of a tensor of extras, got '
            f"{description(value)}."
        )


def _true_or_false(owner: Any, field: str) -> None:
    value = getattr(owner, field)
    if not isinstance(value, bool):
        raise SpecError(f"Divergence.{field} must be True or False, got {description(value)}.")


@dataclass(frozen=True)
class Divergence(Part):
    """`coef · divergence` between the teacher's and the student's distributions, per token.

    kind: "forward" KL(teacher‖student), "reverse" KL(student‖teacher), "jsd" with the mixture m =
    (1−beta)·student + beta·teacher (beta 0 is the forward and 1 the reverse KL, as in GKD),
    "skew_forward" KL(teacher‖m) and "skew_reverse" KL(student‖m) (DistiLLM's λ is beta and 1−beta),
    "tv" ½Σ|p_s − p_t|, or "generalised", Σ p_s(log p_s − log p_t) − p_s + p_t, with p_s and p_t the
    student's and the teacher's probabilities; it is least at p_s = p_t on any set of entries.
    weight: None, "ratio" for the ratio slot's ratio, or the name of a tensor of `extras`; the
    weight, limited to `weight_max`, multiplies the divergence and carries no gradient. clamp: the
    divergence is held within ±clamp, or within a pair (low, high) with None for no bound; its
    gradient is 0 beyond the bounds.
    top: None compares every entry that the teacher provides; "student", "teacher", "union" or
    "intersection" compares the k most probable entries of the student, of the teacher, of either or
    of both. tail: True counts all other entries (outside the k, or outside a `TopK`) as one more
    entry; False leaves them out. The generalised kind never has a tail.

    The divergence comes from `linear_divergence` or `divergence` (`policy_loss(…, divergence=…)`),
    or from the head (`linear_policy_loss(…, teacher=…)`), which reads kind, beta, tail, top and k.
    """

    reach: ClassVar[str] = "token"
    teaches: ClassVar[bool] = True

    kind: KindName
    coef: Annotated[float, within(least=0, finite=True, hint="to leave it out, use kl=None.")]
    beta: Annotated[float, within(least=0, most=1, hint="0: forward KL, 1: reverse KL.")] = 0.5
    weight: Annotated[str | None, _name_or_none] = None
    clamp: Annotated[LogClamp, log_clamp] = None
    weight_max: Positive | None = None
    tail: Annotated[bool, _true_or_false] = True
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
        if self.weight_max is not None and self.weight is None:
            raise SpecError(
                f"Divergence.weight_max={self.weight_max!r} bounds a weight, and there is none."
            )

    @property
    def measure(self) -> Measure:
        """The divergence that the head computes."""
        return Measure(self.kind, self.beta, self.tail, self.top, self.k)

    @property
    def idle_fields(self) -> tuple[str, ...]:
        """The fields that have no effect."""
        kind = KINDS[self.kind]
        beta = () if kind.reads_beta else ("beta",)
        return beta if kind.takes_tail else (*beta, "tail")

    @property
    def reads_ratio(self) -> bool:
        """Whether the ratio weights the divergence."""
        return self.weight == "ratio"

    def __call__(self, t: Tokens) -> Tensor:
        """The divergence of each token before `coef`, token-shaped."""
        value = bound(t.divergence, self.clamp)
        if self.weight is None:
            return value
        weight = t.ratio.detach() if self.reads_ratio else t.extra(self.weight)
        return value * bound(weight, (None, self.weight_max))

    def sentence(self) -> str:
        """The added term in words."""
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
        return f" over {whose} {self.k} most probable entries{rest}"

    @property
    def traits(self) -> tuple[str, ...]:
        """The computed kind, its entries and its weight."""
        weight = "ratio" if self.reads_ratio else "extra"
        tail = () if self.measure.has_tail else ("divergence_no_tail",)
        top = () if self.top is None else (f"divergence_top_{self.top}",)
        by = () if self.weight is None else (f"divergence_weight_{weight}",)
        return "Divergence", f"divergence_{self.measure.computed_kind.name}", *tail, *top, *by
