"""Parts for adapters: given weights and penalties, statistics of one call, guarded denominators.
All by hand or by identity.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from walk import walked

import policyloss as pl
from cases import make_batch
from policyloss.compat.parts import GivenKL, GuardedSeqMeanTokenMean, guarded_mean, union_share
from policyloss.compat.trl.parts import RolloutProduct, WrittenKL
from policyloss.compat.verl.parts import (
    GeometricMeanWeight,
    LocalCovClip,
    LocalCovKL,
    MeanAdvantageGeometricClip,
    OfThisCall,
    masked_mean,
    outside_by_sign,
)
from policyloss.inputs import Inputs
from policyloss.parts.correction import GivenWeight
from policyloss.records import Stat

BATCH = make_batch(seed=5, rows=6, width=9)
X = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


def call(spec: pl.LossSpec, **changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of `spec` on BATCH."""
    logp = BATCH.logp.clone().requires_grad_()
    out = pl.policy_loss(
        spec,
        logp,
        BATCH.old_logp,
        BATCH.advantages,
        BATCH.mask,
        rollout_logp=BATCH.rollout_logp,
        ref_logp=BATCH.ref_logp,
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, logp)[0]


def same(a: pl.LossSpec, b: pl.LossSpec) -> None:
    for mine, theirs in zip(call(a), call(b), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_a_given_weight_is_the_weight() -> None:
    weight = (BATCH.old_logp - BATCH.rollout_logp).exp().clamp(max=1.1)
    same(pl.LossSpec(correction=GivenWeight(weight)), pl.LossSpec(correction=pl.Truncate(1.1)))


def test_a_given_weight_may_be_anything_where_masked() -> None:
    weight = torch.where(BATCH.mask, 2.0, torch.nan)
    loss, gradient = call(pl.LossSpec(correction=GivenWeight(weight)))
    plain, slope = call(pl.LossSpec())
    torch.testing.assert_close(loss, 2 * plain)
    torch.testing.assert_close(gradient, 2 * slope)


def test_the_geometric_mean_of_a_given_weight() -> None:
    log_weight = BATCH.old_logp - BATCH.rollout_logp
    given = GeometricMeanWeight(log_weight.exp(), floor=0.0, epsilon=0.0)
    same(
        pl.LossSpec(correction=given),
        pl.LossSpec(correction=pl.Truncate(math.inf, level="geomean")),
    )
    # One sequence of weights 4 and 0: exp((log(4 + 0.25) + log(0.25)) / (2 + 0.5)).
    t = Inputs(logp=X[:1, :2], advantages=X[:1, :2], mask=MASK[:1, :2]).tokens()
    weight = GeometricMeanWeight(
        torch.tensor([[4.0, 0.0]], dtype=torch.float64), floor=0.25, epsilon=0.5
    )(t).weight
    expected = math.exp((math.log(4.25) + math.log(0.25)) / 2.5)
    torch.testing.assert_close(weight, torch.full((1, 2), expected, dtype=torch.float64))


def test_a_given_penalty_is_scaled_and_keeps_its_gradient() -> None:
    logp = BATCH.logp.clone().requires_grad_()
    penalty = (BATCH.ref_logp - logp).exp() - (BATCH.ref_logp - logp) - 1
    spec = pl.LossSpec(kl=GivenKL(torch.where(BATCH.mask, penalty, torch.nan), 0.3))
    out = pl.policy_loss(spec, logp, BATCH.old_logp, BATCH.advantages, BATCH.mask)
    (gradient,) = torch.autograd.grad(out.loss, logp)
    loss, slope = call(pl.LossSpec(kl=pl.KL("k3", 0.3)))
    torch.testing.assert_close(out.loss.detach(), loss)
    torch.testing.assert_close(torch.where(BATCH.mask, gradient, 0), slope)


@walked("part", [pl.CovKL(0.3), pl.CovClip(fraction=0.3, cov_low=-1.0)])
def test_numbers_of_this_call_are_those_of_the_step_when_it_is_one_call(
    part: pl.CovKL | pl.CovClip,
) -> None:
    same(pl.LossSpec(trust=OfThisCall(part)), pl.LossSpec(trust=part))
    # With totals of a larger step the wrapped part still runs,
    # where the part itself requires a measurement.
    totals = pl.Totals(1000, 100)
    args = (BATCH.logp, BATCH.old_logp, BATCH.advantages, BATCH.mask)
    with pytest.raises(pl.InputError, match="measure"):
        pl.policy_loss(pl.LossSpec(trust=part), *args, totals=totals)
    scaled = pl.policy_loss(pl.LossSpec(trust=OfThisCall(part)), *args, totals=totals).loss
    whole = pl.policy_loss(pl.LossSpec(trust=part), *args).loss
    torch.testing.assert_close(scaled * 1000, whole * BATCH.mask.sum())


def test_local_kl_cov_is_kl_cov_without_ties() -> None:
    same(pl.LossSpec(trust=LocalCovKL(pl.CovKL(0.3, 0.7))), pl.LossSpec(trust=pl.CovKL(0.3, 0.7)))


def test_local_kl_cov_penalises_exactly_k_tokens_whatever_the_ties() -> None:
    advantages = torch.ones_like(BATCH.advantages)  # every covariance is 0
    out = pl.policy_loss(
        pl.LossSpec(trust=LocalCovKL(pl.CovKL(0.25))),
        BATCH.logp,
        BATCH.old_logp,
        advantages,
        BATCH.mask,
    )
    n = int(BATCH.mask.sum())
    record = out.metrics["clip_fraction_upper"]
    assert isinstance(record, Stat)
    assert int(record.sum) == max(1, int(0.25 * n))


def test_local_clip_cov_drops_by_torchs_generator() -> None:
    part = LocalCovClip(pl.CovClip(fraction=0.3, cov_low=-1.0, cov_high=5.0))
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(call(pl.LossSpec(trust=part)))
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][1], runs[2][1])
    n = int(BATCH.mask.sum())
    untouched = call(pl.LossSpec(trust=pl.Clip(0.2, 0.2)))[1]
    dropped = (runs[0][1] == 0) & (untouched != 0)
    assert int(dropped.sum()) == int(0.3 * n)
    torch.testing.assert_close(runs[0][1], torch.where(dropped, 0, untouched))


