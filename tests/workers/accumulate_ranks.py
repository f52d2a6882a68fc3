"""The work of two gloo processes with `accumulate`, for `test_accumulate`, which reads their
numbers from a file.

Nothing is asserted here: a rank that stopped at a failed assertion would leave the other waiting.
Gradients of a rank have the places of its tokens in `BATCH`, so that the ranks' gradients add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    make_batch,
    with_streams,
)

BATCH = make_batch(seed=10)
WHERE = torch.arange(BATCH.mask.numel()).view(BATCH.mask.shape)
# Rows and layout of each micro-batch of each rank.
Share = list[tuple[list[int], str]]
SHARES: dict[str, tuple[Share, Share]] = {
    "different numbers": (
        [([0], "padded"), ([1, 3], "packed"), ([2], "padded")],
        [([6, 4, 5], "packed")],
    ),
    "a rank without a valid token": (
        [([0, 6], "packed"), ([1, 4, 5], "padded")],
        [([2], "packed"), ([3], "padded"), ([], "padded")],
    ),
}
MEASURED = {name: spec for name, spec in BY_CORRECTION.items() if spec.needs_statistics}
ON_RANKS = (
    "Band(0.8,1.25):renormalise",
    "OPSM(0.01):drop_sequence",
    "Truncate(1.1)+SelfNormalise():keep",
)
PROMPT = {name: BY_AGGREGATE[f"token:{name}()"] for name in ("PromptMean", "WeightMean")}
# On ranks the presets, which measure by covariances, and one loss of each other kind that measures.
SPECS = {**NAMED, **PROMPT, **{name: MEASURED[name] for name in ON_RANKS}}
FEW = ("ppo", "gspo", "gspo_turn", "clip_cov", "kl_cov", "measured", *PROMPT, *ON_RANKS)
DP_CASES = [
    (name, case) for case, names in zip(SHARES, (SPECS, FEW), strict=True) for name in names
]
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
    "all_to_all",
)


def micro_batch(rows: list[int], layout: str, columns: Any = slice(None)) -> dict[str, Any]:
    """Rows of `BATCH` as a trainer would hold them, and of each only `columns`. `where`: the
    tokens' places in `BATCH`.
    """
    part = BATCH.rows(rows).map(lambda x: x[:, columns], *BATCH.token_shaped)
    inside, where = BATCH.inside[rows][:, columns], WHERE[rows][:, columns]
    tensors = {**part.kwargs, "where": where, "positions": where % BATCH.width}
    if layout == "packed":
        tensors = {
            k: x[inside] if isinstance(x, Tensor) and x.shape == inside.shape else x
            for k, x in tensors.items()
        }
        tensors["cu_seqlens"] = torch.nn.functional.pad(inside.sum(1).cumsum(0), (1, 0))
    return {"current": tensors.pop("logp"), **with_streams(MIXTURES["tokens"], tensors)}


def micro_batches(share: Share, columns: Any = slice(None)) -> list[dict[str, Any]]:
    return [micro_batch(rows, layout, columns) for rows, layout in share]


def current(micro: pl.MicroBatch) -> Tensor:
    """A stand-in for the model's forward."""
    x: Tensor = micro["current"]
    return x


