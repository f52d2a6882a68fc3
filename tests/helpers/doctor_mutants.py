"""One-line mistakes in the doctor, as `Mutant`s of mutants.py."""

from __future__ import annotations

_CRITERION, _INPUT, _LOGS, _PAIRS, _VERDICTS = (
    "test_doctor_criterion.py::",
    "test_doctor_input.py::",
    "test_doctor_logs.py::",
    "test_doctor_pairs.py::",
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
        "doctor/logs/symptoms.py",
        "return accuracy is not None and accuracy >= limits.solved",
        "return False",
        _LOGS + "test_a_solved_task_is_not_sick",
    ),
    (
        "doctor_nan_of_any_step",
        "doctor/logs/symptoms.py",
        "step = min(s for s, _ in rows)",
        "step = max(s for s, _ in rows)",
        _LOGS + "test_where_a_symptom_begins_is_said",
    ),
    (
        "doctor_one_start_of_the_scale",
        "doctor/criterion.py",
        "for start in (squares.median(), squares.mean())",
        "for start in (squares.median(),)",
        _CRITERION + "test_the_scale_is_the_one_of_most_likelihood_where_most_tokens_are_exact",
    ),
    (
        "doctor_tails_are_sick",
        "doctor/diagnose.py",
        "times = 4 if case.scorer is not None else 4 * thresholds.noise",
        "times = 1",
        _PAIRS + "test_noise_of_half_precision_is_healthy",
    ),
    (
        "doctor_guesses_from_pairs",
        "doctor/laws.py",
        '"not_explained", "differences are larger at',
        '"stale_weights", "differences are larger at',
        _PAIRS + "test_no_cause_is_named_that_pairs_cannot_tell",
    ),
    (
        "doctor_float32_noise_is_padding",
        "doctor/order.py",
        "size > max(WILD * core, NEAR)",
        "size > WILD * core",
        _VERDICTS + "test_numbers_that_are_missing_at_the_end_of_rows_are_told_from_float32_noise",
    ),
    (
        "doctor_weights_stay_changed",
        "doctor/forward.py",
        "changed.copy_(before)",
        "pass",
        _VERDICTS + "test_weights_are_as_before",
    ),
)
