"""Rows of two distributions, a student's and a teacher's: their divergence, and the way back.

Legend: R rows, V vocabulary entries (of this rank's shard), z the student's raw logits `[R, V]`, u
the teacher's. For one row, with ls and lt the log-probabilities of both,

    divergence = Σ terms(ls, lt)               total = Σ slopes(ls, lt), −1 of the forward KL
    dz = [policy's gradient + ddivergence·(slopes(ls, lt) − p_s·total)] · d(scaled z)/dz

`terms` and `slopes` are those of `functional.divergence`; over whole rows the generalised kind is
the reverse KL, and only the latter is met here. The functions here are plain PyTorch and
the reference; on a GPU Triton kernels (`pair_kernels`, `pair_gradient_kernel`) take their place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.functional.divergence import Measure, slopes, terms
from policyloss.functional.triton_modules import kernels
from policyloss.head.softmax_rows import (
    Partials,
    Scaling,
    Statistics,
    blocks,
    finished,
    policy_gradient,
    row_partials,
    scaled,
    target_gradient,
    through_scaling,
    without_silent_rows,
)
from policyloss.head.vocab_parallel import Vocabulary


class PairStatistics(NamedTuple):
    """What the way back needs of whole rows, `[R]` each.

    lse: of the teacher's scaled logits. total: the sum of the slopes.
    """

    divergence: Tensor
    lse: Tensor
    total: Tensor


class PairRows(NamedTuple):
    """The teacher's logits of some rows, and what is done to them."""

    u: Tensor
    scaling: Scaling


def pair_statistics(
    z: Tensor,
    ids: Tensor,
    scaling: Scaling,
    teacher: PairRows,
    measure: Measure,
    vocabulary: Vocabulary,
    here: Tensor,
    entropy: bool,
) -> tuple[Statistics, PairStatistics]:
    """The student's statistics and the divergence from the teacher, over all shards. → `[R]` each.

    here: which ids this rank holds.
    """
    fused = kernels_for(z, "policyloss.head.pair_kernels")
    if fused is not None:
        return _fused_statistics(
            fused, z, ids, scaling, teacher, measure, vocabulary, here, entropy
        )
    s = finished(vocabulary.merged(row_partials(z, ids, scaling, entropy), here))
    partials = row_partials(teacher.u, ids, teacher.scaling, False)
    lse = finished(vocabulary.merged(partials, here)).lse
    sums = []
    for b in blocks(z):
        ls, lt = _log_probabilities(z[b], s.lse[b], scaling.of_rows(b), teacher, lse[b], b)
        each = torch.stack([terms(ls, lt, measure).sum(-1), slopes(ls, lt, measure).sum(-1)])
        sums.append(each)
    divergence, total = vocabulary.summed(torch.cat(sums, -1))
    return s, PairStatistics(divergence, lse, _total(divergence, total, measure))


def _total(divergence: Tensor, total: Tensor, measure: Measure) -> Tensor:
    """The sum of the slopes, exactly −1 of the forward KL and the divergence of the reverse."""
    if measure.form == "forward":
        return torch.full_like(divergence, -1)
    return total if measure.form == "jsd" else divergence


def _fused_statistics(
    fused: Any,
    z: Tensor,
    ids: Tensor,
    scaling: Scaling,
    teacher: PairRows,
    measure: Measure,
    vocabulary: Vocabulary,
    here: Tensor,
    entropy: bool,
) -> tuple[Statistics, PairStatistics]:
    """One read of both rows for a KL, two for a JSD, whose mixture is known after the first."""
    form = measure.form
    ours, theirs, cross = fused.pair_partials(z, ids, scaling, *teacher, form, entropy)
    student, teacher_rows = vocabulary.merged(ours, here), vocabulary.merged(theirs, here)
    s, lse = finished(student), finished(teacher_rows).lse
    if form == "jsd":
        of_student, of_teacher = vocabulary.summed(
            fused.mixture_sums(z, s.lse, scaling, teacher.u, lse, teacher.scaling, measure.beta)
        )
        total = (1 - measure.beta) * of_student
        return s, PairStatistics(measure.beta * of_teacher + total, lse, total)
    weighing, merged = (theirs, teacher_rows) if form == "forward" else (ours, student)
    cross = vocabulary.summed(cross * _shrink(weighing, merged)) / merged.sum
    # The mean of (log p_t − log p_s) up to the normalisers, whose large parts cancel first.
    shift = (teacher_rows.max - student.max) + (teacher_rows.sum.log() - student.sum.log())
    divergence = cross - shift if form == "forward" else cross + shift
    return s, PairStatistics(divergence, lse, _total(divergence, divergence, measure))


def _shrink(p: Partials, merged: Partials) -> Tensor:
    """What a shard's sums are multiplied by to be measured from the maximum of all shards."""
    return torch.where(p.max == merged.max, 1, (p.max - merged.max).exp())


def pair_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    derivatives: tuple[Tensor | None, Tensor | None, Tensor],
    scaling: Scaling,
    teacher: PairRows,
    pair: PairStatistics,
    measure: Measure,
) -> None:
    """Write dz into `out` `[R, V]`, which may lie over z as in `row_gradient`.

    derivatives: of the loss by each row's logp, entropy and divergence, `[R]`.
    """
    dlogp, dentropy, ddivergence = derivatives
    if dlogp is None:
        dlogp = torch.zeros_like(ddivergence)
    h, dh = (None, None) if s.entropy is None or dentropy is None else (s.entropy, dentropy)
    target = target_gradient(s.logp, h, dlogp, dh)
    fused = kernels_for(z, "policyloss.head.pair_gradient_kernel")
    if fused is not None:
        fused.pair_gradient(
            z, out, ids, s.lse, h, dlogp, dh, target, scaling, *teacher, pair, ddivergence, measure
        )
        return
    for b in blocks(z):
        ls, lt = _log_probabilities(z[b], s.lse[b], scaling.of_rows(b), teacher, pair.lse[b], b)
        d = slopes(ls, lt, measure) - ls.exp() * pair.total[b].unsqueeze(-1)
        d = d.mul_(ddivergence[b].unsqueeze(-1))
        silent = (dlogp[b] == 0) & (ddivergence[b] == 0)
        spread = None
        if h is not None and dh is not None:
            spread, silent = (h[b], dh[b]), silent & (dh[b] == 0)
        d += policy_gradient(ls, ids[b], dlogp[b], spread, target[b])
        d = through_scaling(d, z[b], scaling.of_rows(b))
        out[b].copy_(without_silent_rows(d, silent))


def _log_probabilities(
    z: Tensor, lse: Tensor, scaling: Scaling, teacher: PairRows, teacher_lse: Tensor, rows: slice
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of a block of rows, of the student and of the teacher."""
    u = scaled(teacher.u[rows], teacher.scaling.of_rows(rows)).to(lse.dtype)
    return scaled(z, scaling) - lse.unsqueeze(-1), u - teacher_lse.unsqueeze(-1)


def kernels_for(z: Tensor, module: str) -> Any:
    """A module of Triton kernels if they run on the device and dtype of `z`, else None."""
    on = z.device.type == "cuda" and z.dtype != torch.float64
    return kernels(module) if on else None
