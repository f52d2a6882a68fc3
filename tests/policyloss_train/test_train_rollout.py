"""Rollout engines: their required results, their weights, and sampling while the policy learns."""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_loop_ranks import lines, resume, train

from policyloss.errors import InputError
from policyloss_train.collect import Collector
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.learner import Learner
from policyloss_train.rollout.protocol import (
    Completion,
    Prompt,
    RolloutError,
    Sampling,
    Weights,
    check_completions,
)
from policyloss_train.rollout.session import BuiltIn

END = 1
SAMPLING = Sampling(4, 1.0, 1.0, 0, (END,), seed=3, draw=5)
PROMPTS = [Prompt([7, 8], number=2, place=0), Prompt([9], number=1, place=4)]
GOOD = Completion([20, END], [-0.5, -0.25], True, version=2)


def loaded(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_seeds_follow_from_the_run_the_draw_and_the_place() -> None:
    """The first six bytes of SHA-256 of "3 5 4", as `printf '3 5 4' | sha256sum` prints them."""
    assert PROMPTS[1].seed(SAMPLING) == 0x813D786C98FD
    others = [dataclasses.replace(SAMPLING, **change) for change in ({"seed": 4}, {"draw": 6})]
    seeds = [p.seed(s) for p in PROMPTS for s in (SAMPLING, *others)]
    assert len(set(seeds)) == 6
    assert max(seeds) < 2**48


def test_completions_of_an_engine_keep_their_order_and_numbers() -> None:
    other = dataclasses.replace(GOOD, ids=[5], logp=torch.tensor([-1.5]), finished=False)
    checked = check_completions(
        "mine", PROMPTS, SAMPLING, [[GOOD, other], [GOOD]], vocabulary=30, version=2
    )
    assert [one.tokens for one in checked] == [[20, END], [5], [20, END]]
    assert [one.logp.tolist() for one in checked] == [[-0.5, -0.25], [-1.5], [-0.5, -0.25]]
    assert checked[0].logp.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 1}, "of the weights 1 where version 2 is wanted"),
        ({"ids": [], "logp": []}, "of 0 tokens where 1 to 4 are wanted"),
        ({"ids": [2] * 5, "logp": [-1.0] * 5}, "of 5 tokens where 1 to 4 are wanted"),
        ({"ids": [30, END]}, r"with a token that is not below 30: \[30, 1\]"),
        ({"logp": [-0.5]}, r"of 2 tokens with log-probabilities \[1\]"),
        (
            {"logp": [-0.5, float("nan")]},
            r"with log-probabilities that are not finite and at most 0: \[-0.5, nan\]",
        ),
        ({"logp": [-0.5, 0.1]}, "with log-probabilities that are not finite and at most 0"),
        ({"logp": torch.tensor([-1e30, -0.5])}, "with log-probabilities that are not finite and"),
        ({"logp": [-0.5, False]}, "with true or false where a number belongs"),
        ({"ids": [20, True]}, "with true or false where a number belongs"),
        ({"ids": [20.0, END]}, r"with a token that is not below 30: \[20.0, 1\]"),
        ({"finished": False}, r"with finished=False and the last token 1; \[1\] are the ends"),
        ({"ids": [20, 5]}, "with finished=True and the last token 5"),
    ],
)
def test_invalid_completions_of_an_engine_are_refused(change: dict[str, Any], says: str) -> None:
    bad = dataclasses.replace(GOOD, **change)
    with pytest.raises(RolloutError, match=f"mine returned a completion {says}"):
        check_completions(
            "mine", PROMPTS, SAMPLING, [[GOOD, GOOD], [bad]], vocabulary=30, version=2
        )


