"""The work of gloo processes with the head, for `test_head_ranks`, which reads each case's numbers
from a file.

Nothing is asserted here: a rank that stopped at a failed assertion would leave the others waiting.
`three` is the body of three processes; that of two, `head_ranks_train.two`, trains models as well.
Each is started once, because that takes longest.
Legend: V vocabulary entries, V_r of them on this rank.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from head_cases import (
    LOGPROB_PLANS,
    LOSS_PLANS,
    HeadBatch,
    contract,
    generator,
    leaf,
    make_head_batch,
)
from torch import Tensor
from two_ranks import SHARDINGS, held

import policyloss as pl
from cases import PRESETS, layout_of
from policyloss.head import plans

VOCAB, SIZE = 33, 8
FULL = pl.LossSpec(
    ratio=pl.SequenceRatio(),
    trust=pl.Clip(0.2, 0.28, dual=3.0),
    correction=(pl.Truncate(1.1),),
    kl=pl.KL("k3", 0.1),
    entropy_coef=0.05,
    aggregate=pl.SeqMeanTokenMean(),
)

TREE_SPEC = FULL.replace(ratio=pl.TokenRatio())


def given(batch: HeadBatch) -> dict[str, Any]:
    """The arguments of the loss other than hidden states, weight and ids; on the CPU, like these
    processes.
    """
    return {
        name: x
        for name, x in batch.tokens.kwargs.items()
        if name not in ("logp", "entropy", "divergence")
    }


def on_cpu(batch: HeadBatch) -> HeadBatch:
    return dataclasses.replace(
        batch, hidden=batch.hidden.cpu(), weight=batch.weight.cpu(), ids=batch.ids.cpu()
    )


# The tokens of `two_ranks.BATCH`, whose shardings are used here: a row without tokens, one that is
# masked, holes in the mask.
BATCH = on_cpu(make_head_batch(seed=10, vocab=VOCAB, size=SIZE, dtype=torch.float64))


class Cut(NamedTuple):
    """A vocabulary in shards of these `sizes`; every logit of shard `dead` (if any) is −inf,
    by its bias.
    """

    sizes: tuple[int, ...]
    dead: int | None = None

    def part(self, rank: int) -> slice:
        first = sum(self.sizes[:rank])
        return slice(first, first + self.sizes[rank])

    @property
    def bias(self) -> Tensor:
        bias = 0.5 * torch.randn(VOCAB, generator=generator(5), dtype=torch.float64)
        if self.dead is not None:
            bias[self.part(self.dead)] = -torch.inf
        return bias

    def batch(self, **scale: Any) -> HeadBatch:
        """`BATCH` with tokens at both ends of every shard, none of them impossible; the frozen
        policies keep their distance.
        """
        parts = [self.part(r) for r in range(len(self.sizes)) if r != self.dead]
        edges = torch.tensor([at for p in parts for at in (p.start, p.stop - 1)])
        ids = BATCH.ids.clone()
        if self.dead is not None:
            p = self.part(self.dead)
            ids[(ids >= p.start) & (ids < p.stop)] = edges[0]
        places = BATCH.tokens.mask.nonzero()[::2]
        ids[places[:, 0], places[:, 1]] = edges.repeat(-(-len(places) // len(edges)))[: len(places)]
        logp = contract(BATCH.hidden, BATCH.weight, ids, bias=self.bias, **scale).logp
        shift = logp - contract(BATCH.hidden, BATCH.weight, BATCH.ids).logp
        names = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
        return dataclasses.replace(
            BATCH, ids=ids, tokens=BATCH.tokens.map(lambda x: (x + shift).clamp(max=-1e-3), *names)
        )


CUTS = {
    2: {"halves": Cut((17, 16)), "one entry and the rest": Cut((1, 32))},
    3: {
        "one tiny": Cut((20, 1, 12)),
        "a dead tiny one": Cut((20, 1, 12), dead=1),
        "the last dead": Cut((3, 25, 5), dead=2),
    },
}
FREE = {"ample": (1 << 30, 1 << 30), "scarce on one": (1 << 30, 64)}  # bytes, of each of two ranks
FIRST = {count: next(iter(cuts)) for count, cuts in CUTS.items()}
PER_TOKEN = torch.linspace(0.5, 1.5, BATCH.ids.numel(), dtype=torch.float64).view(BATCH.ids.shape)
SCALES: dict[str, dict[str, Any]] = {
    "plain": {},
    "per token": {"temperature": PER_TOKEN},
    "softcap": {"softcap": 5.0},
}
VOCABULARY_SPECS = {
    "ppo": PRESETS["ppo"],
    "gspo": PRESETS["gspo"],
    "kl": PRESETS["grpo"],
    "entropy": PRESETS["ppo"].replace(entropy_coef=0.05),
    "full": FULL,
}


def plan_cases(names: tuple[str, ...]) -> dict[str, str | pl.Plan]:
    """Each plan as it would be, and with windows of eight rows (and ten vocabulary entries),
    so that there are several.
    """
    return {**{n: n for n in names}, **{f"{n}, windows": pl.Plan(n, 8, 10) for n in names}}


def logprob_cases(first: bool) -> dict[str, dict[str, Any]]:
    """Every plan under every scale it has; but under other cuts than the first,
    small windows and no scale.
    """
    chosen = {"auto": "auto", **plan_cases(LOGPROB_PLANS)}
    found = {
        f"{p}, {s}": {"plan": plan, **scale}
        for p, plan in chosen.items()
        for s, scale in SCALES.items()
    }
    return {
        n: c
        for n, c in found.items()
        if not ("stash" in n and "softcap" in n) and (first or "windows, plain" in n)
    }


def loss_cases(first: bool) -> dict[str, tuple[pl.LossSpec, str | pl.Plan, dict[str, Any]]]:
    """One spec with everything in it under every plan and scale; under the first cut of a
    vocabulary, the others too.
    """
    cases: dict[str, tuple[pl.LossSpec, str | pl.Plan, dict[str, Any]]] = {}
    for plan, given_plan in plan_cases(LOSS_PLANS).items():
        cases[f"full, {plan}"] = FULL, given_plan, {}
    for spec in VOCABULARY_SPECS if first else ():
        cases |= {f"{spec}, {plan}": (VOCABULARY_SPECS[spec], plan, {}) for plan in LOSS_PLANS}
    cases |= {f"full, {scale}": (FULL, "auto", SCALES[scale]) for scale in ("per token", "softcap")}
    return cases


def upstream() -> tuple[Tensor, Tensor]:
    """A gradient for logp and one for the entropy; some are 0, as of clipped tokens."""
    g = generator(6)
    dlogp, dentropy = (
        torch.randn(BATCH.ids.shape, generator=g, dtype=torch.float64) for _ in range(2)
    )
    silent = torch.rand(BATCH.ids.shape, generator=g) < 0.3
    return dlogp.masked_fill(silent, 0), dentropy.masked_fill(silent, 0)


def numbers(value: Tensor, leaves: dict[str, Tensor], **more: Any) -> dict[str, Any]:
    """`value` and its gradient by name, with other results."""
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return {
        "value": value.detach(),
        **{f"d{n}": g for n, g in zip(leaves, gradients, strict=True)},
        **more,
    }


def sharded(cut: Cut, rank: int) -> dict[str, Tensor]:
    """The leaves of a rank: all hidden states, its own rows of weight and bias."""
    part = cut.part(rank)
    return {
        "hidden": leaf(BATCH.hidden),
        "weight": leaf(BATCH.weight[part]),
        "bias": leaf(cut.bias[part]),
    }


def weighted(out: Any) -> Tensor:
    dlogp, dentropy = upstream()
    total: Tensor = (out.logp * dlogp + out.entropy * dentropy).sum()
    return total


def head_logprobs(
    leaves: dict[str, Tensor], batch: HeadBatch, group: Any, **case: Any
) -> dict[str, Any]:
    out = pl.linear_logprobs(
        ids=batch.ids, entropy=True, mask=batch.tokens.mask, vocab_group=group, **leaves, **case
    )
    return numbers(weighted(out), leaves, logp=out.logp.detach(), entropy=out.entropy.detach())


def head_loss(
    spec: pl.LossSpec, leaves: dict[str, Tensor], batch: HeadBatch, **case: Any
) -> dict[str, Any]:
    out = pl.linear_policy_loss(spec, ids=batch.ids, **leaves, **{**given(batch), **case})
    seen = out.metrics.all_reduce() if "cp_group" in case else out.metrics
    return numbers(out.loss, leaves, logp=out.logp, entropy=out.entropy, metrics=seen.compute())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except pl.InputError as error:
        return str(error)
    return "no error"


def support_of(batch: HeadBatch) -> tuple[Tensor, Tensor]:
    """For each token its own id and some others: of every third token, those below 5 alone."""
    ids = batch.ids.reshape(-1, 1)
    entry, place = torch.arange(VOCAB), torch.arange(len(ids))[:, None]
    kept = torch.where(place % 3 == 0, entry < 5, (entry + place) % 4 == 0) | (entry == ids)
    return kept.nonzero()[:, 1], torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))


def tree_of(cut: Cut) -> tuple[HeadBatch, Tensor]:
    """The batch with its first sequence's beginning in two others, and an index of its states; the
    frozen policies keep their distance.
    """
    batch = cut.batch()
    index, ids = torch.arange(batch.ids.numel()).view(batch.ids.shape), batch.ids.clone()
    for row, depth in ((1, 3), (4, 5)):
        index[row, :depth], ids[row, : depth - 1] = index[0, :depth], ids[0, : depth - 1]
    states = batch.hidden.flatten(0, 1)[index]
    logp = contract(states, batch.weight, ids, bias=cut.bias).logp
    shift = logp - contract(batch.hidden, batch.weight, batch.ids, bias=cut.bias).logp
    names = ("logp", "old_logp", "rollout_logp", "ref_logp", "teacher_logp")
    tokens = batch.tokens.map(lambda x: (x + shift).clamp(max=-1e-3), *names)
    return dataclasses.replace(batch, ids=ids, tokens=tokens), index


def vocabulary(rank: int, ranks: int, group: Any) -> dict[str, Any]:
    """The vocabulary over all ranks."""
    said: dict[str, Any] = {}
    for name, cut in CUTS[ranks].items():
        first = name == FIRST[ranks]
        support = {"support": support_of(cut.batch())}
        for plan in LOGPROB_PLANS:
            said[f"support: {name}, {plan}"] = head_logprobs(
                sharded(cut, rank), cut.batch(), group, plan=plan, **support
            )
        call = {"totals": "local", "vocab_group": group, "plan": "one_pass"}
        said[f"support: {name}, loss"] = head_loss(
            FULL, sharded(cut, rank), cut.batch(), **call, **support
        )
        tree, index = tree_of(cut)
        for plan in LOSS_PLANS:
            call = {"totals": "local", "vocab_group": group, "plan": plan, "index": index}
            said[f"tree: {name}, {plan}"] = head_loss(TREE_SPEC, sharded(cut, rank), tree, **call)
        for case, arguments in logprob_cases(first).items():
            said[f"logprobs: {name}, {case}"] = head_logprobs(
                sharded(cut, rank), cut.batch(), group, **arguments
            )
        for case, (spec, plan, scale) in loss_cases(first).items():
            call = {"totals": "local", "vocab_group": group, "plan": plan, **scale}
            said[f"loss: {name}, {case}"] = head_loss(
                spec, sharded(cut, rank), cut.batch(**scale), **call
            )
    return said


def refusals(rank: int, ranks: int, group: Any) -> dict[str, Any]:
    """A vocabulary over all ranks, with ids it does not have, with no tokens,
    and without totals.
    """
    said: dict[str, Any] = {}
    cut = CUTS[ranks][FIRST[ranks]]
    batch, leaves = cut.batch(), sharded(cut, rank)
    row, column = batch.tokens.mask.nonzero()[5].tolist()
    call = {"totals": "local", "vocab_group": group}
    for stray in (-1, VOCAB):
        beyond = dataclasses.replace(batch, ids=batch.ids.clone())
        beyond.ids[row, column] = stray
        for name, plan in plan_cases(LOGPROB_PLANS).items():
            said[f"stray logprobs: {stray}, {name}"] = error_of(
                partial(head_logprobs, leaves, beyond, group, plan=plan)
            )
        for plan in LOSS_PLANS:
            said[f"stray loss: {stray}, {plan}"] = error_of(
                partial(head_loss, PRESETS["ppo"], leaves, beyond, plan=plan, **call)
            )
    nothing = batch.with_tokens(mask=batch.tokens.mask & False)
    for plan in LOSS_PLANS:
        said[f"nothing: {plan}"] = head_loss(FULL, leaves, nothing, plan=plan, **call)
    sick = {
        **leaves,
        "bias": leaf(
            torch.where(torch.arange(cut.sizes[rank]) == 0, torch.nan, 0.0)
            if rank == 1
            else leaves["bias"]
        ),
    }
    for plan in LOSS_PLANS:
        said[f"nan: {plan}"] = head_loss(PRESETS["ppo"], sick, batch, plan=plan, **call)
    said["no totals"] = error_of(
        partial(head_loss, PRESETS["ppo"], leaves, batch, vocab_group=group)
    )
    return said


def agreement(rank: int, group: Any) -> dict[str, Any]:
    """Shards, and memory, that alone would give ranks other windows or plans:
    4 KiB of logits are 16 rows of 32 entries.
    """
    cut = CUTS[2]["one entry and the rest"]
    batch, said = cut.batch(), {}
    plans.CPU_BYTES = 16 * 32 * 8
    for memory, free in FREE.items():
        system = {"SC_AVPHYS_PAGES": free[rank], "SC_PAGE_SIZE": 1}
        for name in ("ppo", "gspo"):
            for plan in ("auto", *LOSS_PLANS) if memory == "ample" else ("auto",):
                call = {"totals": "local", "vocab_group": group, "plan": plan}
                case = f"{name}, {plan}, {memory}"
                with mock.patch.object(os, "sysconf", system.__getitem__):
                    chosen = pl.explain_plan(
                        PRESETS[name],
                        ids=batch.ids,
                        **sharded(cut, rank),
                        **{**given(batch), **call},
                    )
                    said[f"agreement: {case}"] = head_loss(
                        PRESETS[name], sharded(cut, rank), batch, **call
                    )
                said[f"plan: {case}"] = [chosen.name, chosen.rows]
    leaves, call = sharded(cut, rank), {"totals": "local", "vocab_group": group}
    fewer = batch.rows([0, 1]) if rank == 0 else batch
    said["fewer"] = error_of(
        partial(head_loss, PRESETS["ppo"], {**leaves, "hidden": leaf(fewer.hidden)}, fewer, **call)
    )
    empty = (
        {**leaves, "weight": leaves["weight"][:0], "bias": leaves["bias"][:0]}
        if rank == 1
        else leaves
    )
    said["empty"] = error_of(partial(head_loss, PRESETS["ppo"], empty, batch, **call))
    return said


def shard(sharding: str, rank: int, packed: bool, batch: HeadBatch = BATCH) -> HeadBatch:
    """A rank's part of every sequence, moved together; NaN and −100 in the padding that is left."""
    mine = held(sharding, rank)
    lengths = mine.sum(1)
    tokens = dataclasses.replace(batch.tokens, lengths=lengths, width=max(int(lengths.max()), 1))

    def gather(x: Tensor) -> Tensor:
        nothing = 0 if x.dtype == torch.bool else -100 if x.dtype == torch.int64 else torch.nan
        room = torch.full((*tokens.inside.shape, *x.shape[2:]), nothing, dtype=x.dtype)
        room[tokens.inside] = x[mine]
        return room

    hidden, ids = gather(batch.hidden), gather(batch.ids)
    part = HeadBatch(hidden, batch.weight, ids, tokens.map(gather, *tokens.token_shaped))
    return part.packed() if packed else part


