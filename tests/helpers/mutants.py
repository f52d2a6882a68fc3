"""One-line mistakes, each of which must make a named test fail;
and the driver that makes them, on copies of the package.

Run as a script with the names of mutants, it prints `{name: pytest's exit code}`. All of them run
in one process, since loading torch takes longer than any of the tests: before each, whatever was
imported from the copy or from the tests is forgotten.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from bits_mutants import BITS
from compiled_mutants import COMPILED
from control_mutants import CONTROLS
from doctor_mutants import DOCTOR
from head_mutants import HEAD
from part_mutants import PARTS
from preference_mutants import PREFERENCE
from report_mutants import REPORT
from train_mutants import TRAIN
from whatif_mutants import WHATIF

TESTS = Path(__file__).resolve().parents[1]
SOURCE = TESTS.parent / "src"
PACKAGES = ("policyloss", "policyloss_lab", "policyloss_train")
CLEAN = "clean"
# Without collecting garbage after each run (a second, as torch is large), and without rewriting
# assertions that are not read.
_PLUGINS = ("cacheprovider", "xdist", "unraisableexception")
_FAST = ("-x", "-q", "--no-header", "--assert=plain", *(f"-pno:{name}" for name in _PLUGINS))


@dataclass(frozen=True)
class Mutant:
    """Replace `old`, which occurs once in `file`, by `new`; then `test` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


