"""What two gloo processes do with `pl.hf`, for `test_hf_ranks`: DDP, FSDP2, a frozen head, and a
vocabulary that is cut over ranks. Each writes the gradients that it sees.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hf_models import batch_for, built, small_config, token_ids
from torch import Tensor, nn

import policyloss as pl
from policyloss.hf.output_head import language_model, output_head

IDS = token_ids(4, 9)
BATCH = batch_for(IDS, torch.float32)
SPECS = {"dapo": pl.preset("dapo"), "gspo": pl.preset("gspo")}
KINDS = ("ddp", "fsdp2", "fsdp2 with the head apart", "frozen", "recompute")
# Adapters of the head, each of whose modules is sharded by itself, as PEFT's policy for FSDP does.
ADAPTERS: dict[str, dict[str, Any]] = {
    "adapted": {"target_modules": ["q_proj", "lm_head"]},
    "copied": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def model_of(kind: str) -> Any:
    """A small Llama in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Any = built(LlamaForCausalLM, small_config(LlamaConfig), torch.float32)
    if kind == "frozen":
        model.lm_head.requires_grad_(False)
    if kind in ADAPTERS:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **ADAPTERS[kind]))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(7))
    return model


def loss_of(model: Any, kind: str, spec: pl.LossSpec, rows: slice, totals: Any) -> Tensor:
    """The loss of some rows of the batch."""
    share = {name: x[rows] for name, x in BATCH.items()}
    plan = "recompute" if kind == "recompute" else "auto"
    out = pl.hf.policy_loss(model, spec, IDS[rows], plan=plan, totals=totals, **share)
    return out.loss


def whole(kind: str, spec: pl.LossSpec) -> dict[str, Tensor]:
    """The gradients of the whole batch in one process."""
    model = model_of(kind)
    loss_of(model, kind, spec, slice(None), "local").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def sharded(kind: str, spec: pl.LossSpec, rank: int) -> dict[str, Tensor]:
    """The gradients of two ranks with two rows each, complete on both."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = model_of(kind)
    inside = model
    if kind == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        for layer in language_model(model).model.layers:
            fully_shard(layer)
        if "apart" in kind:
            fully_shard(model.lm_head)
        if kind in ADAPTERS:
            head = output_head(model)
            for module in (part for part in head.modules() if isinstance(part, nn.Linear)):
                fully_shard(module)
        fully_shard(model)
    rows = slice(2 * rank, 2 * rank + 2)
    totals = pl.Totals.count(BATCH["mask"][rows], group=dist.group.WORLD)
    loss_of(model, kind, spec, rows, totals).backward()

    def complete(x: Any) -> Tensor:
        full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
        return full.clone()

    named = inside.named_parameters()
    return {name: complete(p.grad) for name, p in named if p.grad is not None}


def cut_vocabulary(spec: pl.LossSpec, rank: int) -> dict[str, Tensor]:
    """Each rank holds half of the head's entries, and sees all rows."""
    model = model_of("")
    half = model.lm_head.weight.detach().chunk(2)[rank].clone()
    model.lm_head = nn.Linear(half.shape[1], half.shape[0], bias=False)
    model.lm_head.weight = nn.Parameter(half)
    share = dict(BATCH)
    out = pl.hf.policy_loss(model, spec, IDS, totals="local", vocab_group=dist.group.WORLD, **share)
    out.loss.backward()
    gathered = [torch.empty_like(half) for _ in range(2)]
    dist.all_gather(gathered, model.lm_head.weight.grad)
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**grads, "lm_head.weight": torch.cat(gathered)}


def verl_cross_entropy(rank: int) -> dict[str, Tensor]:
    """verl's function over a cut vocabulary: gradients of hidden add up over ranks."""
    from policyloss.compat.verl import linear_cross_entropy

    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 5, 8, generator=generator).requires_grad_()
    every = torch.randn(20, 8, generator=generator)
    labels = torch.randint(0, 20, (2, 5), generator=generator)
    weight = every.chunk(2)[rank].clone().requires_grad_()
    logp, entropy = linear_cross_entropy(hidden, weight, labels, 0.8, "none", dist.group.WORLD)
    (logp * torch.arange(10) + entropy).sum().backward()
    total = hidden.grad
    dist.all_reduce(total)
    return {"logp": logp.detach(), "entropy": entropy.detach(), "hidden": total}


def work(rank: int, folder: str) -> None:
    """The body of each of two processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    results: dict[str, Any] = {}
    for name, spec in SPECS.items():
        for kind in (*KINDS, *ADAPTERS):
            results[f"{kind}, {name}"] = sharded(kind, spec, rank)
        results[f"vocabulary, {name}"] = cut_vocabulary(spec, rank)
    results["verl"] = verl_cross_entropy(rank)
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="spawn")
