"""Hand-made curves on both sides of every threshold of the diagnosis from logs: each pair differs
in one number, next to a reward that rises unless the pair says otherwise.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields

import pytest

import policyloss as pl
from policyloss_lab.diagnosis.curves import LogThresholds
from policyloss_lab.diagnosis.run_doctor import RunDiagnosis, diagnose_rows
from policyloss_lab.diagnosis.symptoms import REMEDIES

STEPS = 40
Row = dict[str, float]
Change = Callable[[int], Row]


def judge(change: Change, steps: int = STEPS) -> RunDiagnosis:
    """The verdict on a run whose reward rises from 0.2 to 0.6; `change` adds or replaces."""
    rows = [
        {"step": s, "reward/mean": 0.2 + 0.4 * s / steps + 0.01 * math.sin(s), **change(s)}
        for s in range(1, steps + 1)
    ]
    return diagnose_rows(rows)


def named(change: Change, steps: int = STEPS) -> list[tuple[str, int, str]]:
    return [(f.cause, f.step, f.severity) for f in judge(change, steps).findings]


def late(name: str, before: float, after: float, first: int = 21) -> Change:
    """A curve that steps from one level to another."""
    return lambda s: {name: after if s >= first else before}


def stuck(change: Change) -> Change:
    """The same in a run whose reward does not rise, and whose task is not solved."""
    return lambda s: {"reward/mean": 0.3 + 0.02 * math.sin(s), **change(s)}


# (inside the threshold, beyond it, the symptom, its first step)
RISING: dict[str, tuple[Change, Change, str, int]] = {
    "kl_far": (late("kl", 0.1, 1.9), late("kl", 0.1, 2.1), "kl_drift", 21),
    "kl of 4.7": (late("kl", 0.1, 0.4), late("kl", 0.1, 4.7), "kl_drift", 21),
    "gradient_growth": (
        late("grad_norm", 0.5, 4.9),
        late("grad_norm", 0.5, 5.1),
        "gradient_growth",
        21,
    ),
    "gradient times 370": (
        lambda s: {"grad_norm": 0.5 * 8 ** (s / STEPS)},
        lambda s: {"grad_norm": 0.5 * 370 ** (s / STEPS)},
        "gradient_growth",
        # 370^(s/40) passes 10 times its start, 370^(2.5/40) = 1.447, at s = 18.1.
        19,
    ),
    "spike": (
        lambda s: {"grad_norm": 9.5 if s == 17 else 0.5},
        lambda s: {"grad_norm": 10.5 if s == 17 else 0.5},
        "gradient_spike",
        17,
    ),
    "gradient of 0": (
        late("grad_norm", 0.5, 1e-9),
        late("grad_norm", 0.5, 0.0),
        "no_gradient",
        21,
    ),
    "entropy_growth": (
        late("entropy", 0.5, 1.4),
        late("entropy", 0.5, 1.6),
        "entropy_growth",
        21,
    ),
    "entropy_share": (
        late("entropy", 0.5, 0.11),
        late("entropy", 0.5, 0.09),
        "entropy_collapse",
        21,
    ),
    "clip_share": (
        late("policy/clip_fraction", 0.1, 0.49),
        late("policy/clip_fraction", 0.1, 0.51),
        "clip_saturation",
        21,
    ),
    "clip_share, sides": (
        lambda s: {"clip_ratio/low_mean": 0.24, "clip_ratio/high_mean": 0.24},
        lambda s: {"clip_ratio/low_mean": 0.26, "clip_ratio/high_mean": 0.26},
        "clip_saturation",
        1,
    ),
    "clip_side": (
        lambda s: {"clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.09},
        lambda s: {"clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.11},
        "clip_saturation",
        1,
    ),
    "clip_ratio": (
        lambda s: {"clip_ratio/low_mean": 0.29, "clip_ratio/high_mean": 0.1},
        lambda s: {"clip_ratio/low_mean": 0.31, "clip_ratio/high_mean": 0.1},
        "clip_saturation",
        1,
    ),
    "step_kl_high": (
        late("approx_kl", 0.01, 0.09),
        late("approx_kl", 0.01, 0.11),
        "learning_rate_high",
        21,
    ),
    "mismatch_far": (
        late("rollout_corr/kl", 0.0, 0.09),
        late("rollout_corr/kl", 0.0, 0.11),
        "engine_mismatch",
        21,
    ),
    "truncated": (late("truncated", 0.1, 0.49), late("truncated", 0.1, 0.51), "truncation", 21),
    # The mean squared reward is at most 0.6² + 0.4² = 0.52.
    "value_loss": (
        lambda s: {"reward/std": 0.4, **late("value/loss", 0.1, 5.0)(s)},
        lambda s: {"reward/std": 0.4, **late("value/loss", 0.1, 5.4)(s)},
        "value_error",
        21,
    ),
    # Without a spread, 101 times the largest squared mean: 36.
    "value loss of 10,102": (
        late("value/loss", 0.1, 350.0),
        late("value/loss", 0.1, 10_102.0),
        "value_error",
        21,
    ),
    "value_variance": (
        late("value/explained_variance", 0.3, -0.45),
        late("value/explained_variance", 0.3, -0.55),
        "value_error",
        21,
    ),
    # A usual reward is 0.72, so the bound is 0.36.
    "value_bias": (
        lambda s: {"reward/std": 0.4, "value/value_mean": 0.2, "value/return_mean": 0.55},
        lambda s: {"reward/std": 0.4, "value/value_mean": 0.2, "value/return_mean": 0.57},
        "value_error",
        1,
    ),
}
STUCK: dict[str, tuple[Change, Change, str, int]] = {
    "kl_high": (late("kl", 0.1, 0.49), late("kl", 0.1, 0.51), "kl_drift", 21),
    "length_growth": (
        late("length/mean", 10, 19),
        late("length/mean", 10, 21),
        "length_growth",
        21,
    ),
    "step_kl_low": (
        lambda s: {"approx_kl": 1.1e-6},
        lambda s: {"approx_kl": 0.9e-6},
        "learning_rate_low",
        1,
    ),
    "step_kl_high once": (
        lambda s: {"approx_kl": 0.09 if s == 9 else 1e-3},
        lambda s: {"approx_kl": 0.11 if s == 9 else 1e-3},
        "learning_rate_high",
        9,
    ),
    "dead_groups": (
        late("frac_reward_zero_std", 0.3, 0.79),
        late("frac_reward_zero_std", 0.3, 0.81),
        "dead_groups",
        21,
    ),
}


@pytest.mark.parametrize("name", RISING)
def test_a_bound_holds_next_to_a_reward_that_rises(name: str) -> None:
    inside, outside, cause, step = RISING[name]
    assert judge(inside).healthy
    severity = "severe" if cause == "no_gradient" else "warning"
    assert named(outside) == [(cause, step, severity)]


@pytest.mark.parametrize("name", STUCK)
def test_a_bound_holds_next_to_a_reward_that_does_not_rise(name: str) -> None:
    inside, outside, cause, step = STUCK[name]
    assert named(stuck(inside)) == [("no_learning", 1, "severe")]
    assert named(stuck(outside)) == [(cause, step, "severe"), ("no_learning", 1, "severe")]


def test_thresholds_do_not_depend_on_units() -> None:
    for scale in (1e-3, 1.0, 1e3):

        def scaled(step: int, times: float, scale: float = scale) -> Row:
            return {
                "reward/mean": scale * (0.2 + 0.01 * step),
                "reward/std": 0.4 * scale,
                "value/loss": scale**2 * 0.05 * times,
                "grad_norm": scale * (1.0 if step < 21 else 0.3 * times),
            }

        assert judge(lambda s: scaled(s, 1.0)).healthy
        causes = [f.cause for f in judge(lambda s: scaled(s, 200.0)).findings]
        assert causes == ["gradient_growth", "value_error"]


# Rewards that fall --------------------------------------------------------------------------------


def hill(peak: float, last: float) -> Change:
    """A reward that rises from 0.2 to a peak until step 20, and then ends at `last`."""

    def reward(step: int) -> Row:
        level = 0.2 + (peak - 0.2) * step / 20 if step <= 20 else peak if step <= 28 else last
        return {"reward/mean": level + 0.01 * math.sin(step)}

    return reward


def test_a_collapse_is_not_a_run_that_never_learned() -> None:
    (finding,) = judge(hill(0.8, 0.2)).findings
    assert (finding.cause, finding.step, finding.severity) == ("collapse", 29, "severe")
    assert finding.evidence == "the reward reached 0.801 and fell to 0.205"
    flat = named(lambda s: {"reward/mean": 0.3 + 0.02 * math.sin(s)})
    assert flat == [("no_learning", 1, "severe")]


def test_a_collapse_loses_half_of_the_gain() -> None:
    # The best quarter has the level 0.8, and the start is 0.275: half of the gain is 0.26.
    assert judge(hill(0.8, 0.56)).healthy
    assert [cause for cause, _, _ in named(hill(0.8, 0.52))] == ["collapse"]


def test_a_level_that_was_there_from_the_start_can_collapse() -> None:
    assert named(late("reward/mean", 0.6, 0.02, 15)) == [("collapse", 15, "severe")]
    assert named(late("reward/mean", 0.6, 0.4, 15)) == [("no_learning", 1, "severe")]


def test_a_collapse_in_the_last_tenth_is_seen() -> None:
    assert [cause for cause, _, _ in named(late("reward/mean", 0.6, 0.05, 37))] == ["collapse"]


def test_a_held_out_score_that_falls_from_its_best_is_hacking() -> None:
    def held_out(last: float) -> Change:
        scores = {4: 0.2, 8: 0.4, 12: 0.6, 16: 0.7, 20: 0.7, 24: 0.7, 28: last, 32: last, 40: last}
        return lambda s: {"eval/accuracy": scores[s]} if s in scores else {}

    assert named(held_out(0.65)) == []
    ((cause, step, severity),) = named(held_out(0.25))
    assert (cause, step, severity) == ("reward_hacking", 16, "severe")


def test_a_few_held_out_scores_pay_for_a_kl_if_the_reward_rises() -> None:
    def far(first: float, last: float) -> Change:
        scores = {1: first, 20: (first + last) / 2, 40: last}
        return lambda s: {"kl": 0.6, **({"eval/accuracy": scores[s]} if s in scores else {})}

    assert judge(far(0.4, 0.7)).healthy
    assert [cause for cause, _, _ in named(far(0.4, 0.41))] == ["kl_drift"]
    assert [cause for cause, _, _ in named(stuck(far(0.4, 0.7)))] == ["kl_drift", "no_learning"]


# Numbers that have a good reason ------------------------------------------------------------------


def test_an_explained_variance_of_equal_returns_is_no_nan() -> None:
    nan = {"value/explained_variance": math.nan}
    assert judge(lambda s: nan if s % 2 else {"value/explained_variance": 0.4}).healthy
    assert judge(lambda s: {"critic/vf_explained_var": math.nan, "grad_norm": 1.0}).healthy
    assert named(lambda s: {"value/loss": math.nan}) == [("nonfinite", 1, "severe")]


def test_a_solved_task_may_have_returns_without_variance() -> None:
    poor = {"value/explained_variance": -3.0, "reward/std": 0.05, "value/loss": 0.01}
    assert judge(lambda s: {**poor, "accuracy": 0.95}).healthy
    assert [cause for cause, _, _ in named(lambda s: {**poor, "accuracy": 0.5})] == ["value_error"]


def test_returns_around_zero_have_no_bias() -> None:
    near = {"value/value_mean": 0.01, "value/return_mean": -0.02, "reward/std": 1.0}
    assert judge(lambda s: {**near, "reward/mean": -0.3 + 0.02 * s}).healthy


def test_equal_rewards_explain_a_gradient_of_zero() -> None:
    quiet = {"grad_norm": 0.0, "frac_reward_zero_std": 1.0}
    lively = {"grad_norm": 0.5, "frac_reward_zero_std": 0.4}
    assert judge(lambda s: quiet if s <= 10 else lively).healthy
    lost = {"grad_norm": 0.0, "frac_reward_zero_std": 0.4}
    assert named(lambda s: lost if s <= 10 else lively) == [("no_gradient", 1, "severe")]
    # Without the groups in the log, only zeros at the end of an unsolved run count.
    assert judge(lambda s: {"grad_norm": 0.0 if s <= 10 else 0.5}).healthy
    assert judge(lambda s: {"grad_norm": 0.5 if s <= 10 else 0.0, "accuracy": 1.0}).healthy


def test_first_rewards_after_dead_steps_are_no_growth() -> None:
    first = {"grad_norm": 1e-4, "frac_reward_zero_std": 1.0}
    later = {"grad_norm": 0.5, "frac_reward_zero_std": 0.6}
    assert judge(lambda s: first if s <= 10 else later).healthy


def test_a_curve_of_few_points_is_judged() -> None:
    assert named(lambda s: {"kl": 3.0} if s == 30 else {}) == [("kl_drift", 30, "warning")]


# Sentences ----------------------------------------------------------------------------------------


def test_no_symptom_lists_the_checked_curves_and_the_missing_ones() -> None:
    text = str(judge(lambda s: {"grad_norm": 1.0, "value/loss": 0.1}))
    assert text == (
        "healthy: no symptom in 40 steps\n"
        "  Checked: gradient norm, reward, value loss.\n"
        "  Not in the log, so not checked: spread of rewards, right answers, held-out score, "
        "entropy, KL to the reference, KL of a step, clipped tokens, clipped at the upper bound, "
        "clipped at the lower bound, spread of advantages, length, cut completions, groups with "
        "equal rewards, KL between engine and trainer, explained variance, mean value, mean return."
    )
    assert "explained variance" not in str(judge(lambda s: {}))  # a log without a critic


def test_a_symptom_is_one_line_with_severity_step_and_remedy() -> None:
    text = str(judge(late("kl", 0.1, 4.7)))
    assert text.splitlines()[:2] == [
        "1 symptom in 40 steps",
        "  warning: kl_drift from step 21: the KL to the reference reaches 4.7 nats per token. "
        "Remedy: Restart before that step with a larger KL coefficient.",
    ]


def test_every_symptom_has_one_remedy() -> None:
    seen = {cause for *_, cause, _ in (*RISING.values(), *STUCK.values())}
    others = {"nonfinite", "reward_hacking", "collapse", "no_learning"}
    assert seen | others == set(REMEDIES)
    assert all(text.endswith(".") and text.count(".") <= 2 for text in REMEDIES.values())


def test_every_threshold_can_be_given_as_an_option() -> None:
    # The command takes numbers from 0 up.
    assert all(getattr(LogThresholds(), field.name) > 0 for field in fields(LogThresholds))


# Many healthy runs --------------------------------------------------------------------------------


def healthy_run(seed: int) -> list[Row]:
    """A run that learns, of random length, level, noise, units and logged curves."""
    draw = random.Random(seed)
    steps, unit = draw.choice((20, 60, 200)), 10 ** draw.uniform(-2, 2)
    first, last, noise = draw.uniform(0, 0.4), draw.uniform(0.6, 1.0), draw.uniform(0.005, 0.05)
    entropy, growth = draw.uniform(0.1, 3), draw.uniform(0.3, 1.5)
    norm, decay = 10 ** draw.uniform(-2, 2), draw.uniform(0.3, 3)
    kl, clipped, critic = draw.uniform(0, 0.4), draw.uniform(0, 0.2), draw.random() < 0.3
    rows = []
    for step in range(1, steps + 1):
        t = step / steps
        level = first + (last - first) * min(1, 1.5 * t)
        row = {
            "step": step,
            "reward/mean": unit * (level + noise * draw.gauss(0, 1)),
            "reward/std": unit * math.sqrt(max(level * (1 - level), 0.01)),
            "policy/entropy": entropy * growth**t * math.exp(0.1 * draw.gauss(0, 1)),
            "grad_norm": norm * decay**t * math.exp(0.4 * draw.gauss(0, 1)),
            "policy/kl_ref": kl * t * math.exp(0.2 * draw.gauss(0, 1)),
            "policy/kl_old_k3": 10 ** draw.uniform(-4, -2.5),
            "policy/clip_fraction_upper": clipped * draw.uniform(0.4, 0.6),
            "policy/clip_fraction_lower": clipped * draw.uniform(0.4, 0.6),
            "policy/kl_rollout_k3": 0.001 * math.exp(0.5 * draw.gauss(0, 1)),
            "length/mean": 100 * draw.uniform(0.8, 1.2) * (1 + t),
            "truncated": 0.2 * draw.random(),
        }
        if critic:
            bias = 0.3 * unit * (1 - t)
            row |= {
                "value/loss": unit**2 * (0.15 - 0.1 * t) * math.exp(0.3 * draw.gauss(0, 1)),
                "value/explained_variance": 0.6 * t + 0.15 * draw.gauss(0, 1),
                "value/value_mean": unit * level - bias,
                "value/return_mean": unit * level,
            }
        rows.append(row)
    return rows


def test_at_most_one_of_a_hundred_healthy_runs_has_a_symptom() -> None:
    verdicts = [diagnose_rows(healthy_run(seed)) for seed in range(400)]
    alarms = [[f.cause for f in verdict.findings] for verdict in verdicts if not verdict.healthy]
    assert len(alarms) <= 4, alarms


def test_a_short_log_is_refused() -> None:
    with pytest.raises(pl.InputError, match="this log has 7"):
        judge(lambda s: {"kl": 9.0}, 7)
