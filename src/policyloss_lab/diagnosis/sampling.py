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

from policyloss_lab.diagnosis.forward import Scorer
from policyloss_lab.diagnosis.hypothesis import Case, Fit, misfit, roughness

OUTSIDE = 10.0  # the error of a hypothesis at a sampled token that it excludes, in nats
ONE_WAY = 0.02  # the largest share of differences with the other sign
COARSE = 256  # tokens of the coarse search over two numbers
BRANCHES = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)


def best_of(
    values: Sequence[float], predict: Callable[[float], Tensor], case: Case
) -> tuple[float, Tensor]:
    """The value with the best prediction, and that prediction."""
    d, shape = case.pairs.difference, case.pairs.shape
    scored = [(roughness(d - predict(v), shape), v) for v in values]
    value = min(scored)[1]
    return value, predict(value)


def refined(
    values: Sequence[float], predict: Callable[[float], Tensor], case: Case, rounds: int = 3
) -> tuple[float, Tensor]:
    """`best_of`, repeated on a finer logarithmic grid between the neighbours of the best."""
    grid = sorted(values)
    for _ in range(rounds):
        value, _ = best_of(grid, predict, case)
        i = grid.index(value)
        low, high = grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]
        grid = sorted({value, *geometric(low, high, 9)})
    return best_of(grid, predict, case)