def test_too_few_completions_are_an_error() -> None:
    with pytest.raises(RolloutError, match=r"returned \[2\] completions, not \[2, 1\]"):
        check_completions("mine", PROMPTS, SAMPLING, [[GOOD, GOOD]], vocabulary=30, version=2)
    strange: tuple[Any, ...] = (None, 3, [None, None], [[GOOD, GOOD], [None]], [[GOOD, 1], ["x"]])
    for answer in strange:
        with pytest.raises(RolloutError, match=r"^mine "):
            check_completions("mine", PROMPTS, SAMPLING, answer, vocabulary=30, version=2)
    for logp in (["x", "y"], [None, -1.0], [[-1.0], [-1.0]], [-1.0, 10**400], "xy"):
        bad = dataclasses.replace(GOOD, logp=logp)
        with pytest.raises(RolloutError, match=r"^mine "):
            check_completions(
                "mine", PROMPTS, SAMPLING, [[GOOD, GOOD], [bad]], vocabulary=30, version=2
            )


# ---------------------------------------------------------------- weights


def test_weights_as_tensors_and_as_a_folder(model: str, tmp_path: Path) -> None:
    """The folder is one that anybody loads, and it replaces an older one as a whole."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = AutoModelForCausalLM.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    weights = Weights(policy, tokenizer, Ranks(0, 1, torch.device("cpu")))
    for shift in (0.0, 0.5):
        with torch.no_grad():
            policy.model.norm.weight.add_(shift)
        weights.save(tmp_path / "weights")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").state_dict()
        tensors = dict(weights.tensors())
        assert tensors.keys() == again.keys()
        assert all(torch.equal(x, again[name]) for name, x in tensors.items())
        files = [load_file(file) for file in (tmp_path / "weights").glob("*.safetensors")]
        stored = {name: x for file in files for name, x in file.items()}
        assert stored.keys() == tensors.keys()  # tied weights by both names: see `_add_tied`
        assert all(torch.equal(x, stored[name]) for name, x in tensors.items())
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "weights")) == len(tokenizer)


def test_a_copy_samples_with_the_weights_it_was_given(model: str) -> None:
    """The engine does not see the policy's changes before the next update."""
    policy = loaded(model)
    copied = BuiltIn(policy, lambda: policy, 4096, copied=True)
    live = BuiltIn(policy, lambda: policy, 4096, copied=False)
    assert (copied.concurrent, live.concurrent) == (True, False)
    weights: Any = None

    def sampled(engine: BuiltIn) -> list[Any]:
        groups = engine.generate(PROMPTS, SAMPLING)
        return [(c.ids, torch.as_tensor(c.logp).tolist(), c.version) for g in groups for c in g]

    for engine in (copied, live):
        engine.update_weights(weights, 7)
    before = sampled(live)
    assert sampled(copied) == before
    assert {version for _, _, version in before} == {7}
    with torch.no_grad():
        policy.model.embed_tokens.weight.mul_(0.5)
    assert sampled(copied) == before
    assert sampled(live) != before
    for engine in (copied, live):
        engine.update_weights(weights, 8)
    assert sampled(copied) == sampled(live) != before


def test_adapters_are_merged_on_the_way(model: str, tmp_path: Path) -> None:
    """An engine gets an equivalent model without adapters, in memory and as a folder."""
    from transformers import AutoTokenizer

    from policyloss_train.models import add_adapter

    plain, policy = loaded(model), loaded(model)
    add_adapter(policy, TrainConfig(lora_rank=2))
    with torch.no_grad():
        for name, x in policy.named_parameters():
            if "lora_B" in name:
                x.fill_(0.05)
    weights = Weights(
        policy, AutoTokenizer.from_pretrained(model), Ranks(0, 1, torch.device("cpu"))
    )
    ids = torch.tensor([[20, 30, 31, 32]])
    with torch.no_grad():
        wanted, before = policy(ids).logits, plain(ids).logits
        plain.load_state_dict(dict(weights.tensors()))
        weights.save(tmp_path / "weights")
        again = loaded(str(tmp_path / "weights"))(ids).logits
        assert (wanted - before).abs().max() > 0.01
        torch.testing.assert_close(plain(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_copy_on_a_gpu_samples_while_the_learner_runs(model: str) -> None:
    """On a stream of its own, in a thread, while the default stream changes the policy."""
    policy = loaded(model).cuda()
    engine = BuiltIn(policy, lambda: policy, 4096, copied=True)
    weights: Any = None
    engine.update_weights(weights, 0)
    expected = [c.ids for group in engine.generate(PROMPTS, SAMPLING) for c in group]
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate(PROMPTS, SAMPLING)))
    thread.start()
    with torch.no_grad():
        for _ in range(50):
            policy.model.embed_tokens.weight.mul_(0.99)
    thread.join()
    assert [c.ids for group in results[0] for c in group] == expected


