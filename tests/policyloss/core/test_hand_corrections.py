"""Rollout corrections, what rejection does to the denominator,
and KL penalties on numbers done by hand.

At ratio 1 and A = −1 a token's surrogate is 1 and so is its gradient,
so the loss shows the weights themselves.
"""

from math import e, exp, inf, isnan, log

import pytest
import torch
from calls import assert_loss, evaluate, rows, weighted
from walk import walked

import policyloss as pl
from policyloss.functional.correction import nan_where_undecided, reduced
from policyloss.functional.ratio import loglinear_logp
from policyloss.functional.segments import Sequences

LOG2 = log(2)
RATIO = pl.Unbounded("ratio")


def corrected(*parts, rejected="keep", aggregate=None):
    return pl.LossSpec(
        trust=RATIO, correction=parts, rejected=rejected, aggregate=aggregate or pl.TokenMean()
    )


# --- Weights --------------------------------------------------------------------------------------

# correction, the weights of tokens with exp(old_logp − rollout_logp) = (4, ½, 1):
# sum of logs ln 2, mean ln 2 / 3.
WEIGHTS = [
    (pl.Truncate(inf), [4, 0.5, 1]),
    (pl.Truncate(2.0), [2, 0.5, 1]),
    (pl.Truncate(2.0, low=0.75), [2, 0.75, 1]),
    (pl.Truncate(inf, level="geomean"), [2 ** (1 / 3)] * 3),
    (pl.Truncate(1.2, level="geomean"), [1.2] * 3),
    (pl.Truncate(inf, level="product"), [2, 2, 2]),
    (pl.Truncate(1.5, level="product"), [1.5] * 3),
    (pl.Truncate(inf, log_clamp=LOG2), [2, 0.5, 1]),  # the log-weight ln 4 is held at ln 2
    (pl.Band(0.6, 5.0), [4, 0, 1]),
    (pl.Band(0.4, 3.0), [0, 0.5, 1]),
    (pl.Band(0.5, 3.0, level="geomean"), [2 ** (1 / 3)] * 3),
    (pl.Band(0.5, 1.5, level="product"), [0, 0, 0]),
    (pl.SequenceMask(0.5, 1.5), [4, 0.5, 1]),  # 2^⅓ = 1.26 lies inside: raw token weights
    (pl.SequenceMask(0.5, 1.2), [0, 0, 0]),
    (pl.SequenceMask(0.5, 1.5, weight="sequence"), [2 ** (1 / 3)] * 3),
    (pl.SequenceMask(0.5, 1.5, weight=None), [1, 1, 1]),
    (pl.SequenceMask(0.5, 1.5, level="product"), [0, 0, 0]),  # the product is 2
    (pl.SequenceMask(0.5, 2.5, level="product", weight="sequence"), [2, 2, 2]),
    (pl.SequenceMask(1.5, 2.5, level="product", weight="token"), [4, 0.5, 1]),
]


@walked(("part", "weights"), WEIGHTS, ids=str)
def test_weight(part, weights):
    w = rows(weights)
    assert_loss(weighted(corrected(part), [4, 0.5, 1]), w.mean().item(), w / 3)


def test_frozen_policies_get_no_gradient():
    """Weights, anchors and references are constants, even if the tensors came with a gradient."""
    logp, old, rollout, ref, a = (
        torch.full((1, 2), x, dtype=torch.float64, requires_grad=True)
        for x in (-1.0, -1.2, -1.3, -1.1, 1.0)
    )
    spec = pl.LossSpec(
        correction=(pl.Truncate(2.0), pl.Veto()), kl=pl.KL("k3", 0.1, weight="ratio")
    )
    pl.policy_loss(
        spec, logp, old, a, torch.ones(1, 2), rollout_logp=rollout, ref_logp=ref
    ).loss.backward()
    assert logp.grad.abs().min() > 0
    assert [x.grad for x in (old, rollout, ref, a)] == [None] * 4


