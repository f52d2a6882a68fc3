"""The printed formula of a loss: lines `name = expression` in the argument names of `policy_loss`, numbers filled in.

Each expression is Python over the small vocabulary below, so a formula can be read and can be run: a test evaluates the printed
lines and compares loss and gradient with `policy_loss`. Losses are written the way the field writes them (PPO as the max of two
terms), not the way the code computes them. Every name means a number per valid token; masked tokens do not exist here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from policyloss.explaining.trust_formulas import TRUST_FORMULAS, Pairs, held, number
from policyloss.slots import aggregate, correction, kl, ratio, trust
from policyloss.spec import LossSpec

VOCABULARY = {
    "sg": "sg(x): x with its gradient stopped",
    "clip": "clip(x, low, high): x held between low and high",
    "max": "max(a, b): the larger of the two, token by token",
    "min": "min(a, b): the smaller of the two, token by token",
    "where": "where(c, a, b): a where c holds, else b",
    "sigmoid": "sigmoid(x): 1 / (1 + exp(-x))",
    "seq_mean": "seq_mean(x): the mean of x over the token's sequence",
    "seq_sum": "seq_sum(x): the sum of x over the token's sequence",
    "seq_max": "seq_max(x): the largest x of the token's sequence",
    "seq_any": "seq_any(c): c holds for some token of the sequence",
    "seq_all": "seq_all(c): c holds for every token of the sequence",
    "run_mean": "run_mean(x): the mean of x over the token's unbroken run of the mask (a turn)",
    "run_all": "run_all(c): c holds for every token of the run",
    "token_mean": "token_mean(x): the mean of x over all tokens of the step",
    "sum": "sum(x): the sum of x over all tokens",
    "kth_largest": "kth_largest(x, k): the k-th largest x of the step (the smallest if there are fewer)",
    "floor": "floor(x): x rounded down",
    "draw": "draw(seed, …): a fixed pseudo-random number per token, made from the seed and the numbers given",
    "inf": "inf: no bound",
    "N": "N: tokens of the whole step (1 if there are none)",
    "B": "B: sequences of the whole step that have a token (1 if there are none)",
    "L": "L: tokens of the token's sequence",
    "G": "G: prompt groups of the whole step that have a token (1 if there are none)",
    "N_group": "N_group: tokens of the token's prompt group in the whole step",
    "n": "n: tokens of this call alone (1 if there are none)",
    "horizon": "horizon: the generation budget of the run in tokens, not set yet (spec.with_horizon)",
    "b": "b: sequences of this call alone that have a token (1 if there are none)",
}
ANCHORS = {"old": "old_logp", "rollout": "rollout_logp", "ref": "ref_logp", "current": "sg(logp)"}


class Line(NamedTuple):
    """One line of a formula."""

    name: str
    expression: str

    def __str__(self) -> str:
        return f"{self.name} = {self.expression}"


class CallableInSlot(NamedTuple):
    """A user's own function in a slot: its formula cannot be printed, only its name and the first line of its docstring."""

    slot: str
    name: str
    doc: str


