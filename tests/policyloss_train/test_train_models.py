"""Models: hidden states times the head are the logits, packs do not mix,
the tiny model repeats, and warm-up learns.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from policyloss.errors import InputError
from policyloss_train.attention import Rows
from policyloss_train.models import load_model, observe_head, tiny_model, tiny_tokenizer
from policyloss_train.policy import Critic
from policyloss_train.setup import warm_up
from policyloss_train.tasks import make_task
from policyloss_train.tasks.base import Example, Task, number_examples
from policyloss_train.tasks.rewards import make_reward

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
IDS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
LENGTHS = (5, 1, 4)


@cache
def sorting() -> Task:
    return make_task("sort", reward=None, seed=0)


def small(kind: str) -> Any:
    """A model with few weights, far enough from 0 that logits differ."""
    from transformers import (
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.manual_seed(0)
    model = {
        "llama tied": lambda: LlamaForCausalLM(
            LlamaConfig(**IDS, **SIZES, tie_word_embeddings=True)
        ),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**IDS, **SIZES, tie_word_embeddings=False)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**IDS, n_embd=16, n_layer=2, n_head=2, n_positions=64)
        ),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**IDS, **SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**IDS, **SIZES, head_dim=8)),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**IDS, **SIZES, head_dim=8, final_logit_softcapping=1.0)
        ),
    }[kind]()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


KINDS = ("llama tied", "llama", "gpt2", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function from a kind of model to a folder that holds one,
    with a tokenizer without a padding token.
    """
    folder = tmp_path_factory.mktemp("models")

    @cache
    def of(kind: str) -> Path:
        path: Path = folder / kind.replace(" ", "_")
        small(kind).save_pretrained(path)
        tiny_tokenizer(sorting()).save_pretrained(path)
        settings = json.loads((path / "tokenizer_config.json").read_text())
        del settings["pad_token"]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        return path

    return of


