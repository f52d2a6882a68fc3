"""Rows of two distributions, a student's and a teacher's: their divergence and its gradient.

Legend: R rows, V vocabulary entries (of this rank's shard), z the student's raw logits `[R, V]`, u
the teacher's. For one row, with ls and lt the log-probabilities of both,

    divergence = Σ terms(ls, lt)               total = Σ slopes(ls, lt), −1 of the forward KL
    dz = [policy's gradient + ddivergence·(slopes(ls, lt) − p_s·total)] · d(scaled z)/dz

`terms` and `slopes` are in `functional.divergence`; on complete rows the generalised kind is
computed as the reverse KL. The functions here are plain PyTorch and the reference; on a GPU the
Triton kernels of `kernels` replace them on complete rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from policyloss.functional.divergence import Measure, on_support, slopes, support_slopes, terms
from policyloss.head.softmax_rows import (
    Scaling,
    Statistics,
    blocks,
    kernels_for,
    policy_gradient,
    rescale,
    row_gradient,
    row_partials,
    row_statistics,
    target_gradient,
    through_scaling,
    without_silent_rows,
)
from policyloss.head.vocab_parallel import Vocabulary

KERNELS = "policyloss.head.teacher.kernels"


class PairStatistics(NamedTuple):
    """The inputs of the backward of complete rows, `[R]` each.

    lse: the log-sum-exp of the teacher's scaled logits. total: the sum of the slopes.
    """

    divergence: Tensor
    lse: Tensor
    total: Tensor


class PairRows(NamedTuple):
    """The teacher's logits of some rows, and their scaling."""

    u: Tensor
    scaling: Scaling


def pair_statistics(
    z: Tensor,
    ids: Tensor,
    scaling: Scaling,
    teacher: PairRows,
    measure: Measure,
    vocabulary: Vocabulary,
    entropy: bool,
) -> tuple[Statistics, PairStatistics]:
    """The student's statistics and its divergence from the teacher, over all shards; `[R]` each."""
    here = (ids, z.shape[1])
    kind = measure.computed_kind
    fused = kernels_for(z, scaling, KERNELS) if kind.code >= 0 else None
    if fused is not None:
        # Read both rows once for a KL, twice for a JSD: its mixture needs the normalisers.
        ours, theirs, cross = fused.pair_partials(z, ids, scaling, *teacher, kind, entropy)
        student, teacher_rows = (vocabulary.merge(p, *here) for p in (ours, theirs))
        s, lse = row_statistics(student), row_statistics(teacher_rows).lse
        if kind.reads_beta:
            of_student, of_teacher = vocabulary.sum_shares(
                fused.mixture_sums(z, s.lse, scaling, teacher.u, lse, teacher.scaling, measure.beta)
            )
            total = (1 - measure.beta) * of_student
            return s, PairStatistics(measure.beta * of_teacher + total, lse, total)
        weighing, merged = (theirs, teacher_rows) if kind.weighted_by_teacher else (ours, student)
        # Refer the sums of this shard to the maximum of all shards.
        distance = weighing.max - merged.max
        shrink = torch.where(weighing.max == merged.max, 1, distance.exp())
        cross = vocabulary.sum_shares(cross * shrink) / merged.sum
        # The mean of (log p_t − log p_s) up to the normalisers: their large parts cancel first.
        shift = (teacher_rows.max - student.max) + (teacher_rows.sum.log() - student.sum.log())
        divergence = cross - shift if kind.weighted_by_teacher else cross + shift
        return s, PairStatistics(divergence, lse, kind.total(divergence, divergence))
    s = row_statistics(vocabulary.merge(row_partials(z, ids, scaling, entropy), *here))
    partials = row_partials(teacher.u, ids, teacher.scaling, False)
    lse = row_statistics(vocabulary.merge(partials, *here)).lse
    sums = []
    for b in blocks(z):
        ls, lt = _log_probabilities(z[b], s.lse[b], scaling.of_rows(b), teacher, lse[b], b)
        each = torch.stack([terms(ls, lt, measure).sum(-1), slopes(ls, lt, measure).sum(-1)])
        sums.append(each)
    divergence, total = vocabulary.sum_shares(torch.cat(sums, -1))
    return s, PairStatistics(divergence, lse, kind.total(divergence, total))


def pair_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    derivatives: Sequence[Tensor | None],
    scaling: Scaling,
    teacher: PairRows,
    pair: PairStatistics,
    measure: Measure,
) -> None:
    """Write dz into `out` `[R, V]`, which may lie over z as in `row_gradient`.

    derivatives: of the loss by each row's logp, entropy and divergence, `[R]`.
    """
    dlogp, dentropy, ddivergence = _complete(derivatives)
    spread = s.spread(dentropy)
    target = target_gradient(s.logp, dlogp, spread)
    fused = kernels_for(z, scaling, KERNELS) if measure.computed_kind.code >= 0 else None
    if fused is not None:
        fused.pair_gradient(
            z, out, ids, s, dlogp, spread, target, scaling, *teacher, pair, ddivergence, measure
        )
        return
    for b in blocks(z):
        ls, lt = _log_probabilities(z[b], s.lse[b], scaling.of_rows(b), teacher, pair.lse[b], b)
        d = slopes(ls, lt, measure) - ls.exp() * pair.total[b].unsqueeze(-1)
        d = d.mul_(ddivergence[b].unsqueeze(-1))
        silent = (dlogp[b] == 0) & (ddivergence[b] == 0)
        here = None
        if spread is not None:
            here, silent = (spread[0][b], spread[1][b]), silent & (spread[1][b] == 0)
        d += policy_gradient(ls, ids[b], dlogp[b], here, target[b])
        d = through_scaling(d, z[b], scaling.of_rows(b))
        out[b].copy_(without_silent_rows(d, silent))


