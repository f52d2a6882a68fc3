"""Hypotheses about the logits of one side: sampling options (a temperature, top-p, top-k, min-p,
penalties, biased or forbidden tokens), a soft cap, rounding, and a lost shard of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.hypothesis import Case, Fit, misfit

OUTSIDE = 10.0  # the error of a hypothesis at a sampled token that it excludes, in nats
BRANCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
GROUP = 6  # the least mean number of tokens that share a temperature of their own
LIKELY = 0.5  # above it, a token gains for certain if the distribution is sharpened
ONE_WAY = 0.02  # the largest share of differences with the other sign
NEARLY_1 = 0.05  # the logarithm of a temperature that is as good as 1
SIGNS = 0.95  # the least share of likely tokens that move as a temperature moves them


def refine_values(
    values: Sequence[float],
    predict: Callable[[Tensor], Tensor],
    case: Case,
    groups: Tensor | None = None,
    rounds: int = 3,
) -> tuple[Tensor, Tensor]:
    """The value of each group of tokens with the best prediction, and that prediction.

    predict: takes a value for each token. groups: the group of each token; None is one group. Each
    round searches a finer logarithmic grid between the neighbours of the best values.
    """
    d, shape = case.pairs.difference, case.pairs.shape
    group = torch.zeros(case.pairs.size, dtype=torch.long) if groups is None else groups
    count = int(group.max()) + 1
    grid = torch.tensor(sorted(values), dtype=torch.float64).expand(count, -1)
    for step in range(rounds + 1):
        costs = [((d - predict(v[group])) / shape).abs().sqrt() for v in grid.T]
        totals = torch.stack([torch.zeros(count).double().index_add(0, group, c) for c in costs])
        best = totals.argmin(0)[:, None]
        if step < rounds:
            low = grid.gather(1, (best - 1).clamp(min=0)).log()
            high = grid.gather(1, (best + 1).clamp(max=grid.shape[1] - 1)).log()
            finer = (low + (high - low) * torch.linspace(0, 1, 9).double()).exp()
            grid = torch.cat([grid.gather(1, best), finer], 1).sort(1).values
    chosen = grid.gather(1, best)[:, 0]
    return chosen, predict(chosen[group])


def geometric(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from low to high, evenly spaced in the logarithm."""
    step = (math.log(high) - math.log(low)) / (count - 1)
    return [math.exp(math.log(low) + i * step) for i in range(count)]


def fit_number(
    case: Case,
    cause: str,
    name: str,
    sentence: str,
    values: Sequence[float],
    effect: Callable[[Tensor], Tensor],
    rounds: int = 3,
    show: Callable[[float], float] = float,
) -> Iterator[Fit]:
    """The best value of one number for each side that may be wrong. effect: the change of that
    side's log-probabilities. sentence: contains "{side}" and "{value}". show: of the value.
    """
    for side, sign in case.sides:
        (best,), prediction = refine_values(values, lambda v: sign * effect(v), case, rounds=rounds)  # noqa: B023
        value = show(float(best))
        details = {name: value, "side": side}
        text = sentence.format(side=side, value=value)
        yield Fit(cause, text, prediction, freedom=1, details=details)


TEMPERATURES = geometric(0.2, 5.0, 41)


def fit_temperature(case: Case) -> Iterator[Fit]:
    """One side divides its logits by a temperature: of the batch, of each row, or of each place.

    With logits z the prediction is exact: `log softmax(z/τ) - log softmax(z)`. With pairs alone, K
    equally likely tokens represent all tokens that were not sampled:
    `p' = p^β / (p^β + (1 - p)^β·K^(1-β))` with β = 1/τ.
    """
    for side, sign in case.sides:
        if case.scorer is None:
            yield from _temperature_from_pairs(case, side, sign)
            continue
        for what, groups in _groups(case):
            predict = partial(_exact_temperature, case.scorer, sign)
            taus, prediction = refine_values(TEMPERATURES, predict, case, groups)
            low, high = float(taus.min()), float(taus.max())
            tail = f"temperatures from {low:.3g} to {high:.3g}, one for {what}"
            tail = f"a temperature of {low:.3g}" if groups is None else tail
            yield Fit(
                "temperature",
                f"{side} has {tail}",
                prediction,
                freedom=taus.numel(),
                details={"temperature": float(taus.median()), "side": side, "by": what},
            )


def _exact_temperature(scorer: Scorer, sign: int, tau: Tensor) -> Tensor:
    return sign * (scorer.of_ids(scorer.logits / tau[:, None].float()) - scorer.logp)