def loaded(path: Path, **options: Any) -> tuple[Any, Any]:
    return load_model(
        str(path), sorting(), **{"dtype": torch.float32, "device": "cpu", "seed": 0, **options}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_body_times_head_is_the_models_own_logits_and_packs_do_not_mix(
    kind: str, stored: Any
) -> None:
    model, _ = loaded(stored(kind), dtype=torch.float64)
    body, head = model.base_model, model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    ids = torch.randint(3, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    with torch.no_grad():
        packed = body(
            input_ids=ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state[0]
        alone = torch.cat([model(input_ids=part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(
        nn.functional.linear(packed, weight, bias), alone, rtol=1e-10, atol=1e-10
    )
    assert alone.std() > 0.1  # different enough that a mixed-up pack would show
    assert (weight is model.get_input_embeddings().weight) == (kind in ("llama tied", "gpt2"))
    assert not model.training


def test_a_tokenizer_that_cannot_pad_pads_with_its_end_token(stored: Any) -> None:
    _, tokenizer = loaded(stored("llama"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1


def test_stored_weights_load_in_the_requested_dtype(stored: Any) -> None:
    expected = small("qwen2").state_dict()
    found = loaded(stored("qwen2"), dtype=torch.bfloat16)[0].state_dict()
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name


def test_logits_that_contradict_the_config_are_refused(stored: Any) -> None:
    """Gemma's own cap is accepted; a cap that the config does not name is refused."""
    model, _ = loaded(stored("gemma2"))
    assert observe_head(model) == (1.0, 1.0)
    twin = copy.deepcopy(model)
    own = type(twin).forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        out = own(twin, *args, **kwargs)
        out.logits = out.logits + 1
        return out

    twin.forward = shifted
    with pytest.raises(
        InputError, match="Gemma2ForCausalLM are not its last hidden states times its head"
    ):
        observe_head(twin)


def test_a_head_that_does_not_read_the_last_hidden_states_is_refused(stored: Any) -> None:
    model, _ = loaded(stored("llama"))
    model.lm_head.register_forward_pre_hook(lambda head, args: (2 * args[0],))
    with pytest.raises(InputError, match="LlamaForCausalLM are not its last hidden states"):
        observe_head(model)


def test_a_body_alone_is_refused() -> None:
    with pytest.raises(
        InputError, match="LlamaModel are not its last hidden states times its head"
    ):
        observe_head(small("llama").model)


def test_folders_that_hold_no_model(tmp_path: Path, stored: Any) -> None:
    with pytest.raises(
        InputError, match=r"there is no folder .*nowhere; name the folder of a model"
    ):
        loaded(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"(?s)cannot load the model .*weights as safetensors"):
        loaded(tmp_path)
    # A pickle could run anything when it is read: with nothing but one, loading fails,
    # and nothing is unpickled.
    path = stored("llama")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    torch.save(small("llama").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"(?s)cannot load the model .*weights as safetensors"):
        loaded(tmp_path)


def test_a_tokenizer_that_cannot_end_is_refused(tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(sorting())
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="no end token"):
        loaded(tmp_path)


# --- the tiny model


def test_tiny_follows_from_its_seed_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (
        load_model("tiny", sorting(), dtype=torch.float32, device="cpu", seed=seed)[0]
        for seed in (0, 0, 1)
    )
    assert torch.equal(torch.rand(1), expected)
    embedding = [model.get_input_embeddings().weight for model in (first, again, other)]
    assert torch.equal(embedding[0], embedding[1])
    assert not torch.equal(embedding[0], embedding[2])
    # Embedding 100·64, tied; each of 2 layers: 4 attention squares 64², 3 · 64·256 of the MLP, 2
    # norms of 64; a last norm.
    assert (
        sum(p.numel() for p in first.parameters())
        == 100 * 64 + 2 * (4 * 64**2 + 3 * 64 * 256 + 2 * 64) + 64
    )


def test_the_tiny_tokenizer_gives_every_character_back() -> None:
    extra = Task("t", (Example("é→ ∑", "Ω"),), (), make_reward("exact"))
    tokenizer = tiny_tokenizer(extra)
    text = "  sort 52731=\n\tx  y é→∑Ω ' , . !"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    # Not a character of the task.
    assert tokenizer(["ß"])["input_ids"] == [[tokenizer.unk_token_id]]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 3 + 97 + 4)


# --- the critic


def test_the_critic_is_zero_at_first_then_its_head_over_the_body_it_took_over() -> None:
    model, other = (
        load_model("tiny", sorting(), dtype=torch.float64, device="cpu", seed=seed)[0]
        for seed in (0, 1)
    )
    critic = Critic(model, Rows())
    ids = torch.arange(6) + 10
    micro = {"ids": ids, "lengths": [4, 2]}
    assert torch.equal(critic(micro), torch.zeros(6, dtype=torch.float64))
    critic.start_from(other)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-1, 1, 64)[None])
        critic.head.bias.fill_(0.5)
        alone = torch.cat(
            [other.model(input_ids=part[None]).last_hidden_state[0] for part in ids.split([4, 2])]
        )
    torch.testing.assert_close(
        critic(micro),
        alone @ torch.linspace(-1, 1, 64).double() + 0.5,
        rtol=1e-10,
        atol=1e-10,
    )
    critic(micro).sum().backward()
    assert critic.body.embed_tokens.weight.grad.abs().sum() > 0
    # It shares no weight with a policy.
    assert all(p.grad is None for p in (*model.parameters(), *other.parameters()))


# --- warm-up


def test_the_first_loss_of_warm_up_is_that_of_the_completion_alone() -> None:
    """One example, so the first loss is −mean log p over its answer and end,
    by the model's own logits in float64.
    """
    task = Task("t", (Example("a b=", "xyz"),), (), make_reward("exact"))
    model, tokenizer = load_model("tiny", task, dtype=torch.float64, device="cpu", seed=0)
    ids = torch.tensor(tokenizer("a b=xyz")["input_ids"] + [tokenizer.eos_token_id])
    with torch.no_grad():
        logp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    # X, y, z and the end; the prompt is tokens 0 to 3.
    expected = -sum(logp[t - 1, ids[t]].item() for t in (4, 5, 6, 7)) / 4
    losses: list[float] = []
    warm_up(
        model, tokenizer, task, steps=30, seed=0, progress=lambda done, loss: losses.append(loss)
    )
    assert losses[0] == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < 0.1 * losses[0]


def test_rows_of_other_lengths_do_not_change_a_rows_loss() -> None:
    """Over two examples of 2 and 6 tokens (with their ends), the loss is the mean over 8 tokens."""
    rows = [Example("a=", "x"), Example("bcdefgh=", "vwxyz")]
    losses: dict[str, float] = {}
    for name, chosen in {"both": rows, "short": rows[:1], "long": rows[1:]}.items():
        task = Task("t", number_examples(chosen), (), make_reward("exact"))
        model, tokenizer = load_model("tiny", task, dtype=torch.float64, device="cpu", seed=0)
        warm_up(
            model,
            tokenizer,
            task,
            steps=1,
            seed=0,
            progress=lambda done, loss, name=name: losses.update({name: loss}),
        )
    assert losses["both"] == pytest.approx((2 * losses["short"] + 6 * losses["long"]) / 8, rel=1e-6)


def test_warm_up_repeats_and_sees_training_prompts_only() -> None:
    seen: set[str] = set()

    def watched(example: Example, rng: Any) -> str | None:
        seen.add(example.prompt)
        return sorting().demonstration(example, rng)

    task = replace(sorting(), demonstration=watched)
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(weights))  # the global generator plays no part
        model, tokenizer = load_model("tiny", task, dtype=torch.float32, device="cpu", seed=0)
        warm_up(model, tokenizer, task, steps=3, seed=seed)
        assert all(p.grad is None for p in model.parameters())
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert seen <= {example.prompt for example in task.train}


def test_warm_up_skips_examples_without_an_answer_and_needs_one() -> None:
    rows = (Example("a=", "", 0), Example("b=", "x", 1))
    tokenizer = tiny_tokenizer(sorting())
    task = Task("t", rows, (), make_reward("exact"))
    losses: list[float] = []
    for chosen in (rows, rows[1:]):
        model = tiny_model(tokenizer, 0)
        warm_up(
            model,
            tokenizer,
            replace(task, train=chosen),
            steps=1,
            seed=0,
            progress=lambda done, loss: losses.append(loss),
        )
    assert losses[0] == losses[1]
    with pytest.raises(InputError, match="the task t has no answers to warm up on"):
        warm_up(model, tokenizer, replace(task, train=rows[:1]), steps=1, seed=0)
