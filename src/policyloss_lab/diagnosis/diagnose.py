"""Chooses among hypotheses: first the order of the numbers, then what changes them, then where
noise is large.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from policyloss_lab.diagnosis.causes import CAUSES
from policyloss_lab.diagnosis.context import FirstToken, OtherPrompt, Padding
from policyloss_lab.diagnosis.criterion import Misfit, misfit
from policyloss_lab.diagnosis.diagnosis import Alternative, Diagnosis
from policyloss_lab.diagnosis.hypothesis import Case, Fit, Hypothesis
from policyloss_lab.diagnosis.laws import AnyNoise, Dropout, OtherContext, OtherWeights, Routes
from policyloss_lab.diagnosis.logits import RoundedLogits, SoftCap, VocabularyShard
from policyloss_lab.diagnosis.order import Edges, OtherTokens, PermutedRows, Shift, is_copy
from policyloss_lab.diagnosis.sampling import CUTS, Renormalised, Temperature, TemperatureAndCut
from policyloss_lab.diagnosis.storage import StoredLogProbs
from policyloss_lab.diagnosis.weights import Adapter, RoundedWeights


@dataclass(frozen=True)
class Thresholds:
    """The numbers of the verdict; docs/doctor.md says where each comes from.

    floor: the scale of differences, in nats of an unlikely token, below which pairs without
    structure are healthy. explains: the share of the scale that a hypothesis may leave; fixed: the
    same for weights in another precision, whose prediction has no fitted number, and which noise of
    that precision all but hides; shift: the same for a shift, under which another cause may still
    hide; exact: the same for a change after which both sides would agree to the last digits. gain:
    by how much it must beat what was there, in units of the score. noise: times the noise of bf16
    (measured on the model) that is healthy. law: by how much, for each token, a law of noise must
    beat one that is the same everywhere. wild: the share of tokens beyond four times the floor that
    is no noise. rest: the share of the scale that is not worth a second cause.
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
    """A hypothesis with what it leaves."""

    fit: Fit
    left: Misfit


ORDERS: tuple[Hypothesis, ...] = (Shift(), PermutedRows(), OtherTokens(), Edges())
JOINT: tuple[Hypothesis, ...] = (TemperatureAndCut(),)
PARTLY = 0.97  # the share of the scale that one half of a joint cause leaves at most
LAWS: tuple[Hypothesis, ...] = (OtherWeights(), OtherContext(), Dropout(), Routes(), AnyNoise())


def effects(others: Sequence[Sequence[int]] | None = None) -> tuple[Hypothesis, ...]:
    """The hypotheses that predict the difference of each token."""
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


def fitted(hypotheses: Iterable[Hypothesis], case: Case) -> list[Fitted]:
    """Every fit of every hypothesis, best first."""
    rows = [
        Fitted(fit, left_by(fit, case)) for hypothesis in hypotheses for fit in hypothesis.fit(case)
    ]
    return sorted(rows, key=lambda row: row.left.score)


def left_by(fit: Fit, case: Case) -> Misfit:
    """What a fit leaves of the differences."""
    pairs = case.pairs
    shape = pairs.shape if fit.shape is None else fit.shape
    if fit.shape is not None and fit.source is not None:  # tokens to be left out, at their scale
        return misfit(pairs.difference, shape, fit.freedom)
    if fit.source is not None:
        rollout = pairs.rollout[fit.source.clamp(min=0)]
        residual = torch.where(fit.source >= 0, rollout - pairs.trainer, torch.nan)
    else:
        residual = pairs.difference - (0 if fit.prediction is None else fit.prediction)
    return misfit(residual, shape, fit.freedom)


