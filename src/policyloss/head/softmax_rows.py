"""Rows of logits: their statistics and their gradients.

Legend: R rows, V vocabulary entries (of this rank's shard), z raw logits `[R, V]`, ids `[R]`. For
one row,

    s = softcap·tanh((z + bias)/softcap) / temperature          p = softmax(s)
    logp = log_softmax(s)[id]                                   entropy = −Σ p·log p
    dz = [dlogp·(1[id] − p) − dentropy·p·(log p + entropy)] / temperature · (slope of the softcap)

The functions here are plain PyTorch and the reference; on a GPU the Triton kernels of the same
names replace them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.functional.masking import compute_dtype
from policyloss.functional.triton_modules import kernels

# Elements of a block of rows that is worked on at once on a CPU: the passes over it find it in a
# cache, and it needs little memory.
BLOCK = 192 << 10


# The logit of an entry outside of a support. Its exponential is 0; that of a large finite number
# might not be, because a GPU rounds `u·scale − maximum` once where it rounds the maximum twice.
ABSENT = -math.inf
# The entropy of each row and its derivative, `[R]` each.
Spread = tuple[Tensor, Tensor]


class Scaling(NamedTuple):
    """The operations between the product `hidden @ weight.T` and the softmax.

    inverse_temperature: a number, or one per row `[R]`. softcap: None, or the bound of
    `softcap·tanh(z/softcap)`. bias: `[V]`. restricted: logits may be `ABSENT`.
    """

    inverse_temperature: float | Tensor = 1.0
    softcap: float | None = None
    bias: Tensor | None = None
    restricted: bool = False

    def of_columns(self, columns: slice) -> Scaling:
        """The same for some of the vocabulary."""
        return self if self.bias is None else self._replace(bias=self.bias[columns])

    def repeat_rows(self, count: int) -> Scaling:
        """The scaling of rows that are each repeated `count` times, one after the other."""
        t = self.inverse_temperature
        if not isinstance(t, Tensor):
            return self
        return self._replace(inverse_temperature=t.repeat_interleave(count))

    def of_rows(self, rows: Tensor | slice) -> Scaling:
        """The same for some of the rows."""
        t = self.inverse_temperature
        return self._replace(inverse_temperature=t[rows]) if isinstance(t, Tensor) else self


class Partials(NamedTuple):
    """The result of one pass over each row, `[R]` each.

    Partials of several shards merge into partials of the vocabulary.
    max: largest s, as rounded; the others are measured from this very number. sum: Σ e^(s−max).
    moment: Σ e^(s−max)·(s−max), None if no entropy is wanted. target: s−max of the row's id, 0 if
    the id is not among these V (relative, so that large logits cost logp no digits).
    """

    max: Tensor
    sum: Tensor
    moment: Tensor | None
    target: Tensor


class Statistics(NamedTuple):
    """Statistics of rows, `[R]` each.

    logp: of the row's id. entropy: None if not wanted. lse: log Σ eˢ.
    """

    logp: Tensor
    entropy: Tensor | None
    lse: Tensor

    def of_rows(self, rows: Tensor | slice) -> Statistics:
        """The statistics of some of the rows."""
        entropy = None if self.entropy is None else self.entropy[rows]
        return Statistics(self.logp[rows], entropy, self.lse[rows])

    def spread(self, dentropy: Tensor | None) -> Spread | None:
        """The entropy and its derivative; None if there is neither value nor derivative."""
        return None if self.entropy is None or dentropy is None else (self.entropy, dentropy)


def row_statistics(p: Partials) -> Statistics:
    """The statistics of rows, from partials over the whole vocabulary."""
    log_sum = p.sum.log()
    entropy = None if p.moment is None else log_sum - p.moment / p.sum
    return Statistics(p.target - log_sum, entropy, p.max + log_sum)


def row_partials(z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool) -> Partials:
    """One pass over z. `[R, V]`, `[R]` → four `[R]` in float32 (float64 for float64)."""
    fused = kernels_for(z, scaling)
    if fused is not None:
        partials: Partials = fused.row_partials(z, ids, scaling, entropy)
        return partials
    if z.shape[0] == 1 and z.device.type == "cpu":
        # Several threads share the sum of a lone row, in another order than in several rows.
        twice = row_partials(z.expand(2, -1), ids.expand(2), scaling.repeat_rows(2), entropy)
        return Partials(*(None if x is None else x[:1] for x in twice))  # type: ignore[arg-type]
    parts = [_block_partials(z[b], ids[b], scaling.of_rows(b), entropy) for b in blocks(z)]
    return concatenate(parts)


def concatenate(parts: list[Partials]) -> Partials:
    """Concatenate the partials of consecutive rows; at least one part."""
    if len(parts) == 1:
        return parts[0]
    return Partials(*(None if x[0] is None else torch.cat(x) for x in zip(*parts, strict=True)))  # type: ignore[arg-type]


def row_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    dlogp: Tensor,
    dentropy: Tensor | None,
    scaling: Scaling,
    source: Tensor | None = None,
) -> None:
    """Write dz into `out` `[R, V]`.

    dlogp, dentropy: the derivatives of the loss by each row's logp and entropy, `[R]`.
    source: the row of z that each row of `out` belongs to, `[R]`; None if they are the same.
    `out` may be `z` itself, or share its memory in a narrower type, each row starting at the byte
    where its row of z starts.
    """
    spread = s.spread(dentropy)
    fused = kernels_for(z, scaling)
    if fused is not None:
        fused.row_gradient(z, out, ids, s, dlogp, spread, scaling, source)
        return
    z = z if source is None else z[source]
    target = target_gradient(s.logp, dlogp, spread)
    for b in blocks(z):
        of_block, here, silent = scaling.of_rows(b), None, dlogp[b] == 0
        if spread is not None:
            here, silent = (spread[0][b], spread[1][b]), silent & (spread[1][b] == 0)
        scaled, lse = rescale(z[b], of_block), s.lse[b].unsqueeze(-1)
        # In `out` if that has the right type and z is not needed a second time.
        plain = spread is None and scaling.softcap is None and out.dtype == scaled.dtype
        log_p = torch.sub(scaled, lse, out=out[b]) if plain else scaled - lse
        d = policy_gradient(log_p, ids[b], dlogp[b], here, target[b])
        d = without_silent_rows(through_scaling(d, z[b], of_block), silent)
        if d.data_ptr() != out[b].data_ptr():
            out[b].copy_(d)


def target_gradient(logp: Tensor, dlogp: Tensor, spread: Spread | None) -> Tensor:
    """The entry of each row's id in ds, from the exact log-probability of the id. `[R]`.

    It is `dlogp·(1−p) − dentropy·p·(log p + entropy)`. A model is sure of most tokens: p computed
    from the logit would round 1−p away.
    """
    d = -dlogp * torch.expm1(logp)
    if spread is None:
        return d
    entropy, dentropy = spread
    return d - dentropy * logp.exp() * (logp + entropy)


def blocks(z: Tensor) -> Iterator[slice]:
    """The rows of z in blocks that a CPU finds in its cache; one block elsewhere."""
    n = max(z.shape[0], 1)
    step = max(2, BLOCK // max(z.shape[1], 1)) if z.device.type == "cpu" else n
    start = 0
    while start < n:
        # No row stays alone: see `row_partials`.
        stop = n if start + step == n - 1 else start + step
        yield slice(start, stop)
        start = stop


def rescale(z: Tensor, scaling: Scaling) -> Tensor:
    """The scaled logits s of z, in float32 (or float64); z itself if no scaling is set."""
    s = z.to(compute_dtype(z))
    if scaling.bias is not None:
        s = s + scaling.bias.to(s.dtype)
    if scaling.softcap is not None:
        capped = scaling.softcap * torch.tanh(s / scaling.softcap)
        s = torch.where(s == ABSENT, s, capped) if scaling.restricted else capped
    t = scaling.inverse_temperature
    if isinstance(t, Tensor):
        return s * t.to(s.dtype).unsqueeze(-1)
    return s if t == 1 else s * t


def _here(ids: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A flag for each id among the columns of z, and its column; column 0 for other ids."""
    here = (ids >= 0) & (ids < z.shape[1])
    return here, torch.where(here, ids, 0).unsqueeze(-1)


