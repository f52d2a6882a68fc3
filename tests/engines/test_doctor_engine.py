"""The doctor on rollouts that a real vLLM makes now, with the faults that it makes by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.doctor_cases import FAULTS, Source

import policyloss_lab as lab

pytestmark = pytest.mark.engines
RECORDED = Path(__file__).parents[1] / "recorded" / "doctor"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two batches of every way of sampling, from one start of the engine."""
    out = tmp_path_factory.mktemp("rollouts")
    command = [sys.executable, "-m", "benchmarks.doctor_engine", str(RECORDED / "models"), str(out)]
    options = ["--report", "processed", "--seeds", "2", "--rows", "8"]
    subprocess.run([*command, *options], check=True, cwd=ROOT)
    return out


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p"])
@pytest.mark.parametrize("seed", [0, 1])
def test_processed_logits_of_the_engine_are_named(rollouts: Path, name: str, seed: int) -> None:
    batch = FAULTS[name](Source(rollouts, RECORDED / "models"), seed, 8)
    verdict = lab.doctor(**batch.arguments, model=batch.model, prompts=batch.prompts)
    assert sorted(verdict.causes) == sorted(batch.causes), str(verdict)