def test_weights_do_not_touch_kl():
    # w = 4 on the policy term only: 4·1 + ½·k1, k1 = logp − ref_logp = 2; slope 4·1 + ½·1.
    spec = corrected(pl.Truncate(inf)).replace(kl=pl.KL("k1", 0.5))
    assert_loss(weighted(spec, 4.0, ref_logp=-3.0), 4 + 1, 4 + 0.5)
    # A rejected token has no policy term, and still its KL.
    assert_loss(weighted(spec.replace(correction=pl.Band(0.5, 2.0)), 4.0, ref_logp=-3.0), 1, 0.5)


def test_sequences_are_judged_apart():
    # Row 0 has weights (4, 1), geometric mean 2; row 1 (½, 2), geometric mean 1.
    w = [[4, 1], [0.5, 2]]
    assert_loss(
        weighted(corrected(pl.SequenceMask(0.5, 1.5)), w), 2.5 / 4, [[0, 0], [0.5 / 4, 2 / 4]]
    )
    assert_loss(
        weighted(corrected(pl.SequenceMask(0.5, 3.0, weight="sequence")), w),
        6 / 4,
        [[0.5, 0.5], [0.25, 0.25]],
    )
    assert_loss(
        weighted(corrected(pl.Truncate(inf, level="product")), w),
        (8 + 2) / 4,
        [[1, 1], [0.25, 0.25]],
    )


def test_levels_of_a_weight():
    # Weights (4, ½, –) of a sequence of two valid tokens:
    # logs ln 4 and −ln 2, sum ln 2, mean ln 2 / 2.
    log_w, mask = rows([4, 0.5, 1]).log(), rows([1, 1, 0]) != 0
    sequences = Sequences.of(mask)
    for reduce, expected in (("token", [4, 0.5, 1]), ("mean", [2**0.5] * 3), ("sum", [2] * 3)):
        actual = reduced(log_w, reduce, mask, sequences.sum(mask), sequences).exp()
        torch.testing.assert_close(actual, rows(expected), rtol=1e-14, atol=0)


def test_a_statistic_that_is_nan_decides_nothing():
    # A token without a rollout logp has no estimate:
    # it is neither kept nor dropped, and shows in the loss.
    for part in (pl.Reject("k2", high=0.5), pl.Veto(), pl.SequenceMask(0.5, 1.5, weight=None)):
        result = evaluate(
            corrected(part), [-1, -1], [-1, -1], [0, 0], rollout_logp=[float("nan"), -1]
        )
        assert isnan(result.loss), part
    # The weight of a test is 1 where it can decide.
    assert nan_where_undecided(rows([5, -inf])).tolist() == [[1, 1]]


# --- Rejection by an estimate of KL(rollout‖old) --------------------------------------------------

# d = (ln 2, −ln 2, 0): k1 = −d; k2 = ½·ln²2 twice;
# k3 = eᵈ − 1 − d = 1 − ln 2, ln 2 − ½, 0, which add up to ½.
K2, K3_UP, K3_DOWN = LOG2**2 / 2, 1 - LOG2, LOG2 - 0.5
ESTIMATES = [
    ("k1", "token", [-LOG2, LOG2, 0]),
    ("k2", "token", [K2, K2, 0]),
    ("k3", "token", [K3_UP, K3_DOWN, 0]),
    ("k1", "sum", [0] * 3),
    ("k2", "sum", [2 * K2] * 3),
    ("k3", "sum", [0.5] * 3),
    ("k1", "mean", [0] * 3),
    ("k2", "mean", [2 * K2 / 3] * 3),
    ("k3", "mean", [1 / 6] * 3),
    ("k1", "max", [LOG2] * 3),
    ("k2", "max", [K2] * 3),
    ("k3", "max", [K3_UP] * 3),
]


@walked(("estimator", "reduce", "values"), ESTIMATES)
def test_reject(estimator, reduce, values):
    """A bound a hair above a token's estimate keeps it, a hair below rejects it;
    likewise from below.
    """
    for value in set(values):
        for bound in (value - 1e-6, value + 1e-6):
            above = [float(v <= bound) for v in values]
            below = [float(v >= bound) for v in values]
            for bounds, kept in (({"high": bound}, above), ({"low": bound}, below)):
                result = weighted(corrected(pl.Reject(estimator, reduce, **bounds)), [2, 0.5, 1])
                assert_loss(result, sum(kept) / 3, rows(kept) / 3)