_HAND, _CORRECTIONS = "test_hand_computed.py::", "test_hand_corrections.py::"
MUTANTS = (
    Mutant(
        "clip_upper_bound_sign",
        "policyloss/functional/trust.py",
        "low, high = 1 - eps_low, 1 + eps_high",
        "low, high = 1 - eps_low, 1 - eps_high",
        _HAND + "test_trust",
    ),
    Mutant(
        "clip_sides_swapped",
        "policyloss/functional/trust.py",
        "low, high = 1 - eps_low, 1 + eps_high",
        "low, high = 1 - eps_high, 1 + eps_low",
        _HAND + "test_trust",
    ),
    Mutant(
        "port_to_another_model",
        "policyloss/porting.py",
        'slot == "kl" and name == "anchor"',
        "False",
        "test_porting.py::test_presets_by_hand",
    ),
    Mutant(
        "port_hides_a_lost_part",
        "policyloss/porting.py",
        "elif not change.fields:",
        "elif change.fields:",
        "test_porting.py::test_a_port_reads_back_or_names_each_loss",
    ),
    Mutant(
        "port_of_a_narrow_delta",
        "policyloss/porting.py",
        "clip.delta >= 1 + clip.eps_high",
        "clip.delta >= 1",
        "test_porting.py::test_a_narrow_delta_is_no_dual_clip",
    ),
    Mutant(
        "dual_clip_dropped",
        "policyloss/functional/trust.py",
        "torch.minimum(loss, dual * a.abs())",
        "loss",
        _HAND + "test_worked_example_dual_clip",
    ),
    Mutant(
        "cispo_weight_not_detached",
        "policyloss/functional/trust.py",
        "w = r.clamp(min=ratio_min",
        "w = ratio.clamp(min=ratio_min",
        _HAND + "test_trust",
    ),
    Mutant(
        "by_sign_sides_swapped",
        "policyloss/functional/trust.py",
        "take_positive, positive, negative)",
        "take_positive, negative, positive)",
        "test_by_sign.py::test_up_grpo_by_hand",
    ),
    Mutant(
        "by_sign_hides_nan",
        "policyloss/functional/trust.py",
        "advantages > 0, ~negative.isnan(), positive.isnan())",
        "advantages > 0, True, False)",
        "test_by_sign.py::test_a_nan_shows_on_either_side",
    ),
    Mutant(
        "current_ratio_is_logp",
        "policyloss/parts/trust.py",
        't.log_ratio_to("current").exp()',
        "t.logp",
        "test_by_sign.py::test_up_grpo_by_hand",
    ),
    Mutant(
        "by_sign_flags_of_one_side",
        "policyloss/parts/trust.py",
        "never if b is None else b)",
        "never)",
        "test_by_sign.py::test_each_side_is_its_part_alone",
    ),
    Mutant(
        "by_sign_flags_without_an_advantage",
        "policyloss/parts/trust.py",
        "good, never = t.advantages > 0, torch.zeros_like(t.mask)",
        "good, never = t.advantages >= 0, torch.zeros_like(t.mask)",
        "test_by_sign.py::test_flags_without_an_advantage_are_those_of_the_negative_side",
    ),
    Mutant(
        "by_sign_reach_of_the_positive_side",
        "policyloss/parts/trust.py",
        "in {part.reach for part in self._sides}",
        "in {self.positive.reach}",
        "test_by_sign.py::test_what_a_pair_reads_and_reaches",
    ),
    Mutant(
        "extras_not_measured",
        "policyloss/accumulation.py",
        '(tensors.get("extras") or {}).items()}',
        "{}.items()}",
        "test_accumulate.py::test_extras_are_measured_too",
    ),
    Mutant(
        "measuring_marks_as_used",
        "policyloss/accumulation.py",
        "micro.is_used = used",
        "micro.is_used = True",
        "test_accumulate.py::test_a_micro_batch_that_was_only_measured_is_unused",
    ),
    Mutant(
        "repeated_micro_batch_must_be_used",
        "policyloss/accumulation.py",
        "micro.is_used = True  # it holds nothing",
        "micro.is_used = False  # it holds nothing",
        "test_accumulate.py::test_a_repeated_micro_batch_holds_nothing",
    ),
    Mutant(
        "repeated_micro_batch_keeps_its_mask",
        "policyloss/accumulation.py",
        'torch.zeros_like(last["mask"], dtype=torch.bool)',
        'last["mask"]',
        "test_accumulate.py::test_a_repeated_micro_batch_holds_nothing",
    ),
    Mutant(
        "distributed_is_needed",
        "policyloss/totals.py",
        "import torch.distributed as dist",
        "import torch.distributed as dist; dist.all_reduce",
        "test_torch_without_extras.py::test_neither_distributed_nor_numpy_nor_triton_is_needed",
    ),
    Mutant(
        "choose_takes_the_last_loss_that_fits",
        "policyloss/choose.py",
        "base = next(rule for rule in fitting if rule.preset)",
        "base = [rule for rule in fitting if rule.preset][-1]",
        "test_choose.py::test_the_choices",
    ),
    Mutant(
        "choose_takes_a_narrow_band_for_old_completions",
        "policyloss/choose.py",
        '{"model": "moe", "updates": "several"}',
        '{"model": "moe", "updates": "several|stale"}',
        "test_choose.py::test_the_mismatch_of_an_engine_alone_silences_nobody",
    ),
    Mutant(
        "cli_prints_names_as_they_are",
        "policyloss/cli.py",
        "' '.join(visible(sentence).split())",
        "sentence",
        "test_cli_failures.py::test_a_name_cannot_write_to_the_terminal",
    ),
    Mutant(
        "choose_forgets_the_slots",
        "policyloss/choose.py",
        'if slots else ""',
        'if not slots else ""',
        "test_choose.py::test_a_loss_against_the_engine_has_no_correction_and_others_have_one",
    ),
    Mutant(
        "sapo_scale",
        "policyloss/functional/trust.py",
        "-advantages * (4 / tau)",
        "-advantages * 4",
        _HAND + "test_trust",
    ),
    Mutant(
        "gmpo_clips_the_ratio_not_its_log",
        "policyloss/functional/trust.py",
        "log_ratio.clamp(-eps_low, eps_high)",
        "log_ratio.clamp(1 - eps_low, 1 + eps_high)",
        _HAND + "test_geometric_clip",
    ),
    Mutant(
        "gspo_token_gradient_through_the_mean",
        "policyloss/parts/ratio.py",
        "expand(mean.detach())",
        "expand(mean)",
        _HAND + "test_sequence_ratio",
    ),
    Mutant(
        "subtracted_before_upcast",
        "policyloss/functional/masking.py",
        "a.to(dtype) - b.to(dtype)",
        "(a - b).to(dtype)",
        _HAND + "test_half_precision_is_upcast_before_the_subtraction",
    ),
    Mutant(
        "masked_by_multiplication",
        "policyloss/functional/masking.py",
        "torch.where(mask, x if dtype is None else x.to(dtype), zero)",
        "mask * (x if dtype is None else x.to(dtype))",
        _HAND + "test_masked_garbage_is_replaced",
    ),
    Mutant(
        "local_denominator",
        "policyloss/parts/aggregate.py",
        "return reciprocal(totals.tokens, t.mask, t.dtype, totals.dp_size)",
        "return reciprocal(t.counts.sum(), t.mask, t.dtype, totals.dp_size)",
        _HAND + "test_totals_are_the_denominator",
    ),
    Mutant(
        "dp_size_forgotten",
        "policyloss/parts/aggregate.py",
        "reciprocal(t.totals.sequences, t.lengths, times=t.totals.dp_size)",
        "reciprocal(t.totals.sequences, t.lengths)",
        "test_totals.py::test_averaging_ranks_give_the_gradient_of_the_batch",
    ),
    Mutant(
        "sequence_mean_over_the_padded_width",
        "policyloss/functional/aggregate.py",
        "sequences.expand(reciprocal(lengths, lengths))",
        "sequences.expand(reciprocal(lengths * 0 + sequences.shape[-1], lengths))",
        _HAND + "test_aggregate",
    ),
    Mutant(
        "empty_count_unguarded",
        "policyloss/functional/aggregate.py",
        "x = x + (x == 0)",
        "x = x + 0",
        "test_metrics.py::test_a_batch_with_no_valid_token",
    ),
    Mutant(
        "anchors_not_detached",
        "policyloss/inputs.py",
        "raw[name] = x if name in DIFFERENTIATED else x.detach()",
        "raw[name] = x",
        _CORRECTIONS + "test_frozen_policies_get_no_gradient",
    ),
    Mutant(
        "icepop_keeps_what_is_outside",
        "policyloss/parts/correction.py",
        "return Corrected(w, correction.within(w, self.low, self.high))",
        "return Corrected(w)",
        _CORRECTIONS + "test_weight",
    ),
    Mutant(
        "opsm_drops_the_good",
        "policyloss/parts/correction.py",
        "(t.advantages < 0) & (drift",
        "(t.advantages > 0) & (drift",
        _CORRECTIONS + "test_opsm",
    ),
    Mutant(
        "rejected_tokens_stay_in_the_mean",
        "policyloss/loss.py",
        "t = t.with_mask(t.mask & keep)",
        "t = t.with_mask(t.mask)",
        _CORRECTIONS + "test_rejected",
    ),
    Mutant(
        "k3_sign",
        "policyloss/functional/kl.py",
        "return torch.where(endless, torch.inf, torch.expm1(d) - d)",
        "return torch.where(endless, torch.inf, torch.expm1(d) + d)",
        _CORRECTIONS + "test_kl_value_and_gradient",
    ),
    Mutant(
        "k2_without_the_half",
        "policyloss/functional/kl.py",
        "return 0.5 * d**2",
        "return d**2",
        _CORRECTIONS + "test_kl_value_and_gradient",
    ),
    Mutant(
        "straight_through_dropped",
        "policyloss/functional/kl.py",
        "return value.detach() + (pull - pull.detach())",
        "return value",
        _CORRECTIONS + "test_kl_value_and_gradient",
    ),
    Mutant(
        "mean_of_means",
        "policyloss/policy_metrics.py",
        'records[f"clip_fraction_{name}"] = (Stat, counts[-1], n)',
        'records[f"clip_fraction_{name}"] = (Stat, counts[-1] / n, n / n)',
        "test_metrics.py::test_uneven_micro_batches_merge_to_the_whole",
    ),
    Mutant(
        "basic_metrics_forget_the_lower_bound",
        "policyloss/policy_metrics.py",
        "count(reduce(torch.bitwise_or, taken))",
        "count(taken[0])",
        "test_metric_levels.py::test_a_level_is_a_choice_of_the_same_numbers",
    ),
    Mutant(
        "metrics_without_being_asked",
        "policyloss/loss.py",
        'flags=level != "none"',
        "flags=True",
        "test_metric_levels.py::test_without_metrics_nothing_is_computed_for_them",
    ),
    Mutant(
        "counts_merged_in_float32",
        "policyloss/records.py",
        "zip(self.wide, other.wide, strict=True)",
        "zip(self.parts, other.parts, strict=True)",
        "test_metrics.py::test_counts_survive_beyond_float32",
    ),
    Mutant(
        "explained_variance_of_raw_moments",
        "policyloss/records.py",
        "squares / count - (total / count) ** 2",
        "squares / count",
        "test_value.py::test_explained_variance_of_a_perfect_a_constant_and_an_offset_critic",
    ),
    Mutant(
        "tinker_counts_each_call",
        "policyloss/compat/tinker/losses.py",
        "totals=self.totals,",
        "totals=None,",
        "test_compat_tinker.py::test_a_step_may_take_any_number_of_calls",
    ),
    Mutant(
        "tinker_sampler_always_old",
        "policyloss/compat/tinker/data.py",
        'if "old_logprobs" not in rows[0]:',
        "if True:",
        "test_compat_tinker.py::test_the_sampler_is_the_old_policy_unless_the_data_hold_one",
    ),
    Mutant(
        "tinker_graph_keeps_the_device",
        "policyloss/compat/tinker/data.py",
        "if key not in _PLACES}",
        "}",
        "test_compat_tinker.py::test_an_exported_graph_holds_torch_operations_and_no_tensor",
    ),
    Mutant(
        "skyrl_divides_again",
        "policyloss/compat/skyrl/__init__.py",
        "total = self.spec.replace(aggregate=aggregate.TokenSum())",
        "total = self.spec",
        "test_compat_engines.py::test_skyrl_by_hand",
    ),
    Mutant(
        "skyrl_takes_any_loss",
        "policyloss/compat/skyrl/__init__.py",
        "if not self.spec.follows_advantage:",
        "if False:",
        "test_compat_engines.py::test_skyrl_refuses_a_loss_that_its_advantages_cannot_divide",
    ),
    Mutant(
        "nemo_counts_swapped",
        "policyloss/compat/nemo_rl/__init__.py",
        "Totals(global_valid_toks, global_valid_seqs)",
        "Totals(global_valid_seqs, global_valid_toks)",
        "test_compat_engines.py::test_nemo_by_hand",
    ),
    Mutant(
        "slime_without_its_weights",
        "policyloss/compat/slime/__init__.py",
        "weights=weights,",
        "weights=None,",
        "test_compat_engines.py::test_slime_by_hand",
    ),
    Mutant(
        "slime_ignores_its_own_terms",
        "policyloss/compat/slime/__init__.py",
        "check_settings(engine, partial(getattr, args), OWN_TERMS)",
        "check_settings(engine, partial(getattr, args), {})",
        "test_compat_engines.py::test_slime_settings_that_contradict_a_spec_raise",
    ),
    Mutant(
        "areal_weighs_sequences_by_tokens",
        "policyloss/compat/parts.py",
        'if average.divides_by == "tokens" else lengths.count_nonzero()',
        'if average.divides_by == "tokens" else lengths.sum()',
        "test_compat_engines.py::test_areal_by_hand",
    ),
    Mutant(
        "areal_ignores_its_own_terms",
        "policyloss/compat/engines.py",
        "if (chosen := settings(name, value)) != value:",
        "if (chosen := settings(name, value)) is None:",
        "test_compat_engines.py::test_an_actor_of_areal_trains_with_our_loss",
    ),
    Mutant(
        "xtuner_without_its_shares",
        "policyloss/compat/engines.py",
        '{"mask": loss_weights != 0, "weights": loss_weights}',
        '{"mask": loss_weights != 0}',
        "test_compat_engines.py::test_xtuner_weighs_tokens_by_its_shares",
    ),
    Mutant(
        "rlinf_with_any_average",
        "policyloss/compat/engines.py",
        "if average != wanted:",
        "if False:",
        "test_compat_engines.py::test_rlinf_averages_by_its_own_setting",
    ),
    Mutant(
        "twinkle_with_a_mean",
        "policyloss/compat/engines.py",
        'mask=mask, totals=Totals(1, 1), metrics="none"',
        'mask=mask, totals="local", metrics="none"',
        "test_compat_engines.py::test_twinkle_gets_a_sum_and_a_count",
    ),
    Mutant(
        "swift_drops_its_kl",
        "policyloss/compat/engines.py",
        "if bool(trainer.beta and not trainer.kl_in_reward) != (spec.kl is not None):",
        "if False:",
        "test_compat_engines.py::test_swift_keeps_its_metrics_and_trains_with_our_loss",
    ),
    Mutant(
        "async_keeps_the_term_of_trl",
        "policyloss/compat/trl/trainer.py",
        '"advantages": torch.zeros_like(advantages)',
        '"advantages": advantages',
        "test_compat_trl_async.py::test_by_hand",
    ),
    Mutant(
        "async_over_one_rank",
        "policyloss/compat/trl/trainer.py",
        "dp_size=self.accelerator.num_processes",
        "dp_size=1",
        "test_compat_trl_async.py::test_by_hand",
    ),
    Mutant(
        "titan_keeps_lost_tokens",
        "policyloss/compat/torchtitan/__init__.py",
        "loss_mask & generator_logprobs.isfinite()",
        "loss_mask",
        "test_compat_engines.py::test_torchtitan_by_hand",
    ),
    Mutant(
        "titan_takes_sequence_losses",
        "policyloss/compat/engines.py",
        'if single_tokens and spec.reach != "token":',
        "if False:",
        "test_compat_engines.py::test_torchtitan_refuses_a_loss_of_sequences_and_names_a_wrong_one",
    ),
    Mutant(
        "prime_without_weights",
        "policyloss/compat/prime_rl/__init__.py",
        '"weights": inputs.loss_weights,',
        '"weights": None,',
        "test_compat_engines.py::test_prime_by_hand",
    ),
    Mutant(
        "distillation_registered_once_only",
        "policyloss/compat/verl/distillation.py",
        "losses.DISTILLATION_LOSS_REGISTRY.pop(full_name, None)",
        "pass",
        "test_compat_verl_losses.py::test_distillation_is_registered_again_and_again",
    ),
    Mutant(
        "distillation_by_a_gradient_without_teacher",
        "policyloss/compat/verl/distillation.py",
        'if name == "k1" and not by_gradient:',
        "if False:",
        "test_compat_verl_losses.py::test_distillation_is_registered_again_and_again",
    ),
    Mutant(
        "value_loss_without_the_half",
        "policyloss/value.py",
        "return 0.5 * error**2",
        "return error**2",
        "test_value.py::test_clipped_by_hand",
    ),
    Mutant(
        "value_loss_takes_the_smaller",
        "policyloss/value.py",
        "token_loss = torch.maximum(token_loss, clipped)",
        "token_loss = torch.minimum(token_loss, clipped)",
        "test_value.py::test_clipped_by_hand",
    ),
    Mutant(
        "verl_gspo_average_of_an_older_release",
        "policyloss/compat/verl/losses.py",
        'if not since(call.release, "0.9.1")',
        'if not since(call.release, "0.9.0")',
        "test_compat_verl_losses.py::test_meanings_that_changed_between_releases",
    ),
    Mutant(
        "verl_drift_not_clamped_as_the_ratio",
        "policyloss/compat/verl/losses.py",
        "spec.ratio.log_clamp if isinstance(spec.ratio, TokenRatio) else None",
        "None",
        "test_compat_verl_losses.py::test_the_drift_is_clamped_as_the_ratio_is",
    ),
    Mutant(
        "verl_drop_in_forgets_a_keyword",
        "policyloss/compat/arguments.py",
        "if n in names} if ignores_others",
        "if n in names and n != 'index'} if ignores_others",
        "test_compat_verl_advantages.py::test_nothing_given_is_changed_and_nothing_carries_a_gradient",
    ),
    Mutant(
        "verl_guard_lost",
        "policyloss/compat/parts.py",
        "return 1e-8 if",
        "return 1e-9 if",
        "test_compat_verl_losses.py::test_the_guard_of_a_float64_mask_is_kept",
    ),
    Mutant(
        "openrlhf_gspo_anchor",
        "policyloss/compat/openrlhf/losses.py",
        'anchor="rollout" if corrected else "old"',
        'anchor="old" if corrected else "old"',
        "test_compat_openrlhf.py::test_gspo_with_a_correction_is_anchored_at_the_rollout_and_not_weighted",
    ),
    Mutant(
        "trl_cispo_cap_as_a_distance",
        "policyloss/compat/trl/config.py",
        "return DetachedClip(0.0, high)",
        "return DetachedClip(0.0, 1 + high)",
        "test_compat_trl.py::test_cispo_caps_the_weight_at_epsilon_high_itself",
    ),
    Mutant(
        "given_penalty_unscaled",
        "policyloss/compat/parts.py",
        "return self.beta * self.kl",
        "return self.kl",
        "test_compat_colossalai.py::test_the_penalty_keeps_its_gradient",
    ),
    Mutant(
        "guarded_length_lost",
        "policyloss/compat/parts.py",
        "t.lengths + self.epsilon",
        "t.lengths",
        "test_given_and_local.py::test_epsilon_in_a_sequence_mean",
    ),
    Mutant(
        "trl_kl_weighted_by_the_wrong_ratio",
        "policyloss/compat/trl/parts.py",
        'if self.ratio_level == "sequence":',
        'if self.ratio_level == "token":',
        "test_compat_trl.py::test_the_kl_may_be_weighted_by_another_ratio_than_the_surrogate",
    ),
    *(
        Mutant(*mutant)
        for mutant in (
            *BITS,
            *COMPILED,
            *DOCTOR,
            *HEAD,
            *PARTS,
            *CONTROLS,
            *PREFERENCE,
            *REPORT,
            *TRAIN,
            *WHATIF,
        )
    ),
)


