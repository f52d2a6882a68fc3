"""Find the normalisation that explains a gradient that changed with the split of the batch.

A micro-batch m alone has the gradient g_m, normalised as the trainer normalises it. With a trainer
that averages, the gradient of the whole batch is `g = Σ_m v_m · g_m`, and the gradient of the split
batch is `g_cut = Σ_m w_m · g_m`. The diagnosis is the quantity that v and w are proportional to:
valid tokens, sequences, a constant (1/k each), or a plain sum. A law must fit every split at once,
because several laws may fit a single split.

Legend: k micro-batches, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

POWERS = (0, -1, 1, -2)  # powers of k by which a loop may scale its weights


class Counts(NamedTuple):
    """Counts of each micro-batch `[k]`; rows are all sequences, positions all tokens."""

    tokens: Tensor
    sequences: Tensor
    rows: Tensor
    positions: Tensor


@dataclass(frozen=True)
class Experiment:
    """One split of a batch, with the gradients of the whole and of the split batch.

    full_gradient: of the whole batch, `[P]`. cut: of the split batch, `[P]`. alone: of each
    micro-batch alone, `[k, P]`. counts: the counts of the micro-batches.
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


def _share(name: str, counts: Counts) -> Tensor:
    count: Tensor = getattr(counts, name)
    return count / count.sum()


