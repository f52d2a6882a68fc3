"""The printed formula, and its conditions for a zero gradient, against `policy_loss`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from formula_evaluator import Evaluator

import policyloss as pl
from cases import Batch, make_batch, run, unweighted
from policyloss.explanations import Explanation
from policyloss.explanations.formula import formula
from policyloss.explanations.zero_gradient import zero_gradient


def assert_formula_holds(spec: pl.LossSpec, batch: Batch) -> None:
    batch = batch if "weights" in spec.reads else unweighted(batch)
    evaluated = Evaluator(formula(spec), batch)
    loss = evaluated.names["loss"]
    dlogp, dentropy = torch.autograd.grad(
        loss, (evaluated.leaf, evaluated.entropy), allow_unused=True
    )
    expected = run(spec, batch)
    assert abs(loss.item() - expected.loss.item()) <= 1e-12 * max(1.0, abs(expected.loss.item())), (
        f"{spec}\n{formula(spec)}"
    )
    for got, want in ((dlogp, expected.dlogp), (dentropy, expected.dentropy)):
        got = torch.zeros(len(evaluated.row), dtype=torch.float64) if got is None else got
        torch.testing.assert_close(
            evaluated.padded(got), want, rtol=1e-12, atol=1e-12, msg=lambda m: f"{spec}\n{m}"
        )


def zero_batch(seed: int) -> Batch:
    """Advantages that are zero here and there, constant in some rows; one token exactly at the
    anchor; ratios wide apart.
    """
    batch = make_batch(seed=seed, rows=7, width=6, spread=0.6)
    a = batch.advantages.clone()
    a[1], a[0, :2], a[4], a[5] = 0.0, 0.0, -1.0, 2.0
    old = batch.old_logp.clone()
    old[6, 1] = batch.logp[6, 1]
    return dataclasses.replace(batch, advantages=a, old_logp=old)


def assert_zero_where_said(spec: pl.LossSpec, batch: Batch) -> tuple[int, int]:
    evaluated, said = Evaluator(formula(spec), batch), zero_gradient(spec)
    empty = torch.zeros(len(evaluated.row), dtype=torch.bool)
    where = evaluated.evaluate(said.expression) if said.expression else empty
    zero = run(spec, batch).dlogp[batch.mask] == 0
    assert torch.equal(where, zero), (
        f"{spec}\n{formula(spec)}\nsaid {said.expression}\nat {where.tolist()}\nis {zero.tolist()}"
    )
    return int(zero.sum()), int((~zero).sum())


def numbers(e: Explanation) -> dict[str, tuple[Any, str]]:
    return {n.where: (n.value, n.source) for n in e.numbers}
