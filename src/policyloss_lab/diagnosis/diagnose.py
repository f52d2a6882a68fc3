"""Chooses among the hypotheses; the docstring of `diagnose` lists the steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from policyloss_lab.diagnosis.hypothesis import Case, Fit, Hypothesis, Misfit, misfit
from policyloss_lab.diagnosis.laws import AnyNoise, Dropout, OtherContext, OtherWeights, Routes
from policyloss_lab.diagnosis.logits import RoundedLogits, SoftCap, StoredLogProbs, VocabularyShard
from policyloss_lab.diagnosis.order import Edges, OtherTokens, PermutedRows, Shift
from policyloss_lab.diagnosis.pairs import is_copy
from policyloss_lab.diagnosis.sampling import CUTS, Renormalised, Temperature, TemperatureAndCut
from policyloss_lab.diagnosis.simulated import (
    Adapter,
    FirstToken,
    OtherPrompt,
    Padding,
    RoundedWeights,
)
from policyloss_lab.diagnosis.verdict import CAUSES, Alternative, Diagnosis


@dataclass(frozen=True)
class Thresholds:
    """The numbers of the verdict; docs/doctor.md gives the source of each.

    floor: scale of healthy differences without a model, in nats of an unlikely token.
    explains: largest share of the scale that an accepted hypothesis leaves. Some hypotheses have
    a limit of their own instead:
    fixed: for a precision of the weights, which has no fitted number and hides in its own noise,
    shift: for a shift, behind which another cause may still hide,
    exact: for a change after which both sides would agree to the last digits.
    gain: least improvement of the score by an accepted hypothesis.
    noise: healthy multiple of the bf16 noise measured on the model.
    law: least improvement of the score per token by a law of noise over uniform noise.
    wild: least share of tokens beyond four times the floor (without a model, four times `noise`
    times the floor) that noise cannot explain.
    rest: share of the scale below which no second cause is searched for.
    """

    floor: float = 0.05
    explains: float = 0.6
    fixed: float = 0.97
    shift: float = 0.9
    exact: float = 0.3
    gain: float = 12.0
    noise: float = 3.0
    law: float = 0.02
    wild: float = 0.004
    rest: float = 0.02


class Fitted(NamedTuple):
    """A fit and the misfit that remains after it."""

    fit: Fit
    left: Misfit


ORDERS: tuple[Hypothesis, ...] = (Shift(), PermutedRows(), OtherTokens(), Edges())
JOINT: tuple[Hypothesis, ...] = (TemperatureAndCut(),)
LAWS: tuple[Hypothesis, ...] = (OtherWeights(), OtherContext(), Dropout(), Routes(), AnyNoise())

PARTLY = 0.97  # the largest share of the scale that one half of a joint cause leaves
NEGLIGIBLE = 0.1  # times the rest: a fit that leaves less explains everything
SECOND_CAUSE = 0.3  # the share of the scale above which the rest may have a cause of its own
FAR = 4  # times the floor: a difference that noise rarely reaches
LEAST_FAR = 3  # fewer tokens than this may be far by chance
CERTAIN = 0.99  # the largest confidence
FEW_TOKENS = 16  # the confidence is halved at this many tokens
LEAD_RATE = 5  # the rate at which the confidence rises with the lead in nats per token


def effects(others: Sequence[Sequence[int]] | None = None) -> tuple[Hypothesis, ...]:
    """The hypotheses that predict the difference of each token. others: `OtherPrompt.others`."""
    return (
        StoredLogProbs(),
        Temperature(),
        Renormalised(),
        SoftCap(),
        RoundedLogits(),
        VocabularyShard(),
        RoundedWeights(),
        Adapter(),
        FirstToken(),
        OtherPrompt(others),
        Padding(),
    )


def fit_all(hypotheses: Iterable[Hypothesis], case: Case) -> list[Fitted]:
    """Every fit of every hypothesis, best first."""
    rows = [
        Fitted(fit, misfit_of(fit, case))
        for hypothesis in hypotheses
        for fit in hypothesis.fit(case)
    ]
    return sorted(rows, key=lambda row: row.left.score)


def misfit_of(fit: Fit, case: Case) -> Misfit:
    """The misfit that remains after a fit."""
    pairs = case.pairs
    shape = pairs.shape if fit.shape is None else fit.shape
    if fit.masks_edges:
        return misfit(pairs.difference, shape, fit.freedom)
    if fit.source is not None:
        rollout = pairs.rollout[fit.source.clamp(min=0)]
        residual = torch.where(fit.source >= 0, rollout - pairs.trainer, torch.nan)
    else:
        residual = pairs.difference - (0 if fit.prediction is None else fit.prediction)
    return misfit(residual, shape, fit.freedom)


class Search:
    """The state of a diagnosis.

    case: the pairs without the effects of the causes accepted so far. left: the misfit of `case`.
    first: the misfit of all differences. accepted: the causes. leads: for each cause, its lead over
    its rivals. tested: all fits of the first round of each step.
    """

    def __init__(self, case: Case, thresholds: Thresholds) -> None:
        self.case = case
        self.thresholds = thresholds
        self.first = self.left = _unexplained(case)
        self.floor = measured_floor(case, thresholds)
        self.accepted: list[Fitted] = []
        self.leads: list[float] = []
        self.tested: list[Fitted] = []

    def believed(self, rows: Sequence[Fitted]) -> list[Fitted]:
        """The fits that explain the case, best first."""
        return [row for row in rows if _explains(row, self.left, self.thresholds)]

    def accept(self, row: Fitted, rivals: Sequence[Fitted]) -> None:
        """Add a cause."""
        self.accepted.append(row)
        self.leads.append(_lead_over(rivals, row, self.left, self.case))

    def continue_with(self, case: Case) -> None:
        """Replace the case."""
        self.case, self.left = case, _unexplained(case)


def diagnose(
    case: Case, hypotheses: Sequence[Hypothesis], thresholds: Thresholds, notes: Sequence[str] = ()
) -> Diagnosis:
    """The verdict on a case. The order of the tests is the algorithm:

    1. Copy. Equal bits on both sides end the search.
    2. Order. If the numbers are shifted, permuted, tokenised differently or wrong at the edges of
       rows, they are realigned, because no other test makes sense before that.
    3. Effects. The hypothesis that best predicts the difference of each token is accepted and
       subtracted. With a model, a second round searches the rest for a second cause, unless the
       rest is noise. If a temperature or a cut (top-p, top-k, min-p) explains only a part, a
       temperature and a cut are also fitted together.
    4. Noise. If the rest is still larger than noise, the laws of noise are compared, which predict
       only where differences are large. If a law without the last effect fits about as well as a
       law with that effect, the effect is dropped.
    5. Confidence. It is the smallest lead of a cause over its rivals, lowered for few tokens.
    """
    if is_copy(case.pairs):
        evidence = f"all {case.pairs.size} log-probabilities are equal bit for bit"
        return _diagnosis(case, ("copy",), CERTAIN, [evidence], 0.0, {}, [])
    search = Search(case, thresholds)
    _test_order(search)
    before = _test_effects(search, hypotheses)
    _test_noise(search, before)
    quiet = 1 - search.left.scale / (2 * search.floor)
    lead = min(search.leads, default=max(0.5, quiet))
    confidence = lead * CERTAIN * case.pairs.size / (case.pairs.size + FEW_TOKENS)
    return _verdict(case, search, notes, confidence)


def _test_order(search: Search) -> None:
    """Step 2 of `diagnose`."""
    search.tested = fit_all(ORDERS, search.case)
    if believed := search.believed(search.tested):
        search.accept(believed[0], believed)
        source = believed[0].fit.source
        assert source is not None
        search.continue_with(search.case.realigned(source))


def _test_effects(search: Search, hypotheses: Sequence[Hypothesis]) -> Case | None:
    """Step 3 of `diagnose`: returns the case before the last accepted effect, if there is one."""
    thresholds, before = search.thresholds, None
    for first_round in (True,) if search.case.scorer is None else (True, False):
        noise = max(thresholds.rest * search.first.scale, search.floor)
        joint = any("+" in row.fit.cause for row in search.accepted)
        if joint or (search.accepted and search.left.scale <= noise):
            break
        rows = fit_all(hypotheses, search.case)
        if _partly_sampling(rows, search.left, thresholds):
            rows = sorted([*rows, *fit_all(JOINT, search.case)], key=lambda row: row.left.score)
        if first_round:
            search.tested += rows
        believed = search.believed(rows)
        if not believed or believed[0].fit.cause in (row.fit.cause for row in search.accepted):
            break
        search.accept(believed[0], believed)
        prediction = believed[0].fit.prediction
        assert prediction is not None
        before = search.case
        search.continue_with(Case(before.pairs.moved_by(-prediction), before.scorer))
    return before


def _test_noise(search: Search, before: Case | None) -> None:
    """Step 4 of `diagnose`. before: the case before the last accepted effect."""
    case, thresholds = search.case, search.thresholds
    if search.accepted:
        # A fit without a model is rough and leaves much, so its rest is no second cause.
        large = case.scorer is not None and search.left.scale > SECOND_CAUSE * search.first.scale
        if not large or search.left.scale <= search.floor:
            return
    elif search.left.scale <= search.floor and not _wild(case, search.floor, thresholds):
        return
    laws = fit_all(LAWS, case)
    best = _best_law(laws, case, thresholds)
    if before is not None:
        alone = fit_all(LAWS, before)
        simpler = _best_law(alone, before, thresholds)
        rival = simpler.left.score < best.left.score + thresholds.gain
        if rival and simpler.fit.cause != "not_explained":
            search.accepted.pop()
            search.leads.pop()
            search.continue_with(before)
            laws, best = alone, simpler
    search.tested += laws
    if not search.accepted or best.fit.cause != "not_explained":
        search.accept(best, laws)


def _best_law(laws: Sequence[Fitted], case: Case, thresholds: Thresholds) -> Fitted:
    """The law that fits best, if it is far enough ahead of noise that explains nothing."""
    nothing = next(row for row in laws if row.fit.cause == "not_explained")
    ahead = nothing.left.score - laws[0].left.score
    return laws[0] if ahead >= thresholds.law * case.pairs.size else nothing


def _unexplained(case: Case) -> Misfit:
    """The misfit without a hypothesis: the scale of noise, and the better score of noise of shape
    `1 - p` and of uniform noise.
    """
    d, shape = case.pairs.difference, case.pairs.shape
    noise, flat = misfit(d, shape, 0), misfit(d, torch.ones_like(shape), 0)
    return Misfit(noise.scale, min(noise.score, flat.score))


def _lead_over(rivals: Sequence[Fitted], row: Fitted, left: Misfit, case: Case) -> float:
    """The lead per token of a fit over the best fit of another cause, as a number in [0.5, 1]."""
    names = set(row.fit.cause.split("+"))
    others = [r.left.score for r in rivals if not names <= set(r.fit.cause.split("+"))]
    gap = (min([left.score, *others]) - row.left.score) / case.pairs.size
    return 1 - 0.5 * math.exp(-LEAD_RATE * max(gap, 0.0))


def _explains(row: Fitted, left: Misfit, thresholds: Thresholds) -> bool:
    """Whether a fit is accepted: its score beats the score without it, and the fit leaves as little
    as a true cause would, or concerns only a few tokens at the edges.
    """
    share: float = getattr(thresholds, row.fit.share)
    return row.left.score < left.score - thresholds.gain and (
        row.fit.masks_edges or row.left.scale <= share * left.scale
    )


def _partly_sampling(rows: Sequence[Fitted], left: Misfit, thresholds: Thresholds) -> bool:
    """Whether a temperature or a cut explains something and no fit explains everything, so that a
    joint search for a temperature and a cut is worth its time.
    """
    if not rows or rows[0].left.scale <= NEGLIGIBLE * thresholds.rest * left.scale:
        return False
    names = ("temperature", *CUTS)
    return any(row.fit.cause in names and row.left.scale < PARTLY * left.scale for row in rows)


def _wild(case: Case, floor: float, thresholds: Thresholds) -> bool:
    """Whether a few tokens differ far more than noise allows. Under Student's t, three of 10,000
    tokens lie beyond 12 scales. With a model, the floor already is three scales (`noise`).
    """
    times = FAR if case.scorer is not None else FAR * thresholds.noise
    far = (case.pairs.difference / case.pairs.shape).abs() > times * floor
    return int(far.sum()) >= max(LEAST_FAR, thresholds.wild * case.pairs.size)


def measured_floor(case: Case, thresholds: Thresholds) -> float:
    """The scale of healthy differences: the effect of bf16 arithmetic on this model, or a
    constant.
    """
    if case.scorer is None:
        return thresholds.floor
    noise = case.scorer.half_precision_noise()
    return thresholds.noise * misfit(noise, case.pairs.shape, 0).scale


def _verdict(case: Case, search: Search, notes: Sequence[str], confidence: float) -> Diagnosis:
    first, left, tested = search.first, search.left, search.tested
    d = case.pairs.difference
    evidence = [
        f"rollout_logp - old_logp: mean {float(d.mean()):+.3g}, mean size "
        f"{float(d.abs().mean()):.3g}, largest {float(d.abs().max()):.3g}; "
        f"scale {first.scale:.3g} for an unlikely token, noise floor {search.floor:.3g}"
    ]
    details: dict[str, object] = {"scale": first.scale, "scale_left": left.scale}
    for row in search.accepted:
        share = left.scale if row.fit.shape is not None else row.left.scale
        tail = "" if row.fit.is_law else f"; this leaves {share / first.scale:.1%} of the scale"
        evidence.append(row.fit.sentence + tail)
        details |= row.fit.details
    causes = tuple(dict.fromkeys(c for row in search.accepted for c in row.fit.cause.split("+")))
    if "weights_bf16" in causes:  # a model in bf16 also has bf16 logits
        causes = tuple(cause for cause in causes if cause != "logits_bf16")
    if "stale_weights" in causes:
        evidence += _steps(case, first.scale, details)
    if case.pairs.impossible:
        evidence.append(
            f"{case.pairs.impossible} tokens have rollout_logp = -inf: the engine could not have "
            "sampled them"
        )
    if causes == ("not_explained",):
        best = min((r for r in tested if r.fit.shape is None), key=lambda row: row.left.scale)
        evidence.append(
            f"the best partial fit leaves {best.left.scale / first.scale:.0%}: {best.fit.sentence}"
        )
    evidence += notes
    chosen = causes or ("healthy",)
    others = _alternatives(tested, first, chosen)
    return _diagnosis(case, chosen, confidence, evidence, search.floor, details, others)


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
    tested: Sequence[Fitted], first: Misfit, causes: Sequence[str]
) -> list[Alternative]:
    """The best fit of each cause that was not chosen, sorted by the share that the fit leaves."""
    best: dict[str, Fitted] = {}
    for row in tested:
        name = row.fit.cause
        if name not in causes and name in CAUSES and row.fit.shape is None:
            kept = best.get(name)
            if kept is None or row.left.scale < kept.left.scale:
                best[name] = row
    rows = sorted(best.values(), key=lambda row: row.left.scale)
    return [
        Alternative(r.fit.cause, r.fit.sentence, r.left.scale / first.scale, r.left.score)
        for r in rows
    ]


def _diagnosis(
    case: Case,
    causes: tuple[str, ...],
    confidence: float,
    evidence: Sequence[str],
    floor: float,
    details: dict[str, object],
    alternatives: Sequence[Alternative],
) -> Diagnosis:
    first = CAUSES[causes[0]]
    corrections = [CAUSES[cause].correction for cause in causes]
    remedy = " ".join(CAUSES[cause].remedy for cause in causes)
    return Diagnosis(
        causes[0],
        causes,
        confidence,
        tuple(evidence),
        remedy,
        None if None in corrections else first.correction,
        floor,
        case.pairs.size,
        details,
        tuple(alternatives),
    )
