"""One-line mistakes in the head, for `mutants.py`: name, file, what stands there, what would be
wrong, the test that must fail.
"""

from __future__ import annotations

_LOGITS, _LINEAR, _LOSS = "test_head_logits.py::", "test_head_linear.py::", "test_head_loss.py::"
_ERRORS, _CALLS, _COMPOSED = (
    "test_head_errors.py::",
    "test_head_calls.py::",
    "test_head_composed.py::",
)

HEAD = (
    (
        "head_entropy_sign",
        "head/softmax_rows.py",
        "log_sum - p.moment / p.sum",
        "log_sum + p.moment / p.sum",
        _LOGITS + "test_two_entries_by_hand",
    ),
    (
        "head_entropy_slope_sign",
        "head/softmax_rows.py",
        ".mul_(dentropy.unsqueeze(-1)).add_(dlogp",
        ".mul_(-dentropy.unsqueeze(-1)).add_(dlogp",
        _LOGITS + "test_two_entries_by_hand",
    ),
    (
        "head_target_slope_from_p",
        "head/softmax_rows.py",
        "d = -dlogp * torch.expm1(logp)",
        "d = dlogp * logp.exp()",
        _LOGITS + "test_two_entries_by_hand",
    ),
    (
        "head_temperature_not_in_slope",
        "head/softmax_rows.py",
        "    elif t != 1:\n",
        "    elif t == 0:\n",
        _LOGITS + "test_gradcheck",
    ),
    (
        "head_softcap_slope_dropped",
        "head/softmax_rows.py",
        "d.mul_(1 - (capped / scaling.softcap) ** 2)",
        "d.mul_(1)",
        _LOGITS + "test_gradcheck",
    ),
    (
        "head_forbidden_entries_nan",
        "head/softmax_rows.py",
        "shifted.exp().mul_(shifted.clamp_(min=-1e4))",
        "shifted.exp().mul_(shifted)",
        _LOGITS + "test_forbidden_entries",
    ),
    (
        "head_columns_bias_not_cut",
        "head/softmax_rows.py",
        "self._replace(bias=self.bias[columns])",
        "self._replace(bias=self.bias[: columns.stop - columns.start])",
        _LINEAR + "test_window_boundaries",
    ),
    (
        "head_masked_gradient_leaks",
        "head/logits.py",
        "dlogp = torch.where(valid, dlogp, 0)",
        "dlogp = dlogp",
        _LOGITS + "test_garbage_at_masked_rows",
    ),
    (
        "head_last_row_lost",
        "head/head.py",
        "for start in range(0, n, step)]",
        "for start in range(0, n - 1, step)]",
        _LINEAR + "test_window_boundaries",
    ),
    (
        "head_id_equal_to_the_vocabulary",
        "head/validate.py",
        "if lowest < 0 or highest >= size:",
        "if lowest < 0 or highest > size:",
        _ERRORS + "test_an_id_outside_the_vocabulary",
    ),
    (
        "head_recompute_ids_not_shifted",
        "head/backward.py",
        "rows.ids - c.start, rows",
        "rows.ids, rows",
        _LINEAR + "test_window_boundaries",
    ),
    (
        "head_weight_gradient_of_the_last_window",
        "head/backward.py",
        "                add_product(self.weight, dz.t(), x, 1 / scale)",
        "                rounded_product(dz.t(), x, self.weight, 1 / scale)",
        _CALLS + "test_bf16_gradients_do_not_degrade_with_the_number_of_windows",
    ),
    (
        "head_masked_rows_computed",
        "head/linear.py",
        "index = valid.nonzero()",
        "index = (valid | True).nonzero()",
        _LINEAR + "test_only_live_rows_enter_a_product",
    ),
    (
        "head_advantage_zero_drops_a_kl",
        "head/windows.py",
        "    if spec.follows_advantage:\n",
        "    if True:\n",
        _LOSS + "test_tokens_without_advantage",
    ),
    (
        "head_sequence_silent_by_token",
        "head/windows.py",
        '        if spec.reach == "sequence":\n',
        '        if spec.reach == "never":\n',
        _LOSS + "test_skipping_tokens_without_advantage",
    ),
    (
        "head_entropy_bonus_without_slope",
        "head/windows.py",
        '"entropy": entropy_has_slope(self.spec)}',
        '"entropy": False}',
        _CALLS + "test_gradcheck",
    ),
    (
        "head_opsm_not_in_the_value",
        "head/loss.py",
        "correction = batch.corrections if batch.weight is None",
        "correction = () if batch.weight is None",
        _LOSS + "test_skipping_tokens_without_advantage",
    ),
    (
        "head_mean_weight_of_a_window",
        "head/loss.py",
        "windowed = (spec.trust, *(spec.correction if spec.corrections_by_logp else ()))",
        "windowed = (spec.trust,)",
        _COMPOSED + "test_weights_normalised_beside_a_correction_that_reads_logp",
    ),
    (
        "head_sequences_judged_by_a_window",
        "head/windows.py",
        'if getattr(part, "reads_logp", True) or isinstance(part, SelfNormalise):',
        "if part is not None:",
        _COMPOSED + "test_a_test_of_sequences_beside_a_weight_of_tokens",
    ),
    (
        "head_entropy_of_a_callable_without_slope",
        "head/windows.py",
        "return bool(spec.entropy_coef) or not spec.is_data",
        "return bool(spec.entropy_coef)",
        _COMPOSED + "test_a_callable_that_reads_the_entropy",
    ),
    (
        "head_average_not_broadcast",
        "head/windows.py",
        "return weight if weight.dim() == 0 else weight.broadcast_to(t.mask.shape)",
        "return weight",
        _COMPOSED + "test_an_average_with_one_weight_per_row",
    ),
)
