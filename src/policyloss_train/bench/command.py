"""`policyloss bench`: the table of losses and conditions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from policyloss.commands import read_options
from policyloss.errors import InputError, unknown_name
from policyloss_lab.runs.files import make_folder
from policyloss_train.arguments import read_spec
from policyloss_train.bench.conditions import CONDITIONS, GOAL, STEPS
from policyloss_train.bench.runs import Cell, Outcome, make_start, run_cell, run_in_processes
from policyloss_train.commands import BenchOptions

RESULTS = "results.jsonl"


def bench_command(arguments: Sequence[str]) -> int:
    """`policyloss bench LOSS [options]`."""
    options = read_options("bench", BenchOptions, arguments)
    for name in options.conditions:
        if name not in CONDITIONS:
            raise InputError(unknown_name("condition", name, CONDITIONS))
    losses = list(dict.fromkeys((options.loss, *options.against)))
    for loss in losses:
        read_spec(loss)  # raises before the first run
    cells = [
        Cell(loss, condition, seed)
        for seed in range(options.seeds)
        for condition in options.conditions
        for loss in losses
    ]
    make_folder(options.out)
    outcomes = {one.cell: one for one in run_missing(cells, options.out, options.jobs)}
    for name in options.conditions:
        print(f"{name}: {CONDITIONS[name].meaning}")
    print(f"\nfinal accuracy after {STEPS} steps, and the step that reached {GOAL:g}:\n")
    for line in table_lines(outcomes.values(), losses, options.conditions):
        print(line)
    return 0


def run_missing(cells: Sequence[Cell], folder: Path, workers: int) -> list[Outcome]:
    """The outcomes of all cells, of which the stored ones are not run again."""
    path = folder / RESULTS
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    stored = {(one.cell, one.digest): one for one in map(Outcome.from_json, text.splitlines())}
    digests = {cell: cell.digest() for cell in cells}
    done = [stored[key] for key in digests.items() if key[1] and key in stored]
    left = [cell for cell in cells if not digests[cell] or (cell, digests[cell]) not in stored]
    print(f"{len(left)} runs to do, {len(done)} are there already; {workers} at a time", flush=True)
    for seed in sorted({cell.seed for cell in left}):
        make_start(folder, seed)
    with path.open("a", encoding="utf-8") as file:
        work = partial(run_cell, folder=folder)
        for number, one in enumerate(run_in_processes(left, workers, work), 1):
            file.write(one.to_json() + "\n")
            file.flush()
            done.append(one)
            name = f"{one.cell.loss}, {one.cell.condition}, seed {one.cell.seed}"
            print(f"[{number}/{len(left)}] {name}: {one.error or f'{one.final:.3f}'}", flush=True)
    return done


def table_lines(
    outcomes: Iterable[Outcome], losses: Sequence[str], conditions: Sequence[str]
) -> Iterator[str]:
    """A row per loss, a column per condition."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        found.setdefault((one.cell.loss, one.cell.condition), []).append(one)
    rows = [["", *conditions]]
    rows += [[loss, *(in_words(found[loss, name]) for name in conditions)] for loss in losses]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(x.ljust(width) for x, width in zip(row, widths, strict=True)).rstrip()


def in_words(runs: Sequence[Outcome]) -> str:
    """The runs of a cell with all seeds: mean accuracy, median step to the goal, collapses."""
    text = f"{statistics.mean(one.final for one in runs):.2f}"
    steps = [one.steps_to_goal for one in runs]
    reached = sorted(step for step in steps if step is not None)
    if len(reached) == len(runs):
        text += f" @{statistics.median(reached):g}"
    collapses = sum(one.collapsed for one in runs)
    return text + (f" ({collapses} of {len(runs)} collapsed)" if collapses else "")
