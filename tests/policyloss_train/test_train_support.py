"""Tokens that top-p and top-k kept: the sampler records them, they travel with the completions, and
the learner's log-probabilities are over them, so that the ratio of an unchanged policy is 1.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from train_loop_ranks import lines, resume, train

import policyloss as pl
from policyloss.errors import InputError
from policyloss_train.arguments import read_arguments
from policyloss_train.attention import Rows
from policyloss_train.batches import Pack
from policyloss_train.collect import Completions
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks
from policyloss_train.drawing import Rule, draw, support
from policyloss_train.learner import Learner
from policyloss_train.policy import Policy
from policyloss_train.rollout.protocol import (
    Completion,
    Prompt,
    RolloutError,
    Sampling,
    check_completions,
)
from policyloss_train.rollout.session import Rollout
from policyloss_train.sampler import Sample, complete, cut_at_stop, uniforms

CUTS: dict[str, dict[str, Any]] = {
    "p": {"top_p": 0.9},
    "k": {"top_k": 5},
    "both": {"top_p": 0.9, "top_k": 5},
}
WARNING = "the ratio of an unchanged policy is not 1"


def mismatch(out: Path, step: int = 1) -> Tensor:
    """`old_logp - rollout_logp` of every token of a step, in float64."""
    rows = [row for row in lines(out, "rollouts") if row["step"] == step]
    assert rows
    old, rollout = (
        torch.tensor([x for row in rows for x in row[name]], dtype=torch.float64)
        for name in ("old_logp", "rollout_logp")
    )
    return old - rollout


# ---------------------------------------------------------------- the sampler


def test_processed_log_probabilities_by_hand() -> None:
    """Of 0.1, 0.4, 0.2, 0.3, top-p 0.8 keeps 0.4, 0.3 and 0.2; top-k 2 keeps 0.4 and 0.3."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(2, 1)
    u = torch.tensor([0.0, 0.999], dtype=torch.float64)
    for cut, kept, shares in (
        ({"top_p": 0.8}, [1, 2, 3], [4 / 9, 3 / 9]),
        ({"top_k": 2}, [1, 3], [4 / 7, 3 / 7]),
        ({"top_p": 0.5, "top_k": 2}, [1], [1.0, 1.0]),
    ):
        processed, raw = (draw(logits, u, Rule(1.0, **cut, processed=x)) for x in (True, False))
        (token, logp, rows), (raw_token, raw_logp, _) = processed, raw
        assert torch.equal(token, raw_token)  # the token does not depend on `processed`
        assert rows is not None
        assert rows[0].nonzero()[:, 0].tolist() == kept
        torch.testing.assert_close(logp.exp(), torch.tensor(shares))
        every = torch.tensor([0.1, 0.4, 0.2, 0.3])[token]
        torch.testing.assert_close(raw_logp.exp(), every)


@pytest.mark.parametrize("batch_tokens", [30, 10_000], ids=["many batches", "one batch"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_recorded_support_is_the_set_each_token_was_drawn_from(
    model: str, cut: str, batch_tokens: int
) -> None:
    """Rows end at different times, in batches of any size; a forward of each row alone determines
    the kept tokens.
    """
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model).double()
    rule = Rule(0.8, **CUTS[cut], processed=True)
    prompts = [[12, 13, 14], [20, 21], [12, 13, 14], [30], [31, 32, 33, 34]]
    drawn = complete(
        policy, prompts, uniforms(0, 0, 5, 8), [1, 15, 16, 17], rule, batch_tokens, supports=True
    )
    assert len({len(one.tokens) for one in drawn}) > 1
    for prompt, one in zip(prompts, drawn, strict=True):
        n = len(one.tokens)
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + one.tokens])).logits[0, -n - 1 : -1]
        kept = support((logits / 0.8).softmax(-1), rule.top_p, rule.top_k)
        assert one.support is not None
        ids, offsets = one.support
        assert (ids.dtype, offsets.dtype) == (torch.int32, torch.int64)
        assert offsets.tolist() == [0, *kept.sum(-1).cumsum(0).tolist()]
        assert ids.tolist() == kept.nonzero()[:, 1].tolist()
        logp = (logits / 0.8).where(kept, -math.inf).log_softmax(-1)
        expected = logp.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        torch.testing.assert_close(one.logp.double(), expected, rtol=0, atol=1e-6)


