"""Which normalisation explains a gradient that moved.

A micro-batch m alone has the gradient g_m, normalised as the trainer normalises it. With a trainer
that averages, the gradient of the uncut batch is `g = Σ_m v_m · g_m` and that of the cut batch is
`g_cut = Σ_m w_m · g_m`. What v and w are proportional to is the diagnosis: valid tokens, sequences,
nothing (1/k each), or a plain sum. A law must fit every cut at once, because several laws may fit a
single cut.

Legend: k micro-batches, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

POWERS = (0, -1, 1, -2)  # of k: what a loop divides by, or multiplies with, on top of its weights


class Counts(NamedTuple):
    """Counts of each micro-batch `[k]`; rows are all sequences, positions all tokens."""

    tokens: Tensor
    sequences: Tensor
    rows: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Experiment:
    """One cut: the gradients of the uncut and of the cut batch `[P]`, that of each micro-batch
    alone `[k, P]`, and the counts of the micro-batches.
    """

    name: str
    full_gradient: Tensor
    cut: Tensor
    alone: Tensor
    counts: Counts

    @property
    def k(self) -> int:
        """The number of micro-batches."""
        return self.alone.shape[0]


class Law(NamedTuple):
    """A way to weigh micro-batches: formula, description, and the loss that does it in one pass."""

    weights: Callable[[Counts], Tensor]
    words: str
    mean: str


def _share(x: Tensor) -> Tensor:
    return x / x.sum()


# Where several laws fit, the first is taken: it is the simplest, and for a loop it needs no
# counting.
LAWS = {
    "equal": Law(lambda c: torch.full_like(c.tokens, 1 / c.tokens.numel()), "1/{k}", ""),
    "sum": Law(lambda c: torch.ones_like(c.tokens), "in full", "sum"),
    "tokens": Law(
        lambda c: _share(c.tokens), "by its share of the valid tokens", "mean over the tokens"
    ),
    "sequences": Law(
        lambda c: _share(c.sequences),
        "by its share of the sequences",
        "mean over the sequences (or padded rows)",
    ),
    "rows": Law(
        lambda c: _share(c.rows),
        "by its share of the rows, fully masked ones too",
        "mean over the rows",
    ),
    "positions": Law(
        lambda c: _share(c.positions),
        "by its share of all positions, masked ones too",
        "mean over all positions",
    ),
    "packs": Law(
        lambda c: _share(c.tokens) * _share(c.sequences),
        "by its share of the tokens times that of the sequences",
        "",
    ),
}
WHOLE_LAWS = [name for name in LAWS if name != "equal"]


class Weighing(NamedTuple):
    """A diagnosis: the laws of the uncut batch and of the loop, and the power of k it adds."""

    full_law: str
    loop: str
    power: int


def fitting_power(factors: list[tuple[int, float]], tolerance: float) -> int | None:
    """The p ≠ 0 for which every (k, factor) has `factor = k^p`, or None."""
    for power in POWERS[1:]:
        if all(abs(factor - k**power) <= tolerance * k**power for k, factor in factors):
            return power
    return None


def find_weighing(experiments: list[Experiment], tolerance: float) -> Weighing | None:
    """The laws that explain every experiment, that of the loop with a power of k."""

    def misfit(law: str, power: int, target: str) -> float:
        weights = LAWS[law].weights
        return max(
            _misfit(getattr(e, target), e.alone, weights(e.counts) * float(e.k) ** power)
            for e in experiments
        )

    full = _first_of_the_best(
        {(law, 0): misfit(law, 0, "full_gradient") for law in WHOLE_LAWS}, tolerance
    )
    loop = _first_of_the_best(
        {(law, power): misfit(law, power, "cut") for power in POWERS for law in LAWS}, tolerance
    )
    return None if full is None or loop is None else Weighing(full[0], *loop)


def _first_of_the_best(
    misfits: dict[tuple[str, int], float], tolerance: float
) -> tuple[str, int] | None:
    """The first law that fits about as well as the best one. With a wide tolerance (half
    precision), laws that fit much worse could pass too.
    """
    best = min(misfits.values())
    if best > tolerance:
        return None
    return next(law for law, gap in misfits.items() if gap <= max(3 * best, tolerance / 100))


def fitted_weights(gradient: Tensor, alone: Tensor, tolerance: float) -> Tensor | None:
    """The weights `[k]` of `alone` that give `gradient`; None if none fit, or several do."""
    scale = alone.norm(dim=1)
    unit = alone / scale[:, None]
    gram = unit @ unit.T
    if not gram.isfinite().all() or torch.linalg.cond(gram) > 1 / tolerance:
        return None
    weights = torch.linalg.solve(gram, unit @ gradient) / scale
    return weights if _misfit(gradient, alone, weights) <= tolerance else None


def is_a_weighted_sum(gradient: Tensor, alone: Tensor, tolerance: float) -> bool:
    """Whether `gradient` is any weighted sum of those of the micro-batches."""
    # This driver also solves for gradients that depend on each other, or are 0.
    weights = torch.linalg.lstsq(alone.T, gradient[:, None], driver="gelsd").solution[:, 0]
    return float((gradient - weights @ alone).norm()) <= tolerance * float(gradient.norm())


def _misfit(gradient: Tensor, alone: Tensor, weights: Tensor) -> float:
    """`‖gradient − Σ_m weight_m · alone_m‖`, relative to the gradient or to its terms, whichever is
    larger: where terms cancel, their rounding errors do not.
    """
    size = max(float(gradient.norm()), float((weights.abs() * alone.norm(dim=1)).sum()))
    return float((gradient - weights @ alone).norm()) / size if size else 0.0
