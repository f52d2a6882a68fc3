"""vLLM in the trainer's process, played by a stand-in that records the calls: what is asked of it,
and in which order. `tests/engines` compares these calls with the vLLM that is installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from started import started_once
from train_loop_ranks import lines, make_model, train

from policyloss.train.learner import Learner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(started_once(tmp_path_factory, "small_model", make_model))


def names(calls: list[fake_vllm.Call]) -> list[str]:
    """The calls of a run in order, each with the argument that matters."""
    shown = {
        "sleep": "level",
        "wake_up": "tags",
        "update_weight_version": "new_version",
        "collective_rpc": "method",
    }
    return [
        f"{name} {options[shown[name]]}" if name in shown else name
        for name, options in calls
        if name != "SamplingParams"
    ]


def run(
    out: Path, patch: pytest.MonkeyPatch, *, gpu: bool = True, **options: Any
) -> list[fake_vllm.Call]:
    """The calls of a run of two steps, which evaluates before the first and after the second."""
    calls = fake_vllm.installed(patch, gpu=gpu)
    learn = Learner.learn

    def learned(self: Learner, *arguments: Any) -> Any:
        calls.append(("learn", {}))
        return learn(self, *arguments)

    patch.setattr(Learner, "learn", learned)
    options = {"steps": 2, "eval_every": 2, "rollouts_rows": 99, **options}
    assert train(out, rollout="vllm", **options) == 0
    return calls


def test_it_sleeps_while_the_policy_learns_and_wakes_with_new_weights(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives up weights and cache (level 2) before the learner begins. It takes memory for the
    weights first, gets them, and takes memory for the cache only then: at no time are there two
    copies of the weights beside a cache. Each completion is by the weights of its step.
    """
    out = tmp_path / "run"
    calls = run(out, monkeypatch, model=model)

    def labelled(version: int) -> list[str]:
        return ["reset_prefix_cache", f"update_weight_version {version}"]

    woken = ["wake_up ['weights']", "collective_rpc reload_weights", "wake_up ['kv_cache']"]
    assert names(calls) == [
        "LLM",
        *("collective_rpc reload_weights", *labelled(0)),
        *("generate", "generate", "sleep 2", "learn"),  # the evaluation, then the first step
        *(*woken, *labelled(1), "generate", "sleep 2", "learn"),
        *(*woken, *labelled(2), "generate"),
    ]
    options = calls[0][1]
    assert options["enable_sleep_mode"] is True
    assert options["gpu_memory_utilization"] == 0.3
    rows = lines(out, "rollouts")
    assert {(row["step"], row["weights"]) for row in rows} == {(1, 0), (2, 1)}
    gaps = [
        abs(x - y)
        for row in rows
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    ]
    assert max(gaps) < 1e-5


@pytest.mark.parametrize(("gpu", "staleness"), [(True, 1), (False, 0)])
def test_it_does_not_sleep_beside_the_learner_nor_on_a_cpu(
    gpu: bool, staleness: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = run(tmp_path / "run", monkeypatch, gpu=gpu, model=model, staleness=staleness)
    assert calls[0][1]["enable_sleep_mode"] is False
    assert not {name for name, _ in calls} & {"sleep", "wake_up"}
    versions = [options["new_version"] for name, options in calls if name[:6] == "update"]
    assert versions == ["0", "1", "2"]
