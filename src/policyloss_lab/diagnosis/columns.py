"""Hypotheses about the numbers themselves: another column (the likeliest token, other units),
numbers that were never filled in, and numbers that were stored in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from policyloss_lab.diagnosis.hypothesis import Case, Fit

UNITS = {"logarithms of base 2": 1 / math.log(2), "logarithms of base 10": 1 / math.log(10)}
TYPES = {"logp_bf16": torch.bfloat16, "logp_fp16": torch.float16}
APART = 0.02  # nats: a number that is nearer to the other side's may be right
LEAST_EQUAL = 3  # tokens with one and the same number; fewer may be equal by chance


def fit_units(case: Case) -> Iterator[Fit]:
    """One side's logarithms have another base."""
    for what, factor in UNITS.items():
        for side, base, sign in (
            ("rollout_logp", case.pairs.trainer, 1),
            ("old_logp", case.pairs.rollout, -1),
        ):
            yield Fit(
                "units",
                f"{side} holds {what}",
                sign * (factor - 1) * base,
                details={"factor": factor, "side": side},
            )


def fit_top1(case: Case) -> Iterator[Fit]:
    """One side reports the likeliest token instead of the sampled one."""
    if case.scorer is not None:
        effect = case.scorer.logits.double().log_softmax(1).amax(1) - case.scorer.logp
        yield from case.fit_sides("top1", "{side} is that of the likeliest token", effect)


def fit_unfilled(case: Case) -> Iterator[Fit]:
    """One side has one and the same number at several tokens where the other side varies."""
    pairs = case.pairs
    apart = (pairs.difference / pairs.shape).abs() > APART
    for side, x in (("rollout_logp", pairs.rollout), ("old_logp", pairs.trainer)):
        values, counts = torch.unique(x[apart], return_counts=True)
        if not values.numel():
            continue
        value = float(values[counts.argmax()])
        if value != 0 and int(counts.max()) < LEAST_EQUAL:
            continue  # equal by chance; no sampled token has a log-probability of 0
        where = x == value
        if bool(where.all()):
            continue  # then nothing is left to compare
        yield Fit(
            "unfilled",
            f"{side} is {value:g} at {int(where.sum())} of {pairs.size} tokens",
            torch.where(where, torch.nan, 0.0).double(),
            freedom=1,
            details={"value": value, "tokens": int(where.sum()), "side": side},
        )


def on_grid(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A flag for each number that a 16-bit type holds exactly."""
    return x.to(dtype).double() == x


def fit_stored(case: Case) -> Iterator[Fit]:
    """One side's log-probabilities, or both, were rounded to bf16 or fp16 after the softmax: the
    type holds all numbers of that side exactly.
    """
    pairs = case.pairs
    uncertain = (pairs.trainer < -1e-3) & (pairs.rollout < -1e-3)
    if int(uncertain.sum()) < 8:
        return
    for cause, dtype in TYPES.items():
        rollout = bool(on_grid(pairs.rollout, dtype)[uncertain].all())
        trainer = bool(on_grid(pairs.trainer, dtype)[uncertain].all())
        name = str(dtype).removeprefix("torch.")
        if rollout and trainer:
            step = torch.finfo(dtype).eps * pairs.trainer.abs()
            prediction = pairs.difference.clamp(-step, step)
            yield Fit(cause, f"both are rounded to {name}", prediction)
        elif rollout:
            prediction = pairs.trainer.to(dtype).double() - pairs.trainer
            yield Fit(cause, f"rollout_logp is rounded to {name}", prediction)
        elif trainer:
            prediction = pairs.rollout - pairs.rollout.to(dtype).double()
            yield Fit(cause, f"old_logp is rounded to {name}", prediction)
