"""The formulas of the trust slot, as text: for each variant, the lines that lead from `ratio` and `log_ratio` to `surrogate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from policyloss.slots import trust


def number(x: float) -> str:
    """A number as Python source that reads back to the same float; whole numbers without a point."""
    if math.isinf(x):
        return "inf" if x > 0 else "-inf"
    return str(int(x)) if float(x).is_integer() and abs(x) < 1e15 else repr(float(x))


def held(x: str, low: float | None, high: float | None) -> str:
    """`x` between two bounds; None and infinities do not bind."""
    floor = None if low is None or low == -math.inf else number(low)
    ceiling = None if high is None or high == math.inf else number(high)
    return between(x, floor, ceiling)


def between(x: str, floor: str | None, ceiling: str | None) -> str:
    """`x` between two bounds given as source text."""
    if floor is not None and ceiling is not None:
        return f"clip({x}, {floor}, {ceiling})"
    if ceiling is not None:
        return f"min({x}, {ceiling})"
    return x if floor is None else f"max({x}, {floor})"


Pairs = list[tuple[str, str]]


def _band_of_eps(eps_low: float, eps_high: float) -> str:
    floor = None if math.isinf(eps_low) else f"1 - {number(eps_low)}"
    ceiling = None if math.isinf(eps_high) else f"1 + {number(eps_high)}"
    return between("ratio", floor, ceiling)


def _clipped(eps_low: float, eps_high: float) -> str:
    band = _band_of_eps(eps_low, eps_high)
    return "-advantages * ratio" if band == "ratio" else f"max(-advantages * ratio, -advantages * {band})"


def _clip(p: trust.Clip, anchor: str) -> Pairs:
    if p.dual is None or math.isinf(p.dual):
        return [("surrogate", _clipped(p.eps_low, p.eps_high))]
    bound = f"where(advantages < 0, min(clipped, -advantages * {number(p.dual)}), clipped)"
    return [("clipped", _clipped(p.eps_low, p.eps_high)), ("surrogate", bound)]


def _two_sided(p: trust.TwoSidedClip, anchor: str) -> Pairs:
    capped, band = held("ratio", None, p.delta), _band_of_eps(p.eps_low, p.eps_high)
    return [("surrogate", f"-min({capped} * advantages, {band} * advantages)")]


def _detached(p: trust.DetachedClip, anchor: str) -> Pairs:
    low, high = number(p.ratio_min), number(p.ratio_max)
    loss = f"-sg({held('ratio', p.ratio_min or None, p.ratio_max)}) * advantages * logp"
    if p.outside == "clip":
        return [("surrogate", loss)]
    if p.outside == "zero":
        dropped, loss = f"(ratio > {high}) | (ratio < {low})", "-sg(ratio) * advantages * logp"
    else:
        dropped = f"(advantages > 0) & (ratio > {high}) | (advantages < 0) & (ratio < {low})"
    return [("dropped", dropped), ("surrogate", f"where(dropped, 0, {loss})")]


def _soft_gate(p: trust.SoftGate, anchor: str) -> Pairs:
    tau = f"where(advantages > 0, {number(p.tau_positive)}, {number(p.tau_negative)})"
    return [("tau", tau), ("surrogate", "-advantages * 4 / tau * sigmoid(tau * (ratio - 1))")]


def _band(p: trust.ProbabilityBand, anchor: str) -> Pairs:
    low, high = number(p.low), number(p.high)
    if p.divergence == "tv":
        lines = [("change", f"exp(logp) - exp({anchor})")]
        up, down = f"change > {high}", f"change < -{low}"
    else:
        binary = f"p0 * ({anchor} - logp) + (1 - p0) * log((1 - p0 + 1e-8) / (1 - p + 1e-8))"
        lines = [("p", "exp(logp)"), ("p0", f"exp({anchor})"), ("divergence", binary)]
        up, down = f"(p > p0) & (divergence > {high})", f"(p < p0) & (divergence > {low})"
    outside = f"({up}) | ({down})" if p.sides == "both" else f"where(advantages > 0, {up}, {down})"
    weight = held("ratio", None, p.cap)
    loss = "-ratio * advantages" if p.form == "ratio" else f"-sg({weight}) * advantages * logp"
    return [*lines, ("outside", outside), ("surrogate", f"where(outside, 0, {loss})")]


def _geometric(p: trust.GeometricClip, anchor: str) -> Pairs:
    positive, negative = held("log_ratio", None, p.eps_high), held("log_ratio", -p.eps_low, None)
    clipped = f"where(advantages > 0, {positive}, where(advantages < 0, {negative}, 0))"
    return [("clipped", clipped), ("surrogate", "-advantages * exp(seq_mean(clipped))")]


def _gamma(p: trust.GammaWeight, anchor: str) -> Pairs:
    k = f"where(advantages >= 0, {number(p.k_positive)}, {number(p.k_negative)})"
    rate = f"where(advantages >= 0, {number(p.lambda_positive)}, {number(p.lambda_negative)})"
    return [("k", k), ("rate", rate), ("surrogate", "-sg(ratio ** k * exp(rate * (1 - ratio))) * advantages * logp")]


def _quadratic(p: trust.Quadratic, anchor: str) -> Pairs:
    return [("surrogate", f"-(advantages * logp - 0.5 * {number(p.beta)} * log_ratio ** 2)")]


def _tapered(p: trust.TaperedNegative, anchor: str) -> Pairs:
    negative = f"-sg({held('ratio', None, p.ratio_max)}) * advantages * logp"
    return [("surrogate", f"where(advantages > 0, -advantages * logp, {negative})")]


def _unbounded(p: trust.Unbounded, anchor: str) -> Pairs:
    return [("surrogate", f"-advantages * {p.form}")]


_COVARIANCE = ("cov", "(advantages - token_mean(advantages)) * (logp - token_mean(logp))")


def _cov_clip(p: trust.CovClip, anchor: str) -> Pairs:
    low, high = f"1 - {number(p.eps_low)}", f"1 + {number(p.eps_high)}"
    free = f"~((advantages > 0) & (ratio > {high}) | (advantages < 0) & (ratio < {low}))"
    count = f"max(floor({number(p.fraction)} * N), 1)"
    return [
        _COVARIANCE,
        ("candidate", f"(cov > {number(p.cov_low)}) & (cov < {number(p.cov_high)}) & {free}"),
        ("lot", f"where(candidate, draw({p.seed}, {anchor}, advantages), -1)"),
        ("dropped", f"candidate & (lot >= kth_largest(lot, {count}))"),
        ("surrogate", f"where(dropped, 0, {_clipped(p.eps_low, p.eps_high)})"),
    ]


def _cov_kl(p: trust.CovKL, anchor: str) -> Pairs:
    chosen = f"cov >= kth_largest(cov, max(floor({number(p.fraction)} * N), 1))"
    penalty = "abs(log_ratio)" if p.coef == 1 else f"{number(p.coef)} * abs(log_ratio)"
    loss = f"-advantages * ratio + where(chosen, {penalty}, 0)"
    return [_COVARIANCE, ("chosen", chosen), ("surrogate", loss)]


TRUST_FORMULAS: dict[type, Callable[[Any, str], Pairs]] = {
    trust.Clip: _clip,
    trust.TwoSidedClip: _two_sided,
    trust.DetachedClip: _detached,
    trust.SoftGate: _soft_gate,
    trust.ProbabilityBand: _band,
    trust.GeometricClip: _geometric,
    trust.GammaWeight: _gamma,
    trust.CovClip: _cov_clip,
    trust.CovKL: _cov_kl,
    trust.Quadratic: _quadratic,
    trust.TaperedNegative: _tapered,
    trust.Unbounded: _unbounded,
}
