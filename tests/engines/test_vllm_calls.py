"""The engine of the trainer and the installed vLLM: its calls fit, and a real vLLM sleeps and wakes
with new weights as far as a CPU can, and reports the tokens it kept.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import fake_vllm
import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.abstract import SLEEP_TAGS
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import policyloss as pl
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.models import load_model
from policyloss_train.rollout.protocol import Prompt, Sampling, Weights
from policyloss_train.rollout.vllm_engine import VLLM, TopLogprobs
from policyloss_train.tasks import make_task

# Warnings of another package are not errors here.
pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]
GREEDY = Sampling(8, 0.0, 1.0, 0, (1,), seed=0, draw=0)
CUT = Sampling(8, 1.0, 0.9, 0, (1,), seed=3, draw=0, support=True)
PROMPTS = [Prompt([20 + i, 30, 40 + i], number=1, place=i) for i in range(20)]


def policy() -> Weights:
    task = make_task("sort", reward=None, seed=0)
    model, tokenizer = load_model("tiny32", task, dtype=torch.float32, device="cpu", seed=0)
    return Weights(model, tokenizer, Ranks(0, 1, torch.device("cpu")))


def learn(weights: Weights) -> None:
    """Other weights than before, everywhere."""
    with torch.no_grad():
        for x in weights.model.parameters():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())) * 0.05)


def engine_of(weights: Weights) -> VLLM:
    config = TrainConfig(rollout="vllm", dtype="float32", top_p=0.9)
    return VLLM(config, weights, 8, TopLogprobs.of(config, weights.model.config.vocab_size), print)


def go_through(engine: VLLM, weights: Weights) -> None:
    """Every call of an engine by a run, in order."""
    engine.update_weights(weights, 0)
    engine.generate(PROMPTS, GREEDY)
    engine.generate(PROMPTS, CUT)
    engine.sleep()
    engine.wake()
    engine.update_weights(weights, 1)
    engine.close()


@pytest.fixture
def calls() -> list[fake_vllm.Call]:
    """The calls of the engine on a GPU, as a stand-in records them."""
    weights = policy()
    with pytest.MonkeyPatch.context() as patch:
        recorded = fake_vllm.installed(patch, gpu=True)
        go_through(engine_of(weights), weights)
    return recorded


def fits(function: Callable[..., Any], call: fake_vllm.Call) -> None:
    """Fail, in words, where the function does not take the arguments of the call."""
    name, options = call
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        pytest.fail(
            f"vLLM {vllm.__version__} does not take {name}({', '.join(options)}), which "
            f"train/rollout/vllm_engine.py calls: {error}. It has "
            f"{name}{inspect.signature(function)}."
        )


def test_every_call_fits_the_vllm_that_is_installed(calls: list[fake_vllm.Call]) -> None:
    options = {field.name for field in dataclasses.fields(EngineArgs)}
    woken = []
    for call in calls:
        name, arguments = call
        if name == "LLM":
            unknown = arguments.keys() - options - inspect.signature(vllm.LLM).parameters.keys()
            assert not unknown, f"vLLM {vllm.__version__} has no options {sorted(unknown)}"
        elif name == "SamplingParams":
            vllm.SamplingParams(**arguments)
        elif name == "generate":
            fits(vllm.LLM.generate, (name, {"prompts": [], "sampling_params": [], **arguments}))
        else:
            method = getattr(vllm.LLM, name, None)
            assert method, f"vLLM {vllm.__version__} has no LLM.{name}"
            fits(method, call)
        if name == "collective_rpc":
            assert arguments["method"] == "reload_weights"
            for source in (arguments["kwargs"], {"weights_path": "folder"}):
                fits(GPUModelRunner.reload_weights, ("reload_weights", source))
        woken += arguments["tags"] if name == "wake_up" else []
    # vLLM only logs a tag that it does not know, and sleeps on.
    assert sorted(woken) == sorted(SLEEP_TAGS)
    assert {name for name, _ in calls} >= {"generate", "sleep", "wake_up", "collective_rpc"}


def test_a_call_that_does_not_fit_is_named() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"does not take sleep\(depth\), which .*level"):
        fits(vllm.LLM.sleep, ("sleep", {"depth": 2}))


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[VLLM, Weights]]:
    weights = policy()
    before = dict(os.environ)
    engine = engine_of(weights)
    yield engine, weights
    engine.close()
    os.environ.clear()
    os.environ.update(before)


def by_transformers(weights: Weights) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt.ids])
        written = weights.model.generate(ids, do_sample=False, max_new_tokens=8)
        answers.append(written[0, 3:].tolist())
    return answers


def test_a_real_engine_sleeps_until_it_has_weights_and_answers_by_them(
    real: tuple[VLLM, Weights],
) -> None:
    """The CPU build frees no memory, but it pauses, and wakes when both tags are named."""
    engine, weights = real
    core = engine._llm.llm_engine.engine_core
    engine.update_weights(weights, 0)
    before = [one.ids for group in engine.generate(PROMPTS, GREEDY) for one in group]
    assert before == by_transformers(weights)
    engine._sleeps = True  # as on a GPU
    engine.sleep()
    assert core.is_sleeping()
    learn(weights)
    engine.wake()
    assert core.is_sleeping()  # there is no cache yet
    engine.update_weights(weights, 1)
    assert not core.is_sleeping()
    after = [one for group in engine.generate(PROMPTS, GREEDY) for one in group]
    assert {one.version for one in after} == {1}
    assert [one.ids for one in after] == by_transformers(weights) != before


@pytest.mark.parametrize("cut", [{}, {"top_p": 1.0, "top_k": 7}, {"temperature": 0.7}])
def test_by_the_tokens_that_were_kept_the_ratio_of_an_unchanged_policy_is_one(
    cut: dict[str, Any], real: tuple[VLLM, Weights]
) -> None:
    """Over all tokens, log-probabilities are 0.1 lower on average: about -log 0.9, or more where
    top-k leaves 7 of 100 tokens of an untrained model.
    """
    engine, weights = real
    sampling = dataclasses.replace(CUT, **cut)
    engine.update_weights(weights, 2)
    over_kept, over_all = [], []
    for prompt, (one,) in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
        assert one.support is not None
        if sampling.top_k:
            assert one.support[1].diff().tolist() == [7] * len(one.ids)
        with torch.no_grad():
            logits = weights.model(torch.tensor([prompt.ids + one.ids])).logits[0, 2:-1]
        ids, logp = torch.tensor(one.ids), torch.as_tensor(one.logp)
        for gaps, support in ((over_kept, one.support), (over_all, None)):
            mine = pl.logprobs(logits, ids, sampling.temperature, support=support).logp
            gaps += (logp - mine).tolist()
    assert len(over_kept) > 100
    assert max(map(abs, over_kept)) < 1e-5
    assert sum(over_all) / len(over_all) > 0.08
