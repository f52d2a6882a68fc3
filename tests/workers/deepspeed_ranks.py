"""What two gloo processes do with `pl.hf` in DeepSpeed's engine, for `test_hf_deepspeed`. Each
writes the gradients that DeepSpeed gathers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_models import batch_for, built, small_config, token_ids
from torch import Tensor

import policyloss as pl

IDS = token_ids(4, 9)
BATCH = batch_for(IDS, torch.float32)
# Otherwise ZeRO-3 keeps small weights, and gathers others before their module is called.
GATHER_NOTHING_AHEAD = dict.fromkeys(
    (
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size",
    ),
    0,
)
HEADS: dict[str, dict[str, Any]] = {
    "plain head": {},
    "tied head": {},
    "frozen head": {},
    "adapted head": {"target_modules": ["q_proj", "lm_head"]},
    "copied head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
# How the loss is computed: in one pass, with a second product, or from log-probabilities.
WAYS = ("one_pass", "recompute", "logprobs")
CASES = [
    *(f"ZeRO-2, {head}, one_pass" for head in ("plain head", "adapted head")),
    *(f"ZeRO-3, {head}, one_pass" for head in HEADS),
    *(f"ZeRO-3, {head}, {way}" for head in ("plain head", "adapted head") for way in WAYS[1:]),
]


def model_of(head: str) -> Any:
    """A small Llama in float32 with such a head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = small_config(LlamaConfig, tie_word_embeddings=head == "tied head")
    model: Any = built(LlamaForCausalLM, config, torch.float32)
    if head == "frozen head":
        model.lm_head.requires_grad_(False)
    if HEADS[head]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **HEADS[head]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(7))
    return model


def loss_of(model: Any, way: str, rows: slice, totals: Any) -> Tensor:
    """The loss of some rows of the batch."""
    share = {name: x[rows] for name, x in BATCH.items()}
    if way == "logprobs":
        logp = pl.hf.logprobs(model, IDS[rows], mask=share["mask"]).logp
        return pl.policy_loss("dapo", logp, totals=totals, **share).loss
    return pl.hf.policy_loss(model, "dapo", IDS[rows], plan=way, totals=totals, **share).loss


def whole(head: str, way: str) -> dict[str, Tensor]:
    """The gradients of the whole batch in one process."""
    model = model_of(head)
    loss_of(model, way, slice(None), "local").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sharded(stage: int, head: str, way: str, rank: int) -> dict[str, Tensor]:
    """The gradients of two ranks with two rows each, gathered; and how many numbers of the head's
    weight a rank holds between two steps.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model = model_of(head)
    trained = [p for p in model.parameters() if p.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **GATHER_NOTHING_AHEAD},
        "zero_allow_untested_optimizer": True,  # SGD
    }
    optimizer = torch.optim.SGD(trained, lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rows = slice(2 * rank, 2 * rank + 2)
    totals = pl.Totals.count(BATCH["mask"][rows], group=dist.group.WORLD)
    kept = sum(p.numel() for name, p in model.named_parameters() if "lm_head" in name)
    engine.backward(loss_of(engine, way, rows, totals), scale_wrt_gas=False)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gathered = {name: safe_get_full_grad(p).clone() for name, p in named}
    engine.destroy()
    return {**gathered, "numbers of the head": torch.tensor(kept)}


def work(rank: int, folder: str) -> None:
    """The body of each of two processes."""
    torch.set_num_threads(1)
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank)}
    import deepspeed

    # On a CPU: plain gloo, without compiling a collective first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    results = {}
    for case in CASES:
        stage, head, way = case.split(", ")
        results[case] = sharded(int(stage[-1]), head, way, rank)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
