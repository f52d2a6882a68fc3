"""What-if reads a run of the trainer, and the benchmark judges its predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.what_if import r_squared, rank_correlation

from policyloss.cli import main


@pytest.mark.slow
def test_a_run_is_compared_through_its_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    options = "--steps 2 --prompts 2 --group-size 2 --warmup-steps 20 --eval-prompts 4"
    stored = "--rollouts-every 1 --rollouts-rows 4 --checkpoint-every 1 --epochs 2"
    assert main(["train", "--out", run, *options.split(), *stored.split()]) == 0
    capsys.readouterr()
    assert main(["what-if", run, "--presets", "ppo", "reinforce", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["through"] == "parameters"
    assert "Gradients pass the weights after step 2." in data["notes"]
    cosines = data["model_cosine"]
    assert len(cosines) == 3
    assert main(["what-if", run, "--presets", "ppo", "--json", "--through", "tokens"]) == 0
    assert json.loads(capsys.readouterr().out)["model_cosine"] is None


def test_how_predictions_are_judged() -> None:
    """R² of a prediction that is off by 1 at one of three: 1 - 1/2. Ranks 1, 2, 3 against 1, 3, 2:
    1 - 6·2/(3·8) = 0.5; equal numbers share a rank.
    """
    real = torch.tensor([0.0, 1.0, 2.0])
    assert r_squared(real, torch.tensor([0.0, 1.0, 3.0])) == pytest.approx(0.5)
    assert r_squared(real, real) == 1
    assert rank_correlation([1, 2, 3], [10, 30, 20]) == pytest.approx(0.5)
    assert rank_correlation([1, 1, 3], [5, 5, 9]) == pytest.approx(1)
