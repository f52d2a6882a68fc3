"""A small model whose loss comes from the head, trained by two data-parallel processes: FSDP2, DDP,
accumulated micro-batches.

`training` is what each process computes; `whole_gradients` and `whole_steps` are the same on one
process with the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from head_cases import HeadBatch, contract, make_head_batch
from head_ranks import (
    FULL,
    SIZE,
    VOCAB,
    agreement,
    context_parallel,
    given,
    joined,
    refusals,
    vocabulary,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial
from torch.nn.parallel import DistributedDataParallel
from two_ranks import DP_ROWS

import policyloss as pl
from cases import PRESETS

SPECS = {"ppo": PRESETS["ppo"], "gspo": PRESETS["gspo"], "full": FULL}


class Block(nn.Module):
    """Each position reads the mean of the positions before it, then itself, and adds the result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(SIZE),
            nn.Linear(SIZE, 2 * SIZE),
            nn.Linear(2 * SIZE, SIZE),
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1).view(-1, 1)
        return x + self.down(nn.functional.gelu(self.up(seen)))


class Body(nn.Module):
    """Token ids `[B, T]` → hidden states `[B, T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.norm = (
            nn.Embedding(VOCAB, SIZE),
            nn.ModuleList([Block(), Block()]),
            nn.LayerNorm(SIZE),
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Policy(nn.Module):
    """Body and head; its forward is the loss, so that DDP sees the parameters of both."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(SIZE, VOCAB)

    def forward(self, batch: HeadBatch, spec: pl.LossSpec, totals: Any) -> Tensor:
        hidden = self.body(batch.ids.roll(1, 1))
        return pl.linear_policy_loss(
            spec,
            hidden,
            self.head.weight,
            batch.ids,
            bias=self.head.bias,
            totals=totals,
            **given(batch),
        ).loss


def new_policy() -> Policy:
    """The same parameters every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Policy().double()


def batch_near(policy: Policy) -> HeadBatch:
    """A batch whose frozen policies are near this one,
    so that some tokens are clipped and most are not.
    """
    made = make_head_batch(seed=10, vocab=VOCAB, size=SIZE, dtype=torch.float64)
    ids = made.ids.cpu()
    with torch.no_grad():
        logp = contract(
            policy.body(ids.roll(1, 1)), policy.head.weight, ids, bias=policy.head.bias
        ).logp
    shift = logp - made.tokens.logp
    names = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
    tokens = made.tokens.map(lambda x: (x + shift).clamp(max=-1e-3), *names)
    return dataclasses.replace(
        made, hidden=made.hidden.cpu(), weight=made.weight.cpu(), ids=ids, tokens=tokens
    )


BATCH = batch_near(new_policy())
FSDP_RUNS = hasattr(torch.cpu.Stream, "record_event")  # on a CPU; that of torch 2.6 does not


def gradients(policy: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def whole_gradients(spec: pl.LossSpec) -> dict[str, Tensor]:
    policy = new_policy()
    policy(BATCH, spec, "local").backward()
    return gradients(policy)


def trained(
    policy: Policy, batch: HeadBatch, spec: pl.LossSpec, totals: Any, average: bool
) -> None:
    """Three steps. average: of the head's gradients over ranks, by hand."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5, foreach=False)
    for _ in range(3):
        policy(batch, spec, totals).backward()
        for p in policy.head.parameters() if average else ():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


def whole_steps(spec: pl.LossSpec) -> dict[str, Tensor]:
    policy = new_policy()
    trained(policy, BATCH, spec, "local", average=False)
    return {name: p.detach() for name, p in policy.named_parameters()}


def full(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach()


def sharded_body(rank: int) -> Iterator[tuple[str, Any]]:
    """FSDP2 around the blocks and the body, the head a plain weight on every rank."""
    for split, rows in DP_ROWS.items() if FSDP_RUNS else ():
        part = BATCH.rows(rows[rank])
        for name, spec in SPECS.items():
            policy = new_policy()
            for block in policy.body.blocks:
                fully_shard(block)
            fully_shard(policy.body)
            trained(policy, part, spec, pl.Totals.count(part.tokens.mask), average=True)
            yield f"fsdp: {name}, {split}", {n: full(p) for n, p in policy.named_parameters()}


def sharded_head(rank: int) -> Iterator[tuple[str, Any]]:
    """A head that is sharded too: an error as a DTensor, right as a full tensor whose gradient is
    averaged over ranks.
    """
    policy = new_policy()
    fully_shard(policy.head)
    part = BATCH.rows(DP_ROWS["uneven"][rank])
    totals, head = pl.Totals.count(part.tokens.mask), policy.head

    def loss(weight: Any, bias: Any) -> Tensor:
        hidden = policy.body(part.ids.roll(1, 1)).detach()
        return pl.linear_policy_loss(
            FULL, hidden, weight, part.ids, bias=bias, totals=totals, **given(part)
        ).loss

    for name, arguments in {
        "weight": (head.weight, None),
        "bias": (head.weight.full_tensor(), head.bias),
    }.items():
        try:
            loss(*arguments)
            yield f"dtensor {name}", "no error"
        except (pl.InputError, RuntimeError) as error:
            yield f"dtensor {name}", f"{type(error).__name__}: {error}"
    mean = torch.empty(1)
    dist.reduce_scatter_tensor(mean, torch.ones(2), op=dist.ReduceOp.AVG)
    yield "gloo averages", mean.item() == 1  # that of torch 2.8 adds up
    average = [Partial("avg")]
    loss(
        head.weight.full_tensor(grad_placements=average),
        head.bias.full_tensor(grad_placements=average),
    ).backward()
    yield "dtensor gradients", {f"head.{n}": full(p.grad) for n, p in head.named_parameters()}


def averaged(rank: int) -> Iterator[tuple[str, Any]]:
    """DDP, at once and over micro-batches of one sequence each,
    on top of gradients that are there already.
    """
    for split, rows in DP_ROWS.items():
        part = BATCH.rows(rows[rank])
        totals = pl.Totals.count(part.tokens.mask)
        for name, spec in SPECS.items():
            policy = new_policy()
            model = DistributedDataParallel(policy)  # kept: without it nothing is averaged
            model(part, spec, totals).backward()
            yield f"ddp: {name}, {split}", gradients(policy)
            policy = new_policy()
            for p in policy.parameters():
                p.grad = torch.ones_like(p)
            model = DistributedDataParallel(policy)
            for i in range(len(rows[rank])):
                last = i == len(rows[rank]) - 1
                with nullcontext() if last else model.no_sync():
                    model(part.rows([i]), spec, totals).backward()
            yield f"accumulated: {name}, {split}", gradients(policy)


def training(rank: int) -> dict[str, Any]:
    """All results of one of two ranks."""
    return {**dict(sharded_body(rank)), **dict(sharded_head(rank)), **dict(averaged(rank))}


def two(rank: int, folder: str) -> None:
    """The body of each of two processes. The case that ends both if ranks do not agree comes last,
    in a separate file.
    """
    world = joined(rank, 2, folder)
    said = {
        **vocabulary(rank, 2, world),
        **refusals(rank, 2, world),
        **context_parallel(rank, world),
        **training(rank),
    }
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    brief = dist.new_group([0, 1], timeout=timedelta(seconds=20))
    torch.save(agreement(rank, brief), Path(folder) / f"agreement{rank}.pt")
    dist.destroy_process_group()
