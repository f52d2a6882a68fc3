"""Chooses among the hypotheses; the docstring of `diagnose` lists the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from policyloss_lab.diagnosis.columns import ORDERS, VALUES
from policyloss_lab.diagnosis.forward import routers
from policyloss_lab.diagnosis.hypothesis import Case, Fit, Hypothesis, Misfit, misfit
from policyloss_lab.diagnosis.logits import LOGITS, fit_temperature, fit_temperature_and_cut
from policyloss_lab.diagnosis.pairs import LEAST_TOKENS
from policyloss_lab.diagnosis.place import Place, find_places, loud_rows
from policyloss_lab.diagnosis.simulated import SIMULATED, fit_earlier, fit_prompts
from policyloss_lab.diagnosis.verdict import CAUSES, FAMILIES, HARMLESS, Alternative, Diagnosis


@dataclass(frozen=True)
class Thresholds:
    """The numbers of the verdict. "Share" means share of the scale of all differences; "far" means
    a difference that noise rarely reaches. docs/doctor.md gives the reasons.
    """

    floor: float = 0.05  # the healthy scale without a model, in nats of an unlikely token
    noise: float = 3.0  # with a model, the healthy multiple of the bf16 noise measured on it
    exact: float = 1e-5  # the scale of float32 rounding; below it nothing is searched for
    gain: float = 12.0  # the least improvement of the score, over no cause and over other families
    explains: float = 0.1  # the largest share that a named cause leaves; exceptions:
    partly: float = 0.5  # if the rest is below the floor and the scale is above it
    quiet: float = 0.3  # if the scale is below the floor, too
    fixed: float = 0.97  # formats and older weights, which fit no number, if the rest is healthy
    rough: float = 0.3  # a temperature from pairs alone; tokens after a word was encoded again
    order: float = 0.9  # an order behind which a second cause is named
    few_numbers: int = 2  # the most fitted numbers of a cause that leaves more than `explains`
    rest: float = 0.02  # the share of a cheap cause below which no other family is simulated
    ruled_out: float = 0.5  # the least share, of the scale or of far tokens, left by a wrong fit
    far: float = 4.0  # times the floor (without a model, times `noise` as well)
    wild: float = 0.004  # the least share of far tokens that noise cannot explain
    flips: float = 0.02  # the same of scattered tokens, if the model may have routers
    least_far: int = 2  # fewer far tokens may be chance
    extreme: float = 5.0  # times as far: of these, one in 50 wild tokens is enough
    sided: float = 0.98  # the least share of one sign if tokens were removed from the support
    least_sided: int = 12  # fewer differences may have one sign by chance
    least_twins: int = 8  # fewer numbers outside of the mask may be equal by chance


# The share of verdicts of each kind that are right, as `benchmarks.doctor_heldout --count` fits it.
CONFIDENCE = {
    "model": {"healthy": 0.982, "named": 0.986, "not_explained": 0.914},
    "pairs": {"healthy": 0.982, "named": 0.92, "not_explained": 0.9},
}
SAMPLES = ("format", "config", "prompt")  # families of which only some members are simulated
UNTESTED = (
    "not tested without model=: penalties; biased tokens; the prompt; padding; formats of "
    "logits, weights and KV cache; configuration; adapters; vocabulary shard"
)
NUMBERS: tuple[Hypothesis, ...] = (*VALUES, fit_temperature, fit_earlier)


class Fitted(NamedTuple):
    """A fit and the misfit that remains after it."""

    fit: Fit
    left: Misfit

    @property
    def families(self) -> frozenset[str]:
        """The families of its causes."""
        return frozenset(CAUSES[cause].family for cause in self.fit.cause.split("+"))


@dataclass
class Search:
    """The state of a diagnosis. floor: the healthy scale. tested: all fits. candidates: two causes
    that explain the case equally well. held_out: families not to be named, for the benchmark.
    """

    case: Case
    limits: Thresholds
    others: Sequence[Sequence[int]] | None
    held_out: frozenset[str]

    def __post_init__(self) -> None:
        case, limits = self.case, self.limits
        self.tested: list[Fitted] = []
        self.candidates: tuple[str, ...] = ()
        self.floor, self.wild_share, self.flips = limits.floor, limits.wild, limits.flips
        self.distance = limits.far * limits.noise * limits.floor
        if case.scorer is not None:
            noise, shape = case.scorer.half_precision("bf16 noise"), case.pairs.shape
            self.floor = limits.noise * misfit(noise, shape, 0).scale
            # A router that chooses another expert in bf16 moves a token as far as a new model.
            if not routers(case.scorer.model):
                self.distance, self.flips = limits.far * self.floor, 0.0
            far = (noise / shape).abs() > self.distance
            self.wild_share = max(limits.wild, 3 * float(far.double().mean()))

    def is_wild(self, residual: Tensor, shape: Tensor) -> bool:
        """Whether some tokens differ far more than noise allows. Under Student's t, three of 10,000
        lie beyond 12 scales; a mixture of experts in bf16 has more, as its measured noise shows.
        """
        size = (residual / shape)[~residual.isnan()].abs()
        count, extreme = (
            int((size > times * self.distance).sum()) for times in (1, self.limits.extreme)
        )
        most = self.wild_share * size.numel()
        return count >= max(self.limits.least_far, most) or extreme >= max(1, most / 50)

    def is_quiet(self, case: Case) -> bool:
        """Whether all differences are healthy."""
        d, shape = case.pairs.difference, case.pairs.shape
        return misfit(d, shape, 0).scale <= self.floor and not self.is_wild(d, shape)

    def rank(self, fits: Iterable[Fit], case: Case, others: Sequence[Fitted] = ()) -> list[Fitted]:
        """The fits and the others, best first; two causes must beat one by `gain`."""
        rows = [Fitted(fit, case.misfit(fit)) for fit in fits]
        rows = [row for row in rows if not row.families & self.held_out]
        self.tested += rows
        gain = self.limits.gain
        return sorted([*others, *rows], key=lambda x: x.left.score + gain * x.fit.cause.count("+"))

    def explains(self, row: Fitted, case: Case) -> bool:
        """Whether a fit beats noise and leaves next to nothing, or no more than the noise floor."""
        first, limits = case.first, self.limits
        if row.left.score > first.score - limits.gain:
            return False
        share, below = row.left.scale / first.scale, row.left.scale <= self.floor
        residual = row.fit.residual(case.pairs)
        calm = below and not self.is_wild(residual, case.pairs.shape)
        if row.fit.masks:
            return calm
        far = max(self.distance, first.scale) * case.pairs.shape  # few tokens hardly move the scale
        before, after = (int((x.abs() > far).sum()) for x in (case.pairs.difference, residual))
        if not calm and after >= max(limits.least_far, limits.ruled_out * before):
            return False
        if row.fit.share == "rough":
            return share <= limits.rough
        if share <= limits.explains:
            return True
        if row.fit.share == "fixed":
            return calm and share <= limits.fixed
        few = row.fit.freedom <= limits.few_numbers
        if first.scale > self.floor:
            return few and below and share <= limits.partly
        return few and calm and share <= limits.quiet

    def best(self, rows: Sequence[Fitted], case: Case) -> Fitted | None:
        """The best fit that explains the case, if no other family explains it as well."""
        named = [row for row in rows if self.explains(row, case)]
        if not named:
            return None
        first = named[0]
        rivals = [row for row in named if not row.families & first.families]
        if rivals and rivals[0].left.score < first.left.score + self.limits.gain:
            self.candidates = (first.fit.cause, rivals[0].fit.cause)
            return None
        return first

    def effect(self, case: Case) -> Fitted | None:
        """The cause that predicts each difference."""
        rows = self.rank((fit for h in NUMBERS for fit in h(case)), case)
        if (scorer := case.scorer) is None:
            return self.best(rows, case)

        def more(*hypotheses: Hypothesis) -> list[Fitted]:
            return self.rank((fit for h in hypotheses for fit in h(case, scorer)), case, rows)

        first = case.first.scale
        enough = self.limits.rest * first
        rows = more(*LOGITS)
        parts = [row.left.scale for row in rows if row.families & {"temperature", "cut"}]
        if rows and rows[0].left.scale > 0.1 * enough and min(parts, default=first) < 0.97 * first:
            rows = more(fit_temperature_and_cut)  # one explains something: perhaps both do all
        if not rows or rows[0].left.scale > enough:
            rows = more(*SIMULATED, partial(fit_prompts, others=self.others))
        return self.best(rows, case)

    def causes(self, case: Case) -> list[Fitted]:
        """The order, the effect, or both that explain the case; none if nothing does."""
        first = case.first
        order = next(iter(self.rank((fit for h in ORDERS for fit in h(case)), case)), None)
        enough = max(self.floor, self.limits.rest * first.scale)
        if order is not None and order.left.scale <= enough and self.explains(order, case):
            return [order]
        effect = self.effect(case)
        if effect is not None and (order is None or effect.left.score < order.left.score):
            return [effect]
        if order is None or order.left.score > first.score - self.limits.gain:
            return []
        if order.fit.cause != "reencoded" and order.left.scale <= self.limits.order * first.scale:
            assert order.fit.source is not None
            second = self.effect(case.realigned(order.fit.source))
            if second is not None and not second.fit.masks:
                return [order, second]
        one = order if self.explains(order, case) else effect
        return [] if one is None else [one]


def diagnose(
    case: Case,
    thresholds: Thresholds,
    others: Sequence[Sequence[int]] | None = None,
    held_out: frozenset[str] = frozenset(),
) -> Diagnosis:
    """The verdict on a case. The order of the tests is the algorithm:

    1. Equality. If both sides agree to the last digits, they are healthy; a copy is named only if
       something other than equality shows it.
    2. Order. If the numbers are shifted, permuted or tokenised differently, they are realigned,
       because no other test makes sense before that.
    3. Effects. The hypothesis that best predicts the difference of each token is named if it
       explains the discrepancy (`Search.explains`) and beats every other family clearly. Cheap
       hypotheses come first; those that run the model follow unless a cheap one leaves nothing.
    4. Rows. If nothing explains the batch, and some rows are louder than the others, steps 2 and 3
       are repeated on these rows.
    5. Support. If all differences still have one sign, tokens were removed on one side.
    6. Health. If all differences are below the measured floor, the batch is healthy.
    7. Place. Otherwise it is not explained, and the verdict lists where the differences are, which
       families are ruled out, and what to measure next.
    """
    search = Search(case, thresholds, others, held_out)
    pairs = case.pairs
    if case.first.scale <= thresholds.exact and not search.is_wild(pairs.difference, pairs.shape):
        return _equal(search)  # step 1
    everywhere = rows = torch.ones(pairs.size, dtype=torch.bool)
    named = search.causes(case)  # steps 2 and 3
    if not named:  # step 4
        loud = loud_rows(case, search.floor)
        if LEAST_TOKENS <= int(loud.sum()) < pairs.size and search.is_quiet(case.select(~loud)):
            rows, named = loud, search.causes(case.select(loud))
    if not named and (fit := _fit_removed_tokens(search)) is not None:  # step 5
        rows, named = everywhere, [Fitted(fit, Misfit(0.0, 0.0))]
    if named:
        return _verdict_of_fit(search, named, rows)
    places = find_places(case, search.floor)
    if [place.tag for place in places] == ["few_tokens"]:  # scattered, as where a router flips
        search.wild_share = max(search.wild_share, search.flips)
    if search.is_quiet(case):
        return _verdict(search, ("healthy",))  # step 6
    return _not_explained(search, places)  # step 7


def _equal(search: Search) -> Diagnosis:
    """Step 1 of `diagnose`."""
    pairs = search.case.pairs
    if not bool((pairs.rollout == pairs.trainer).all()):
        return _verdict(search, ("healthy",))
    equal = f"all {pairs.size} log-probabilities are equal bit for bit"
    if pairs.twins >= search.limits.least_twins and "copy" not in search.held_out:
        equal += f", and so are {pairs.twins} outside of the mask, where engines have none"
        return _verdict(search, ("copy",), [equal])
    equal += ", as from an engine with the trainer's kernels or a copy of old_logp"
    remedy = "Confirm that rollout_logp comes from the engine; then nothing needs to be done."
    return replace(_verdict(search, ("healthy",), [equal]), remedy=remedy)


def _fit_removed_tokens(search: Search) -> Fit | None:
    """Step 5 of `diagnose`: likely tokens gain, too, by no fixed factor and not to a constant."""
    pairs = search.case.pairs
    d = pairs.difference
    far = (d / pairs.shape).abs() > 2 * search.floor
    inside = (pairs.rank > 0) & (pairs.remaining > 0)
    if int((far & inside).sum()) < search.limits.least_sided or "support" in search.held_out:
        return None
    ups = float((d[far] > 0).double().mean())
    side, gains, base = (
        ("rollout_logp", d, pairs.trainer) if ups > 0.5 else ("old_logp", -d, pairs.rollout)
    )
    likely = base >= base.quantile(0.75)
    if (scorer := search.case.scorer) is not None:
        likely = scorer.logits.argmax(1) == scorer.ids
    unlikely = far & (base < math.log(0.5))
    factors = (gains / base)[unlikely & (base + gains < -1e-3)]  # not the only token that is left
    factor = factors.numel() > 2 and bool(factors.std() < 0.2 * factors.mean().abs())
    equal = torch.unique((base + gains)[unlikely], return_counts=True)[1]
    constant = equal.numel() > 0 and int(equal.max()) > 0.5 * int(equal.sum())
    spread = far[likely].double().mean() >= 0.25 * far.double().mean()
    if max(ups, 1 - ups) < search.limits.sided or not spread or constant or factor:
        return None
    sentence = (
        f"{side} is the larger at all {int(far.sum())} tokens that differ, likely ones included: "
        "it is normalised over fewer tokens of the vocabulary"
    )
    prediction = torch.where(far, torch.nan, 0.0).double()
    return Fit("support", sentence, prediction, details={"side": side})


def _verdict_of_fit(search: Search, named: Sequence[Fitted], rows: Tensor) -> Diagnosis:
    """The verdict of steps 2 to 5. rows: a flag for each token of the rows that they explain."""
    case = search.case
    numbers, count = torch.unique(case.pairs.row[rows]), case.pairs.starts.numel() - 1
    some = "" if bool(rows.all()) else f"in {numbers.numel()} of {count} rows, "
    details: dict[str, object] = {"scale_left": named[-1].left.scale}
    evidence = []
    here = case.select(rows).first.scale
    for row in named:
        subject = "this explains" if row is named[0] else "together they explain"
        tail = f"{subject} {1 - row.left.scale / here:.0%} of the difference"
        if row.left.scale > search.limits.explains * here:
            tail += ", and the rest is as small as noise" if row.left.scale <= search.floor else ""
        evidence.append(f"{some}{row.fit.sentence}; {tail}")
        if row.fit.masks:
            evidence[-1] = f"{some}{row.fit.sentence}; the other tokens agree"
        details |= row.fit.details
    if some:
        details |= {"rows": numbers.tolist(), "share_of_rows": numbers.numel() / count}
    causes = tuple(dict.fromkeys(c for row in named for c in row.fit.cause.split("+")))
    verdict = _verdict(search, causes, evidence, details)
    if search.is_quiet(case):
        numbers = f"({case.first.scale:.2g}, limit {search.floor:.2g})"
        remedy = f"{HARMLESS} {numbers}. If you want it gone: {verdict.remedy}"
        return replace(verdict, remedy=remedy, correction=None)
    return verdict


def _not_explained(search: Search, places: Sequence[Place]) -> Diagnosis:
    """Step 7 of `diagnose`."""
    case = search.case
    # Next to a location, the shape that every change inside the model has would read as another.
    shown = [place.sentence for place in places if place.tag != "network" or not places[1:]]
    evidence = [] if case.scorer else [UNTESTED]
    evidence.append(f"where{', most telling first' * bool(shown[1:])}: {'; also '.join(shown)}")
    details: dict[str, object] = {}
    if case.scorer is not None and len(case.sides) == 1:
        side = case.sides[0][0]
        other = "old_logp" if side == "rollout_logp" else "rollout_logp"
        evidence.append(f"the model you passed (model=) agrees with {other}, so {side} is wrong")
        details["side"] = side
    if search.candidates:
        titles = " or ".join(CAUSES[c.split("+")[0]].title for c in search.candidates)
        evidence.append(f"two causes explain it equally well: {titles}")
        details["candidates"] = list(search.candidates)
    return _verdict(search, ("not_explained",), evidence, details, places)


def _verdict(
    search: Search,
    causes: tuple[str, ...],
    evidence: Sequence[str] = (),
    details: Mapping[str, object] | None = None,
    places: Sequence[Place] = (),
) -> Diagnosis:
    """The diagnosis, with the facts first and the best fit of each cause that was not chosen."""
    d, scale = search.case.pairs.difference, search.case.first.scale
    facts = [
        f"rollout_logp - old_logp, in nats: mean {float(d.mean()):+.3g}, mean absolute "
        f"{float(d.abs().mean()):.3g}, largest {float(d.abs().max()):.3g}; tokens of low "
        f"probability typically differ by {scale:.3g} (healthy: up to {search.floor:.3g})"
    ]
    if impossible := search.case.pairs.impossible:
        facts.append(
            f"{impossible} tokens have rollout_logp = -inf: the engine could not have sampled them"
        )
    best: dict[str, Alternative] = {}
    left: dict[str, float] = {}
    for row in sorted(search.tested, key=lambda row: row.left.scale):
        share, cause = row.left.scale / scale, row.fit.cause
        if cause in CAUSES and cause not in causes:
            best.setdefault(cause, Alternative(cause, row.fit.sentence, share, row.left.score))
            left.setdefault(CAUSES[cause].family, share)
    out = sorted(f for f, x in left.items() if x >= search.limits.ruled_out and f not in SAMPLES)
    confidence = CONFIDENCE["pairs" if search.case.scorer is None else "model"]
    corrections = [FAMILIES[CAUSES[cause].family].correction for cause in causes]
    return Diagnosis(
        causes[0],
        causes,
        confidence.get(causes[0], confidence["named"]),
        (*facts, *evidence),
        places[0].next if places else " ".join(CAUSES[cause].remedy for cause in causes),
        None if None in corrections else corrections[0],
        search.floor,
        d.numel(),
        {"scale": scale, "scale_left": scale, **(details or {})},
        tuple(best.values()),
        tuple(places),
        tuple(out) if places else (),
    )