def test_the_weight_of_a_turn():
    # Turns {0, 1} and {3}: √(4·1) = 2 for both tokens of the first, 3 for the second.
    weights = rows([2.0, 2.0, 0.0, 3.0])
    result = weighted(corrected(pl.Truncate(inf, level="turn")), [4, 1, 99, 3], mask=[1, 1, 0, 1])
    assert_loss(result, 7 / 3, weights / 3)


def test_divergence_mask_both_ways():
    # p = ½, q = ¼: KL(p‖q) = ½·ln 2 + ½·ln(2/3) = 0.1438, KL(q‖p) = ¼·ln ½ + ¾·ln(3/2) = 0.1308.
    # The other way round, the larger one is KL(q‖p).
    for old, rollout in ((0.25, 0.5), (0.5, 0.25)):
        for high, kept in ((0.14, 0), (0.15, 1)):
            part = pl.DivergenceMask("kl", high, weight=None, direction="both")
            logs = {"rollout_logp": log(rollout)}
            result = evaluate(corrected(part), log(old), log(old), -1, **logs)
            assert_loss(result, kept, kept)


# rollout p = ½, ¼ | ¾, old q = ¼, ¼ | ¼: weights q/p = ½, 1 | ⅓; |p − q| = ¼, 0 | ½.
# Binary KL: ½·ln 2 + ½·ln(½/¾) = ½·ln(4/3), 0 | ¾·ln 3 + ¼·ln(¼/¾) = ½·ln 3.
DIVERGENCES = [
    ("tv", "token", [[0.25, 0], [0.5, 0]]),
    ("tv", "sequence", [[0.125, 0.125], [0.5, 0]]),
    ("kl", "token", [[log(4 / 3) / 2, 0], [log(3) / 2, 0]]),
    ("kl", "sequence", [[log(4 / 3) / 4] * 2, [log(3) / 2, 0]]),
]


@walked(("divergence", "level", "values"), DIVERGENCES)
def test_divergence_mask(divergence, level, values):
    """A bound a hair above a divergence keeps it, a hair below rejects it;
    a kept token has its weight, or 1.
    """
    mask, weights = rows([[1, 1], [1, 0]]), rows([[0.5, 1], [1 / 3, 0]])
    old, rollout = rows([[0.25, 0.25], [0.25, 0.9]]).log(), rows([[0.5, 0.25], [0.75, 0.1]]).log()
    for value in {v for row in values for v in row}:
        for bound in (value - 1e-6, value + 1e-6):
            above, below = (rows(values) <= bound) * mask, (rows(values) >= bound) * mask
            cases = [({"high": 9.0, "low": bound}, below)] + (
                [({"high": bound}, above)] if bound > 0 else []
            )
            for bounds, kept in cases:
                for weight, w in (("token", weights), (None, mask)):
                    part = pl.DivergenceMask(divergence, level=level, weight=weight, **bounds)
                    result = evaluate(
                        corrected(part),
                        old,
                        old,
                        torch.full_like(old, -1.0),
                        mask,
                        rollout_logp=rollout,
                    )
                    assert_loss(result, (kept * w).sum().item() / 3, kept * w / 3)
                    assert result.metrics["rejected_fraction"] == pytest.approx(
                        1 - kept.sum().item() / 3, abs=1e-15
                    )


def test_total_variation_has_no_sign():
    # rollout p = ¼, old q = ½: |p − q| = ¼ although p − q = −¼.
    # A bound of 0.2 rejects, one of 0.3 keeps.
    for high, kept in ((0.2, 0), (0.3, 1)):
        part = pl.DivergenceMask("tv", high, weight=None)
        assert_loss(
            evaluate(corrected(part), log(0.5), log(0.5), -1.0, rollout_logp=log(0.25)), kept, kept
        )


def test_the_maximum_is_over_valid_tokens():
    # k1 = −d = (−ln 2, –): the maximum is −ln 2. A masked token, whose estimate is 0,
    # is not the larger one.
    for high, kept in ((-0.5, 1), (-0.8, 0)):
        part = pl.Reject("k1", "max", high=high)
        assert_loss(weighted(corrected(part), [2, 1], mask=[1, 0]), kept, [kept, 0])