def diagnose(
    case: Case, hypotheses: Sequence[Hypothesis], thresholds: Thresholds, notes: Sequence[str] = ()
) -> Diagnosis:
    """The verdict on a case."""
    first = _unexplained(case)
    if is_copy(case.pairs):
        return _copied(case)
    floor = measured_floor(case, thresholds)
    accepted: list[Fitted] = []
    tested: list[Fitted] = []
    leads: list[float] = []
    now, left = case, first
    orders = fitted(ORDERS, now)
    tested += orders
    believed = [row for row in orders if _explains(row, left, thresholds)]
    if believed:
        accepted.append(believed[0])
        leads.append(_lead(believed[0], believed, left, now))
        source = believed[0].fit.source
        assert source is not None
        now = now.realigned(source)
        left = _unexplained(now)
    for _ in range(1 if case.scorer is None else 2):
        if accepted and left.scale <= max(thresholds.rest * first.scale, floor):
            break
        rows = fitted(hypotheses, now)
        if _partly_sampling(rows, left, thresholds):
            rows = sorted([*rows, *fitted(JOINT, now)], key=lambda row: row.left.score)
        tested += rows if len(tested) == len(orders) else []
        believed = [row for row in rows if _explains(row, left, thresholds)]
        if not believed or believed[0].fit.cause in (a.fit.cause for a in accepted):
            break
        best = believed[0]
        if any("+" in a.fit.cause for a in accepted):
            break
        accepted.append(best)
        leads.append(_lead(best, believed, left, now))
        assert best.fit.prediction is not None
        before, now = now, _without(now, best.fit)
        left = _unexplained(now)
    loud = left.scale > floor or (not accepted and _wild(now, floor, thresholds))
    # A guess from pairs alone leaves much by itself, so what it leaves is no second cause.
    rest = case.scorer is not None and left.scale > 0.3 * first.scale
    if loud and (not accepted or rest):
        laws = fitted(LAWS, now)
        best = _best_law(laws, now, thresholds)
        if accepted and accepted[-1].fit.prediction is not None:
            alone = fitted(LAWS, before)
            simpler = _best_law(alone, before, thresholds)
            rival = simpler.left.score < best.left.score + thresholds.gain
            if rival and simpler.fit.cause != "not_explained":
                accepted.pop()
                leads.pop()
                now, left, laws, best = before, _unexplained(before), alone, simpler
        tested += laws
        if not accepted or best.fit.cause != "not_explained":
            accepted.append(best)
            leads.append(_lead(best, laws, left, now))
    quiet = 1 - left.scale / (2 * floor)
    confidence = (
        min(leads, default=max(0.5, quiet)) * 0.99 * case.pairs.size / (case.pairs.size + 16)
    )
    return _verdict(case, first, left, accepted, tested, floor, notes, confidence)


def _best_law(laws: Sequence[Fitted], case: Case, thresholds: Thresholds) -> Fitted:
    """The law that fits best, if it is far enough ahead of noise that explains nothing."""
    nothing = next(row for row in laws if row.fit.cause == "not_explained")
    ahead = nothing.left.score - laws[0].left.score
    return laws[0] if ahead >= thresholds.law * case.pairs.size else nothing


def _unexplained(case: Case) -> Misfit:
    """What is there before a hypothesis: the scale of noise, and the better score of noise of its
    own shape and of noise that is the same everywhere.
    """
    d, shape = case.pairs.difference, case.pairs.shape
    noise, flat = misfit(d, shape, 0), misfit(d, torch.ones_like(shape), 0)
    return Misfit(noise.scale, min(noise.score, flat.score))


def _lead(row: Fitted, rivals: Sequence[Fitted], left: Misfit, case: Case) -> float:
    """From 0.5 to 1: how far a fit is ahead of the best one of another cause, for each token."""
    names = set(row.fit.cause.split("+"))
    others = [r.left.score for r in rivals if not names <= set(r.fit.cause.split("+"))]
    gap = (min([left.score, *others]) - row.left.score) / case.pairs.size
    return 1 - 0.5 * math.exp(-5 * max(gap, 0.0))


def _explains(row: Fitted, left: Misfit, thresholds: Thresholds) -> bool:
    """Whether a fit is believed: it beats what was there, and leaves as little as a true one
    would, or speaks of a few tokens at the edges alone.
    """
    share: float = getattr(thresholds, row.fit.share)
    at_edges = row.fit.shape is not None and row.fit.source is not None
    return row.left.score < left.score - thresholds.gain and (
        at_edges or row.left.scale <= share * left.scale
    )


