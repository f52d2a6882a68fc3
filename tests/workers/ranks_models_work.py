"""The work of the gloo processes of `test_ranks_models`:
a small Llama, trained by one process, by DDP and by FSDP2.

Four processes are started once. All four meet first; then two of them are a world of two, and
another trains alone, without torch.distributed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import policyloss as pl

VOCAB, STEPS = 23, 5
LENGTHS = (11, 4, 8, 2, 9, 6, 3)
CORRECTED = pl.preset("dapo").replace(
    correction=(pl.Band(0.9, 1.1), pl.SelfNormalise()), rejected="renormalise"
)
# Wide enough that no sequence is clipped for good.
BY_SEQUENCE = pl.preset("gspo").replace(trust=pl.Clip(0.2, 0.2))
SPECS = {
    "dapo": pl.preset("dapo"),
    "grpo": pl.preset("grpo"),
    "gspo": BY_SEQUENCE,
    "renormalise": CORRECTED,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-6),
}
# Which rows each rank gets as its micro-batches: uneven in rows, in tokens and in number;
# row 3 has nothing to train on.
SHARES = {
    2: (([0], [1, 2], [3]), ([4, 5, 6],)),
    4: (([0], [1]), ([3],), ([2, 4],), ([5], [6])),
}
CASES = [
    ("dapo", "SGD", "float64"),
    ("gspo", "AdamW", "float64"),
    ("renormalise", "AdamW", "float64"),
    ("grpo", "SGD", "float32"),
    ("dapo", "AdamW", "float32"),
]


def llama(dtype: torch.dtype) -> nn.Module:
    """A Llama with two layers and random weights, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=VOCAB,
        num_key_value_heads=1,
        max_position_embeddings=16,
        initializer_range=0.2,
        **shape,
    )
    config._attn_implementation = "eager"
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype).train()


@cache
def batch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Seven completions behind a prompt of two tokens; token t is predicted from those before it,
    so tensors are `[B, T−1]`.
    """
    g = torch.Generator().manual_seed(1)
    width = max(LENGTHS) + 2
    ids = torch.randint(0, VOCAB, (len(LENGTHS), width), generator=g)
    place = torch.arange(1, width)
    mask = (place >= 2) & (place < torch.tensor(LENGTHS)[:, None] + 2)
    mask[3] = False
    with torch.no_grad():
        old = logp_of(llama(torch.float64), ids)
    noise = 0.1 * torch.randn(3, *mask.shape, generator=g, dtype=torch.float64)
    floats = {
        "old_logp": old + noise[0],
        "rollout_logp": old + noise[0] + 0.5 * noise[1],
        "ref_logp": old + noise[2],
    }
    floats["advantages"] = torch.linspace(-1.5, 2.0, len(LENGTHS), dtype=torch.float64)
    return {"ids": ids, "mask": mask, **{name: x.float().to(dtype) for name, x in floats.items()}}


def logp_of(model: nn.Module, ids: Tensor) -> Tensor:
    return pl.logprobs(model(input_ids=ids).logits[:, :-1], ids[:, 1:]).logp


def rows_of(tensors: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
    return {name: x[torch.tensor(rows)] for name, x in tensors.items()}


def train(
    spec: pl.LossSpec, optimizer: str, model: nn.Module, micro_batches: list[dict[str, Tensor]]
) -> dict[str, Any]:
    """Five optimizer steps over the same batch: the parameters after them,
    and the metrics of the last.
    """
    update = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(STEPS):
        step = pl.accumulate(spec, micro_batches, logp=lambda micro: logp_of(model, micro["ids"]))
        for micro in step:
            with _synchronised(model, micro.is_last):
                micro.loss(logp_of(model, micro["ids"])).backward()
        update.step()
        update.zero_grad()
    parameters = {name.removeprefix("module."): _whole(p) for name, p in model.named_parameters()}
    return {"parameters": parameters, "metrics": step.reduce_metrics().compute()}


def _synchronised(model: nn.Module, last: bool) -> Any:
    """Gradients cross ranks once per step, behind the last micro-batch."""
    if isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


def _whole(p: Tensor) -> Tensor:
    p = p.detach()
    return p.full_tensor() if hasattr(p, "full_tensor") else p.clone()


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    return fully_shard(model)


ENGINES = {"DDP": ddp, "FSDP2": fsdp2}


def one(folder: str) -> None:
    """The whole batch in one call, by one process."""
    said = {}
    for case in CASES:
        dtype = getattr(torch, case[2])
        start = {name: p.detach().clone() for name, p in llama(dtype).named_parameters()}
        said[case] = {
            **train(SPECS[case[0]], case[1], llama(dtype), [batch(dtype)]),
            "start": start,
        }
    torch.save(said, Path(folder) / "one.pt")


def several(size: int, rank: int, folder: str) -> None:
    """The batch shared out, by each engine."""
    store = f"file://{folder}/store{size}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    said = {}
    for engine, wrapped in ENGINES.items():
        for case in CASES:
            dtype = getattr(torch, case[2])
            share = [rows_of(batch(dtype), rows) for rows in SHARES[size][rank]]
            said[(engine, *case)] = train(SPECS[case[0]], case[1], wrapped(llama(dtype)), share)
    torch.save(said, Path(folder) / f"several{size}_{rank}.pt")
    dist.destroy_process_group()


def work(process: int, folder: str) -> None:
    """The body of each of the four processes."""
    torch.set_num_threads(1)
    several(4, process, folder)
    if process < 2:
        several(2, process, folder)
    elif process == 2:
        one(folder)