def taken(step: pl.Accumulation) -> dict[str, Any]:
    """Loss, gradients and metrics of a step; `parts`,
    the loss and the largest gradient of each micro-batch.
    """
    gradients = torch.zeros(2, BATCH.mask.numel(), dtype=torch.float64)
    parts: list[tuple[float, float]] = []
    for micro in step:
        logp, entropy = (micro[name].clone().requires_grad_() for name in ("current", "entropy"))
        divergence = micro["divergence"] + 4 * (entropy - entropy.detach())  # as in `cases.run`
        loss = micro.loss(logp, entropy=entropy, divergence=divergence)
        both = torch.autograd.grad(loss, (logp, entropy), allow_unused=True, materialize_grads=True)
        both = [x.detach() for x in both]  # zeros that require a gradient, before torch 2.11
        for gradient, x in zip(gradients, both, strict=True):
            gradient[micro["where"].reshape(-1)] += x.reshape(-1)
        parts.append(
            (
                float(loss.detach()),
                max((float(x.abs().max()) for x in both if x.numel()), default=0.0),
            )
        )
    dlogp, dentropy = gradients.view(2, *BATCH.mask.shape)
    metrics = step.reduce_metrics().compute()
    return {
        "loss": sum(p[0] for p in parts),
        "dlogp": dlogp,
        "dentropy": dentropy,
        "metrics": metrics,
        "parts": parts,
    }


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each collective of torch.distributed is called.
    Gathering an object counts as one call.
    """
    calls: Counter[str] = Counter()

    def spy(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return called

    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    with patch.multiple(
        dist, **{name: spy(name, original) for name, original in originals.items()}
    ):
        yield calls


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except pl.InputError as error:
        return str(error)
    return "no error"


def data_parallel(rank: int, alone: Any) -> dict[str, Any]:
    """Every loss with other sequences on each rank, and gradients averaged as DDP does."""
    said: dict[str, Any] = {}
    for name, case in DP_CASES:
        said[f"dp: {name}, {case}"] = taken(
            pl.accumulate(SPECS[name], micro_batches(SHARES[case][rank]), logp=current)
        )
    mine = micro_batches(SHARES["different numbers"][rank])
    said["dp summed"] = taken(pl.accumulate(PRESETS["dapo"], mine, dp_size=1))
    said["dp alone"] = taken(pl.accumulate(PRESETS["clip_cov"], mine, group=alone, logp=current))
    said["dp critic"] = _critic(
        pl.accumulate(MEASURED["Band(0.8,1.25):renormalise"], mine, logp=current)
    )
    run_on: list[int] = []
    step = pl.accumulate(
        PRESETS["clip_cov"],
        mine,
        logp=lambda micro: run_on.append(int(micro["mask"].sum())) or current(micro),
    )
    said["forwards"] = {
        "tokens": run_on,
        "number": len(step),
        "last": [micro.is_last for micro in step],
    }
    return said


def _critic(step: pl.Accumulation) -> dict[str, Any]:
    """The value loss of the step's micro-batches, by its plain counts,
    though the policy's totals were measured.
    """
    loss = 0.0
    for micro in step:
        layout = {"cu_seqlens": micro["cu_seqlens"], "totals": step.counts}
        loss += float(
            pl.value_loss(
                micro["current"], micro["advantages"], micro["old_logp"], micro["mask"], **layout
            ).loss
        )
    return {"loss": loss, "tokens": int(step.counts.tokens), "measured": int(step.totals.tokens)}


def context_parallel(rank: int, cp: Any, alone: Any) -> dict[str, Any]:
    """Every loss with other columns of each sequence on each rank:
    the first and last quarter, and the two between.
    """
    quarter = torch.arange(BATCH.width) * 4 // BATCH.width
    columns = torch.isin(quarter, torch.tensor([0, 3] if rank == 0 else [1, 2]))
    mine = micro_batches([([5, 0], "packed"), ([2], "padded"), ([6, 3, 1, 4], "padded")], columns)
    said = {
        f"cp: {name}": taken(pl.accumulate(spec, mine, cp_group=cp, dp_size=1, logp=current))
        for name, spec in SPECS.items()
    }
    said["cp and group"] = taken(pl.accumulate(PRESETS["gspo"], mine, cp_group=cp, group=alone))
    with counted() as calls:
        pl.accumulate(
            PRESETS["gspo"], [{**m, "group_ids": None} for m in mine], cp_group=cp, group=alone
        )
    said["collectives cp and group"] = dict(calls)
    return said


def collectives(rank: int) -> dict[str, Any]:
    """Which collectives a step makes, and when."""
    said: dict[str, Any] = {}
    mine = micro_batches(SHARES["different numbers"][rank])
    without = [{**m, "group_ids": None} for m in mine]
    for case, spec, given in (
        ("plain", PRESETS["dapo"], without),
        ("with groups", PROMPT["PromptMean"], mine),
    ):
        with counted() as calls:
            step = pl.accumulate(spec, given)
        said[f"collectives {case}"] = dict(calls)
        with counted() as calls:
            for micro in step:
                micro.loss(current(micro))
        said[f"collectives of the losses, {case}"] = dict(calls)
    return said


def errors(rank: int) -> dict[str, Any]:
    """A fault on one rank raises an error on both."""
    mine = micro_batches(SHARES["different numbers"][rank])
    without = [{**m, "group_ids": None} for m in mine]
    ppo = PRESETS["ppo"]
    return {
        "error none": _error(lambda: pl.accumulate(ppo, [] if rank == 1 else mine)),
        "error none, measured": _error(
            lambda: pl.accumulate(PRESETS["kl_cov"], [] if rank == 0 else mine, logp=current)
        ),
        "error groups": _error(lambda: pl.accumulate(ppo, without if rank == 0 else mine)),
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
    said = {
        **data_parallel(rank, alone),
        **context_parallel(rank, dist.group.WORLD, alone),
        **collectives(rank),
        **errors(rank),
    }
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
