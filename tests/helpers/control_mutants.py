"""One-line mistakes in advantages, masks, controllers and mismatch, as `Mutant`s of mutants.py."""

from __future__ import annotations

_ESTIMATORS = "policyloss/advantage/estimators.py"
_TRUNCATION = "policyloss/advantage/truncation.py"
_CONTROLLERS = "policyloss/controllers.py"
_MISMATCH, _SUMS = "policyloss/mismatch.py", "test_mismatch_sums.py::"
CONTROLS = (
    (
        "mean_deviation_of_squares",
        "policyloss/advantage/groups.py",
        "self.total((self.rewards - self.mean()).abs()) / self.size",
        "self.total((self.rewards - self.mean()).square()) / self.size",
        "test_advantage.py::test_the_mean_deviation_weighs_easy_and_hard_prompts_alike",
    ),
    (
        "asymre_shifts_upwards",
        _ESTIMATORS,
        "centered - shift, centered)",
        "centered + shift, centered)",
        "test_advantage.py::test_asymre_by_hand",
    ),
    (
        "hierarchy_of_all_episodes",
        _ESTIMATORS,
        "torch.where(inside, episode, 0)",
        "torch.where(inside, 0, episode)",
        "test_advantage.py::test_hierarchical_grpo_by_hand",
    ),
    (
        "prpo_of_a_sample",
        _ESTIMATORS,
        "eps: float = 1e-6, ddof: int = 0",
        "eps: float = 1e-6, ddof: int = 1",
        "test_advantage.py::test_baselines_of_the_batch_by_hand",
    ),
    (
        "rlsd_without_the_sign",
        "policyloss/advantage/distillation.py",
        "(a.sign() * gap.d).exp()",
        "gap.d.exp()",
        "test_distillation.py::test_rlsd_by_hand",
    ),
    (
        "overlong_without_a_bound",
        _TRUNCATION,
        "excess.clamp(0, 1)",
        "excess.clamp(0)",
        "test_truncation.py::test_soft_overlong_by_hand",
    ),
    (
        "cut_sequences_kept",
        _TRUNCATION,
        "& ~sequences.spread(truncated.bool())",
        "& sequences.spread(truncated.bool())",
        "test_truncation.py::test_a_cut_sequence_leaves_the_mask_and_the_denominator",
    ),
    (
        "quantile_of_padding",
        _TRUNCATION,
        "values = wide[valid]",
        "values = wide.reshape(-1)",
        "test_truncation.py::test_top_entropy_by_hand",
    ),
    (
        "kl_error_unbounded",
        _CONTROLLERS,
        "min(max(error, -0.2), 0.2)",
        "error",
        "test_controllers.py::test_adaptive_kl_by_hand",
    ),
    (
        "entropy_bonus_above_the_target",
        _CONTROLLERS,
        "and self.entropy <= self.target else 0.0",
        "else 0.0",
        "test_controllers.py::test_adaptive_entropy_by_hand",
    ),
    (
        "chi2_of_the_ratio",
        _MISMATCH,
        "columns = [ratio.square(),",
        "columns = [ratio,",
        _SUMS + "test_by_hand",
    ),
    (
        "bins_without_sign",
        _MISMATCH,
        "torch.where(d < 0, -step, step)",
        "step",
        _SUMS + "test_a_quantile_is_right_to_its_bin",
    ),
    (
        "positions_across_a_pack",
        _MISMATCH,
        "return before - sequences.spread(before[first])",
        "return before",
        _SUMS + "test_a_pack_is_measured_as_rows_are",
    ),
    (
        "sequences_counted_by_every_rank",
        _MISMATCH,
        "if cp_group is not None and dist.get_rank(cp_group):",
        "if False:",
        _SUMS + "test_ranks_that_share_sequences_count_them_once",
    ),
)
