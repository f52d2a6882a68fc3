"""The task of the recipes: a small Llama, a fixed batch of rollouts, and its cut into ranks and
micro-batches.

Everything is made from a seed, so every recipe starts from the same model and sees the same twelve
rollouts in its five steps. The recipes differ in how they cut the batch, and must end at the same
parameters.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import policyloss as pl

STEPS = 5
VOCABULARY = 64
# Tokens of each rollout's prompt and of its completion:
# twelve rollouts whose lengths differ a lot, as they do in practice.
PROMPTS = (3, 3, 3, 3, 7, 7, 7, 7, 5, 5, 5, 5)
COMPLETIONS = (1, 14, 2, 9, 3, 16, 1, 5, 12, 2, 7, 4)
# The rollouts of each micro-batch of each rank, by the number of ranks: uneven sizes, and not
# equally many on each rank.
CUTS: dict[int, list[list[range]]] = {
    1: [[range(1), range(1, 6), range(6, 8), range(8, 12)]],
    2: [[range(1), range(1, 5), range(5, 7)], [range(7, 8), range(8, 12)]],
}


def make_model() -> Any:
    """A Llama of two layers and 20 thousand parameters,
    with the same random weights wherever it is made.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: Any) -> torch.optim.Optimizer:
    """SGD, because Adam would hide a wrong factor: it divides the gradient by its size."""
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def rollouts() -> dict[str, Tensor]:
    """The whole batch: ids `[B, T]`, attention `[B, T]`;
    old_logp and mask `[B, T-1]`, of ids[:, 1:]; advantages `[B]`.
    """
    random = torch.Generator().manual_seed(1)
    prompts, completions = torch.tensor(PROMPTS)[:, None], torch.tensor(COMPLETIONS)[:, None]
    place = torch.arange(int((prompts + completions).max()))
    inside = place < prompts + completions
    ids = torch.where(inside, torch.randint(1, VOCABULARY, inside.shape, generator=random), 0)
    # The untrained model is close to uniform; the noise makes ratios on both sides
    # of the clip range.
    old_logp = -math.log(VOCABULARY) + 0.2 * torch.randn(inside[:, 1:].shape, generator=random)
    return {
        "ids": ids,
        "attention": inside.long(),
        "mask": (inside & (place >= prompts))[:, 1:],
        "old_logp": old_logp,
        "advantages": torch.randn(len(PROMPTS), generator=random),
    }


def micro_batches(rank: int = 0, world: int = 1) -> list[dict[str, Tensor]]:
    """The share of one of `world` ranks: a list of dicts, each as wide as its longest rollout."""
    whole = rollouts()
    shares = []
    for rows in CUTS[world][rank]:
        width = int(whole["attention"][list(rows)].sum(1).max())
        share = {name: x[list(rows)] for name, x in whole.items()}
        share |= {name: share[name][:, :width] for name in ("ids", "attention")}
        shares.append(share | {name: share[name][:, : width - 1] for name in ("mask", "old_logp")})
    return shares


def logp_of(model: Any, micro: Mapping[str, Any]) -> Tensor:
    """Log-probabilities of ids[:, 1:] under the model, `[B, T-1]`."""
    logits = model(
        input_ids=micro["ids"], attention_mask=micro["attention"], use_cache=False
    ).logits
    logp = pl.logprobs(logits[:, :-1], micro["ids"][:, 1:]).logp
    assert isinstance(logp, Tensor)  # with entropy=True it would be a pair
    return logp


def report(step: pl.Accumulation, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Print the last step's metrics and a fingerprint of the parameters;
    save both to the path in argv[1] if there is one.

    Every rank must call it, because merging the metrics is a collective; the first one prints.
    """
    metrics = step.reduce_metrics().compute()
    values = {name: x.detach().clone() for name, x in parameters}
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks > 1 and dist.get_rank() > 0:
        return
    total = sum(float(x.double().abs().sum()) for x in values.values())
    shown = {
        name: round(metrics[name], 6) for name in ("loss", "tokens", "clip_fraction", "ratio_max")
    }
    print(f"after {STEPS} steps on {ranks} ranks: {shown}, sum of |parameters| {total:.6f}")
    if len(sys.argv) > 1:
        torch.save({"ranks": ranks, "metrics": metrics, "parameters": values}, sys.argv[1])
