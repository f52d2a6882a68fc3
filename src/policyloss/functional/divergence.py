"""Divergences between a teacher's distribution and a student's, and their gradients.

Legend: `student`, `teacher`: log-probabilities `[..., V]` of every entry of the vocabulary, or
`[..., K]` of the entries of a support; p_s, p_t their exponentials; m = (1−β)·p_s + β·p_t. An entry
of −inf has probability 0. For one row, before the sum,

    forward      p_t·(log p_t − log p_s)                        KL(teacher‖student)
    reverse      p_s·(log p_s − log p_t)                        KL(student‖teacher)
    jsd          β·p_t·(log p_t − log m) + (1−β)·p_s·(log p_s − log m)         arXiv 2306.13649
    generalised  p_s·(log p_s − log p_t) − p_s + p_t            arXiv 2606.30406, equation 5
    skew_forward p_t·(log p_t − log m)                          KL(teacher‖m), arXiv 2402.03898
    skew_reverse p_s·(log p_s − log m)                          KL(student‖m), arXiv 2402.03898
    tv           ½·|p_s − p_t|                                  total variation

The limits of the JSD are defined as in GKD: β = 0 is the forward KL and β = 1 the reverse KL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

KindName = Literal["forward", "reverse", "jsd", "generalised", "skew_forward", "skew_reverse", "tv"]
Top = Literal["student", "teacher", "union", "intersection"]
Rest = Literal["entry", "drop", "renormalise"]
TOPS = get_args(Top)
ONE_ENTRY = (
    'rest="renormalise": over one entry both probabilities are 1, so this divergence is '
    "identically zero; compare two entries or more."
)


class Kind(NamedTuple):
    """One kind of divergence. terms, slopes: its formulas, of `student`, `teacher` and β.

    total: Σ slopes of a complete row, from its divergence and the sum of its computed slopes.
    words: its name in a sentence. reads_beta: whether it compares with the mixture m. limits: the
    kinds that it equals at β = 0 and 1; "" for none. weighted_by_teacher: whether p_t weights the
    log-ratios, not p_s. omits: the multiple of p_s that the slopes leave out, of β. takes_tail:
    whether a support may have a tail. complete: the kind that it equals on complete rows, where
    both p_s and p_t sum to 1; "" if it is that kind itself. code: FORM of the kernels, which read
    complete rows only; -1 if they do not compute it.
    """

    name: KindName
    words: str
    terms: Callable[[Tensor, Tensor, float], Tensor]
    slopes: Callable[[Tensor, Tensor, float], Tensor]
    total: Callable[[Tensor, Tensor], Tensor]
    code: int = -1
    reads_beta: bool = False
    limits: tuple[KindName | Literal[""], KindName | Literal[""]] = ("", "")
    weighted_by_teacher: bool = False
    omits: Callable[[float], float] = lambda beta: 0.0
    takes_tail: bool = True
    complete: KindName | Literal[""] = ""


class Measure(NamedTuple):
    """The divergence to compute. kind: one of `KINDS`; beta: the teacher's share of the mixture m.

    top: None for every entry that the teacher provides; otherwise the `k` most probable entries of
    the "student", of the "teacher", of either ("union") or of both ("intersection"). rest: the
    entries outside a support count as one more "entry"; or they do not count ("drop"), and with
    "renormalise" the probabilities on the support are divided by their sum. The generalised kind
    takes "drop" for "entry".
    """

    kind: str
    beta: float = 0.5
    rest: str = "entry"
    top: str | None = None
    k: int | None = None

    @property
    def computed_kind(self) -> Kind:
        """The kind that is computed: at its limits a mixture's kind is one of the two KLs."""
        limit = KINDS[self.kind].limits[int(self.beta)] if self.beta in (0, 1) else ""
        return KINDS[limit or self.kind]

    @property
    def has_tail(self) -> bool:
        """Whether all entries outside a support count as one more entry."""
        return self.rest == "entry" and KINDS[self.kind].takes_tail

    @property
    def of_complete_rows(self) -> Measure:
        """The same divergence of rows that hold every entry, by the simplest kind that gives it."""
        return self._replace(kind=KINDS[self.kind].complete or self.kind)