def test_a_completion_depends_on_its_place_and_not_on_the_others(model: str) -> None:
    policy = loaded(model)
    engine = BuiltIn(policy, lambda: policy, 4096, copied=False)
    together = [c.ids for group in engine.generate(PROMPTS, SAMPLING) for c in group]
    alone = [engine.generate([p], SAMPLING)[0] for p in reversed(PROMPTS)]
    assert [c.ids for group in reversed(alone) for c in group] == together


# ---------------------------------------------------------------- sampling while the policy learns

AHEAD = {"staleness": 2, "steps": 4, "prompts": 3, "epochs": 2, "rollouts_rows": 99, "keep": 9}


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, model: str) -> Path:
    out = tmp_path_factory.mktemp("ahead") / "run"
    assert train(out, model=model, **AHEAD) == 0
    return out


def test_each_completion_names_the_weights_that_sampled_it(ahead: Path) -> None:
    """Steps 1 to 3 were sampled before anything was learned: two of them wait, one is learned from.
    Then the weights are two steps old.
    """
    rows = lines(ahead, "rollouts")
    assert [{r["weights"] for r in rows if r["step"] == step} for step in range(1, 5)] == [
        {0},
        {0},
        {0},
        {1},
    ]
    numbers = json.loads((ahead / "checkpoints" / "step_000004" / "checkpoint.json").read_text())
    waiting = numbers["checkpoint"]["numbers"]["collector"]["queue"]
    assert [{s["version"] for s in batch["samples"]} for batch in waiting] == [{2}, {3}]


