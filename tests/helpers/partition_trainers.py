"""Trainers for the tests of `partition_check`, most with a bug that people have shipped, and the
reports of two ranks on some.

The model is a small language model; a trainer is a `step(micro_batches)` that gives it the
gradients of one optimizer step.
Nothing is asserted here: a rank that stopped at a failed assertion would leave the other waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import policyloss as pl

VOCABULARY, WIDTH, PROMPT = 11, 14, 2
LENGTHS = torch.tensor([3, 9, 5, 12, 4, 7])  # valid tokens, 40 in all
Batch = dict[str, Any]
Step = Callable[[list[Batch]], Any]
StepLoss = Callable[[Tensor, Tensor, int, int, int], Tensor]


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """An embedding and a head, with weights that do not depend on what ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)).to(dtype)


def make_batch(dtype: torch.dtype = torch.float64, lengths: Tensor = LENGTHS) -> Batch:
    """Rows of a prompt, an answer and padding; `ids[:, t]` predicts `ids[:, t + 1]`."""
    g = torch.Generator().manual_seed(3)
    rows = len(lengths)
    column = torch.arange(WIDTH)
    ids = torch.randint(0, VOCABULARY, (rows, WIDTH + 1), generator=g)
    return {
        "inputs": ids[:, :-1],
        "labels": ids[:, 1:],
        "mask": (column >= PROMPT) & (column < PROMPT + lengths[:, None]),
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64).to(dtype),
        "old_logp": -2.4
        + 0.3 * torch.randn(rows, WIDTH, generator=g, dtype=torch.float64).to(dtype),
        "group_ids": torch.arange(rows) // 2,
        "temperature": 1.0,
    }


def packed(batch: Batch) -> Batch:
    """The same sequences, prompts included and padding left out, end to end."""
    lengths = PROMPT + batch["mask"].sum(1)
    inside = torch.arange(WIDTH) < lengths[:, None]
    flat = {
        name: x[inside] if isinstance(x, Tensor) and x.dim() == 2 else x
        for name, x in batch.items()
    }
    return {**flat, "cu_seqlens": nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)}


def log_probs(model: nn.Module, micro: Batch) -> Tensor:
    logp = pl.logprobs(model(micro["inputs"]), micro["labels"]).logp
    assert isinstance(logp, Tensor)
    return logp


def token_losses(model: nn.Module, micro: Batch) -> Tensor:
    """`−A · logp` of every position, masked or not."""
    advantages = micro["advantages"]
    if "cu_seqlens" in micro:
        advantages = advantages.repeat_interleave(micro["cu_seqlens"].diff().long())
    elif advantages.dim() == 1:
        advantages = advantages[:, None]
    return -advantages * log_probs(model, micro)


def trainer(loss_of: StepLoss, model: nn.Module | None = None) -> Step:
    """A loop that hands `loss_of` (each token's loss, mask, k, and the valid tokens and sequences
    of the step).
    """
    model = model or make_model()

    def step(micro_batches: list[Batch]) -> nn.Module:
        model.zero_grad()
        n = sum(int(m["mask"].sum()) for m in micro_batches)
        s = sum(
            m.get("cu_seqlens", m["mask"]).shape[0] - ("cu_seqlens" in m) for m in micro_batches
        )
        for micro in micro_batches:
            loss_of(token_losses(model, micro), micro["mask"], len(micro_batches), n, s).backward()
        return model

    return step


def library_trainer(spec: pl.LossSpec, model: nn.Module) -> Step:
    """The loop of docs/denominators.md."""

    def step(micro_batches: list[Batch]) -> nn.Module:
        model.zero_grad()
        names = ("mask", "cu_seqlens", "group_ids", "weights")
        layouts = [{name: m.get(name) for name in names} for m in micro_batches]
        totals = sum(
            (pl.Totals.count(**layout) for layout in layouts[1:]), pl.Totals.count(**layouts[0])
        )
        for micro, layout in zip(micro_batches, layouts, strict=True):
            logp = log_probs(model, micro)
            pl.policy_loss(
                spec, logp, micro["old_logp"], micro["advantages"], **layout, totals=totals
            ).loss.backward()
        return model

    return step


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum() / mask.sum()


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (torch.where(mask, x, 0).sum(1) / mask.sum(1)).mean()


def token_sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0).sum()


# Two ranks ----------------------------------------------------------------------------------------

RIGHT = (pl.TokenMean(), pl.TokenSum(), pl.PromptMean())


