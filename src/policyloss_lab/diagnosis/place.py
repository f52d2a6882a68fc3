"""Where a discrepancy is, for a verdict without a cause: rows, tokens, its sign, its form."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from policyloss_lab.diagnosis.forward import routers
from policyloss_lab.diagnosis.hypothesis import Case, misfit

LOUDER = 2.0  # times the others: the least scale of a class of tokens that is named
GAIN = 12.0  # the least improvement of the score by a scale of its own
ONE_WAY = 0.95  # the least share of differences with one sign
FORM = 0.3  # the largest share of the scale that a constant or a factor leaves
UNRELATED = 0.6  # the largest correlation of numbers that belong to other tokens
MOST = 4  # places of a verdict
CLASSES = 2  # classes of tokens among them
TELLING = ("constant", "unrelated")  # come first: their measurement shows most
ORDINALS = {2: "second", 3: "third", 4: "fourth", 8: "eighth"}
TILT = 0.45  # the least difference of the shares of likely and of unlikely tokens that gain
FEW = 0.15  # the largest share of "a few tokens"


class Place(NamedTuple):
    """A place. tag: its name, for programs. sentence: in words. next: the measurement to take."""

    tag: str
    sentence: str
    next: str


def _noise_shape(case: Case) -> Tensor:
    """`1 - p`, or a flat shape if that fits clearly better."""
    d, shape = case.pairs.difference, case.pairs.shape
    flat = torch.ones_like(shape)
    return flat if misfit(d, flat, 0).score < misfit(d, shape, 0).score - GAIN else shape


def split(case: Case, flags: Tensor, choices: float = 1.0) -> tuple[float, float]:
    """How much the score improves if the flagged tokens have a scale of their own, and that scale
    over the scale of the others. choices: the number of flags among which these were chosen.
    """
    d, shape = case.pairs.difference, _noise_shape(case)
    if not 2 <= int(flags.sum()) <= case.pairs.size - 2:
        return -math.inf, 1.0
    one_scale = misfit(d, shape, 0)
    parts = [misfit(d[part], shape[part], 0) for part in (flags, ~flags)]
    gain = one_scale.score - parts[0].score - parts[1].score - 2 * math.log(choices)
    return gain, parts[0].scale / parts[1].scale


def loud_rows(case: Case, floor: float) -> Tensor:
    """A flag for each token of the rows whose differences are of another size; none if all rows are
    alike. Rows are sorted by their mean size, and the widest gap in that order is taken.
    """
    pairs = case.pairs
    none = torch.zeros(pairs.size, dtype=torch.bool)
    _, row = torch.unique(pairs.row, return_inverse=True)
    count = int(row.max()) + 1
    size = (pairs.difference / _noise_shape(case)).abs().clamp(min=0.1 * floor).log()
    mean = torch.zeros(count).double().index_add(0, row, size) / row.bincount()
    order = mean.argsort(descending=True)
    gaps = mean[order][:-1] - mean[order][1:]
    if not gaps.numel() or gaps.max() < math.log(LOUDER):
        return none
    loud = torch.zeros(count, dtype=torch.bool)
    loud[order[: int(gaps.argmax()) + 1]] = True
    flags = loud[row]
    gain, ratio = split(case, flags, count)
    return flags if gain > GAIN and ratio > 2 * LOUDER else none


def is_repeated(case: Case) -> Tensor | None:
    """A flag for each token that occurs before it in its row or prompt; None without ids."""
    if case.pairs.ids is None:
        return None
    prompts = {} if case.scorer is None else dict(enumerate(case.scorer.prompts))
    places = None if case.scorer is None else case.scorer.scored[:, 0].tolist()
    tokens: dict[int, set[int]] = {}
    flags = []
    for k, row in enumerate(case.pairs.row.tolist()):
        token = int(case.pairs.ids[k])
        before = tokens.setdefault(row, set(prompts.get(places[k], ())) if places else set())
        flags.append(token in before)
        before.add(token)
    return torch.tensor(flags)


def find_places(case: Case, floor: float) -> list[Place]:
    """The most telling places, at most four; at least one."""
    places = [*_spots(case, floor), *_classes(case)[:CLASSES], *_forms(case, floor)]
    if not {place.tag for place in places} & {"rows", "few_tokens"}:
        places += _shapes(case)
    return sorted(places[:MOST], key=lambda place: place.tag not in TELLING)


def _spots(case: Case, floor: float) -> Iterator[Place]:
    """Some rows, or tokens at which one side has one and the same number."""
    pairs = case.pairs
    far = (pairs.difference / pairs.shape).abs() > 2 * floor
    rows = loud_rows(case, floor)
    if rows.any():
        loud, quiet = (torch.unique(pairs.row[flags]).tolist() for flags in (rows, ~rows))
        which, fewer = ("all but", quiet) if len(loud) > len(quiet) else ("namely", loud)
        listed = ", ".join(map(str, fewer[:8])) + (", …" if len(fewer) > 8 else "")
        step = fewer[1] - fewer[0] if fewer[2:] else 0
        if step in ORDINALS and fewer == list(range(fewer[0] % step, max(loud + quiet) + 1, step)):
            listed = f"every {ORDINALS[step]} one: {listed}"
        yield Place(
            "rows",
            f"{'mainly' if far[~rows].any() else 'only'} in {len(loud)} of {len(loud + quiet)} "
            f"rows, {which} {listed}",
            ROWS_NEXT,
        )
    for side, x in (("rollout_logp", pairs.rollout), ("old_logp", pairs.trainer)):
        values, counts = torch.unique(x[far], return_counts=True)
        if counts.numel() and int(counts.max()) >= max(3, 0.5 * int(far.sum())):
            yield Place(
                "constant",
                f"at {int(counts.max())} tokens where {side} is {float(values[counts.argmax()]):g}",
                f"Find the code that fills in {side}, and why it skips these tokens.",
            )


def _forms(case: Case, floor: float) -> Iterator[Place]:
    """Forms that the numbers themselves show: a few tokens, unrelated, a factor, one sign."""
    pairs = case.pairs
    d, flat = pairs.difference, torch.ones(pairs.size, dtype=torch.float64)
    far = (d / pairs.shape).abs() > 2 * floor
    few = far & (pairs.size * FEW > far.sum())
    if few.any() and misfit(d[~far], pairs.shape[~far], 0).scale < floor:
        yield Place(
            "few_tokens",
            f"at {int(far.sum())} of {pairs.size} tokens; the others agree. The first is in row "
            f"{int(pairs.row[far][0])}, column {int(pairs.column[far][0])}",
            "Print these tokens with their neighbours: are they special tokens or tool outputs?",
        )
    x, y = pairs.rollout - pairs.rollout.mean(), pairs.trainer - pairs.trainer.mean()
    if float((x * y).mean() / (x.std() * y.std()).clamp(min=1e-9)) < UNRELATED:
        yield Place(
            "unrelated",
            "everywhere: both sides are hardly related, as if they belong to other tokens",
            "Print ids and log-probabilities of one such row, and find the first that differs.",
        )
    scale = misfit(d, flat, 0).scale
    slope = float((d / pairs.trainer.clamp(max=-1e-3)).median())
    middle = float(d.median())
    for tag, prediction, sentence in (
        ("multiplicative", slope * pairs.trainer, f"rollout_logp ≈ {1 + slope:.4g} · old_logp"),
        ("constant", middle * flat, f"rollout_logp ≈ old_logp {middle:+.3g}"),
    ):
        if misfit(d - prediction, flat, 1).scale < FORM * scale:
            yield Place(tag, sentence, "Compare the code that computes both sides, term by term.")
    ups = float((d[far] > 0).double().mean()) if far.any() else 0.5
    if far.sum() >= 8 and max(ups, 1 - ups) >= ONE_WAY:
        side = "rollout_logp" if ups > 0.5 else "old_logp"
        yield Place(
            "one_sided",
            f"one-sided: {side} is the larger at {max(ups, 1 - ups):.0%} of the tokens that differ",
            "Request the top 20 log-probabilities of 8 sequences from the engine, and compare them "
            "with the trainer's: a token that one side lacks was cut or forbidden there.",
        )


def _classes(case: Case) -> list[Place]:
    """Classes of tokens that are louder than the others, the loudest first."""
    pairs = case.pairs
    longest = int(pairs.rank.max()) + 1
    early, half = max(longest // 4, 2), longest // 2
    classes = {
        "first": (pairs.rank == 0, "at the first token of responses", PROMPT_NEXT),
        "last": (pairs.remaining == 0, "at the last token of responses", END_NEXT),
        "start": (pairs.rank < early, f"in the first {early} tokens of responses", PROMPT_NEXT),
        "late": (pairs.rank >= half, f"after the first {half} tokens of responses", LATE_NEXT),
    }
    if (again := is_repeated(case)) is not None:
        classes["repeated"] = (again, "at tokens that occurred before", PENALTY_NEXT)
    splits = {tag: split(case, flags) for tag, (flags, _, _) in classes.items()}
    if pairs.ids is not None:
        size = (pairs.difference / pairs.shape).abs().sqrt()
        ids, which, counts = torch.unique(pairs.ids, return_inverse=True, return_counts=True)
        mean = torch.zeros(ids.numel()).double().index_add(0, which, size) / counts
        loudest = mean.masked_fill(counts < 2, -1.0).topk(min(3, ids.numel())).indices
        listed = ", ".join(str(int(ids[i])) for i in loudest)
        flags = (which[:, None] == loudest).any(1)
        classes["ids"] = (flags, f"at particular token ids, such as {listed}", BIAS_NEXT)
        splits["ids"] = split(case, flags, float(ids.numel()) ** 3)
    places = []
    for tag, (gain, ratio) in sorted(splits.items(), key=lambda item: -item[1][0]):
        if gain > GAIN and ratio > LOUDER:
            _, where, ask = classes[tag]
            times = "over 100" if ratio > 100 else f"{ratio:.1f}"
            places.append(Place(tag, f"{where} ({times} times as large as elsewhere)", ask))
    return places


def _shapes(case: Case) -> Iterator[Place]:
    """How differences depend on the probability of a token."""
    pairs = case.pairs
    d, p = pairs.difference, pairs.trainer
    large = d.abs() > 0.1 * d.abs().mean()
    gains = (d > 0).double()
    low, high = p.quantile(torch.tensor([0.33, 0.67], dtype=torch.float64))

    def tilt(these: Tensor) -> float:
        """The share of likely tokens that gain, minus the share of unlikely ones."""
        likely, unlikely = these & (p >= high), these & (p <= low)
        few = min(int(likely.sum()), int(unlikely.sum())) < 2
        return 0.0 if few else float(gains[likely].mean() - gains[unlikely].mean())

    overall = tilt(large)
    late = pairs.rank >= int(pairs.rank.max() + 1) // 2
    halves = [tilt(large & half) for half in (late, ~late)]
    by_row = [abs(tilt(large & (pairs.row == row))) for row in torch.unique(pairs.row)]
    in_rows = sum(by_row) > 1.5 * TILT * len(by_row)
    if max(abs(overall), *map(abs, halves)) > TILT or in_rows:
        way = "lose and unlikely ones gain" if overall < 0 else "gain and unlikely ones lose"
        some = "in each row its own way" if in_rows else "in a part of each row"
        some = "everywhere" if abs(overall) > TILT else some
        yield Place(
            "sharpness",
            f"{some}: likely tokens {way}, as if one distribution is sharper",
            "Print temperature and logit soft cap of the engine and of the scoring code.",
        )
    if (_noise_shape(case) == 1).all():
        yield Place(
            "uniform",
            "everywhere: as large at likely as at unlikely tokens, unlike a change of the model",
            "Look for code that changes log-probabilities after the softmax, such as rounding.",
        )
    else:
        yield Place(
            "network",
            "everywhere, larger at unlikely tokens, as a change inside the model makes them",
            _network_next(case),
        )


def _network_next(case: Case) -> str:
    if case.scorer is None:
        return "Pass model=, ids= and prompts= as well, so that causes inside the model are tested."
    if [side for side, _ in case.sides] == ["old_logp"]:
        return DROPOUT_NEXT
    experts = "chosen experts and " if routers(case.scorer.model) else ""
    return ENGINE_NEXT.format(parts=f"{experts}hidden states")


ROWS_NEXT = (
    "Find out which worker or engine made these rows. Compare its weight version (last sync) with "
    "that of the worker that made the other rows. If they are equal, run the doctor on these rows "
    "alone; pass earlier_logp= (their tokens scored with the previous step's weights) to test for "
    "stale weights."
)
PROMPT_NEXT = (
    "Print the prompt's token ids of one row as each side saw them. If they differ, look at the "
    "chat template, system prompt, BOS and truncation. If they are equal, let the engine score the "
    "trainer's ids (vLLM: prompt_logprobs=1), and run the doctor on these numbers."
)
END_NEXT = "Print the last three tokens of five rows with both log-probabilities and the mask."
LATE_NEXT = "Print position ids, RoPE scaling and attention window of both sides for one long row."
PENALTY_NEXT = "Print the engine's repetition, presence and frequency penalties; turn them off."
BIAS_NEXT = (
    "Print the engine's logit_bias, bad_words, penalties, top_k, min_p and grammar; turn off those "
    "that are set, and run again."
)
DROPOUT_NEXT = (
    "Score the batch twice with the trainer's own code. If the results differ, dropout is on: call "
    "model.eval(). If they are equal, compare its logits with those of the model "
    "that you passed to the doctor as model=."
)
ENGINE_NEXT = (
    "Take these steps in order.\n"
    "  (1) Let the engine score 8 whole sequences of the trainer's ids (vLLM: prompt_logprobs=1).\n"
    "  (2) If both sides agree on them, the engine saw another prompt, or only its decoding is "
    "different (as with a quantised KV cache): compare the prompt ids; go on if they are equal.\n"
    "  (3) Load the trainer's current weights into the engine, and sample again. If both sides "
    "agree now, the weights were stale; earlier_logp= (these tokens scored with the previous "
    "step's weights) lets the doctor test for that.\n"
    "  (4) If not, use an unquantised KV cache (vLLM: kv_cache_dtype=auto), then unquantised "
    "weights in float32. The switch that removes the difference is the cause.\n"
    "  (5) Otherwise compare {parts} layer by layer."
)