def test_nothing_is_recorded_where_every_token_can_be_drawn_or_nobody_asks(model: str) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model)
    for rule, supports in (
        (Rule(1.0), True),
        (Rule(0.0, top_p=0.5), True),
        (Rule(1.0, 0.5), False),
    ):
        (one,) = complete(policy, [[12]], uniforms(0, 0, 1, 4), [1], rule, 99, supports=supports)
        assert one.support is None


class Words:
    """Token n is the n-th letter."""

    def decode(self, ids: Tensor, **options: Any) -> str:
        return "".join(chr(97 + i) for i in ids.tolist())


def test_a_completion_that_is_stopped_keeps_the_support_of_its_tokens() -> None:
    pair = (torch.tensor([0, 3, 1, 2, 2, 4]), torch.tensor([0, 2, 3, 5, 6]))
    ids = torch.tensor([0, 1, 2, 4])
    s = Sample(0, 0, ids, ids, -ids.float(), False, "abce", support=pair)
    cut = cut_at_stop(Words(), s, ["b"])  # type: ignore[arg-type]
    assert cut.completion_ids.tolist() == [0, 1]
    assert cut.support is not None
    assert [x.tolist() for x in cut.support] == [[0, 3, 1], [0, 2, 3]]


# ---------------------------------------------------------------- on the way to the learner

SAMPLES = [
    Sample(
        *(
            0,
            0,
            torch.tensor([5, 6, 7]),
            torch.tensor([1, 2]),
            torch.tensor([-0.1, -0.2]),
            True,
            "",
        ),
        reward=1.0,
        support=(torch.tensor([1, 4, 2], dtype=torch.int32), torch.tensor([0, 2, 3])),
    ),
    Sample(
        *(1, 1, torch.tensor([8]), torch.tensor([3, 9]), torch.tensor([-0.3, -0.4]), True, ""),
        reward=0.0,
        support=(torch.tensor([0, 3, 9, 7, 8], dtype=torch.int32), torch.tensor([0, 2, 5])),
    ),
]


def test_a_pack_holds_the_support_of_each_prediction() -> None:
    """5 6 7 | 1 2 has four places: the last two predict the completion. 8 | 3 9 has two."""
    ids, offsets = Pack.of(SAMPLES).micro_batch()["support"]
    assert ids.tolist() == [1, 4, 2, 0, 3, 9, 7, 8]
    assert offsets.tolist() == [0, 0, 0, 2, 3, 5, 8]
    turned = Pack.of(SAMPLES).to(torch.device("cpu")).with_tokens().select([1, 0])
    ids, offsets = turned.micro_batch()["support"]
    assert ids.tolist() == [0, 3, 9, 7, 8, 1, 4, 2]
    assert offsets.tolist() == [0, 2, 5, 5, 5, 7, 8]
    bare = Pack.of([dataclasses.replace(s, support=None) for s in SAMPLES])
    assert bare.micro_batch()["support"] is None


def test_completions_that_wait_keep_it_in_a_checkpoint() -> None:
    tensors, numbers = Completions(SAMPLES, None, {"tokens": 4.0}).state()
    assert tensors["support_ids"].tolist() == [1, 4, 2, 0, 3, 9, 7, 8]
    back = Completions.from_state(tensors, json.loads(json.dumps(numbers)))
    back.check(examples=2, vocabulary=10)
    for s, again in zip(SAMPLES, back.samples, strict=True):
        assert s.support is not None
        assert again.support is not None
        assert all(map(torch.equal, s.support, again.support))
    bare = Completions([dataclasses.replace(s, support=None) for s in SAMPLES])
    assert bare.state()[0].keys() == {"prompt_ids", "completion_ids", "rollout_logp"}
    tensors["support_ids"][0] = 0  # the token 1 was not drawn from 0 and 4
    with pytest.raises(TypeError, match="1 tokens are not in their own support"):
        Completions.from_state(tensors, numbers).check(examples=2, vocabulary=10)


