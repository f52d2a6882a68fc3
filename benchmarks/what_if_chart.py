"""Do the numbers of `policyloss what-if` predict which loss survives on the stress chart?

    python -m benchmarks.what_if_chart [--seeds 3] [--steps 10]
        [--chart benchmarks/results/chart.json] [--out benchmarks/results/what_if_chart.json]

`dapo` trains under a condition of the chart for a few steps and stores its completions. What-if
tries every loss of the chart on them. Each of its numbers is then compared, by rank, with the final
accuracy that the losses reached on the chart under the same condition.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import policyloss_lab as lab
from benchmarks.chart import LOSSES, OUT
from benchmarks.harness import table, write_json
from benchmarks.what_if import gains, rank_correlation
from policyloss_lab.whatif.command import with_model_of_run
from policyloss_lab.whatif.tokens import read
from policyloss_train.bench.runs import Cell, make_start
from policyloss_train.loop import train

BASE = "dapo"
CONDITIONS = ("on_policy", "stale_4", "stale_16", "lr_4", "lr_8", "noisy", "long_tail")
NUMBERS = {  # their names in a row of what-if, and for a reader
    "gain": "gain of a small step",
    "effective": "effective sample size",
    "lost": "gradient cut off",
}


def final_accuracies(chart: Path) -> dict[str, dict[str, float]]:
    """The mean final accuracy of each loss, by condition, on the built-in task."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in json.loads(chart.read_text()):
        if row["task"] == "sort" and row["loss"] in LOSSES:
            final = 0.0 if row["error"] else row["accuracy"][-1]
            found.setdefault(row["condition"], {}).setdefault(row["loss"], []).append(final)
    return {c: {x: statistics.mean(v) for x, v in of.items()} for c, of in found.items()}


def numbers_of(condition: str, seed: int, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """The numbers of what-if for every loss, after `steps` steps with `BASE`."""
    cell = Cell(BASE, condition, seed)
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary, "run")
        config = replace(
            cell.config(out, make_start(folder, *cell.start)),
            steps=steps,
            eval_every=0,
            eval_prompts=2,
            rollouts_every=steps,
            rollouts_rows=128,
        )
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(config, cell.spec)
        tokens, model, temperature = with_model_of_run(out, read(out, steps))
        result = lab.what_if(tokens, LOSSES, model=model, temperature=temperature)
    rows = zip(result.rows(), gains(result.products, tokens), strict=True)
    return {
        row["name"]: {"gain": gain, "effective": row["effective"], "lost": row["lost"]}
        for row, gain in rows
        if row["norm"] > 0
    }


def correlations(
    numbers: Mapping[str, Mapping[str, Any]], final: Mapping[str, float]
) -> dict[str, float]:
    """The rank correlation of each number with the final accuracy, over the losses that have it."""
    found = {}
    for name in NUMBERS:
        losses = [x for x in numbers if x in final and numbers[x][name] is not None]
        values = [numbers[x][name] for x in losses]
        if len(set(values)) > 1:
            found[name] = rank_correlation(values, [final[x] for x in losses])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="steps before what-if looks")
    parser.add_argument("--chart", type=Path, default=OUT)
    parser.add_argument("--folder", type=Path, default=Path("out/chart"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/what_if_chart.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    final = final_accuracies(args.chart)
    rows: list[dict[str, Any]] = []
    for condition in CONDITIONS:
        for seed in range(args.seeds):
            numbers = numbers_of(condition, seed, args.steps, args.folder)
            found = correlations(numbers, final[condition])
            rows.append({"condition": condition, "seed": seed, "losses": len(numbers), **found})
            print(rows[-1], flush=True)
            write_json(args.out, {"base": BASE, "steps": args.steps, "correlations": rows})
    lines = [["condition", *NUMBERS]]
    for condition in CONDITIONS:
        chosen = [row for row in rows if row["condition"] == condition]
        lines.append(
            [condition, *(" ".join(f"{r[n]:.2f}" for r in chosen if n in r) for n in NUMBERS)]
        )
    print(table(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