CP_TOKEN = {
    "ppo, seq-mean": PRESETS["ppo"].replace(aggregate=pl.SeqMeanTokenMean()),
    "seq_mask_tis": PRESETS["seq_mask_tis"],
    "seq_tis": PRESETS["seq_tis"],
    "full by token": FULL.replace(ratio=pl.TokenRatio()),
}
CP_SEQUENCE = {"gspo": PRESETS["gspo"], "full": FULL, "opsm": PRESETS["opsm"]}
ZEROS = BATCH.with_tokens(
    advantages=BATCH.tokens.advantages.masked_fill(torch.arange(BATCH.tokens.width) % 3 == 0, 0)
)


def cp_cases() -> dict[str, tuple[pl.LossSpec, str | pl.Plan, str, bool]]:
    """Every spec under every sharding, and under every plan it has in two of them;
    layouts alternate.
    """
    token = {"auto": "auto", **plan_cases(LOSS_PLANS)}
    sequence = {name: plan for name, plan in token.items() if "one_pass" not in name}
    cases: dict[str, tuple[pl.LossSpec, str | pl.Plan, str, bool]] = {}
    for specs, allowed in ((CP_TOKEN, token), (CP_SEQUENCE, sequence)):
        for name, spec in specs.items():
            for i, (said, plan) in enumerate(allowed.items()):
                for j, sharding in enumerate(SHARDINGS):
                    if (i + j) % 2 == 0:
                        packed = bool((i + j) // 2 % 2)
                        cases[f"{name}, {said}, {sharding}, {'packed' if packed else 'padded'}"] = (
                            spec,
                            plan,
                            sharding,
                            packed,
                        )
    return cases


def counted(part: HeadBatch, **groups: Any) -> pl.Totals:
    return pl.Totals.count(part.tokens.mask, **layout_of(part.tokens), **groups)


def plain(part: HeadBatch) -> dict[str, Tensor]:
    return {"hidden": leaf(part.hidden), "weight": leaf(part.weight)}


def context_parallel(rank: int, cp: Any) -> dict[str, Any]:
    """Each sequence's tokens over both ranks."""
    said: dict[str, Any] = {}
    for name, (spec, plan, sharding, packed) in cp_cases().items():
        part = shard(sharding, rank, packed)
        call = {"totals": counted(part, cp_group=cp, dp_size=1), "cp_group": cp, "plan": plan}
        said[f"cp: {name}"] = head_loss(spec, plain(part), part, **call)
    part = shard("zigzag", rank, packed=True)
    for name in ("ppo, seq-mean", "gspo"):
        spec = {**CP_TOKEN, **CP_SEQUENCE}[name]
        call = {"totals": counted(part, cp_group=cp), "cp_group": cp}
        said[f"cp mean: {name}"] = head_loss(spec, plain(part), part, **call)
        plan = pl.explain_plan(spec, ids=part.ids, **plain(part), **given(part), **call)
        said[f"cp plan: {name}"] = [plan.name, plan.reason]
    call = {"totals": "local", "cp_group": cp, "plan": "one_pass"}
    said["cp one pass"] = error_of(partial(head_loss, PRESETS["gspo"], plain(part), part, **call))
    said["cp no totals"] = error_of(
        partial(head_loss, PRESETS["ppo"], plain(part), part, cp_group=cp)
    )
    for sharding in SHARDINGS:
        part = shard(sharding, rank, packed=False, batch=ZEROS)
        call = {
            "totals": counted(part, cp_group=cp, dp_size=1),
            "cp_group": cp,
            "skip_zero_advantage": True,
        }
        said[f"cp skip: {sharding}"] = head_loss(
            CP_TOKEN["ppo, seq-mean"], plain(part), part, **call
        )
    return said


def joined(rank: int, ranks: int, folder: str) -> Any:
    """The group of all processes, which this one joins."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return dist.group.WORLD


def three(rank: int, folder: str) -> None:
    """The body of each of three processes."""
    from divergence_ranks import over_ranks  # which is made of this module

    world = joined(rank, 3, folder)
    said = {**vocabulary(rank, 3, world), **refusals(rank, 3, world), **over_ranks(rank, 3, world)}
    torch.save(said, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
