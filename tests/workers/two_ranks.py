"""What two gloo processes compute, for `test_context_parallel`:
each case's numbers go to a file, and are judged outside.

Nothing is asserted here: a rank that stopped at a failed assertion would leave the other waiting.
Everything runs in one pair of processes, because starting them takes longer than all the cases
together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import policyloss as pl
from cases import (
    BY_AGGREGATE,
    BY_CORRECTION,
    MIXTURES,
    NAMED,
    PRESETS,
    Batch,
    make_batch,
    run,
    step_totals,
)

BATCH = make_batch(seed=10)
VALUE_AGGREGATES = (pl.TokenMean(), pl.SeqMeanTokenMean(), pl.PromptMean())
DP_ROWS = {
    "uneven": ([0, 1, 2, 3, 6], [5, 4]),
    "one rank without a valid token": ([0, 1, 4, 5, 6], [2, 3]),
}


def _columns(*chosen: int) -> Tensor:
    """Positions `[B, T]` in the given quarters of the columns."""
    quarter = torch.arange(BATCH.width) * 4 // BATCH.width
    return torch.isin(quarter, torch.tensor(chosen)).expand(BATCH.mask.shape)


def _some_rows_whole() -> Tensor:
    """Contiguous halves, but row 1 lies on rank 0 alone and row 4 on rank 1 alone."""
    mine = _columns(0, 1).clone()
    mine[1], mine[4] = True, False
    return mine


# Which tokens rank 0 holds; rank 1 holds the others.
SHARDINGS = {
    "halves": _columns(0, 1),
    "zigzag": _columns(0, 3),
    "a rank without a sequence": _some_rows_whole(),
    "a rank without a valid token": BATCH.mask | (torch.arange(BATCH.width) < 2),
}


def reads_order(spec: pl.LossSpec) -> bool:
    """Whether a part reads `positions`; `cp_order_ranks` has such losses."""
    levels = {getattr(part, "level", "") for part in spec.correction}
    ordered = isinstance(spec.ratio, pl.SegmentRatio) or isinstance(spec.trust, pl.FutureKL)
    return ordered or "turn" in levels or isinstance(spec.aggregate, pl.TurnMean)


CP_SPECS = {
    name: spec
    for name, spec in {**PRESETS, **BY_AGGREGATE, **BY_CORRECTION}.items()
    if not reads_order(spec) and not (name in BY_AGGREGATE and not name.startswith("sequence"))
} | MIXTURES


def cp_cases() -> dict[str, tuple[Any, str, bool]]:
    """Presets under two shardings each (`test_ranks` has each of them under six cuts), the rest
    under one; layouts alternate.
    """
    cases = {}
    for i, (name, spec) in enumerate(CP_SPECS.items()):
        for j, sharding in enumerate(SHARDINGS):
            if (i - j) % len(SHARDINGS) in ((0, 2) if name in NAMED else (0,)):
                packed = bool((i + j) % 2)
                cases[f"{name}, {sharding}, {'packed' if packed else 'padded'}"] = (
                    spec,
                    sharding,
                    packed,
                )
    return cases


def held(sharding: str, rank: int) -> Tensor:
    """The tokens of `BATCH` that a rank holds, `[B, T]` bool."""
    return BATCH.inside & (SHARDINGS[sharding] if rank == 0 else ~SHARDINGS[sharding])


def shard(sharding: str, rank: int, packed: bool) -> Batch:
    """A rank's part of every sequence of `BATCH`, moved together;
    NaN in the padding that is left.
    """
    mine = held(sharding, rank)
    lengths = mine.sum(1)
    width = max(int(lengths.max()), 1)
    part = dataclasses.replace(BATCH, lengths=lengths, width=width)

    def gather(x: Tensor) -> Tensor:
        nothing = torch.nan if x.is_floating_point() else 0
        empty = torch.full((len(lengths), width), nothing, dtype=x.dtype)
        return empty.masked_scatter(part.inside, x[mine])

    part = part.map(gather, *part.token_shaped)
    return part.packed() if packed else part


def whole_gradient(gradients: list[Tensor], sharding: str, packed: bool) -> Tensor:
    """The ranks' gradients (as rows) back at the places their tokens have in `BATCH`."""
    whole = torch.zeros_like(BATCH.logp)
    for rank, gradient in enumerate(gradients):
        whole[held(sharding, rank)] = gradient[shard(sharding, rank, packed).inside]
    return whole


def _said(result: Any) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "dlogp": result.dlogp,
        "dentropy": result.dentropy,
        "metrics": result.records.all_reduce().compute(),
    }


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except pl.InputError as error:
        return str(error)
    return "no error"


