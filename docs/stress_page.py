"""Writes docs/stress.md and its pictures from chart.json and chart_cuda.json in benchmarks/results.

`FINDINGS` is written by hand; its texts take every number from `facts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.chart import ABLATIONS, CORRECTIONS, HARDER, LOSSES, MAIN, ON_HARDER, PARTS

import policyloss as pl
from docs.markdown import GENERATED, fenced, join, table
from docs.stress_figures import Panel, Point, Square, curves_figure, heat_map
from docs.stress_numbers import LEVEL, bootstrap_interval, compare_losses, spearman, spearman_p
from policyloss.catalogue import PRESETS
from policyloss_train.bench.command import in_words
from policyloss_train.bench.conditions import CONDITIONS, EVERY, GOAL, STEPS
from policyloss_train.bench.runs import Cell, Outcome

Data = Mapping[str, Any]
# The runs of each task, condition and loss by their start, a kind of machine and a seed. A run on a
# GPU has the task `GPU`, its study as the condition, and its variant as the loss.
Grid = dict[tuple[str, str, str], dict[tuple[str, int], Outcome]]
PAGE, FIGURES = "docs/stress.md", "docs/figures/stress_"
BUILT_IN, GPU, NONE = "sort", "gpu", "dapo"
GROUPS = {
    "age of completions": ("on_policy", "stale_1", "stale_4", "stale_16"),
    "sampler": ("bf16", "int8", "fp8", "hot", "top_p"),
    "reward and data": ("noisy", "long_tail", "few_groups", "many_groups"),
    "learning rate": ("lr_0.25", "lr_0.5", "lr_2", "lr_4", "lr_8"),
}
AXES = {  # conditions of one difficulty, from easy to hard, and their labels
    "age of completions, in steps": ("on_policy stale_1 stale_4 stale_16", "0 1 4 16"),
    "learning rate, times the default": ("lr_0.25 lr_0.5 on_policy lr_2 lr_4 lr_8", "¼ ½ 1 2 4 8"),
}
STUDIES = {  # the title, the setting, and the panels: title, curve, end or beginning of the names
    "mismatch": (
        "A sampler of fewer bits",
        "The learner computes in float32; the sampler computes in bfloat16, with weights in "
        "float8 or in integers of a few bits where the name says so. The loss is `dapo`, without "
        "and with a correction.",
        (("accuracy, no correction", "accuracy", "none"), ("accuracy, int4", "accuracy", "int4")),
    ),
    "length": (
        "The average and the length of answers",
        "The losses differ in the average over tokens, and less in the scale of advantages and in "
        "the clip. Idle signs between the steps change no answer: length has no reward.",
        (
            ("accuracy", "accuracy", ""),
            ("length of right answers, tokens", "right", ""),
            ("length of wrong answers, tokens", "wrong", ""),
        ),
    ),
    "dual_clip": (
        "Large ratios, with and without dual clip",
        "Completions are old, the ratio compares with the policy that sampled them, and the norm "
        "of the gradient is not limited.",
        (("accuracy", "accuracy", ""), ("gradient norm", "norm", "")),
    ),
    "means": (
        "A mean of means",
        "`exact` divides by the tokens of the whole step; `mean of means` divides each micro-batch "
        "by its own tokens.",
        (("accuracy", "accuracy", ""), ("gradient norm", "norm", "")),
    ),
}

# Findings -----------------------------------------------------------------------------------------

# (title, text, parts of the chart with its runs); title and text are in the words of `str.format`
# with the numbers of `facts`. A finding with a number that no run gives yet is left out.
FINDINGS = [
    (
        "Without a difficulty, the loss hardly matters.",
        "{worse[on_policy]} of {losses[on_policy]} losses are significantly worse than the best. "
        "All end between {last_final[on_policy]:.2f} and {best_final[on_policy]:.2f}, and "
        "{all_collapsed[on_policy]} of {all_runs[on_policy]} runs collapse. Wrong rewards and a "
        "long tail of lengths change little ({all_collapsed[noisy]} and {all_collapsed[long_tail]} "
        "collapses).",
        ("chart presets",),
    ),
    (
        "Old completions separate them: at 16 steps of age, `dapo` falls to "
        "{final[dapo stale_16]:.2f}; with OPSM, it keeps {final[OPSM stale_16]:.2f}.",
        "A correction by the sampler's log-probabilities is needed, and its kind matters less: TIS "
        "{final[TIS stale_16]:.2f}, by sequence {final[seq-TIS stale_16]:.2f}, IcePop "
        "{final[IcePop stale_16]:.2f}, the ratio to the sampler "
        "{final[ratio-to-sampler stale_16]:.2f}. {worse[stale_16]} of {losses[stale_16]} presets "
        "are significantly worse than the best, `{best[stale_16]}`. To keep the gradient of every "
        "token, as `cispo` does, was no protection for this small model "
        "({final[cispo stale_16]:.2f}; {final[cispo-to-sampler stale_16]:.2f} with the ratio to "
        "the sampler). On `addition`, `dapo` ends at {final[addition dapo stale_16]:.2f}, with TIS "
        "at {final[addition TIS stale_16]:.2f} and with OPSM at "
        "{final[addition OPSM stale_16]:.2f}.",
        ("chart presets", "chart corrections", "chart tasks"),
    ),
    (
        "With 8 times the learning rate, `dapo` falls to {final[dapo lr_8]:.2f}, and with a KL to "
        "the start to {final[dapo-with-KL lr_8]:.2f}.",
        "The KL is that of `grpo`, which ends at {final[grpo lr_8]:.2f}, and without its KL at "
        "{final[grpo-without-KL lr_8]:.2f}. {all_collapsed[lr_8]} of {all_runs[lr_8]} runs of all "
        "presets collapse. With completions 16 steps old, the KL saves runs too: on `addition`, "
        "`dapo` ends at {final[addition dapo stale_16]:.2f}, and with it at "
        "{final[addition dapo-with-KL stale_16]:.2f}; `grpo` at "
        "{final[addition grpo stale_16]:.2f}, and without it at "
        "{final[addition grpo-without-KL stale_16]:.2f}. But it also holds back: "
        "on the built-in task, OPSM ends at {final[OPSM stale_16]:.2f}, and with the KL at "
        "{final[OPSM-with-KL stale_16]:.2f}.",
        ("chart presets", "chart tasks", "chart ablations"),
    ),
    (
        "A narrow sequence mask does more harm than the mismatch.",
        "Completions one step old take `dapo` to {final[dapo stale_1]:.2f}, and with the mask to "
        "{final[seq-mask stale_1]:.2f}. Its band, 0.999 to 1.002, was made for two engines with "
        "the same weights; it rejects most completions of any other policy. A band of 0.5 to 2 "
        "loses nothing ({final[seq-mask-wide stale_1]:.2f}). The preset with the mask, "
        "`seq_mask_tis`, ends at {final[seq_mask_tis fp8]:.2f} with a sampler in float8, at "
        "{final[seq_mask_tis top_p]:.2f} with one that cuts at top-p 0.9 and at "
        "{final[seq_mask_tis hot]:.2f} with one that is too hot. On the GPU, with a "
        "sampler in 4 bits, the narrow mask ends at {final[gpu int4, seq-mask mismatch]:.2f}, no "
        "correction at {final[gpu int4, none mismatch]:.2f}.",
        ("chart presets", "chart corrections", "chart_gpu"),
    ),
    (
        "A sampler of fewer bits did no measurable harm in so few steps.",
        "Significantly worse than the best are {worse[bf16]} of {losses[bf16]} presets with the "
        "sampler's weights in bfloat16, {worse[int8]} of {losses[int8]} in 8-bit integers, "
        "{worse[fp8]} of {losses[fp8]} in float8, {worse[top_p]} of {losses[top_p]} with top-p 0.9 "
        "and {worse[hot]} of {losses[hot]} with a sampler that is too hot; where there are any, "
        "the narrow mask is one. `dapo` ends at {final[dapo bf16]:.2f}, {final[dapo int8]:.2f}, "
        "{final[dapo fp8]:.2f}, {final[dapo top_p]:.2f} and {final[dapo hot]:.2f}. On the GPU, "
        "`dapo` ends from {low[gpu float32, none mismatch]:.2f} to "
        "{high[gpu float32, none mismatch]:.2f} with a sampler in float32, from "
        "{low[gpu bf16, none mismatch]:.2f} to {high[gpu bf16, none mismatch]:.2f} in bfloat16, "
        "from {low[gpu fp8, none mismatch]:.2f} to {high[gpu fp8, none mismatch]:.2f} in float8 "
        "and from {low[gpu int4, none mismatch]:.2f} to {high[gpu int4, none mismatch]:.2f} in 4 "
        "bits: the seeds differ by more than the samplers.",
        ("chart presets", "chart_gpu"),
    ),
    (
        "Dual clip bounds the gradient, and saved no run.",
        "With completions 8 steps old and two epochs, the ratio reaches thousands. The largest "
        "norm of the gradient is {norm[gpu ppo dual_clip]:.3g} with PPO's clip, "
        "{norm[gpu ppo_dual_clip dual_clip]:.3g} with dual clip; the final accuracy is at most "
        "{high[gpu ppo dual_clip]:.2f} and {high[gpu ppo_dual_clip dual_clip]:.2f}.",
        ("chart_gpu",),
    ),
    (
        "Two known biases did not show in three seeds of a GPU.",
        "The length of wrong answers does not grow with `grpo` more than with `dr_grpo` or `dapo` "
        "(the table below). A mean of the means of micro-batches ends from "
        "{low[gpu mean of means means]:.2f} to {high[gpu mean of means means]:.2f}, exact "
        "denominators from {low[gpu exact means]:.2f} to {high[gpu exact means]:.2f}. Completions "
        "were short and of similar length, so this does not excuse either; it shows that a run of "
        "this size cannot find such a mistake, and a [check of the gradient]"
        "(partition_check.md) can.",
        ("chart_gpu",),
    ),
]


def facts(grid: Grid) -> dict[str, dict[str, Any]]:
    """Numbers for `FINDINGS`, by name and key. The key of a cell is `dapo stale_4` on the built-in
    task, `addition dapo stale_4` on another, `gpu exact means` on the GPU; the key of a condition
    is its name.
    """
    numbers: dict[str, dict[str, Any]] = {}

    def add(key: str, **values: Any) -> None:
        for name, value in values.items():
            numbers.setdefault(name, {})[key] = value

    for (task, condition, loss), by_start in grid.items():
        key = f"{loss} {condition}" if task == BUILT_IN else f"{task} {loss} {condition}"
        ends = [one.final for one in by_start.values()]
        norm = max(one.grad_norm for one in by_start.values())
        add(key, final=fmean(ends), low=min(ends), high=max(ends), norm=norm)
    for condition in conditions(grid, LOSSES):
        runs = runs_of(grid, BUILT_IN, condition, LOSSES)
        means = mean_finals(grid, BUILT_IN, condition, LOSSES)
        (best, *_), worse = compare_with_best(grid, condition)
        add(condition, best=best, best_final=means[best], last_final=min(means.values()))
        add(condition, losses=len(means), worse=len(worse))
        add(condition, all_runs=len(runs), all_collapsed=collapses(runs))
    return numbers


def findings_section(grid: Grid) -> str:
    """The findings whose numbers are there."""
    numbers, parts = facts(grid), []
    for title, text, ran in FINDINGS:
        by = ", ".join(f"`{x}`" for x in ran)
        try:
            parts.append(f"- **{title.format(**numbers)}** {text.format(**numbers)} ({by})")
        except KeyError:
            continue
    about = "In parentheses: the commands of the runs, after `python -m benchmarks.`"
    return join("## Findings", about, "\n".join(parts)) if parts else ""


# Runs ---------------------------------------------------------------------------------------------


def stress_pages(results: Path) -> dict[str, str]:
    """The page and its pictures; empty before the first recorded run."""
    chart, cuda = results / "chart.json", results / "chart_cuda.json"
    if not chart.is_file():
        return {}
    rows = json.loads(chart.read_text(encoding="utf-8"))
    gpu = json.loads(cuda.read_text(encoding="utf-8")) if cuda.is_file() else {"runs": []}
    grid = read_grid(rows, gpu)
    machines = sorted({row["machine"] for row in rows})
    return {PAGE: stress_page(grid, gpu, machines), **figures(grid, gpu)}


def read_grid(rows: Iterable[Data], gpu: Data) -> Grid:
    """The outcomes of both files."""
    grid: Grid = {}
    for row in rows:
        cell = Cell(row["loss"], row["condition"], row["seed"], row["task"])
        rest = (row[name] for name in ("digest", "accuracy", "grad_norm", "error"))
        key, start = (cell.task, cell.condition, cell.loss), (row["machine"], cell.seed)
        grid.setdefault(key, {})[start] = Outcome(cell, *rest)
    for run in gpu["runs"]:
        cell = Cell(run["name"], run["study"], run["seed"], GPU)
        accuracy = tuple(run["accuracy"][step] for step in sorted(run["accuracy"], key=int))
        norm = max((x for x in run.get("norm", ()) if x is not None), default=0.0)
        outcome = Outcome(cell, "", accuracy, norm, run["error"])
        grid.setdefault((GPU, cell.condition, cell.loss), {})[GPU, cell.seed] = outcome
    return grid


def collapses(runs: Iterable[Outcome]) -> int:
    """How many runs collapsed."""
    return sum(one.collapsed for one in runs)


def runs_of(grid: Grid, task: str, condition: str, losses: Iterable[str]) -> list[Outcome]:
    """The runs of these losses."""
    return [one for x in losses for one in grid.get((task, condition, x), {}).values()]


def finals(
    grid: Grid, task: str, condition: str, losses: Iterable[str]
) -> dict[str, dict[tuple[str, int], float]]:
    """Final accuracies by loss and start, of the losses that were run."""
    return {
        loss: {start: one.final for start, one in grid[task, condition, loss].items()}
        for loss in losses
        if (task, condition, loss) in grid
    }


def mean_finals(grid: Grid, task: str, condition: str, losses: Iterable[str]) -> dict[str, float]:
    """The mean of the final accuracies of each loss."""
    rows = finals(grid, task, condition, losses).items()
    return {loss: fmean(row.values()) for loss, row in rows}


def conditions(grid: Grid, losses: Iterable[str]) -> list[str]:
    """The conditions of the built-in task under which one of these losses was run."""
    names = {condition for task, condition, loss in grid if task == BUILT_IN and loss in losses}
    return [name for group in GROUPS.values() for name in group if name in names]


def compare_with_best(grid: Grid, condition: str) -> tuple[list[str], list[str]]:
    """The presets by their mean rank, the best first, and those significantly worse than it."""
    rows = finals(grid, BUILT_IN, condition, LOSSES)
    # A rank among few losses is no rank among all.
    if shared := set.intersection(*map(set, rows.values())):
        rows = {loss: {start: row[start] for start in shared} for loss, row in rows.items()}
    ranks = compare_losses(rows, ranked=True)
    best, *others = sorted(ranks.means, key=lambda loss: -ranks.means[loss])
    return [best, *others], [x for x in others if ranks.differs(best, x, len(others))]


# The page -----------------------------------------------------------------------------------------


def stress_page(grid: Grid, gpu: Data, machines: Sequence[str]) -> str:
    """The whole page."""
    return join(
        "# Which loss survives what",
        GENERATED,
        about_runs(grid, gpu, machines),
        "## Every loss under every condition",
        picture("phase", "Heat map of final accuracy by loss and condition"),
        "A dot shows the family of the loss. Rows are sorted by the mean over the conditions that "
        "every loss has. [The bench's page](bench.md) describes the conditions. Command: `python "
        "-m benchmarks.chart presets`.",
        "## Survival",
        picture("survival", "Share of surviving runs of each family"),
        "A run survives if it does not fail and ends above half of its best accuracy.",
        picture("main", "Mean accuracy of the main losses"),
        findings_section(grid),
        corrections_section(grid),
        harder_section(grid),
        gpu_section(grid, gpu) if gpu["runs"] else "",
        sure_section(grid),
        full_tables(grid),
    )


def about_runs(grid: Grid, gpu: Data, machines: Sequence[str]) -> str:
    """The runs, their failures and machines, and the commands."""
    runs = [one for by_start in grid.values() for one in by_start.values()]
    on_cpu, on_gpu = ([x for x in runs if (x.cell.task == GPU) == flag] for flag in (False, True))
    losses, names, tasks, seeds = (
        {getattr(one.cell, field) for one in on_cpu}
        for field in ("loss", "condition", "task", "seed")
    )
    text = (
        f"{len(on_cpu):,} runs train a tiny model for {STEPS} steps each: "
        f"{len(losses & set(LOSSES))} losses, {len(losses - set(LOSSES))} variants of them, "
        f"{len(names)} conditions and {len(seeds)} seeds on the tasks "
        f"{', '.join(f'`{x}`' for x in sorted(tasks))}. {_counts(on_cpu)} On one kind of machine, "
        "runs of one seed start from the same model. Accuracy is measured on held-out prompts "
        f"every {EVERY} steps. Machines: {'; '.join(machines)}."
    )
    if on_gpu:
        text += (
            f" {len(on_gpu)} more runs train a model of {gpu['pretraining']['weights'] / 1e6:.0f} "
            f"million weights on a GPU ({gpu['environment'].get('gpu', 'CUDA')}). {_counts(on_gpu)}"
        )
    commands = [f"chart {part}" for part in PARTS] + ["chart_gpu"]
    lines = [*(f"python -m benchmarks.{x}" for x in commands), "python -m docs.generate"]
    return join(text, fenced("\n".join(lines), "sh"))


def _counts(runs: Sequence[Outcome]) -> str:
    failed = sum(bool(one.error) for one in runs)
    return f"{failed} failed with an error, and {collapses(runs) - failed} more collapsed."


def picture(name: str, label: str) -> str:
    """A picture of the page."""
    return f"![{label}]({FIGURES.removeprefix('docs/')}{name}.svg)"


def corrections_section(grid: Grid) -> str:
    """Staleness and other samplers against corrections."""
    names = conditions(grid, CORRECTIONS)
    if not names:
        return ""
    by_condition = {name: gains(grid, name) for name in names}
    none = (list(finals(grid, BUILT_IN, x, [NONE]).get(NONE, {}).values()) for x in names)
    rows = [["none", *(_interval(fmean(x), *bootstrap_interval(x)) if x else "" for x in none)]]
    clear = 0
    for loss in CORRECTIONS:
        rows.append([loss])
        for name in names:
            *numbers, significant = by_condition[name].get(loss, (None,))
            text = _interval(*numbers, sign="+") if numbers else ""
            rows[-1].append(f"**{text}**" if significant else text)
            clear += bool(significant)
    count = sum(map(len, by_condition.values()))
    return join(
        "## Staleness and corrections",
        f"The first row is the mean final accuracy of `{NONE}` without a correction, with a 95 % "
        "bootstrap interval over the seeds. The others are differences from it, paired by seed. "
        "Blank: not run, or not on the same kind of machine. Command: `python -m benchmarks.chart "
        "corrections`.",
        table(["correction", *(f"`{name}`" for name in names)], rows),
        f"Of {count} differences, {clear} are significant (bold; p < {LEVEL:g} after Bonferroni, "
        "see [How sure](#how-sure)), and the others are not.",
    )


def gains(grid: Grid, condition: str) -> dict[str, tuple[float, float, float, bool]]:
    """The gain of each correction over none: mean, interval, and whether it is significant."""
    rows = finals(grid, BUILT_IN, condition, (NONE, *CORRECTIONS))
    if NONE not in rows:
        return {}
    none, comparison, results = rows[NONE], compare_losses(rows, ranked=False), {}
    for loss, row in rows.items():
        pairs = [x - none[start] for start, x in row.items() if start in none]
        if loss != NONE and pairs:
            clear = comparison.differs(NONE, loss, len(rows) - 1)
            results[loss] = (fmean(pairs), *bootstrap_interval(pairs), clear)
    return results


def _interval(middle: float, low: float, high: float, sign: str = "") -> str:
    return f"{middle:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def harder_section(grid: Grid) -> str:
    """The main losses on harder tasks, and the correlation of their ranks with the built-in one."""
    rows = []
    for task in HARDER:
        for condition in ON_HARDER:
            means = mean_finals(grid, task, condition, MAIN)
            if not means:
                continue
            runs = runs_of(grid, task, condition, MAIN)
            ordered = sorted(means, key=lambda loss: -means[loss])
            ranks = rank_correlation(grid, task, condition)
            rows.append(
                [
                    f"`{task}`",
                    f"`{condition}`",
                    f"{fmean([one.accuracy[0] for one in runs if one.accuracy] or [0.0]):.3f}",
                    f"{fmean(means.values()):.3f}",
                    *(f"`{ordered[i]}` {means[ordered[i]]:.3f}" for i in (0, -1)),
                    f"{collapses(runs)} of {len(runs)}",
                    "{:+.2f} (n = {}, p = {:.2g})".format(*ranks) if ranks else "",
                ]
            )
    heading = ["task", "condition", "start", "mean", "best", "last", "collapsed", "Spearman"]
    if not rows:
        return ""
    return join(
        "## Harder tasks",
        "The main losses on other tasks: mean accuracy at the start and at the end, and Spearman's "
        "correlation of the losses' ranks with those on the built-in task under the same condition "
        "(1: the same order, 0: none). Ranks are chance where losses hardly differ or learn. "
        "Command: `python -m benchmarks.chart tasks`.",
        table(heading, rows),
    )


def rank_correlation(grid: Grid, task: str, condition: str) -> tuple[float, int, float] | None:
    """Spearman between a task and the built-in one, the number of losses, and its p-value."""
    means = [mean_finals(grid, name, condition, MAIN) for name in (task, BUILT_IN)]
    both = [loss for loss in MAIN if all(loss in x for x in means)]
    if len(both) < 3:
        return None
    value = spearman(*([x[loss] for loss in both] for x in means))
    return value, len(both), spearman_p(value, len(both))


def sure_section(grid: Grid) -> str:
    """The best loss of each condition, and those that do not differ from it."""
    rows = []
    for condition in conditions(grid, LOSSES):
        (best, *others), worse = compare_with_best(grid, condition)
        close = [loss for loss in others if loss not in worse]
        accuracy = mean_finals(grid, BUILT_IN, condition, [best])[best]
        rows.append(
            [
                f"`{condition}`: {CONDITIONS[condition].meaning}",
                f"`{best}` {accuracy:.3f}",
                f"{len(close)} of {len(others)}" + _names(close, len(close) <= len(worse)),
                f"{len(worse)} of {len(others)}" + _names(worse, len(worse) < len(close)),
            ]
        )
    heading = ["condition", "best", "not different", "worse"]
    return join(
        "## How sure",
        "Losses that collapse now and then have far noisier accuracies than others, so a test with "
        "one standard deviation of accuracy for all would be wrong. Instead, losses are ranked "
        "among the runs of the same start (a seed on one kind of machine; where some starts have "
        "runs of all losses, only these), and a t-test with the "
        "standard deviation of ranks, pooled over all losses, compares their mean ranks (Conover's "
        "test, which has many degrees of freedom even with a few seeds). P-values are multiplied "
        "by the number of comparisons under the condition (Bonferroni), so the best loss and those "
        "that are not different contain the one with the truly highest mean rank with about "
        f"{1 - LEVEL:.0%} confidence; it is lower where the noise of losses differs much. The best "
        "loss has the highest mean rank; its mean accuracy follows.",
        "Limits: ranks count a small but regular difference like a large one, and they depend on "
        "the losses that are compared. Not different means that these seeds show no difference. A "
        "test without assumptions, by sign flips, needs more seeds: with n of them its smallest "
        "p-value is 2/2ⁿ. Bootstrap intervals of a few seeds are too narrow; they show sizes, and "
        "decide nothing here.",
        "The corrections are few, and ranks of few hide the size of a difference, so their table "
        "uses the same test with accuracies in place of ranks, in spite of their unequal noise. "
        "Both tests were chosen after a look at a part of the results.",
        table(heading, rows),
    )


def _names(losses: Sequence[str], shown: bool) -> str:
    return f": {', '.join(f'`{loss}`' for loss in losses)}" if losses and shown else ""


# The GPU ------------------------------------------------------------------------------------------


def gpu_section(grid: Grid, gpu: Data) -> str:
    """A picture for each study, and a table of all variants."""
    parts, rows = [], []
    for study, (title, setting, _) in STUDIES.items():
        runs = [run for run in gpu["runs"] if run["study"] == study]
        if not runs:
            continue
        parts += [f"### {title}", setting]
        parts += [picture(study, title)] if study_panels(gpu, study) else []
        for name in dict.fromkeys(run["name"] for run in runs):
            outcomes = list(grid[GPU, study, name].values())
            ends = [one.final for one in outcomes]
            chosen = [run for run in runs if run["name"] == name]
            lengths = [_last(curve_points(chosen, curve)) for curve in ("right", "wrong")]
            rows.append(
                [
                    f"`{study}`",
                    name,
                    f"{len(outcomes)}",
                    f"{collapses(outcomes)}",
                    f"{fmean(ends):.3f} ({min(ends):.3f} to {max(ends):.3f})",
                    f"{median(one.grad_norm for one in outcomes):.3g}",
                    *lengths,
                ]
            )
    heading = ["study", "variant", "runs", "collapsed", "final accuracy", "largest gradient norm"]
    heading += ["length, right", "length, wrong"]
    return join(
        "## On a GPU",
        "A larger model learns sums with their steps written out. Each line is the mean over the "
        "seeds, and the band is their range. Command: `python -m benchmarks.chart_gpu`.",
        *parts,
        "Final accuracy: mean and range over the seeds. Norm: the median over the seeds of a run's "
        "largest. Lengths: tokens at the last recorded step, mean over the seeds. Differences are "
        "not tested here: trust none between variants whose ranges overlap, or that have one run.",
        table(heading, rows),
    )


def _last(points: Sequence[Point]) -> str:
    return f"{points[-1].mean:.1f}" if points else "–"


def curve_points(runs: Iterable[Data], curve: str) -> list[Point]:
    """Mean and range of a curve over the seeds; failed runs are left out."""
    values: dict[int, list[float]] = {}
    for run in runs:
        if curve in ("right", "wrong"):
            pairs = {step: x[curve == "wrong"] for step, x in run["lengths"].items()}
        elif curve == "accuracy":
            pairs = run["accuracy"]
        else:
            pairs = dict(enumerate(run.get(curve, ()), 1))
        for step, x in pairs.items():
            if x is not None and not run["error"]:
                values.setdefault(int(step), []).append(x)
    return [Point(step, fmean(x), min(x), max(x)) for step, x in sorted(values.items())]


# Pictures -----------------------------------------------------------------------------------------


def figures(grid: Grid, gpu: Data) -> dict[str, str]:
    """All pictures by their paths."""
    pictures = {
        "phase": phase_figure(grid),
        "survival": survival_figure(grid),
        "main": main_figure(grid),
    }
    about = "Mean over the seeds and range, against the training step"
    for study, (title, _, parts) in STUDIES.items():
        if panels := study_panels(gpu, study):
            pictures[study] = curves_figure(title, about, panels, columns=len(parts))
    return {f"{FIGURES}{name}.svg": text for name, text in pictures.items()}


def study_panels(gpu: Data, study: str) -> list[Panel]:
    """The panels of a study that have a line."""
    runs = [run for run in gpu["runs"] if run["study"] == study]
    return [panel for part in STUDIES[study][2] if (panel := study_panel(runs, *part))]


def study_panel(runs: Sequence[Data], title: str, curve: str, names: str) -> Panel | None:
    """A curve of the variants whose names end or begin with `names`."""
    lines: dict[str, list[Point]] = {}
    for name in dict.fromkeys(run["name"] for run in runs):
        if name.startswith(names) or name.endswith(names):
            points = curve_points([run for run in runs if run["name"] == name], curve)
            lines |= {name: points} if points else {}
    if not lines:
        return None
    everything = [p for points in lines.values() for p in points]
    last = max(p.x for p in everything)
    marks = {0: "0", last / 2: f"{last / 2:g}", last: f"{last:g}"}
    if curve == "accuracy":
        return Panel(title, lines, marks)
    low, high = min(p.low for p in everything), max(p.high for p in everything)
    if curve == "norm":
        limits = (
            10.0 ** math.floor(math.log10(max(low, 1e-3))),
            10.0 ** math.ceil(math.log10(max(high, 1e-2))),
        )
        return Panel(title, lines, marks, *limits, logarithmic=True)
    return Panel(title, lines, marks, 20.0 * (low // 20), 20.0 * (high // 20 + 1))


def family(loss: str) -> str:
    """The family of a preset, by its parts."""
    spec = PRESETS[loss].spec
    if spec.correction:
        return "corrected"
    if getattr(spec.ratio, "anchor", "") == "rollout":
        return "ratio to the sampler"
    if isinstance(spec.ratio, (pl.SequenceRatio, pl.SequenceProduct)):
        return "sequence ratio"
    if isinstance(spec.trust, pl.DetachedClip):
        return "detached clip"
    if isinstance(spec.trust, pl.Unbounded):
        return "no ratio"
    return "clipped token ratio" if hasattr(spec.trust, "eps_high") else "other bound"


def phase_figure(grid: Grid) -> str:
    """The heat map: the losses with the highest mean over shared conditions first."""
    names = conditions(grid, LOSSES)
    rows: dict[str, dict[str, Square]] = {}
    for name in names:
        for loss, x in mean_finals(grid, BUILT_IN, name, LOSSES).items():
            runs = grid[BUILT_IN, name, loss].values()
            rows.setdefault(loss, {})[name] = Square(x, collapses(runs))
    shared = [name for name in names if all(name in row for row in rows.values())] or names
    order = sorted(
        rows, key=lambda x: -fmean(rows[x][name].accuracy for name in shared if name in rows[x])
    )
    groups = {caption: [x for x in group if x in names] for caption, group in GROUPS.items()}
    return heat_map(
        {loss: rows[loss] for loss in order},
        {caption: group for caption, group in groups.items() if group},
        {loss: family(loss) for loss in order},
    )


def difficulty_figure(
    grid: Grid, teams: Mapping[str, Sequence[str]], measure: Callable[[Outcome], float], title: str
) -> str:
    """A line for each team of losses: the mean of a measure against two difficulties."""
    panels = []
    for axis, (names, labels) in AXES.items():
        lines: dict[str, list[Point]] = {}
        for team, losses in teams.items():
            for i, name in enumerate(names.split()):
                if all((BUILT_IN, name, loss) in grid for loss in losses):
                    value = fmean(map(measure, runs_of(grid, BUILT_IN, name, losses)))
                    lines.setdefault(team, []).append(Point(i, value, value, value))
        marks = {float(i): label for i, label in enumerate(labels.split())}
        panels.append(Panel(axis, lines, marks))
    about = "Mean over the losses and seeds; a point where every loss of the line was run"
    return curves_figure(title, about, panels)


def families(grid: Grid) -> dict[str, list[str]]:
    """The presets that were run, by family."""
    members: dict[str, list[str]] = {}
    for loss in sorted({key[2] for key in grid} & set(LOSSES), key=lambda x: (family(x), x)):
        members.setdefault(family(loss), []).append(loss)
    return members


def survival_figure(grid: Grid) -> str:
    """The share of runs that survive, by family."""
    title = "Share of runs that survive, by family of losses"
    return difficulty_figure(grid, families(grid), _survives, title)


def _survives(one: Outcome) -> bool:
    return not one.collapsed


def main_figure(grid: Grid) -> str:
    """The accuracy of the main losses."""
    teams = {loss: [loss] for loss in MAIN}
    return difficulty_figure(
        grid, teams, lambda one: one.final, "Final accuracy of the main losses"
    )


def full_tables(grid: Grid) -> str:
    """Every cell: accuracy, steps to the goal, collapses, interval, largest gradient norm."""
    parts = [
        "## All cells",
        f"`0.98 @20, 0.97 to 0.99, 1.3`: the mean final accuracy, the median step that reached "
        f"{GOAL:g} (if all runs did), the {1 - LEVEL:.0%} bootstrap interval of the mean, and the "
        "largest gradient norm of all runs.",
    ]
    sections = [(BUILT_IN, caption, names) for caption, names in GROUPS.items()]
    sections += [(task, f"task {task}", ON_HARDER) for task in HARDER]
    for task, caption, group in sections:
        names = [x for x in group if any(key[:2] == (task, x) for key in grid)]
        losses = [
            x
            for x in (*LOSSES, *CORRECTIONS, *ABLATIONS)
            if any((task, y, x) in grid for y in names)
        ]
        rows = [
            [f"`{loss}`", *(_cell(runs_of(grid, task, name, [loss])) for name in names)]
            for loss in losses
        ]
        if rows:
            summary = f"<details><summary>{caption}</summary>"
            parts += [summary, table(["loss", *(f"`{x}`" for x in names)], rows), "</details>"]
    return join(*parts)


def _cell(runs: Sequence[Outcome]) -> str:
    if not runs:
        return ""
    low, high = bootstrap_interval([one.final for one in runs])
    norm = max(one.grad_norm for one in runs)
    return f"{in_words(runs)}, {low:.2f} to {high:.2f}, {norm:.2g}"
