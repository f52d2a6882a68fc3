"""What gloo processes compute within `exact()`, for `test_bits_ranks`: a vocabulary in shards, and
a step spread over ranks.

Nothing is asserted here: a rank that stopped at a failed assertion would leave the others waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from head_cases import HeadBatch, dtype_name, leaf, make_head_batch
from head_ranks import joined, on_cpu
from torch import Tensor

import policyloss as pl
from cases import PRESETS

ROWS = 9
FULL = PRESETS["dapo"].replace(kl=pl.KL("k3", 0.1), entropy_coef=0.05)
LOSSES = {
    "token": FULL,
    "sequence": FULL.replace(ratio=pl.SequenceRatio(), aggregate=pl.SeqMeanTokenMean()),
}
CASES = {
    f"{kind}, {dtype_name(dtype)}": (spec, dtype)
    for kind, spec in LOSSES.items()
    for dtype in (torch.float32, torch.bfloat16)
}


def batch_of(dtype: torch.dtype) -> HeadBatch:
    return on_cpu(make_head_batch(seed=6, rows=ROWS, width=8, vocab=1024, size=80, dtype=dtype))


def tensors_of(batch: HeadBatch) -> dict[str, Any]:
    computed = ("logp", "entropy", "divergence")
    return {name: x for name, x in batch.tokens.kwargs.items() if name not in computed}


def one_process(spec: pl.LossSpec, batch: HeadBatch, **options: Any) -> dict[str, Any]:
    """Loss, gradient of the hidden states, log-probabilities, entropies and metrics of a call."""
    hidden, weight = leaf(batch.hidden), leaf(options.pop("weight", batch.weight))
    with pl.exact():
        out = pl.linear_policy_loss(
            spec, hidden, weight, batch.ids, **tensors_of(batch), totals="local", **options
        )
    out.loss.backward()
    return {
        "loss": out.loss.detach(),
        "hidden": hidden.grad,
        "logp": out.logp,
        "entropy": out.entropy,
        "metrics": out.metrics.compute(),
    }


def spread(
    spec: pl.LossSpec, batch: HeadBatch, rank: int, ranks: int, group: Any
) -> dict[str, Any]:
    """A step whose sequences lie on several ranks, two to a micro-batch: the gradient of this
    rank's hidden states, at their rows, and the metrics of all.
    """
    rows = list(range(rank, ROWS, ranks))
    shares = [batch.rows(rows[i : i + 2]) for i in range(0, len(rows), 2)]
    gradient: Tensor = torch.zeros_like(batch.hidden)
    with pl.exact():
        step = pl.accumulate(spec, [tensors_of(share) for share in shares], group=group)
        for i, micro in enumerate(step):
            share = shares[min(i, len(shares) - 1)]
            hidden = leaf(share.hidden)
            out = pl.linear_policy_loss(spec, hidden, batch.weight, share.ids, **micro.arguments())
            out.loss.backward()
            step.add(out.metrics)
            if i < len(shares):
                gradient[rows[2 * i : 2 * i + 2]] = hidden.grad / ranks
        metrics = step.reduce_metrics().compute()
    return {"hidden": gradient, "metrics": metrics}


def body(rank: int, folder: str, ranks: int) -> None:
    """The body of each of several processes."""
    world = joined(rank, ranks, folder)
    results: dict[str, Any] = {}
    for name, (spec, dtype) in CASES.items():
        batch = batch_of(dtype)
        shard = batch.weight.chunk(ranks)[rank]
        for plan in ("one_pass", "recompute"):
            options = {"weight": shard, "vocab_group": world, "plan": plan}
            results[f"shards: {name}, {plan}"] = one_process(spec, batch, **options)
        results[f"spread: {name}"] = spread(spec, batch, rank, ranks, world)
    uneven = batch.weight[:1008].split(1008 - 16 * (ranks - 1))[0] if rank == 0 else shard[:16]
    # Equal shards of a vocabulary that is not a multiple of 128.
    for name, weight in {"uneven": uneven, "no multiple": shard[: 1000 // ranks]}.items():
        try:
            one_process(spec, batch, weight=weight, vocab_group=world)
            results[f"refusal: {name}"] = ""
        except pl.InputError as error:
            results[f"refusal: {name}"] = str(error)
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
