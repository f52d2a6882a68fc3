"""Does a run learn with the plan "sparse"? The built-in task with and without it, seed by seed.

    python -m benchmarks.sparse_learning [--jobs 2] [--seeds 20] [--steps 40]
        [--out benchmarks/results/sparse_learning.json]

The vocabulary of the task is small, and its policy is sure of most tokens. With the library's eps
of 1e-3 almost nothing would be drawn, so eps is 0.1 and 0.5 here: the draw then adds 20 and 200
times the share of the squared norm that it adds with eps 1e-3 to a large vocabulary. Each
difference is the mean over seeds of a run minus the run of the same seed with the head "fused",
with the interval that holds 95 % of the means of seeds drawn with replacement. Runs that are in the
file already are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import policyloss as pl
from benchmarks.evidence_plan import COMMON
from benchmarks.harness import environment, table, write_json
from policyloss_train.arguments import read_spec
from policyloss_train.config import TrainConfig
from policyloss_train.policy import PLANS

EXACT = "fused"
# The head of each arm, and the eps of the plan.
ARMS: dict[str, tuple[Any, float]] = {
    EXACT: ("fused", 0.0),
    "sparse, eps 0.1": ("sparse", 0.1),
    "sparse, eps 0.5": ("sparse", 0.5),
}
LAST = 10  # steps whose mean reward is compared
DRAWS = 10_000
COMPARED = {"accuracy": "held-out accuracy", "late_reward": f"reward of the last {LAST} steps"}
METRICS = ("sparse_entries", "sparse_noise")


def train_one(job: tuple[str, int], steps: int) -> dict[str, Any]:
    """One run of an arm with a seed, in one thread."""
    from policyloss_train.loop import train

    arm, seed = job
    head, eps = ARMS[arm]
    torch.set_num_threads(1)
    PLANS["sparse"] = pl.Plan("sparse", eps=eps, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        options = {**COMMON, "steps": steps, "advantage": "grpo", "loss": "grpo"}
        config = TrainConfig(out=out, seed=seed, head=head, **options)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(config, read_spec(config.loss))
        text = (out / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {"arm": arm, "seed": seed, **summary(lines)}


def summary(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The curves of a run, its last accuracy, its late reward, and the means of its metrics."""
    accuracy = {line["step"]: line["eval/accuracy"] for line in lines if "eval/accuracy" in line}
    trained = [line for line in lines if line["step"] > 0]
    rewards = [line["reward/mean"] for line in trained]
    found = {
        "start": next(iter(accuracy.values())),
        "accuracy": list(accuracy.values())[-1],
        "late_reward": statistics.mean(rewards[-LAST:]),
        "accuracies": {str(step): x for step, x in accuracy.items()},
        "rewards": [round(x, 4) for x in rewards],
    }
    for name in METRICS:
        values = [line[f"policy/{name}"] for line in trained if f"policy/{name}" in line]
        if values:
            found[name] = statistics.mean(values)
    return found


def difference(runs: Sequence[float], exact: Sequence[float]) -> dict[str, float]:
    """The mean difference of pairs, and its bootstrap interval of 95 %."""
    pairs = torch.tensor(runs).double() - torch.tensor(exact).double()
    g = torch.Generator().manual_seed(0)
    means = pairs[torch.randint(len(pairs), (DRAWS, len(pairs)), generator=g)].mean(1)
    low, high = means.quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    return {"mean": float(pairs.mean()), "low": low, "high": high}


def compare(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each arm: means over seeds, and the differences from the exact runs."""
    by_arm = {
        arm: sorted((r for r in runs if r["arm"] == arm), key=lambda r: int(r["seed"]))
        for arm in ARMS
    }
    rows = []
    for arm, those in by_arm.items():
        row: dict[str, Any] = {"arm": arm, "seeds": len(those)}
        for name in ("start", *COMPARED, *METRICS):
            if name in those[0]:
                row[name] = statistics.mean(r[name] for r in those)
        if arm != EXACT:
            row["difference"] = {
                name: difference([r[name] for r in those], [r[name] for r in by_arm[EXACT]])
                for name in COMPARED
            }
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Train, compare and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=COMMON["steps"])
    parser.add_argument("--out", type=Path, help="where the JSON is written after each seed")
    args = parser.parse_args(argv)
    runs: list[dict[str, Any]] = []
    if args.out is not None and args.out.is_file():
        runs = json.loads(args.out.read_text(encoding="utf-8"))["runs"]
    done = {(run["arm"], run["seed"]) for run in runs}
    jobs = [(arm, seed) for seed in range(args.seeds) for arm in ARMS if (arm, seed) not in done]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for run in pool.map(partial(train_one, steps=args.steps), jobs):
            runs.append(run)
            print({k: v for k, v in run.items() if not isinstance(v, list | dict)}, flush=True)
            if args.out is not None and len(runs) % len(ARMS) == 0:
                about = {"environment": environment(), "steps": args.steps}
                write_json(args.out, {**about, "rows": compare(runs), "runs": runs})
    heads = ["arm", *COMPARED.values(), "entries", "noise"]
    lines = [[*heads, *(f"change of {x}" for x in COMPARED.values())]]
    for r in compare(runs):
        changes = r.get("difference", {}).values()
        shown = [f"{d['mean']:+.3f} [{d['low']:+.3f}, {d['high']:+.3f}]" for d in changes]
        numbers = [f"{r[name]:.3f}" if name in r else "-" for name in (*COMPARED, *METRICS)]
        lines.append([r["arm"], *numbers, *(shown or ["-"] * len(COMPARED))])
    print(table(lines))


if __name__ == "__main__":
    main()