def test_divergence_mask_holds_probabilities_off_zero_and_one():
    # An impossible token for the rollout, p = 0, counts as p = floor = 0.01:
    # ln of 0.01/0.5 and of 0.99/0.5.
    apart = 0.01 * log(0.02) + 0.99 * log(1.98)
    for high, kept in ((apart + 1e-9, 1), (apart - 1e-9, 0)):
        part = pl.DivergenceMask("kl", high, weight=None, floor=0.01)
        assert_loss(
            evaluate(corrected(part), log(0.5), log(0.5), -1.0, rollout_logp=-1e9), kept, kept
        )


def test_reject_ignores_masked_tokens():
    # The mean of k2 over the two valid tokens is K2, not 2·K2/3;
    # a wild masked token changes nothing.
    for high, kept in ((K2 + 1e-6, 1), (K2 - 1e-6, 0)):
        spec = corrected(pl.Reject("k2", "mean", high=high))
        assert_loss(weighted(spec, [2, 0.5, 1e9], mask=[1, 1, 0]), kept, [kept / 2, kept / 2, 0])


def test_veto():
    # One token below 1e-4 in row 0 rejects the row; row 1 stays.
    # With high=3 it is the other way round.
    w = [[1e-5, 1], [1, 4]]
    assert_loss(weighted(corrected(pl.Veto()), w), 2 / 4, [[0, 0], [0.25, 0.25]])
    assert_loss(weighted(corrected(pl.Veto(low=None, high=3.0)), w), 2 / 4, [[0.25, 0.25], [0, 0]])
    assert_loss(weighted(corrected(pl.Veto(low=1e-4, high=3.0)), w), 0, [[0, 0], [0, 0]])
    assert_loss(
        weighted(corrected(pl.Veto()), w, mask=[[0, 1], [1, 1]]), 1, [[0, 1 / 3], [1 / 3, 1 / 3]]
    )


def test_moment_budget():
    # d = (0.5, −0.1, 0.3): d² = (0.25, 0.01, 0.09). The mean of all is 0.117, of the two smallest
    # 0.05, of the smallest 0.01.
    w = [exp(0.5), exp(-0.1), exp(0.3)]
    for budget, kept in (
        (0.2, [1, 1, 1]),
        (0.06, [0, 1, 1]),
        (0.04, [0, 1, 0]),
        (0.009, [0, 0, 0]),
    ):
        result = weighted(corrected(pl.MomentBudget(budget)), w)
        assert_loss(result, sum(kept) / 3, rows(kept) / 3)
    # Equal ones stay together: (0.01, 0.09, 0.09) has the mean 0.063, and both of 0.09 go.
    twins = weighted(corrected(pl.MomentBudget(0.06)), [exp(-0.3), exp(-0.1), exp(0.3)])
    assert_loss(twins, 1 / 3, [0, 1 / 3, 0])
    # A masked token neither uses the budget up nor makes room: of two, (0.01, 0.09) has mean 0.05.
    for budget, kept in ((0.06, [0, 1, 1]), (0.04, [0, 1, 0])):
        result = weighted(corrected(pl.MomentBudget(budget)), w, mask=[0, 1, 1])
        assert_loss(result, sum(kept) / 2, rows(kept) / 2)


