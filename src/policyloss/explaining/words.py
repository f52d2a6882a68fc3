"""One plain sentence for every part of a loss, with its numbers."""

from __future__ import annotations

import math
from typing import Any

from policyloss.explaining.formulas import ANCHORS, callable_name, rejects
from policyloss.slots import aggregate, correction, kl, ratio, trust
from policyloss.spec import LossSpec, kind

SLOTS = ("ratio", "trust", "correction", "rejected", "kl", "entropy_coef", "aggregate")


def describe(spec: LossSpec) -> dict[str, str]:
    """What each slot of `spec` does, slot by slot; slots that do nothing are left out."""
    said = {slot: describe_slot(spec, slot) for slot in SLOTS}
    if not spec.reads_ratio:
        said["ratio"] = ""
    return {slot: text for slot, text in said.items() if text}


def describe_slot(spec: LossSpec, slot: str) -> str:
    """What one slot of `spec` does; "" if nothing."""
    part = getattr(spec, slot)
    if slot == "correction":
        return "; and ".join(_correction(c) for c in part)
    if slot == "rejected":
        return _REJECTED[part] if rejects(spec) else ""
    if slot == "entropy_coef":
        return f"minus {_g(part)} times the entropy of the policy at each token" if part else ""
    if part is None:
        return ""
    return {"ratio": _ratio, "trust": _trust, "kl": _kl, "aggregate": _aggregate}[slot](part)


_REJECTED = {
    "keep": "a rejected token keeps its place in the denominator",
    "renormalise": "a rejected token leaves the mask, so the denominator counts the survivors",
    "drop_sequence": "one rejected token removes its whole sequence from the mask and the denominator",
}


def _g(x: float) -> str:
    return "no bound" if math.isinf(x) else f"{x:.10g}"


def _own(part: Any) -> str:
    return f"your own function {callable_name(part)}"


def _ratio(p: Any) -> str:
    if not isinstance(p, ratio.VARIANTS):
        return _own(p)
    if hasattr(p, "sentence"):
        return str(p.sentence())
    if p.anchor == "current":
        return "exactly 1, with the gradient of logp (the anchor is logp itself)"
    to = f"to {ANCHORS[p.anchor]}"
    if isinstance(p, ratio.SequenceRatio):
        tail = "" if p.grad == "sequence" else ", each token with its own gradient"
        return f"the geometric mean over the sequence of the probability ratios {to}{tail}"
    if isinstance(p, ratio.SequenceProduct):
        return f"the likelihood ratio of the whole sequence {to}: the product of its tokens' ratios"
    if isinstance(p, ratio.SegmentRatio):
        return f"the geometric mean over each turn (unbroken run of the mask) of the probability ratios {to}"
    return f"each token's own probability ratio {to}"


