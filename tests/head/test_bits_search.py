"""A search for a row or a step whose bits depend on its company: shapes, layouts in memory, types,
numbers of any kind, plans, cuts and orders are drawn at random, from seeds.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from head_cases import (
    DEVICE,
    HeadBatch,
    assert_same_bits,
    generator,
    leaf,
    make_head_batch,
    peaked_case,
)
from torch import Tensor

import policyloss as pl
from cases import LOCAL, SPECS, assert_same

DTYPES = (torch.float32, torch.bfloat16)
STEPS = {
    name: spec
    for name, spec in SPECS.items()
    if type(spec.aggregate) not in LOCAL and spec.divergence is None and not spec.needs_statistics
}


def laid_out(x: Tensor, how: str) -> Tensor:
    """The matrix `x` in another place of memory, or in another order there."""
    if how == "one number later":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    if how == "columns first":
        return x.t().contiguous().t()
    if how == "every other column":
        return x.repeat_interleave(2, dim=1)[:, ::2]
    if how == "beside NaN":
        return torch.nn.functional.pad(x, (0, 3), value=math.nan)[:, :-3]
    return x


LAYOUTS = ("as it is", "one number later", "columns first", "every other column", "beside NaN")
SPOILS = {
    "nothing": lambda row: row,
    "NaN": lambda row: row * math.nan,
    "inf": lambda row: torch.where(row == row.max(), math.inf, row),
    "huge": lambda row: row * 1e30,
    "denormal": lambda row: row * 1e-39,
    "zero": lambda row: row * 0,
}


@pytest.mark.parametrize("seed", range(12))
def test_a_row_in_any_company(seed):
    """Log-probability, entropy and gradient of rows, beside one that may be of any kind."""
    draw = random.Random(seed)
    n, vocab = draw.choice([1, 2, 17, 60]), draw.choice([1, 7, 17, 129, 300])
    width, dtype = draw.choice([1, 3, 8, 33]), draw.choice(DTYPES)
    case = peaked_case(n, vocab, width, dtype, seed)
    spoiled = draw.randrange(n)
    hidden = case.hidden.clone()
    hidden[spoiled] = SPOILS[draw.choice(list(SPOILS))](hidden[spoiled])
    weight = laid_out(case.weight, draw.choice(LAYOUTS))
    bias, softcap = draw.choice([None, case.bias]), draw.choice([None, 5.0])
    rates = 0.3 + torch.rand(n, generator=generator(seed)).to(DEVICE)
    by_row, mixed = draw.random() < 0.5, draw.random() < 0.2

    def values(index: list[int], how: str, plan: Any) -> tuple[Tensor, ...]:
        x = leaf(laid_out(hidden[index], how))
        with pl.exact(), torch.autocast(DEVICE.type, torch.bfloat16, enabled=mixed):
            temperature = rates[index] if by_row else 0.7
            out = pl.linear_logprobs(
                *(x, weight, case.ids[index], bias, temperature),
                entropy=True,
                softcap=softcap,
                plan=plan,
            )
        upstream = [case.dlogp[index], case.dentropy[index]]
        return (*out, *torch.autograd.grad(list(out), x, upstream))

    expected = values(list(range(n)), "as it is", "auto")
    for _ in range(3):
        index = draw.sample(range(n), draw.randint(1, n))
        plan = draw.choice(["auto", pl.Plan("recompute", draw.randint(1, 40), vocab)])
        actual = values(index, draw.choice(LAYOUTS), plan)
        assert_same_bits(actual, tuple(x[index] for x in expected))


def random_cut(draw: random.Random, rows: int) -> list[list[int]]:
    """All rows in any order, in calls of any size, some of them without a row."""
    order, cut = draw.sample(range(rows), rows), []
    while order:
        size = draw.randint(0, len(order))
        cut.append(order[:size])
        order = order[size:]
    return cut


@pytest.mark.parametrize("seed", range(8))
def test_a_step_in_any_cut(seed):
    """A loss of any kind on hidden states, in calls of any size, order, layout and plan."""
    draw = random.Random(seed)
    spec = STEPS[draw.choice(list(STEPS))]
    spec = spec.replace(entropy_coef=draw.choice([spec.entropy_coef, 0.05]))
    rows, vocab = draw.choice([2, 5, 9]), draw.choice([7, 130])
    dtype, width = draw.choice(DTYPES), draw.choice([2, 8, 31])
    batch = make_head_batch(seed, rows, width, vocab, draw.choice([3, 33]), dtype)
    batch.hidden[draw.randrange(rows), 0] *= draw.choice([1, 1e30, math.nan])
    options = {"softcap": draw.choice([None, 20.0]), "temperature": draw.choice([1.0, 0.6])}
    kwargs = batch.kwargs
    totals = pl.Totals.count(kwargs["mask"], group_ids=kwargs["group_ids"])

    def run(part: HeadBatch, plan: Any) -> tuple[Tensor, pl.Metrics]:
        hidden = leaf(part.hidden)
        with pl.exact():
            out = pl.linear_policy_loss(
                *(spec, hidden, batch.weight, part.ids),
                **{**part.kwargs, **options, "totals": totals, "plan": plan},
            )
        return torch.autograd.grad(out.loss, hidden)[0], out.metrics

    expected, metrics = run(batch, "auto")
    for _ in range(2):
        parts = []
        for members in random_cut(draw, rows):
            part, gradient = batch.rows(members), expected[members]
            if draw.random() < 0.5:
                gradient = gradient[part.tokens.inside.to(DEVICE)]
                part = part.packed()
            plan = draw.choice(["auto", pl.Plan("recompute", draw.randint(1, 60), vocab)])
            actual, records = run(part, plan)
            assert_same_bits(actual, gradient)
            parts.append(records)
        draw.shuffle(parts)
        assert_same(sum(parts).compute(), metrics.compute(), 0)
