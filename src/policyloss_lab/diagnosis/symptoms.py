"""Detectors: each reads a few curves of a run and returns a symptom, or None."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from policyloss_lab.diagnosis.curves import Curve, Log
from policyloss_lab.logs.names import TITLES
from policyloss_lab.reading import finite

# In the order of computation: a nonfinite number spreads to later metrics.
ORDER = ("rollout", "reward", "advantage", "old", "entropy", "kl", "ratio", "loss", "grad")
ROUNDING = 1e-12  # k3 between equal policies in float32

# One action for each symptom.
REMEDIES = {
    "nonfinite": "Print the inputs of that number at that step.",
    "engine_mismatch": "Pass one batch of tokens to lab.doctor, which looks for the cause.",
    "no_gradient": "Check that the mask covers tokens and that no tensor of the loss is detached.",
    "learning_rate_high": "Divide the learning rate by 3.",
    "learning_rate_low": "Multiply the learning rate by 10.",
    "gradient_spike": "Read the rewards and completions of that step, and bound the advantages.",
    "gradient_growth": "Restart before that step with a third of the learning rate.",
    "clip_saturation": "Halve the number of updates per batch.",
    "value_error": "Scale rewards to a size of about 1, and train the critic alone at first.",
    "reward_hacking": "Read completions with a high reward, and change the reward they exploit.",
    "truncation": "Raise the length limit.",
    "length_growth": "Use a token mean or a fixed horizon (Dr. GRPO), not a sequence mean.",
    "kl_drift": "Restart before that step with a larger KL coefficient.",
    "entropy_collapse": "Raise the upper bound of the ratio (clip-higher).",
    "entropy_growth": "Lower the entropy bonus, or without one the learning rate.",
    "dead_groups": "Use prompts of middling difficulty, once the reward can tell answers apart.",
    "collapse": "Restart before that step with a third of the learning rate.",
    "no_learning": "Check by hand that right answers of one batch have a positive advantage.",
}
# These are severe even while the score rises.
SEVERE = ("nonfinite", "no_gradient", "reward_hacking", "collapse")


class Finding(NamedTuple):
    """A symptom. step: the first one that shows it. severity: "severe" if going on is of no use,
    "warning" if the score rises all the same.
    """

    cause: str
    step: int
    evidence: str
    remedy: str
    severity: str


Symptom = tuple[str, int, str]  # cause, first step, evidence


def find_symptoms(log: Log) -> list[Finding]:
    """All symptoms; of a log with fewer than `least_steps` steps, only nonfinite numbers."""
    harmed = bool(log.values(log.score)) and not log.improved
    findings = []
    for detect in DETECTORS if log.steps >= log.limits.least_steps else (not_finite,):
        if (symptom := detect(log)) is not None:
            cause, step, evidence = symptom
            severity = "severe" if harmed or cause in SEVERE else "warning"
            findings.append(Finding(cause, step, evidence, REMEDIES[cause], severity))
    return findings


def beyond(log: Log, cause: str, name: str, bound: float, evidence: str) -> Symptom | None:
    """The symptom of a curve that stays at a bound or above it for a tenth of the run. evidence:
    with a place for the highest level.
    """
    if (top := log.highest(name)) < bound:
        return None
    return cause, log.onset(name, lambda y: y >= bound), evidence.format(top)


def not_finite(log: Log) -> Symptom | None:
    """The first step with a nonfinite number, and the first such metric."""
    bad = [
        (step, _rank(name), name)
        for name, curve in log.raw.items()
        for step, y in curve
        if not math.isfinite(y) and not _may_be_nan(name)
    ]
    skipped = [step for step, y in log.raw.get("skipped", []) if y > 0]
    if not bad and not skipped:
        return None
    step = min([s for s, _, _ in bad] + skipped)
    names = [name for s, _, name in sorted(bad) if s == step]
    evidence = f"updates were skipped from step {step} on, because their gradient was not finite"
    if names:
        steps = len({s for s, _, _ in bad})
        listed = f"{', '.join(names[:4])} {'are' if names[1:] else 'is'}"
        evidence = f"{listed} not finite at step {step}"
        evidence += f" ({steps} such steps)" if steps > 1 else ""
        evidence += f"; the first in the order of computation is {names[0]}" if names[1:] else ""
    return "nonfinite", step, evidence


def _may_be_nan(name: str) -> bool:
    """Whether NaN is a usual value of a metric: TRL's rewards/<name>/… of a reward function that
    did not apply, and an explained variance of returns that are all equal.
    """
    return ("rewards/" in name and name.count("/") > 1) or "explained_var" in name


def _rank(name: str) -> int:
    """The index of a metric in `ORDER`: `policy/advantage_mean` is an advantage."""
    words = (place for place, word in enumerate(ORDER) if word in name)
    return next(words, len(ORDER))


def engine_mismatch(log: Log) -> Symptom | None:
    """An engine that disagrees with the trainer at nearly every step, or by far. Completions of
    older weights also differ, but hardly at the first step or while the policy hardly changes.
    """
    values, limits = sorted(log.values("mismatch")), log.limits
    always = bool(values) and values[len(values) // 10] >= limits.mismatch
    bound = limits.mismatch if always else limits.mismatch_far
    evidence = "KL(rollout, old) reaches {:.3g} nats per token; a healthy engine has at most 0.002"
    return beyond(log, "engine_mismatch", "mismatch", bound, evidence)


def no_gradient(log: Log) -> Symptom | None:
    """A gradient of exactly 0 that neither equal rewards nor a solved task explains."""
    if "dead_groups" not in log.curves and (log.solved or log.end("grad_norm") != 0):
        return None
    zero = Log({"zero": [(step, float(y == 0)) for step, y in _live_gradients(log)]})
    count = sum(zero.values("zero"))
    evidence = f"the gradient norm is exactly 0 in {count:.0f} steps, and not for equal rewards"
    return beyond(zero, "no_gradient", "zero", 1.0, evidence)


def _live_gradients(log: Log) -> Curve:
    """The gradient norms of steps in which the rewards of some group differ."""
    dead = dict(log.curves.get("dead_groups", []))
    return [(step, y) for step, y in log.finite("grad_norm") if dead.get(step, 0.0) < 1]


def learning_rate(log: Log) -> Symptom | None:
    """Steps so large that they destroy the policy, or so small that they do not change it."""
    moves, limits, stuck = log.finite("step_kl"), log.limits, not (log.learned or log.solved)
    large = [(step, y) for step, y in moves if y > limits.step_kl_high]
    if large and (stuck or log.highest("step_kl") > limits.step_kl_high):
        top, step = max((y, step) for step, y in large)
        evidence = f"step {step} moves the policy by {top:.3g} nats per token"
        return "learning_rate_high", large[0][0], evidence
    # Before the only update of a batch, the ratio is 1 up to rounding at any learning rate.
    # verl's ppo_kl is the mean of -log(ratio), which has both signs.
    sizes = [abs(y) for _, y in moves if abs(y) > ROUNDING]
    # Equal rewards cause no gradient, and so no step, at any learning rate.
    idle = log.end("dead_groups") >= limits.dead_groups
    if not stuck or len(sizes) < limits.least_steps or idle or median(sizes) >= limits.step_kl_low:
        return None
    evidence = f"one step moves the policy by {median(sizes):.1e} nats per token, and the reward "
    return "learning_rate_low", moves[0][0], evidence + "did not rise"


def gradient_spike(log: Log) -> Symptom | None:
    """A step with a far larger gradient, or far larger advantages, than the steps around it."""
    for name in ("grad_norm", "advantage_std"):
        for step, size, times in log.outliers(name):
            evidence = f"the {TITLES[name]} is {size:.3g} at step {step}, {times:.0f} times the "
            return "gradient_spike", step, f"{evidence}usual number around it{_tokens(log, step)}"
    return None


def _tokens(log: Log, step: int) -> str:
    """The stored tokens of a step with the largest weight in the gradient, |advantage|·ratio."""
    weights: list[tuple[float, str]] = []
    for row in log.rollouts:
        ratios, tokens = row.get("ratio"), row.get("tokens")
        if row.get("step") == step and isinstance(ratios, list) and isinstance(tokens, list):
            each = row.get("token_advantage")
            each = each if isinstance(each, list) else [None] * len(ratios)
            for ratio, advantage, token in zip(ratios, each, tokens, strict=False):
                sizes = map(finite, (advantage, row.get("advantage"), 1.0))
                if finite(ratio) is not None:
                    size = next(x for x in sizes if x is not None)
                    weights.append((ratio * abs(size), str(token)))
    top = [f"{token!r} ({x:.3g})" for x, token in sorted(weights, reverse=True)[:3]]
    return f"; of the stored tokens, those with most weight are {', '.join(top)}" if top else ""


def gradient_growth(log: Log) -> Symptom | None:
    """A gradient norm that stays at a multiple of its start."""
    live = Log({"grad_norm": [(step, y) for step, y in _live_gradients(log) if y > 0]})
    start = live.base("grad_norm")
    evidence = f"the gradient norm grew from {start:.3g} to {{:.3g}}"
    bound = log.limits.gradient_growth * start
    return beyond(live, "gradient_growth", "grad_norm", bound, evidence)


def clip_saturation(log: Log) -> Symptom | None:
    """Most tokens are clipped; or, for a quarter of the run, one side clips many tokens."""
    limits, evidence = log.limits, "{:.0%} of the tokens are clipped"
    if both := beyond(log, "clip_saturation", "clip", limits.clip_share, evidence):
        return both
    for name, other in (("clip_high", "clip_low"), ("clip_low", "clip_high")):
        if not log.values(name) or not log.values(other):
            return None
        share, first, last = log.busiest(name)
        rest = median([y for step, y in log.finite(other) if first <= step <= last] or [0.0])
        if share >= max(limits.clip_side, limits.clip_ratio * rest):
            evidence = f"{share:.0%} of the tokens are {TITLES[name]} in steps {first} to {last}, "
            return "clip_saturation", first, evidence + f"and {rest:.1%} at the other"
    return None


def value_error(log: Log) -> Symptom | None:
    """A critic that predicts worse than a constant does."""
    limits, explained = log.limits, log.end("value_explained")
    if 1 - explained >= limits.value_variance and not log.solved:
        first = log.onset("value_explained", lambda y: 1 - y >= limits.value_variance)
        evidence = f"the explained variance of the critic is {explained:.3g}; a constant has 0"
        return "value_error", first, evidence
    mean, spread = max(map(abs, log.values("reward")), default=0.0), log.end("reward_std")
    # Without a logged spread, single rewards may be ten times their mean.
    square = mean**2 + (spread**2 if spread else (10 * mean) ** 2)
    value, paid = log.end("value_mean"), log.end("value_return")
    known = log.values("value_mean") and log.values("value_return")
    if known and abs(value - paid) >= limits.value_bias * math.sqrt(square) > 0:
        evidence = f"the critic predicts {value:.3g} on average, and the returns are {paid:.3g}"
        return "value_error", log.finite("value_mean")[0][0], evidence
    usual = square or log.base("value_loss")
    evidence = f"the value loss reaches {{:.5g}}; a critic that predicts 0 has about {usual:.3g}"
    return beyond(log, "value_error", "value_loss", limits.value_loss * usual, evidence)


def reward_hacking(log: Log) -> Symptom | None:
    """A reward that rises while the held-out score falls, from its start or from its best."""
    if log.trend("reward") <= 0 or (log.trend("held_out") >= 0 and log.fall("held_out") is None):
        return None
    step, best = max(log.finite("held_out"), key=lambda point: point[1])
    evidence = f"the reward rose to {log.end('reward'):.3g}, but the held-out score fell from "
    return "reward_hacking", step, f"{evidence}{best:.3g} to {log.end('held_out', 10):.3g}"


def truncation(log: Log) -> Symptom | None:
    """Completions are cut at the end of the run, or were cut before and are no better since."""
    limit = log.limits.truncated
    if log.improved and log.end("truncated") < limit:
        return None
    evidence = "{:.0%} of the completions are cut at the length limit"
    return beyond(log, "truncation", "truncated", limit, evidence)


def length_growth(log: Log) -> Symptom | None:
    """Completions that grow without a better score."""
    if log.improved:
        return None
    start = log.base("length")
    evidence = f"completions grew from {start:.3g} to {{:.3g}} tokens, and the score did not rise"
    bound = log.limits.length_growth * start
    return beyond(log, "length_growth", "length", bound, evidence)


def kl_drift(log: Log) -> Symptom | None:
    """A policy far from the reference without a better score, or very far with one."""
    bound, evidence = log.limits.kl_far, "the KL to the reference reaches {:.3g} nats per token"
    if not log.improved:
        bound, evidence = log.limits.kl_high, evidence + ", and the score did not rise"
    return beyond(log, "kl_drift", "kl", bound, evidence)


def entropy_collapse(log: Log) -> Symptom | None:
    """Entropy that fell to a small share of its start before the task was solved."""
    start, end = log.start("entropy"), log.end("entropy")
    bound = log.limits.entropy_share * start
    if start <= 0 or end > bound or log.solved:
        return None
    first = log.onset("entropy", lambda y: y <= bound)
    return "entropy_collapse", first, f"entropy fell from {start:.3g} to {end:.3g} nats"


def entropy_growth(log: Log) -> Symptom | None:
    """Entropy that stays at a multiple of its start: the policy becomes random."""
    start = log.base("entropy")
    evidence = f"entropy grew from {start:.3g} to {{:.3g}} nats"
    return beyond(log, "entropy_growth", "entropy", log.limits.entropy_growth * start, evidence)


def dead_groups(log: Log) -> Symptom | None:
    """Groups with equal rewards have no gradient. Groups with only right answers count
    among them, so the share of right answers is subtracted.
    """
    share, limits = log.end("dead_groups"), log.limits
    unsolved = not log.solved and share - log.right >= limits.dead_unsolved
    if share < limits.dead_groups or not unsolved:
        return None
    evidence = f"{share:.0%} of the groups have equal rewards, so they teach nothing, and "
    first = log.onset("dead_groups", lambda y: y >= limits.dead_groups)
    return "dead_groups", first, evidence + f"{log.right:.0%} of the answers are right"


def no_learning(log: Log) -> Symptom | None:
    """A reward that is lost again (a collapse), or that is no better than at the start."""
    if (fall := log.fall("reward")) is not None:
        top, last, step = fall
        return "collapse", step, f"the reward reached {top:.3g} and fell to {last:.3g}"
    rewards = log.finite("reward")
    if len(rewards) < 3 * log.limits.least_steps or log.learned or log.solved:
        return None
    start, end = log.start("reward"), log.end("reward")
    evidence = f"the reward is {start:.3g} at the beginning and {end:.3g} at the end"
    return "no_learning", rewards[0][0], evidence


# Causes come before their possible effects.
DETECTORS: tuple[Callable[[Log], Symptom | None], ...] = (
    *(not_finite, engine_mismatch, no_gradient, learning_rate, gradient_spike, gradient_growth),
    *(clip_saturation, value_error, reward_hacking, truncation, length_growth, kl_drift),
    *(entropy_collapse, entropy_growth, dead_groups, no_learning),
)