SAMPLING = Sampling(4, 1.0, 0.9, 0, (1,), seed=3, draw=5, support=True)


def pair(ids: list[int], offsets: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(ids), torch.tensor(offsets)


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (pair([20, 5, 1], [0, 2, 3]), None),
        (pair([20, 5, 1], [0, 3]), "with an invalid support: support offsets must be 3 numbers"),
        (pair([20, 5, 2], [0, 2, 3]), "with an invalid support: 1 tokens are not in their own"),
        (pair([20, 99, 1], [0, 2, 3]), "with an invalid support: its support has 1 ids that are"),
        ([[20, 5], [1]], "with an invalid support: support ids must be a 1-D tensor"),
    ],
)
def test_the_support_that_an_engine_returns_is_checked(kept: Any, says: str | None) -> None:
    one = Completion([20, 1], [-0.5, -0.25], True, 2, kept)
    call = ("mine", [Prompt([7], 1, 0)], SAMPLING, [[one]], 30, 2)
    if says is None:
        (checked,) = check_completions(*call)
        assert checked.support is not None
        assert all(map(torch.equal, checked.support, kept))
        return
    with pytest.raises(RolloutError, match=f"mine returned a completion {says}"):
        check_completions(*call)


def test_an_engine_returns_a_support_for_all_or_for_none() -> None:
    one = Completion([20, 1], [-0.5, -0.25], True, 2, pair([20, 5, 1], [0, 2, 3]))
    both = [[one, dataclasses.replace(one, support=None)]]
    with pytest.raises(RolloutError, match="a support for some completions only"):
        check_completions("mine", [Prompt([7], 2, 0)], SAMPLING, both, 30, 2)


def test_an_engine_without_kept_tokens_is_named_once() -> None:
    """Unless nothing was cut, or its log-probabilities are over all tokens."""
    messages: list[str] = []
    unused: Any = None
    rollout = Rollout("mine", unused, unused, unused, unused, warn=messages.append)
    for sampling, with_support in (
        (SAMPLING, True),
        (dataclasses.replace(SAMPLING, top_p=1.0), False),
        (dataclasses.replace(SAMPLING, temperature=0.0), False),
        (dataclasses.replace(SAMPLING, logp="raw"), False),
    ):
        rollout._compare(sampling, with_support)
    assert not messages
    assert not rollout.mismatched
    rollout._compare(SAMPLING, False)
    rollout._compare(SAMPLING, False)
    (message,) = messages
    assert "because --rollout mine does not return these tokens" in message
    assert rollout.mismatched


# ---------------------------------------------------------------- the learner


def llama(seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=23, num_hidden_layers=2, initializer_range=0.3, **sizes)
    return LlamaForCausalLM(config).double().eval()


