"""The charts and their metrics; metrics of no chart are under "More metrics"."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

OTHER = "More metrics"


class Panel(NamedTuple):
    """One chart. id: for links. hint: a description in plain words. judge: good and bad signs.
    lines: the names of its metrics, or patterns of them, each with the name of its line in the
    chart, "" for the name of the metric. log: whether it starts with a logarithmic scale.
    """

    id: str
    section: str
    title: str
    hint: str
    judge: str
    lines: dict[str, str]
    log: bool = False
    share: bool = False  # the axis is 0 to 1


PANELS = (
    Panel(
        "accuracy",
        "Learning",
        "Accuracy",
        "Share of answers that are right: their reward is at least what the task counts as "
        "success, which is 1 unless it says otherwise. Held-out prompts are never trained on; each "
        "is answered once, greedily.",
        "Good: both rise and stay high. Bad: only the training samples rise, or both fall.",
        {"eval/accuracy": "held-out", "accuracy": "training samples"},
        share=True,
    ),
    Panel(
        "reward",
        "Learning",
        "Reward",
        "Rewards of the completions of a step: their mean and their spread (standard deviation).",
        "Good: the mean rises. Bad: it falls, or the spread is 0, which teaches nothing.",
        {"reward/mean": "mean", "reward/std": "spread", "eval/reward": "held-out mean"},
    ),
    Panel(
        "kl",
        "Policy",
        "KL estimates",
        "How far the policy is from itself before the step, from the engine that sampled, and from "
        "the reference model, in nats; 0 is no difference.",
        "Good: small and steady. Bad: it jumps, or grows without end.",
        {
            "policy/kl_old_k3": "from the start of the step",
            "policy/kl_rollout_k3": "from the sampler",
            "policy/kl_ref": "from the reference",
        },
        log=True,
    ),
    Panel(
        "clip",
        "Policy",
        "Clip fractions",
        "Share of tokens that the trust region holds back, which get no gradient.",
        "Good: small, and it falls. Bad: near 0.5, so the steps are too large.",
        {
            "policy/clip_fraction": "all",
            "policy/clip_fraction_upper": "at the upper bound",
            "policy/clip_fraction_lower": "at the lower bound",
            "policy/clip_fraction_dual": "at the dual bound",
            "policy/clip_fraction*": "",
        },
    ),
    Panel(
        "entropy",
        "Policy",
        "Entropy",
        "How undecided the policy is, in nats per token.",
        "Good: it falls slowly. Bad: it drops to 0 while the reward is low, or it explodes.",
        {"policy/entropy": ""},
    ),
    Panel(
        "grad",
        "Policy",
        "Gradient norm",
        "Length of the gradient before it is clipped.",
        "Good: steady. Bad: spikes, 0, or NaN (×).",
        {"grad_norm": "policy", "critic_grad_norm": "critic"},
        log=True,
    ),
    Panel(
        "ratio",
        "Policy",
        "Ratio",
        "New probability of a token over its old one: mean and extremes.",
        "Good: the mean is near 1. Bad: extremes that grow from step to step.",
        {
            "policy/ratio_max": "largest",
            "policy/ratio_mean": "mean",
            "policy/ratio_min": "smallest",
            "policy/ratio_m*": "",
        },
        log=True,
    ),
    Panel(
        "loss",
        "Policy",
        "Policy loss",
        "What the optimiser makes small. Its value says little: see the traps of the loss.",
        "Do not judge a run by it; a good run need not lower it.",
        {"policy/loss": ""},
    ),
    Panel(
        "length",
        "Rollouts",
        "Completion length",
        "How many tokens a completion has.",
        "Good: it settles. Bad: it runs into the limit, or shrinks to nothing.",
        {"length/mean": "mean", "length/max": "longest", "eval/length": "held-out mean"},
    ),
    Panel(
        "truncated",
        "Rollouts",
        "Truncated",
        "Share of completions that were cut at the length limit.",
        "Good: near 0. Bad: it rises; answers that are cut cannot be right.",
        {"truncated": ""},
    ),
    Panel(
        "groups",
        "Rollouts",
        "Groups",
        "A group is the completions of one prompt. How many were kept, and in how many all rewards "
        "are equal.",
        "Good: few are equal while the reward is low. Bad: all are equal, so nothing is learned.",
        {"groups/kept": "kept", "groups/zero_variance": "all rewards equal"},
    ),
    Panel(
        "value",
        "Critic",
        "Value loss",
        "How wrong the critic is about the return.",
        "Good: it falls and stays low. Bad: it grows.",
        {"value/loss": ""},
        log=True,
    ),
    Panel(
        "explained",
        "Critic",
        "Explained variance",
        "Share of the returns' variance that the critic foresees; 1 is all of it.",
        "Good: it nears 1. Bad: 0 or below, no better than a constant.",
        {"value/explained_variance": ""},
    ),
    Panel(
        "values",
        "Critic",
        "Values and returns",
        "Means over tokens of the critic's prediction and of the return.",
        "Good: they lie close together. Bad: a gap that stays.",
        {"value/value_mean": "expected by the critic", "value/return_mean": "return"},
    ),
    Panel(
        "speed",
        "Speed",
        "Tokens per second",
        "Trained tokens over the time of a whole step.",
        "Good: high and steady. Bad: it falls while completions do not grow.",
        {"timing/*tokens*": ""},
    ),
    Panel(
        "seconds",
        "Speed",
        "Seconds per step",
        "How long a step takes, in all and in its parts.",
        "Good: low and steady. Bad: it grows from step to step.",
        {"timing/step_s": "whole step", "timing/*": ""},
    ),
)


# The name of a line in its chart; hovering over it shows the name of the metric.
LABELS = {name: label for panel in PANELS for name, label in panel.lines.items() if label}
LABELS |= {"timing/sample_s": "sampling", "timing/learn_s": "learning"}


def panels_for(keys: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that have something to draw: `Panel` as data, with "keys" for its lines."""
    left = dict.fromkeys(sorted(keys))
    charts = []
    for panel in PANELS:
        # The order of the lines is the order of their styles.
        taken = [key for pattern in panel.lines for key in left if fnmatchcase(key, pattern)]
        for key in taken:
            left.pop(key, None)
        if taken:
            shown = {name: value for name, value in panel._asdict().items() if name != "lines"}
            charts.append({**shown, "keys": list(dict.fromkeys(taken))})
    signed = {"hint": "", "judge": "", "section": OTHER, "log": False, "share": False}
    others = [{**signed, "id": f"m{i}", "title": key, "keys": [key]} for i, key in enumerate(left)]
    return charts + others
