"""The stress chart: its tasks, its plan of runs, and the mistakes that it makes on purpose."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from benchmarks import chart, chart_gpu, what_if_chart

import policyloss as pl
from policyloss_train.bench.runs import Cell, Outcome
from policyloss_train.bench.tasks import FILE, TASKS, write_task
from policyloss_train.tasks import make_task
from policyloss_train.tasks.base import Example


def demonstrate(task: str, prompt: str, answer: str, tries: int = 200) -> set[str]:
    """All demonstrations that a task has for one prompt."""
    made, rng = TASKS[task].make(0), Random(0)
    return {str(made.demonstration(Example(prompt, answer), rng)) for _ in range(tries)}


def test_demonstrations_are_right_or_wrong_in_one_way() -> None:
    # 47 + 85 = 132, from its lowest digit; 7 + 5 and 4 + 8 both end in 2.
    assert demonstrate("addition", "47+85=", "231") == {"231", "220"}
    assert demonstrate("addition", "11+22=", "330") == {"330"}
    assert demonstrate("spell_backward", "", "nus") == {"nus", "nsu"}


def test_a_long_tail_has_mostly_short_answers_and_a_few_long_ones() -> None:
    lengths = [len(e.answer) for e in TASKS["long_tail"].make(1).train]
    assert set(lengths) == set(range(2, 11))
    assert sorted(lengths)[len(lengths) // 2] == 5
    assert 0.02 < sum(n == 10 for n in lengths) / len(lengths) < 0.1


@pytest.mark.parametrize("name", ["addition", "long_tail"])
def test_the_trainer_reads_the_task_from_its_file(name: str, tmp_path: Path) -> None:
    task = TASKS[name].make(3)
    write_task(task, tmp_path / FILE)
    options = TASKS[name].options(tmp_path)
    read = make_task(options["task"], reward=options["reward"], seed=3)
    for ours, theirs in ((task.train, read.train), (task.held_out, read.held_out)):
        assert [(e.prompt, e.answer) for e in ours] == [(e.prompt, e.answer) for e in theirs]
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.held_out}


def test_every_cell_has_its_own_digest_and_a_start(tmp_path: Path) -> None:
    cells = [cell for part in chart.PARTS for cell in chart.plan(part, 1, tmp_path)]
    assert len({cell.digest() for cell in cells}) == len(cells)
    assert Cell("dapo", "long_tail", 2).start == ("long_tail", 2)
    assert Cell("dapo", "stale_4", 2, "addition").start == ("addition", 2)
    assert Cell("dr_grpo", "on_policy", 0).spec.aggregate.horizon == 16  # type: ignore[union-attr]
    assert len(chart.LOSSES) == len(set(chart.LOSSES)) == 42
    assert set(chart.MAIN) <= set(chart.LOSSES)


def test_only_leaves_out_the_others(tmp_path: Path) -> None:
    cells = chart.plan("presets", 2, tmp_path)
    chosen = chart.chosen_cells(cells, ["dapo", "gspo", "stale_4"])
    assert chosen == [Cell(x, "stale_4", s) for x in ("dapo", "gspo") for s in (0, 1)]
    assert chart.chosen_cells(cells, []) == cells


def test_results_are_stored_once_for_each_cell(tmp_path: Path) -> None:
    results = chart.Results(tmp_path / "chart.json")
    for final in (0.5, 0.75):
        cell = Cell(f"{tmp_path}/TIS.json", "fp8", 1)
        results.add(Outcome(cell, "d", (0.25, final), 2.0))
    (row,) = json.loads((tmp_path / "chart.json").read_text())
    assert (row["loss"], row["condition"], row["accuracy"]) == ("TIS", "fp8", [0.25, 0.75])
    assert chart.Results(tmp_path / "chart.json").digests() == {"d"}


def test_a_mean_of_means_divides_every_micro_batch_by_its_own_tokens() -> None:
    lengths, batches = (1, 3), []
    for n in lengths:
        tokens = {"old_logp": torch.full((1, n), -1.0), "advantages": torch.ones(1)}
        batches.append({**tokens, "mask": torch.ones(1, n, dtype=torch.bool)})
    make = partial(chart_gpu.mean_of_means, pl.accumulate)
    for accumulate, weights in ((pl.accumulate, (1 / 4, 1 / 4)), (make, (1 / 2, 1 / 6))):
        for micro, n, weight in zip(accumulate("dapo", batches), lengths, weights, strict=True):
            logp = torch.full((1, n), -1.0, requires_grad=True)
            micro.loss(logp).backward()
            torch.testing.assert_close(logp.grad, torch.full((1, n), -weight))


def test_a_sum_with_its_steps() -> None:
    forget: Any = iter([True])
    assert (
        chart_gpu.write_steps(483, 279, lambda: False, lambda: 0) == "3+9=12;8+7+1=16;4+2+1=7;>762"
    )
    text = chart_gpu.write_steps(483, 279, lambda: next(forget, False), lambda: 1)
    assert text == "3+9=12;~8+7=15;~4+2+1=7;~>752"
    assert chart_gpu.write_steps(900, 100, lambda: False, lambda: 0).endswith(">1000")
    example = Example("483+279:", "762")
    assert [chart_gpu.reward(example, x) for x in ("4+2=6;>762", ">76", ">762~")] == [1.0, 0.0, 0.0]


def test_numbers_are_compared_by_rank_with_the_losses_that_have_them() -> None:
    numbers = {
        name: {"gain": i, "effective": 1.0, "lost": None if name == "b" else -i}
        for i, name in enumerate("abcd")
    }
    final = {"a": 0.1, "b": 0.9, "c": 0.2, "d": 0.3}
    # The ranks of b are 2 and 4; without it, the order of a, c, d is the same or the reverse.
    found = what_if_chart.correlations(numbers, final)
    assert found == {"gain": pytest.approx(0.4), "lost": pytest.approx(-1.0)}


@pytest.mark.slow
def test_the_studies_of_the_gpu_run_on_a_tiny_model(tmp_path: Path) -> None:
    words = f"means mismatch --quick --seeds 1 --jobs 2 --folder {tmp_path} --out {tmp_path}/o.json"
    assert chart_gpu.main(words.split()) == 0
    runs = json.loads((tmp_path / "o.json").read_text())["runs"]
    assert {run["study"] for run in runs} == {"means", "mismatch"}
    assert not any(run["error"] for run in runs)
    assert all(len(run["norm"]) == chart_gpu.QUICK.steps for run in runs)