def _complete(derivatives: Sequence[Tensor | None]) -> tuple[Tensor, Tensor | None, Tensor]:
    """The derivatives, with 0 for a missing derivative by logp."""
    dlogp, dentropy, ddivergence = derivatives
    assert ddivergence is not None
    return torch.zeros_like(ddivergence) if dlogp is None else dlogp, dentropy, ddivergence


def _log_probabilities(
    z: Tensor, lse: Tensor, scaling: Scaling, teacher: PairRows, teacher_lse: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of a block of rows, of the student and of the teacher."""
    u = rescale(teacher.u[rows], teacher.scaling.of_rows(rows)).to(lse.dtype)
    return rescale(z, scaling) - lse.unsqueeze(-1), u - teacher_lse.unsqueeze(-1)


class Entries(NamedTuple):
    """A support and the inputs of its backward. divergence: `[R]`; the others `[R, K]`.

    ids: of the entries, over all ranks. keep: which entries count. logp: the student's
    log-probabilities. slopes: the derivatives of the divergence by logp, 0 where keep is False.
    """

    divergence: Tensor
    ids: Tensor
    keep: Tensor
    logp: Tensor
    slopes: Tensor

    @classmethod
    def of(
        cls, ids: Tensor, keep: Tensor, student: Tensor, teacher: Tensor, measure: Measure
    ) -> Entries:
        """Compare the log-probabilities of student and teacher, `[R, K]` each."""
        teacher = teacher.to(student.dtype)
        slopes = support_slopes(student, teacher, measure, keep)
        return cls(on_support(student, teacher, measure, keep), ids, keep, student, slopes)


def values_at(z: Tensor, ids: Tensor, scaling: Scaling, vocabulary: Vocabulary) -> Tensor:
    """The scaled logits at global `ids` `[R, K]`, from whichever shard holds them. → `[R, K]`."""
    column = ids - vocabulary.first
    here = (column >= 0) & (column < z.shape[1])
    column = torch.where(here, column, 0)
    bias = None if scaling.bias is None else scaling.bias[column]
    values = rescale(z.gather(1, column), scaling._replace(bias=bias))
    return (
        values if vocabulary.group is None else vocabulary.sum_shares(torch.where(here, values, 0))
    )


def support_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    derivatives: Sequence[Tensor | None],
    scaling: Scaling,
    entries: Entries,
    first: int,
) -> None:
    """Write dz into `out` `[R, V]`, which may lie over z as in `row_gradient`.

    ids: `[R]`, counted from `first`, the first of these columns. derivatives: of the loss by each
    row's logp, entropy and divergence, `[R]`. The gradients at the id and at the entries come from
    their exact log-probabilities: a model is sure of most tokens, and 1 − p would round away.
    """
    dlogp, dentropy, ddivergence = _complete(derivatives)
    slopes = entries.slopes * ddivergence.unsqueeze(-1)
    total = dlogp + slopes.sum(-1)
    row_gradient(z, out, torch.full_like(ids, -1), s, total, dentropy, scaling)
    columns = torch.cat([entries.ids - first, ids.unsqueeze(-1)], -1)
    is_id = columns == ids.unsqueeze(-1)
    of_id = torch.where(is_id[:, :-1], slopes, 0).sum(-1) + dlogp
    direct = torch.where(is_id, of_id.unsqueeze(-1), torch.nn.functional.pad(slopes, (0, 1)))
    logp = torch.cat([entries.logp, s.logp.unsqueeze(-1)], -1)
    p = logp.exp()
    d = -direct * torch.expm1(logp) - p * (total.unsqueeze(-1) - direct)
    silent = (dlogp == 0) & (ddivergence == 0)
    if dentropy is not None and s.entropy is not None:
        d -= dentropy.unsqueeze(-1) * p * (logp.clamp(min=-1e4) + s.entropy.unsqueeze(-1))
        silent &= dentropy == 0
    d = d * _rate(logp + s.lse.unsqueeze(-1), scaling)
    active = torch.nn.functional.pad(entries.keep, (0, 1), value=True)
    active &= (columns >= 0) & (columns < z.shape[1])
    _write(out, columns, d.masked_fill(silent.unsqueeze(-1), 0).to(out.dtype), active)


def _rate(values: Tensor, scaling: Scaling) -> Tensor | float:
    """The derivative of scaled logits `[R, K]` by the raw ones."""
    t = scaling.inverse_temperature
    rate = t.to(values.dtype).unsqueeze(-1) if isinstance(t, Tensor) else t
    return rate if scaling.softcap is None else rate * (1 - (values / rate / scaling.softcap) ** 2)


def _write(out: Tensor, columns: Tensor, d: Tensor, active: Tensor) -> None:
    """`out[row, column] = d` where `active`, without reading back how many there are.

    The other entries repeat the first active one of their row; without one, `out` in column 0.
    """
    some = active.any(-1, keepdim=True)
    first = active.to(torch.uint8).argmax(-1, keepdim=True)
    column = torch.where(some, columns.gather(1, first), 0)
    value = torch.where(some, d.gather(1, first), out[:, :1])
    out.scatter_(1, torch.where(active, columns, column), torch.where(active, d, value))