def places_of(mutant: Mutant, source: str) -> list[tuple[int, int]]:
    """The places of `mutant.old` in `source`, for any line breaks of the formatter.

    White space matches any white space, or none next to punctuation, and a closing bracket may
    follow a comma. Indentation before `old` and the end of the line after it match as they are
    written.
    """
    indent = re.match(r"[ ]*", mutant.old)
    words = re.findall(r"\w+|[^\w\s]", mutant.old)
    pattern = ""
    for before, word in zip(["", *words], words, strict=False):
        both_are_words = bool(re.match(r"\w", before) and re.match(r"\w", word))
        gap = r"\s+" if both_are_words else r"\s*,?\s*" if word in ")]}" else r"\s*"
        pattern += (gap if before else "") + re.escape(word)
    pattern = (f"^{indent[0]}" if indent and indent[0] else "") + pattern
    pattern += r"[ ]*\n" if mutant.old.endswith("\n") else ""
    return [match.span() for match in re.finditer(pattern, source, re.MULTILINE)]


def mutated_copy(folder: Path, mutant: Mutant | None) -> None:
    """A copy of the packages in `folder`, with the mistake made in it."""
    shutil.copytree(
        SOURCE, folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    if mutant is not None:
        path = folder / mutant.file
        source = path.read_text(encoding="utf-8")
        places = places_of(mutant, source)
        if len(places) != 1:
            raise LookupError(
                f"{mutant.name}: {mutant.old!r} stands {len(places)} times in {mutant.file}, not "
                "once"
            )
        start, stop = places[0]
        path.write_text(source[:start] + mutant.new + source[stop:], encoding="utf-8")


def located(test: str) -> str:
    """The path of `test`, which is named by its file alone: `test_spec.py::test_reads`."""
    file, _, name = test.partition("::")
    (path,) = TESTS.rglob(file)
    return f"{path}::{name}"


def run_tests(folder: Path, tests: list[str]) -> int:
    """Run `tests` against the package in `folder`, in this process;
    pytest's exit code (1: a test failed).
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        ours = name.split(".")[0] in (*PACKAGES, "benchmarks") or TESTS in Path(file).parents
        if ours and name != "__main__":
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = pytest.main([*_FAST, *tests])
        loaded = [
            Path(sys.modules[name].__file__ or "") for name in PACKAGES if name in sys.modules
        ]
        if any(folder not in path.parents for path in loaded):
            raise ImportError(f"the tests ran against {loaded}, not against the copy in {folder}")
        if code not in (0, 1):
            print(said.getvalue(), file=sys.stderr)
        return int(code)
    finally:
        sys.path.remove(str(folder))


def main(names: list[str]) -> None:
    """Run each named mutant's test on a mutated copy (`clean`: all tests, nothing changed) and
    print the exit codes as JSON.
    """
    by_name = {m.name: m for m in MUTANTS}
    codes = {}
    for name in names:
        mutant = by_name.get(name)
        tests = sorted({m.test for m in MUTANTS}) if mutant is None else [mutant.test]
        with tempfile.TemporaryDirectory() as folder:
            mutated_copy(Path(folder).resolve(), mutant)
            codes[name] = run_tests(Path(folder).resolve(), [located(test) for test in tests])
    print(json.dumps(codes))


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    sys.path.append(str(TESTS.parent))  # some tests use the benchmarks
    main(sys.argv[1:])
