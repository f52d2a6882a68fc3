"""Causes from logs: each detector looks at a few curves and returns a finding, or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from policyloss.doctor.logs.read import finite

Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class LogThresholds:
    """When a curve is a symptom; docs/doctor.md says where each number comes from."""

    least_steps: int = 8
    entropy_share: float = 0.2
    dead_groups: float = 0.8
    clip_side: float = 0.2
    clip_ratio: float = 4.0
    kl_growth: float = 10.0
    kl_least: float = 0.1
    spike: float = 10.0
    truncated: float = 0.5
    length_growth: float = 2.0
    reward_drop: float = 0.5
    reward_gain: float = 0.25
    step_kl_high: float = 0.1
    step_kl_low: float = 1e-6
    mismatch: float = 0.01
    solved: float = 0.9


class Finding(NamedTuple):
    """A symptom: its cause, where it begins, what shows it, and what to do."""

    cause: str
    step: int
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Log:
    """The curves of a run by their names here. rollouts: stored completions, if any."""

    curves: Mapping[str, Curve]
    raw: Mapping[str, Curve] = field(default_factory=dict)
    rollouts: Sequence[Mapping[str, Any]] = ()

    def values(self, name: str) -> list[float]:
        """The finite values of a curve."""
        return finite([y for _, y in self.curves.get(name, [])])

    def first(self, name: str, share: float = 0.25) -> float | None:
        """The median of its first part."""
        ys = self.values(name)
        return median(ys[: max(1, math.ceil(len(ys) * share))]) if ys else None

    def last(self, name: str, share: float = 0.25) -> float | None:
        """The median of its last part."""
        ys = self.values(name)
        return median(ys[-max(1, math.ceil(len(ys) * share)) :]) if ys else None

    def since(self, name: str, test: Callable[[float], bool]) -> int:
        """The step from which on a curve passes a test to its end."""
        begin = 0
        for step, y in reversed(self.curves.get(name, [])):
            if not test(y):
                break
            begin = step
        return begin


Detector = Callable[[Log, LogThresholds], "Finding | None"]


def not_finite(log: Log, limits: LogThresholds) -> Finding | None:
    """The first number that is none, and the metric that had it first."""
    rows = [(s, name) for name, c in log.raw.items() for s, y in c if not math.isfinite(y)]
    rows += [(s, "skipped") for s, y in log.raw.get("skipped", []) if y > 0]
    if not rows:
        return None
    step = min(s for s, _ in rows)
    names = sorted(name for s, name in rows if s == step)
    order = ("rollout", "reward", "advantage", "old", "entropy", "ratio", "loss", "grad", "skipped")
    ranked = sorted(names, key=lambda n: next((i for i, w in enumerate(order) if w in n), 99))
    return Finding(
        "nonfinite",
        step,
        f"{', '.join(ranked[:4])} is not finite from step {step} on; the first of them in the "
        f"order of computation is {ranked[0]}",
        "Look at the inputs of that number at that step: rewards, masks without tokens, −inf "
        "log-probabilities, half precision.",
    )


def entropy_collapse(log: Log, limits: LogThresholds) -> Finding | None:
    """Entropy that fell to a small share of what it was, before the task was solved."""
    first, last = log.first("entropy", 0.1), log.last("entropy", 0.1)
    if first is None or last is None or first <= 0 or last > limits.entropy_share * first:
        return None
    if _solved(log, limits):
        return None
    bound = limits.entropy_share * first
    return Finding(
        "entropy_collapse",
        log.since("entropy", lambda y: y <= bound),
        f"entropy fell from {first:.3g} to {last:.3g} nats",
        "Raise eps_high (clip-higher), lower the learning rate, add an entropy bonus or Clip-Cov, "
        "or sample at a higher temperature.",
    )


def dead_groups(log: Log, limits: LogThresholds) -> Finding | None:
    """Groups whose rewards are all equal: they have no gradient."""
    last = log.last("dead_groups", 0.5)
    if last is None or last < limits.dead_groups or _solved(log, limits):
        return None
    return Finding(
        "dead_groups",
        log.since("dead_groups", lambda y: y >= limits.dead_groups),
        f"{last:.0%} of the groups have equal rewards, so they teach nothing",
        "Use prompts of middling difficulty, larger groups, dynamic sampling, or a finer reward.",
    )


def clip_saturation(log: Log, limits: LogThresholds) -> Finding | None:
    """A large share of tokens held by the trust region, nearly all on one side."""
    high, low = log.last("clip_high"), log.last("clip_low")
    if high is None or low is None or max(high, low) < limits.clip_side:
        return None
    if max(high, low) < limits.clip_ratio * min(high, low):
        return None
    side, share = ("upper", high) if high > low else ("lower", low)
    return Finding(
        "clip_saturation",
        log.since(f"clip_{'high' if side == 'upper' else 'low'}", lambda y: y >= limits.clip_side),
        f"{share:.0%} of the tokens are clipped at the {side} bound, and few at the other",
        "Lower the learning rate or the number of updates per batch; check the ratio of an "
        "unchanged policy with pl.doctor.",
    )


def kl_drift(log: Log, limits: LogThresholds) -> Finding | None:
    """A KL to the reference that keeps growing."""
    first, last = log.first("kl", 0.2), log.last("kl", 0.1)
    if first is None or last is None or last < limits.kl_least:
        return None
    if last < limits.kl_growth * max(first, 1e-4):
        return None
    return Finding(
        "kl_drift",
        log.since("kl", lambda y: y >= limits.kl_least),
        f"the KL to the reference grew from {first:.3g} to {last:.3g} nats a token",
        "Raise the KL coefficient, lower the learning rate, or refresh the reference.",
    )


def gradient_spike(log: Log, limits: LogThresholds) -> Finding | None:
    """A gradient norm far above those around it, with the tokens that may have made it."""
    curve = [(s, y) for s, y in log.curves.get("grad_norm", []) if math.isfinite(y)]
    if len(curve) < limits.least_steps:
        return None
    middle = median(y for _, y in curve)
    wild = [(s, y) for s, y in curve if y > limits.spike * max(middle, 1e-12)]
    if not wild:
        return None
    step, size = wild[0]
    return Finding(
        "gradient_spike",
        step,
        f"the gradient norm is {size:.3g} at step {step}, {size / max(middle, 1e-12):.0f} times "
        f"its median{_tokens(log, step)}",
        "Clip the gradient norm, look at the tokens with the largest ratio of that step, and skip "
        "batches beyond a bound.",
    )


def _tokens(log: Log, step: int) -> str:
    """The tokens with the largest ratios among the completions that were stored at a step."""
    moved: list[tuple[float, str]] = []
    for row in log.rollouts:
        if row.get("step") == step:
            ratios, tokens = row.get("ratio"), row.get("tokens")
            if isinstance(ratios, list) and isinstance(tokens, list):
                sizes = [abs(math.log(r)) if isinstance(r, float) and r > 0 else 0 for r in ratios]
                moved += [(x, str(t)) for x, t in zip(sizes, tokens, strict=False)]
    top = [repr(token) for _, token in sorted(moved, reverse=True)[:3]]
    return f"; the tokens whose ratio moved most are {', '.join(top)}" if top else ""


def truncation(log: Log, limits: LogThresholds) -> Finding | None:
    """Completions that are cut at the length limit, or grow without a better reward."""
    cut = log.last("truncated")
    if cut is not None and cut >= limits.truncated:
        return Finding(
            "truncation",
            log.since("truncated", lambda y: y >= limits.truncated),
            f"{cut:.0%} of the completions are cut at the length limit",
            "Raise the limit, mask or penalise what is cut (overlong filtering), and check that "
            "the end token is sampled and trained on.",
        )
    first, last = log.first("length"), log.last("length")
    if first and last and last >= limits.length_growth * first and _gain(log) < limits.reward_gain:
        return Finding(
            "length_growth",
            log.since("length", lambda y: y >= limits.length_growth * first),
            f"completions grew from {first:.3g} to {last:.3g} tokens without a better reward",
            "Use a token mean or a fixed horizon (Dr. GRPO) in place of a sequence mean, and a "
            "penalty for length.",
        )
    return None


def reward_hacking(log: Log, limits: LogThresholds) -> Finding | None:
    """A reward that rises while the held-out score falls."""
    first, last = log.first("held_out"), log.last("held_out")
    if first is None or last is None or len(log.values("held_out")) < 3:
        return None
    if _gain(log) < limits.reward_gain or last > first - 0.1 * max(abs(first), 0.1):
        return None
    return Finding(
        "reward_hacking",
        0,
        f"the reward rose, but the held-out score fell from {first:.3g} to {last:.3g}",
        "Read completions with a high reward; the reward pays for something else than the task.",
    )


def learning_rate(log: Log, limits: LogThresholds) -> Finding | None:
    """A learning rate that destroys the policy, or that does not move it."""
    rewards = log.values("reward")
    if len(rewards) < limits.least_steps:
        return None
    width = max(2, len(rewards) // 8)
    smooth = [sum(rewards[i : i + width]) / width for i in range(len(rewards) - width + 1)]
    top, bottom, last = max(smooth), min(rewards), smooth[-1]
    drift, begin = log.values("step_kl"), rewards[0]
    fell = last < top - limits.reward_drop * max(top - bottom, 1e-9) and last < smooth[0]
    if drift and max(drift) > limits.step_kl_high and (fell or last <= begin):
        return Finding(
            "learning_rate_high",
            0,
            f"one step moves the policy by {max(drift):.3g} nats a token, and the reward went from "
            f"{top:.3g} to {last:.3g}",
            "Lower the learning rate (three times at a time), or clip the gradient norm.",
        )
    idle = (log.last("dead_groups", 0.5) or 0.0) >= limits.dead_groups  # no gradient, no step
    if drift and median(drift) < limits.step_kl_low and not idle and not _solved(log, limits):
        return Finding(
            "learning_rate_low",
            0,
            f"one step moves the policy by {median(drift):.1e} nats a token: it hardly learns",
            "Raise the learning rate, and check that the optimizer holds the trained weights.",
        )
    return None


def engine_mismatch(log: Log, limits: LogThresholds) -> Finding | None:
    """An engine that disagrees with the trainer."""
    values = log.values("mismatch")
    if not values or median(values) < limits.mismatch:
        return None
    return Finding(
        "engine_mismatch",
        log.since("mismatch", lambda y: y >= limits.mismatch),
        f"KL(rollout, old) is {median(values):.3g} nats a token; a healthy engine has 0.0002 to "
        "0.002",
        "Pass a batch to pl.doctor: it names the cause.",
    )


def no_learning(log: Log, limits: LogThresholds) -> Finding | None:
    """A reward that stays where it was, though groups differ and the policy moves."""
    rewards = log.values("reward")
    if len(rewards) < 3 * limits.least_steps or _solved(log, limits):
        return None
    n = len(rewards) // 3
    first, last = rewards[:n], rewards[-n:]
    spread = (sum((x - sum(rewards) / len(rewards)) ** 2 for x in rewards) / len(rewards)) ** 0.5
    moved = abs(sum(last) - sum(first)) / n
    if moved > spread / math.sqrt(n) * 2 or spread > 0.5 * max(abs(max(rewards)), 1e-9):
        return None
    return Finding(
        "no_learning",
        0,
        f"the reward is {sum(first) / n:.3g} at the beginning and {sum(last) / n:.3g} at the end",
        "Check that rewards differ inside groups, that advantages reach the loss with the right "
        "sign, and that the mask covers the completion.",
    )


def _solved(log: Log, limits: LogThresholds) -> bool:
    """Whether the task is solved, so that calm curves are no symptom."""
    accuracy = log.last("accuracy") or log.last("held_out")
    return accuracy is not None and accuracy >= limits.solved


def _gain(log: Log) -> float:
    """How much the reward rose, in units of its spread over the run."""
    rewards = log.values("reward")
    first, last = log.first("reward"), log.last("reward")
    if not rewards or first is None or last is None:
        return 0.0
    return (last - first) / max(max(rewards) - min(rewards), 1e-9)


DETECTORS: tuple[Detector, ...] = (
    not_finite,
    gradient_spike,
    entropy_collapse,
    dead_groups,
    clip_saturation,
    kl_drift,
    truncation,
    reward_hacking,
    learning_rate,
    engine_mismatch,
    no_learning,
)
