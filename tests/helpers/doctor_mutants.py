"""One-line mistakes in the doctor, as `Mutant`s of mutants.py."""

from __future__ import annotations

_CRITERION, _INPUT, _LAWS, _LOGS, _READERS, _VERDICTS = (
    "test_doctor_criterion.py::",
    "test_doctor_input.py::",
    "test_doctor_log_laws.py::",
    "test_doctor_logs.py::",
    "test_doctor_log_readers.py::",
    "test_doctor_verdicts.py::",
)
DOCTOR = (
    (
        "doctor_freedom_is_free",
        "doctor/criterion.py",
        "(freedom + 1) * math.log(max(n, 2))",
        "math.log(max(n, 2))",
        _CRITERION + "test_every_free_number_costs_the_logarithm_of_the_tokens",
    ),
    (
        "doctor_noise_is_flat",
        "doctor/criterion.py",
        "(-torch.expm1(logp)).clamp(min=QUIET)",
        "torch.ones_like(logp)",
        _CRITERION + "test_the_shape_of_noise_is_the_probability_of_the_other_tokens",
    ),
    (
        "doctor_copy_of_rounded_numbers",
        "doctor/order.py",
        "telling = (pairs.trainer < -1e-4) & ~on_grid(pairs.trainer, torch.bfloat16)",
        "telling = pairs.trainer < 1.0",
        _INPUT + "test_two_sides_that_are_stored_in_bf16_are_no_copies",
    ),
    (
        "doctor_nan_passes",
        "doctor/pairs.py",
        "wrong = x.isnan() | (x == torch.inf)",
        "wrong = x == torch.inf",
        _INPUT + "test_a_verdict_on_nothing_is_refused",
    ),
    (
        "doctor_first_step_blind",
        "train/hints.py",
        'if verdict.cause in ("healthy", "copy"):',
        "if True:",
        _INPUT + "test_the_first_step_of_a_run_is_looked_at",
    ),
    (
        "doctor_solved_is_sick",
        "doctor/logs/curves.py",
        "return self.right >= self.limits.solved",
        "return False",
        _LOGS + "test_a_solved_task_is_not_sick",
    ),
    (
        "doctor_nan_of_any_step",
        "doctor/logs/symptoms.py",
        "step = min([s for s, _, _ in bad] + skipped)",
        "step = max([s for s, _, _ in bad] + skipped)",
        _LOGS + "test_where_a_symptom_begins_is_said",
    ),
    (
        "doctor_verifier_solves_the_task",
        "doctor/logs/curves.py",
        'name = "held_out" if self.values("held_out") else "accuracy"',
        'name = "accuracy"',
        _LAWS + "test_held_out_prompts_and_not_the_verifier_say_whether_a_task_is_solved",
    ),
    (
        "doctor_spike_of_the_whole_run",
        "doctor/logs/curves.py",
        "sides = ys[max(0, i - NEIGHBOURS) : i], ys[i + 1 : i + 1 + NEIGHBOURS]",
        "sides = ys, ys",
        _LAWS + "test_a_spike_stands_out_of_its_neighbourhood",
    ),
    (
        "doctor_null_is_no_number",
        "doctor/logs/read.py",
        'if isinstance(bad := entry.get("nonfinite"), dict):',
        'if isinstance(bad := entry.get("none"), dict):',
        _LAWS + "test_the_origin_of_a_nan_is_named_in_our_own_files",
    ),
    (
        "doctor_skipped_updates_count",
        "doctor/logs/metric_names.py",
        'out.pop("step_kl", None)',
        "pass",
        _LAWS + "test_skipped_updates_are_no_small_steps",
    ),
    (
        "doctor_kl_is_never_paid_for",
        "doctor/logs/symptoms.py",
        "end < log.limits.kl_high or log.solved or log.trend(log.score) > 0",
        "end < log.limits.kl_high or log.solved",
        _LAWS + "test_a_kl_that_a_better_score_pays_for_is_no_drift",
    ),
    (
        "doctor_runs_of_a_table_are_mixed",
        "doctor/logs/read.py",
        "if name and (first := names.index(name)) != place:",
        "if False and (first := names.index(name)) != place:",
        _READERS + "test_a_table_of_several_runs_is_no_log_of_one",
    ),
    (
        "doctor_weights_stay_changed",
        "doctor/forward.py",
        "changed.copy_(before)",
        "pass",
        _VERDICTS + "test_weights_are_as_before",
    ),
)