def test_a_sampler_that_waits_for_the_learner_gives_the_same_bytes(
    ahead: Path, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a sharded model does it, which has no copy: one after the other."""
    init = BuiltIn.__init__
    monkeypatch.setattr(BuiltIn, "__init__", lambda self, *a, copied: init(self, *a, copied=False))
    out = tmp_path / "run"
    assert train(out, model=model, **AHEAD) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (out / name).read_bytes() == (ahead / name).read_bytes()
    file = "checkpoints/step_000004/rank00000.safetensors"
    assert (out / file).read_bytes() == (ahead / file).read_bytes()


def test_it_goes_on_after_a_resume_with_the_same_bytes(
    ahead: Path, model: str, tmp_path: Path
) -> None:
    """Waiting batches are in the checkpoint; batches that are being sampled never are."""
    out = tmp_path / "run"
    assert train(out, model=model, **{**AHEAD, "steps": 2}) == 0
    assert resume(out, extend=4) == 0
    assert (out / "metrics.jsonl").read_bytes() == (ahead / "metrics.jsonl").read_bytes()
    file = "checkpoints/step_000004/rank00000.safetensors"
    assert (out / file).read_bytes() == (ahead / file).read_bytes()


def test_sampling_and_learning_really_overlap(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner does not return before the sampler of a later step has begun, and the sampler not
    before the learner has: one after the other, both would wait in vain.
    """
    learning, sampling = threading.Event(), threading.Event()
    learn, generate = Learner.learn, BuiltIn.generate
    threads = []

    def learned(self: Learner, *given: Any) -> Any:
        learning.set()
        assert sampling.wait(20)
        return learn(self, *given)

    def generated(self: BuiltIn, *given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            threads.append(threading.current_thread().name)
            sampling.set()
            assert learning.wait(20)
        return generate(self, *given)

    monkeypatch.setattr(Learner, "learn", learned)
    monkeypatch.setattr(BuiltIn, "generate", generated)
    assert train(tmp_path / "run", model=model, staleness=1, steps=1) == 0
    assert threads == ["policyloss-rollout_0"]


def test_an_error_while_it_samples_ahead_ends_the_run_in_words(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = BuiltIn.generate

    def generated(self: BuiltIn, *given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and self._version == 2:
            raise RolloutError("the engine is gone.")
        return generate(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(BuiltIn, "generate", generated)
        assert train(tmp_path / "run", model=model, staleness=1, steps=4) == 2
    printed = capsys.readouterr().err
    assert "stopped in step 3: the engine is gone. The last good checkpoint is" in printed
    assert resume(tmp_path / "run") == 0


def test_a_collector_waits_for_its_thread(model: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", model=model, staleness=1, steps=1) == 0
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("policyloss-rollout") for name in names)


# ---------------------------------------------------------------- an engine of one's own

PAGE = Path(__file__).parents[2] / "docs" / "rollout.md"


def example_engine() -> str:
    """The engine that docs/rollout.md shows."""
    text = PAGE.read_text()
    begin = text.index("```python") + len("```python")
    return text[begin : text.index("```\n", begin)]


def test_the_engine_of_the_page_trains(model: str, tmp_path: Path) -> None:
    """Named by a path, and with log-probabilities that are those of the learner."""
    file = tmp_path / "my_engine.py"
    file.write_text(example_engine())
    out = tmp_path / "run"
    options = {"model": model, "steps": 2, "staleness": 1}
    assert train(out, **options, rollout=f"{file}:make") == 0
    rows = lines(out)
    assert all(row["grad_norm"] > 0 for row in rows[1:])
    config = json.loads((out / "config.json").read_text())["config"]
    assert config["rollout"] == f"{file}:make"
    gaps = [
        abs(x - y)
        for row in lines(out, "rollouts")
        if row["step"] == 1
        for x, y in zip(row["rollout_logp"], row["old_logp"], strict=True)
    ]
    assert max(gaps) < 1e-5


def test_an_engine_is_code_that_a_run_directory_cannot_ask_for(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_engine.py"
    file.write_text(example_engine())
    out = tmp_path / "run"
    assert train(out, model=model, steps=1, rollout=f"{file}:make") == 0
    capsys.readouterr()
    assert resume(out, extend=2) == 2
    printed = capsys.readouterr().err
    assert f"names the rollout '{file}:make', which is code" in printed
    assert f"name it yourself: --rollout {file}:make" in printed
    assert resume(out, extend=2, rollout=f"{file}:make") == 0
    assert resume(out, extend=3, rollout="built-in") == 0
    assert len(lines(out)) == 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rollout": "vlm"}, "--rollout must be one of built-in, vllm, addresses of servers"),
        ({"rollout": "http://h:1", "dtype": "float64"}, "not --dtype float64"),
        ({"rollout_timeout": 0.0}, "--rollout-timeout must be above 0, got 0.0"),
        ({"rollout_memory": 1.5}, "--rollout-memory must be above 0 and below 1, got 1.5"),
    ],
)
def test_options_of_engines_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ("nowhere_at_all:make", "No module named 'nowhere_at_all'"),
        ("http://h:1/x", "give http://host:port"),
        ("ftp://h:1", "give http://host:port"),
        ("vllm", "--rollout vllm needs the package vllm"),
    ],
)
def test_an_engine_that_cannot_be(
    rollout: str,
    says: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert train(tmp_path / "run", model=model, rollout=rollout) == 2
    assert says in capsys.readouterr().err


def test_the_tiny_model_for_vllm_has_other_heads() -> None:
    """Of 32 numbers: vLLM on a CPU has no attention for 16."""
    from policyloss_train.models import load_model
    from policyloss_train.tasks import make_task

    task = make_task("sort", reward=None, seed=0)
    heads = {}
    for name in ("tiny", "tiny32"):
        tiny, _ = load_model(name, task, dtype=torch.float32, device="cpu", seed=0)
        heads[name] = tiny.config.head_dim
    assert heads == {"tiny": 16, "tiny32": 32}


def test_nothing_is_waiting_when_a_checkpoint_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, pending = Collector.state, []
    monkeypatch.setattr(
        Collector, "state", lambda self: (pending.append(self.ahead), state(self))[1]
    )
    out = tmp_path / "run"
    assert train(out, model=model, staleness=1, steps=2, checkpoint_every=1) == 0
    assert pending == [None] * 3
    assert load_file(out / "checkpoints" / "step_000002" / "rank00000.safetensors")
