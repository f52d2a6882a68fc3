"""The work of three gloo processes with a divergence over a sharded vocabulary, for
`test_head_ranks`; and the same on one process, to compare with.
"""

from __future__ import annotations

from typing import Any

import torch
from head_cases import leaf
from head_ranks import BATCH, CUTS, FIRST, Cut, given, numbers, upstream
from torch import Tensor

import policyloss as pl

KINDS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "reverse": {"kind": "reverse"},
    "jsd": {"kind": "jsd", "beta": 0.3},
    "skewed": {"kind": "skew_reverse", "beta": 0.9},
    "generalised": {"kind": "generalised", "top": "teacher", "k": 5},
    "union": {"kind": "reverse", "top": "union", "k": 4},
    "intersection": {"kind": "forward", "rest": "drop", "top": "intersection", "k": 6},
    "known": {"kind": "reverse"},
}
CASES = {f"{kind}, {plan}": (kind, plan) for kind in KINDS for plan in ("recompute", "stash")}
SPEC = pl.LossSpec(kl=pl.Divergence("jsd", 0.4, beta=0.3), entropy_coef=0.01)


def teacher_of(kind: str, part: slice) -> pl.Teacher | pl.TopK:
    """The teacher of a rank: its entries of the weight; or the same few entries on every rank."""
    teacher = BATCH.teacher()
    if kind != "known":
        return pl.Teacher(teacher.hidden, teacher.weight[part], temperature=teacher.temperature)
    logp = ((teacher.hidden @ teacher.weight.T) / teacher.temperature).log_softmax(-1)
    best = logp.topk(5, -1)
    return pl.TopK.sorted(best.indices, best.values)


def leaves_of(cut: Cut, part: slice) -> dict[str, Tensor]:
    bias = torch.where(cut.bias == -torch.inf, 0, cut.bias)
    return {
        "hidden": leaf(BATCH.hidden),
        "weight": leaf(BATCH.weight[part]),
        "bias": leaf(bias[part]),
    }


def divergences(cut: Cut, part: slice, group: Any) -> dict[str, Any]:
    """Every case, over the entries of `part`."""
    said: dict[str, Any] = {}
    weights = upstream()[0]
    for name, (kind, plan) in CASES.items():
        leaves = leaves_of(cut, part)
        each = pl.linear_divergence(
            teacher=teacher_of(kind, part),
            mask=BATCH.tokens.mask,
            vocab_group=group,
            plan=plan,
            **KINDS[kind],
            **leaves,
        )
        value = (each * weights).sum()
        said[f"divergence: {name}"] = numbers(value, leaves, each=each.detach())
    for plan in ("one_pass", "recompute"):
        leaves = leaves_of(cut, part)
        call = {"totals": "local", "vocab_group": group, "plan": plan}
        teacher = teacher_of("jsd", part)
        out = pl.linear_policy_loss(
            SPEC, ids=BATCH.ids, teacher=teacher, **leaves, **given(BATCH), **call
        )
        said[f"divergence: loss, {plan}"] = numbers(out.loss, leaves, each=out.divergence)
    return said


def over_ranks(rank: int, ranks: int, group: Any) -> dict[str, Any]:
    """A rank's share of the first cut of the vocabulary."""
    cut = CUTS[ranks][FIRST[ranks]]
    return divergences(cut, cut.part(rank), group)