def geometric(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from low to high, evenly spaced in the logarithm."""
    step = (math.log(high) - math.log(low)) / (count - 1)
    return [math.exp(math.log(low) + i * step) for i in range(count)]


def one_way(case: Case) -> bool:
    """Whether nearly all differences above noise have the same sign, as after a cut."""
    d = case.pairs.difference
    large = d[d.abs() > 1e-3 * case.pairs.shape]
    ups = float((large > 0).double().mean()) if large.numel() else 0.5
    return min(ups, 1 - ups) < ONE_WAY


TEMPERATURES = geometric(0.2, 5.0, 41)


def _sentence(side: str, what: str) -> str:
    return f"{side} is that of {what}"


@dataclass(frozen=True)
class Temperature:
    """One side divides its logits by a temperature.

    With logits z the prediction is exact: `log softmax(z/τ) - log softmax(z)`. With the entropy H
    the prediction is `(1/τ - 1)·(logp + H)`. With pairs alone, K equally likely tokens represent
    all tokens that were not sampled: `p' = p^β / (p^β + (1 - p)^β·K^(1-β))` with β = 1/τ.
    """

    def fit(self, case: Case) -> Iterator[Fit]:
        """The best temperature of each side."""
        if case.scorer is None and one_way(case):
            return  # a temperature changes likely and unlikely tokens in opposite directions
        for side, sign in case.sides:
            tau, prediction, branches = self._best(case, sign)
            details: dict[str, float | str] = {"temperature": tau, "side": side}
            yield Fit(
                "temperature",
                _sentence(side, f"temperature {tau:.3g}"),
                prediction,
                freedom=1 if branches is None else 2,
                details=details if branches is None else {**details, "branches": branches},
            )

    def _best(self, case: Case, sign: int) -> tuple[float, Tensor, float | None]:
        scorer, pairs = case.scorer, case.pairs
        if scorer is not None:
            logits, base = scorer.logits, scorer.logp
            tau, prediction = refined(
                TEMPERATURES, lambda v: sign * (scorer.of_ids(logits / v) - base), case
            )
            return tau, prediction, None
        if pairs.entropy is not None:
            slope = sign * (pairs.trainer + pairs.entropy)
            tau, prediction = refined(TEMPERATURES, lambda v: (1 / v - 1) * slope, case)
            return tau, prediction, None
        sound = pairs.trainer if sign > 0 else pairs.rollout
        fits = []
        for k in BRANCHES:
            tau, prediction = refined(TEMPERATURES, partial(_guess, sound, sign, k), case, rounds=2)
            left = misfit(pairs.difference - prediction, pairs.shape, 2).scale
            fits.append((left, tau, prediction, k))
        _, tau, prediction, k = min(fits, key=lambda fit: fit[0])
        return tau, prediction, k


def _guess(logp: Tensor, sign: int, branches: float, tau: float) -> Tensor:
    logp = logp.clamp(max=0.0)  # noise may lift a log-probability above 0
    return sign * (_scaled(logp, 1 / tau, branches) - logp)


def _scaled(logp: Tensor, beta: float, branches: float) -> Tensor:
    rest = torch.log(-torch.expm1(logp.clamp(max=-1e-12)))
    other = beta * rest + (1 - beta) * math.log(branches)
    return beta * logp - torch.logaddexp(beta * logp, other)


@dataclass(frozen=True)
class Renormalised:
    """One side renormalises over the tokens that a cut keeps: `logp - log(kept mass)`."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The best top-p, top-k and min-p of each side; from pairs alone, the best top-p."""
        for side, sign in case.sides:
            if case.scorer is None:
                yield from self._from_pairs(case, side, sign)
                continue
            logits = case.scorer.logits
            ordered = logits.double().sort(1, descending=True).values
            table = _Sorted.of((logits, ordered), case.scorer.ids)
            for cause, values in CUTS.items():
                effect = partial(table.effect, cause, sign)
                value, prediction = (
                    best_of(values, effect, case)
                    if cause == "top_k"
                    else refined(values, effect, case)
                )
                yield Fit(
                    cause,
                    _sentence(side, f"the tokens that {cause} = {value:.4g} keeps, renormalised"),
                    prediction,
                    freedom=1,
                    details={cause: value, "side": side},
                )

    def _from_pairs(self, case: Case, side: str, sign: int) -> Iterator[Fit]:
        """A token with p > top-p is the only kept one and gets probability 1; all other sampled
        tokens gain the same amount.
        """
        if not one_way(case):
            return
        base = case.pairs.trainer if sign > 0 else case.pairs.rollout
        d = sign * case.pairs.difference

        def effect(p: float) -> Tensor:
            rest = base < math.log(p)
            gain = d[rest].median().clamp(0, -math.log(p)) if rest.any() else d.new_zeros(())
            return sign * torch.where(rest, gain, -base)

        value, prediction = refined(CUTS["top_p"], effect, case, rounds=2)
        yield Fit(
            "top_p",
            _sentence(side, f"the tokens that top_p = {value:.3g} keeps, renormalised"),
            prediction,
            freedom=2,
            details={"top_p": value, "side": side},
        )


@dataclass(frozen=True)
class TemperatureAndCut:
    """One side applies a temperature and then a top-p."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """The best pair of temperature and top-p, searched on some tokens and then on all."""
        if case.scorer is None:
            return
        scorer = case.scorer
        few = torch.linspace(0, case.pairs.size - 1, min(COARSE, case.pairs.size)).long()
        small = Case(case.pairs.select(few))
        d, shape = small.pairs.difference, small.pairs.shape
        base = scorer.logp
        ordered = scorer.logits.double().sort(1, descending=True)
        some = (scorer.logits[few], ordered.values[few])
        every = (scorer.logits, ordered.values)
        for side, sign in case.sides:
            scores = []
            for tau in geometric(0.4, 2.0, 25):
                table = _Sorted.of(some, scorer.ids[few], tau)
                start = table.logp - base[few]
                for p in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.99):
                    effect = sign * start + table.effect("top_p", sign, p)
                    scores.append((roughness(d - effect, shape), tau, p))
            _, tau, p = min(scores)
            joint = partial(_joint, scorer, every, sign)
            for _ in range(2):
                taus = [tau * 0.95, tau, tau * 1.05]
                tau, _ = refined(taus, partial(joint, p), case, rounds=2)
                cuts = [max(p - 0.05, 0.02), p, min(p + 0.03, 0.999)]
                p, prediction = refined(cuts, partial(joint, tau=tau), case, rounds=2)
            yield Fit(
                "temperature+top_p",
                _sentence(side, f"temperature {tau:.3g} and top_p = {p:.3g}, renormalised"),
                prediction,
                freedom=2,
                details={"temperature": tau, "top_p": p, "side": side},
            )


def _joint(
    scorer: Scorer, logits: tuple[Tensor, Tensor], sign: int, p: float, tau: float
) -> Tensor:
    table = _Sorted.of(logits, scorer.ids, tau)
    return sign * (table.logp - scorer.logp) + table.effect("top_p", sign, p)


CUTS: dict[str, list[float]] = {
    "top_p": [0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995],
    "top_k": [*map(float, range(1, 65)), 80, 100, 128, 200, 256, 400, 512, 1000, 1024],
    "min_p": geometric(0.002, 0.5, 20),
}


@dataclass(frozen=True)
class _Sorted:
    """The sorted probabilities at each position, and the log-probability of the sampled token."""

    cumulative: Tensor
    logp_sorted: Tensor
    logp: Tensor

    @classmethod
    def of(cls, logits: tuple[Tensor, Tensor], ids: Tensor, tau: float = 1.0) -> _Sorted:
        """logits: plain, and sorted; a temperature does not change their order."""
        plain, ordered = logits
        total = (ordered / tau).logsumexp(1)
        sorted_logp = ordered / tau - total[:, None]
        chosen = plain.gather(1, ids[:, None])[:, 0].double() / tau - total
        return cls(sorted_logp.exp().cumsum(1), sorted_logp, chosen)

    def effect(self, cut: str, sign: int, value: float) -> Tensor:
        """`-log(kept mass)`, or `OUTSIDE` for tokens that the cut removes, times `sign`."""
        most = self.cumulative.shape[1] - 1
        if cut == "top_p":
            bound = torch.full_like(self.logp, value)[:, None]
            last = torch.searchsorted(self.cumulative, bound)[:, 0].clamp(max=most)
        elif cut == "top_k":
            last = torch.full_like(self.logp, min(value, most + 1) - 1).long()
        else:
            bound = self.logp_sorted[:, :1] + math.log(value)
            last = (self.logp_sorted >= bound).sum(1) - 1
        mass = self.cumulative.gather(1, last[:, None])[:, 0]
        least = self.logp_sorted.gather(1, last[:, None])[:, 0]
        return sign * torch.where(self.logp >= least, -mass.clamp(max=1.0).log(), OUTSIDE)
