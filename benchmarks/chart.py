"""The stress chart: every policy loss under every difficulty, on three tasks.

    python -m benchmarks.chart PART [--jobs 2] [--seeds 5] [--seconds 3600]
        [--only NAME ...] [--folder out/chart] [--out benchmarks/results/chart.json]
    python -m benchmarks.chart again --cells 20

PART is `presets` (each preset under each condition on the built-in task), `corrections` (staleness
and engine noise against rollout corrections), `ablations` (one part of a loss exchanged) or `tasks`
(the main losses on two harder tasks).
`again` repeats random runs of this kind of machine and compares them bit by bit. Results are stored
after every run: the same command continues after a stop. `--only` takes losses, conditions and
tasks, and leaves out the others.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import policyloss as pl
from benchmarks.evidence import cpu_name
from benchmarks.harness import environment
from policyloss.catalogue import PRESETS
from policyloss.output import write_output
from policyloss_train.bench.processes import run_in_processes
from policyloss_train.bench.runs import Cell, Outcome, make_start, run_cell
from policyloss_train.config import BY_TEACHER

OUT = Path("benchmarks/results/chart.json")
# Losses that need a teacher, and one that is `gspo` where a completion has one turn.
LEFT_OUT = {"gspo_turn"} | {
    name
    for name, x in PRESETS.items()
    if x.advantage in BY_TEACHER or {"teacher_logp", "divergence"} & set(x.spec.reads)
}
LOSSES = tuple(name for name in PRESETS if name not in LEFT_OUT)
# The conditions in order of interest.
ORDER = (
    *("on_policy", "stale_4", "stale_16", "lr_4", "noisy", "lr_8", "long_tail", "top_p", "fp8"),
    *("few_groups", "many_groups", "hot", "lr_2", "stale_1", "lr_0.25", "int8", "bf16", "lr_0.5"),
)
MAIN = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "gpg", "tis", "icepop", "vespo")
HARDER = ("addition", "spell_backward")
ON_HARDER = ("on_policy", "stale_4", "stale_16")
CORRECTIONS = {  # next to `dapo` and `cispo`, whose own runs are among the presets
    "TIS": pl.preset("dapo").replace(correction=pl.Truncate(2.0)),
    "IcePop": pl.preset("dapo").replace(correction=pl.Band(0.5, 5.0)),
    "seq-mask": pl.preset("dapo").replace(correction=pl.SequenceMask(0.999, 1.002)),
    "seq-mask-wide": pl.preset("dapo").replace(correction=pl.SequenceMask(0.5, 2.0)),
    "seq-TIS": pl.preset("dapo").replace(correction=pl.Truncate(2.0, level="product")),
    "OPSM": pl.preset("dapo").replace(correction=pl.OPSM(1e-4, source="rollout")),
    "OPSM-wide": pl.preset("dapo").replace(correction=pl.OPSM(0.01, source="rollout")),
    "ratio-to-sampler": pl.preset("dapo").replace(ratio=pl.TokenRatio(anchor="rollout")),
    "cispo-to-sampler": pl.preset("cispo").replace(ratio=pl.TokenRatio(anchor="rollout")),
}
_PULL = pl.preset("grpo").kl
ABLATIONS = {  # is it the KL to the model of the start that holds `grpo`, and does OPSM need it?
    "dapo-with-KL": pl.preset("dapo").replace(kl=_PULL),
    "grpo-without-KL": pl.preset("grpo").replace(kl=None),
    "OPSM-with-KL": CORRECTIONS["OPSM"].replace(kl=_PULL),
}
ABLATED = ("lr_8", "stale_16")
CORRECTED = ("on_policy", "stale_1", "stale_4", "stale_16", "fp8")


def plan(part: str, seeds: int, folder: Path) -> list[Cell]:
    """The runs of a part, the most interesting conditions first."""
    if part == "presets":
        grid = [(loss, name, "sort") for name in ORDER for loss in LOSSES]
    elif part == "tasks":
        grid = [(x, name, task) for task in HARDER for name in ON_HARDER for x in MAIN]
    else:
        losses, conditions = COMPOSED[part]
        paths = [folder / "losses" / f"{name}.json" for name in losses]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(losses[path.stem].to_dict()))
        places = [*((name, "sort") for name in conditions), ("stale_16", "addition")]
        grid = [(str(path), *place) for place in places for path in paths]
    return [
        Cell(loss, condition, seed, task) for loss, condition, task in grid for seed in range(seeds)
    ]


def chosen_cells(cells: Sequence[Cell], names: Sequence[str]) -> list[Cell]:
    """The cells whose loss, condition and task are in `names`, where it has names of that kind."""
    kinds = [
        {x for x in names if x in known}
        for known in ({Path(c.loss).stem for c in cells}, set(ORDER), {"sort", *HARDER})
    ]
    return [
        cell
        for cell in cells
        if all(
            not kind or x in kind
            for kind, x in zip(
                kinds, (Path(cell.loss).stem, cell.condition, cell.task), strict=True
            )
        )
    ]


@cache
def machine() -> str:
    """A name for this kind of machine, on which runs are repeated to the bit."""
    found = environment()
    return f"{cpu_name()}, torch {found['torch']}, Python {found['python']}"


class Results:
    """The stored runs, by machine and cell. A loss in a file has the name of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def add(self, outcome: Outcome) -> None:
        """Store a run, in place of an earlier one of the same cell."""
        row = as_row(outcome)
        keys = ("loss", "condition", "seed", "task", "machine")
        self.rows = [x for x in self.rows if any(x[key] != row[key] for key in keys)]
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """One run in a line."""
        rows = sorted(self.rows, key=lambda x: (x["task"], x["condition"], x["loss"], x["seed"]))
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
        write_output(self.path, f"[\n{lines}\n]\n".encode())

    def digests(self) -> set[str]:
        """The digests of all stored runs, which name the cell and every option."""
        return {row["digest"] for row in self.rows}


