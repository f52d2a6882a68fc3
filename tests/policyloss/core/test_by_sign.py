"""`BySign`: a trust region for each sign of the advantage; UP-GRPO is one of its losses.

Hand-computed numbers first, then the laws of any pair: it equals its two parts.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from formulas import assert_formula_holds, assert_zero_where_said, numbers, zero_batch
from walk import in_shares, walked

import policyloss as pl
from cases import (
    RATIOS,
    TRUSTS,
    assert_same,
    assert_same_result,
    label,
    make_batch,
    run,
    step_totals,
    swapped,
    unweighted,
)

UP = pl.preset("up_grpo")
CLIP = pl.Clip(0.2, 0.28, dual=1.4)
BAND = pl.ProbabilityBand("tv", 0.05, 0.08)
PAIRS = [
    pl.BySign(pl.Unbounded("current"), pl.Clip(0.2, 0.2, dual=1.5)),
    pl.BySign(pl.Unbounded("ratio"), pl.DetachedClip(0.8, 1.2, outside="zero")),
    pl.BySign(CLIP, pl.Quadratic(0.3)),
    pl.BySign(BAND, pl.ProbabilityBand("tv", 0.1, 0.02, form="ratio")),
    pl.BySign(pl.CovClip(fraction=0.2, cov_low=-1.0, cov_high=5.0), pl.SoftGate()),
    pl.BySign(pl.SoftGate(), pl.CovKL(fraction=0.2)),
    pl.BySign(pl.BySign(BAND, CLIP), pl.BySign(pl.Unbounded("logp"), BAND)),
]


def one_token(ratio: float, advantage: float) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient and metrics of UP-GRPO on one token with logp = −1."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old, mask = logp.detach() - math.log(ratio), torch.ones(1, 1, dtype=torch.bool)
    out = pl.policy_loss(UP, logp, old, torch.tensor([[advantage]], dtype=torch.float64), mask)
    out.loss.backward()
    assert logp.grad is not None
    return out.loss.item(), logp.grad.item(), out.metrics.compute()


@walked(
    ("ratio", "advantage", "loss", "gradient", "flag"),
    [
        # A > 0: −A·exp(logp − sg logp): the value is −A and the gradient −A, whatever the ratio.
        (1.0, 2.0, -2.0, -2.0, None),
        (5.0, 2.0, -2.0, -2.0, None),
        (0.1, 2.0, -2.0, -2.0, None),
        # A ≤ 0: min(max(−A·r, −A·clip(r, 0.8, 1.2)), −A·3).
        (1.1, -2.0, 2.2, 2.2, None),  # inside the band: 2·1.1
        (0.5, -2.0, 1.6, 0.0, "lower"),  # max(1.0, 2·0.8), a constant
        (2.0, -2.0, 4.0, 4.0, None),  # max(4, 2.4): above the band, still below 3
        (5.0, -2.0, 6.0, 0.0, "dual"),  # min(max(10, 2.4), 2·3), a constant
        (5.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_up_grpo_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, flag: str | None
) -> None:
    value, slope, metrics = one_token(ratio, advantage)
    assert value == pytest.approx(loss, rel=1e-14, abs=1e-15)
    assert slope == pytest.approx(gradient, rel=1e-14, abs=1e-15)
    for name in ("upper", "lower", "dual"):
        assert metrics[f"clip_fraction_{name}"] == (1.0 if name == flag else 0.0)


def test_up_grpo_is_a_sequence_mean() -> None:
    """A = 1 with 1 token and A = −1 with 3, at ratio 1: (−1 + 1) / 2 = 0;
    gradients −1/2 and 1/6.
    """
    logp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    out = pl.policy_loss(
        UP, logp, logp.detach(), torch.tensor([1.0, -1.0], dtype=torch.float64), mask
    )
    out.loss.backward()
    assert out.loss.item() == pytest.approx(0, abs=1e-15)
    assert_same(logp.grad, torch.tensor([[-0.5, 0, 0], [1 / 6, 1 / 6, 1 / 6]], dtype=torch.float64))


def test_the_positive_side_has_reinforces_gradient_and_not_its_value() -> None:
    batch = unweighted(make_batch(seed=1))
    current, logp = (
        run(pl.LossSpec(trust=pl.Unbounded(form)), batch) for form in ("current", "logp")
    )
    assert_same(current.dlogp, logp.dlogp)
    valid = batch.advantages[batch.mask]
    assert current.loss.item() == pytest.approx(-valid.mean().item(), rel=1e-13)  # exp(0) = 1
    assert abs(current.loss - logp.loss) > 1e-3
    assert pl.LossSpec(trust=pl.Unbounded("current")).reads == ()


# Two parts that each choose tokens of the whole step are refused.
@walked("part", [t for t in TRUSTS if not getattr(t, "statistics_names", ())], ids=label)
def test_the_same_part_on_both_sides_is_that_part(part: Any) -> None:
    for ratio in RATIOS:
        spec = swapped(pl.LossSpec(), ratio=ratio, trust=part)
        if spec is not None:
            both = spec.replace(trust=pl.BySign(part, part))
            assert_same_result(run(both, make_batch(seed=2)), run(spec, make_batch(seed=2)))
            assert (both.reach, both.follows_advantage, both.reads) == (
                spec.reach,
                spec.follows_advantage,
                spec.reads,
            )


@walked("trust", PAIRS, ids=label)
def test_each_side_is_its_part_alone(trust: Any) -> None:
    """Sums over tokens of one sign agree with the part's own; so do the flags."""
    batch, positive = (
        make_batch(seed=3, rows=9, width=9, spread=0.5),
        make_batch(seed=3, rows=9, width=9, spread=0.5).advantages > 0,
    )
    whole = run(pl.LossSpec(trust=trust, aggregate=pl.TokenSum()), batch)
    expected, flagged = torch.zeros_like(whole.dlogp), 0.0
    for part, side in ((trust.positive, positive), (trust.negative, ~positive)):
        spec = pl.LossSpec(trust=part, aggregate=pl.TokenSum())
        totals = step_totals(spec, batch)
        only = batch.map(lambda m, side=side: m & side, "mask")
        alone = run(spec, only, totals=totals)
        expected += alone.dlogp
        flagged += alone.metrics.get("clip_fraction", 0.0) * alone.metrics["tokens"]
    assert_same(whole.dlogp, expected)
    assert whole.metrics.get("clip_fraction", 0.0) * whole.metrics["tokens"] == pytest.approx(
        flagged, abs=1e-9
    )
    assert flagged > 0 or trust in (PAIRS[4], PAIRS[5])


