"""`policyloss bench`: its engines, conditions, outcomes and command."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import policyloss as pl
from policyloss_train.bench import command, conditions, engines, runs
from policyloss_train.bench.runs import Cell, Outcome
from policyloss_train.config import TrainConfig
from policyloss_train.models import load_model
from policyloss_train.models import weights as weights_of
from policyloss_train.rollout.protocol import Prompt, Sampling
from policyloss_train.tasks import make_task

SMALL = {
    "steps": 2,
    "eval_every": 1,
    "prompts": 2,
    "group_size": 2,
    "eval_prompts": 4,
    "reward": "train_loop_ranks:graded",
}


def test_rounding_by_hand() -> None:
    x = torch.tensor([[1.27, 0.304, -1.27], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(
        engines.round_integers(x), torch.tensor([[1.27, 0.30, -1.27], [0.0, 0.0, 0.0]])
    )
    # float8_e4m3 has three bits after the first: 448 × 0.304 / 1.27 = 107.2 becomes 104.
    torch.testing.assert_close(
        engines.round_fp8(x), torch.tensor([[1.27, 104 * 1.27 / 448, -1.27], [0.0, 0.0, 0.0]])
    )
    torch.testing.assert_close(
        engines.round_bf16(torch.tensor([[1 + 2**-9, 1 + 2**-7]])),
        torch.tensor([[1.0, 1 + 2**-7]]),
        atol=0,
        rtol=0,
    )


def sampled(factory: Any) -> tuple[Any, Any, list[float], list[int]]:
    """The model, the engine, and the reported log-probabilities and tokens of one completion."""
    task = make_task("sort", reward=None, seed=0)
    model, _ = load_model("tiny", task, dtype=torch.float32, device="cpu", seed=0)
    engine = factory(TrainConfig(), SimpleNamespace(model=model))
    engine.update_weights(SimpleNamespace(model=model), 1)
    sampling = Sampling(6, 1.0, 1.0, 0, (1,), seed=0, draw=0)
    (completion,) = engine.generate([Prompt([5, 6, 7], 1, 0)], sampling)[0]
    return model, engine, list(completion.logp), completion.ids


def test_an_engine_rounds_its_own_matrices_alone() -> None:
    model, engine, _, _ = sampled(engines.int8)
    theirs = weights_of(engine._model)
    for name, x in weights_of(model).items():
        expected = engines.round_integers(x) if x.dim() > 1 else x
        torch.testing.assert_close(theirs[name], expected, atol=0, rtol=0)
        assert x.dim() == 1 or not torch.equal(theirs[name], x)


def test_a_hot_engine_reports_the_probabilities_that_it_samples_from() -> None:
    model, _, logp, ids = sampled(engines.hot)
    logits = model(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1]
    expected = (logits / engines.HOT).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
    torch.testing.assert_close(torch.tensor(logp), expected[:, 0].detach(), atol=1e-5, rtol=0)


def test_a_fifth_of_the_rewards_of_training_is_inverted() -> None:
    task = make_task("sort", reward=None, seed=3)
    right = [conditions.noisy_reward(e, e.answer) for e in task.train[:2000]]
    wrong = [conditions.noisy_reward(e, "no") for e in task.train[:2000]]
    for flipped in (2000 - sum(right), sum(wrong)):
        assert abs(flipped / 2000 - conditions.FLIPPED) < 0.04  # four standard errors
    assert right == [conditions.noisy_reward(e, e.answer) for e in task.train[:2000]]
    assert all(conditions.noisy_reward(e, e.answer) == 1 for e in task.held_out)


def outcome(seed: int, *accuracy: float, error: str = "") -> Outcome:
    return Outcome(Cell("mine", "stale_4", seed), "d", accuracy, 1.5, error)


def test_a_table_by_hand() -> None:
    good, late = outcome(0, 0.2, 0.8, 0.91, 0.95), outcome(1, 0.2, 0.92, 0.9, 0.89)
    fallen, failed = outcome(2, 0.2, 0.8, 0.39), outcome(3, 0.5, error="NotFiniteError: …")
    assert [x.steps_to_goal for x in (good, late, fallen)] == [10, 5, None]
    assert [x.collapsed for x in (good, late, fallen, failed)] == [False, False, True, True]
    assert failed.final == 0
    assert list(command.table_lines([good, late], ["mine"], ["stale_4"])) == [
        "      stale_4",
        "mine  0.92 @7.5",
    ]
    assert command.in_words([good, fallen, failed]) == "0.45 (2 of 3 collapsed)"
    assert Outcome.from_dict(good.to_dict()) == good


def test_a_bench_is_repeated_to_the_bit_and_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {**conditions.COMMON, **SMALL}
    monkeypatch.setattr(runs, "COMMON", small)
    monkeypatch.setattr(runs, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    loss = tmp_path / "mine.json"
    loss.write_text(json.dumps(pl.preset("dapo").replace(trust=pl.Clip(0.3, 0.3)).to_dict()))
    words = f"{loss} --against grpo --conditions fp8 --seeds 1 --jobs 1 --out {tmp_path}/o"
    assert command.bench_command(words.split()) == 0
    assert "2 runs to do, 0 are there already" in capsys.readouterr().out
    stored = (tmp_path / "o/results.json").read_bytes()
    assert command.bench_command(words.split()) == 0
    said = capsys.readouterr().out
    assert "0 runs to do, 2 are there already" in said
    assert "fp8: the sampler's weights in float8" in said
    assert (tmp_path / "o/results.json").read_bytes() == stored
    cell = Cell("grpo", "fp8", 0)
    again = runs.run_cell(cell, tmp_path / "o")
    assert not again.error
    assert len(again.accuracy) == 3
    assert again.grad_norm > 0
    assert again.to_dict() in [x.to_dict() for x in command.run_missing([cell], tmp_path / "o", 1)]
    loss.write_text(json.dumps(pl.preset("dapo").to_dict()))
    command.run_missing([Cell(str(loss), "fp8", 0)], tmp_path / "o", 1)
    assert "1 runs to do, 0 are there already" in capsys.readouterr().out


def test_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(pl.InputError, match=r"unknown condition 'stale_5'.*stale_4"):
        command.bench_command(["grpo", "--conditions", "stale_5"])
    with pytest.raises(pl.PolicyLossError, match="grop"):
        command.bench_command(["grop", "--out", str(tmp_path / "o")])
    assert not (tmp_path / "o").exists()
    (tmp_path / "results.json").write_text("[3]")
    with pytest.raises(pl.InputError, match=r"results.json is no file of policyloss bench"):
        command.run_missing([], tmp_path, 1)
    broken = Cell(str(tmp_path / "missing.json"), "fp8", 0)
    with pytest.raises(pl.PolicyLossError, match=r"missing\.json"):
        broken.digest()
