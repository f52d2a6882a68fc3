"""One-line mistakes in the report, for `mutants.py`, in the order of `head_mutants.HEAD`."""

from __future__ import annotations

_COMPARE, _SERVE, _BOUNDS, _TABLES = (
    "test_report_compare.py::",
    "test_report_serve.py::",
    "test_report_bounds.py::",
    "test_report_tables.py::",
)

REPORT = (
    (
        "report_seeds_are_settings",
        "report/seeds.py",
        "left_out = _SEEDS | _NAMES",
        "left_out = _NAMES",
        _COMPARE + "test_runs_that_differ_in_the_seed_alone_are_one_group",
    ),
    (
        "report_groups_forget_the_loss",
        "report/seeds.py",
        'json.dumps([settings, run["loss"]["spec"]], sort_keys=True)',
        "json.dumps([settings], sort_keys=True)",
        _COMPARE + "test_a_loss_that_was_changed_is_another_setting",
    ),
    (
        "report_lines_coincide_at_other_steps",
        "report/seeds.py",
        'i: [run["steps"][run["series"][key][0]], run["series"][key][1]]',
        'i: run["series"][key][1]',
        _COMPARE + "test_lines_coincide_metric_by_metric_in_steps_and_values",
    ),
    (
        "report_one_standard_error",
        "report/verdict.py",
        "2 * math.sqrt(before.variance + after.variance)",
        "math.sqrt(before.variance + after.variance)",
        _COMPARE + "test_a_held_out_accuracy_that_rises_by_more_than_chance",
    ),
    (
        "report_a_rise_is_noise",
        "report/verdict.py",
        "for (_, a), (_, b) in pairwise(points)) / 2 / (len(points) - 1)",
        "for (_, a), (_, b) in pairwise(points)) / (len(points) - 1)",
        _COMPARE + "test_a_reward_is_judged_by_its_first_and_last_fifth",
    ),
    (
        "report_a_fall_is_overlooked",
        "report/verdict.py",
        "fall > _FELL * gain",
        "fall > 2 * gain",
        _COMPARE + "test_an_accuracy_that_fell_or_that_lost_what_it_gained",
    ),
    (
        "report_spikes_are_thinned_away",
        "report/series.py",
        "(min(values), max(values)) if values else ()",
        "(values[0], values[-1]) if values else ()",
        _BOUNDS + "test_a_long_series_is_thinned_and_its_summary_is_of_all_points",
    ),
    (
        "report_runs_do_not_share_points",
        "report/collect.py",
        "limits.share(limits.ALL_POINTS, limits.POINT_BUDGET, runs)",
        "limits.POINT_BUDGET",
        _BOUNDS + "test_the_points_of_many_runs_share_a_budget",
    ),
    (
        "report_serves_any_host",
        "report/serve.py",
        "elif not self._is_for_here():",
        "elif False:",
        _SERVE + "test_a_name_that_was_made_to_lead_here_is_refused",
    ),
    (
        "report_serves_the_first_of_two_hosts",
        "report/serve.py",
        "len(hosts) == 1 and",
        "len(hosts) and",
        _SERVE + "test_two_hosts_and_no_host_are_refused",
    ),
    (
        "report_serves_every_path",
        "report/serve.py",
        'elif self.path != "/":',
        "elif False:",
        _SERVE + "test_there_is_no_path_but_one",
    ),
    (
        "report_takes_every_method",
        "report/serve.py",
        'if self.command not in ("GET", "HEAD"):',
        "if False:",
        _SERVE + "test_what_does_not_read_is_refused",
    ),
    (
        "report_serves_one_page_forever",
        "report/serve.py",
        "if state != self._state and began >= self._next:",
        "if self._state is None:",
        _SERVE + "test_the_page_follows_a_file_that_grows",
    ),
    (
        "report_a_run_gets_the_step_of_no_point",
        "logs/tables.py",
        "if numbers and step is not None:",
        "if step is not None:",
        _TABLES + "test_an_export_over_another_axis_has_a_step_for_each_run",
    ),
    (
        "report_runs_of_one_name_are_mixed",
        "logs/tables.py",
        "if run not in latest or metric in runs[latest[run]]:",
        "if run not in latest:",
        _TABLES + "test_an_export_over_another_axis_has_a_step_for_each_run",
    ),
    (
        "report_a_column_of_no_run_is_dropped",
        "logs/tables.py",
        "if len(runs) > 1 and strays:",
        "if False:",
        _TABLES + "test_a_column_that_fits_no_run_is_named",
    ),
    (
        "report_replaces_the_table_of_a_run",
        "report/write.py",
        "split_run(Path(p))[0].resolve()",
        "Path(p).resolve()",
        _TABLES + "test_the_file_of_a_run_in_it_is_known",
    ),
    (
        "report_shows_a_page_of_any_size",
        "report/inline.py",
        "if len(page.encode()) > INLINE_BYTES:",
        "if False:",
        "test_report_notebook.py::test_a_page_that_is_too_large_for_a_notebook_is_cut_or_refused",
    ),
)
