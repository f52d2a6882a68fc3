"""`policyloss bench`: the table of losses and conditions."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from policyloss.commands import read_options
from policyloss.errors import InputError, unknown_name
from policyloss_lab.runs.files import (
    damage_named,
    from_json,
    make_folder,
    read_plain,
    replace_file,
    to_json,
)
from policyloss_train.arguments import read_spec
from policyloss_train.bench.conditions import CONDITIONS, GOAL, STEPS
from policyloss_train.bench.processes import run_in_processes
from policyloss_train.bench.runs import Cell, Outcome, make_start, run_cell
from policyloss_train.commands import BenchOptions
from policyloss_train.loop import INTERRUPTED

RESULTS = "results.json"


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
    try:
        outcomes = run_missing(cells, options.out, options.jobs)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return INTERRUPTED
    for name in options.conditions:
        print(f"{name}: {CONDITIONS[name].meaning}")
    print(f"\nfinal accuracy after {STEPS} steps, and the step that reached {GOAL:g}:\n")
    for line in table_lines(outcomes, losses, options.conditions):
        print(line)
    return 0


def run_missing(cells: Sequence[Cell], folder: Path, workers: int) -> list[Outcome]:
    """The outcomes of all cells, of which the stored ones are not run again."""
    path = folder / RESULTS
    stored: list[Outcome] = []
    if path.exists():
        with damage_named(f"{path} is no file of policyloss bench", raises=InputError):
            stored = [Outcome.from_dict(data) for data in from_json(read_plain(path))]
    digests = {cell: cell.digest() for cell in cells}
    done = [one for one in stored if one.digest and digests.get(one.cell) == one.digest]
    left = [cell for cell in cells if cell not in {one.cell for one in done}]
    kept = [one for one in stored if one.cell not in left]
    print(f"{len(left)} runs to do, {len(done)} are there already; {workers} at a time", flush=True)
    starts = sorted({cell.start for cell in left})
    for _ in run_in_processes(starts, workers, partial(_make_start, folder)):
        pass
    new: list[Outcome] = []
    for one in run_in_processes(left, workers, partial(run_cell, folder=folder)):
        new.append(one)
        replace_file(path, to_json([x.to_dict() for x in (*kept, *new)], "the results"))
        name = f"{one.cell.loss}, {one.cell.condition}, seed {one.cell.seed}"
        print(f"[{len(new)}/{len(left)}] {name}: {one.error or f'{one.final:.3f}'}", flush=True)
    return [*done, *new]


def _make_start(folder: Path, start: tuple[str, int]) -> None:
    make_start(folder, *start)


def table_lines(
    outcomes: Iterable[Outcome], losses: Sequence[str], conditions: Sequence[str]
) -> Iterator[str]:
    """A row per loss, a column per condition."""
    by_cell: dict[tuple[str, str], list[Outcome]] = {}
    for one in outcomes:
        by_cell.setdefault((one.cell.loss, one.cell.condition), []).append(one)
    rows = [["", *conditions]]
    rows += [[loss, *(in_words(by_cell[loss, name]) for name in conditions)] for loss in losses]
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
