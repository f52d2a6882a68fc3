"""Hypotheses about sampling that only one side applies: a temperature, or a cut (top-p, top-k,
min-p) with renormalised probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from policyloss_lab.diagnosis.hypothesis import Case, Fit, misfit

OUTSIDE = 10.0  # the error of a hypothesis at a sampled token that it excludes, in nats
BRANCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
GROUP = 6  # the least mean number of tokens that share a temperature of their own
LIKELY = 0.5  # above it, a token gains for certain if the distribution is sharpened
ONE_WAY = 0.02  # the largest share of differences with the other sign
NEARLY_1 = 0.03  # the logarithm of a temperature that is as good as 1
SIGNS = 0.95  # the least share of likely tokens that move as a temperature moves them


def refined(
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


TEMPERATURES = geometric(0.2, 5.0, 41)


def fit_temperature(case: Case) -> Iterator[Fit]:
    """One side divides its logits by a temperature: of the batch, of each row, or of each place.

    With logits z the prediction is exact: `log softmax(z/τ) - log softmax(z)`. With the entropy H
    the prediction is `(1/τ - 1)·(logp + H)`. With pairs alone, K equally likely tokens represent
    all tokens that were not sampled: `p' = p^β / (p^β + (1 - p)^β·K^(1-β))` with β = 1/τ.
    """
    scorer, pairs = case.scorer, case.pairs
    for side, sign in case.sides:
        if scorer is not None:
            predict = partial(_exact_temperature, case, sign)
        elif pairs.entropy is not None:
            predict = partial(_tilted, sign * (pairs.trainer + pairs.entropy))
        else:
            yield from _temperature_from_pairs(case, side, sign)
            continue
        for what, groups in _groups(case):
            taus, prediction = refined(TEMPERATURES, predict, case, groups)
            low, high = float(taus.min()), float(taus.max())
            tail = f" {low:.3g}"
            if groups is not None:
                tail = f"s of {low:.3g} to {high:.3g}, one for {what}"
            yield Fit(
                "temperature",
                f"{side} is that of temperature{tail}",
                prediction,
                freedom=taus.numel(),
                share="explains" if scorer is not None else "rough",
                details={"temperature": float(taus.median()), "side": side, "by": what},
            )


def _exact_temperature(case: Case, sign: int, tau: Tensor) -> Tensor:
    assert case.scorer is not None
    logits = case.scorer.logits / tau[:, None].float()
    return sign * (case.scorer.of_ids(logits) - case.scorer.logp)


def _tilted(slope: Tensor, tau: Tensor) -> Tensor:
    return (1 / tau - 1) * slope


def _groups(case: Case) -> Iterator[tuple[str, Tensor | None]]:
    """The tokens that may share a temperature: all, those of a row, those at a place of rows."""
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
        (tau,), prediction = refined(TEMPERATURES, partial(_guess, sound, sign, k), case, rounds=2)
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
        f"{side} is that of temperature {float(tau):.3g}, or of a soft cap",
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


def fit_cuts(case: Case) -> Iterator[Fit]:
    """One side renormalises over the tokens that a cut keeps: `logp - log(kept mass)`."""
    if case.scorer is None:
        return
    logits = case.scorer.logits
    ordered = logits.double().sort(1, descending=True).values
    table = _Sorted.of((logits, ordered), case.scorer.ids)
    for side, sign in case.sides:
        for cause, values in CUTS.items():
            rounds = 0 if cause == "top_k" else 3
            (value,), prediction = refined(
                values, partial(table.effect, cause, sign), case, rounds=rounds
            )
            yield Fit(
                cause,
                f"{side} is that of the tokens that {cause} = {float(value):.4g} keeps, "
                "renormalised",
                prediction,
                freedom=1,
                details={cause: float(value), "side": side},
            )


def fit_temperature_and_cut(case: Case) -> Iterator[Fit]:
    """One side applies a temperature and then a top-p: the best pair of a coarse grid, and then
    each of the two refined in turn.
    """
    if case.scorer is None:
        return
    scorer, size = case.scorer, case.pairs.size
    ordered = scorer.logits.double().sort(1, descending=True).values

    def joint(sign: int, p: Tensor, tau: Tensor) -> Tensor:
        table = _Sorted.of((scorer.logits, ordered), scorer.ids, tau[:, None])
        return sign * (table.logp - scorer.logp) + table.effect("top_p", sign, p)

    cuts = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99]
    for side, sign in case.sides:
        starts = []
        for tau in geometric(0.4, 2.0, 25):
            at = partial(joint, sign, tau=torch.full((size,), tau).double())
            (p,), prediction = refined(cuts, at, case, rounds=0)
            starts.append((misfit(case.pairs.difference - prediction, case.pairs.shape, 2), tau, p))
        _, tau, p = min(starts, key=lambda start: start[0].scale)
        for _ in range(2):
            at = partial(joint, sign, p.expand(size))
            (t,), _ = refined([tau * 0.95, tau, tau * 1.05], at, case, rounds=2)
            tau = float(t)
            at = partial(joint, sign, tau=t.expand(size))
            near = [max(float(p) - 0.05, 0.02), float(p), min(float(p) + 0.03, 0.999)]
            (p,), prediction = refined(near, at, case, rounds=2)
        if abs(math.log(tau)) < NEARLY_1:
            continue  # then it is a cut alone
        yield Fit(
            "temperature+top_p",
            f"{side} is that of temperature {tau:.3g} and top_p = {float(p):.3g}, renormalised",
            prediction,
            freedom=2,
            details={"temperature": tau, "top_p": float(p), "side": side},
        )


@dataclass(frozen=True)
class _Sorted:
    """The sorted probabilities at each position, and the log-probability of the sampled token."""

    cumulative: Tensor
    logp_sorted: Tensor
    logp: Tensor

    @classmethod
    def of(cls, logits: tuple[Tensor, Tensor], ids: Tensor, tau: Tensor | float = 1.0) -> _Sorted:
        """logits: plain, and sorted; a temperature does not change their order."""
        plain, ordered = logits
        scaled = ordered / tau
        total = scaled.logsumexp(1, keepdim=True)
        chosen = plain.gather(1, ids[:, None]).double() / tau - total
        return cls((scaled - total).exp().cumsum(1), scaled - total, chosen[:, 0])

    def effect(self, cut: str, sign: int, value: Tensor) -> Tensor:
        """`-log(kept mass)`, or `OUTSIDE` for tokens that the cut removes, times `sign`."""
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
        return sign * torch.where(self.logp >= least, -mass.clamp(max=1.0).log(), OUTSIDE)
