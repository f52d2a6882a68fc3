"""`partition_check` tests whether the gradient of your training step depends on how the batch is
split.

def step(micro_batches):            # one optimizer step of your trainer, without the optimizer
    model.zero_grad()
    for micro in micro_batches:
        my_loss(model, micro).backward()
    return model

print(pl.partition_check(step, batch))
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from policyloss.check import diagnosis as words
from policyloss.check.cutting import Cut, CuttableBatch, Peers, StepFunction, Steps, flat_gradient
from policyloss.check.diagnosis import (
    LOOP,
    RANKS,
    Counts,
    Experiment,
    PieceNames,
    find_weighing,
    fitted_weights,
    fitting_power,
    is_a_weighted_sum,
)
from policyloss.errors import InputError
from policyloss.notebook import TableReport


@dataclass(frozen=True)
class CutResult:
    """The result of one split of the batch: the relative distance `‖g_cut − g‖ / ‖g‖` of its
    gradient from the whole batch's gradient g, and the factor f with `g_cut ≈ f · g`.
    """

    name: str
    micro_batches: int
    relative_difference: float
    factor: float
    moved: bool
    explanation: str | None = None


@dataclass(frozen=True)
class PartitionReport(TableReport):
    """The result of `partition_check`; `str()` is a table and a diagnosis.

    diagnosis: the explanations, one paragraph each. notes: possible faults that this batch
    cannot show. gradient: the gradient of the whole batch as one vector over all parameters, `[P]`
    float64; pass it as `reference=` to a run on several ranks.
    """

    columns = ("cut", "pieces", "difference", "factor")
    cuts: list[CutResult]
    diagnosis: list[str]
    notes: list[str]
    tolerance: float
    sequences: int
    tokens: int
    gradient: Tensor

    @property
    def moved(self) -> bool:
        """Whether the gradient depends on the split, the ranks, or tokens outside the mask."""
        return bool(self.diagnosis)

    def raise_if_moved(self) -> None:
        """Raise an AssertionError with the report if the gradient changed, for a test."""
        if self.moved:
            raise AssertionError(str(self))

    def _contents(self) -> tuple[str, list[tuple[str, int, str, str]], list[str]]:
        rows = [
            (
                cut.name,
                cut.micro_batches,
                f"{cut.relative_difference:.1%}" if cut.moved else "none",
                f"{cut.factor:.3f}" if cut.moved else "1",
            )
            for cut in self.cuts
        ]
        notes = [f"Note: {note}" for note in self.notes]
        return self._headline(), rows, [*self.diagnosis, *notes]

    def _headline(self) -> str:
        moved = sum(cut.moved for cut in self.cuts)
        counts = f"{self.sequences} sequences, {self.tokens} valid tokens"
        of = f"{counts}, tolerance {self.tolerance:.0e}"
        if moved:
            return f"The gradient moved in {moved} of {len(self.cuts)} cuts ({of})."
        but = ", but it depends on tokens outside the mask" if self.diagnosis else ""
        return f"The gradient did not move in any of {len(self.cuts)} cuts ({of}){but}."


def partition_check(
    step_fn: StepFunction,
    batch: Mapping[str, Any],
    *,
    cuts: Mapping[str, Sequence[Sequence[int]]] | None = None,
    tolerance: float | None = None,
    group: Any = None,
    reference: Any = None,
) -> PartitionReport:
    """Split `batch` in several ways, run your training step on each, and report whether the
    gradient changed, how much, and why.

    step_fn: takes a list of micro-batches (dicts like `batch`) and does the work of your trainer
      for ONE optimizer step: it zeroes the gradients and runs forward and backward of each, without
      an optimizer step and without gradient clipping. It returns the model, its parameters, or the
      gradients (a mapping or an iterable of tensors; a few layers are enough).
    batch: needs `mask`, `[B, T]` or packed `[N]` with `cu_seqlens`. A tensor with a dimension of
      size B (packed: N, or the number of sequences) is split along it; all else stays whole.
    cuts: a mapping from the name of a split to its micro-batches, each a list of sequence indices.
    The default splits are halves, single sequences, one sequence and the rest, and short and long
    sequences.
    tolerance: the largest allowed `‖g_cut − g‖ / ‖g‖`; by default the square root of the gradients'
    machine epsilon (3e-4 in float32). Under autocast, pass the tolerance of the half precision
    (1e-1 for bfloat16), or check in float32.
    group: the data-parallel ranks; None is the default group if there is one. Every rank makes this
    call with the same full batch; the check also splits it across the ranks.
    reference: a gradient from another run, in any form that `step_fn` may return, such as
    `report.gradient` of a run in one process. Only this comparison can show an error that every run
    on these ranks has, such as a gradient divided by the number of ranks.
    """
    if tolerance is not None and not 0 < tolerance < 1:
        raise InputError(f"tolerance must be between 0 and 1, got {tolerance!r}.")
    ranks, data = Peers(group), CuttableBatch(batch)
    ranks.check_same(
        data.lengths.tolist(),
        0.0,
        "the ranks got different batches: pass the same batch to partition_check on each.",
    )
    if int((data.lengths > 0).sum()) < 2:
        present = int((data.lengths > 0).sum())
        raise InputError(f"batch needs 2 sequences with valid tokens to be cut, it has {present}.")
    named = data.default_cuts() if cuts is None else data.check_cuts(cuts)
    return _Check(Steps(step_fn, data, ranks, tolerance)).report(named, reference)


class _Check:
    """One check: its runs, their gradients, and the diagnosis."""

    def __init__(self, steps: Steps) -> None:
        self.steps, self.data, self.ranks = steps, steps.batch, steps.ranks
        self.tolerance = steps.tolerance
        self.diagnosis: list[str] = []
        self.notes: list[str] = []

    def report(self, named: dict[str, Cut], reference: Any) -> PartitionReport:
        self._check_mask()
        gradients = {name: self.steps.run(cut) for name, cut in named.items()}
        results = self._judge(named, gradients, LOOP)
        if self.ranks.size > 1:
            results += self._over_ranks()
        if reference is not None:
            results.append(self._against(reference))
        elif self.ranks.size > 1:
            self.notes.append(words.NO_REFERENCE.format(ranks=self.ranks.size))
        lengths = self.data.lengths[self.data.lengths > 0]
        if lengths.min() == lengths.max():
            self.notes.append(words.EQUAL_LENGTHS.format(n=int(lengths[0])))
        tokens, gradient = int(lengths.sum()), self.steps.full_gradient
        return PartitionReport(
            results, self.diagnosis, self.notes, self.tolerance, lengths.numel(), tokens, gradient
        )

    def _check_mask(self) -> None:
        """Mask half of the longest sequence. If only the denominator reads the mask, the gradient
        is multiplied by n / (n // 2).
        """
        longest = int(self.data.lengths.argmax())
        n = int(self.data.lengths[longest])
        alone, full_gradient = self.steps.alone([longest]), self.steps.full_gradient
        if n < 2 or not alone.any():
            return
        half = self.steps.run_on([self.data.mask_half(longest)])
        if all(abs(float(x.norm() / full_gradient.norm()) - 1) <= 1e-4 for x in (alone, half)):
            raise InputError(
                f"step_fn gives every gradient the same norm, {float(full_gradient.norm()):.4g}, "
                "which hides any factor: leave clip_grad_norm_ out of it."
            )
        if torch.equal(half, alone):
            self.notes.append(words.MASK_UNREAD)
        elif self.steps.distance(half, alone * n / (n // 2)) <= self.tolerance:
            self.diagnosis.append(words.MASK)

    def _over_ranks(self) -> list[CutResult]:
        """Compare two runs that contain the same sequences equally often: every rank with the
        complete batch, and rank r with the r-th share W times.
        """
        shares = self.data.over_ranks(self.ranks.size)
        name = f"over {self.ranks.size} ranks"
        return self._judge({name: shares}, {name: self._shared(shares, self.ranks.size)}, RANKS)

    def _shared(self, shares: Cut, copies: int) -> Tensor:
        gradient = self.steps.run([shares[self.ranks.rank] * copies])
        wave = torch.arange(gradient.numel(), dtype=torch.float64).cos()
        self.ranks.check_same(
            [float(gradient.norm()), float(gradient @ wave)],  # enough to distinguish two gradients
            self.tolerance,
            "step_fn gave other gradients on other ranks: return them averaged or summed over the "
            "ranks, and whole, not a shard.",
        )
        return gradient

    def _against(self, reference: Any) -> CutResult:
        """Compare the batch, shared once among all ranks, with `reference`."""
        expected, _ = flat_gradient(reference, "reference")
        if expected.shape != self.steps.full_gradient.shape:
            sizes = f"{expected.numel()} numbers, step_fn gave {self.steps.full_gradient.numel()}"
            raise InputError(f"reference has {sizes}.")
        if not expected.any() or not expected.isfinite().all():
            raise InputError("reference must be a gradient that is finite and not 0 everywhere.")
        ranks = self.ranks.size
        gradient = (
            self.steps.full_gradient if ranks == 1 else self._shared(self.data.over_ranks(ranks), 1)
        )
        result = self._result("against the reference", ranks, gradient, expected)
        if result.moved:
            straight = self.steps.distance(gradient, result.factor * expected) <= self.tolerance
            self.diagnosis.append(
                words.reference_words(result.factor if straight else None, ranks, self.tolerance)
            )
        return result

    def _judge(
        self, named: dict[str, Cut], gradients: dict[str, Tensor], names: PieceNames
    ) -> list[CutResult]:
        full_gradient = self.steps.full_gradient
        pieces = [(name, len(cut), gradients[name]) for name, cut in named.items()]
        results = [self._result(*piece, full_gradient) for piece in pieces]
        if any(r.moved for r in results):
            why = self._explain(named, gradients, results, names)
            self.diagnosis.append(why)
            results = [replace(r, explanation=why if r.moved else None) for r in results]
        return results

    def _result(self, name: str, pieces: int, gradient: Tensor, expected: Tensor) -> CutResult:
        difference = self.steps.distance(gradient, expected)
        factor = self.ranks.agree(float(gradient @ expected / (expected @ expected)))
        return CutResult(name, pieces, difference, factor, moved=difference > self.tolerance)

    def _explain(
        self,
        named: dict[str, Cut],
        gradients: dict[str, Tensor],
        results: list[CutResult],
        names: PieceNames,
    ) -> str:
        infinite = [r.name for r in results if math.isinf(r.relative_difference)]
        if infinite:
            return (
                f"The gradient of {infinite[0]!r} is not finite: a {names.one} divides by a count "
                "that is 0 there."
            )
        straight = [
            self.steps.distance(gradients[r.name], r.factor * self.steps.full_gradient)
            <= self.tolerance
            for r in results
        ]
        if all(straight):
            factors = [(r.micro_batches, r.factor) for r in results]
            power = fitting_power(factors, self.tolerance)
            if power is not None:
                return words.factor_words(power, names)
        experiments = [self._experiment(name, cut, gradients[name]) for name, cut in named.items()]
        if any(not e.alone.isfinite().all() for e in experiments):
            return f"No cause can be named: the gradient of a {names.one} alone is not finite."
        weighing = find_weighing(experiments, self.tolerance)
        if weighing is not None:
            return words.weighing_words(weighing, names, self.data.cu_seqlens is not None)
        if all(straight):
            return words.unequal_factors_words(factors, names)
        return self._unexplained(experiments, results, names)

    def _unexplained(
        self, experiments: list[Experiment], results: list[CutResult], names: PieceNames
    ) -> str:
        pairs = [(e.full_gradient, e.alone) for e in experiments]
        if not all(is_a_weighted_sum(*pair, self.tolerance) for pair in pairs):
            return words.COMPANIONS.format(one=names.one, many=names.many)
        judged = zip(experiments, results, strict=True)
        worst = max(judged, key=lambda pair: pair[1].relative_difference)[0]
        full_weights = fitted_weights(worst.full_gradient, worst.alone, self.tolerance)
        cut_weights = fitted_weights(worst.cut, worst.alone, self.tolerance)
        return words.unknown_words(worst, full_weights, cut_weights, names)

    def _experiment(self, name: str, cut: Cut, gradient: Tensor) -> Experiment:
        data, present = self.data, (self.data.lengths > 0).to(torch.float64)
        per_sequence = (data.lengths, present, torch.ones_like(present), data.positions)
        counts = Counts(*(torch.stack([x[part].sum() for part in cut]) for x in per_sequence))
        return Experiment(
            name,
            self.steps.full_gradient,
            gradient,
            torch.stack([self.steps.alone(part) for part in cut]),
            counts,
        )