def _block_partials(z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool) -> Partials:
    s = rescale(z, scaling)
    here, column = _here(ids, z)
    top = s.amax(-1)
    shifted = s - torch.where(top == -math.inf, 0, top).unsqueeze(-1)
    target = torch.where(here, shifted.gather(1, column).squeeze(-1), 0)
    if not entropy:
        return Partials(top, shifted.exp_().sum(-1), None, target)
    e = shifted.exp()
    total = e.sum(-1)
    moment = e.mul_(shifted).sum(-1)
    if bool((moment.isnan() & ~total.isnan()).any()):
        # e^−inf·(−inf) is NaN; any finite number in its place gives the 0 it should be.
        moment = shifted.exp().mul_(shifted.clamp_(min=-1e4)).sum(-1)
    return Partials(top, total, moment, target)


def policy_gradient(
    log_p: Tensor, ids: Tensor, dlogp: Tensor, spread: Spread | None, target: Tensor
) -> Tensor:
    """ds, the gradient by the scaled logits, written over their log-probabilities."""
    here, column = _here(ids, log_p)
    if spread is None:
        d = log_p.exp_().mul_(-dlogp.unsqueeze(-1))
    else:
        entropy, dentropy = spread
        p = log_p.exp()
        d = log_p.clamp_(min=-1e4).add_(entropy.unsqueeze(-1))
        d = d.mul_(dentropy.unsqueeze(-1)).add_(dlogp.unsqueeze(-1)).mul_(-p)
    exact = torch.where(here.unsqueeze(-1), target.to(d.dtype).unsqueeze(-1), d.gather(1, column))
    return d.scatter_(1, column, exact)