def _interval(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {_g(low)}" if low > 0 else "anywhere"
    return f"within [{_g(low)}, {_g(high)}]" if low > 0 and not math.isinf(low) else f"at most {_g(high)}"


def _trust(p: Any) -> str:
    if isinstance(p, trust.Clip):
        if p.dual == 1 + p.eps_high and p.eps_low >= 1:
            return f"the gradient stops where the ratio is above {_g(p.dual)}, whatever the sign of the advantage"
        outer = "" if p.dual is None else f"; where the advantage is negative, also above {_g(p.dual)}"
        return f"{_ppo(1 - p.eps_low, 1 + p.eps_high)}{outer}"
    if isinstance(p, trust.TwoSidedClip):
        first, last = sorted((p.delta, 1 + p.eps_high))
        return f"{_ppo(1 - p.eps_low, first)}; where the advantage is negative, also above {_g(last)}"
    if isinstance(p, trust.DetachedClip):
        band = _interval(p.ratio_min, p.ratio_max)
        if p.outside == "zero":
            return f"logp is weighted by the stopped ratio; a token counts only while its ratio is {band}"
        tail = "no token loses its gradient" if p.outside == "clip" else "tokens that PPO would clip get none"
        return f"logp is weighted by the stopped ratio, kept {band}; {tail}"
    if isinstance(p, trust.SoftGate):
        taus = f"{_g(p.tau_positive)} where the advantage is positive, {_g(p.tau_negative)} elsewhere"
        return f"a sigmoid of the ratio fades the gradient out on both sides, at temperature {taus}"
    if isinstance(p, trust.ProbabilityBand):
        return _band(p)
    if isinstance(p, trust.GeometricClip):
        clipped = f"each log-ratio is held within [{_g(-p.eps_low)}, {_g(p.eps_high)}] on the side the advantage pushes to"
        return f"{clipped}, then the ratios are averaged geometrically over the sequence"
    if isinstance(p, trust.CovClip):
        pool = f"tokens drawn at random among those with covariance between {_g(p.cov_low)} and {_g(p.cov_high)}"
        many = f"as many as {_g(100 * p.fraction)} % of all tokens (at least one)"
        return f"{_ppo(1 - p.eps_low, 1 + p.eps_high)}; and {pool}, {many}, get none"
    return _unclipped(p)


def _unclipped(p: Any) -> str:
    if isinstance(p, trust.GammaWeight):
        shape = f"power {_g(p.k_positive)} and decay {_g(p.lambda_positive)} where the advantage is not negative"
        smooth = (
            "logp is weighted by a smooth, stopped function of the ratio: 1 at ratio 1, largest at power / decay, fading beyond"
        )
        return f"{smooth}: {shape}, {_g(p.k_negative)} and {_g(p.lambda_negative)} elsewhere"
    if isinstance(p, trust.CovKL):
        some = f"the {_g(100 * p.fraction)} % of the tokens with the highest covariance"
        return f"no clipping; {some} pay {_g(p.coef)} times their absolute log-ratio"
    if isinstance(p, trust.Quadratic):
        return f"logp is weighted by the advantage, and half of {_g(p.beta)} times the squared log-ratio pulls to the anchor"
    if isinstance(p, trust.TaperedNegative):
        return (
            "logp is weighted by the advantage; where that is not positive also by the stopped ratio, at most "
            f"{_g(p.ratio_max)}, so that a bad token already unlikely fades out"
        )
    if isinstance(p, trust.Unbounded):
        return "no limit: the ratio times the advantage" if p.form == "ratio" else "no ratio and no limit: logp times the advantage"
    return _own(p)


def _ppo(low: float, high: float) -> str:
    if math.isinf(high) and low <= 0:
        return "the gradient never stops"
    if math.isinf(high):
        return f"the gradient stops where the advantage pushes the ratio below {_g(low)}"
    where = f"out of [{_g(low)}, {_g(high)}]" if low > 0 else f"above {_g(high)}"
    return f"the gradient stops where the advantage pushes the ratio {where}"


def _band(p: trust.ProbabilityBand) -> str:
    measure = "changed" if p.divergence == "tv" else "diverged (binary KL, in nats)"
    side = "either way" if p.sides == "both" else "in the direction of its advantage"
    weight = "the ratio" if p.form == "ratio" else f"the stopped ratio, at most {_g(p.cap)}, times logp"
    far = f"{_g(p.high)} upward or {_g(p.low)} downward"
    return f"a token counts until its probability has {measure} by {far}, {side}; it counts {weight}"


_LEVELS = {"token": "token's", "geomean": "sequence's geometric-mean", "product": "sequence's product"}


def _correction(p: Any) -> str:
    if isinstance(p, (correction.Truncate, correction.Band)):
        weighted = f"the policy term is weighted by the {_LEVELS[p.level]} exp(old_logp - rollout_logp)"
        if isinstance(p, correction.Band):
            return f"{weighted}, and rejected unless that is {_interval(p.low, p.high)}"
        return f"{weighted}, whatever its size" if math.isinf(p.high) else f"{weighted}, kept {_interval(p.low, p.high)}"
    if isinstance(p, correction.SequenceMask):
        weight = {"token": "its tokens keep their own weight", "sequence": "its tokens get that weight", None: "it counts fully"}
        test = f"its {_LEVELS[p.level].split(' ')[1]} weight is {_interval(p.low, p.high)}"
        return f"a sequence is rejected unless {test}; else {weight[p.weight]}"
    if isinstance(p, correction.DivergenceMask):
        return _divergence_mask(p)
    if isinstance(p, correction.Reject):
        over = {"token": "of the token", "sum": "summed over the sequence", "mean": "averaged over the sequence"}
        bounds = [f"at least {_g(p.low)}"] if p.low is not None else []
        bounds += [f"at most {_g(p.high)}"] if p.high is not None else []
        reduced = over.get(p.reduce, "at the sequence's worst token")
        return f"rejected unless {p.estimator}, estimating KL(rollout, old) {reduced}, is {' and '.join(bounds)} nats"
    if isinstance(p, correction.Veto):
        bounds = [f"below {_g(p.low)}"] if p.low is not None else []
        bounds += [f"above {_g(p.high)}"] if p.high is not None else []
        return f"a sequence is rejected if any token's exp(old_logp - rollout_logp) is {' or '.join(bounds)}"
    if isinstance(p, correction.OPSM):
        return f"tokens with negative advantage are rejected in sequences where mean({p.source}_logp - logp) exceeds {_g(p.delta)}"
    if isinstance(p, correction.SelfNormalise):
        return f"the weights are divided by their mean over the step's {p.over}"
    return _own(p)


def _divergence_mask(p: correction.DivergenceMask) -> str:
    measure = (
        "binary KL of its probability, rollout to old," if p.divergence == "kl" else "change of its probability, rollout to old,"
    )
    what, test = (
        ("a token", f"the {measure}") if p.level == "token" else ("a sequence", f"the mean over its tokens of the {measure}")
    )
    bounds = [f"at least {_g(p.low)}"] if p.low is not None else []
    bounds.append(f"at most {_g(p.high)}{' nats' if p.divergence == 'kl' else ''}")
    weight = "it is weighted by exp(old_logp - rollout_logp)" if p.weight else "it counts fully"
    return f"{what} is rejected unless {test} is {' and '.join(bounds)}; else {weight}"


def _kl(p: Any) -> str:
    if not isinstance(p, kl.KL):
        return _own(p)
    gradient = {"value": "", "k2": ", with the gradient of k2", "score": ", with the score-function term"}[p.grad]
    by = p.weight_sentence() if hasattr(p, "weight_sentence") else None
    weight = f", times {by}" if by else "" if p.weight is None else ", times the ratio"
    return f"plus {_g(p.coef)} times {p.estimator}, an estimate of KL(current, {p.anchor}){weight}{gradient}"


def _aggregate(p: Any) -> str:
    if isinstance(p, (aggregate.SeqMeanTokenSumNorm, aggregate.TokenSumNorm)):
        mean = ", mean over sequences" if isinstance(p, aggregate.SeqMeanTokenSumNorm) else ", not averaged over sequences"
        constant = "a constant that is not set yet" if p.horizon is None else f"the constant {_g(p.horizon)}"
        return f"token sums over {constant}{mean}"
    return _AGGREGATES.get(kind(p)) or _own(p)


_AGGREGATES: dict[type, str] = {
    aggregate.TokenMean: "every token of the step counts the same",
    aggregate.SeqMeanTokenMean: "every sequence counts the same, each as the mean of its tokens",
    aggregate.SeqMeanTokenSum: "every sequence as the sum of its tokens, mean over sequences",
    aggregate.TokenSum: "the plain sum over all tokens",
    aggregate.PromptMean: "every prompt counts the same, each as the mean over all tokens of its group",
    aggregate.LengthWeighted: "every sequence as its mean times its length, mean over sequences",
    aggregate.LocalTokenMean: "every token of this call counts the same, whatever the step holds",
    aggregate.LocalSeqMeanTokenMean: "every sequence of this call counts the same, each as the mean of its tokens",
}
