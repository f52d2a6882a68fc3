"""Training on two ranks is training on one: the same metrics,
and checkpoints that either resumes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from started import run_ranks, started_once
from train_loop_ranks import lines, make_model, resume, train, work

# Three prompts on two ranks: one has twice the work of the other;
# with one prompt, the second rank has none.
COMMON = {
    "dtype": "float64",
    "prompts": 3,
    "steps": 2,
    "keep": 9,
    "micro_tokens": 100,
    "rollouts_every": 0,
}
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {**COMMON, "loss": "ppo", "staleness": 1, "steps": 3, "top_p": 0.9},
    "gspo": {**COMMON, "loss": "gspo"},
    "reference": {**COMMON, "loss": "grpo", "prompts": 1},
}
KINDS = ("ddp", "fsdp")


def back_to_step_2(run: Path, copy: Path, parallel: str) -> Path:
    """A copy of a run without its last step, that goes on with this kind of ranks."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "step_000003")
    file = copy / "config.json"
    said = json.loads(file.read_text())
    said["config"]["parallel"] = parallel
    file.write_text(json.dumps(said))
    return copy


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder: `NAME` on one rank, `NAME_KIND` on two,
    `KIND_from_one` begun on one and ended on two.

    Parallel test workers share it, and one pair of processes: the first starts it.
    """

    def start(folder: Path) -> None:
        model = make_model(folder / "model")
        for name, options in RUNS.items():
            assert train(folder / name, model=model, **options) == 0
        wanted: dict[str, dict[str, Any]] = {}
        for kind in KINDS:
            back_to_step_2(folder / "ppo", folder / f"{kind}_from_one", kind)
            wanted |= {
                f"{name}_{kind}": {**options, "model": model, "parallel": kind}
                for name, options in RUNS.items()
            }
            wanted[f"{kind}_from_one"] = {"resume": True}
        run_ranks(
            work,
            str(folder),
            wanted,
            count=2,
            imports="policyloss_train.command train_loop_ranks",
        )

    return started_once(tmp_path_factory, "train_loop_ranks", start)


def assert_same_metrics(found: Path, expected: Path) -> None:
    """Up to rounding: log-probabilities are held in float32 between steps,
    and 1e-8 of them may round to either side.
    """
    rows, wanted = lines(found), lines(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert row.keys() == other.keys()
        for name, x in other.items():
            if name == "ratio_histogram":
                assert sum(row[name]["counts"]) == sum(x["counts"])
            else:
                assert row[name] == pytest.approx(x, rel=1e-6, abs=1e-9), (name, row["step"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one(name: str, kind: str, runs: Path) -> None:
    codes = [json.loads((runs / f"codes{rank}.json").read_text()) for rank in (0, 1)]
    assert codes[0] == codes[1] == dict.fromkeys(codes[0], 0)
    assert_same_metrics(runs / f"{name}_{kind}", runs / name)
    rows = lines(runs / name)[1:]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert ("policy/kl_ref" in rows[0]) == (name == "reference")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_one_rank_goes_on_on_two(kind: str, runs: Path) -> None:
    assert_same_metrics(runs / f"{kind}_from_one", runs / "ppo")
    resumed = json.loads((runs / f"{kind}_from_one" / "environment.json").read_text())["resumed"]
    assert [there["ranks"] for there in resumed] == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_two_ranks_goes_on_on_one(kind: str, runs: Path, tmp_path: Path) -> None:
    out = back_to_step_2(runs / f"ppo_{kind}", tmp_path / "run", kind)
    assert resume(out) == 0
    assert_same_metrics(out, runs / "ppo")