def _value(batch: Batch, aggregate: Any, totals: pl.Totals, cp_group: Any = None) -> dict[str, Any]:
    values = batch.logp.clone().requires_grad_()
    layout = {
        "cu_seqlens": batch.cu_seqlens,
        "group_ids": batch.group_ids,
        "totals": totals,
        "cp_group": cp_group,
    }
    out = pl.value_loss(
        values, batch.advantages, batch.old_logp, batch.mask, aggregate=aggregate, **layout
    )
    (gradient,) = torch.autograd.grad(out.loss, values)
    return {
        "loss": out.loss.detach(),
        "dlogp": batch.as_rows(gradient),
        "metrics": out.metrics.all_reduce().compute(),
    }


def context_parallel(rank: int, cp: Any) -> dict[str, Any]:
    """Every loss with each sequence's tokens spread over both ranks."""
    said: dict[str, Any] = {}
    for name, (spec, sharding, packed) in cp_cases().items():
        part = shard(sharding, rank, packed)
        said[f"cp: {name}"] = _said(
            run(spec, part, step_totals(spec, part, cp_group=cp, dp_size=1), cp_group=cp)
        )
    for aggregate in VALUE_AGGREGATES:
        part = shard("zigzag", rank, packed=True)
        totals = pl.Totals.count(
            part.mask, cu_seqlens=part.cu_seqlens, group_ids=part.group_ids, cp_group=cp, dp_size=1
        )
        said[f"cp value: {aggregate}"] = _value(part, aggregate, totals, cp)
    for name, spec in CP_SPECS.items():
        if name.endswith(":keep") and "rollout_logp" in spec.reads:
            for holder in (0, 1):
                part = shard("halves", rank, packed=bool(holder))
                if rank == holder:  # a NaN of the engine's at this rank's last valid token
                    part.rollout_logp[tuple(part.mask.nonzero()[-1])] = torch.nan
                totals = step_totals(spec, part, cp_group=cp, dp_size=1)
                said[f"cp nan: {name}, {holder}"] = _said(run(spec, part, totals, cp_group=cp))
    per_sequence = dataclasses.replace(
        shard("halves", rank, packed=True),
        advantages=torch.linspace(-2, 2, 7, dtype=torch.float64).unsqueeze(1),
    )
    said["cp per sequence"] = _said(run(PRESETS["gspo"], per_sequence, "local", cp_group=cp))
    part = shard("halves", rank, packed=False)
    said["cp turn"] = _error(lambda: run(PRESETS["gspo_turn"], part, "local", cp_group=cp))
    return said


def data_parallel(rank: int) -> dict[str, Any]:
    """Every loss with other sequences on each rank, and gradients averaged as DDP does."""
    said: dict[str, Any] = {}
    for split, rows in DP_ROWS.items():
        part = BATCH.rows(rows[rank])
        for name, spec in {
            **PRESETS,
            **BY_CORRECTION,
            "PromptMean": pl.LossSpec(aggregate=pl.PromptMean()),
        }.items():
            said[f"dp: {name}, {split}"] = _said(run(spec, part, step_totals(spec, part)))
        for aggregate in VALUE_AGGREGATES:
            totals = pl.Totals.count(part.mask, group_ids=part.group_ids)
            said[f"dp value: {aggregate}, {split}"] = _value(part, aggregate, totals)
    return said


def counts(rank: int, cp: Any, alone: Any) -> dict[str, Any]:
    """Totals counted over each kind of group, and the errors of calls that leave out a needed
    argument.
    """

    def numbers(totals: pl.Totals) -> list[int]:
        return [int(totals.tokens), int(totals.sequences), totals.dp_size]

    part, rows = shard("halves", rank, packed=False), BATCH.rows(DP_ROWS["uneven"][rank])
    return {
        "count cp": numbers(pl.Totals.count(part.mask, cp_group=cp)),
        "count cp and group": numbers(pl.Totals.count(part.mask, cp_group=cp, group=alone)),
        "count dp": numbers(pl.Totals.count(rows.mask)),
        "count dp by group": numbers(pl.Totals.count(rows.mask, group=cp, dp_size=1)),
        "count alone": numbers(pl.Totals.count(rows.mask, group=alone)),
        "error missing": _error(lambda: run(PRESETS["ppo"], rows)),
        "error missing value": _error(
            lambda: pl.value_loss(rows.logp, rows.advantages, rows.old_logp, rows.mask)
        ),
        "error no group": _error(lambda: pl.Totals.count(part.mask, cp_group=alone)),
        "local": run(PRESETS["ppo"], rows, "local").loss,
    }


def work(rank: int, folder: str) -> None:
    """The body of each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    alone = [dist.new_group([r]) for r in (0, 1)][rank]
    world = dist.group.WORLD
    said = {**context_parallel(rank, world), **data_parallel(rank), **counts(rank, world, alone)}
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
