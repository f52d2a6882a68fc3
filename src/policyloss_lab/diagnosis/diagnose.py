"""Chooses among the hypotheses; the docstring of `diagnose` lists the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from policyloss_lab.diagnosis.columns import fit_stored, fit_top1, fit_unfilled, fit_units
from policyloss_lab.diagnosis.hypothesis import Case, Fit, Hypothesis, Misfit, misfit
from policyloss_lab.diagnosis.laws import NEXT, fit_laws, routers
from policyloss_lab.diagnosis.logits import (
    fit_bias,
    fit_penalties,
    fit_rounded_logits,
    fit_shard,
    fit_softcap,
)
from policyloss_lab.diagnosis.order import (
    fit_edges,
    fit_other_tokens,
    fit_permuted_rows,
    fit_shift,
)
from policyloss_lab.diagnosis.pairs import LEAST_TOKENS
from policyloss_lab.diagnosis.place import Place, find_places, loud_rows
from policyloss_lab.diagnosis.sampling import (
    CUTS,
    fit_cuts,
    fit_temperature,
    fit_temperature_and_cut,
)
from policyloss_lab.diagnosis.simulated import (
    fit_adapter,
    fit_configuration,
    fit_earlier,
    fit_formats,
    fit_padding,
    fit_prompts,
)
from policyloss_lab.diagnosis.verdict import CAUSES, Alternative, Diagnosis


@dataclass(frozen=True)
class Thresholds:
    """The numbers of the verdict; docs/doctor.md gives the source of each.

    floor: scale of healthy differences without a model, in nats of an unlikely token.
    noise: with a model, the healthy multiple of the bf16 noise measured on it.
    explains: largest share of the scale that a named cause leaves. Exceptions:
    partly: if the rest is below the floor and the whole is above it,
    quiet: if the whole is below the floor, too,
    fixed: for numeric formats and older weights, which have no fitted number and hide in noise, if
    the rest is below the floor,
    rough: for a temperature from pairs alone, whose likely tokens must all move the right way,
    order: for an order behind which a second cause is named.
    gain: least improvement of the score by a named cause, over no cause and over other families.
    exact: scale of float32 rounding; below it nothing is searched for.
    rest: share of the scale below which no other family is simulated.
    law: least improvement of the score per token by a law of noise over uniform noise.
    wild: least share of tokens beyond four floors (without a model, 12) that noise cannot explain;
    five times as far, one token in 50 of these is enough.
    sided: least share of differences with one sign if tokens were removed from the support.
    """

    floor: float = 0.05
    noise: float = 3.0
    explains: float = 0.1
    partly: float = 0.5
    quiet: float = 0.3
    fixed: float = 0.97
    rough: float = 0.3
    order: float = 0.9
    gain: float = 12.0
    exact: float = 1e-5
    rest: float = 0.02
    law: float = 0.02
    wild: float = 0.004
    sided: float = 0.98


class Fitted(NamedTuple):
    """A fit and the misfit that remains after it."""

    fit: Fit
    left: Misfit

    @property
    def families(self) -> frozenset[str]:
        """The families of its causes."""
        return frozenset(CAUSES[cause].family for cause in self.fit.cause.split("+"))


ORDERS: tuple[Hypothesis, ...] = (fit_shift, fit_permuted_rows, fit_other_tokens)
NUMBERS: tuple[Hypothesis, ...] = (
    *(fit_edges, fit_unfilled, fit_units, fit_top1, fit_stored, fit_temperature, fit_cuts),
    *(fit_softcap, fit_rounded_logits, fit_shard, fit_penalties, fit_bias, fit_earlier),
)

FAR = 4  # times the floor: a difference that noise rarely reaches
EXTREME = 5  # times as far: a difference that noise never reaches
LEAST_FAR = 2  # fewer tokens than this may be far by chance
LEAST_SIDED = 12  # differences of one sign that are no accident
LEAST_TWINS = 8  # equal numbers outside of the mask that are no accident
RULED_OUT = 0.5  # the share of the scale that the best fit of a family leaves if it is ruled out
SAMPLES = ("format", "config", "prompt")  # families of which only some members are simulated
# Chosen by hand; benchmarks/doctor_heldout.py measures how often each is right.
CONFIDENCE = {"named": 0.97, "rough": 0.9, "healthy": 0.97, "not_explained": 0.9}
FEW_NUMBERS = 2  # fitted numbers of a cause that may leave more than `explains`
FEW_TOKENS = 8  # the confidence is halved at this many tokens


@dataclass
class Search:
    """The state of a diagnosis. held_out: families that must not be named, for the benchmark.
    tested: all fits.
    """

    case: Case
    others: Sequence[Sequence[int]] | None
    limits: Thresholds
    held_out: frozenset[str] = frozenset()
    tested: list[Fitted] = field(default_factory=list)
    candidates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.noise = None if self.case.scorer is None else self.case.scorer.half_precision_noise()
        shape = self.case.pairs.shape
        self.floor = (
            self.limits.floor
            if self.noise is None
            else self.limits.noise * misfit(self.noise, shape, 0).scale
        )
        far = 0.0 if self.noise is None else self.far(self.noise / shape).double().mean()
        self.wild_share = max(self.limits.wild, 3 * float(far))

    def far(self, size: Tensor) -> Tensor:
        """A flag for each difference, relative to its shape, that noise rarely reaches. A router
        that chooses another expert in bf16 moves a token as far as noise does from pairs alone.
        """
        scorer = self.case.scorer
        if scorer is not None and not routers(scorer.model):
            return size.abs() > FAR * self.floor
        return size.abs() > FAR * self.limits.noise * self.limits.floor

    def is_wild(self, residual: Tensor, shape: Tensor) -> bool:
        """Whether some tokens differ far more than noise allows. Under Student's t, three of 10,000
        lie beyond 12 scales; a mixture of experts in bf16 has more, as its measured noise shows.
        """
        size = (residual / shape)[~residual.isnan()]
        n = size.numel()
        extreme = int(self.far(size / EXTREME).sum())
        return int(self.far(size).sum()) >= max(LEAST_FAR, self.wild_share * n) or (
            extreme >= max(1, self.wild_share * n / 50)
        )

    def is_quiet(self, case: Case) -> bool:
        """Whether all differences are healthy."""
        d, shape = case.pairs.difference, case.pairs.shape
        return misfit(d, shape, 0).scale <= self.floor and not self.is_wild(d, shape)

    def fit(self, hypotheses: Iterable[Hypothesis], case: Case) -> list[Fitted]:
        """Every fit of every hypothesis, best first."""
        rows = [
            Fitted(fit, size_of(fit.residual(case.pairs), case, fit.freedom))
            for hypothesis in hypotheses
            for fit in hypothesis(case)
        ]
        rows = [row for row in rows if not row.families & self.held_out]
        self.tested += rows
        return sorted(rows, key=lambda row: row.left.score)

    def explains(self, row: Fitted, case: Case) -> bool:
        """Whether a fit explains the case: its score beats noise, and it leaves next to nothing or
        no more than the noise floor.
        """
        first, limits = unexplained(case), self.limits
        if row.left.score > first.score - limits.gain:
            return False
        share, left = row.left.scale / first.scale, row.left.scale
        residual = row.fit.residual(case.pairs)
        calm = left <= self.floor and not self.is_wild(residual, case.pairs.shape)
        if _masks(row.fit):
            return calm
        if row.fit.share == "rough":
            return share <= limits.rough
        if share <= limits.explains:
            return True
        if row.fit.share == "fixed":
            return calm and share <= limits.fixed
        if row.fit.freedom > FEW_NUMBERS:
            return False
        if first.scale > self.floor:
            return left <= self.floor and share <= limits.partly
        return calm and share <= limits.quiet

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
        first = unexplained(case).scale
        rows = self.fit(NUMBERS, case)
        nothing = 0.1 * self.limits.rest * first
        if rows and rows[0].left.scale > nothing and _partly_sampling(rows, first):
            rows = sorted(
                [*rows, *self.fit((fit_temperature_and_cut,), case)], key=lambda r: r.left.score
            )
        if rows and rows[0].left.scale <= self.limits.rest * first:
            return self.best(rows, case)
        simulated = (
            *(fit_formats, fit_configuration, fit_adapter, fit_padding),
            partial(fit_prompts, others=self.others),
        )
        return self.best(
            sorted([*rows, *self.fit(simulated, case)], key=lambda r: r.left.score), case
        )

    def causes(self, case: Case) -> list[Fitted]:
        """The order, the effect, or both that explain the case; none if nothing does."""
        first = unexplained(case)
        order = next(iter(self.fit(ORDERS, case)), None)
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
            effect = self.effect(case.realigned(order.fit.source))
            if effect is not None and not _masks(effect.fit):
                return [order, effect]
        return [order] if self.explains(order, case) else []


def size_of(residual: Tensor, case: Case, freedom: int = 0) -> Misfit:
    """The scale of residuals as noise of shape `1 - p`, and the better score of that noise and of
    noise that is the same everywhere.
    """
    noise = misfit(residual, case.pairs.shape, freedom)
    flat = misfit(residual, torch.ones_like(residual), freedom)
    return Misfit(noise.scale, min(noise.score, flat.score))


def unexplained(case: Case) -> Misfit:
    """The misfit without a hypothesis."""
    return size_of(case.pairs.difference, case)


def diagnose(
    case: Case,
    thresholds: Thresholds,
    notes: Sequence[str] = (),
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
    7. Place. Otherwise it is not explained, and the verdict says where the differences are, which
       laws of noise and which families remain, and what to measure next.
    """
    search = Search(case, others, thresholds, held_out)
    first = unexplained(case)
    if first.scale <= thresholds.exact and not search.is_wild(
        case.pairs.difference, case.pairs.shape
    ):
        return _equal(search, first, notes)
    rows = torch.ones(case.pairs.size, dtype=torch.bool)
    named = search.causes(case)
    loud = rows if named else loud_rows(case, search.floor)
    if LEAST_TOKENS <= int(loud.sum()) < rows.numel() and search.is_quiet(case.select(~loud)):
        rows, named = loud, search.causes(case.select(loud))
    if not named and "support" not in held_out and (fit := _removed(search)) is not None:
        rows = torch.ones_like(rows)
        named = [Fitted(fit, Misfit(0.0, 0.0))]
    if named:
        return _named(search, named, rows, first, notes)
    if search.is_quiet(case):
        quiet = _facts(case, first, search.floor)
        return _diagnosis(search, ("healthy",), "healthy", [*quiet, *notes], _scales(first))
    return _not_explained(search, first, notes)


