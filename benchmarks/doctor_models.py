"""Small models that speak a made-up language, and variants of their weights on disk.

The language: a prompt is the first token, two topics and some words; each next word is one of a few
that follow from the topics and the last word. A model that learned it has peaked distributions and
looks back at its prompt, as a trained language model does.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, PAD, BOS, END, TOPICS, WORDS = 128, 0, 1, 2, 4, 112
FIRST_WORD = 16
# The doctor's thresholds were chosen on "llama", "gpt2", "mixtral" and "qwen3_moe"; the matrix is
# measured on models that they have never met.
DENSE, MIXTURES = ("qwen3", "gpt_neox"), ("olmoe", "qwen2_moe")
LONGEST = 32  # tokens of a completion


def config_of(name: str) -> Any:
    """The configuration of a model by its name."""
    from transformers import AutoConfig

    ends = {"bos_token_id": BOS, "eos_token_id": END, "pad_token_id": PAD}
    if name == "gpt2":
        return AutoConfig.for_model(
            "gpt2", vocab_size=VOCABULARY, n_positions=96, n_embd=64, n_layer=2, n_head=2, **ends
        )
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "tie_word_embeddings": False,
        **ends,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    more: dict[str, dict[str, Any]] = {
        "llama": {"attention_dropout": 0.1},
        "qwen3": {"attention_dropout": 0.1, "head_dim": 32, "tie_word_embeddings": True},
        "gpt_neox": {"attention_dropout": 0.1, "hidden_dropout": 0.1, "num_hidden_layers": 3},
        "mistral": {"sliding_window": None},
        "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64},
        "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
        "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
        "qwen3_moe": {**experts, "moe_intermediate_size": 64, "norm_topk_prob": True},
        "olmoe": experts,
        "qwen2_moe": {
            **experts,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    }
    if name in more:
        return AutoConfig.for_model(name, **{**options, **more[name]})
    raise ValueError(f"there is no model {name!r} here")


def sentences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Whole sequences of the language `[count, L]`, padded, and the length of each prompt."""
    draw = torch.Generator().manual_seed(seed)
    follow = torch.randint(
        WORDS, (TOPICS, TOPICS, WORDS, 6), generator=torch.Generator().manual_seed(1)
    )
    shares = torch.tensor(  # after some words the next one is all but certain, after others open
        [
            [0.995, 0.001, 0.001, 0.001, 0.001, 0.001],
            [0.9, 0.04, 0.03, 0.01, 0.01, 0.01],
            [0.45, 0.22, 0.13, 0.08, 0.07, 0.05],
        ]
    )
    a, b = (torch.randint(TOPICS, (count,), generator=draw) for _ in range(2))
    rows = [torch.full((count,), BOS), a + 3, b + 3]
    word = torch.randint(WORDS, (count,), generator=draw)
    for _ in range(10 + LONGEST):
        rows.append(word + FIRST_WORD)
        which = torch.multinomial(shares[word % 3], 1, generator=draw)[:, 0]
        word = follow[a, b, word, which]
    ids = torch.stack(rows, 1)
    prompt = torch.randint(4, 13, (count,), generator=draw)
    place = torch.arange(ids.shape[1])
    ends = (torch.rand(ids.shape, generator=draw) < 0.03) & (place > prompt[:, None] + 8)
    ended = ends.cumsum(1) > 0
    first = ended & (ends.cumsum(1) == 1) & ends
    return torch.where(first, END, torch.where(ended, PAD, ids)), prompt


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of different lengths."""
    ids, lengths = sentences(count, 10_000 + seed)
    return [row[:n].tolist() for row, n in zip(ids, lengths.tolist(), strict=True)]


def train(model: Any, steps: int, seed: int, rate: float) -> Iterator[int]:
    """Supervised steps on the language."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98))
    model.train()
    for step in range(steps):
        ids, _ = sentences(24, 100_000 * (seed + 1) + step)
        logits = model(input_ids=ids, attention_mask=(ids != PAD).long(), use_cache=False).logits
        loss = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], ignore_index=PAD
        )
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield step
    model.eval()


