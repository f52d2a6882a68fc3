"""Rows of logits compared with a teacher on a few entries each: a support.

Legend: R rows, K entries of a support, z the student's raw logits `[R, V]`. The gradient of the
divergence by the log-probability of an entry, g, is known for each of them, so the gradient of a
row is that of K more targets: `ds = policy's gradient + Σ_k g_k·(onehot(id_k) − p)`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from policyloss.functional.divergence import Measure, on_support, support_slopes
from policyloss.head.softmax_rows import Scaling, Statistics, row_gradient, scaled
from policyloss.head.vocab_parallel import Vocabulary


class Entries(NamedTuple):
    """A support and what the way back needs of it. divergence: `[R]`; the others `[R, K]`.

    ids: global. keep: which entries count. logp: the student's. slopes: the derivatives of the
    divergence by them, 0 where keep is False.
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
    values = scaled(z.gather(1, column), scaling._replace(bias=bias))
    return values if vocabulary.group is None else vocabulary.summed(torch.where(here, values, 0))


def support_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    derivatives: tuple[Tensor | None, Tensor | None, Tensor],
    scaling: Scaling,
    entries: Entries,
    first: int,
) -> None:
    """Write dz into `out` `[R, V]`, which may lie over z as in `row_gradient`.

    ids: `[R]`, counted from `first`, the first of these columns. derivatives: of the loss by each
    row's logp, entropy and divergence, `[R]`. The gradients at the id and at the entries come from
    their exact log-probabilities: a model is sure of most tokens, and 1 − p would round away.
    """
    dlogp, dentropy, ddivergence = derivatives
    dlogp = torch.zeros_like(ddivergence) if dlogp is None else dlogp
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

    What is not active repeats the first active entry of its row, or what stands in column 0.
    """
    some = active.any(-1, keepdim=True)
    first = active.to(torch.uint8).argmax(-1, keepdim=True)
    column = torch.where(some, columns.gather(1, first), 0)
    value = torch.where(some, d.gather(1, first), out[:, :1])
    out.scatter_(1, torch.where(active, columns, column), torch.where(active, d, value))