def test_nothing_to_draw_leaves_the_generator_alone() -> None:
    part = LocalCovClip(pl.CovClip(cov_low=1e6, cov_high=2e6))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    same(pl.LossSpec(trust=part), pl.LossSpec(trust=pl.Clip(0.2, 0.2)))
    assert torch.equal(before, torch.get_rng_state())


def test_local_parts_of_an_empty_call() -> None:
    nothing = torch.zeros_like(BATCH.mask)
    for part in (LocalCovKL(pl.CovKL()), LocalCovClip(pl.CovClip(), 1e-8)):
        logp = BATCH.logp.clone().requires_grad_()
        out = pl.policy_loss(
            pl.LossSpec(trust=part), logp, BATCH.old_logp, BATCH.advantages, nothing
        )
        out.loss.backward()
        assert out.loss.item() == 0
        assert torch.count_nonzero(logp.grad) == 0


def test_epsilon_in_a_sequence_mean() -> None:
    # Rows (1, 2), (4) and none, epsilon 0.5: (3/2.5 + 4/1.5) / 2 rows.
    got = pl.aggregate_tokens(X, MASK, GuardedSeqMeanTokenMean(0.5))
    torch.testing.assert_close(got, torch.tensor((3 / 2.5 + 4 / 1.5) / 2, dtype=torch.float64))


@walked(
    ("aggregate", "expected"),
    [
        (pl.TokenMean(), 7 / 3),
        (pl.TokenSum(), 7.0),
        (pl.SeqMeanTokenSum(), 7 / 2),
        (pl.SeqMeanTokenMean(), (1.5 + 4) / 2),
        (pl.SeqMeanTokenSumNorm(10), 7 / 20),
    ],
)
def test_aggregate_tokens(aggregate: object, expected: float) -> None:
    x = X.clone().requires_grad_()
    got = pl.aggregate_tokens(x, MASK, aggregate)
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64))
    got.backward()
    # A weighted sum is its own gradient's product with x; masked positions have none.
    torch.testing.assert_close(
        (x.grad * x).sum().detach(), torch.tensor(expected, dtype=torch.float64)
    )
    assert torch.count_nonzero(x.grad[~MASK]) == 0