def _equal(search: Search, first: Misfit, notes: Sequence[str]) -> Diagnosis:
    """Step 1 of `diagnose`."""
    case = search.case
    evidence = _facts(case, first, search.floor)
    if not bool((case.pairs.rollout == case.pairs.trainer).all()):
        return _diagnosis(search, ("healthy",), "healthy", [*evidence, *notes], _scales(first))
    equal = f"all {case.pairs.size} log-probabilities are equal bit for bit"
    if case.pairs.twins >= LEAST_TWINS and "copy" not in search.held_out:
        why = f"{equal}, and so are {case.pairs.twins} outside of the mask, where engines have none"
        return _diagnosis(search, ("copy",), "named", [why, *notes], _scales(first))
    evidence.append(f"{equal}, as from an engine with the trainer's kernels or a copy of old_logp")
    verdict = _diagnosis(search, ("healthy",), "healthy", [*evidence, *notes], _scales(first))
    remedy = (
        "Confirm that rollout_logp comes from the engine; if it does, nothing needs to be done."
    )
    return replace(verdict, remedy=remedy)


def _removed(search: Search) -> Fit | None:
    """Step 5 of `diagnose`: every sampled token gains, likely ones as well, by no fixed factor, and
    not to one constant.
    """
    pairs = search.case.pairs
    d = pairs.difference
    far = (d / pairs.shape).abs() > 2 * search.floor
    inside = (pairs.rank > 0) & (pairs.remaining > 0)
    if int((far & inside).sum()) < LEAST_SIDED:
        return None
    ups = float((d[far] > 0).double().mean())
    side, gains, base = (
        ("rollout_logp", d, pairs.trainer) if ups > 0.5 else ("old_logp", -d, pairs.rollout)
    )
    gaining = base + gains
    likely = base >= base.quantile(0.75)
    if (scorer := search.case.scorer) is not None:
        likely = scorer.logits.argmax(1) == scorer.ids
    open_ended = far & (gaining < -1e-3) & (base < math.log(0.5))  # not the only token that is left
    factors = (gains / base)[open_ended]
    factor = factors.numel() > 2 and bool(factors.std() < 0.2 * factors.mean().abs())
    filled = torch.unique(gaining[far & (base < math.log(0.5))], return_counts=True)[1]
    constant = filled.numel() > 0 and int(filled.max()) > 0.5 * int(filled.sum())
    spread = far[likely].double().mean() >= 0.25 * far.double().mean()
    if max(ups, 1 - ups) < search.limits.sided or not spread or constant or factor:
        return None
    sentence = (
        f"{side} is the larger at all {int(far.sum())} tokens that differ, likely ones included: "
        "it is normalised over fewer tokens of the vocabulary"
    )
    prediction = torch.where(far, torch.nan, 0.0).double()
    return Fit("support", sentence, prediction, details={"side": side})


