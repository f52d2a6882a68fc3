"""Credit by turn and credit by trajectory, on a task in which the policy calls a tool.

    python examples/turns.py runs/turns             six runs, 35 seconds of CPU time each

The task is `lookup`: the model reads `find c in 4821:`, writes `c?`, and a tool writes the entry of
the table, `k`. The model writes `k?`, the tool writes `7`, and the model writes the answer, `7`. It
decides itself when to stop calling. Its reward is the share of the steps that are right.

`turn_loo` compares the rewards from a turn on with those of the other trajectories of the prompt
that have such a turn; `rloo` compares the rewards of whole trajectories. Both are unbiased with the
loss of Dr. GRPO, whose average does not divide by the length of a trajectory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

from policyloss.cli import main

ADVANTAGES, SEEDS = ("turn_loo", "rloo"), (0, 1, 2)


def train(folder: Path, advantage: str, seed: int) -> dict[str, float]:
    """One run, unless it is there already: the accuracy of its samples and of held-out answers."""
    out = folder / f"{advantage}-{seed}"
    if not out.exists():
        loss = ["--task", "lookup", "--loss", "dr_grpo", "--advantage", advantage]
        main(["train", *loss, "--seed", str(seed), "--out", str(out)])
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    sampled = [line["accuracy"] for line in lines if "accuracy" in line]
    return {
        "first step": sampled[0],
        "first 20 steps": mean(sampled[:20]),
        "last 20 steps": mean(sampled[-20:]),
        "held out, after": lines[-1]["eval/accuracy"],
    }


def table(rows: dict[str, list[dict[str, float]]]) -> str:
    """The mean over seeds of each number, and each seed's number behind it."""
    names = list(next(iter(rows.values()))[0])
    text = [f"| advantage | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for advantage, runs in rows.items():
        cells = []
        for name in names:
            each = [run[name] for run in runs]
            numbers = ", ".join(f"{x:.3f}" for x in each)
            cells.append(f"**{mean(each):.3f}** ({numbers})")
        text.append(f"| `{advantage}` | {' | '.join(cells)} |")
    return "\n".join(text)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/turns")
    print(table({name: [train(folder, name, seed) for seed in SEEDS] for name in ADVANTAGES}))