def fsdp_trainer(loss_of: Callable[[Tensor, Batch, pl.Totals], Tensor]) -> Step:
    """Sharded parameters: a rank's gradients are shards, which the check puts together."""
    # Slow to import, and needed by the two ranks alone.
    from torch.distributed.device_mesh import (
        init_device_mesh,
    )
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (2,)))

    def step(micro_batches: list[Batch]) -> nn.Module:
        model.zero_grad()
        totals = pl.Totals.count(torch.cat([m["mask"] for m in micro_batches]))
        for micro in micro_batches:
            loss_of(log_probs(model, micro), micro, totals).backward()
        return model

    return step


def ddp_trainer(
    loss_of: Callable[[Tensor, Batch, pl.Totals], Tensor], dp_size: int | None = None
) -> Step:
    """One backward per micro-batch, gradients averaged over ranks at the last one."""
    model = DistributedDataParallel(make_model())

    def step(micro_batches: list[Batch]) -> nn.Module:
        model.zero_grad()
        mask, ids = (torch.cat([m[name] for m in micro_batches]) for name in ("mask", "group_ids"))
        totals = pl.Totals.count(mask, group_ids=ids, dp_size=dp_size)
        for micro in micro_batches:
            with nullcontext() if micro is micro_batches[-1] else model.no_sync():
                loss_of(log_probs(model, micro), micro, totals).backward()
        return model

    return step


def of_spec(aggregate: Any) -> Callable[[Tensor, Batch, pl.Totals], Tensor]:
    spec = pl.preset("ppo").replace(aggregate=aggregate)

    def loss_of(logp: Tensor, micro: Batch, totals: pl.Totals) -> Tensor:
        tensors = (micro["old_logp"], micro["advantages"], micro["mask"])
        return pl.policy_loss(
            spec, logp, *tensors, group_ids=micro["group_ids"], totals=totals
        ).loss

    return loss_of


def summed_over_ranks(dp_size: int | None) -> Step:
    """An engine that sums the ranks' gradients."""
    model = make_model()
    loss_of = of_spec(pl.TokenMean())

    def step(micro_batches: list[Batch]) -> nn.Module:
        model.zero_grad()
        totals = pl.Totals.count(torch.cat([m["mask"] for m in micro_batches]), dp_size=dp_size)
        for micro in micro_batches:
            loss_of(log_probs(model, micro), micro, totals).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        return model

    return step


def _local_mean(logp: Tensor, micro: Batch, totals: pl.Totals) -> Tensor:
    """This rank's own mean over its tokens."""
    return token_mean(-micro["advantages"][:, None] * logp, micro["mask"])


def _not_reduced(micro_batches: list[Batch]) -> nn.Module:
    return trainer(lambda x, mask, k, n, s: token_sum(x, mask) / n)(micro_batches)


def _answer(step: Step, batch: Batch, **options: Any) -> dict[str, Any]:
    """The contents of a report, in plain values that can be saved."""
    try:
        report = pl.partition_check(step, batch, **options)
    except pl.InputError as error:
        return {"error": str(error)}
    cuts = {cut.name: [cut.moved, cut.factor] for cut in report.cuts}
    return {
        "text": str(report),
        "moved": report.moved,
        "cuts": cuts,
        "diagnosis": report.diagnosis,
        "notes": report.notes,
    }


def work(rank: int, folder: str, references: dict[str, Tensor]) -> None:
    """The body of each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    batch = make_batch()
    halves = {"two halves": [[0, 1, 2], [3, 4, 5]]}
    mean, reference = of_spec(pl.TokenMean()), references["TokenMean"]
    said = {
        f"right {type(a).__name__}": _answer(
            ddp_trainer(of_spec(a)), batch, cuts=halves, reference=references[type(a).__name__]
        )
        for a in RIGHT
    }
    said |= {
        "local means": _answer(ddp_trainer(_local_mean), batch, cuts={"whole": [[*range(6)]]}),
        "dp_size forgotten": _answer(
            ddp_trainer(mean, dp_size=1), batch, cuts=halves, reference=reference
        ),
        "dp_size forgotten, no reference": _answer(
            ddp_trainer(mean, dp_size=1), batch, cuts=halves
        ),
        "right FSDP2": _answer(fsdp_trainer(mean), batch, cuts=halves, reference=reference),
        "right sum over ranks": _answer(
            summed_over_ranks(dp_size=1), batch, cuts=halves, reference=reference
        ),
        "dp_size where ranks are summed": _answer(
            summed_over_ranks(dp_size=None), batch, cuts=halves, reference=reference
        ),
        "not reduced": _answer(_not_reduced, batch, cuts=halves),
        "other batches": _answer(
            ddp_trainer(mean), make_batch(lengths=LENGTHS + rank), cuts=halves
        ),
    }
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