def test_aggregate_tokens_refuses_what_is_no_aggregation() -> None:
    with pytest.raises(pl.SpecError, match="'trust' slot"):
        pl.aggregate_tokens(X, MASK, pl.Clip(0.2, 0.2))


def test_counts_of_a_call() -> None:
    counts = pl.Totals.of_call(MASK, dp_size=3)
    assert (float(counts.tokens), float(counts.sequences), counts.dp_size) == (3, 2, 3)


def test_epsilon_in_the_geometric_clip() -> None:
    # One sequence, log-ratios 0.1 and 0.9 (clipped to 0.3 as A > 0):
    # exp(0.4 / 2.5), times −A = −4 / 2.5.
    logp = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    old = torch.tensor([[-1.1, -1.9]], dtype=torch.float64)
    trust = MeanAdvantageGeometricClip(pl.GeometricClip(0.2, 0.3), epsilon=0.5)
    spec = pl.LossSpec(trust=trust, aggregate=pl.SeqMeanTokenMean())
    loss = pl.policy_loss(spec, logp, old, torch.full_like(logp, 2.0), torch.ones_like(logp)).loss
    torch.testing.assert_close(
        loss, torch.tensor(-4 / 2.5 * math.exp(0.4 / 2.5), dtype=torch.float64)
    )


def test_the_cap_of_a_probability_band_is_reported() -> None:
    # Ratios 0.5/0.4 = 1.25 (inside the band, above the cap), 0.42/0.4 (inside), 0.9/0.4 (outside).
    logp = torch.tensor([[0.5, 0.42, 0.9]], dtype=torch.float64).log()
    old = torch.full_like(logp, 0.4).log()
    spec = pl.LossSpec(trust=pl.ProbabilityBand("tv", 0.2, 0.2, cap=1.2))
    metrics = pl.policy_loss(
        spec, logp, old, torch.ones_like(logp), torch.ones_like(logp)
    ).metrics.compute()
    assert metrics["clip_fraction_dual"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction_upper"] == pytest.approx(1 / 3)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)


def test_dropped_tokens_are_reported() -> None:
    spec = pl.LossSpec(trust=pl.CovClip(fraction=0.3, cov_low=-1.0))
    metrics = pl.policy_loss(
        spec, BATCH.logp, BATCH.old_logp, BATCH.advantages, BATCH.mask
    ).metrics.compute()
    n = int(BATCH.mask.sum())
    assert metrics["clip_fraction_dropped"] == pytest.approx(int(0.3 * n) / n)
    parts = ("clip_fraction_upper", "clip_fraction_lower", "clip_fraction_dropped")
    assert metrics["clip_fraction"] == pytest.approx(sum(metrics[name] for name in parts))


def test_a_band_around_one() -> None:
    assert pl.DetachedClip.around_one(0.2, 0.25) == pl.DetachedClip(0.8, 1.25)
    assert pl.DetachedClip.around_one(3.0, 0.25) == pl.DetachedClip(0.0, 1.25)


def test_guarded_means() -> None:
    one, two = Stat(torch.tensor(3.0), torch.tensor(4)), Stat(torch.tensor(0.5), torch.tensor(4))
    assert float(guarded_mean(one, 1.0)) == 3 / 5
    assert float(union_share(one, two)) == 3.5 / 4
    assert float(guarded_mean(Stat(torch.tensor(0.0), torch.tensor(0)), 1e-8)) == 0
    assert math.isnan(float(Stat(torch.tensor(0.0), torch.tensor(0)).value))
    assert float(masked_mean(X, MASK)) == 7 / 3
    assert float(masked_mean(MASK, MASK, 1.0)) == 3 / 4


def test_shares_outside_by_the_sign_of_the_advantage() -> None:
    d = torch.tensor([[-0.5, 0.5, 0.1], [0.5, -0.1, -0.5]], dtype=torch.float64)
    a = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 0.0]], dtype=torch.float64)
    positive, negative = outside_by_sign(d, 0.2, 0.3, a, torch.ones_like(d, dtype=torch.bool))
    assert (float(positive), float(negative)) == (2 / 6, 1 / 6)