def _partly_sampling(rows: Sequence[Fitted], left: Misfit, thresholds: Thresholds) -> bool:
    """Whether a temperature or a cut explains something and nothing explains all, so that it is
    worth the time to search for both together.
    """
    if not rows or rows[0].left.scale <= 0.1 * thresholds.rest * left.scale:
        return False
    names = ("temperature", *CUTS)
    return any(row.fit.cause in names and row.left.scale < PARTLY * left.scale for row in rows)


def _wild(case: Case, floor: float, thresholds: Thresholds) -> bool:
    """Whether a few tokens differ far more than noise does, though most do not: of Student's t,
    three of 10,000 lie beyond 12 scales. With the model, the floor is three scales already.
    """
    times = 4 if case.scorer is not None else 4 * thresholds.noise
    far = (case.pairs.difference / case.pairs.shape).abs() > times * floor
    return int(far.sum()) >= max(3, thresholds.wild * case.pairs.size)


def _without(case: Case, fit: Fit) -> Case:
    """The case with what a fit explains taken away from the engine's numbers."""
    pairs = case.pairs
    assert fit.prediction is not None
    moved = pairs.moved_by(-fit.prediction)
    return Case(moved, case.scorer)


def measured_floor(case: Case, thresholds: Thresholds) -> float:
    """The scale of healthy differences: what bf16 arithmetic does to this model, or a constant."""
    if case.scorer is None:
        return thresholds.floor
    noise = case.scorer.half_precision_noise()
    return thresholds.noise * misfit(noise, case.pairs.shape, 0).scale


def _copied(case: Case) -> Diagnosis:
    evidence = f"all {case.pairs.size} log-probabilities are equal bit for bit"
    return _diagnosis(case, ("copy",), 0.99, [evidence], 0.0, {}, [])


def _verdict(
    case: Case,
    first: Misfit,
    left: Misfit,
    accepted: Sequence[Fitted],
    tested: Sequence[Fitted],
    floor: float,
    notes: Sequence[str],
    confidence: float,
) -> Diagnosis:
    d = case.pairs.difference
    evidence = [
        f"rollout_logp - old_logp: mean {float(d.mean()):+.3g}, mean size "
        f"{float(d.abs().mean()):.3g}, largest {float(d.abs().max()):.3g}; "
        f"scale {first.scale:.3g} for an unlikely token, noise floor {floor:.3g}"
    ]
    details: dict[str, object] = {"scale": first.scale, "scale_left": left.scale}
    for row in accepted:
        law = row.fit.shape is not None and row.fit.source is None
        share = left.scale if row.fit.shape is not None else row.left.scale
        tail = "" if law else f"; this leaves {share / first.scale:.1%} of the scale"
        evidence.append(row.fit.sentence + tail)
        details |= row.fit.details
    causes = tuple(dict.fromkeys(c for row in accepted for c in row.fit.cause.split("+")))
    if "weights_bf16" in causes:  # a model in bf16 has such logits, too
        causes = tuple(cause for cause in causes if cause != "logits_bf16")
    if "stale_weights" in causes:
        evidence += _steps(case, first.scale, details)
    if case.pairs.impossible:
        evidence.append(
            f"{case.pairs.impossible} tokens have rollout_logp = -inf: the engine says that it "
            "could not have sampled them"
        )
    if causes == ("not_explained",):
        best = min((r for r in tested if r.fit.shape is None), key=lambda row: row.left.scale)
        evidence.append(
            f"the best partial fit leaves {best.left.scale / first.scale:.0%}: {best.fit.sentence}"
        )
    evidence += notes
    chosen = causes or ("healthy",)
    return _diagnosis(
        case, chosen, confidence, evidence, floor, details, _listed(tested, first, chosen)
    )


def _steps(case: Case, scale: float, details: dict[str, object]) -> list[str]:
    """About how many updates the engine is behind, where one update of the trainer is known."""
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


def _listed(tested: Sequence[Fitted], first: Misfit, causes: Sequence[str]) -> list[Alternative]:
    """The best fit of each cause that was not chosen, the one that leaves least first."""
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