def _masks(fit: Fit) -> bool:
    """Whether a fit only claims that some tokens do not count."""
    return fit.prediction is not None and bool(fit.prediction.isnan().any())


def _partly_sampling(rows: Sequence[Fitted], scale: float) -> bool:
    """Whether a temperature or a cut explains something, so that a joint search is worth it."""
    names = ("temperature", *CUTS)
    return any(row.fit.cause in names and row.left.scale < 0.97 * scale for row in rows)


def _facts(case: Case, first: Misfit, floor: float) -> list[str]:
    d = case.pairs.difference
    facts = [
        f"rollout_logp - old_logp: mean {float(d.mean()):+.3g}, mean size "
        f"{float(d.abs().mean()):.3g}, largest {float(d.abs().max()):.3g}; "
        f"typical difference at unlikely tokens {first.scale:.3g} (healthy: up to {floor:.3g})"
    ]
    if case.pairs.impossible:
        facts.append(
            f"{case.pairs.impossible} tokens have rollout_logp = -inf: the engine could not have "
            "sampled them"
        )
    return facts


def _scales(first: Misfit) -> dict[str, object]:
    return {"scale": first.scale, "scale_left": first.scale}


def _named(
    search: Search, named: Sequence[Fitted], rows: Tensor, first: Misfit, notes: Sequence[str]
) -> Diagnosis:
    case = search.case
    numbers, count = torch.unique(case.pairs.row[rows]), case.pairs.starts.numel() - 1
    some = "" if bool(rows.all()) else f"in {numbers.numel()} of {count} rows, "
    details: dict[str, object] = {"scale": first.scale, "scale_left": named[-1].left.scale}
    evidence = _facts(case, first, search.floor)
    here = unexplained(case.select(rows)).scale
    for row in named:
        subject = "this explains" if row is named[0] else "together they explain"
        tail = f"; {subject} {1 - row.left.scale / here:.0%} of the difference"
        if _masks(row.fit):
            tail = "; the other tokens agree"
        evidence.append(some + row.fit.sentence + tail)
        details |= row.fit.details
    if some:
        details |= {"rows": numbers.tolist(), "share_of_rows": numbers.numel() / count}
    causes = tuple(dict.fromkeys(c for row in named for c in row.fit.cause.split("+")))
    if "stale_weights" in causes:
        evidence += _steps(case, first.scale, details)
    kind = "rough" if any(row.fit.share == "rough" for row in named) else "named"
    return _diagnosis(search, causes, kind, [*evidence, *notes], details)


