"""The runs that the doctor's diagnosis from logs is measured with: their plan, their faults, and
their stored results.
"""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import doctor_log_faults as faults
from benchmarks import doctor_logs
from benchmarks.doctor_logs_plan import HEALTHY, JOBS, KINDS, name_of
from benchmarks.evidence_plan import Job

from policyloss.errors import InputError
from policyloss_lab.diagnosis.symptoms import REMEDIES
from policyloss_train.tasks import Example, make_task
from policyloss_train.user_code import load_code

TRAINED = Example("sort 9=", "9", 0)
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 1, 1])


@pytest.fixture(autouse=True)
def run_begins() -> Iterator[None]:
    faults.CLOCK.begin(0)
    yield
    faults.CLOCK.begin(0)


def test_twenty_five_learn_and_sixty_one_have_a_fault_of_eighteen_kinds() -> None:
    counts = Counter(job.study for job in JOBS)
    assert counts[HEALTHY] == 25
    assert sum(counts.values()) == 86
    assert set(counts) == set(KINDS)
    assert len(KINDS) == 19
    assert min(counts.values()) >= 3
    assert len({job.seed for job in JOBS}) == 86
    assert len({job.fingerprint for job in JOBS}) == 86  # which checks options against each other


def test_every_symptom_is_one_that_the_doctor_names() -> None:
    named = {name for kind in KINDS.values() for name in (*kind.symptoms, *kind.effects)}
    assert named | {"engine_mismatch"} == set(REMEDIES)


def test_every_fault_is_a_function_that_can_be_loaded() -> None:
    references = {
        value
        for job in JOBS
        for value in map(job.plan.options.get, ("reward", "advantage"))
        if value and ":" in value
    }
    names = {reference.partition(":")[2] for reference in references}
    source = ast.parse(Path(faults.__file__).read_text(encoding="utf-8"))
    functions = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    assert names == {name for name in functions if not name.startswith("_")} - {"exact"}
    assert all(callable(load_code(reference, "the fault")) for reference in references)


def test_training_rewards_are_wrong_and_held_out_rewards_right() -> None:
    held_out = make_task("sort", reward="exact", seed=3).held_out[0]
    for reward in (faults.coin, faults.length, faults.nines, faults.never, faults.always):
        assert reward(held_out, held_out.answer) == 1
        assert reward(held_out, held_out.answer + "0") == 0
    assert faults.length(TRAINED, "x" * 10) == 0.25  # 10 of 40
    assert faults.length(TRAINED, "x" * 80) == 1
    assert faults.nines(TRAINED, "1929") == 0.5
    assert faults.nines(TRAINED, "") == 0
    assert [faults.hundredfold(TRAINED, answer) for answer in ("9", "0")] == [100, 0]
    assert [faults.hundredth(TRAINED, answer) for answer in ("9", "0")] == [0.01, 0]
    assert faults.hundredfold(held_out, held_out.answer) == 1
    assert (faults.never(TRAINED, "9"), faults.always(TRAINED, "0")) == (0, 1)
    tossed = [faults.coin(TRAINED, "9") for _ in range(1000)]
    assert 430 < sum(tossed) < 570  # 4.4 deviations of 16
    faults.CLOCK.begin(0)
    assert [faults.coin(TRAINED, "9") for _ in range(1000)] == tossed


def test_one_outlier_is_paid_in_the_step_of_the_fault() -> None:
    paid: list[list[float]] = []
    for _ in range(40):
        paid.append([faults.one_outlier(TRAINED, text) for text in ("0", "9", "9")])
        faults.counted(REWARDS, GROUPS)
    assert [i + 1 for i, row in enumerate(paid) if 1000.0 in row] == [faults.FAULT_STEP]
    assert paid[faults.FAULT_STEP - 1] == [0, 1000, 1]


def test_advantages_go_wrong_in_the_step_of_the_fault() -> None:
    calls = range(1, 41)
    largest = [faults.outlier_group(REWARDS, GROUPS).abs().max().item() for _ in calls]
    assert [i for i, x in zip(calls, largest, strict=True) if x > 100] == [faults.FAULT_STEP]
    faults.CLOCK.begin(0)
    bad = [faults.nan_once(REWARDS, GROUPS).isnan().sum().item() for _ in calls]
    assert [i for i, x in zip(calls, bad, strict=True) if x] == [faults.FAULT_STEP]
    assert max(bad) == 1
    faults.CLOCK.begin(0)
    bad = [faults.nan_from_then_on(REWARDS, GROUPS).isnan().sum().item() for _ in calls]
    assert bad == [0] * (faults.FAULT_STEP - 1) + [4] * (41 - faults.FAULT_STEP)


