"""`turn_ids=`: the turns that `SegmentRatio` and `TurnMean` read, in every layout.

Without ids a turn is an unbroken run of the mask; the shared suites run so. Here the ids name the
turns: two tokens each, which need not be neighbours.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import (
    BY_AGGREGATE,
    PRESETS,
    Result,
    assert_same,
    assert_same_result,
    make_batch,
    run,
    step_totals,
    with_turns,
)
from policyloss.arguments import tracing

BATCH = with_turns(make_batch(seed=13))
SPECS = {
    "gspo_turn": PRESETS["gspo_turn"],
    **{name: spec for name, spec in BY_AGGREGATE.items() if "TurnMean" in name},
    "rejected": PRESETS["gspo_turn"].replace(
        correction=(pl.Band(0.8, 1.25),), rejected="renormalise", aggregate=pl.TurnMean()
    ),
}
X = torch.tensor([[1.0, 2.0, 9.0, 6.0, 4.0], [3.0, 9.0, 9.0, 9.0, 9.0]], dtype=torch.float64)
VALID = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]])


def test_turn_mean_by_hand() -> None:
    # Runs: (1, 2), (6, 4) and (3).
    expected = ((1.5 + 5) / 2 + 3) / 2
    assert float(pl.aggregate_tokens(X, VALID, pl.TurnMean())) == pytest.approx(expected, abs=1e-15)
    # Agents: (1, 4), (2), (6) and (3).
    agents = torch.tensor([[0, 1, -1, 2, 0], [5, -1, -1, -1, -1]])
    by_agent = pl.aggregate_tokens(X, VALID, pl.TurnMean(), turn_ids=agents)
    assert float(by_agent) == pytest.approx(((2.5 + 2 + 6) / 3 + 3) / 2, abs=1e-15)
    # The same id in another sequence is another turn.
    ones, zeros = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    apart = pl.aggregate_tokens(X[:, :2], ones, pl.TurnMean(), turn_ids=zeros)
    assert float(apart) == pytest.approx((1.5 + 6) / 2, abs=1e-15)
    # A step of 5 sequences on 2 ranks whose gradients are averaged.
    totals = pl.Totals(tokens=8, sequences=5, dp_size=2)
    stepped = pl.aggregate_tokens(X, VALID, pl.TurnMean(), totals=totals)
    assert float(stepped) == pytest.approx(2 * ((1.5 + 5) / 2 + 3) / 5, abs=1e-15)


def test_the_ratio_of_a_turn_by_hand() -> None:
    """Log-ratios 0.1 and 0.5 of one turn, 0.2 of another, between them."""
    logp = torch.tensor([[-0.9, -0.8, -0.5]], dtype=torch.float64)
    spec = pl.LossSpec(ratio=pl.SegmentRatio(), trust=pl.Unbounded(), aggregate=pl.TokenSum())
    old, ones = torch.full_like(logp, -1.0), torch.ones(1, 3, dtype=torch.bool)
    ids = torch.tensor([[4, 2, 4]])
    loss = pl.policy_loss(spec, logp, old, -torch.ones_like(logp), ones, turn_ids=ids).loss
    assert float(loss) == pytest.approx(2 * math.exp(0.3) + math.exp(0.2), abs=1e-12)


@walked("name", SPECS)
def test_ids_of_runs_are_the_runs(name: str) -> None:
    starts = BATCH.mask & ~torch.nn.functional.pad(BATCH.mask, (1, 0))[:, :-1]
    runs = dataclasses.replace(BATCH, turn_ids=torch.where(BATCH.mask, starts.cumsum(-1), -1))
    if name != "rejected":  # there the mask has other runs than its turns
        assert_same_result(run(SPECS[name], runs), run(SPECS[name], BATCH, turn_ids=None))
    different = run(SPECS[name], BATCH).dlogp - run(SPECS[name], BATCH, turn_ids=None).dlogp
    assert different.abs().max() > 1e-4


@walked("name", SPECS)
def test_every_layout_is_the_same(name: str) -> None:
    """Packed, in another order, other ids at masked tokens, and cut with the step's totals."""
    spec, expected = SPECS[name], run(SPECS[name], BATCH)
    assert_same_result(run(spec, BATCH.packed()), expected)
    assert BATCH.turn_ids is not None
    other = torch.where(BATCH.mask, 3 * BATCH.turn_ids + 5, torch.arange(8) - 9)
    assert_same_result(run(spec, dataclasses.replace(BATCH, turn_ids=other)), expected)
    order = [4, 2, 6, 0, 5, 1, 3]
    moved = Result(expected.loss, expected.dlogp[order], expected.dentropy[order], expected.records)
    assert_same_result(run(spec, BATCH.rows(order)), moved)
    totals = step_totals(spec, BATCH)
    parts = [run(spec, BATCH.rows(rows).packed(), totals) for rows in ([0, 5], [1, 2, 3, 4, 6])]
    assert_same(parts[0].loss + parts[1].loss, expected.loss)
    gradient = torch.zeros_like(expected.dlogp)
    gradient[[0, 5]], gradient[[1, 2, 3, 4, 6]] = (part.dlogp for part in parts)
    assert_same(gradient, expected.dlogp)
    with pl.exact():
        whole = run(spec, BATCH, totals)
        exact = [run(spec, BATCH.rows(rows).packed(), totals) for rows in ([0, 5], [6, 3])]
    assert torch.equal(exact[0].dlogp, whole.dlogp[[0, 5]])
    assert torch.equal(exact[1].dlogp, whole.dlogp[[6, 3]])


