"""Detectors: each reads a few curves of a run and returns a finding, or None."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from policyloss_lab.diagnosis.curves import Log
from policyloss_lab.reading import finite

# In the order of computation: a nonfinite number spreads to later metrics.
ORDER = ("rollout", "reward", "advantage", "old", "entropy", "kl", "ratio", "loss", "grad")

ROUNDING = 1e-12  # k3 between equal policies in float32


class Finding(NamedTuple):
    """A symptom: its cause, its first step (0: no particular step), the evidence and the remedy."""

    cause: str
    step: int
    evidence: str
    remedy: str


Detector = Callable[[Log], "Finding | None"]


def not_finite(log: Log) -> Finding | None:
    """The first step with a nonfinite number, and the first such metric."""
    bad = [
        (step, _rank(name), name)
        for name, curve in log.raw.items()
        for step, y in curve
        # In TRL's rewards/<name>/…, a reward function that did not apply is NaN legitimately.
        if not math.isfinite(y) and not ("rewards/" in name and name.count("/") > 1)
    ]
    skipped = [step for step, y in log.raw.get("skipped", []) if y > 0]
    if not bad and not skipped:
        return None
    step = min([s for s, _, _ in bad] + skipped)
    names = [name for s, _, name in sorted(bad) if s == step]
    evidence = f"updates were skipped from step {step} on, because their gradient was not finite"
    if names:
        steps = len({s for s, _, _ in bad})
        verb = "are" if names[1:] else "is"
        evidence = f"{', '.join(names[:4])} {verb} not finite at step {step}"
        evidence += f" ({steps} such steps)" if steps > 1 else ""
        if names[1:]:
            evidence += f"; the first of them in the order of computation is {names[0]}"
    return Finding(
        "nonfinite",
        step,
        evidence,
        "Look at the inputs of that number at that step: rewards, a deviation of 0 below an "
        "advantage, masks without tokens, −inf log-probabilities, half precision.",
    )


def _rank(name: str) -> int:
    """The index of a metric in `ORDER`: `policy/advantage_mean` is an advantage."""
    words = (place for place, word in enumerate(ORDER) if word in name)
    return next(words, len(ORDER))


def gradient_spike(log: Log) -> Finding | None:
    """A step with a far larger gradient, or far larger advantages, than the steps around it."""
    for name, words in (("grad_norm", "gradient norm"), ("advantage_std", "spread of advantages")):
        for step, size, times in log.outliers(name):
            return Finding(
                "gradient_spike",
                step,
                f"the {words} is {size:.3g} at step {step}, {times:.0f} times what is usual around "
                f"it{_tokens(log, step)}",
                "Look at the rewards and the completions of that step; bound the advantages, clip "
                "the gradient norm, or skip batches beyond a bound.",
            )
    return None


def _tokens(log: Log, step: int) -> str:
    """The tokens with the largest weight in the gradient, |advantage|·ratio, among the stored
    completions of a step.
    """
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


def entropy_collapse(log: Log) -> Finding | None:
    """Entropy that fell to a small share of its start before the task was solved."""
    start, end = log.start("entropy"), log.end("entropy")
    if start is None or end is None or log.solved:
        return None
    bound = log.limits.entropy_share * start
    if start <= 0 or end > bound:
        return None
    return Finding(
        "entropy_collapse",
        log.since("entropy", lambda y: y <= bound),
        f"entropy fell from {start:.3g} to {end:.3g} nats",
        "Raise eps_high (clip-higher), lower the learning rate, add an entropy bonus or Clip-Cov, "
        "or sample at a higher temperature.",
    )


def dead_groups(log: Log) -> Finding | None:
    """Groups with equal rewards have no gradient. Groups with only right answers count
    among them, so the share of right answers is subtracted.
    """
    share = log.end("dead_groups")
    if share is None or share < log.limits.dead_groups:
        return None
    if log.solved or share - log.right < log.limits.dead_unsolved:
        return None
    return Finding(
        "dead_groups",
        log.since("dead_groups", lambda y: y >= log.limits.dead_groups),
        f"{share:.0%} of the groups have equal rewards, so they teach nothing, and "
        f"{log.right:.0%} of the answers are right",
        "Check that the reward can tell answers apart; use prompts of middling difficulty, larger "
        "groups, dynamic sampling, or a finer reward.",
    )


def clip_saturation(log: Log) -> Finding | None:
    """For a quarter of the run, one side of the trust region clips many tokens."""
    sides = {"clip_high": "upper", "clip_low": "lower"}
    for name, other in (("clip_high", "clip_low"), ("clip_low", "clip_high")):
        if not log.values(name) or not log.values(other):
            return None
        share, first, last = log.busiest(name)
        there = [y for step, y in log.finite(other) if first <= step <= last]
        rest = median(there) if there else 0.0
        if share >= max(log.limits.clip_side, log.limits.clip_ratio * rest):
            return Finding(
                "clip_saturation",
                first,
                f"{share:.0%} of the tokens are clipped at the {sides[name]} bound in steps "
                f"{first} to {last}, and {rest:.1%} at the other",
                "Lower the learning rate or the number of updates per batch, or widen that bound; "
                "check the ratio of an unchanged policy with lab.doctor.",
            )
    return None


def kl_drift(log: Log) -> Finding | None:
    """A policy far from the reference without a better score."""
    end = log.end("kl")
    if end is None or end < log.limits.kl_high or log.solved or log.trend(log.score) > 0:
        return None
    words = "held-out score" if log.score == "held_out" else "reward"
    return Finding(
        "kl_drift",
        log.since("kl", lambda y: y >= log.limits.kl_high),
        f"the KL to the reference is {end:.3g} nats a token, and the {words} did not rise",
        "Raise the KL coefficient, lower the learning rate, or check the reward.",
    )


def truncation(log: Log) -> Finding | None:
    """Completions are cut at the end of the run; or completions were cut at the start of the
    run, and the shorter completions afterwards are no better.
    """
    start, end = log.start("truncated"), log.end("truncated")
    if start is None or end is None:
        return None
    limit = log.limits.truncated
    early = start >= limit and log.trend(log.score) <= 0
    if end < limit and not early:
        return None
    share, when = end, ""
    if end < limit:
        share, when = start, " at the start, and the score did not rise as they became shorter"
    return Finding(
        "truncation",
        log.since("truncated", lambda y: y >= limit),
        f"{share:.0%} of the completions are cut at the length limit{when}",
        "Raise the limit, mask or penalise cut completions (overlong filtering), and check that "
        "the end token is sampled and trained on.",
    )


def length_growth(log: Log) -> Finding | None:
    """Completions that grow without a better score."""
    start, end = log.start("length"), log.end("length")
    if not start or not end or end < log.limits.length_growth * start:
        return None
    if log.solved or log.trend(log.score) > 0:
        return None
    bound = log.limits.length_growth * start
    words = "held-out score" if log.score == "held_out" else "reward"
    return Finding(
        "length_growth",
        log.since("length", lambda y: y >= bound),
        f"completions grew from {start:.3g} to {end:.3g} tokens, and the {words} did not rise",
        "Use a token mean or a fixed horizon (Dr. GRPO) in place of a sequence mean, and a "
        "penalty for length; check that the reward does not pay for length.",
    )


def reward_hacking(log: Log) -> Finding | None:
    """A reward that rises while the held-out score falls."""
    if log.trend("reward") <= 0 or log.trend("held_out") >= 0:
        return None
    numbers = [log.start("reward"), log.end("reward"), log.start("held_out"), log.end("held_out")]
    before, after, first, last = (x or 0.0 for x in numbers)
    return Finding(
        "reward_hacking",
        0,
        f"the reward rose from {before:.3g} to {after:.3g}, but the held-out score fell from "
        f"{first:.3g} to {last:.3g}",
        "Read completions with a high reward; the reward pays for something else than the task.",
    )


def learning_rate(log: Log) -> Finding | None:
    """A run without progress, where the learning rate destroys the policy or does not change it."""
    moves = log.finite("step_kl")
    if not moves or log.learned or log.solved:
        return None
    step, top = max(moves, key=lambda move: move[1])
    if top > log.limits.step_kl_high:
        rewards = dict(log.finite("reward"))
        evidence = f"step {step} moves the policy by {top:.3g} nats a token"
        if step in rewards:
            end = log.end("reward")
            evidence += (
                f", and the reward goes from {rewards[step]:.3g} there to {end:.3g} at the end"
            )
        return Finding(
            "learning_rate_high",
            step,
            evidence,
            "Lower the learning rate (three times at a time), or clip the gradient norm.",
        )
    # Before the only update of a batch, the ratio is 1 up to rounding at any learning rate.
    # verl's ppo_kl is the mean of -log(ratio), which has both signs.
    sizes = [abs(y) for _, y in moves if abs(y) > ROUNDING]
    # Equal rewards cause no gradient, and thus no step, at any learning rate.
    idle = (log.end("dead_groups") or 0.0) >= log.limits.dead_groups
    if len(sizes) < log.limits.least_steps or idle:
        return None
    usual = median(sizes)
    if usual < log.limits.step_kl_low:
        return Finding(
            "learning_rate_low",
            0,
            f"one step moves the policy by {usual:.1e} nats a token, and the reward did not rise",
            "Raise the learning rate, and check that the optimizer holds the trained weights.",
        )
    return None


def engine_mismatch(log: Log) -> Finding | None:
    """An engine that disagrees with the trainer at nearly every step. Completions of older weights
    also cause a difference, but hardly at the first step or while the policy hardly changes.
    """
    values = sorted(log.values("mismatch"))
    if not values or values[len(values) // 10] < log.limits.mismatch:
        return None
    return Finding(
        "engine_mismatch",
        log.since("mismatch", lambda y: y >= log.limits.mismatch),
        f"KL(rollout, old) is {median(values):.3g} nats a token; a healthy engine has 0.0002 to "
        "0.002",
        "Pass a batch to lab.doctor: it names the cause.",
    )


def no_learning(log: Log) -> Finding | None:
    """Neither the reward nor the held-out score is better than at the start."""
    start, end = log.start("reward"), log.end("reward")
    if start is None or end is None or len(log.values("reward")) < 3 * log.limits.least_steps:
        return None
    if log.learned or log.solved:
        return None
    return Finding(
        "no_learning",
        0,
        f"the reward is {start:.3g} at the beginning and {end:.3g} at the end",
        "Check that rewards differ inside groups and depend on the answer, that advantages reach "
        "the loss with the right sign, and that the mask covers the completion.",
    )


# Causes come before their possible effects.
DETECTORS: tuple[Detector, ...] = (
    not_finite,
    engine_mismatch,
    learning_rate,
    gradient_spike,
    clip_saturation,
    reward_hacking,
    truncation,
    length_growth,
    kl_drift,
    entropy_collapse,
    dead_groups,
    no_learning,
)