def sampled(policy: Any) -> list[Sample]:
    """Six completions of three prompts, as the built-in sampler draws them."""
    prompts = [[5, 6], [5, 6], [7], [7], [8, 9, 10], [8, 9, 10]]
    rule = Rule(0.8, top_p=0.8, processed=True)
    drawn = complete(policy, prompts, uniforms(0, 0, 6, 5), [0, 1], rule, 99, supports=True)
    rewards = [1.0, 0.0, 0.25, 1.0, 0.0, 0.5]
    return [
        Sample(
            *(0, i // 2, torch.tensor(prompt), torch.tensor(one.tokens), one.logp, True, ""),
            reward=reward,
            support=one.support,
        )
        for i, (prompt, one, reward) in enumerate(zip(prompts, drawn, rewards, strict=True))
    ]


def over_the_kept(policy: Any, s: Sample) -> Tensor:
    """The log-probabilities of a completion over what each token was drawn from, `[L]`: the model
    on this one sequence, all logits, −inf outside.
    """
    assert s.support is not None
    n = len(s.completion_ids)
    logits = policy(torch.cat([s.prompt_ids, s.completion_ids])[None]).logits[0, -n - 1 : -1]
    kept = torch.zeros(n, 23, dtype=torch.bool)
    for t, ids in enumerate(s.support[0].tensor_split(s.support[1][1:-1])):
        kept[t, ids.long()] = True
    assert kept.sum() < kept.numel()
    logp = (logits / 0.8).where(kept, -math.inf).log_softmax(-1)
    return logp.gather(1, s.completion_ids[:, None])[:, 0]


@pytest.mark.parametrize("head", ["fused", "logits"])
@pytest.mark.parametrize("old_logp", ["rollout", "recompute"])
def test_an_update_is_the_gradient_over_the_kept_tokens(head: Any, old_logp: Any) -> None:
    """Against the same step written out: policy and reference over the kept tokens, the advantages
    ±½, ∓⅜ and ∓¼ of `dr_grpo`, gradient descent with the rate 1, several micro-batches.
    """
    policy, reference = llama(1), llama(9)
    batch, before = sampled(policy), copy.deepcopy(policy)
    spec = pl.preset("grpo").replace(kl=pl.KL("k3", 0.2), aggregate=pl.TokenSum())
    options: dict[str, Any] = {"advantage": "dr_grpo", "head": head, "old_logp": old_logp}
    options |= {"temperature": 0.8, "top_p": 0.8, "minibatches": 1, "grad_clip": 0.0}
    config = TrainConfig(**options, micro_tokens=8, prompts=3, group_size=2)
    trained = Policy(policy, Rows())
    learner = Learner(
        config,
        spec,
        Ranks(0, 1, torch.device("cpu")),
        trained,
        torch.optim.SGD(trained.parameters(), lr=1.0),
        Policy(reference, Rows()).requires_grad_(False),
    )
    learned = learner.learn(Pack.of(batch), range(6), 6, 0)
    logp = torch.cat([over_the_kept(before, s) for s in batch])
    lengths = [len(s.completion_ids) for s in batch]
    out = pl.policy_loss(
        spec,
        logp,
        logp.detach(),
        torch.tensor([0.5, -0.5, -0.375, 0.375, -0.25, 0.25], dtype=torch.float64),
        torch.ones_like(logp, dtype=torch.bool),
        ref_logp=torch.cat([over_the_kept(reference, s) for s in batch]).float().detach(),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        totals="local",
    )
    expected = torch.autograd.grad(out.loss, list(before.parameters()))
    for old, new, gradient in zip(before.parameters(), policy.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new, gradient, rtol=1e-5, atol=1e-6)
    mask = learned.pack.tokens["mask"]
    torch.testing.assert_close(learned.logp[mask].double(), logp.detach(), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        learned.pack.tokens["rollout_logp"][mask].double(), logp.detach(), rtol=0, atol=1e-6
    )
    assert learned.metrics["ratio_max"] == pytest.approx(1, abs=1e-6)


# ---------------------------------------------------------------- whole runs


@pytest.mark.parametrize(("cut", "head"), [("p", "fused"), ("k", "logits"), ("both", "fused")])
def test_the_ratio_of_an_unchanged_policy_is_1(
    model: str, tmp_path: Path, cut: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of sampler and learner, which are two programs, up to the rounding of float32; of two
    forwards of the learner with a rate of 0, to the bit. The KL to the reference is 0, too.
    """
    out = tmp_path / "run"
    options = {**CUTS[cut], "head": head, "loss": "grpo", "lr": 0, "epochs": 2, "steps": 1}
    assert train(out, model=model, rollouts_rows=16, minibatches=1, **options) == 0
    assert mismatch(out).abs().max() < 5e-6
    assert {x for row in lines(out, "rollouts") for x in row["ratio"]} == {1.0}
    row = lines(out)[-1]
    assert row["policy/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert WARNING not in re.sub(r"\s+", " ", capsys.readouterr().err)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_is_1_on_a_gpu(model: str, tmp_path: Path, dtype: str) -> None:
    """Sampler and learner round differently there; without the mask the mean gap is −log of what
    was kept, about 0.05.
    """
    out = tmp_path / "run"
    options = {**CUTS["both"], "device": "cuda", "dtype": dtype, "lr": 0, "steps": 1}
    assert train(out, model=model, rollouts_rows=16, minibatches=1, **options) == 0
    gap = mismatch(out)
    assert gap.abs().mean() < {"float32": 1e-4, "bfloat16": 0.02}[dtype]
    assert gap.mean().abs() < {"float32": 1e-4, "bfloat16": 0.01}[dtype]
    assert {x for row in lines(out, "rollouts") for x in row["ratio"]} == {1.0}


def test_without_the_mask_a_run_warns_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The learner's log-probabilities are then lower by the logarithm of the kept mass."""
    options = {"top_p": 0.9, "no_sampling_mask": True, "steps": 2, "rollouts_rows": 16}
    assert train(tmp_path / "run", model=model, **options) == 0
    gap = mismatch(tmp_path / "run")
    assert gap.max() < 1e-6
    assert gap.mean() < -0.01
    assert gap.min() >= math.log(0.9) - 1e-5
    output = capsys.readouterr()
    shown = re.sub(r"\s+", " ", output.out + output.err)
    assert shown.count("ratio of an unchanged policy is not 1") == 1
    assert "because --no-sampling-mask was named" in shown
    # The doctor's sentence about the first step would be of the same thing.
    assert "the ratio of the unchanged policy is not 1" not in shown


def test_raw_log_probabilities_are_over_all_tokens_on_both_sides(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"top_p": 0.9, "no_sampling_mask": True, "rollout_logp": "raw", "steps": 1}
    assert train(tmp_path / "run", model=model, rollouts_rows=16, **options) == 0
    assert mismatch(tmp_path / "run").abs().max() < 5e-6
    output = capsys.readouterr()
    assert "policy is not 1" not in re.sub(r"\s+", " ", output.out + output.err)


def test_a_run_that_samples_ahead_resumes_to_the_byte(model: str, tmp_path: Path) -> None:
    """The completions that wait carry their supports."""
    options = {"model": model, "top_p": 0.9, "staleness": 1, "steps": 3, "checkpoint_every": 1}
    assert train(tmp_path / "whole", **options) == 0
    assert train(tmp_path / "parts", **{**options, "steps": 2}) == 0
    assert resume(tmp_path / "parts", extend=3) == 0
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        texts = [(tmp_path / run / name).read_bytes() for run in ("whole", "parts")]
        assert texts[0] == texts[1], name
    files = [
        tmp_path / run / "checkpoints/step_000003/rank00000.safetensors"
        for run in ("whole", "parts")
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
    waiting = [name for name in load_file(files[0]) if name.endswith("support_ids")]
    assert len(waiting) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_p": 0.9, "rollout_logp": "raw"}, "add --no-sampling-mask"),
        ({"rollout": "vllm", "rollout_logp": "raw"}, "gives processed log-probabilities"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        TrainConfig(**options)
    if "top_p" in options:  # without a cut, raw and processed are the same
        assert not TrainConfig(rollout_logp="raw").replays_support


def test_a_teacher_compares_whole_distributions(tmp_path: Path) -> None:
    words = ["--loss", "gkd", "--teacher", str(tmp_path), "--top-k", "5"]
    with pytest.raises(InputError, match=r"add --no-sampling-mask --rollout-logp raw"):
        read_arguments(words)
    read_arguments([*words, "--no-sampling-mask", "--rollout-logp", "raw"])


@pytest.mark.slow
def test_reinforcement_learning_works_with_it(tmp_path: Path) -> None:
    """The built-in task, from its warm-up of about 0.3 on."""
    options = {"reward": None, "warmup_steps": None, "prompts": 16, "group_size": 8}
    options |= {"steps": 30, "eval_every": 30, "eval_prompts": 128, "rollouts_every": 0}
    assert train(tmp_path / "run", **options, **CUTS["both"]) == 0
    accuracy = [row["eval/accuracy"] for row in lines(tmp_path / "run") if "eval/accuracy" in row]
    assert accuracy[-1] > accuracy[0] + 0.2
