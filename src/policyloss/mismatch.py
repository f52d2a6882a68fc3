"""How far two policies are apart on the sampled tokens, in sums that add up like metrics.

Legend: d = old_logp − rollout_logp of a valid token (or of any two policies), ρ = e^d the ratio.
d and its sums over sequences are clamped to ±20 in χ², as everywhere.
The histogram has bins of |d|, `PER_OCTAVE` for each factor of 2 from 2^-14 to 2^5, for each sign;
smaller |d| share one bin. So a quantile of d is right to 4.5 % of d, however small the mismatch.
Positions and ages are counted in bins 0, 1, 2–3, 4–7, …
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import check_group, check_like, check_number, check_tensor, description
from policyloss.errors import InputError, InputTypeError
from policyloss.functional.correction import importance_weight, within
from policyloss.functional.masking import accumulator_dtype, compute_dtype, difference
from policyloss.functional.segments import Sequences, segment_sum
from policyloss.tokens import as_mask

PER_OCTAVE, LOWEST, HIGHEST = 8, -14, 5
SIDE = PER_OCTAVE * (HIGHEST - LOWEST)  # bins of one sign
BINS = 2 * SIDE + 1
ROWS = 32  # bins of positions and of ages; the last begins at 2^30
LOG_CLAMP = 20.0


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer's log-probabilities are from the rollout engine's, on a set of tokens.

    Make one with `Mismatch.of`; `a + b` merges micro-batches, and `all_reduce(group)` merges ranks.
    Read it with its methods, such as `compute`. The fields are sums, with d = old_logp −
    rollout_logp and ρ = e^d; the edges of bins: see `policyloss.mismatch`.
    by_bin: `[2, ROWS, BINS + 1 + K]`; `by_bin[0]` has a row for each range of positions,
    `by_bin[1]` for each range of ages (updates since sampling). A row holds the histogram of d
    (BINS counts), Σ ρ², and for each of the K bands the number of tokens with ρ outside it.
    by_sequence: `[2]`, the number of sequences and Σ e^(2·Σd) over them. bands: the K pairs (low,
    high).
    """

    by_bin: Tensor
    by_sequence: Tensor
    bands: tuple[tuple[float, float], ...]

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        old_logp: Tensor,
        rollout_logp: Tensor,
        mask: Tensor,
        *,
        ages: Tensor | None = None,
        bands: Sequence[tuple[float, float]] = ((0.5, 2.0), (0.8, 1.25)),
        cu_seqlens: Tensor | None = None,
        cp_group: Any = None,
        positions: Tensor | None = None,
    ) -> Mismatch:
        """Measure a set of tokens, without a host sync.

        All tensors: `[B, T]`, or packed `[N]` with `cu_seqlens`. To measure the drift from the old
        policy, pass logp and old_logp. ages: the number of updates since the policy that sampled
        each token (integers). bands: pairs (low, high) of ratios; the tokens outside each pair are
        counted. positions: integers; by default, the number of valid tokens before each token in
        its sequence. A `cp_group` requires them, because one rank cannot count tokens on others.
        """
        pairs = tuple(bands) if isinstance(bands, (tuple, list)) else (bands,)
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InputError(f"bands must hold pairs (low, high), got {description(pair)}.")
            check_number("bands", pair[1], least=check_number("bands", pair[0], least=0))
        check_tensor("old_logp", old_logp, "float")
        check_like("rollout_logp", rollout_logp, ("old_logp", old_logp), "float")
        valid = as_mask(mask, old_logp, like_called="old_logp")
        sequences = Sequences.of(old_logp, cu_seqlens, cp_group, "old_logp")
        for name, x in (("ages", ages), ("positions", positions)):
            if x is not None:
                check_like(name, x, ("old_logp", old_logp), "integer")
        if positions is None and cp_group is not None:
            raise InputError("with cp_group give positions=, the place of each token.")
        where = (_places(valid, sequences) if positions is None else positions, ages)
        d = difference(old_logp, rollout_logp, valid, compute_dtype(old_logp, rollout_logp))
        wide = accumulator_dtype(d.device)
        ratio = importance_weight(d.to(wide), LOG_CLAMP)
        columns = [ratio.square(), *(~within(ratio, *band) for band in pairs)]
        sums = torch.zeros(2, ROWS, BINS + len(columns), dtype=wide, device=d.device)
        for row, at in zip(sums, where, strict=True):
            if at is not None:
                _add(row, at, d, valid, [column.to(wide) for column in columns])
        total, length = sequences.sums(d.to(wide), valid)
        counts = (length > 0).to(wide)
        if cp_group is not None and dist.get_rank(cp_group):
            counts = 0 * counts  # the first rank counts the sequences
        squares = importance_weight(total, LOG_CLAMP).square() * counts
        stored = tuple((low, high) for low, high in pairs)
        return cls(sums, torch.stack([counts.sum(), squares.sum()]), stored)

    def __add__(self, other: Mismatch) -> Mismatch:
        if not isinstance(other, Mismatch):
            return NotImplemented
        if self.bands != other.bands:
            raise InputTypeError(f"use the same bands in a step: {self.bands}, {other.bands}.")
        sums = self.by_bin + other.by_bin, self.by_sequence + other.by_sequence
        return Mismatch(*sums, self.bands)

    def __radd__(self, other: object) -> Mismatch:
        """`0 + mismatch` is `mismatch`, so `sum(list_of_them)` works."""
        return self if other == 0 else NotImplemented

    def all_reduce(self, group: Any = None) -> Mismatch:
        """The mismatch over all ranks of `group`. A collective: every rank must call it."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        check_group("group", group)
        total = torch.cat([self.by_bin.reshape(-1), self.by_sequence])
        dist.all_reduce(total, group=group)
        return Mismatch(total[:-2].view_as(self.by_bin), total[-2:], self.bands)

    def compute(self) -> dict[str, float]:
        """Statistics over all tokens, by name.

        tokens; ratio_p50, ratio_p95, ratio_p99: quantiles of ρ; chi2_token: Σ ρ² / n − 1;
        chi2_sequence: the mean of e^(2·Σd) over sequences, − 1; outside_LOW_HIGH: the share of
        tokens with ρ < low or ρ > high. Without tokens, all others are NaN; so are the quantiles
        and chi2 if a log-probability is NaN.
        """
        count, squares = self.by_sequence.tolist()
        chi2 = squares / count - 1 if count else math.nan
        return self._numbers(self.by_bin[0].sum(0)) | {"chi2_sequence": chi2}

    def by_position(self) -> dict[int, dict[str, float]]:
        """The token statistics per bin of positions (0, 1, 2–3, 4–7, …), by the bin's first."""
        return self._numbers_by_bin(0)

    def by_age(self) -> dict[int, dict[str, float]]:
        """The token statistics per bin of ages, by the bin's lowest age; empty without ages."""
        return self._numbers_by_bin(1)

    def _numbers_by_bin(self, which: int) -> dict[int, dict[str, float]]:
        rows = enumerate(self.by_bin[which].cpu())
        return {2**i // 2: self._numbers(row) for i, row in rows if row[:BINS].any()}

    def _numbers(self, row: Tensor) -> dict[str, float]:
        histogram, (squares, *outside) = row[:BINS].cpu(), row[BINS:].tolist()
        n = histogram.sum().item()
        chi2 = squares / n - 1 if n else math.nan
        numbers = {"tokens": n, "chi2_token": chi2}
        for q in (50, 95, 99):
            numbers[f"ratio_p{q}"] = chi2 if math.isnan(chi2) else _quantile(histogram, q / 100)
        for (low, high), number in zip(self.bands, outside, strict=True):
            numbers[f"outside_{low:g}_{high:g}"] = number / n if n else chi2
        return numbers


def _places(valid: Tensor, sequences: Sequences) -> Tensor:
    """The number of valid tokens before each token of its sequence."""
    before = valid.long().cumsum(-1) - valid.long()
    if sequences.offsets is None or not valid.numel():
        return before
    first = sequences.offsets[:-1].clamp(max=valid.numel() - 1)
    return before - sequences.spread(before[first])


def _add(sums: Tensor, where: Tensor, d: Tensor, valid: Tensor, columns: list[Tensor]) -> None:
    """Add each valid token to the row of its bin `where`: its bin of d, and its `columns`."""
    rows = torch.where(where > 0, where.clamp(min=1).to(sums.dtype).log2().floor() + 1, 0)
    rows = rows.clamp(max=ROWS - 1).long().reshape(-1)
    octave = PER_OCTAVE * (d.abs().clamp(min=2.0**LOWEST / 2).log2() - LOWEST)
    step = octave.floor().nan_to_num().clamp(-1, SIDE - 1).long() + 1
    bins = (SIDE + torch.where(d < 0, -step, step)).reshape(-1)
    counts = valid.reshape(-1).to(sums.dtype)
    sums.view(-1).index_add_(0, rows * sums.shape[1] + bins, counts)
    # Counts are exact in any order; the others are added in one order, for the same bits.
    ids, order = rows.sort(stable=True)
    offsets = torch.searchsorted(ids, torch.arange(ROWS + 1, device=ids.device))
    for i, column in enumerate(columns):
        sums[:, BINS + i] = segment_sum((column.reshape(-1) * counts)[order], offsets, ids)


def _quantile(histogram: Tensor, q: float) -> float:
    """The ratio at the middle of the bin that holds the ⌈q·n⌉-th smallest."""
    cumulative = histogram.cumsum(0)
    place = torch.searchsorted(cumulative, (q * cumulative[-1]).ceil()).item() - SIDE
    size = 2.0 ** ((abs(place) - 0.5) / PER_OCTAVE + LOWEST) if place else 0.0
    return math.exp(math.copysign(size, place))