def test_one_advantage_per_sequence_is_gmpo() -> None:
    part, tiny = pl.GeometricClip(0.2, 0.3), 1e-300  # vanishes next to a length
    one = pl.LossSpec(trust=MeanAdvantageGeometricClip(part, tiny), aggregate=pl.SeqMeanTokenMean())
    same(one, pl.LossSpec(trust=part, aggregate=pl.SeqMeanTokenMean()))


class Penalty:
    """A user's KL part that has an attribute of the name `coef`."""

    coef = 5.0

    def __call__(self, t: pl.Tokens) -> torch.Tensor:
        return torch.full_like(t.advantages, 0.5)


def test_a_callable_penalty_is_not_multiplied_by_anything_of_its_own() -> None:
    """It is already multiplied; the loss and its printed formula use it unchanged."""
    spec = pl.LossSpec(trust=pl.Unbounded("logp"), kl=Penalty())
    plain = pl.LossSpec(trust=pl.Unbounded("logp"))
    torch.testing.assert_close(call(spec)[0], call(plain)[0] + 0.5)
    assert "1 * kl" in str(pl.explain(spec).formula)


FRAMEWORK_PARTS = [
    pl.LossSpec(aggregate=GuardedSeqMeanTokenMean(0.5)),
    pl.LossSpec(ratio=RolloutProduct(outside="mask", low=0.5, high=2.0)),
    pl.LossSpec(kl=WrittenKL("k3", 0.1, clamp=None, ratio_level="sequence")),
]


@walked("spec", FRAMEWORK_PARTS, ids=str)
def test_a_framework_part_is_data(spec: pl.LossSpec) -> None:
    assert spec.is_data
    assert pl.LossSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    assert pl.explain(spec).formula.exact


def test_a_part_of_a_framework_that_is_not_loaded_is_named() -> None:
    with pytest.raises(pl.SpecError, match=r"'nemo.Mean'.*import policyloss\.compat\.nemo"):
        pl.LossSpec.from_dict({"aggregate": {"type": "nemo.Mean"}})


ALL_THREE = pl.LossSpec(
    ratio=RolloutProduct(outside="mask", low=0.5, high=2.0),
    kl=WrittenKL("k3", 0.1, clamp=None, ratio_level="sequence"),
    aggregate=GuardedSeqMeanTokenMean(0.5),
)


def test_framework_parts_run_in_the_head() -> None:
    """The gradient of a token depends on its sequence, and no more:
    the head takes it in windows of whole sequences.
    """
    assert ALL_THREE.reach == "sequence"
    assert ALL_THREE.reads == ("old_logp", "rollout_logp", "ref_logp")
    assert FRAMEWORK_PARTS[0].reach == "token"
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(
        *BATCH.mask.shape, 5, generator=generator, dtype=torch.float64, requires_grad=True
    )
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 11, BATCH.mask.shape, generator=generator)
    logp = pl.linear_logprobs(hidden, weight, ids).logp
    old = logp.detach() + 0.1 * (BATCH.old_logp - BATCH.logp)
    others = {"rollout_logp": old + 0.1, "ref_logp": old - 0.2}
    plain = pl.policy_loss(ALL_THREE, logp, old, BATCH.advantages, BATCH.mask, **others).loss
    head = pl.linear_policy_loss(
        ALL_THREE, hidden, weight, ids, old, BATCH.advantages, BATCH.mask, **others
    ).loss
    torch.testing.assert_close(head, plain)
    torch.testing.assert_close(
        torch.autograd.grad(head, hidden)[0], torch.autograd.grad(plain, hidden)[0]
    )