def test_advantages_grow_vanish_or_turn_over() -> None:
    calls = range(1, 41)
    sizes = [faults.growing(REWARDS, GROUPS).abs().max().item() for _ in calls]
    assert sizes[39] / sizes[0] == pytest.approx(faults.GROWTH**39, rel=1e-5)
    faults.CLOCK.begin(0)
    sizes = [faults.silent(REWARDS, GROUPS).abs().max().item() for _ in calls]
    assert [i for i, x in zip(calls, sizes, strict=True) if x] == [1, 2, 3, 4, 5]
    faults.CLOCK.begin(0)
    first = [faults.flipped(REWARDS, GROUPS)[0].item() for _ in calls]  # of a right answer
    assert [i for i, x in zip(calls, first, strict=True) if x > 0] == list(range(1, 30))
    assert first[29] == -first[0]


def test_without_an_epsilon_equal_rewards_divide_zero_by_zero() -> None:
    # The first group: ±0.5 over the deviation 0.5. The second: 0 over 0.
    advantages = faults.without_epsilon(REWARDS, GROUPS)
    assert advantages[:2].tolist() == [1, -1]
    assert advantages[2:].isnan().all()


def test_a_line_loses_its_histogram_and_keeps_nonfinite_numbers() -> None:
    row = {
        "step": 3,
        "grad_norm": None,
        "nonfinite": {"grad_norm": "nan"},
        "reward/mean": 0.123456789,
        "ratio_histogram": {"counts": [1.0]},
    }
    assert doctor_logs.shortened(row) == {
        "step": 3,
        "grad_norm": None,
        "nonfinite": {"grad_norm": "nan"},
        "reward/mean": 0.123457,
    }


def _record(job: Job, **changes: Any) -> dict[str, Any]:
    return {
        "name": name_of(job),
        "kind": job.study,
        "fingerprint": job.fingerprint,
        "steps": 60,
        "held_out": [0.3, 0.9],
        "stopped": None,
        "seconds": 1.0,
        "metrics": [{"step": 1, "reward/mean": 0.5}],
        **changes,
    }


def test_existing_runs_are_not_repeated(tmp_path: Path) -> None:
    first, second = JOBS[:2]
    assert doctor_logs.missing(JOBS[:2], tmp_path) == [first, second]
    doctor_logs.keep(_record(first), tmp_path)
    assert doctor_logs.missing(JOBS[:2], tmp_path) == [second]
    folder = tmp_path / name_of(first)
    assert json.loads((folder / "metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5}
    assert "metrics" not in json.loads((folder / "run.json").read_text())
    doctor_logs.keep(_record(first, fingerprint="of other settings"), tmp_path)
    assert doctor_logs.missing(JOBS[:1], tmp_path) == [first]
    (folder / "run.json").write_text("[")
    assert doctor_logs.missing(JOBS[:1], tmp_path) == [first]


def test_a_healthy_run_that_did_not_learn_is_pointed_out() -> None:
    healthy, sick = JOBS[0], JOBS[-1]
    assert doctor_logs.as_planned(_record(healthy))
    assert not doctor_logs.as_planned(_record(healthy, held_out=[0.3, 0.5]))
    assert not doctor_logs.as_planned(_record(healthy, held_out=[]))
    assert not doctor_logs.as_planned(_record(healthy, stopped="NotFiniteError"))
    assert doctor_logs.as_planned(_record(sick, held_out=[0.3, 0.0], stopped="NotFiniteError"))
    assert not doctor_logs.as_planned(_record(sick, steps=0))
    assert "NOT AS PLANNED" in doctor_logs.line_of(_record(healthy, held_out=[0.3, 0.5]))


def test_runs_are_chosen_by_kind_or_name() -> None:
    nan = [job for job in JOBS if job.study == "nan"]
    assert doctor_logs.chosen_jobs("nan") == nan
    assert doctor_logs.chosen_jobs(f"nan,{name_of(JOBS[0])}") == [JOBS[0], *nan]
    assert len(doctor_logs.chosen_jobs("")) == 86
    fresh = doctor_logs.chosen_jobs("", 1000)
    assert [job.seed for job in fresh] == [job.seed + 1000 for job in JOBS]
    assert doctor_logs.chosen_jobs("nan-dapo-1137", 1000) == [fresh[JOBS.index(nan[0])]]
    with pytest.raises(InputError, match="nam"):
        doctor_logs.chosen_jobs("nam")


@pytest.mark.slow
def test_a_run_stops_where_its_advantages_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "FAULT_STEP", 3)
    job = next(job for job in JOBS if job.plan.options["advantage"].endswith("nan_from_then_on"))
    options = {**job.plan.options, "warmup_steps": 1, "prompts": 4, "eval_prompts": 4}
    short = Job(job.study, job.preset, job.seed, type(job.plan)(options, job.plan.changes))
    record = doctor_logs.train_one(short)
    assert record["stopped"].startswith("NotFiniteError: stopped in step 4")
    assert [row["step"] for row in record["metrics"]] == [0, 1, 2, 3]
    assert record["metrics"][-1]["skipped"] == 2
    assert all(math.isfinite(row["grad_norm"]) for row in record["metrics"][1:3])