def test_moment_budget_of_the_whole_step():
    """The bound is measured over both calls: alone, the second would reject its token."""
    spec = corrected(pl.MomentBudget(0.04), rejected="renormalise")
    # d² = (0, 0) and (0.0625): the mean of all three is 0.021.
    logp = torch.full((2, 2), -1.0)
    d = torch.tensor([[0.0, 0.0], [0.25, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    step = pl.measure(spec, logp, logp, -torch.ones(2, 2), mask, rollout_logp=logp - d)
    assert step.tokens == 3
    assert step.statistics["moment_bound"] == inf
    out = [
        pl.policy_loss(
            *(spec, logp[i : i + 1], logp[i : i + 1], -torch.ones(1, 2), mask[i : i + 1]),
            rollout_logp=(logp - d)[i : i + 1],
            totals=step,
        ).loss.item()
        for i in range(2)
    ]
    assert out == pytest.approx([2 / 3, 1 / 3])


def test_opsm():
    # Drift = mean(old − logp): row 0 (0.4 + 0)/2 = 0.2, row 1 (−0.4 + 0)/2 = −0.2. δ = 0.1 rejects
    # the A < 0 tokens of row 0 only.
    logp, old = [[-1.4, -1], [-0.6, -1]], [[-1, -1], [-1, -1]]
    spec = corrected(pl.OPSM(0.1)).replace(trust=pl.Unbounded("logp"))
    # −A·logp: row 0 (A = −2, 3) → (rejected, 3·1); row 1 (A = −1, −1) → −0.6 − 1.
    assert_loss(
        evaluate(spec, logp, old, [[-2, 3], [-1, -1]]),
        (3 - 0.6 - 1) / 4,
        [[0, -3 / 4], [1 / 4, 1 / 4]],
    )
    # δ = 0.3 rejects nothing: −A·logp = 2·(−1.4) more.
    assert_loss(
        evaluate(spec.replace(correction=pl.OPSM(0.3)), logp, old, [[-2, 3], [-1, -1]]),
        (-2.8 + 3 - 1.6) / 4,
    )
    # source="rollout" measures the drift from there: against rollout = logp there is no drift.
    rollout = evaluate(
        spec.replace(correction=pl.OPSM(0.1, source="rollout")),
        logp,
        old,
        [[-2, 3], [-1, -1]],
        rollout_logp=logp,
    )
    assert_loss(rollout, (-2.8 + 3 - 1.6) / 4)


def test_stale():
    # Ages 0, 1, 3 of three tokens with the loss 1 each.
    ages = torch.tensor([[0, 1, 3]])

    def weights(part, rejected="keep"):
        return evaluate(corrected(part, rejected=rejected), [-1] * 3, [-1] * 3, [-1], ages=ages)

    assert_loss(weights(pl.Stale(1)), 2 / 3, [1 / 3, 1 / 3, 0])
    assert_loss(weights(pl.Stale(1), "renormalise"), 1, [1 / 2, 1 / 2, 0])
    assert_loss(weights(pl.Stale(0)), 1 / 3, [1 / 3, 0, 0])
    # ½^age: 1, ½, ⅛.
    assert_loss(weights(pl.Stale(inf, decay=0.5)), 1.625 / 3, [1 / 3, 0.5 / 3, 0.125 / 3])
    # A power in float32 would be off by 1e-8.
    assert float(weights(pl.Stale(inf, decay=0.7)).loss) == pytest.approx(2.043 / 3, abs=1e-12)
    both = weights(pl.Stale(1, decay=0.5))
    assert_loss(both, 1.5 / 3, [1 / 3, 0.5 / 3, 0])
    assert both.metrics["rejected_fraction/Stale"] == pytest.approx(1 / 3)
    assert both.metrics["age_mean"] == pytest.approx(4 / 3)
    assert both.metrics["age_max"] == 3
    kept = weights(pl.Stale(1), "renormalise")
    assert kept.metrics["age_mean"] == pytest.approx(4 / 3)  # of all tokens, rejected ones too


def test_truncate_ratio():
    # Ratios to the rollout policy 4, ½, 1, bounded to [¾, 2]: weights ½, 3/2, 1. A = −1, so that
    # the loss is weight · ratio, which is the bounded ratio, and so is its gradient: the weight
    # carries none.
    logp = [log(4) - 3, log(0.5) - 3, -3]
    spec = corrected(pl.TruncateRatio(2.0, 0.75)).replace(ratio=pl.TokenRatio(anchor="rollout"))
    result = evaluate(spec, logp, None, [-1], rollout_logp=[-3] * 3)
    assert_loss(result, 3.75 / 3, [2 / 3, 0.75 / 3, 1 / 3])
    # A log-ratio of 30 is held at 20 in the ratio and in the weight.
    assert_loss(evaluate(spec, [-1.0], None, [-1], rollout_logp=[-31.0]), 2.0)
    # PPO's clip above 1.2 stops the gradient of A > 0, and its value is weighted: −½·1.2, −3/2·½.
    clipped = evaluate(spec.replace(trust=pl.Clip(0.2)), logp, None, [1], rollout_logp=[-3] * 3)
    assert_loss(clipped, (-0.6 - 0.75 - 1) / 3, [0, -0.75 / 3, -1 / 3])


def test_loglinear_old_policy():
    # Half-way from rollout to logp at age 2, two thirds at age 3, the rollout policy at ages 0, 1.
    rollout, logp = torch.full((1, 4), -3.0), torch.tensor([[-1.5, -1.5, -1.5, -1.5]])
    ages = torch.tensor([[0, 1, 2, 3]])
    old = loglinear_logp(logp.requires_grad_(), rollout, ages)
    assert old.tolist() == [[-3.0, -3.0, -2.25, -2.0]]
    assert not old.requires_grad
    # The log-ratios are 1.5, 1.5, 0.75 and 0.5, the log-weights old - rollout 0, 0, 0.75 and 1.
    spec = corrected(pl.Truncate(inf), aggregate=pl.TokenSum())
    tensors = {"rollout_logp": rollout, "ages": ages}
    mask = torch.ones(1, 4, dtype=torch.bool)
    out = pl.policy_loss(spec, logp, "loglinear", -torch.ones(1, 4), mask, **tensors)
    assert out.loss.item() == pytest.approx(4 * exp(1.5))
    (gradient,) = torch.autograd.grad(out.loss, logp)
    assert gradient.tolist() == [pytest.approx([exp(1.5)] * 4)]
    half = loglinear_logp(logp.detach().bfloat16(), rollout.bfloat16(), ages)
    assert half.dtype == torch.float32
    for missing in tensors:
        rest = {name: x for name, x in tensors.items() if name != missing}
        with pytest.raises(pl.InputError, match="computed from rollout_logp and ages; pass both"):
            pl.policy_loss(spec, logp, "loglinear", -torch.ones(1, 4), mask, **rest)


def test_a_negative_age_is_an_error():
    tensors = [torch.zeros(1, 2)] * 2
    mask, ages = torch.tensor([[True, False]]), torch.tensor([[0, -1]])
    pl.policy_loss("ppo", *tensors, torch.ones(1), mask, ages=ages)
    with pytest.raises(pl.InputError, match="ages must not be negative where mask is True"):
        pl.policy_loss("ppo", *tensors, torch.ones(1), ~mask, ages=ages)
    with pytest.raises(pl.InputError, match="ages"):
        pl.policy_loss("ppo", *tensors, torch.ones(1), mask, ages=ages.float())
    with pytest.raises(pl.InputError, match=r"reads ages, which is missing; pass ages="):
        pl.policy_loss(pl.LossSpec(correction=pl.Stale(1)), *tensors, torch.ones(1), mask)


def test_composition():
    # Truncate gives (2, ½, 1); Reject(k2) drops the tokens with ½d² > 0.5:
    # only ln 4 (½·1.92). Weights (0, ½, 1).
    both = corrected(pl.Truncate(2.0), pl.Reject("k2", high=0.5))
    result = weighted(both, [4, 0.5, 1])
    assert_loss(result, 1.5 / 3, [0, 0.5 / 3, 1 / 3])
    assert result.metrics["rejected_fraction"] == pytest.approx(1 / 3)


def test_self_normalise():
    # (4, 2) has mean 3: (4/3, 2/3). With Band(0, 3) the 4 is rejected and counts as 0:
    # mean 1, weights (0, 2).
    assert_loss(
        weighted(corrected(pl.Truncate(inf), pl.SelfNormalise()), [4, 2]), 1, [2 / 3, 1 / 3]
    )
    assert_loss(weighted(corrected(pl.SelfNormalise(), pl.Band(0.0, 3.0)), [4, 2]), 1, [0, 1])
    # Over sequences: row means 3 and 1, their mean 2: weights (2, 1) and (½, –). (2 + 1 + ½)/3.
    spec = corrected(pl.Truncate(inf), pl.SelfNormalise("sequences"))
    assert_loss(
        weighted(spec, [[4, 2], [1, 77]], mask=[[1, 1], [1, 0]]),
        3.5 / 3,
        [[2 / 3, 1 / 3], [0.5 / 3, 0]],
    )


# --- The denominator ------------------------------------------------------------------------------

# Weights (4, 1) and (1, 2); Band(½, 3) rejects the first token. The others weigh 1, 1 and 2.
REJECTED = [
    ("keep", pl.TokenMean(), 4 / 4, [[0, 1 / 4], [1 / 4, 2 / 4]]),
    ("renormalise", pl.TokenMean(), 4 / 3, [[0, 1 / 3], [1 / 3, 2 / 3]]),
    ("drop_sequence", pl.TokenMean(), 3 / 2, [[0, 0], [1 / 2, 2 / 2]]),
    ("keep", pl.SeqMeanTokenMean(), (1 / 2 + 3 / 2) / 2, [[0, 1 / 4], [1 / 4, 2 / 4]]),
    ("renormalise", pl.SeqMeanTokenMean(), (1 / 1 + 3 / 2) / 2, [[0, 1 / 2], [1 / 4, 2 / 4]]),
    ("drop_sequence", pl.SeqMeanTokenMean(), (3 / 2) / 1, [[0, 0], [1 / 2, 2 / 2]]),
    ("keep", pl.SeqMeanTokenSum(), (1 + 3) / 2, [[0, 1 / 2], [1 / 2, 2 / 2]]),
    ("renormalise", pl.SeqMeanTokenSum(), (1 + 3) / 2, [[0, 1 / 2], [1 / 2, 2 / 2]]),
    ("drop_sequence", pl.SeqMeanTokenSum(), 3 / 1, [[0, 0], [1, 2]]),
]


@walked(("rejected", "aggregate", "loss", "grad"), REJECTED, ids=str)
def test_rejected(rejected, aggregate, loss, grad):
    spec = corrected(pl.Band(0.5, 3.0), rejected=rejected, aggregate=aggregate)
    assert_loss(weighted(spec, [[4, 1], [1, 2]]), loss, grad)


def test_rejected_tokens_and_the_other_terms():
    # keep: the rejected token still pays its KL (logp − ref = 1): (0 + 1 + 0.5 + 0.5)/2.
    # renormalise: it is gone: (1 + 0.5)/1.
    spec = corrected(pl.Band(0.5, 3.0)).replace(kl=pl.KL("k1", 0.5))
    assert_loss(weighted(spec, [4, 1], ref_logp=[-2, -2]), (1 + 0.5 + 0.5) / 2, [0.5 / 2, 1.5 / 2])
    assert_loss(
        weighted(spec.replace(rejected="renormalise"), [4, 1], ref_logp=[-2, -2]), 1.5, [0, 1.5]
    )


def test_rejected_tokens_leave_the_sequence_ratio():
    # Log-ratios (ln 4, 0), the first token rejected. keep: s = 2 for the kept token, loss 2/2.
    # renormalise: s = 1, loss 1.
    spec = corrected(pl.Band(0.5, 3.0), aggregate=pl.SeqMeanTokenMean()).replace(
        ratio=pl.SequenceRatio()
    )
    old = [-1 - log(4), -1]
    rollout = [old[0] - log(4), -1]
    assert_loss(evaluate(spec, [-1, -1], old, [-1, -1], rollout_logp=rollout), 2 / 2, [0.5, 0.5])
    assert_loss(
        evaluate(
            spec.replace(rejected="renormalise"), [-1, -1], old, [-1, -1], rollout_logp=rollout
        ),
        1,
        [0, 1],
    )


# --- KL -------------------------------------------------------------------------------------------

# d = ref_logp − logp; the estimate and its own derivative by logp (which is −d/dd).
KLS = [
    ("k1", LOG2, -LOG2, 1.0),  # −d; 1
    ("abs", LOG2, LOG2, -1.0),  # |d|; −sign(d)
    ("k2", LOG2, LOG2**2 / 2, -LOG2),  # ½d²; −d
    ("k3", LOG2, 1 - LOG2, -1.0),  # eᵈ − d − 1; 1 − eᵈ
    ("k1", -LOG2, LOG2, 1.0),
    ("abs", -LOG2, LOG2, 1.0),
    ("k2", -LOG2, LOG2**2 / 2, LOG2),
    ("k3", -LOG2, LOG2 - 0.5, 0.5),
]


def penalty(kl, d, ratio=1.0):
    """The KL term alone: A = 0, logp = −1, one token."""
    return evaluate(
        pl.LossSpec(trust=RATIO, kl=kl), -1.0, -1.0 - log(ratio), 0.0, ref_logp=-1.0 + d
    )


@walked(("estimator", "d", "value", "slope"), KLS)
def test_kl_value_and_gradient(estimator, d, value, slope):
    # "value": its own slope. "k2": the slope of ½d², −d. "score": its own slope plus the value (∂
    # of v·exp(logp − sg logp)).
    for grad, expected in (("value", slope), ("k2", -d), ("score", slope + value)):
        result = penalty(pl.KL(estimator, 0.5, grad=grad), d)
        assert_loss(result, 0.5 * value, 0.5 * expected)
        assert result.metrics["kl_ref"] == pytest.approx(value, rel=1e-12)
        # Times a ratio of 2, gradient included: (2·v)' = 2·v' + 2·v.
        assert_loss(
            penalty(pl.KL(estimator, 0.5, grad=grad, weight="ratio"), d, ratio=2.0),
            value,
            expected + value,
        )


# Beyond a clamp the number stands still, so its own slope is 0; "k2" keeps the slope of the
# unclamped ½d², "score" the value's.
CLAMPED = [
    (pl.KL("k1", 1.0, clamp=1.0), 3.0, -1.0, 0.0),
    (pl.KL("k2", 1.0, clamp=1.0), 3.0, 0.5, 0.0),
    (pl.KL("k3", 1.0, clamp=1.0), 3.0, e - 2, 0.0),
    (pl.KL("k3", 1.0, clamp=1.0), -3.0, 1 / e, 0.0),  # e⁻¹ + 1 − 1
    (pl.KL("abs", 1.0, clamp=1.0), -3.0, 1.0, 0.0),
    (pl.KL("k3", 1.0, value_clamp=10.0), 3.0, 10.0, 0.0),  # e³ − 4 = 16.1
    (pl.KL("k3", 1.0, value_clamp=20.0), 3.0, exp(3) - 4, 1 - exp(3)),
    (pl.KL("k1", 1.0, value_clamp=2.0), 3.0, -2.0, 0.0),
    (pl.KL("k3", 1.0, grad="k2", clamp=1.0), 3.0, e - 2, -3.0),
    (pl.KL("k3", 1.0, grad="k2", value_clamp=10.0), 3.0, 10.0, -3.0),
    (pl.KL("k3", 1.0, grad="score", value_clamp=10.0), 3.0, 10.0, 10.0),
    (pl.KL("k1", 1.0), 25.0, -20.0, 0.0),  # the library's default clamp is 20
    (pl.KL("k1", 1.0, clamp=None), 25.0, -25.0, 1.0),
]


@walked(("kl", "d", "value", "slope"), CLAMPED, ids=str)
def test_kl_clamps(kl, d, value, slope):
    assert_loss(penalty(kl, d), value, slope)


def test_kl_anchors():
    # k1 against old (logp − old = ln 2), rollout (3) and ref (5).
    for anchor, value in (("old", LOG2), ("rollout", 3.0), ("ref", 5.0)):
        spec = pl.LossSpec(trust=RATIO, kl=pl.KL("k1", 1.0, anchor=anchor))
        assert_loss(
            evaluate(spec, -1.0, -1 - LOG2, 0.0, rollout_logp=-4.0, ref_logp=-6.0), value, 1.0
        )


def test_kl_is_aggregated_like_the_rest():
    # k1 = (1, 3) and (8, –): (4/2 + 8)/2 under SeqMeanTokenMean;
    # the KL's slope is each token's weight.
    spec = pl.LossSpec(trust=RATIO, kl=pl.KL("k1", 1.0), aggregate=pl.SeqMeanTokenMean())
    zero = torch.zeros(2, 2, dtype=torch.float64)
    logp = zero - 1
    result = evaluate(spec, logp, logp, zero, [[1, 1], [1, 0]], ref_logp=[[-2, -4], [-9, -99]])
    assert_loss(result, 5, [[1 / 4, 1 / 4], [1 / 2, 0]])
