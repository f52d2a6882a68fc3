"""Divergences between a teacher's distribution and a student's, and their gradients.

Legend: `student`, `teacher`: log-probabilities `[..., V]` of every entry of the vocabulary, or
`[..., K]` of the entries of a support; p_s, p_t their exponentials; m = (1−β)·p_s + β·p_t. An entry
of −inf has probability 0. For one row, before the sum,

    forward      p_t·(log p_t − log p_s)                        KL(teacher‖student)
    reverse      p_s·(log p_s − log p_t)                        KL(student‖teacher)
    jsd          β·p_t·(log p_t − log m) + (1−β)·p_s·(log p_s − log m)         arXiv 2306.13649
    generalised  p_s·(log p_s − log p_t) − p_s + p_t            arXiv 2606.30406, equation 5

The limits of the JSD are defined as in GKD: β = 0 is the forward KL and β = 1 the reverse KL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

KINDS = ("forward", "reverse", "jsd", "generalised")
TOPS = ("student", "teacher", "union", "intersection")


class Measure(NamedTuple):
    """Which divergence is taken. kind, beta: as above; beta is the teacher's share of m.

    top: None for every entry that the teacher knows; otherwise the `k` most probable entries of
    the student, of the teacher, of either ("union") or of both ("intersection"). tail: whether the
    entries outside a support count as one more entry; the generalised form never has it.
    """

    kind: str
    beta: float = 0.5
    tail: bool = True
    top: str | None = None
    k: int | None = None

    @property
    def form(self) -> str:
        """The kind whose formula is computed: at its limits a JSD is one of the two KLs."""
        if self.kind == "jsd" and self.beta in (0, 1):
            return "reverse" if self.beta else "forward"
        return self.kind

    @property
    def has_tail(self) -> bool:
        """Whether a support is completed by the bucket of the other entries."""
        return self.tail and self.kind != "generalised"


def terms(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """What each entry adds to the divergence. `[..., V]`, `[..., V]` → `[..., V]`."""
    p_s, p_t, gap = student.exp(), teacher.exp(), _gap(student, teacher)
    if measure.form == "forward":
        return _times(p_t, gap)
    if measure.form == "jsd":
        beta, (to_student, to_teacher) = measure.beta, _to_mixture(gap, measure.beta)
        return -beta * _times(p_t, to_teacher) - (1 - beta) * _times(p_s, to_student)
    reverse = -_times(p_s, gap)
    return reverse if measure.form == "reverse" else reverse - p_s + p_t


def slopes(student: Tensor, teacher: Tensor, measure: Measure) -> Tensor:
    """The derivative of the divergence by each of the student's log-probabilities, up to c·p_s.

    A multiple of p_s has no effect where the probabilities of all entries sum to 1, and leaving it
    out keeps the digits of the rest: forward −p_t, reverse and generalised p_s·(log p_s − log p_t),
    jsd (1−β)·p_s·(log p_s − log m). `[..., V]`, `[..., V]` → `[..., V]`.
    """
    if measure.form == "forward":
        return -teacher.exp()
    gap = _gap(student, teacher)
    if measure.form == "jsd":
        return -(1 - measure.beta) * _times(student.exp(), _to_mixture(gap, measure.beta)[0])
    return -_times(student.exp(), gap)


def on_support(
    student: Tensor, teacher: Tensor, measure: Measure, keep: Tensor | None = None
) -> Tensor:
    """The divergence over the entries of a support. `[..., K]`, `[..., K]` → `[...]`.

    keep: which entries belong to the support, all if None. With a tail, the entries outside it
    count as one entry of probability 1 − Σ p, at least the rounding error of 1.
    """
    student, teacher = (_kept(x, keep) for x in (student, teacher))
    if measure.has_tail:
        student, teacher = (torch.cat([x, _log_rest(x)], -1) for x in (student, teacher))
    return terms(student, teacher, measure).sum(-1)


def support_slopes(
    student: Tensor, teacher: Tensor, measure: Measure, keep: Tensor | None = None
) -> Tensor:
    """The derivative of `on_support` by the student's log-probabilities. → `[..., K]`."""
    student, teacher = (_kept(x, keep) for x in (student, teacher))
    p = student.exp()
    if not measure.has_tail:
        each = slopes(student, teacher, measure)
        return each + p if measure.form == "reverse" else each
    rest = 1 - p.sum(-1, keepdim=True)
    student, teacher = (torch.cat([x, _log_rest(x)], -1) for x in (student, teacher))
    each = slopes(student, teacher, measure)
    # The tail's log-probability falls as those of the support rise:
    # d log(1 − Σp) = −Σ p·dlog p / (1 − Σp). Below the rounding error of 1 it is held, and flat.
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

    student, teacher: log-probabilities, or numbers that rise with them. which: whose k most
    probable entries, one of `TOPS`. K is k, or 2·k for both.
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
    """`log m − log p_s` and `log m − log p_t`, both exactly 0 where the two are equal."""
    higher = gap > 0
    above = (1 - beta) * torch.expm1(-gap.clamp(min=0))
    nearer = torch.log1p(torch.where(higher, above, beta * torch.expm1(gap.clamp(max=0))))
    return nearer + torch.where(higher, gap, 0), nearer - torch.where(higher, 0, gap)


def _kept(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else torch.where(keep, x, -torch.inf)


def _least(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps


def _log_rest(x: Tensor) -> Tensor:
    """The log-probability of everything outside a support. `[..., K]` → `[..., 1]`."""
    return (1 - x.exp().sum(-1, keepdim=True)).clamp(min=_least(x)).log()