@walked("name", SPECS)
def test_the_gradient_is_that_of_the_loss(name: str) -> None:
    small = with_turns(make_batch(seed=3, rows=3, width=5))
    others = {n: x for n, x in small.others(SPECS[name]).items() if n != "entropy"}
    entropy = small.entropy.clone().requires_grad_()

    def loss(logp: torch.Tensor) -> torch.Tensor:
        return pl.policy_loss(SPECS[name], logp, entropy=entropy, **others).loss

    assert torch.autograd.gradcheck(loss, small.logp.clone().requires_grad_())


@walked("name", SPECS)
@walked("plan", ["one_pass", "recompute"])
def test_the_head_takes_turns(name: str, plan: str) -> None:
    g = torch.Generator().manual_seed(2)
    hidden = torch.randn(*BATCH.mask.shape, 4, generator=g, dtype=torch.float64).requires_grad_()
    matrix = torch.randn(9, 4, generator=g, dtype=torch.float64)
    ids = torch.randint(0, 9, BATCH.mask.shape, generator=g)
    left_out = ("logp", "entropy", "divergence")
    shared = {n: x for n, x in BATCH.kwargs.items() if n not in left_out}
    out = pl.linear_policy_loss(SPECS[name], hidden, matrix, ids, plan=plan, **shared)
    made = pl.logprobs(hidden @ matrix.T, ids, entropy=True, mask=BATCH.mask)
    expected = pl.policy_loss(SPECS[name], made.logp, entropy=made.entropy, **shared)
    gradients = [torch.autograd.grad(x.loss, hidden)[0] for x in (out, expected)]
    assert_same(out.loss.detach(), expected.loss.detach())
    assert_same(*gradients, what="gradient")


def test_a_token_of_the_environment_may_not_be_trained_on() -> None:
    ids = torch.tensor([[0, 0, -1, 1, -1], [0, -1, -1, -1, -1]])
    arguments: Any = (pl.LossSpec(), X, X, X, VALID)
    with pytest.raises(pl.InputError, match="turn_ids must not be negative where mask is True"):
        pl.policy_loss(*arguments, turn_ids=ids)
    with tracing():
        out = pl.policy_loss(*arguments, turn_ids=ids)
    with pytest.raises(pl.InputError, match="turn_ids held 1 negative numbers"):
        out.metrics.compute()
    with pytest.raises(pl.InputError, match="turn_ids must be a tensor of integers"):
        pl.policy_loss(*arguments, turn_ids=X)