# The words for each unit of a share, and the loss that averages over that unit.
_SHARES = {
    "tokens": ("the valid tokens", "mean over the tokens"),
    "sequences": ("the sequences", "mean over the sequences (or padded rows)"),
    "rows": ("the rows, fully masked ones too", "mean over the rows"),
    "positions": ("all positions, masked ones too", "mean over all positions"),
}
# If several laws fit, the first is chosen: it is the simplest, and in a loop it needs no
# counting.
LAWS = {
    "equal": Law(lambda c: torch.full_like(c.tokens, 1 / c.tokens.numel()), "1/{k}", ""),
    "sum": Law(lambda c: torch.ones_like(c.tokens), "in full", "sum"),
    **{
        name: Law(partial(_share, name), f"by its share of {words}", mean)
        for name, (words, mean) in _SHARES.items()
    },
    "packs": Law(
        lambda c: _share("tokens", c) * _share("sequences", c),
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
    """The laws that explain every experiment; the law of the loop has a power of k."""

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
    """The first law that fits about as well as the best one, also with a wide tolerance."""
    best = min(misfits.values())
    if best > tolerance:
        return None
    return next(law for law, gap in misfits.items() if gap <= max(3 * best, tolerance / 100))


def fitted_weights(gradient: Tensor, alone: Tensor, tolerance: float) -> Tensor | None:
    """The weights `[k]` of `alone` that give `gradient`; None unless they are unique."""
    scale = alone.norm(dim=1)
    unit = alone / scale[:, None]
    gram = unit @ unit.T
    if not gram.isfinite().all() or torch.linalg.cond(gram) > 1 / tolerance:
        return None
    weights = torch.linalg.solve(gram, unit @ gradient) / scale
    return weights if _misfit(gradient, alone, weights) <= tolerance else None


def is_a_weighted_sum(gradient: Tensor, alone: Tensor, tolerance: float) -> bool:
    """Whether `gradient` is any weighted sum of the gradients of the micro-batches."""
    # This driver also handles gradients that are linearly dependent, or 0.
    weights = torch.linalg.lstsq(alone.T, gradient[:, None], driver="gelsd").solution[:, 0]
    return float((gradient - weights @ alone).norm()) <= tolerance * float(gradient.norm())


def _misfit(gradient: Tensor, alone: Tensor, weights: Tensor) -> float:
    """`‖gradient − Σ_m weight_m · alone_m‖`, relative to the gradient or to its terms, whichever is
    larger: if terms cancel, their rounding errors do not.
    """
    size = max(float(gradient.norm()), float((weights.abs() * alone.norm(dim=1)).sum()))
    return float((gradient - weights @ alone).norm()) / size if size else 0.0


class PieceNames(NamedTuple):
    """Names for the pieces of a cut: one, several, their number; and how to count over them."""

    one: str
    many: str
    number: str
    counting: str


LOOP = PieceNames(
    "micro-batch",
    "micro-batches",
    "k",
    "pl.accumulate does, or pass totals=pl.Totals.count(mask_of_the_whole_step) to every call",
)
RANKS = PieceNames(
    "rank",
    "ranks",
    "W",
    "pl.accumulate(…, group=dp_group) does, or totals=pl.Totals.count(mask, group=dp_group)",
)

_ON_TOP = {0: "", 1: ", multiplied by {k}"}
_ON_TOP |= {-1: ", divided by {k} once more", -2: ", divided by {k} twice more"}
_HOW = {
    "equal": "averaged over the {k} {many}",
    "sum": "summed over the {many} without a division",
    "tokens": "weighed by tokens over the {many}",
    "sequences": "weighed by sequences over the {many}",
}
_COUNTED = {"tokens": "valid tokens", "sequences": "sequences"}
_COUNTED["packs"] = "sequences (by cu_seqlens)"


def weighing_words(weighing: Weighing, names: PieceNames, packed: bool) -> str:
    """The diagnosis and the remedy if laws explain the gradients."""
    k, law = names.number, LAWS[weighing.full_law]
    on_top = _ON_TOP[weighing.power].format(k=k)
    words = [
        f"In one pass over the whole batch a {names.one} counts {law.words}; cut, each counts "
        f"{LAWS[weighing.loop].words.format(k=k)}{on_top}."
    ]
    if weighing.full_law == "sum":
        remedy = f"Remedy: the {names.many} add up to the whole; sum them with no further weight."
        return f"{words[0]} {remedy}"
    if law.mean and weighing.loop in _HOW:
        words.append(
            f"That is a {law.mean} taken inside each {names.one}, "
            f"{_HOW[weighing.loop].format(k=k, many=names.many)}."
        )
    as_one_sequence = (("tokens", "equal"), ("packs", "sequences"))
    if packed and (weighing.full_law, weighing.loop) in as_one_sequence:
        words.append("A pack treated as one sequence looks like this: is cu_seqlens read?")
    counted = _COUNTED.get(weighing.full_law, "valid tokens or sequences")
    words.append(
        f"Remedy: count the {counted} of the whole step before the first backward, and divide "
        f"every {names.one} by that and by nothing else ({names.counting})."
    )
    return " ".join(words)


def factor_words(power: int, names: PieceNames) -> str:
    """The diagnosis if only the length is off, by a power of the number of pieces."""
    k, many = names.number, names.many
    if power > 0:
        return (
            f"The direction is right and the gradient is {k} times too large, {k} the number of "
            f"{many}. Remedy: the loss is normalised over the whole step already, so drop the "
            f"factor {k} (it makes up for a division that nothing does)."
        )
    factor, times = (f"1/{k}", "once") if power == -1 else (f"1/{k}²", "twice")
    return (
        f"The direction is right and the gradient is {factor} of what it should be, {k} the number "
        f"of {many}: it is divided by {k} {times} too often. Remedy: the loss is normalised over "
        f"the whole step already, so drop the division by {k} (loss / accumulation_steps, or the "
        "one your engine makes)."
    )


def unequal_factors_words(factors: list[tuple[int, float]], names: PieceNames) -> str:
    """The diagnosis if only the length is off, and not by a power of the number of pieces."""
    sizes = dict(factors).items()
    listed = ", ".join(f"{factor:.4g}× at {names.number} = {k}" for k, factor in sizes)
    right = "The direction is right and the length is off by a factor"
    return f"{right} that no count here explains: {listed}."


COMPANIONS = (
    "The whole batch's gradient is no weighted sum of those of its {many}: the share of a "
    "sequence depends on which others are with it (advantages normalised or groups compared "
    "per {one}, batch statistics, attention across a pack). Remedy: compute such things over the "
    "whole step, before it is cut."
)


def unknown_words(
    split: Experiment, full_weights: Tensor | None, cut_weights: Tensor | None, names: PieceNames
) -> str:
    """The report if no law fits: the fitted weights, if they are unique."""
    start = "No normalisation that is known here explains it."
    if full_weights is None or cut_weights is None:
        return (
            f"{start} Nor can weights be fitted: the {names.many}' own gradients are too alike, or "
            "the cut's is no sum of them. Try other sequences, or return more parameters."
        )
    return (
        f"{start} Fitted per {names.one} of {split.name!r}: weights {_numbers(full_weights)} "
        f"in the whole batch, {_numbers(cut_weights)} cut, for "
        f"{_numbers(split.counts.tokens)} valid tokens."
    )


def _numbers(x: Tensor) -> str:
    shown = [f"{v:.3g}" for v in x.tolist()[:8]]
    return " ".join([*shown, "…"] if x.numel() > 8 else shown)


def reference_words(factor: float | None, ranks: int, tolerance: float) -> str:
    """The diagnosis against a reference. factor: None if the direction differs too."""
    where = "in one micro-batch" if ranks == 1 else f"shared among {ranks} ranks"
    if factor is None:
        text = "differs from the reference by more than a factor."
        return f"The gradient of the batch {where} {text}"
    start = f"The gradient of the batch {where} is {factor:.4g} times the reference."
    if ranks > 1 and abs(factor * ranks - 1) <= tolerance:
        return (
            f"{start} That is 1/dp: gradients are averaged over the {ranks} ranks and the loss is "
            "not multiplied by their number. Remedy: multiply it (dp_size of Totals, which "
            "Totals.count(mask, group=dp_group) sets), or let the engine sum."
        )
    if ranks > 1 and abs(factor / ranks - 1) <= tolerance:
        return (
            f"{start} That is dp: the loss is multiplied by the {ranks} ranks to make up for an "
            "average, but the engine sums. Remedy: Totals.count(mask, group=dp_group, "
            "dp_size=1)."
        )
    return (
        f"{start} Every run here has that factor, so look outside the loop: what multiplies or "
        "divides the whole step?"
    )


MASK = (
    "The mask does not reach the numerator: with half of a sequence's tokens masked, its gradient "
    "keeps its direction and grows as the denominator shrinks. So tokens outside the mask "
    "(prompt, padding) push the model. Remedy: mask each token's loss before it is summed, "
    "torch.where(mask, loss, 0)."
)
MASK_UNREAD = (
    "the gradient stays the same when half of a sequence's mask is switched off: step_fn does not "
    "read batch['mask']. If it masks by other means (labels of -100), make sure that they are the "
    "same tokens."
)
EQUAL_LENGTHS = (
    "every sequence has {n} valid tokens, so this batch cannot show a weighting by length. Try "
    "uneven lengths."
)
NO_REFERENCE = (
    "a factor that every run on these {ranks} ranks has (dp_size forgotten, or used where "
    "gradients are summed) cannot be seen from inside. Pass reference=, the report.gradient of a "
    "run in one process."
)