def _not_explained(search: Search, first: Misfit, notes: Sequence[str]) -> Diagnosis:
    """Step 7 of `diagnose`."""
    case = search.case
    places = find_places(case, search.floor)
    evidence = _facts(case, first, search.floor)
    evidence += [f"where: {place.sentence}" for place in places]
    details = _scales(first)
    laws = []
    for fit in fit_laws(case):
        assert fit.shape is not None
        laws.append((misfit(fit.residual(case.pairs), fit.shape, fit.freedom).score, fit))
    score, law = min(laws, key=lambda pair: pair[0])
    if laws[0][0] - score > search.limits.law * case.pairs.size:  # the first is flat noise
        evidence.append(f"consistent with {law.sentence}")
        details["consistent_with"] = law.cause
        if places[0].tag == "network":
            places[0] = places[0]._replace(next=NEXT.get(law.cause, places[0].next))
    if search.candidates:
        titles = " or ".join(CAUSES[c.split("+")[0]].title for c in search.candidates)
        evidence.append(f"two families explain it equally well: {titles}")
        details["candidates"] = list(search.candidates)
    evidence += notes
    return _diagnosis(search, ("not_explained",), "not_explained", evidence, details, places)


def _steps(case: Case, scale: float, details: dict[str, object]) -> list[str]:
    """A sentence on about how many updates the engine is behind, if `logp` shows one update."""
    if case.pairs.later is None:
        return []
    drift = misfit(case.pairs.later - case.pairs.trainer, case.pairs.shape, 0).scale
    if drift <= 1e-6:
        return []
    ratio = scale / drift
    details["steps"] = ratio
    low, high = sorted((ratio, ratio**2))
    return [
        f"the trainer's own step moves them by {drift:.3g}, so the engine is about "
        f"{max(low, 1):.0f} to {max(high, 1):.0f} steps behind (a straight way, or a random one)"
    ]


