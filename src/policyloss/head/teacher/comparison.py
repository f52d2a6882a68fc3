"""The teacher of a call: its logits of any rows, and the student's divergence from the teacher.

Legend: N tokens, V vocabulary entries of this rank, K entries of a support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description
from policyloss.errors import InputError
from policyloss.functional.divergence import ONE_ENTRY, Measure, support_of
from policyloss.head import validate
from policyloss.head.head import Derivatives, Head, HeadRows, Index, operands
from policyloss.head.matmul import Room, product
from policyloss.head.softmax_rows import Scaling, Statistics, rescale, row_partials, row_statistics
from policyloss.head.teacher.rows import (
    Entries,
    PairRows,
    PairStatistics,
    pair_gradient,
    pair_statistics,
    support_gradient,
    values_at,
)
from policyloss.mixture import Mixture
from policyloss.spec import LossSpec
from policyloss.teacher import Teacher, TopK, refuse_counts


class Compared(NamedTuple):
    """Some rows compared with their teacher.

    numbers: the inputs of the backward, of complete rows or of a support. teacher: the teacher's
    logits of these rows, for complete rows. first: the vocabulary entry of the first column of
    logits.
    """

    measure: Measure
    numbers: PairStatistics | Entries
    teacher: PairRows | None = None
    first: int = 0

    def write_gradient(
        self, z: Tensor, out: Tensor, rows: HeadRows, s: Statistics, derivatives: Derivatives
    ) -> None:
        """Write the gradient of the logits z to `out`, as `HeadRows.write_gradient` does."""
        of_rows = (z, out, rows.ids, s, derivatives, rows.scaling)
        if isinstance(self.numbers, Entries):
            support_gradient(*of_rows, self.numbers, self.first)
        else:
            assert self.teacher is not None
            pair_gradient(*of_rows, self.teacher, self.numbers, self.measure)


@dataclass(frozen=True)
class Comparison:
    """The teacher that a student's head is compared with, in one of the three forms below.

    head: the teacher's head. logits: the teacher's logits `[N, V]`. known: entries `[N, K]` and the
    teacher's log-probabilities of these entries. size: the size of the student's vocabulary, over
    all ranks. width: the width of the student's hidden states.
    """

    measure: Measure
    size: int
    width: int
    head: Head | None = None
    logits: Tensor | None = None
    known: TopK | None = None

    @property
    def matmul(self) -> float:
        """The cost of the teacher's logits, in matmuls of the student's size."""
        if self.head is None:
            return 0.0
        return self.head.hidden.shape[1] / self.width

    def room(self, rows: int, columns: int | None = None) -> Room | None:
        """Memory for the teacher's logits of `rows` rows; None if no logits are computed."""
        return None if self.head is None else self.head.room(rows, columns)

    def teacher_rows(
        self, at: Index, room: Room | None, columns: slice | None = None
    ) -> PairRows | None:
        """The teacher's logits of the rows at `at`, of all entries or some."""
        if self.head is None:
            if self.logits is None:
                return None
            u = self.logits[at]
            return PairRows(u if columns is None else u[:, columns], Scaling())
        assert room is not None
        rows = self.head.rows(at)
        weight = self.head.weight if columns is None else self.head.weight[columns]
        u = room.logits(rows.hidden.shape[0], weight.shape[0])
        product(rows.hidden, weight.t(), u)
        return PairRows(u, rows.scaling if columns is None else rows.scaling.of_columns(columns))

    def compare_rows(
        self, head: Head, rows: HeadRows, at: Index, z: Tensor, room: Room | None, entropy: bool
    ) -> tuple[Statistics, Compared]:
        """The student's statistics and the divergence of the rows at `at`. z: their logits."""
        vocabulary, here = head.vocabulary, (rows.ids, z.shape[1])
        teacher = self.teacher_rows(at, room)
        if teacher is not None and self.measure.top is None:
            s, pair = pair_statistics(
                z, rows.ids, rows.scaling, teacher, self.measure, vocabulary, entropy
            )
            return s, Compared(self.measure, pair, teacher, vocabulary.first)
        partials = row_partials(z, rows.ids, rows.scaling, entropy)
        s = row_statistics(vocabulary.merge(partials, *here))
        if teacher is None:
            ids, keep, of_teacher = self._known_entries(head, rows, at, z)
        else:
            partials = row_partials(teacher.u, rows.ids, teacher.scaling, False)
            lse = row_statistics(vocabulary.merge(partials, *here)).lse
            both = (rescale(z, rows.scaling), rescale(*teacher))
            k = min(self.measure.k or 0, vocabulary.size)
            ids, keep = support_of(*both, str(self.measure.top), k, vocabulary.top)
            values = values_at(teacher.u, ids, teacher.scaling, vocabulary)
            of_teacher = values - lse.unsqueeze(-1)
        student = values_at(z, ids, rows.scaling, vocabulary) - s.lse.unsqueeze(-1)
        entries = Entries.of(ids, keep, student, of_teacher, self.measure)
        return s, Compared(self.measure, entries, None, vocabulary.first)

    def counts(self, valid: Tensor | None) -> Tensor | None:
        """Count the invalid values, on the device; None without values to check. valid: flat."""
        if self.known is not None:
            return self.known.counts(self.size, valid)
        rate = None if self.head is None else self.head.inverse_temperature
        return (
            validate.unusable_temperatures(rate, valid).sum() if isinstance(rate, Tensor) else None
        )

    def refuse(self, counts: Any) -> None:
        """Raise if `counts`, read back, show a teacher that cannot be used."""
        if self.known is not None:
            refuse_counts(counts, self.size)
        elif counts:
            raise InputError(
                f"teacher.temperature is not a positive number at {counts} token(s) of the mask."
            )

    def _known_entries(
        self, head: Head, rows: HeadRows, at: Index, z: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The entries of a `TopK`, which of them count, and the teacher's log-probabilities."""
        assert self.known is not None
        ids, logp = self.known.ids[at], self.known.logp[at]
        keep = ids >= 0
        k = self.measure.k
        if self.measure.top == "teacher" and k is not None and k < ids.shape[-1]:
            least = torch.where(keep, logp, -torch.inf).topk(k, -1).indices
            keep &= torch.zeros_like(keep).scatter_(-1, least, True)
        if self.measure.top == "intersection" and k is not None:
            vocabulary = head.vocabulary
            top = vocabulary.top(rescale(z, rows.scaling), min(k, vocabulary.size)).sort(-1).values
            place = torch.searchsorted(top, ids.contiguous()).clamp(max=top.shape[-1] - 1)
            keep &= top.gather(-1, place) == ids
        return ids, keep, logp


def compute_rows(
    head: Head,
    comparison: Comparison | None,
    at: Index,
    room: Room,
    teacher_room: Room | None,
    entropy: bool,
) -> tuple[HeadRows, Tensor, Statistics]:
    """The rows at `at` with their teacher's numbers, their logits in `room`, and their statistics.

    teacher_room: memory for the teacher's logits.
    """
    rows = head.rows(at)
    if comparison is None:
        return rows, *head.forward(rows, room, entropy)
    z = head.logits(rows, room)
    s, compared = comparison.compare_rows(head, rows, at, z, teacher_room, entropy)
    return rows._replace(compared=compared), z, s


def start_checks(
    head: Head, comparison: Comparison | None, valid: Tensor | None
) -> Callable[[], None]:
    """Start to count the invalid values; the returned function waits for the counts, and raises.

    Call this after queueing work, to hide the wait.
    """
    stray = validate.read_later(validate.value_summary(head, valid))
    counts = None if comparison is None else comparison.counts(valid)
    wrong = None if counts is None else validate.read_later(counts)

    def finish() -> None:
        validate.refuse_values(stray(), head, valid)
        if comparison is not None and wrong is not None:
            comparison.refuse(wrong())

    return finish


def comparison_of(
    teacher: Any, measure: Measure, head: Head, tokens: tuple[int, ...]
) -> Comparison:
    """The teacher of a call, checked but for the values of a `TopK`.

    head: the student's. tokens: the shape of the student's tokens.
    """
    if head.tiles is not None:
        raise InputError(
            "exact() does not cover a teacher: the comparison of two distributions has no fixed "
            "order of sums. Leave the mode for this call."
        )
    if head.terms is not None:
        raise InputError(
            "index and teacher were passed together, but a teacher has one row per token; leave "
            "out one of them."
        )
    entries = head.weight.shape[0]
    if isinstance(teacher, TopK):
        return _of_top_k(teacher, measure, head, tokens)
    if measure.top is None:
        measure = measure.of_complete_rows
    of_student = (measure, head.vocabulary.size, head.hidden.shape[1])
    if isinstance(teacher, Tensor):
        check_tensor("teacher", teacher, "float", like=("hidden", head.hidden))
        _check_tokens("teacher", teacher, tokens, "V")
        _check_entries("teacher", teacher.shape[-1], entries, "teacher[..., :{n}]")
        return Comparison(*of_student, logits=teacher.detach().reshape(-1, entries))
    if not isinstance(teacher, Teacher):
        raise InputError(
            "teacher must be a Teacher (hidden states and weight), a TopK (ids and logp) or a "
            f"tensor of logits, got {description(teacher)}."
        )
    return Comparison(*of_student, head=_teacher_head(teacher, head, tokens))


def _teacher_head(teacher: Teacher, head: Head, tokens: tuple[int, ...]) -> Head:
    validate.check_matrices(teacher.hidden, teacher.weight, teacher.bias, "teacher.")
    check_tensor("teacher.hidden", teacher.hidden, like=("hidden", head.hidden))
    _check_tokens("teacher.hidden", teacher.hidden, tokens, "D")
    _check_entries(
        "teacher.weight", teacher.weight.shape[0], head.weight.shape[0], "teacher.prefix({n})"
    )
    validate.check_softcap(teacher.softcap)
    x, w, b = operands(teacher.hidden, teacher.weight, teacher.bias)
    rate = validate.inverse_temperature(teacher.temperature, tokens, x)
    return replace(
        head, hidden=x, weight=w, bias=b, inverse_temperature=rate, softcap=teacher.softcap
    )


def _of_top_k(teacher: TopK, measure: Measure, head: Head, tokens: tuple[int, ...]) -> Comparison:
    check_tensor("teacher.logp", teacher.logp, "float", like=("hidden", head.hidden))
    _check_tokens("teacher.ids", teacher.ids, tokens, "K")
    if measure.top in ("student", "union"):
        raise InputError(
            f"top={measure.top!r} needs the teacher's probability of entries that a TopK may not "
            "hold; pass a TopK of the entries that you mean with top=None, or a Teacher."
        )
    k = teacher.ids.shape[-1]
    if k == 1 and measure.rest == "renormalise":
        raise InputError(f"teacher is a TopK of one entry per token, with {ONE_ENTRY}")
    ids = teacher.ids.reshape(-1, k).to(torch.int64)
    logp = teacher.logp.detach().reshape(-1, k)
    of_student = (measure, head.vocabulary.size, head.hidden.shape[1])
    return Comparison(*of_student, known=TopK(ids, logp))


def _check_tokens(name: str, x: Tensor, tokens: tuple[int, ...], last: str) -> None:
    if tuple(x.shape[:-1]) != tokens or x.dim() < 2:
        raise InputError(
            f"{name} has shape {tuple(x.shape)}; give one row per token of the student, "
            f"({', '.join(map(str, tokens))}, {last})."
        )


def _check_entries(name: str, theirs: int, ours: int, cut: str) -> None:
    if theirs == ours:
        return
    n = min(theirs, ours)
    how = cut.format(n=n) if theirs > ours else f"weight[:{n}] and bias[:{n}] of the student"
    raise InputError(
        f"{name} has {theirs} vocabulary entries and the student's weight {ours}. If their first "
        f"{n} entries are the same tokens, compare those: pass {how}."
    )


def comparison_of_spec(
    spec: LossSpec | Mixture, teacher: Any, head: Head, tokens: tuple[int, ...]
) -> Comparison | None:
    """The teacher that the spec's divergence compares with; None without a divergence."""
    part = spec.divergence
    if part is None and teacher is not None:
        raise InputError(
            "teacher was passed, but nothing in the spec compares with it; put a Divergence into "
            "its kl slot, or leave teacher out."
        )
    if part is None:
        return None
    if teacher is None:
        raise InputError(
            "this loss has a Divergence, which compares with a teacher; pass teacher= (a Teacher, "
            "a TopK or logits)."
        )
    if head.support is not None:
        raise InputError(
            "linear_policy_loss got a teacher and a support, but the teacher's distribution is "
            "over the whole vocabulary; leave out one of them."
        )
    return comparison_of(teacher, part.measure, head, tokens)