def _groups(case: Case) -> Iterator[tuple[str, Tensor | None]]:
    """The tokens that may share a temperature: all, each row, or each place in a row."""
    pairs = case.pairs
    yield "the batch", None
    longest = int(pairs.rank.max()) + 1
    width = -(-GROUP * longest // pairs.size)
    for what, key in (("each row", pairs.row), ("each place in a row", pairs.rank // width)):
        _, groups = torch.unique(key, return_inverse=True)
        if 0 < int(groups.max()) < pairs.size // GROUP:
            yield what, groups


def _temperature_from_pairs(case: Case, side: str, sign: int) -> Iterator[Fit]:
    """The best guess, if nearly all likely tokens move as a temperature must move them."""
    pairs = case.pairs
    sound = (pairs.trainer if sign > 0 else pairs.rollout).clamp(max=0.0)  # noise may lift it
    fits = []
    for k in BRANCHES:
        (tau,), prediction = refine_values(
            TEMPERATURES, partial(_guess, sound, sign, k), case, rounds=2
        )
        left = misfit(pairs.difference - prediction, pairs.shape, 2).scale
        fits.append((left, tau, k, prediction))
    _, tau, k, prediction = min(fits, key=lambda fit: fit[0])
    large = pairs.difference.abs() > 0.1 * pairs.difference.abs().mean()
    ups = float((pairs.difference[large] > 0).double().mean())
    if min(ups, 1 - ups) < ONE_WAY:
        return  # a temperature moves likely and unlikely tokens in opposite directions
    likely = large & (sound > math.log(LIKELY))
    way = sign * (1 if tau < 1 else -1)
    moved = (pairs.difference.sign() == way).double()
    if likely.any() and moved[likely].mean() < SIGNS:
        return
    yield Fit(
        "temperature",
        f"{side} has a temperature of {float(tau):.3g}, or a soft cap",
        prediction,
        freedom=2,
        share="rough",
        details={"temperature": float(tau), "side": side, "branches": k},
    )


def _guess(logp: Tensor, sign: int, branches: float, tau: Tensor) -> Tensor:
    beta = 1 / tau
    rest = torch.log(-torch.expm1(logp.clamp(max=-1e-12)))
    other = beta * rest + (1 - beta) * math.log(branches)
    return sign * (beta * logp - torch.logaddexp(beta * logp, other) - logp)


CUTS: dict[str, list[float]] = {
    "top_p": [0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995],
    "top_k": [*map(float, range(1, 65)), 80, 100, 128, 200, 256, 400, 512, 1000, 1024],
    "min_p": geometric(0.002, 0.5, 20),
}


def fit_cuts(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side renormalises over the tokens that a cut keeps: `logp - log(kept mass)`."""
    ordered = scorer.logits.double().sort(1, descending=True).values
    table = _Sorted(scorer, ordered)
    for cause, values in CUTS.items():
        sentence = f"{{side}} is normalised over the tokens that {cause} = {{value:.4g}} keeps"
        rounds = 0 if cause == "top_k" else 3
        effect = partial(table.effect, cause)
        yield from fit_number(case, cause, cause, sentence, values, effect, rounds)


def fit_temperature_and_cut(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side applies a temperature, then a top-p: the best of a grid, refined in turn."""
    size = case.pairs.size
    ordered = scorer.logits.double().sort(1, descending=True).values

    def joint(sign: int, p: Tensor, tau: Tensor) -> Tensor:
        table = _Sorted(scorer, ordered, tau[:, None])
        return sign * (table.logp - scorer.logp + table.effect("top_p", p))

    cuts = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99]
    for side, sign in case.sides:
        starts = []
        for tau in geometric(0.4, 2.0, 25):
            at = partial(joint, sign, tau=torch.full((size,), tau).double())
            (p,), prediction = refine_values(cuts, at, case, rounds=0)
            starts.append((misfit(case.pairs.difference - prediction, case.pairs.shape, 2), tau, p))
        _, tau, p = min(starts, key=lambda start: start[0].scale)
        for _ in range(2):
            at = partial(joint, sign, p.expand(size))
            (t,), _ = refine_values([tau * 0.95, tau, tau * 1.05], at, case, rounds=2)
            tau = float(t)
            at = partial(joint, sign, tau=t.expand(size))
            near = [max(float(p) - 0.05, 0.02), float(p), min(float(p) + 0.03, 0.999)]
            (p,), prediction = refine_values(near, at, case, rounds=2)
        if abs(math.log(tau)) < NEARLY_1:
            continue  # then it is a cut alone
        yield Fit(
            "temperature+top_p",
            f"{side} has a temperature of {tau:.3g} and top_p = {float(p):.3g}, renormalised",
            prediction,
            freedom=2,
            details={"temperature": tau, "top_p": float(p), "side": side},
        )


class _Sorted:
    """The sorted probabilities at each position, and the log-probability of the sampled token.
    ordered: the sorted logits, whose order a temperature does not change.
    """

    def __init__(self, scorer: Scorer, ordered: Tensor, tau: Tensor | float = 1.0) -> None:
        scaled = ordered / tau
        total = scaled.logsumexp(1, keepdim=True)
        chosen = scorer.logits.gather(1, scorer.ids[:, None]).double() / tau - total
        self.logp, self.logp_sorted = chosen[:, 0], scaled - total
        self.cumulative = self.logp_sorted.exp().cumsum(1)

    def effect(self, cut: str, value: Tensor) -> Tensor:
        """`-log(kept mass)`, or `OUTSIDE` for tokens that the cut removes."""
        most = self.cumulative.shape[1] - 1
        if cut == "top_p":
            bound = value[:, None].contiguous()
            last = torch.searchsorted(self.cumulative, bound)[:, 0].clamp(max=most)
        elif cut == "top_k":
            last = value.clamp(max=most + 1).long() - 1
        else:
            last = (self.logp_sorted >= self.logp_sorted[:, :1] + value.log()[:, None]).sum(1) - 1
        mass = self.cumulative.gather(1, last[:, None])[:, 0]
        least = self.logp_sorted.gather(1, last[:, None])[:, 0]
        return torch.where(self.logp >= least, -mass.clamp(max=1.0).log(), OUTSIDE)


SHARDS = (2, 4, 8)
BIASED = 32  # the most tokens that may have a bias
TOKENS_PER_BIAS = 12  # the least number of tokens for each fitted bias
FORBIDDEN = 0.05  # the largest share of their probability that forbidden tokens keep


def fit_top1(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side reports the likeliest token instead of the sampled one."""
    effect = scorer.logits.double().log_softmax(1).amax(1) - scorer.logp
    yield from case.fit_sides("top1", "{side} is the likeliest token's log-probability", effect)


def fit_softcap(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side caps its logits, `c·tanh(z/c)`, and the other does not, or caps them twice."""
    logits = scorer.logits.double()

    def capped(c: Tensor) -> Tensor:
        return scorer.of_ids(c[:, None] * torch.tanh(logits / c[:, None])) - scorer.logp

    sentence = "{side} has a soft cap of {value:.3g} on its logits, or a second one"
    yield from fit_number(case, "softcap", "softcap", sentence, geometric(1, 200, 25), capped)
    if (cap := getattr(scorer.config, "final_logit_softcapping", None)) is not None:
        bare = cap * torch.atanh((logits / cap).clamp(-1 + 1e-6, 1 - 1e-6))
        yield from case.fit_sides(
            "softcap",
            f"{{side}} lacks the model's soft cap of {cap:g}",
            scorer.of_ids(bare) - scorer.logp,
            {"softcap": cap, "missing": True},
        )


def fit_rounded_logits(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side rounds its logits to 16 bits before the softmax."""
    for cause, dtype in (("logits_bf16", torch.bfloat16), ("logits_fp16", torch.float16)):
        effect = scorer.of_ids(scorer.logits.to(dtype)) - scorer.logp
        name = str(dtype).removeprefix("torch.")
        yield from case.fit_sides(cause, f"the logits of {{side}} are rounded to {name}", effect)


def fit_shard(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """The vocabulary is split over 2, 4 or 8 ranks, and one side handles a shard wrongly: it leaves
    the shard out of the normaliser, has no logits for it, or normalises over the token's shard.
    """
    ids = scorer.ids
    logits = scorer.logits.double()
    vocabulary = logits.shape[1]
    chosen = logits.gather(1, ids[:, None])[:, 0]
    for shards in SHARDS:
        size = -(-vocabulary // shards)
        sums = torch.stack([part.logsumexp(1) for part in torch.split(logits, size, 1)], 1)
        count = sums.shape[1]
        if count < 2:
            continue
        mine = ids // size
        alone = chosen - sums.gather(1, mine[:, None])[:, 0]
        effects = {f"is normalised over 1 of {count} shards of the vocabulary": alone}
        for j in range(count):
            others = torch.cat([sums[:, :j], sums[:, j + 1 :]], 1).logsumexp(1)
            width = min(size, vocabulary - j * size)
            empty = torch.logaddexp(others, others.new_full((), width).log())
            zero = torch.where(mine == j, 0.0, chosen)
            tokens = (
                f"ids {j * size} to {j * size + width - 1}, vocabulary shard {j + 1} of {count}"
            )
            effects[f"is normalised without {tokens}"] = chosen - others
            effects[f"treats as 0 the logits of {tokens}"] = zero - empty
        for what, logp in effects.items():
            yield from case.fit_sides(
                "vocab_shard", f"{{side}} {what}", logp - scorer.logp, {"shards": count}, freedom=2
            )


def fit_penalties(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side penalises tokens that occurred before: repetition divides a positive logit and
    multiplies a negative one, and counts the prompt; presence and frequency subtract from logits,
    and count the completion alone.
    """
    everywhere, completion = counts_before(scorer, prompts=True), counts_before(scorer)

    def repetition(size: Tensor) -> Tensor:
        z, s = scorer.logits, size[:, None].float()
        z = torch.where(everywhere > 0, torch.where(z > 0, z / s, z * s), z)
        return scorer.of_ids(z) - scorer.logp

    def subtracted(counts: Tensor, factor: Tensor) -> Tensor:
        z = scorer.logits - factor[:, None].float().log() * counts
        return scorer.of_ids(z) - scorer.logp

    for name, values, effect in (
        ("repetition_penalty", geometric(0.5, 2, 17), repetition),
        ("presence_penalty", geometric(0.1, 10, 25), partial(subtracted, completion > 0)),
        ("frequency_penalty", geometric(0.1, 10, 25), partial(subtracted, completion)),
    ):
        sentence = f"{{side}} has {name} = {{value:.3g}}"
        show = float if effect is repetition else math.log
        yield from fit_number(case, "penalty", name, sentence, values, effect, show=show)


def counts_before(scorer: Scorer, prompts: bool = False) -> Tensor:
    """`[n, V]`: the count of each token before each scored one. prompts: count these, too."""
    out = torch.zeros(scorer.logits.shape, dtype=torch.int16)
    for k, (row, place) in enumerate(scorer.scored.tolist()):
        before = scorer.completions[row][:place]
        tokens = torch.tensor([*scorer.prompts[row], *before] if prompts else before)
        out[k].index_add_(0, tokens.long(), torch.ones(len(tokens), dtype=torch.int16))
    return out


def fit_min_tokens(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side forbids the end tokens at the beginning of a completion (min_tokens)."""
    end = getattr(scorer.config, "eos_token_id", None)
    ends = [i for i in (end if isinstance(end, list) else [end]) if i is not None]
    gain = -torch.log1p(-scorer.logits.double().softmax(1)[:, ends].sum(1).clamp(max=1 - 1e-9))
    place = scorer.scored[:, 1]
    yield from fit_number(
        *(case, "support", "min_tokens"),
        "{side} forbids the end token among the first {value:.0f} tokens (min_tokens)",
        range(1, int(place.max()) + 2),
        lambda least: torch.where(place < least, gain, 0.0),
        rounds=0,
    )


def fit_bias(case: Case, scorer: Scorer) -> Iterator[Fit]:
    """One side adds a bias to the logits of some tokens, or forbids them.

    With the weight `w = exp(-effect)` of a sampled token i, and `c = exp(bias) - 1` of each biased
    token, `w - 1 = Σ p·c - w·c_i`. That is linear in c, and few c are not 0: the tokens are chosen
    one by one, each the one that explains most of the rest.
    """
    n = case.pairs.size
    p = scorer.logits.double().softmax(1)
    for side, sign in case.sides:
        w = (-sign * case.pairs.difference).clamp(-10, 10).exp()
        design = p.clone()
        design[torch.arange(n), scorer.ids] -= w
        heavy = 1 / torch.maximum(w, torch.ones_like(w))[:, None]  # a rare large w is no more
        design, target = heavy * design, heavy[:, 0] * (w - 1)
        lengths = design.square().sum(0).sqrt().clamp(min=1e-3)
        rest, c = target, target[:0]
        chosen: list[int] = []
        while len(chosen) < min(BIASED, n // TOKENS_PER_BIAS):
            chosen.append(int(((design.T @ rest).abs() / lengths).argmax()))
            columns = design[:, chosen]
            c = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
            rest = target - columns @ c
            if rest.norm() < 0.02 * target.norm():
                break
        bias = torch.zeros(p.shape[1], dtype=torch.float64)
        bias[chosen] = c.clamp(-1 + 1e-9, 1e6).log1p()
        effect = bias[scorer.ids] - (p @ torch.expm1(bias)).log1p()
        strong = [i for i in chosen if abs(float(bias[i])) > 0.1]
        if not strong:
            continue
        kept = bias[strong].exp()
        forbidden = float(kept.median()) < FORBIDDEN and float(kept.max()) < 1
        listed = ", ".join(f"{i}: {float(bias[i]):+.2g}" for i in strong[:6])
        more = f" and {len(strong) - 6} more" if len(strong) > 6 else ""
        what = "forbids some tokens, or nearly" if forbidden else "has a bias of some tokens"
        yield Fit(
            "support" if forbidden else "logit_bias",
            f"{side} {what} (token id: bias of its logit; {listed}{more})",
            sign * effect,
            freedom=len(chosen),
            details={"ids": strong, "side": side},
        )


LOGITS = (  # cheap: the model is not run again
    *(fit_cuts, fit_softcap, fit_rounded_logits, fit_shard, fit_penalties, fit_bias),
    *(fit_min_tokens, fit_top1),
)
