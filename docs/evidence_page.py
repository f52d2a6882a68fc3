"""Writes docs/evidence.md and its figures from evidence.json
and evidence_large.json in benchmarks/results.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from docs.evidence_figure import accuracy_figure, clip_figure
from docs.markdown import GENERATED, fenced, join, table

Run = dict[str, Any]
ACCURACY_FIGURE, CLIP_FIGURE = (
    "docs/figures/evidence_accuracy.svg",
    "docs/figures/evidence_dual_clip.svg",
)
PRESETS, DUAL_CLIP = "presets", "dual_clip"
PLAIN, DUAL = "ppo", "ppo_dual_clip"
# A norm that is ten times as large in the last quarter of a run as in the first has run away.
RUNAWAY = 10.0


def evidence_pages(results: Path) -> dict[str, str]:
    """The page and its figures; empty before the first recorded run."""
    path, large = results / "evidence.json", results / "evidence_large.json"
    if not path.is_file():
        return {}
    data = json.loads(path.read_text(encoding="utf-8"))
    runs = good(data)
    pages = {
        "docs/evidence.md": evidence_page(
            data, json.loads(large.read_text(encoding="utf-8")) if large.is_file() else None
        )
    }
    if by_preset(runs[PRESETS]):
        pages[ACCURACY_FIGURE] = accuracy_figure(by_preset(runs[PRESETS]), data["goal"])
    if studies := {name: by_preset(found) for name, found in runs.items() if name != PRESETS}:
        pages[CLIP_FIGURE] = clip_figure(studies, (PLAIN, DUAL))
    return pages


def good(data: Run) -> dict[str, list[Run]]:
    """The completed runs, by study; the study of all presets is always present."""
    found: dict[str, list[Run]] = {PRESETS: []}
    for run in data["runs"]:
        if "error" not in run:
            found.setdefault(run["study"], []).append(run)
    return found


def by_preset(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs of each preset, in the order of their seeds."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        found.setdefault(run["preset"], []).append(run)
    return dict(sorted(found.items()))


def evidence_page(data: Run, large: Run | None) -> str:
    """The whole page."""
    runs = good(data)
    studies = {name: by_preset(found) for name, found in runs.items() if name != PRESETS}
    reproduce = (
        "Results are written as they come, so a stopped run continues where it stopped, and "
        "`--only ppo,dual_clip` runs a part. The larger model needs a GPU."
    )
    commands = (
        "make evidence\n"
        "python -m benchmarks.evidence --jobs 16 --seeds 3\n"
        "python -m benchmarks.evidence_large --device cuda"
    )
    return join(
        "# Evidence: does each loss learn?",
        GENERATED,
        presets_section(by_preset(runs[PRESETS]), data),
        failures_section(data),
        clip_section(studies) if studies else "",
        large_section(large) if large else "",
        "## Reproduce",
        fenced(commands, "sh"),
        reproduce,
    )


# Every preset -------------------------------------------------------------------------------------


def presets_section(presets: dict[str, list[Run]], data: Run) -> str:
    """The runs, their machines, and a table with a line for each preset."""
    if not presets:
        return "No preset has been run yet."
    all_runs = [run for runs in presets.values() for run in runs]
    counts = sorted({len(runs) for runs in presets.values()})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else counts[0]
    lengths = sorted({max(map(int, run["accuracy"])) for run in all_runs})
    steps = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else lengths[0]
    goal = data["goal"]
    about = (
        f"Each preset trains the built-in task, sorting digits, with `policyloss train`: {seeds} "
        f"seeds, {steps} steps of 128 completions. Apart from the options in the table, every run "
        "uses the trainer's defaults, including one learning rate for all presets. "
        f"{same_start(all_runs)} The warm-up shows imperfect answers: nine of ten leave the last "
        "digit in its place, so that only a reward or a teacher can raise the accuracy. "
        "Accuracy is measured on greedy answers to 256 held-out prompts, every 5 steps. Each "
        "figure is "
        "the median over the seeds, with the range in brackets; a dash means never, or nothing to "
        "measure. "
        "Seconds count sampling and learning on one thread, without warm-up and evaluation; "
        f"several runs shared a machine, so compare steps rather than seconds. {machines(data)}"
    )
    rows = [
        [f"[`{name}`](presets/{name}.md)", *_preset_cells(runs)] for name, runs in presets.items()
    ]
    heading = [
        "preset",
        "run with",
        "start",
        "end",
        f"steps to {goal}",
        f"seconds to {goal}",
        "KL",
        "clipped",
        "gradient norm",
    ]
    note = (
        "KL (k3, to the policy that sampled or was frozen before the step), share of clipped "
        "tokens and gradient norm are those of the last step."
    )
    picture = (
        "![Held-out accuracy over the steps, one small chart per "
        f"preset]({ACCURACY_FIGURE.removeprefix('docs/')})"
    )
    return join(reached(presets, goal), about, table(heading, rows), note, picture)


def reached(presets: dict[str, list[Run]], goal: float) -> str:
    """How many presets reach the goal, and which do not."""
    counts = {
        name: sum(run["to_goal"] is not None for run in runs) for name, runs in presets.items()
    }
    always = [name for name, count in counts.items() if count == len(presets[name])]
    said = (
        f"**{len(always)} of {len(presets)} presets reach a held-out accuracy of {goal} with every "
        "seed that was run.**"
    )
    parts = [
        f"`{name}` ({count} of {len(presets[name])} seeds)"
        for name, count in counts.items()
        if name not in always
    ]
    return said + (f" The others: {', '.join(parts)}." if parts else "")


def same_start(runs: list[Run]) -> str:
    """Whether all presets of a seed began with the same weights, judged by the first accuracy."""
    starts: dict[int, set[float]] = {}
    for run in runs:
        starts.setdefault(run["seed"], set()).add(run["start"])
    if all(len(found) == 1 for found in starts.values()):
        shown = ", ".join(f"{next(iter(starts[seed])):.3f}" for seed in sorted(starts))
        return f"With the same seed, all begin with the same weights, whose accuracy is {shown}."
    return (
        "With the same seed, all begin with the same supervised warm-up, but machines that round "
        "differently ran it."
    )


def _preset_cells(runs: list[Run]) -> list[str]:
    steps = [run["to_goal"]["steps"] if run["to_goal"] else None for run in runs]
    seconds = [run["to_goal"]["seconds"] if run["to_goal"] else None for run in runs]
    finals = [
        [run["final"][name] for run in runs] for name in ("kl_old", "clip_fraction", "grad_norm")
    ]
    return [
        f"{options(runs[0])}: {runs[0]['why']}",
        spread([run["start"] for run in runs], ".2f", only_median=True),
        spread([run["end"] for run in runs], ".3f"),
        spread(steps, ".0f"),
        spread(seconds, ".0f"),
        *(spread(values, ".2g", only_median=True) for values in finals),
    ]


def options(run: Run) -> str:
    """The options of this loss, as on the command line."""
    own = run["settings"]["own"].items()
    parts = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
        for name, value in own
    ]
    return f"`{' '.join(parts)}`"


def spread(values: list[float | None], form: str, *, only_median: bool = False) -> str:
    """Median and range. None is "never": later than any number, and shown as a dash."""
    known = sorted(math.inf if x is None else x for x in values)
    middle = median(known)

    def shown(x: float) -> str:
        return format(x, form) if math.isfinite(x) else "–"

    if only_median or known[0] == known[-1]:
        return shown(middle)
    return f"{shown(middle)} ({shown(known[0])} to {shown(known[-1])})"


def machines(data: Run) -> str:
    """Where the runs were made."""
    used = sorted({run["machine"] for run in data["runs"]})
    said = [
        f"{m['cpu']}, {m['cores']} cores, {m['jobs']} runs at a time, torch {m['torch']}, "
        f"transformers {m['transformers']}"
        for m in (data["machines"][i] for i in used)
    ]
    return f"Machine: {'; '.join(said)}."


def failures_section(data: Run) -> str:
    """Runs that ended with an error."""
    failed = [run for run in data["runs"] if "error" in run]
    lines = [
        f"- `{run['preset']}`, {run['study']}, seed {run['seed']}: {run['error']}" for run in failed
    ]
    return join("## Runs that failed", "\n".join(lines)) if lines else ""


# Dual clip ----------------------------------------------------------------------------------------


def clip_section(studies: dict[str, dict[str, list[Run]]]) -> str:
    """The claim, the result, and the numbers."""
    claim = (
        "The claim: where the advantage is negative and the ratio is large, plain PPO's loss −A·r "
        "has no bound, and with stale completions its loss and gradient norm run away; dual clip "
        "bounds it by −c·A. Here completions are 8 steps old, the ratio compares with the policy "
        "that sampled them, each step takes two epochs of two minibatches, advantages are GRPO's "
        "for "
        "all, and the gradient's norm is not limited. `ppo`, `ppo_dual_clip` (c = 3) and "
        "`two_sided` (ratio ≤ 4) differ only in the clip. A norm has run away if it is "
        f"{RUNAWAY:.0f} times as large in the last quarter of the run as in the first, or not "
        "finite."
    )
    heading = [
        "loss",
        "largest norm",
        "median norm",
        "late / early",
        "largest loss",
        "largest ratio",
        "best",
        "end",
    ]
    parts = []
    for name, presets in sorted(studies.items()):
        rows = [[f"`{preset}`", *_clip_cells(runs)] for preset, runs in presets.items()]
        parts += [
            f"### Learning rate {name.rpartition(' ')[2]}",
            verdict(presets),
            table(heading, rows),
        ]
    note = (
        "Median over the seeds, with the range; gradient norms are means over the updates of a "
        "step. Late / early: median norm of the last quarter of the steps over that of the first. "
        "AdamW divides by the size of past gradients, so a large gradient does not make an "
        "equally large step."
    )
    picture = (
        "![Gradient norm over the steps of plain PPO and of dual "
        f"clip]({CLIP_FIGURE.removeprefix('docs/')})"
    )
    return join("## Is the dual clip needed?", claim, *parts, note, picture)


def verdict(presets: dict[str, list[Run]]) -> str:
    """Whether the claim held, in numbers."""
    if PLAIN not in presets or DUAL not in presets:
        return ""
    both = [presets[name] for name in (PLAIN, DUAL)]
    away, away_dual = (sum(map(run_away, runs)) for runs in both)
    largest, largest_dual = (median(max(_norms(run)) for run in runs) for runs in both)
    fell, fell_dual = (sum(run["end"] < run["start"] for run in runs) for runs in both)
    held = away > len(both[0]) / 2 and not away_dual
    said = "The claim holds here" if held else "The claim does not hold here in these words"
    return (
        f"**{said}**: the norm runs away in {away} of {len(both[0])} runs of plain PPO and in "
        f"{away_dual} of {len(both[1])} with dual clip. Its largest value is {largest:.3g} with "
        f"plain PPO and {largest_dual:.3g} with dual clip. {fell} of {len(both[0])} runs of plain "
        f"PPO end below the accuracy they began with, and {fell_dual} of {len(both[1])} with dual "
        "clip."
    )


def run_away(run: Run) -> bool:
    """Whether the gradient norm is `RUNAWAY` times as large in the last quarter as in the first,
    or was not finite.
    """
    return None in run["curves"]["grad_norm"] or late_over_early(run) >= RUNAWAY


def late_over_early(run: Run) -> float:
    """The median norm of the last quarter of the steps over that of the first."""
    norms = _norms(run)
    quarter = max(len(norms) // 4, 1)
    return median(norms[-quarter:]) / max(median(norms[:quarter]), 1e-30)


def _norms(run: Run) -> list[float]:
    return _known(run, "grad_norm")


def _known(run: Run, curve: str) -> list[float]:
    return [math.inf if x is None else x for x in run["curves"][curve]]


def _clip_cells(runs: list[Run]) -> list[str]:
    columns = [
        ([max(_norms(run)) for run in runs], ".3g"),
        ([median(_norms(run)) for run in runs], ".3g"),
        ([late_over_early(run) for run in runs], ".2g"),
        ([max(_known(run, "loss")) for run in runs], ".3g"),
        ([max(_known(run, "ratio_max")) for run in runs], ".3g"),
        ([run["best"] for run in runs], ".2f"),
        ([run["end"] for run in runs], ".2f"),
    ]
    return [spread(list(values), form) for values, form in columns]


# A larger model -----------------------------------------------------------------------------------


def large_section(run: Run) -> str:
    """Speed and memory of `policyloss train` with and without the one-pass head."""
    size, machine, gaps = run["size"], run["environment"], run["first_step"]
    fused, logits = run["runs"]["fused"], run["runs"]["logits"]
    about = (
        f"A Llama of {run['weights'] / 1e6:.0f} million random weights ({size['layers']} layers, "
        f"hidden size {size['hidden']}, vocabulary {size['vocabulary']:,}, {size['dtype']}) runs "
        f"{size['steps']} steps of `policyloss train` from end to end: "
        f"{size['prompts'] * size['group_size']} completions of {size['new_tokens']} tokens each, "
        f"{size['micro_tokens']:,} tokens in a forward and backward. {machine['gpu']}, torch "
        f"{machine['torch']}. Tokens per second count completion tokens of the learning phase (old "
        "log-probs, forward, backward, optimizer), the median over the steps after the first; "
        "the peak is that of the whole run."
    )
    rows = [
        [
            f"`--head {head}`",
            f"{r['learn_tokens_per_s']:,.0f}",
            f"{r['peak_bytes'] / 2**30:.2f}",
            f"{r['grad_norm'][0]:.4f}",
        ]
        for head, r in run["runs"].items()
    ]
    speed, memory = (
        fused["learn_tokens_per_s"] / logits["learn_tokens_per_s"],
        fused["peak_bytes"] / logits["peak_bytes"],
    )
    said = (
        f"The one-pass head runs at {speed:.2f} times the speed with {memory:.2f} times the peak "
        "memory. In the first step, from the same weights and completions, the losses are "
        f"{gaps['loss']:.1e} apart and the gradient norms {gaps['grad_norm']:.2%}."
    )
    heading = ["head", "tokens/s, learning", "peak memory, GiB", "gradient norm, step 1"]
    return join("## A model of a hundred million weights", about, table(heading, rows), said)
