"""The words of a diagnosis: what the trainer does, and what to do instead."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from policyloss.check.diagnosis import LAWS, Experiment, Weighing


class Place(NamedTuple):
    """Where the pieces of a cut run: words for one, several and their number, and how to count."""

    one: str
    many: str
    number: str
    counting: str


LOOP = Place(
    "micro-batch",
    "micro-batches",
    "k",
    "pl.accumulate does, or pass totals=pl.Totals.count(mask_of_the_whole_step) to every call",
)
RANKS = Place(
    "rank",
    "ranks",
    "W",
    "pl.accumulate(…, group=dp_group) does, or totals=pl.Totals.count(mask, group=dp_group)",
)

_ON_TOP = {
    0: "",
    -1: ", divided by {k} once more",
    -2: ", divided by {k} twice more",
    1: ", multiplied by {k}",
}
_HOW = {
    "equal": "averaged over the {k} {many}",
    "sum": "summed over the {many} without a division",
    "tokens": "weighed by tokens over the {many}",
    "sequences": "weighed by sequences over the {many}",
}
_COUNTED = {
    "tokens": "valid tokens",
    "sequences": "sequences",
    "packs": "sequences (by cu_seqlens)",
}


def weighing_words(weighing: Weighing, place: Place, packed: bool) -> str:
    """The diagnosis and the remedy where laws explain the gradients."""
    k, law = place.number, LAWS[weighing.full_law]
    on_top = _ON_TOP[weighing.power].format(k=k)
    words = [
        f"In one pass over the whole batch a {place.one} counts {law.words}; cut, each counts "
        f"{LAWS[weighing.loop].words.format(k=k)}{on_top}."
    ]
    if weighing.full_law == "sum":
        return (
            f"{words[0]} Remedy: the {place.many} add up to the whole as they are; sum them with "
            "no further weight."
        )
    if law.mean and weighing.loop in _HOW:
        words.append(
            f"That is a {law.mean} taken inside each {place.one}, "
            f"{_HOW[weighing.loop].format(k=k, many=place.many)}."
        )
    if packed and (weighing.full_law, weighing.loop) in (
        ("tokens", "equal"),
        ("packs", "sequences"),
    ):
        words.append(
            "A pack treated as one sequence looks like this: does the loss read cu_seqlens?"
        )
    counted = _COUNTED.get(weighing.full_law, "valid tokens or sequences")
    words.append(
        f"Remedy: count the {counted} of the whole step before the first backward, and divide "
        f"every {place.one} by that and by nothing else ({place.counting})."
    )
    return " ".join(words)


def factor_words(power: int, place: Place) -> str:
    """The diagnosis where only the length is off, by a power of the number of pieces."""
    k, many = place.number, place.many
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


def unequal_factors_words(factors: list[tuple[int, float]], place: Place) -> str:
    """The diagnosis where only the length is off, and by no power of the number of pieces."""
    listed = ", ".join(
        f"{factor:.4g}× at {place.number} = {k}" for k, factor in dict(factors).items()
    )
    return (
        "The direction is right and the length is off by a factor that no count here explains: "
        f"{listed}."
    )


COMPANIONS = (
    "The whole batch's gradient is no weighted sum of those of its {many}: what a sequence "
    "contributes depends on which others are with it (advantages normalised or groups compared "
    "per {one}, batch statistics, attention across a pack). Remedy: compute such things over the "
    "whole step, before it is cut."
)


def unknown_words(
    experiment: Experiment, full_weights: Tensor | None, cut_weights: Tensor | None, place: Place
) -> str:
    """The report where no law fits: the fitted weights, if they are unique."""
    start = "No normalisation that is known here explains it."
    if full_weights is None or cut_weights is None:
        return (
            f"{start} Nor can weights be fitted: the {place.many}' own gradients are too alike, or "
            "the cut's is no sum of them. Try other sequences, or return more parameters."
        )
    return (
        f"{start} Fitted per {place.one} of {experiment.name!r}: weights {_numbers(full_weights)} "
        f"in the whole batch, {_numbers(cut_weights)} cut, for "
        f"{_numbers(experiment.counts.tokens)} valid tokens."
    )


def _numbers(x: Tensor) -> str:
    shown = [f"{v:.3g}" for v in x.tolist()[:8]]
    return " ".join([*shown, "…"] if x.numel() > 8 else shown)


def reference_words(factor: float | None, ranks: int, tolerance: float) -> str:
    """The diagnosis against a reference. factor: None where the direction differs too."""
    where = "in one micro-batch" if ranks == 1 else f"shared among {ranks} ranks"
    if factor is None:
        return (
            f"The gradient of the batch {where} differs from the reference by more than a factor."
        )
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