def through_scaling(d: Tensor, z: Tensor, scaling: Scaling) -> Tensor:
    """dz from ds, in place."""
    if scaling.softcap is not None:
        capped = rescale(z, scaling._replace(inverse_temperature=1.0))
        d.mul_(1 - (capped.clamp(min=-scaling.softcap) / scaling.softcap) ** 2)
    t = scaling.inverse_temperature
    if isinstance(t, Tensor):
        d.mul_(t.to(d.dtype).unsqueeze(-1))
    elif t != 1:
        d.mul_(t)
    return d


def without_silent_rows(d: Tensor, silent: Tensor) -> Tensor:
    """Set the gradient of rows without a derivative to 0, even if their logits are NaN."""
    return d.masked_fill_(silent.unsqueeze(-1), 0) if bool(silent.any()) else d


def kernels_for(z: Tensor, scaling: Scaling, module: str = "policyloss.head.kernels") -> Any:
    """A module of Triton kernels if they run on the device and dtype of `z`, else None.

    They do not support `ABSENT` under a softcap, which would make it finite.
    """
    if scaling.restricted and scaling.softcap is not None:
        return None
    return None if _reason_against_kernels(z.device, z.dtype) else kernels(module)


def explain_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """The code that computes on such rows of logits, and the reason if it is not Triton."""
    why = _reason_against_kernels(device, dtype)
    if not why and kernels("policyloss.head.kernels") is None:
        why = "Triton is not installed"
    return f"plain PyTorch, because {why}" if why else "Triton kernels"


def _reason_against_kernels(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why the kernels cannot work on such logits; "" if they can."""
    if device.type != "cuda":
        return f"the tensors are on {device.type}"
    return "the logits are float64" if dtype == torch.float64 else ""