def as_row(outcome: Outcome) -> dict[str, Any]:
    """A run as plain data."""
    cell = outcome.cell._replace(loss=Path(outcome.cell.loss).stem)
    rest = {name: x for name, x in outcome._asdict().items() if name != "cell"}
    return {**cell._asdict(), **rest, "machine": machine()}


def run_part(cells: Sequence[Cell], results: Results, args: Any) -> None:
    """Run the cells that are missing, until the time is over."""
    known, end = results.digests(), time.monotonic() + args.seconds
    left = [cell for cell in cells if cell.digest() not in known]
    print(f"{len(left)} of {len(cells)} runs to do, {args.jobs} at a time", flush=True)
    starts = sorted({cell.start for cell in left})
    for _ in run_in_processes(starts, args.jobs, partial(_start, folder=args.folder)):
        pass

    def in_time() -> Iterator[Cell]:
        for cell in left:
            if time.monotonic() > end:
                return
            yield cell

    work = partial(run_cell, folder=args.folder)
    for i, one in enumerate(run_in_processes(in_time(), args.jobs, work), 1):
        results.add(one)
        name = f"{one.cell.task} {Path(one.cell.loss).stem} {one.cell.condition} {one.cell.seed}"
        print(f"[{i}/{len(left)}] {name}: {one.error or f'{one.final:.3f}'}", flush=True)


def _start(start: tuple[str, int], folder: Path) -> None:
    make_start(folder, *start)


def repeat_cells(results: Results, args: Any) -> int:
    """Repeat random runs of this kind of machine; → how many differ."""
    cells = {cell.digest(): cell for part in PARTS for cell in plan(part, args.seeds, args.folder)}
    here = [row for row in results.rows if row["machine"] == machine() and row["digest"] in cells]
    chosen = random.Random(args.cells).sample(here, min(args.cells, len(here)))
    rows = {row["digest"]: row for row in chosen}
    work = partial(run_cell, folder=args.folder)
    differ = 0
    for one in run_in_processes([cells[digest] for digest in rows], args.jobs, work):
        equal = json.loads(json.dumps(as_row(one))) == rows[one.digest]
        differ += not equal
        print(f"{'equal' if equal else 'DIFFERENT'}: {rows[one.digest]}", flush=True)
    print(f"{len(chosen) - differ} of {len(chosen)} runs have the same bytes")
    return differ


COMPOSED = {"corrections": (CORRECTIONS, CORRECTED), "ablations": (ABLATIONS, ABLATED)}
PARTS = ("presets", "tasks", *COMPOSED)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=(*PARTS, "again"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("out/chart"))
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    results = Results(args.out)
    if args.part == "again":
        return min(repeat_cells(results, args), 1)
    run_part(chosen_cells(plan(args.part, args.seeds, args.folder), args.only), results, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
