"""vLLM in the trainer's process, replaced by a stand-in that records the calls and their order.
`tests/engines` compares these calls with the installed vLLM.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
import torch
from train_loop_ranks import lines, train

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.learner import Learner
from policyloss_train.rollout.protocol import RolloutError
from policyloss_train.rollout.vllm_engine import TopLogprobs


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


def gaps(out: Path) -> list[float]:
    """How far the engine's log-probabilities are from the learner's, before it has learned."""
    return [
        abs(x - y)
        for row in lines(out, "rollouts")
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    ]


def test_it_sleeps_while_the_policy_learns_and_wakes_with_new_weights(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It frees weights and cache (level 2) before the learner begins. It allocates memory for the
    weights first, gets them, and only then allocates the cache: there are never two copies of the
    weights and a cache at once. Each completion comes from the weights of its step.
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
    assert max(gaps(out)) < 1e-5


@pytest.mark.parametrize(("gpu", "staleness"), [(True, 1), (False, 0)])
def test_it_sleeps_only_on_a_gpu_shared_with_the_learner(
    gpu: bool, staleness: int, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": model, "steps": 1, "staleness": staleness}
    calls = run(tmp_path / "run", monkeypatch, gpu=gpu, **options)
    assert calls[0][1]["enable_sleep_mode"] is False
    assert not {name for name, _ in calls} & {"sleep", "wake_up"}
    versions = [options["new_version"] for name, options in calls if name[:6] == "update"]
    assert versions == ["0", "1"]


# ---------------------------------------------------------------- the tokens that were kept


def test_with_top_p_the_ratio_of_an_unchanged_policy_is_one(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine requests all log-probabilities, because top-p may keep any number; the evaluation,
    which takes the likeliest token, requests none.
    """
    calls = run(tmp_path / "run", monkeypatch, model=model, top_p=0.8, temperature=2)
    vocabulary = calls[0][1]["max_logprobs"]
    assert vocabulary == 100
    counts = {o["temperature"]: o["logprobs"] for name, o in calls if name == "SamplingParams"}
    assert counts == {0.0: 0, 2: vocabulary}
    assert max(gaps(tmp_path / "run")) < 1e-5
    rows = lines(tmp_path / "run", "rollouts")
    assert min(x for row in rows for x in row["rollout_logp"]) < -0.5  # there was a choice


def test_the_number_of_requested_log_probabilities() -> None:
    def count(vocabulary: int, **options: Any) -> int:
        return TopLogprobs.of(TrainConfig(rollout="vllm", **options), vocabulary).count

    assert count(150_000) == 0
    assert count(150_000, top_p=0.9, sampling_mask=False) == 0
    assert count(150_000, top_k=50) == 114  # and 64 that may be as likely as the last
    assert count(100, top_k=50) == 100
    assert count(4096, top_p=0.9) == 4096
    assert count(150_000, top_k=4032, top_p=0.9) == 4096
    says = r"--rollout vllm would have to report 4097 .* add --top-k 4032 or less, or --no-samp"
    for options in ({"top_p": 0.9}, {"top_k": 4033}):
        with pytest.raises(InputError, match=says):
            count(4097, **options)


def test_tokens_with_a_probability_are_kept() -> None:
    """Of three likeliest tokens, two, one and (in a vocabulary of three) all were kept. A server
    writes −9999 for −inf.
    """
    ids = torch.tensor([[7, 3, 5], [2, 9, 4]])
    logp = torch.tensor([[-0.1, -9.0, -math.inf], [0.0, -9999.0, -9999.0]])
    kept, offsets = TopLogprobs(3, 10).support(ids, logp)
    assert (kept.tolist(), offsets.tolist()) == ([7, 3, 2], [0, 2, 3])
    everything = torch.tensor([[-1.0, -1.0, -2.0]])
    kept, offsets = TopLogprobs(3, 3).support(ids[:1], everything)
    assert (kept.tolist(), offsets.tolist()) == ([7, 3, 5], [0, 3])
    with pytest.raises(RolloutError, match=r"vLLM kept 3 tokens or more, .* Use another --top-k"):
        TopLogprobs(3, 10).support(ids[:1], everything)
