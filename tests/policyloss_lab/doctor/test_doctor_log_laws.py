"""Where the laws of the diagnosis from logs draw the line: each pair differs in one thing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

import policyloss as pl
import policyloss_lab as lab
from policyloss_lab.diagnosis.run_doctor import diagnose_rows

STEPS = 40
Row = dict[str, float]


def rows_of(change: Callable[[int], Row], steps: int = STEPS) -> list[Row]:
    """Rows of a run that learns slowly; `change` replaces or adds metrics."""
    return [
        {
            "step": step,
            "reward/mean": 0.2 + 0.01 * step + 0.02 * math.sin(step),
            "accuracy": 0.2 + 0.01 * step,
            "policy/entropy": 1.0 - 0.01 * step,
            "grad_norm": 0.5 + 0.1 * math.sin(3 * step),
            **change(step),
        }
        for step in range(1, steps + 1)
    ]


def named(change: Callable[[int], Row], steps: int = STEPS) -> list[str]:
    return [finding.cause for finding in diagnose_rows(rows_of(change, steps)).findings]


def flat(step: int) -> float:
    return 0.4 + 0.02 * math.sin(step)


# Numbers that are none ----------------------------------------------------------------------------


def ours(folder: Path, rows: list[Row]) -> Path:
    """As the trainer writes them: null, and the names of what is not finite."""
    lines = []
    for row in rows:
        bad = {name: str(x) for name, x in row.items() if not math.isfinite(x)}
        plain = {name: None if name in bad else x for name, x in row.items()}
        lines.append(json.dumps(plain | ({"nonfinite": bad} if bad else {})))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def with_nan(step: int) -> Row:
    bad = {"policy/loss": math.nan, "advantage/mean": math.nan, "grad_norm": math.inf}
    return bad if step >= 5 else {"policy/loss": 0.1, "advantage/mean": 0.0}


def test_the_origin_of_a_nan_is_named_in_our_own_files(tmp_path: Path) -> None:
    (finding,) = lab.doctor_run(ours(tmp_path, rows_of(with_nan))).findings
    assert (finding.cause, finding.step) == ("nonfinite", 5)
    assert "in the order of computation is advantage/mean" in finding.evidence
    assert "(36 such steps)" in finding.evidence  # 5 to 40


def test_a_short_log_is_a_verdict_only_if_it_ends_in_nan(tmp_path: Path) -> None:
    (finding,) = lab.doctor_run(ours(tmp_path, rows_of(with_nan, 5))).findings
    assert (finding.cause, finding.step) == ("nonfinite", 5)
    with pytest.raises(pl.InputError, match="this log has 4"):
        lab.doctor_run(ours(tmp_path, rows_of(with_nan, 4)))


def test_a_reward_function_that_did_not_apply_is_no_nan() -> None:
    assert named(lambda s: {"rewards/format/mean": math.nan}) == []
    assert named(lambda s: {"eval_rewards/format/mean": math.nan}) == []
    assert named(lambda s: {"rewards/mean": math.nan}) == ["nonfinite"]


# The size of a step -------------------------------------------------------------------------------


def test_skipped_updates_are_no_small_steps() -> None:
    still = {"policy/kl_old_k3": 1e-9, "accuracy": 0.3, "updates": 2.0}
    stuck = {"reward/mean": 0.3, **still}
    assert "learning_rate_low" in named(lambda s: stuck)
    assert "learning_rate_low" not in named(lambda s: stuck | {"skipped": 2.0})


def test_one_update_per_batch_is_no_evidence_on_the_learning_rate() -> None:
    # The ratio is measured before the only update: it is 1 at any learning rate.
    stuck = {"reward/mean": 0.3, "accuracy": 0.3}
    assert "learning_rate_low" not in named(lambda s: stuck | {"actor/ppo_kl": 0.0})
    assert "learning_rate_low" not in named(
        lambda s: stuck | {"policy/kl_old_k3": 1e-9, "updates": 1.0}
    )


def test_an_estimate_of_the_step_may_have_both_signs() -> None:
    stuck = {"reward/mean": 0.3, "accuracy": 0.3}
    assert "learning_rate_low" in named(lambda s: stuck | {"actor/ppo_kl": 1e-8 * (-1) ** s})


def test_small_steps_that_learn_are_large_enough() -> None:
    assert named(lambda s: {"policy/kl_old_k3": 1e-9}) == []


def test_one_large_step_is_a_symptom_only_if_nothing_is_learned() -> None:
    def once(step: int) -> Row:
        return {"policy/kl_old_k3": 0.3 if step == 7 else 0.01}

    assert named(once) == []
    first, *others = diagnose_rows(rows_of(lambda s: {**once(s), "reward/mean": flat(s)})).findings
    assert (first.cause, first.step) == ("learning_rate_high", 7)
    assert first.evidence == "step 7 moves the policy by 0.3 nats per token"
    assert [finding.cause for finding in others] == ["no_learning"]


# Learned, solved, paid for ------------------------------------------------------------------------


def test_held_out_prompts_and_not_the_verifier_say_whether_a_task_is_solved() -> None:
    broken = {"accuracy": 1.0, "reward/mean": 1.0, "frac_reward_zero_std": 1.0}
    assert "dead_groups" in named(lambda s: broken | {"eval/accuracy": 0.3})
    assert named(lambda s: broken | {"eval/accuracy": 0.95}) == []


def test_groups_that_are_all_right_are_not_dead() -> None:
    assert named(lambda s: {"frac_reward_zero_std": 0.85, "accuracy": 0.8}) == []
    assert named(lambda s: {"frac_reward_zero_std": 0.85, "accuracy": 0.4}) == ["dead_groups"]


def test_the_score_before_training_counts() -> None:
    rows = rows_of(lambda s: {"eval/accuracy": 0.0} if s % 10 == 0 else {})
    assert diagnose_rows(rows).healthy
    before = {"step": 0.0, "eval/accuracy": 0.3}
    (finding,) = diagnose_rows([before, *rows]).findings
    assert finding.cause == "reward_hacking"
    assert "fell from 0.3 to 0" in finding.evidence


def test_a_drift_may_begin_with_the_first_step() -> None:
    far = {"reward/mean": 0.3, "accuracy": 0.3}
    assert "kl_drift" in named(lambda s: far | {"policy/kl_ref": 9.0 if s < 3 else 3.5})


def test_a_kl_that_a_better_score_pays_for_is_no_drift() -> None:
    assert named(lambda s: {"kl": 0.02 * s}) == []  # 0.8 at the end
    assert named(lambda s: {"kl": 0.02 * s, "eval/reward": 0.3}) == ["kl_drift"]


def test_length_is_a_symptom_unless_the_held_out_score_rises_with_it() -> None:
    long = {"reward/mean": 0.1, "accuracy": 0.0}
    twelve = named(lambda s: long | {"length/mean": 5 + 2.5 * s, "truncated": 0.05 * s}, 12)
    assert twelve == ["truncation", "length_growth"]
    assert named(lambda s: {"length/mean": 5.0 + s}) == []
    paid = {"eval/accuracy": 0.2}  # the reward rises because it pays for length
    assert named(lambda s: paid | {"length/mean": 5.0 + s}) == ["length_growth"]


def test_completions_that_were_cut_at_the_start_must_become_better() -> None:
    def cut(step: int) -> Row:
        return {"truncated": 0.9 if step < 8 else 0.0}

    assert named(cut) == []
    assert "truncation" in named(lambda s: cut(s) | {"reward/mean": flat(s), "accuracy": 0.4})


def test_one_reward_out_of_range_does_not_hide_learning() -> None:
    assert named(lambda s: {"reward/mean": 9.0} if s == 20 else {}) == []


def test_a_reward_that_only_varies_is_not_learning() -> None:
    (cause,) = named(lambda s: {"reward/mean": 0.4 + 0.1 * math.sin(s), "accuracy": 0.4})
    assert cause == "no_learning"
    assert named(lambda s: {"reward/mean": 0.4 + 0.1 * math.sin(s) + 0.01 * s}) == []


# Spikes, sides, engines ---------------------------------------------------------------------------


def test_a_spike_stands_out_of_its_neighbourhood() -> None:
    assert named(lambda s: {"grad_norm": 8.0 * math.exp(-s / 4)}) == []  # learning that ends
    shift = {"grad_norm": 8.0}
    assert named(lambda s: shift if s < 9 else {"grad_norm": 0.1 + 0.01 * (s % 3)}) == []
    nothing_left = {"accuracy": 0.95}
    assert named(lambda s: {**nothing_left, "grad_norm": 0.0 if s > 8 else 1.0}) == []
    assert named(lambda s: {"grad_norm": math.exp(2.5 * math.sin(7 * s))}) == []  # always erratic
    assert named(lambda s: {"grad_norm": 0.1 if s != 20 else 2.0}) == ["gradient_spike"]


def test_an_outlier_among_advantages_is_a_spike_whatever_clips_the_gradient() -> None:
    rows = rows_of(lambda s: {"advantage/std": 80.0 if s == 30 else 0.9})
    (finding,) = diagnose_rows(rows).findings
    assert (finding.cause, finding.step) == ("gradient_spike", 30)
    assert "spread of advantages is 80" in finding.evidence


def test_saturation_in_the_middle_of_a_run_is_named_with_its_steps() -> None:
    def clipped(step: int) -> Row:
        middle = 11 <= step <= 20
        return {
            "policy/clip_fraction_upper": 0.3 if middle else 0.01,
            "policy/clip_fraction_lower": 0.02,
        }

    (finding,) = diagnose_rows(rows_of(clipped)).findings
    assert (finding.cause, finding.step) == ("clip_saturation", 11)
    assert "upper bound in steps 11 to 20, and 2.0%" in finding.evidence
    both = {"policy/clip_fraction_upper": 0.27, "policy/clip_fraction_lower": 0.2}
    assert named(lambda s: both) == []  # as with the narrow bounds of GSPO
    (low,) = diagnose_rows(
        rows_of(lambda s: {"clip_ratio/low_mean": 0.2, "clip_ratio/high_mean": 0.0})
    ).findings
    assert "lower bound" in low.evidence


def test_old_completions_are_no_mismatch_of_the_engine() -> None:
    # One step old: nothing at the first step, little where the policy rests.
    assert named(lambda s: {"policy/kl_rollout_k3": 0.0 if s < 6 else 0.03}) == []
    assert named(lambda s: {"policy/kl_rollout_k3": 0.03}) == ["engine_mismatch"]