def trained(name: str, seed: int = 0, steps: int = 300) -> Any:
    """A model of this name that has learned the language; with 0 steps, one of large random
    weights, so that its distributions are not flat.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = config_of(name)
    if not steps:
        config.initializer_range = config.init_std = 0.15
    model = AutoModelForCausalLM.from_config(config)
    for _ in train(model, steps, seed, 3e-3):
        pass
    return model


def with_adapter(model: Any, seed: int) -> Any:
    """A peft model: rank 4 on the matrices, with weights as large as a trained adapter's."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    kind = model.config.model_type
    gpt2 = kind == "gpt2"
    names = {
        "gpt2": ["c_attn", "c_proj", "c_fc"],
        "gpt_neox": ["query_key_value", "dense", "dense_4h_to_h"],
    }.get(kind, ["q_proj", "v_proj", "o_proj", "down_proj"])
    wrapped = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=names, fan_in_fan_out=gpt2)
    )
    with torch.no_grad():
        for weight_name, w in wrapped.named_parameters():
            if "lora_B" in weight_name:
                w.normal_(0, 0.02)
    return wrapped.eval()


def quantised(model: Any, kind: str) -> Any:
    """A copy with the linear layers' weights through torchao's int8 or float8 and back."""
    quantization = import_module("torchao.quantization")
    twin = copy.deepcopy(model)
    for module in twin.modules():  # GPT-2 keeps its matrices transposed, in a class of its own
        for child_name, child in list(module.named_children()):
            if type(child).__name__ == "Conv1D":
                linear = nn.Linear(*child.weight.shape)
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous())
                linear.bias = nn.Parameter(child.bias.detach().clone())
                setattr(module, child_name, linear)
    body = twin.base_model
    config = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind]
    quantization.quantize_(body, getattr(quantization, config)())
    weights = {
        f"{name}.weight": m.weight.dequantize()
        for name, m in body.named_modules()
        if isinstance(m, nn.Linear)
    }
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for name, w in plain.base_model.named_parameters():
            if name in weights:
                new = weights[name].to(w.dtype)
                w.copy_(new.T if _conv(plain, name) else new)
    return plain


def _conv(model: Any, name: str) -> bool:
    owner = model.base_model.get_submodule(name.removesuffix(".weight"))
    return type(owner).__name__ == "Conv1D"


def rounded_to(model: Any, dtype: torch.dtype) -> Any:
    """A copy whose float32 weights are numbers of a 16-bit type."""
    return copy.deepcopy(model).to(dtype).float()


def build(folder: Path, name: str) -> None:
    """Write the model of this name and the variants of its weights, each as a folder."""
    torch.set_num_threads(1)
    model = trained(name)
    variants: dict[str, Any] = {}
    if name in MIXTURES:
        model.save_pretrained(folder / "base")
        return
    later = copy.deepcopy(model)
    for step in train(later, 16, 7, 5e-4):
        if 15 - step in (2, 8):
            variants[f"stale{15 - step}"] = copy.deepcopy(later)
    variants["base"] = later
    variants["fp16"] = rounded_to(later, torch.float16)
    for kind in ("int8", "fp8"):
        variants[kind] = quantised(later, kind)
    base = rounded_to(later, torch.bfloat16)
    variants["bf16_values"] = base
    adapted = with_adapter(copy.deepcopy(base), 3)
    adapted.save_pretrained(folder / "adapter")
    merged = copy.deepcopy(adapted).merge_and_unload()
    variants["merged"] = rounded_to(merged, torch.bfloat16)
    for variant, weights in variants.items():
        weights.save_pretrained(folder / variant)
    (folder / "done.json").write_text(json.dumps(sorted(variants)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    options = parser.parse_args()
    build(options.folder, options.name)