def test_flags_without_an_advantage_are_those_of_the_negative_side() -> None:
    """A = 0 at the ratio e^1: `DetachedClip` holds its weight, whatever the advantage is."""
    logp, mask = torch.tensor([[-1.0]]), torch.ones(1, 1, dtype=torch.bool)
    held, free = pl.DetachedClip(0.8, 1.2), pl.Unbounded()
    for trust, fraction in ((pl.BySign(free, held), 1.0), (pl.BySign(held, free), 0.0)):
        spec = pl.LossSpec(trust=trust)
        metrics = pl.policy_loss(spec, logp, logp - 1, torch.zeros(1, 1), mask).metrics
        assert metrics.compute()["clip_fraction"] == fraction


def test_topr_is_a_pair() -> None:
    pair = pl.BySign(pl.Unbounded("logp"), pl.DetachedClip(0.0, 1.0))
    batch = make_batch(seed=4)
    ours, theirs = (run(pl.LossSpec(trust=t), batch) for t in (pair, pl.TaperedNegative(1.0)))
    assert_same(ours.loss, theirs.loss)
    assert_same(ours.dlogp, theirs.dlogp)


@walked("where", ["old_logp", "logp", "advantages"])
def test_a_nan_shows_on_either_side(where: str) -> None:
    """Also in a tensor that the side of that token does not read."""
    for sign in (1.0, -1.0):
        batch = make_batch(seed=5)
        batch.advantages[0, 1] = sign
        getattr(batch, where)[0, 1] = math.nan
        result = run(UP, batch)
        assert math.isnan(result.loss)
        assert result.metrics["nonfinite_tokens"] == 1


def test_what_a_pair_reads_and_reaches() -> None:
    assert UP.reads == ("old_logp",)
    assert UP.reach == "token"
    assert UP.follows_advantage
    assert pl.LossSpec(trust=pl.BySign(pl.Unbounded("logp"), pl.Unbounded("current"))).reads == ()
    further = pl.GeometricClip(0.4, 0.4)
    for trust in (pl.BySign(further, CLIP), pl.BySign(CLIP, further)):
        assert pl.LossSpec(trust=trust).reach == "sequence"
    assert not pl.LossSpec(trust=pl.BySign(CLIP, pl.Quadratic(0.1))).follows_advantage
    chosen = pl.LossSpec(trust=pl.BySign(CLIP, pl.CovKL()))
    assert chosen.statistics_names == pl.CovKL.statistics_names
    assert not UP.needs_statistics


@walked("trust", PAIRS[4:6], ids=label)
def test_any_cut_gives_the_same_gradient(trust: Any) -> None:
    """A side that chooses tokens of the whole step is measured,
    and refuses totals that were only counted.
    """
    batch = make_batch(seed=6, rows=8)
    spec = pl.LossSpec(trust=trust)
    totals = step_totals(spec, batch)
    whole = run(spec, batch, totals=totals).dlogp
    pieces = [
        run(spec, batch.rows(index), totals=totals).dlogp
        for index in ([0, 3, 5], [1, 2], [4, 6, 7])
    ]
    order = torch.tensor([0, 3, 5, 1, 2, 4, 6, 7])
    assert_same(torch.cat(pieces), whole[order])
    with pytest.raises(pl.InputError, match=r"policyloss\.measure"):
        run(spec, batch, totals=pl.Totals.count(batch.mask))


