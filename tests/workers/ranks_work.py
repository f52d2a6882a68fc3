"""The work of the gloo processes of `test_ranks`. Nothing is asserted here: a rank that stopped
would leave the others waiting.

Four processes are started once. All four meet first; then two of them are a world of two, and
another is a world of its own. Gradients, losses and metrics of all cases of a world travel at its
end, in one all-reduce each.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from ranks_cases import (
    CUTS,
    GLOBAL,
    POLICY_INPUTS,
    TOLERANCE,
    VALUE_INPUTS,
    Cut,
    flat,
    only,
    parameters,
    part,
    placed,
    predict,
    specs_of,
)
from ranks_more import (
    COUNTED,
    PER_SEQUENCE,
    PER_TOKEN,
    counted,
    error,
    optimal_baseline,
    warned,
    where,
)
from started import run_ranks, started_once
from torch import Tensor

import policyloss as pl
from cases import label

WORLDS = (1, 2, 4)


def told(
    factory: pytest.TempPathFactory, body: Callable[[int, str], None], count: int, imports: str
) -> Path:
    """The folder with the results of `count` processes.
    Parallel test workers share one set of them: the first starts it.
    imports: modules that the processes need in addition to the library.
    """

    def start(place: Path) -> None:
        run_ranks(body, str(place), count=count, imports=imports)

    return started_once(factory, f"{body.__module__}_{body.__name__}", start)


class Groups:
    """The process groups of a cut: data parallel (other sequences) and context parallel (other
    tokens of the same sequences).
    """

    def __init__(self, world: int, rank: int) -> None:
        self.world, self.rank = world, rank
        self.pairs: list[Any] = []
        if world == 4:
            made = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
            self.pairs = [
                made[(0, 1) if rank < 2 else (2, 3)],
                made[(0, 2) if rank % 2 == 0 else (1, 3)],
            ]

    def of(self, cut: Cut) -> dict[str, Any]:
        """`group` and `cp_group`, as `Totals.count` and `measure` take them."""
        if len(cut.shards) == 1:
            return {"group": None, "cp_group": None}
        if len(cut.rows) == 1:
            return {"group": None, "cp_group": dist.group.WORLD}
        return {"group": self.pairs[1], "cp_group": self.pairs[0]}


class Share:
    """This rank's part of the batch under a cut: its micro-batches with the model's numbers,
    and the totals of the step.
    """

    def __init__(self, cut: Cut, groups: Groups, dtype: torch.dtype) -> None:
        rows, held = cut.place(groups.rank)
        self.model = parameters(dtype)
        self.micro = [part(r, held, cut.packed, dtype) for r in rows]
        self.predicted = [predict(self.model, micro["ids"]) for micro in self.micro]
        self.all = part([row for r in rows for row in r], held, True, dtype)
        with torch.no_grad():
            self.all_predicted = predict(self.model, self.all["ids"])
        self.groups, self.cut = groups.of(cut), cut
        self.dp_size = 1 if cut.summed else None
        counted = only(self.all, ("mask", "cu_seqlens", "group_ids", "weights"))
        self.counts = pl.Totals.count(**counted, **self.groups, dp_size=self.dp_size)

    def totals(self, spec: pl.LossSpec) -> pl.Totals:
        """Counted once for all losses, but measured for one that needs more than counts."""
        if not spec.needs_statistics:
            return self.counts
        logp, entropy, _ = self.all_predicted
        given = {**only(self.all, POLICY_INPUTS), "entropy": entropy, **self.where(self.all)}
        given["divergence"] = entropy.square()
        return pl.measure(spec, logp, **given, **self.groups, dp_size=self.dp_size)

    def where(self, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"positions": tensors["positions"]} if self.groups["cp_group"] is not None else {}

    def step(
        self, call: Callable[[int, dict[str, Any]], pl.LossOutput]
    ) -> tuple[Tensor, Tensor, pl.Metrics]:
        """Forward and backward of every micro-batch: the summed loss,
        the gradient of the model, the merged metrics.
        """
        losses, gradients, metrics = [], [], pl.Metrics({})
        for i, micro in enumerate(self.micro):
            out = call(i, micro)
            gradient = torch.autograd.grad(
                out.loss, self.model, retain_graph=True, allow_unused=True
            )
            losses.append(out.loss.detach())
            gradients.append(flat(gradient, self.model))
            metrics = metrics + out.metrics
        return sum(losses[1:], losses[0]), sum(gradients[1:], gradients[0]), metrics

    def policy(self, spec: pl.LossSpec) -> tuple[Tensor, Tensor, pl.Metrics]:
        totals, cp_group = self.totals(spec), self.groups["cp_group"]

        def call(i: int, micro: dict[str, Any]) -> pl.LossOutput:
            logp, entropy, _ = self.predicted[i]
            given = {**only(micro, POLICY_INPUTS), **self.where(micro)}
            # Any function of the model, token by token, stands for the divergence of a teacher.
            given |= {"entropy": entropy, "divergence": entropy.square()}
            return pl.policy_loss(spec, logp, **given, totals=totals, cp_group=cp_group)

        return self.step(call)

    def value(self, aggregate: Any, kind: Any) -> tuple[Tensor, Tensor, pl.Metrics]:
        def call(i: int, micro: dict[str, Any]) -> pl.LossOutput:
            given = {
                "aggregate": aggregate,
                "totals": self.counts,
                "cp_group": self.groups["cp_group"],
            }
            return pl.value_loss(
                self.predicted[i][2],
                **only(micro, VALUE_INPUTS),
                kind=kind,
                huber_delta=0.7,
                **given,
            )

        return self.step(call)


def cut_steps(groups: Groups, dtype: str, every_pair: bool) -> dict[str, Any]:
    """The losses under every cut of this world, reduced over its ranks as the engine would."""
    names: list[str] = []
    losses: list[Tensor] = []
    gradients: list[Tensor] = []
    records: dict[str, Any] = {}

    def keep(name: str, cut: Cut, result: tuple[Tensor, Tensor, pl.Metrics]) -> None:
        share = 1.0 if cut.summed else 1 / cut.ranks
        names.append(name)
        losses.append(result[0] * share)
        gradients.append(result[1] * share)
        records.update({f"{name}|{metric}": record for metric, record in result[2].items()})

    for cut_name, cut in CUTS.items():
        specs = specs_of(cut_name, dtype, every_pair)
        if cut.ranks != groups.world or not specs:
            continue
        share = Share(cut, groups, getattr(torch, dtype))
        for name, spec in specs.items():
            keep(f"{cut_name}|{name}", cut, share.policy(spec))
        for aggregate in GLOBAL:
            for kind in ("mse", "huber"):
                keep(
                    f"{cut_name}|value {kind}:{label(aggregate)}", cut, share.value(aggregate, kind)
                )
    loss, gradient = torch.stack(losses), torch.stack(gradients)
    if groups.world > 1:
        dist.all_reduce(loss)
        dist.all_reduce(gradient)
    metrics = pl.Metrics(records).all_reduce()
    if groups.rank:  # the first one writes for all
        return {}
    by_case: dict[str, dict[str, float]] = {name: {} for name in names}
    for name, value in metrics.compute().items():
        case, _, metric = name.rpartition("|")
        by_case[case][metric] = value
    return {
        name: {"loss": loss[i], "gradient": gradient[i], "metrics": by_case[name]}
        for i, name in enumerate(names)
    }


def advantages(groups: Groups) -> dict[str, Tensor]:
    """Every estimator that looks beyond a sequence's tokens on this rank,
    back at the places of the whole batch.
    """
    said: dict[str, Tensor] = {}
    for cut_name, cut in CUTS.items():
        if cut.ranks != groups.world or groups.world == 1:
            continue
        micro, held = cut.place(groups.rank)
        rows = [row for r in micro for row in r]
        mine, there = (
            part(rows, held, cut.packed, torch.float64),
            where(groups.of(cut), len(cut.rows)),
        )
        for name, estimate in PER_TOKEN.items():
            said[f"{cut_name}|{name}"] = placed(estimate(mine, there), rows, held)
        for name, estimate in PER_SEQUENCE.items():
            of_rows = estimate(mine, there)
            said[f"{cut_name}|{name}"] = of_rows.new_zeros(8).index_copy_(
                0, torch.tensor(rows), of_rows
            ) / len(cut.shards)
        if len(cut.shards) == 1:
            padded = part(rows, held, False, torch.float64)
            said[f"{cut_name}|optimal_token_baseline"] = placed(
                optimal_baseline(padded, there), rows, held
            )
    for result in said.values():
        dist.all_reduce(result)
    return said


def collectives(groups: Groups) -> dict[str, Any]:
    """What each kind of loss sends under data parallel and under context parallel."""
    said: dict[str, Any] = {}
    for cut in ("DP", "CP, contiguous"):
        share = Share(CUTS[cut], groups, torch.float64)
        mine = {**only(share.micro[0], POLICY_INPUTS), **share.where(share.micro[0])}
        for name, spec in COUNTED.items():
            logp = share.predicted[0][0].detach().requires_grad_()
            given = {**mine, "totals": share.totals(spec), "cp_group": share.groups["cp_group"]}
            said[f"{cut}|{name}"] = counted(
                lambda s=spec, x=logp, g=given: pl.policy_loss(s, x, **g).loss, logp
            )
    return said


def refusals(groups: Groups) -> dict[str, Any]:
    """The errors of calls that leave out arguments they need on several ranks."""
    share = Share(
        CUTS["CP, contiguous" if groups.world == 2 else "CP over 4 ranks"], groups, torch.float64
    )
    mine, logp, values = share.micro[0], share.predicted[0][0], share.predicted[0][2]
    policy = partial(pl.policy_loss, logp=logp, **only(mine, POLICY_INPUTS))
    layout = only(mine, ("mask", "cu_seqlens"))
    rewards = only(mine, ("rewards", "group_ids"))
    return {
        "policy_loss": error(lambda: policy(pl.preset("grpo"))),
        "value_loss": error(lambda: pl.value_loss(values, **only(mine, VALUE_INPUTS))),
        "aggregate_tokens": error(
            lambda: pl.aggregate_tokens(logp, aggregate=pl.TokenMean(), **layout)
        ),
        "turns": error(
            lambda: policy(
                pl.preset("gspo_turn"),
                totals=share.counts,
                cp_group=dist.group.WORLD,
                turn_ids=None,
            )
        ),
        "statistics": error(lambda: policy(pl.preset("clip_cov"), totals=share.counts)),
        "warned grpo": warned(lambda: pl.advantage.grpo(**rewards)),
        "warned grpo local": warned(lambda: pl.advantage.grpo(**rewards, group="local")),
        "warned whiten": warned(lambda: pl.whiten(mine["advantages"], mine["mask"])),
        "warned whiten local": warned(
            lambda: pl.whiten(mine["advantages"], mine["mask"], group="local")
        ),
    }


def world(size: int, rank: int, folder: str, every_pair: bool) -> None:
    """Everything that is done in a world of `size` ranks."""
    store = f"file://{folder}/store{size}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    groups = Groups(size, rank)
    said: dict[str, Any] = {dtype: cut_steps(groups, dtype, every_pair) for dtype in TOLERANCE}
    if size > 1:
        said.update(advantages=advantages(groups), refusals=refusals(groups))
    if size == 2:
        said.update(collectives=collectives(groups))
    if rank == 0:
        torch.save(said, Path(folder) / f"world{size}.pt")
    dist.destroy_process_group()


def work(process: int, folder: str, every_pair: bool = False) -> None:
    """The body of each of the four processes."""
    torch.set_num_threads(1)
    world(4, process, folder, every_pair)
    if process < 2:
        world(2, process, folder, every_pair)
    elif process == 2:
        world(1, 0, folder, every_pair)


def work_on_every_pair(process: int, folder: str) -> None:
    """The same with every preset and every aggregation under each full cut."""
    work(process, folder, every_pair=True)