def _alternatives(
    tested: Sequence[Fitted], causes: Sequence[str], scale: float
) -> list[Alternative]:
    """The best fit of each cause that was not chosen, sorted by the share that the fit leaves."""
    best: dict[str, Alternative] = {}
    for fit, left in sorted(tested, key=lambda row: row.left.scale):
        if fit.cause not in causes and fit.cause in CAUSES:
            share = Alternative(fit.cause, fit.sentence, left.scale / scale, left.score)
            best.setdefault(fit.cause, share)
    return list(best.values())


def _diagnosis(
    search: Search,
    causes: tuple[str, ...],
    kind: str,
    evidence: Sequence[str],
    details: dict[str, object],
    places: Sequence[Place] = (),
) -> Diagnosis:
    size = search.case.pairs.size
    alternatives = _alternatives(search.tested, causes, unexplained(search.case).scale)
    left: dict[str, float] = {}
    for a in alternatives:
        family = CAUSES[a.cause].family
        left[family] = min(left.get(family, math.inf), a.unexplained)
    out = sorted(f for f, share in left.items() if share >= RULED_OUT and f not in SAMPLES)
    corrections = [CAUSES[cause].correction for cause in causes]
    remedy = places[0].next if places else " ".join(CAUSES[cause].remedy for cause in causes)
    return Diagnosis(
        causes[0],
        causes,
        CONFIDENCE[kind] * size / (size + FEW_TOKENS),
        tuple(evidence),
        remedy,
        None if None in corrections else corrections[0],
        search.floor,
        size,
        details,
        tuple(alternatives),
        tuple(places),
        tuple(out) if places else (),
    )
