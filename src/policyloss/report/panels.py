"""Which metric is drawn in which chart; what no panel names is under "More metrics"."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

OTHER = "More metrics"


class Panel(NamedTuple):
    """One chart: its name in links, its section and title, a hint for the reader, the metrics it
    draws, and the scale it starts with.
    """

    id: str
    section: str
    title: str
    hint: str
    patterns: tuple[str, ...]
    log: bool = False
    share: bool = False  # the axis is 0 to 1


PANELS = (
    Panel(
        "accuracy",
        "Learning",
        "Accuracy",
        "reward ≥ the task's success (1 unless set): held-out (greedy), and of the samples",
        ("eval/accuracy", "accuracy"),
        share=True,
    ),
    Panel(
        "reward",
        "Learning",
        "Reward",
        "mean over a step's samples, and its spread",
        ("reward/mean", "reward/std", "eval/reward"),
    ),
    Panel(
        "kl",
        "Policy",
        "KL estimates",
        "k3: never negative",
        ("policy/kl_old_k3", "policy/kl_rollout_k3", "policy/kl_ref"),
        log=True,
    ),
    Panel(
        "clip",
        "Policy",
        "Clip fractions",
        "share of tokens the trust region holds",
        (
            "policy/clip_fraction",
            "policy/clip_fraction_upper",
            "policy/clip_fraction_lower",
            "policy/clip_fraction*",
        ),
    ),
    Panel("entropy", "Policy", "Entropy", "nats per token", ("policy/entropy",)),
    Panel(
        "grad",
        "Policy",
        "Gradient norm",
        "before clipping",
        ("grad_norm", "critic_grad_norm"),
        log=True,
    ),
    Panel("ratio", "Policy", "Ratio", "mean and extremes", ("policy/ratio_m*",), log=True),
    Panel(
        "loss",
        "Policy",
        "Policy loss",
        "its value says little: see the traps of the loss",
        ("policy/loss",),
    ),
    Panel(
        "length",
        "Rollouts",
        "Completion length",
        "tokens",
        ("length/mean", "length/max", "eval/length"),
    ),
    Panel("truncated", "Rollouts", "Truncated", "share cut at the length limit", ("truncated",)),
    Panel(
        "groups",
        "Rollouts",
        "Groups",
        "kept, and without spread in reward",
        ("groups/kept", "groups/zero_variance"),
    ),
    Panel("value", "Critic", "Value loss", "as it is trained", ("value/loss",), log=True),
    Panel(
        "explained",
        "Critic",
        "Explained variance",
        "of the returns; 1 is all of it",
        ("value/explained_variance",),
    ),
    Panel(
        "values",
        "Critic",
        "Values and returns",
        "means over tokens",
        ("value/value_mean", "value/return_mean"),
    ),
    Panel(
        "speed",
        "Speed",
        "Tokens per second",
        "trained tokens over the whole step",
        ("timing/*tokens*",),
    ),
    Panel(
        "seconds",
        "Speed",
        "Seconds per step",
        "in all, and of its parts",
        ("timing/step_s", "timing/*"),
    ),
)


def panels_for(keys: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that have something to draw: `Panel` as data, with "keys" for its patterns."""
    left = sorted(keys)
    charts = []
    for panel in PANELS:
        taken = _matching(panel.patterns, left)
        matched = set(taken)
        left = [key for key in left if key not in matched]
        if taken:
            charts.append({**panel._asdict(), "keys": taken})
    signed = {"hint": "", "section": OTHER, "log": False, "share": False}
    charts += [{**signed, "id": f"m{i}", "title": key, "keys": [key]} for i, key in enumerate(left)]
    return [
        {name: value for name, value in panel.items() if name != "patterns"} for panel in charts
    ]


def _matching(patterns: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The keys that match, in the order of the patterns, which is the order of the line styles."""
    return list(
        dict.fromkeys(key for pattern in patterns for key in keys if fnmatchcase(key, pattern))
    )
