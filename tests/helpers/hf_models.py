"""Small random models of every causal-LM architecture that transformers can build."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 60
TOO_LARGE = 30_000_000  # parameters; a configuration that the sizes below do not shrink
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dim_ff", "d_inner", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_state", "index_n_heads"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("pad_token_id", "padding_idx"), 0),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "embd_pdrop"), 0.0),
}

# Additional settings of single architectures.
LATENT = {"num_key_value_heads": 4}  # attention over latent keys has as many as heads
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "minicpm3"), LATENT),
    **dict.fromkeys(("glm4_moe_lite", "glm_moe_dsa", "youtu"), LATENT),
    "deepseek_v2": {**LATENT, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "ministral": {"head_dim": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "expand": 2},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


def small_config(config_class: Any, **changes: Any) -> Any:
    """A configuration of this class with a small model's numbers."""
    sizes = {**_numbers(config_class()), **OTHERS.get(config_class.model_type, {})}
    config = config_class(**sizes)
    config._experts_implementation = "eager"  # the others cannot multiply float64
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _numbers(config: Any) -> dict[str, Any]:
    """The sizes that this configuration has, and those of the configurations inside it."""
    sizes: dict[str, Any] = {
        name: size for name, size in SIZES.items() if _is_number(vars(config).get(name))
    }
    for name, part in vars(config).items():
        if hasattr(part, "to_dict"):
            inside = _numbers(part)
            if inside:
                sizes[name] = inside
    return sizes


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def built(model_class: Any, config: Any, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model in eval mode whose weights are large enough for its logits to differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > TOO_LARGE:
            raise MemoryError(f"{size} parameters")
        torch.manual_seed(0)
        return model_class(config).to(dtype).eval()


def token_ids(rows: int = 2, length: int = 8, seed: int = 1) -> torch.Tensor:
    """Tokens that are neither padding nor special, `[rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def batch_for(ids: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The inputs of a loss for the predicted tokens; the first of them are a prompt."""
    predicted = ids.shape[0], ids.shape[1] - 1
    generator = torch.Generator().manual_seed(2)
    mask = torch.ones(predicted, dtype=torch.bool)
    mask[:, :2] = False
    return {
        "old_logp": -4 - torch.rand(predicted, generator=generator, dtype=dtype),
        "advantages": torch.randn(ids.shape[0], generator=generator, dtype=dtype),
        "mask": mask,
    }


def own_logits(model: Any, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """The model's own logits of the predicted tokens, `[B, T-1, V]`."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, **inputs).logits
    return logits[:, :-1]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model's parameters, which are forgotten."""
    named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return named


def most_rows(vocabulary: int, work: Callable[[], Any]) -> int:
    """The most rows of a tensor that is as wide as the vocabulary, among all that are made."""
    most = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal most
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor) and x.dim() >= 2 and x.shape[-1] == vocabulary:
                    most = max(most, x.numel() // vocabulary)
            return out

    with Watch():
        work()
    return most