@dataclass(frozen=True)
class Formula:
    """The lines of a loss in the order they are computed; the last one is `loss`. `exact` unless a slot holds a callable."""

    lines: tuple[Line, ...]
    callables: tuple[CallableInSlot, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether every line can be evaluated."""
        return not self.callables

    @property
    def vocabulary(self) -> dict[str, str]:
        """The words of `VOCABULARY` that the lines use."""
        used = names_in(" ".join(line.expression for line in self.lines))
        return {word: meaning for word, meaning in VOCABULARY.items() if word in used}

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)


def names_in(expression: str) -> set[str]:
    """The identifiers of an expression."""
    return set(re.findall(r"[A-Za-z_]\w*", expression))


def clamp_bounds(limit: Any) -> tuple[float | None, float | None]:
    """The two bounds of a `log_clamp`: a number means ±number, a pair is (low, high), None is no bound."""
    if limit is None:
        return None, None
    return (-limit, limit) if isinstance(limit, (int, float)) else (limit[0], limit[1])


def raw_log_ratio(part: Any) -> str:
    """The ratio slot's log-ratio before its clamp."""
    if not isinstance(part, ratio.VARIANTS):
        return f"{callable_name(part)}(tokens)"
    if hasattr(part, "formula"):
        return str(part.formula())
    difference = f"logp - {ANCHORS[part.anchor]}"
    if isinstance(part, ratio.SequenceRatio):
        return f"seq_mean({difference})" if part.grad == "sequence" else f"sg(seq_mean({difference})) + logp - sg(logp)"
    if isinstance(part, ratio.SequenceProduct):
        return f"seq_sum({held(difference, *clamp_bounds(part.token_clamp))})"
    return f"run_mean({difference})" if isinstance(part, ratio.SegmentRatio) else difference


def formula(spec: LossSpec) -> Formula:
    """The formula of `spec`, with only the lines that lead to the loss."""
    lines = [*_correction_lines(spec), *_ratio_lines(spec), *_trust_lines(spec), *_kl_lines(spec), *_loss_lines(spec)]
    return Formula(_live(lines), _callables(spec))


def callable_name(part: Any) -> str:
    """A name to print for a user's own function."""
    name = getattr(part, "__name__", type(part).__name__)
    return name if name.isidentifier() else "your_function"


def _callables(spec: LossSpec) -> tuple[CallableInSlot, ...]:
    found = []
    for slot, variants in (("ratio", ratio), ("trust", trust), ("correction", correction), ("kl", kl), ("aggregate", aggregate)):
        value = getattr(spec, slot)
        for part in value if slot == "correction" else (value,):
            if part is not None and not isinstance(part, variants.VARIANTS):
                doc = (getattr(part, "__doc__", None) or "").strip().split("\n")[0]
                found.append(CallableInSlot(slot, callable_name(part), doc))
    return tuple(found)


def _live(lines: list[Line]) -> tuple[Line, ...]:
    """The lines that `loss` depends on: read from the end, a line stays if a later one needs its name."""
    needed, kept = {"loss"}, []
    for line in reversed(lines):
        # The mask is in every sum and count without being written there.
        if line.name in needed or line.name == "mask":
            needed.discard(line.name)
            needed |= names_in(line.expression)
            kept.append(line)
    return tuple(reversed(kept))


def _ratio_lines(spec: LossSpec) -> list[Line]:
    low, high = clamp_bounds(getattr(spec.ratio, "log_clamp", 20.0))
    return [Line("log_ratio", held(raw_log_ratio(spec.ratio), low, high)), Line("ratio", "exp(log_ratio)")]


def _trust_lines(spec: LossSpec) -> list[Line]:
    part = spec.trust
    if not isinstance(part, trust.VARIANTS):
        return [Line("surrogate", f"{callable_name(part)}(tokens)")]
    anchor = ANCHORS[getattr(spec.ratio, "anchor", "old")]
    return [Line(*line) for line in TRUST_FORMULAS[type(part)](part, anchor)]


def _weight_at(level: str, log_clamp: float | None) -> str:
    inner = {"token": "log_weight", "geomean": "seq_mean(log_weight)", "product": "seq_sum(log_weight)"}[level]
    return f"exp({held(inner, *clamp_bounds(log_clamp))})"


def _within(x: str, low: float | None, high: float | None) -> str:
    tests = [f"({x} >= {number(low)})"] if low is not None else []
    if high is not None:
        tests.append(f"({x} <= {number(high)})")
    return " & ".join(tests)


def _verdict(part: Any) -> tuple[Pairs, str | None, str | None]:
    """Lines a correction needs first, then its weight and its test of which tokens to keep (None: 1, and all)."""
    if isinstance(part, correction.Truncate):
        low = part.low if part.low > 0 else None
        return [], held(_weight_at(part.level, part.log_clamp), low, part.high), None
    if isinstance(part, correction.Band):
        return [("w", _weight_at(part.level, part.log_clamp))], "w", _within("w", part.low, part.high)
    if isinstance(part, correction.SequenceMask):
        weight = {"token": _weight_at("token", part.log_clamp), "sequence": "w", None: None}[part.weight]
        return [("w", _weight_at(part.level, part.log_clamp))], weight, _within("w", part.low, part.high)
    if isinstance(part, correction.DivergenceMask):
        return _divergence_mask(part)
    if isinstance(part, correction.Reject):
        each = {"k1": "-log_weight", "k2": "0.5 * log_weight ** 2", "k3": "exp(log_weight) - 1 - log_weight"}[part.estimator]
        estimate = each if part.reduce == "token" else f"seq_{part.reduce}({each})"
        return [("estimate", estimate)], None, _within("estimate", part.low, part.high)
    if isinstance(part, correction.Veto):
        bad = [f"exp(log_weight) < {number(part.low)}"] if part.low is not None else []
        bad += [f"exp(log_weight) > {number(part.high)}"] if part.high is not None else []
        return [], None, f"~seq_any({bad[0]})" if len(bad) == 1 else f"~seq_any(({bad[0]}) | ({bad[1]}))"
    if isinstance(part, correction.OPSM):
        drift = f"seq_mean({ANCHORS[part.source]} - logp)"
        return [("drift", drift)], None, f"~((advantages < 0) & (drift > {number(part.delta)}))"
    return [("said", f"{callable_name(part)}(tokens)")], "said.weight", "said.keep"


def _divergence_mask(part: correction.DivergenceMask) -> tuple[Pairs, str | None, str | None]:
    floor = number(part.floor)
    before = [(name, f"clip(exp({logp}), {floor}, 1 - {floor})") for name, logp in (("p", "rollout_logp"), ("q", "old_logp"))]
    each = "abs(p - q)" if part.divergence == "tv" else "p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))"
    before.append(("apart", each if part.level == "token" else f"seq_mean({each})"))
    weight = None if part.weight is None else _weight_at("token", part.log_clamp)
    return before, weight, _within("apart", part.low, part.high)


def _correction_lines(spec: LossSpec) -> list[Line]:
    lines = [Line("log_weight", "old_logp - rollout_logp")]
    seen = set()
    parts = [c for c in spec.correction if not isinstance(c, correction.SelfNormalise)]
    for part in parts:
        before, weight, keep = _verdict(part)
        lines += [Line(*line) for line in before]
        for name, said, joined in (("weight", weight, "weight * {}"), ("keep", keep, "keep & {}")):
            if said is not None:
                lines.append(Line(name, joined.format(said) if name in seen else said))
                seen.add(name)
    if spec.rejected != "keep" and "keep" in seen:
        if spec.rejected == "drop_sequence":
            lines.append(Line("keep", "~seq_any(~keep)"))
        lines.append(Line("mask", "mask & keep"))
    for part in spec.correction:
        if isinstance(part, correction.SelfNormalise):
            if "keep" in seen:
                lines.append(Line("weight", "where(keep, weight, 0)"))
            mean = "token_mean(weight)" if part.over == "tokens" else "(sum(weight / L) / B)"
            lines.append(Line("weight", f"where(weight > 0, weight / {mean}, 0)"))
    return lines


def weighs(spec: LossSpec) -> bool:
    """Whether a correction multiplies the policy term by a weight."""
    return any(not isinstance(c, correction.SelfNormalise) and _verdict(c)[1] is not None for c in spec.correction)


def rejects(spec: LossSpec) -> bool:
    """Whether a correction can reject a token."""
    return any(not isinstance(c, correction.SelfNormalise) and _verdict(c)[2] is not None for c in spec.correction)


def _kl_lines(spec: LossSpec) -> list[Line]:
    part = spec.kl
    if part is None:
        return []
    if not isinstance(part, kl.KL):
        return [Line("kl", f"{callable_name(part)}(tokens)")]
    anchor = ANCHORS[part.anchor]
    estimate = {"k1": "-d", "abs": "abs(d)", "k2": "0.5 * d ** 2", "k3": "exp(d) - d - 1"}[part.estimator]
    lines = [
        Line("d", held(f"{anchor} - logp", *clamp_bounds(part.clamp))),
        Line("kl", held(estimate, *clamp_bounds(part.value_clamp))),
    ]
    if part.grad == "k2":
        lines += [Line("pull", f"0.5 * ({anchor} - logp) ** 2"), Line("kl", "sg(kl - pull) + pull")]
    elif part.grad == "score":
        lines.append(Line("kl", "kl * exp(logp - sg(logp))"))
    weight = _kl_weight(part, spec)
    if weight is not None:
        lines.append(Line("kl", f"kl * {weight}"))
    return lines


def _kl_weight(part: kl.KL, spec: LossSpec) -> str | None:
    """The ratio that multiplies a KL part, which a framework's part may say itself; None without one."""
    if hasattr(part, "weight_formula"):
        said: str | None = part.weight_formula(ANCHORS[getattr(spec.ratio, "anchor", "old")])
        if said is not None:
            return said
    return part.weight


def _loss_lines(spec: LossSpec) -> list[Line]:
    policy = "weight * surrogate" if weighs(spec) else "surrogate"
    if rejects(spec) and spec.rejected == "keep":
        policy = f"where(keep, {policy}, 0)"
    if spec.kl is not None:
        policy += f" + {number(spec.kl.coef if isinstance(spec.kl, kl.KL) else 1.0)} * kl"
    if spec.entropy_coef:
        policy += f" - {number(spec.entropy_coef)} * entropy"
    if policy == "surrogate":
        return [Line("loss", _aggregated(spec.aggregate, "surrogate"))]
    return [Line("token_loss", policy), Line("loss", _aggregated(spec.aggregate, "token_loss"))]


def _aggregated(part: Any, x: str) -> str:
    if isinstance(part, (aggregate.SeqMeanTokenSumNorm, aggregate.TokenSumNorm)):
        horizon = "horizon" if part.horizon is None else number(part.horizon)
        return f"sum({x}) / (B * {horizon})" if isinstance(part, aggregate.SeqMeanTokenSumNorm) else f"sum({x}) / {horizon}"
    if isinstance(part, aggregate.VARIANTS) and hasattr(part, "averaged"):
        return str(part.averaged(x))
    plain = {
        aggregate.TokenMean: f"sum({x}) / N",
        aggregate.SeqMeanTokenMean: f"sum({x} / L) / B",
        aggregate.SeqMeanTokenSum: f"sum({x}) / B",
        aggregate.TokenSum: f"sum({x})",
        aggregate.PromptMean: f"sum({x} / N_group) / G",
        aggregate.LengthWeighted: f"sum(L * ({x} / L)) / B",
        aggregate.LocalTokenMean: f"sum({x}) / n",
        aggregate.LocalSeqMeanTokenMean: f"sum({x} / L) / b",
    }
    return plain.get(type(part), f"sum({callable_name(part)}(tokens) * {x})")