def terms(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """The term of each entry in the divergence. `[..., V]`, `[..., V]` → `[..., V]`."""
    return measure.computed_kind.terms(student, teacher, measure.beta)


def slopes(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """The derivative of the divergence by each of the student's log-probabilities, up to c·p_s.

    A multiple of p_s has no effect where the probabilities of all entries sum to 1, and leaving it
    out keeps the digits of the rest: forward −p_t, reverse and generalised p_s·(log p_s − log p_t),
    jsd (1−β)·p_s·(log p_s − log m), skew_forward (1−β)·p_s·(1 − p_t/m), skew_reverse
    p_s·(log p_s − log m) + (1−β)·p_s·(1 − p_s/m), tv ½·p_s·sign(p_s − p_t). `[..., V]`,
    `[..., V]` → `[..., V]`.
    """
    return measure.computed_kind.slopes(student, teacher, measure.beta)


def on_support(
    student: Tensor, teacher: Tensor, measure: Measure, keep: Tensor | None = None
) -> Tensor:
    """The divergence over the entries of a support. `[..., K]`, `[..., K]` → `[...]`.

    keep: which entries belong to the support; None for all. With a tail, the entries outside the
    support count as one entry of probability 1 − Σ p, at least the rounding error of 1.
    """
    student, teacher = (_kept_entries(x, measure, keep) for x in (student, teacher))
    if measure.has_tail:
        student, teacher = (torch.cat([x, _log_rest(x)], -1) for x in (student, teacher))
    return terms(student, teacher, measure).sum(-1)


def support_slopes(
    student: Tensor, teacher: Tensor, measure: Measure, keep: Tensor | None = None
) -> Tensor:
    """The derivative of `on_support` by the student's log-probabilities. → `[..., K]`."""
    student, teacher = (_kept_entries(x, measure, keep) for x in (student, teacher))
    p = student.exp()
    if not measure.has_tail:
        each = slopes(student, teacher, measure)
        if measure.rest == "renormalise":
            return each - p * each.sum(-1, keepdim=True)
        omitted = measure.computed_kind.omits(measure.beta)
        return each + omitted * p if omitted else each
    rest = 1 - p.sum(-1, keepdim=True)
    student, teacher = (torch.cat([x, _log_rest(x)], -1) for x in (student, teacher))
    each = slopes(student, teacher, measure)
    # The tail's log-probability falls as the others rise:
    # d log(1 − Σp) = −Σ p·dlog p / (1 − Σp). Below the rounding error of 1 it is constant.
    through_tail = torch.where(rest > _least(p), each[..., -1:] / rest.clamp(min=_least(p)), 0)
    return each[..., :-1] - p * through_tail


def largest(x: Tensor, k: int) -> Tensor:
    """The ids of the k largest entries. `[..., V]` → `[..., k]`."""
    return x.topk(k, -1).indices


def support_of(
    student: Tensor,
    teacher: Tensor,
    which: str,
    k: int,
    largest: Callable[[Tensor, int], Tensor] = largest,
) -> tuple[Tensor, Tensor]:
    """The entries of a support, and which of them count. `[..., V]`, `[..., V]` → `[..., K]` twice.

    student, teacher: log-probabilities, or numbers that rise with them. which: one of `TOPS`, the
    models that choose their k most probable entries. K is k, or 2·k for both models.
    """
    of_each = {"student": student, "teacher": teacher}
    if which in of_each:
        ids = largest(of_each[which], k)
        return ids, torch.ones_like(ids, dtype=torch.bool)
    ids = torch.cat([largest(x, k) for x in of_each.values()], -1).sort(-1).values
    twice = torch.nn.functional.pad(ids[..., 1:] == ids[..., :-1], (1, 0))
    return ids, twice if which == "intersection" else ~twice


def _gap(student: Tensor, teacher: Tensor) -> Tensor:
    """`log p_t − log p_s`; 0 where both probabilities are 0."""
    neither = (student == -torch.inf) & (teacher == -torch.inf)
    return torch.where(neither, 0, teacher - student)


def _times(p: Tensor, x: Tensor) -> Tensor:
    """`p·x`, 0 where p is 0, whatever x is."""
    return p * torch.where(p > 0, x, 0)


def _to_mixture(gap: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """`log m − log p_s` and `log m − log p_t`; both are exactly 0 where p_s equals p_t."""
    higher = gap > 0
    above = (1 - beta) * torch.expm1(-gap.clamp(min=0))
    nearer = torch.log1p(torch.where(higher, above, beta * torch.expm1(gap.clamp(max=0))))
    return nearer + torch.where(higher, gap, 0), nearer - torch.where(higher, 0, gap)


def _kept_entries(x: Tensor, measure: Measure, keep: Tensor | None) -> Tensor:
    """The log-probabilities on the support, −inf elsewhere, perhaps normalised over it."""
    x = x if keep is None else torch.where(keep, x, -torch.inf)
    if measure.rest != "renormalise":
        return x
    total = x.logsumexp(-1, keepdim=True)
    return x - torch.where(total == -torch.inf, 0, total)  # a support may be empty


def _least(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _log_rest(x: Tensor) -> Tensor:
    """The log-probability of everything outside a support. `[..., K]` → `[..., 1]`."""
    return (1 - x.exp().sum(-1, keepdim=True)).clamp(min=_least(x)).log()


def _reverse_terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return -_times(student.exp(), _gap(student, teacher))


def _jsd_terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    to_student, to_teacher = _to_mixture(_gap(student, teacher), beta)
    return -beta * _times(teacher.exp(), to_teacher) - (1 - beta) * _times(
        student.exp(), to_student
    )


def _skew_forward_slopes(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    to_teacher = _to_mixture(_gap(student, teacher), beta)[1]
    return -(1 - beta) * _times(student.exp(), torch.expm1(-to_teacher))


def _skew_reverse_terms(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    return -_times(student.exp(), _to_mixture(_gap(student, teacher), beta)[0])


def _skew_reverse_slopes(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    to_student = _to_mixture(_gap(student, teacher), beta)[0]
    return -_times(student.exp(), to_student + (1 - beta) * torch.expm1(-to_student))


def _tv_slopes(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    p = student.exp()
    return p * (p - teacher.exp()).sign() / 2


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "forward",
            "KL(teacher, student)",
            terms=lambda student, teacher, beta: _times(teacher.exp(), _gap(student, teacher)),
            slopes=lambda student, teacher, beta: -teacher.exp(),
            total=lambda divergence, summed: torch.full_like(divergence, -1),
            code=0,
            weighted_by_teacher=True,
        ),
        Kind(
            "reverse",
            "KL(student, teacher)",
            terms=_reverse_terms,
            slopes=_reverse_terms,
            total=lambda divergence, summed: divergence,
            code=1,
            omits=lambda beta: 1.0,
        ),
        Kind(
            "jsd",
            "the JSD of student and teacher at beta {beta:.10g}",
            terms=_jsd_terms,
            slopes=lambda *of_row: (1 - of_row[2]) * _skew_reverse_terms(*of_row),
            total=lambda divergence, summed: summed,
            code=2,
            reads_beta=True,
            limits=("forward", "reverse"),
        ),
        Kind(
            "generalised",
            "the generalised KL(student, teacher)",
            terms=lambda student, teacher, beta: (
                _reverse_terms(student, teacher, beta) - student.exp() + teacher.exp()
            ),
            slopes=_reverse_terms,
            total=lambda divergence, summed: divergence,
            takes_tail=False,
            complete="reverse",
        ),
        Kind(
            "skew_forward",
            "KL(teacher, mixture with {beta:.10g} of the teacher)",
            terms=lambda student, teacher, beta: (
                -_times(teacher.exp(), _to_mixture(_gap(student, teacher), beta)[1])
            ),
            slopes=_skew_forward_slopes,
            total=lambda divergence, summed: summed,
            reads_beta=True,
            limits=("forward", ""),
            omits=lambda beta: beta - 1,
        ),
        Kind(
            "skew_reverse",
            "KL(student, mixture with {beta:.10g} of the teacher)",
            terms=_skew_reverse_terms,
            slopes=_skew_reverse_slopes,
            total=lambda divergence, summed: summed,
            reads_beta=True,
            limits=("", "reverse"),
            omits=lambda beta: beta,
        ),
        Kind(
            "tv",
            "the total variation of student and teacher",
            terms=lambda student, teacher, beta: (student.exp() - teacher.exp()).abs() / 2,
            slopes=_tv_slopes,
            total=lambda divergence, summed: summed,
        ),
    )
}