@walked("trust", PAIRS, ids=label)
def test_a_pair_is_data(trust: Any) -> None:
    spec = pl.LossSpec(trust=trust)
    data = json.loads(json.dumps(spec.to_dict()))
    assert pl.LossSpec.from_dict(data) == spec
    assert data["trust"]["type"] == "BySign"
    assert {data["trust"][side]["type"] for side in ("positive", "negative")} == {
        type(trust.positive).__name__,
        type(trust.negative).__name__,
    }
    assert spec.is_data
    assert hash(spec) == hash(pl.LossSpec.from_dict(data))


def test_a_pair_as_data_is_read_strictly() -> None:
    data = pl.LossSpec(trust=PAIRS[0]).to_dict()
    data["trust"]["negative"]["eps_lo"] = 0.2
    with pytest.raises(pl.SpecError, match="did you mean 'eps_low'"):
        pl.LossSpec.from_dict(data)
    data["trust"]["negative"] = {"type": "KL"}
    with pytest.raises(pl.SpecError, match="trust type"):
        pl.LossSpec.from_dict(data)


@walked(
    ("make", "words"),
    [
        (lambda: pl.BySign(pl.Clip, CLIP), ["BySign.positive", "Clip is a class", "Clip(…)"]),
        (
            lambda: pl.BySign(CLIP, lambda t: t.logp),
            ["BySign.negative", "trust region of the library", "put your own function"],
        ),
        (
            lambda: pl.BySign(CLIP, pl.KL("k3", 0.1)),
            ["BySign.negative", "KL(", "trust region of the library"],
        ),
        (
            lambda: pl.BySign(pl.CovClip(), pl.CovKL()),
            ["CovClip and CovKL", "whole step", "one side"],
        ),
        (
            lambda: pl.LossSpec(
                ratio=pl.SequenceRatio(), trust=pl.BySign(CLIP, pl.GeometricClip(0.4, 0.4))
            ),
            ["GeometricClip", "TokenRatio", "SequenceRatio"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(pl.SpecError) as error:
        make()
    for word in words:
        assert word in str(error.value), str(error.value)


# explain and diff ---------------------------------------------------------------------------------


@in_shares(2)
@walked("trust", PAIRS, ids=label)
def test_a_pair_explains_itself(trust: Any, share: int) -> None:
    """Formula and zero gradients hold under every ratio, also where both sides have equal lines."""
    first = (PAIRS.index(trust) + share) % 2
    for ratio in (*RATIOS, pl.SequenceProduct(token_clamp=0.2))[first::2]:
        spec = pl.LossSpec(ratio=ratio, trust=trust)
        assert_formula_holds(spec, make_batch(seed=8, rows=6, width=6))
        assert_zero_where_said(spec, zero_batch(5))
        rejecting = spec.replace(correction=(pl.Reject("k2", high=0.02),))
        assert_formula_holds(rejecting, make_batch(seed=8, rows=6, width=6))
        assert_zero_where_said(rejecting, zero_batch(6))


def test_up_grpo_reads_as_the_paper_writes_it() -> None:
    e = pl.explain("up_grpo")
    clipped = (
        "min(max(-advantages * ratio, -advantages * clip(ratio, 1 - 0.2, 1 + 0.2)), 3 * "
        "abs(advantages))"
    )
    assert str(e.formula).split("\n")[2:] == [
        f"surrogate = where(advantages > 0, -advantages * exp(logp - sg(logp)), {clipped})",
        "loss = sum(surrogate / L) / B",
    ]
    assert [c.expression for c in e.zero.alone][:3] == [
        "advantages == 0",
        "(advantages < 0) & (ratio < 1 - 0.2)",
        "(advantages < 0) & (ratio > 3)",
    ]
    assert e.words["trust"].startswith("where the advantage is positive: ")
    sourced = numbers(e)
    assert sourced["trust.negative"][0] == "Clip"
    for field, value in (("eps_low", 0.2), ("eps_high", 0.2), ("dual", 3.0)):
        assert sourced[f"trust.negative.{field}"][0] == value
        assert sourced[f"trust.negative.{field}"][1] not in ("", "library default")
    json.dumps(e.to_dict())


def test_a_changed_number_inside_a_pair_is_shown() -> None:
    other = UP.replace(trust=pl.BySign(pl.Unbounded("current"), pl.Clip(0.2, 0.2, dual=4.0)))
    e = pl.explain(other)
    assert e.near == "up_grpo"
    assert numbers(e)["trust.negative.dual"] == (4.0, "set by you (preset up_grpo has 3.0)")
    d = pl.diff(UP, other)
    assert d.changes[0].fields == (("negative.dual", 3.0, 4.0),)
    assert "negative.dual: 3 -> 4" in str(d)
    changed = UP.replace(trust=pl.BySign(CLIP, pl.Clip(0.2, 0.2, dual=3.0)))
    assert pl.diff(UP, changed).changes[0].fields[0] == (
        "positive",
        "Unbounded(form='current')",
        "Clip(eps_low=0.2, eps_high=0.28, dual=1.4)",
    )
    json.dumps(pl.diff(UP, changed).to_dict())


def test_where_a_pair_cannot_say_where_its_gradient_is_zero() -> None:
    assert not pl.explain(pl.LossSpec(trust=pl.BySign(pl.GeometricClip(0.4, 0.4), CLIP))).zero.known
