"""One-line mistakes in the exact mode and in `bits_check`, for `mutants.py`, in the order of
`head_mutants.HEAD`.
"""

from __future__ import annotations

_EXACT, _BITS, _CHECK = "test_exact.py::", "test_bits.py::", "test_bits_check.py::"
_CUT = _EXACT + "test_a_step_has_the_same_bits_however_it_is_cut"

BITS = (
    (
        "exact_parts_share_the_ids",
        "head/tiles.py",
        "(ids.unsqueeze(-1) - starts)",
        "(ids.unsqueeze(-1) - 0 * starts)",
        "test_kernels.py::test_parts_of_a_vocabulary_are_rows_to_the_kernel",
    ),
    (
        "exact_tree_of_distant_parts",
        "head/tiles.py",
        "x = x[0::2] + x[1::2]",
        "x = x[: len(x) // 2] + x[len(x) // 2 :]",
        _BITS + "test_a_stack_is_summed_by_halves",
    ),
    (
        "exact_recompute_forgets_a_window",
        "head/backward.py",
        "if sums.weight is not None and window.start > 0:",
        "if sums.weight is not None and False:",
        _BITS + "test_the_weight_gradient_of_several_windows",
    ),
    (
        "exact_limbs_are_not_rounded",
        "functional/exact.py",
        "part = (rest / quantum).round() * quantum",
        "part = rest if quantum == 1 else 0 * rest",
        _EXACT + "test_a_total_is_the_exact_sum_in_any_order",
    ),
    (
        "exact_number_added_to_every_limb",
        "functional/exact.py",
        "a + b if a.dim() == b.dim() else as_limbs(a) + as_limbs(b)",
        "a + b",
        _EXACT + "test_numbers_beside_limbs",
    ),
    (
        "exact_mode_never_ends",
        "functional/exact.py",
        "        _Mode.exact = before",
        "        pass",
        _EXACT + "test_the_mode_ends_with_its_block",
    ),
    (
        "exact_sigmoid_is_that_of_torch",
        "functional/exact.py",
        "return 1 / (1 + torch.exp(-x)) if is_exact() else torch.sigmoid(x)",
        "return torch.sigmoid(x)",
        _EXACT + "test_a_sigmoid_has_the_bits_of_its_number_alone",
    ),
    (
        "exact_loss_metric_is_a_plain_sum",
        "functional/aggregate.py",
        "        return total(_products(x, weight) / dp_size)\n",
        "        return loss.detach() / dp_size\n",
        _CUT + "[dapo]",
    ),
    (
        "exact_sequence_sums_by_layout",
        "functional/segments.py",
        "if x.is_floating_point() and is_exact():",
        "if False:",
        _CUT,
    ),
    (
        "exact_gradient_of_a_sequence_by_layout",
        "functional/segments.py",
        "if s.requires_grad and is_exact():",
        "if False:",
        _CUT,
    ),
    (
        "exact_rows_multiplied_as_they_come",
        "head/head.py",
        "        if self.tiles is None:\n",
        "        if True:\n",
        _BITS + "test_a_row_has_the_same_bits_in_any_company",
    ),
    (
        "exact_gradient_multiplied_as_it_comes",
        "head/backward.py",
        "            if tiles is None:\n",
        "            if True:\n",
        _BITS + "test_the_gradient_of_a_row_has_the_same_bits_in_any_company",
    ),
    (
        "exact_recompute_by_columns",
        "head/linear.py",
        "        if head.tiles is not None:\n",
        "        if False:\n",
        _BITS + "test_the_gradient_of_a_row_has_the_same_bits_in_any_company",
    ),
    (
        "exact_gradient_in_a_chain",
        "head/tiles.py",
        "    half = (count + 1) // 2\n",
        "    half = count - 1\n",
        _BITS + "test_a_shard_of_the_vocabulary_has_the_products_of_all_of_it",
    ),
    (
        "exact_logits_that_exist_in_one_sum",
        "head/logits.py",
        "    if not is_exact():\n",
        "    if True:\n",
        _BITS + "test_the_same_bits_from_logits_that_exist",
    ),
    (
        "exact_never_looks_at_the_device",
        "head/tiles.py",
        "                self._check_places(x, weight[self.parts[sizes.index(size)]])\n",
        "                pass\n",
        _BITS + "test_a_device_whose_products_depend_on_the_place_is_refused",
    ),
    (
        "exact_takes_one_product_for_granted",
        "head/tiles.py",
        "            _CHECKED[key] = self._same_at_once(x, weight)\n",
        "            _CHECKED[key] = True\n",
        _BITS + "test_one_product_of_other_bits_is_not_taken",
    ),
    (
        "threads_share_a_lone_row",
        "head/softmax_rows.py",
        'if z.shape[0] == 1 and z.device.type == "cpu":',
        "if False:",
        _BITS + "test_several_threads",
    ),
    (
        "bits_check_counts_bits_as_they_lie",
        "check/bits.py",
        "return torch.where(bits < 0, lowest - bits, bits)",
        "return bits",
        _CHECK + "test_distances_by_hand",
    ),
    (
        "bits_check_forgets_the_neighbours",
        "check/bits.py",
        "[[i] for i in everyone]",
        "[everyone]",
        _CHECK + "test_dependences_made_on_purpose",
    ),
)
