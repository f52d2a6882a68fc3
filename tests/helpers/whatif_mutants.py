"""One-line mistakes in what_if, as `Mutant`s of mutants.py."""

from __future__ import annotations

_NUMBERS, _MODEL, _FILES = (
    "test_what_if.py::",
    "test_what_if_model.py::",
    "test_what_if_files.py::",
)
WHATIF = (
    (
        "whatif_sample_size_of_tokens_that_arrive",
        "policyloss_lab/whatif/outcome.py",
        "return float(u.sum()) ** 2 / (u.shape[0] * squares) if squares else None",
        "return float(u.sum()) ** 2 / (int((u != 0).sum()) * squares) if squares else None",
        _NUMBERS + "test_hand_computed_weights_and_sample_size",
    ),
    (
        "whatif_engine_stays_off_policy",
        "policyloss_lab/whatif/outcome.py",
        'sampled = [x for x in ("old_logp", "rollout_logp") if getattr(t, x) is not None]',
        'sampled = [x for x in ("rollout_logp",) if getattr(t, x) is not None]',
        _NUMBERS + "test_hand_computed_weights_and_sample_size",
    ),
    (
        "whatif_place_in_the_batch",
        "policyloss_lab/whatif/outcome.py",
        "before = counted[t.cu_seqlens[:-1][row]]",
        "before = torch.zeros_like(counted)",
        _NUMBERS + "test_hand_computed_masses",
    ),
    (
        "whatif_step_goes_up",
        "policyloss_lab/whatif/weights.py",
        "return Products(gradients @ gradients.T, -tokens.sums(gradients))",
        "return Products(gradients @ gradients.T, tokens.sums(gradients))",
        _NUMBERS + "test_hand_computed_cosine_and_change",
    ),
    (
        "whatif_largest_change_first",
        "policyloss_lab/whatif/outcome.py",
        "for factor in FACTORS:",
        "for factor in reversed(FACTORS):",
        _NUMBERS + "test_the_smallest_change_that_cures_is_found",
    ),
    (
        "whatif_corrected_mismatch_is_wrong",
        "policyloss_lab/whatif/outcome.py",
        'not kl <= limits.mismatch and "rollout_logp" not in outcome.spec.reads',
        "not kl <= limits.mismatch",
        _NUMBERS + "test_a_mismatch_is_cured_by_a_correction",
    ),
    (
        "whatif_head_at_temperature_one",
        "policyloss_lab/whatif/weights.py",
        "slope = known.scale / temperature",
        "slope = known.scale",
        _MODEL + "test_products_equal_one_backward_pass_per_token[llama-options1-0.7]",
    ),
    (
        "whatif_cap_is_straight",
        "policyloss_lab/whatif/weights.py",
        "e = e * (1 - (z * temperature / known.cap) ** 2)",
        "e = e * 1",
        _MODEL + "test_products_equal_one_backward_pass_per_token[gemma2-options2-0.7]",
    ),
    (
        "whatif_half_a_completion",
        "policyloss_lab/whatif/tokens.py",
        "if all(fine or not trained for fine, trained in zip(good, used, strict=True)):",
        "if any(good):",
        _FILES + "test_a_completion_with_a_hole_is_left_out",
    ),
    (
        "whatif_invisible_text",
        "policyloss_lab/whatif/page.py",
        '"texts": [visible(text) for text in islice(texts, length)],',
        '"texts": list(islice(texts, length)),',
        _FILES + "test_a_hostile_run_is_read_as_data",
    ),
    (
        "whatif_a_step_without_advantages",
        "policyloss_lab/whatif/tokens.py",
        "if x[1].inputs.advantages.any()), last)",
        "), last)",
        _FILES + "test_steps_with_zero_advantages_are_skipped",
    ),
)
