"""A search for a row or a step whose bits depend on its company: shapes, layouts in memory, types,
numbers of any kind, plans, cuts and orders are drawn at random, from seeds.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from head_cases import (
    CUDA,
    DEVICE,
    Case,
    HeadBatch,
    assert_same_bits,
    generator,
    leaf,
    make_head_batch,
    peaked_case,
)
from torch import Tensor
from walk import walked

import policyloss as pl
from cases import LOCAL, PRESETS, SPECS, assert_same
from policyloss.head import tiles as tiles_of

DTYPES = (torch.float32, torch.bfloat16)
# Float64 has no kernels on a GPU.
ALL_DTYPES = DTYPES if CUDA else (*DTYPES, torch.float64)
LOSS = PRESETS["dapo"].replace(entropy_coef=0.05)
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
    if how == "next to NaN":
        return torch.nn.functional.pad(x, (0, 3), value=math.nan)[:, :-3]
    return x


LAYOUTS = ("plain", "one number later", "columns first", "every other column", "next to NaN")
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
    """Log-probability, entropy and gradient of rows, next to a row of any kind."""
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
        x = laid_out(hidden[index], how).requires_grad_()
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

    expected = values(list(range(n)), "plain", "auto")
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
    counted = {name: kwargs[name] for name in ("group_ids", "weights")}
    totals = pl.Totals.count(kwargs["mask"], **counted)

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


def test_a_head_of_any_shape(monkeypatch):
    """Hidden sizes and vocabularies that are a multiple of nothing, in full tiles and in others.

    A row has the same bits in every plan, order, window and layout in memory; no shape is refused.
    """
    before, wrong = torch.get_num_threads(), []
    try:
        for seed in range(32):
            torch.set_num_threads(2 if seed % 7 == 0 else 1)
            monkeypatch.setattr(tiles_of, "CPU_ROWS", (48, 96, 192, 384)[seed % 4])
            wrong += differences(seed)
    finally:
        torch.set_num_threads(before)
    assert not wrong, "\n".join(wrong)


def differences(seed: int) -> list[str]:
    """Where a row of a random head has other bits, or why the head was refused."""
    draw = random.Random(seed)
    most = draw.choice([20, 90, 700])
    n, width, vocab = draw.randint(1, 150), draw.randint(1, most), draw.randint(1, most)
    case = peaked_case(n, vocab, width, draw.choice(ALL_DTYPES), seed)
    case = case._replace(weight=laid_out(case.weight, draw.choice(LAYOUTS)))
    name, rows = f"{n}×{width} by {vocab} in {case.weight.dtype}", draw.randint(1, 200)
    try:
        expected = values_of_rows(case, list(range(n)), "plain", "one_pass")
    except pl.InputError as error:
        return [f"{name}: {error}"]
    wrong = []
    for plan in (pl.Plan("one_pass", rows, 0), pl.Plan("recompute", rows, vocab), None):
        order, how = draw.sample(range(n), n), draw.choice(LAYOUTS)
        actual = values_of_rows(case, order, how, plan)
        pairs = zip(actual, expected, strict=plan is not None)
        if not all(torch.equal(a, e[order]) for a, e in pairs):
            wrong.append(f"{name}, {how}, {plan and plan.name}")
    return wrong


def values_of_rows(case: Case, order: Any, how: str, plan: Any) -> tuple[Tensor, ...]:
    """Log-probability, entropy and, with a plan, gradient of the rows of a loss, in this order."""
    hidden = laid_out(case.hidden[order], how).detach().requires_grad_()
    advantages = case.dlogp[order]
    with pl.exact():
        if plan is None:
            return pl.linear_logprobs(hidden.detach(), case.weight, case.ids[order], entropy=True)
        tokens = (case.ids[order], -advantages.abs(), advantages, advantages != 0)
        out = pl.linear_policy_loss(
            *(LOSS, hidden[None], case.weight, *(x[None] for x in tokens)), plan=plan
        )
    return out.logp[0], out.entropy[0], *torch.autograd.grad(out.loss, hidden)


@walked("how", [*LAYOUTS, "one row many times"])
def test_products_read_and_write_aligned_rows(monkeypatch, how):
    """A library takes other code for columns, and on some processors for rows at odd addresses."""
    wrong: list[str] = []

    def recorded(a: Tensor, b: Tensor, out: Tensor) -> None:
        for name, x in (("left", a), ("out", out)):
            places = (x.data_ptr(), x.stride(0) * x.element_size())
            if x.stride(1) != 1 or x.stride(0) < x.shape[1] or any(p % 64 for p in places):
                wrong.append(f"{plan}: {name} {tuple(x.shape)}, {x.stride()}, {places}")
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)

    monkeypatch.setattr(tiles_of, "_CHECKED", {})
    monkeypatch.setattr(tiles_of, "product", recorded)
    for width, plan in itertools.product((9, 16), ("recompute", "one_pass", None)):
        case = peaked_case(tiles_of.CPU_ROWS + 5, 130, width, torch.float32, seed=1)
        if how == "one row many times":
            case = case._replace(hidden=case.hidden[:1].expand_as(case.hidden))
        values_of_rows(case, slice(None), how, plan)
    assert not wrong, "\n".join(wrong)
