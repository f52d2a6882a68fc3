"""Ratios, trust regions, aggregations and the entropy bonus on numbers small enough to do by hand;
each has its arithmetic in a comment.

Conventions: logp = −1 unless stated, one token, TokenMean, so that the loss is the token's own.
Gradients are with respect to logp.
"""

from functools import partial
from math import e, exp, inf, log

import pytest
import torch
from calls import assert_loss, at_ratio, evaluate, weighted
from walk import walked

import policyloss as pl

LOG2, LOG3 = log(2), log(3)
RATIO = pl.Unbounded("ratio")


def token(trust, **slots):
    return pl.LossSpec(trust=trust, **slots)


# --- The worked example: A = −10, r = 100, ε = 0.2 ------------------------------------------------


def test_worked_example_dual_clip():
    # Unclipped objective r·A = 100·(−10) = −1000, so the loss is 1000 and its slope −A·r = 1000.
    assert_loss(at_ratio(token(RATIO), 100, -10), 1000, 1000)
    # PPO's clip: max(10·100, 10·clip(100, 0.8, 1.2)) = max(1000, 12) = 1000:
    # it does not help where A < 0 and r is large.
    assert_loss(at_ratio(token(pl.Clip(0.2, 0.2)), 100, -10), 1000, 1000)
    # Dual clip, c = 3: min(1000, −A·c) = min(1000, 30) = 30, a constant, so the gradient is 0.
    result = at_ratio(token(pl.Clip(0.2, 0.2, dual=3.0)), 100, -10)
    assert_loss(result, 30, 0)
    assert result.metrics["clip_fraction_dual"] == 1


# --- Trust regions --------------------------------------------------------------------------------

CLIP, DUAL, HIGHER, LOWER = (
    pl.Clip(0.2, 0.2),
    pl.Clip(0.2, 0.2, dual=3.0),
    pl.Clip(0.2, 0.28),
    pl.Clip(0.3, 0.1),
)
TWO_SIDED, TIGHT = pl.TwoSidedClip(4.0, 0.2, 0.2), pl.TwoSidedClip(1.1, 0.2, 0.2)
CISPO = pl.DetachedClip(0.5, 2.0)
CISPO_SIGN = pl.DetachedClip(0.5, 2.0, outside="zero_by_sign")
CISPO_ZERO = pl.DetachedClip(0.5, 2.0, outside="zero")
REC_SIGN = pl.DetachedClip(0.5, 2.0, outside="zero_by_sign", weight="one")
REC_ZERO = pl.DetachedClip(0.5, 2.0, outside="zero", weight="one")
GATE = pl.SoftGate(1.0, 2.0)
GAMMA = pl.GammaWeight(2.0, 3.0, 3.0, 2.0)
TOPR = pl.TaperedNegative(1.0)

# trust, ratio, advantage, loss, gradient; logp = −1
TRUST = [
    # max(−A·r, −A·clip(r, 0.8, 1.2)); slope −A·r where the first is the larger, else 0.
    (CLIP, 2.0, 1.0, -1.2, 0),  # max(−2, −1.2)
    (CLIP, 2.0, -1.0, 2.0, 2.0),  # max(2, 1.2)
    (CLIP, 0.5, 1.0, -0.5, -0.5),  # max(−0.5, −0.8)
    (CLIP, 0.5, -1.0, 0.8, 0),  # max(0.5, 0.8)
    (CLIP, 1.1, 3.0, -3.3, -3.3),  # inside the band: −3·1.1
    (CLIP, 2.0, 0.0, 0.0, 0),
    # Unequal sides: 1.25 lies inside [0.8, 1.28]; 4/3 does not.
    # 0.75 lies inside [0.7, 1.1], 0.5 and 1.25 do not.
    (HIGHER, 1.25, 1.0, -1.25, -1.25),
    (HIGHER, 4 / 3, 1.0, -1.28, 0),
    (LOWER, 0.75, -2.0, 1.5, 1.5),
    (LOWER, 0.5, -2.0, 1.4, 0),  # 2·0.7
    (LOWER, 1.25, 2.0, -2.2, 0),  # −2·1.1
    # Dual clip: nothing changes below r = 3, nor where A > 0.
    (DUAL, 2.0, -1.0, 2.0, 2.0),
    (DUAL, 5.0, -1.0, 3.0, 0),
    (DUAL, 100.0, 1.0, -1.2, 0),
    (DUAL, 0.5, -1.0, 0.8, 0),
    (DUAL, 5.0, 0.0, 0.0, 0),
    (pl.Clip(0.2, 0.2, dual=inf), 5.0, 0.0, 0.0, 0),  # no bound times no advantage is nothing
    (pl.TwoSidedClip(inf), 5.0, 0.0, 0.0, 0),
    (pl.Clip(inf, inf), 5.0, 0.0, 0.0, 0),
    # −min(min(r, 4)·A, clip(r, 0.8, 1.2)·A)
    (TWO_SIDED, 5.0, 1.0, -1.2, 0),  # −min(4, 1.2)
    (TWO_SIDED, 5.0, -1.0, 4.0, 0),  # −min(−4, −1.2)
    (TWO_SIDED, 2.0, -1.0, 2.0, 2.0),  # −min(−2, −1.2)
    (TWO_SIDED, 0.5, -1.0, 0.8, 0),  # −min(−0.5, −0.8)
    (TWO_SIDED, 0.5, 1.0, -0.5, -0.5),
    # delta below 1 + eps_high: it bounds A > 0 at 1.1,
    # and where A < 0 the clip's 1.2 is the last bound.
    (TIGHT, 2.0, 1.0, -1.1, 0),  # −min(1.1, 1.2)
    (TIGHT, 1.15, -1.0, 1.15, 1.15),  # −min(−1.1, −1.15)
    (TIGHT, 2.0, -1.0, 1.2, 0),  # −min(−1.1, −1.2)
    # −clip(r, 0.5, 2)·A·logp; slope −clip(r)·A, whatever r is.
    (CISPO, 1.0, 2.0, 2.0, -2.0),
    (CISPO, 4.0, 2.0, 4.0, -4.0),  # weight 2
    (CISPO, 0.25, 2.0, 1.0, -1.0),  # weight 0.5
    (CISPO, 0.25, -2.0, -1.0, 1.0),
    # PPO's mask: A > 0 above, A < 0 below; the other two corners keep the clipped weight.
    (CISPO_SIGN, 4.0, 2.0, 0.0, 0),
    (CISPO_SIGN, 0.25, -2.0, 0.0, 0),
    (CISPO_SIGN, 4.0, -2.0, -4.0, 4.0),
    (CISPO_SIGN, 0.25, 2.0, 1.0, -1.0),
    (CISPO_ZERO, 4.0, -2.0, 0.0, 0),
    (CISPO_ZERO, 0.25, 2.0, 0.0, 0),
    (CISPO_ZERO, 1.5, 2.0, 3.0, -3.0),
    # REC: −A·logp inside the band, whatever the ratio; outside as above.
    (REC_SIGN, 1.5, 2.0, 2.0, -2.0),
    (REC_SIGN, 4.0, 2.0, 0.0, 0),
    (REC_SIGN, 4.0, -2.0, -2.0, 2.0),
    (REC_SIGN, 0.25, 2.0, 2.0, -2.0),
    (REC_ZERO, 0.25, 2.0, 0.0, 0),
    (REC_ZERO, 0.75, -3.0, -3.0, 3.0),
    # −A·(4/τ)·σ(τ(r−1)); slope −A·4·σ(1−σ)·r. σ(ln 3) = 3/4, σ(1−σ) = 3/16.
    (GATE, 1.0, 1.0, -2.0, -1.0),  # −4·½; −4·¼
    (GATE, 1.0, -1.0, 1.0, 1.0),  # (4/2)·½; 4·¼
    (GATE, 1 + LOG3, 1.0, -3.0, -0.75 * (1 + LOG3)),
    (GATE, 1 + LOG3 / 2, -1.0, 1.5, 0.75 * (1 + LOG3 / 2)),
    # φ(r) = e^λ·r^k·e^(−λr): A > 0 has k = 2, λ = 3, A < 0 has k = 3, λ = 2.
    # Loss −φ·A·logp = φ·A, slope −φ·A.
    (GAMMA, 1.0, 1.0, 1.0, -1.0),
    (GAMMA, 2.0, 1.0, 4 * exp(-3), -4 * exp(-3)),  # e³·4·e⁻⁶
    (GAMMA, 2.0, -1.0, -8 * exp(-2), 8 * exp(-2)),  # e²·8·e⁻⁴
    # −(A·logp − ½·β·d²) with d = ln r = 2: 3 + ½·0.5·4 = 4; slope −A + β·d = −3 + 1.
    (pl.Quadratic(0.5), e**2, 3.0, 4.0, -2.0),
    # (β·d − A)² with d = ln r = 2: (0.5·2 − 3)² = 4; slope 2·β·(β·d − A) = −2.
    (pl.Regression(0.5), e**2, 3.0, 4.0, -2.0),
    (pl.Regression(0.5), e**2, 1.0, 0.0, 0),
    # A > 0: −A·logp whatever r; A ≤ 0: −min(r, 1)·A·logp.
    (TOPR, 4.0, 2.0, 2.0, -2.0),
    (TOPR, 4.0, -2.0, -2.0, 2.0),
    (TOPR, 0.5, -2.0, -1.0, 1.0),
    (pl.TaperedNegative(3.0), 4.0, -2.0, -6.0, 6.0),
    (RATIO, 2.0, 3.0, -6.0, -6.0),
    (pl.Unbounded("logp"), 2.0, 3.0, 3.0, -3.0),  # −3·(−1)
]


@walked(("trust", "ratio", "advantage", "loss", "grad"), TRUST, ids=str)
def test_trust(trust, ratio, advantage, loss, grad):
    assert_loss(at_ratio(token(trust), ratio, advantage), loss, grad)


TV, KL_BAND = pl.ProbabilityBand("tv", 0.2, 0.2), pl.ProbabilityBand("kl", 0.1, 0.1)
# trust, p, p₀, advantage, loss, gradient. A kept token:
# −sg[min(p/p₀, cap)]·A·ln p, slope −min(p/p₀, cap)·A.
BANDS = [
    (TV, 0.5, 0.25, 1.0, 0.0, 0),  # rose by 0.25 > 0.2, and A > 0 pushes it up: dropped
    (TV, 0.5, 0.25, -1.0, 2 * log(0.5), 2.0),  # rose, but A < 0 pushes it back: kept, weight 2
    (TV, 0.25, 0.5, -1.0, 0.0, 0),  # fell by 0.25, A < 0 pushes it down: dropped
    (TV, 0.25, 0.5, 1.0, -0.5 * log(0.25), -0.5),
    (TV, 0.5, 0.4, 1.0, -1.25 * log(0.5), -1.25),  # rose by 0.1 only: kept
    (
        pl.ProbabilityBand("tv", 0.2, 0.3),
        0.5,
        0.25,
        1.0,
        -2 * log(0.5),
        -2.0,
    ),  # high = 0.3 allows 0.25
    (
        pl.ProbabilityBand("tv", 0.3, 0.2),
        0.25,
        0.5,
        -1.0,
        0.5 * log(0.25),
        0.5,
    ),  # low = 0.3 allows 0.25
    (pl.ProbabilityBand("tv", 0.2, 0.2, cap=1.5), 0.5, 0.25, -1.0, 1.5 * log(0.5), 1.5),
    (pl.ProbabilityBand("tv", 0.2, 0.2, form="ratio"), 0.5, 0.25, -1.0, 2.0, 2.0),  # −r·A
    (
        pl.ProbabilityBand("tv", 0.2, 0.2, form="ratio", cap=1.5),
        0.5,
        0.25,
        -1.0,
        2.0,
        2.0,
    ),  # cap is the score form's
    (pl.ProbabilityBand("tv", 0.2, 0.2, sides="both"), 0.5, 0.25, -1.0, 0.0, 0),
    (pl.ProbabilityBand("tv", 0.2, 0.2, sides="both"), 0.25, 0.5, 1.0, 0.0, 0),
    # KL(p₀‖p) of p₀ = ½, p = ¼: ½·ln 2 + ½·ln(½ / ¾) = ½·ln(4/3) = 0.1438.
    (KL_BAND, 0.25, 0.5, -1.0, 0.0, 0),
    (pl.ProbabilityBand("kl", 0.15, 0.1), 0.25, 0.5, -1.0, 0.5 * log(0.25), 0.5),
    # p₀ = ¼, p = ½: ¼·ln ½ + ¾·ln(¾ / ½) = −0.1733 + 0.3041 = 0.1308.
    (KL_BAND, 0.5, 0.25, 1.0, 0.0, 0),
    (pl.ProbabilityBand("kl", 0.1, 0.135), 0.5, 0.25, 1.0, -2 * log(0.5), -2.0),
]


@walked(("trust", "p", "p0", "advantage", "loss", "grad"), BANDS, ids=str)
def test_probability_band(trust, p, p0, advantage, loss, grad):
    assert_loss(evaluate(token(trust), log(p), log(p0), advantage), loss, grad)


def test_a_cap_on_the_unclipped_term():
    """max(-A·min(r, 3), -A·clip(r, 0.8, 1.2)): at A = -1 it is r up to the cap, and flat beyond."""
    ratio = torch.tensor([1.1, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    loss = pl.functional.clipped(ratio, -torch.ones_like(ratio), 0.2, 0.2, cap=3.0)
    loss.sum().backward()
    assert loss.tolist() == [1.1, 2.0, 3.0]
    assert ratio.grad.tolist() == [1.0, 1.0, 0.0]


def test_geometric_clip():
    spec = pl.LossSpec(trust=pl.GeometricClip(0.4, 0.4), aggregate=pl.SeqMeanTokenMean())
    # Log-ratios (1, 0). A = 1: c = (min(1, 0.4), 0), mean 0.2, loss −e^0.2; the clipped token has
    # no gradient, the other −e^0.2/2.
    assert_loss(at_ratio(spec, [e, 1], [1, 1]), -exp(0.2), [0, -exp(0.2) / 2])
    # A = −1 does not push it up: c = (1, 0), mean ½, loss e^½; each token's gradient is e^½/2.
    assert_loss(at_ratio(spec, [e, 1], [-1, -1]), exp(0.5), [exp(0.5) / 2] * 2)
    # Unequal sides: A = −1 and d = (−1, 0) → c = (−0.1, 0); A = 1 and d = (1, 0) → c = (0.6, 0).
    unequal = spec.replace(trust=pl.GeometricClip(0.1, 0.6))
    assert_loss(at_ratio(unequal, [1 / e, 1], [-1, -1]), exp(-0.05), [0, exp(-0.05) / 2])
    assert_loss(at_ratio(unequal, [e, 1], [1, 1]), -exp(0.3), [0, -exp(0.3) / 2])
    # One row masked in the middle: the mean is over the valid tokens, d = (0.2, –, 0) → −e^0.1.
    assert_loss(
        at_ratio(spec, [exp(0.2), 50, 1], [1, 1, 1], mask=[1, 0, 1]),
        -exp(0.1),
        [-exp(0.1) / 2, 0, -exp(0.1) / 2],
    )


def test_future_kl():
    # half_life 1: γ = ½. Log-ratios (0.1, 0.2, –, −0.4): f = (0.1 + ½·0, 0.2 − ½·0.4, –, −0.4)
    # = (0.1, 0, –, −0.4), over the masked token. Weights e^f within [0.7, 1.08]: (1.08, 1, –, 0.7).
    spec = token(pl.FutureKL(0.9, 0.9, half_life=1.0, weight_min=0.7, weight_max=1.08))
    ratios, weights = [exp(0.1), exp(0.2), 9.0, exp(-0.4)], [1.08, 1.0, 0.0, 0.7]
    terms = [-r * w / 3 for r, w in zip(ratios, weights, strict=True)]
    assert_loss(at_ratio(spec, ratios, [1] * 4, mask=[1, 1, 0, 1]), sum(terms), terms)
    # The weight of a bad token above safe_ratio stays within [0.8, 1]: e^0.5 is held at 1, e^-0.4
    # at 0.8; the good one keeps 1.08.
    safe = spec.replace(trust=pl.FutureKL(0.9, 9.0, 1.0, 0.5, 1.08, safe_ratio=1.2))
    for log_ratio, a, weight in ((0.5, -1, 1.0), (0.5, 1, 1.08), (0.1, -1, 1.08)):
        r = exp(log_ratio)
        assert_loss(at_ratio(safe, r, a), -a * r * weight, -a * r * weight)


# A = (3, −1, −1, −1) has mean 0, logp = (−1, −3, −3.5, −4.5) has mean −3:
# covariances (6, 0, ½, 3/2).
COV_A, COV_LOGP = [3.0, -1.0, -1.0, -1.0], [-1.0, -3.0, -3.5, -4.5]


def test_cov_clip():
    # Only the last token lies in (1, 5). 2e-4·4 tokens rounds to none,
    # but at least one is dropped: losses (−3, 1, 1, 0)/4.
    spec = token(pl.CovClip())
    assert_loss(at_ratio(spec, [1.0] * 4, COV_A, COV_LOGP), -1 / 4, [-3 / 4, 1 / 4, 1 / 4, 0])
    # The window (0.4, 7) holds tokens 0, 2 and 3; a fraction of 0.75 is three tokens:
    # only token 1 is left.
    wide = token(pl.CovClip(fraction=0.75, cov_low=0.4, cov_high=7.0))
    assert_loss(at_ratio(wide, [1.0] * 4, COV_A, COV_LOGP), 1 / 4, [0, 1 / 4, 0, 0])
    # Asked for more than there are: a fraction of 1 is four tokens, the window holds three,
    # and all three are dropped.
    for seed in range(8):
        every = token(pl.CovClip(fraction=1.0, cov_low=0.4, cov_high=7.0, seed=seed))
        assert_loss(at_ratio(every, [1.0] * 4, COV_A, COV_LOGP), 1 / 4, [0, 1 / 4, 0, 0])
    # A token that PPO clips already is no candidate: r = ½ and A = −1 holds token 3 at 0.8, and
    # nothing else is in the window.
    assert_loss(
        at_ratio(spec, [1, 1, 1, 0.5], COV_A, COV_LOGP),
        (-3 + 1 + 1 + 0.8) / 4,
        [-3 / 4, 1 / 4, 1 / 4, 0],
    )


def test_cov_kl():
    # A quarter of four tokens: the one with covariance 6.
    # d = (ln 2, 0, 0, 0): −3·2 + ½·ln 2; slope −3·2 + ½·sign(d).
    spec = token(pl.CovKL(fraction=0.25, coef=0.5))
    assert_loss(
        at_ratio(spec, [2, 1, 1, 1], COV_A, COV_LOGP),
        (-6 + LOG2 / 2 + 3) / 4,
        [-5.5 / 4, 1 / 4, 1 / 4, 1 / 4],
    )
    # On the highest covariance only: a log-ratio elsewhere costs nothing.
    # −3 + 2 + 1 + 1; slopes (−3, 2, 1, 1).
    assert_loss(at_ratio(spec, [1, 2, 1, 1], COV_A, COV_LOGP), 1 / 4, [-3 / 4, 2 / 4, 1 / 4, 1 / 4])


# --- Ratios ---------------------------------------------------------------------------------------


def ratio_spec(ratio, aggregate=None):
    return pl.LossSpec(ratio=ratio, trust=RATIO, aggregate=aggregate or pl.SeqMeanTokenMean())


def test_sequence_ratio():
    # Log-ratios (ln 4, 0): s = exp(ln 4 / 2) = 2 for both tokens.
    whole, own = ratio_spec(pl.SequenceRatio()), ratio_spec(pl.SequenceRatio(grad="token"))
    for spec in (whole, own):
        assert_loss(at_ratio(spec, [4, 1], [1, 1]), -2, [-1, -1])  # −s·A; slope −s·A/2 each
    # A = (1, 3): −(2·1 + 2·3)/2 = −4. Through the mean: each token gets half of −4.
    # Token form: −s·A_t/2.
    assert_loss(at_ratio(whole, [4, 1], [1, 3]), -4, [-2, -2])
    assert_loss(at_ratio(own, [4, 1], [1, 3]), -4, [-1, -3])


def test_sequence_product():
    # s = 2·2 = 4; d s/d logp_t = s for each token, and both tokens' surrogates hold it:
    # −(4 + 4)/2, slope −4.
    assert_loss(at_ratio(ratio_spec(pl.SequenceProduct()), [2, 2], [1, 1]), -4, [-4, -4])


def test_segment_ratio():
    # Runs {0, 1} and {3}: ratios 2, 2 and 3. −(2 + 2 + 3)/3;
    # slopes −(2 + 2)/2/3 in the first run, −3/3 in the second.
    spec = ratio_spec(pl.SegmentRatio())
    assert_loss(
        at_ratio(spec, [4, 1, 99, 3], [1, 1, 1, 1], mask=[1, 1, 0, 1]),
        -7 / 3,
        [-2 / 3, -2 / 3, 0, -1],
    )
    # A run ends with its row: (4, 1) and (3, 1) are two runs although no masked token lies between
    # them.
    two = at_ratio(spec, [[4, 1], [9, 1]], [[1, 1], [1, 1]])
    assert_loss(two, -(2 + 3) / 2, [[-0.5, -0.5], [-0.75, -0.75]])


def test_mixed_ratio():
    # Log-ratios (ln 4, 0): r = (4, 1), s = 2. Arithmetic: (3, 1.5), loss −(3 + 1.5)/2. The slope of
    # token t: ½·r_t/2 of its own ratio and, of each token's ½·s, half (the mean of two) over 2
    # tokens: −(r_t/2 + (s/2 + s/2)/2)/2.
    spec = ratio_spec(pl.MixedRatio("arithmetic"))
    assert_loss(at_ratio(spec, [4, 1], [1, 1]), -2.25, [-(2 + 1) / 2, -(0.5 + 1) / 2])
    # Geometric: √(r·s) = (√8, √2). d √(r_t·s)/d logp_t = √(r_t·s)·(½ + ¼), of the other one ¼.
    spec, a, b = ratio_spec(pl.MixedRatio("geometric")), 8**0.5, 2**0.5
    slopes = [-(0.75 * a + 0.25 * b) / 2, -(0.25 * a + 0.75 * b) / 2]
    assert_loss(at_ratio(spec, [4, 1], [1, 1]), -(a + b) / 2, slopes)


def test_regression_on_the_sum_of_a_sequence():
    # Log-ratios (ln 2, ln 2): their sum is ln 4, so (½·ln 4 − 1)², with the slope
    # 2·½·(½·ln 4 − 1) = ln 2 − 1 for each token.
    spec = ratio_spec(pl.SequenceProduct(log_clamp=None)).replace(trust=pl.Regression(0.5))
    assert_loss(at_ratio(spec, [2, 2], [1, 1]), (LOG2 - 1) ** 2, [LOG2 - 1] * 2)


def test_anchors():
    # rollout_logp = logp − ln 3 and old_logp = logp − ln 2: the anchor says which ratio.
    # "current" is exactly 1.
    others = {"rollout_logp": -1 - LOG3, "ref_logp": -1 - 2 * LOG2}
    for anchor, ratio in (("old", 2.0), ("rollout", 3.0), ("ref", 4.0), ("current", 1.0)):
        kinds = (pl.TokenRatio, pl.SequenceRatio, pl.SequenceProduct, pl.SegmentRatio)
        for kind in (*kinds, partial(pl.MixedRatio, "arithmetic")):
            spec = ratio_spec(kind(anchor=anchor))
            result = evaluate(spec, -1.0, -1 - LOG2, 1.0, **others)
            assert_loss(result, -ratio, -ratio)


def test_log_clamp():
    # A log-ratio of 3 held at 1 is e, a constant; (−1, None) holds only the low side;
    # None holds nothing.
    for limit, log_ratio, loss, grad in (
        (1.0, 3, -e, 0),
        (1.0, -3, -1 / e, 0),
        ((-1.0, None), -3, -1 / e, 0),
        ((-1.0, None), 3, -exp(3), -exp(3)),
        ((None, 1.0), 3, -e, 0),
        (None, 25, -exp(25), -exp(25)),
        (20.0, 25, -exp(20), 0),
    ):
        assert_loss(
            at_ratio(ratio_spec(pl.TokenRatio(log_clamp=limit)), exp(log_ratio), 1.0), loss, grad
        )
    # The clamp is on the sequence's log-ratio, not on the tokens': (3, −1)
    # has mean 1 < 2 although a token lies beyond.
    mean = at_ratio(ratio_spec(pl.SequenceRatio(log_clamp=2.0)), [e**3, 1 / e], [1, 1])
    assert_loss(mean, -e, [-e / 2, -e / 2])


# --- Aggregation ----------------------------------------------------------------------------------

# At ratio 1 a token's loss is −A: rows (1, 2, 3) and (10, –, –),
# and a third row with no valid token.
LOSSES = [[1.0, 2.0, 3.0], [10.0, 5.0, 5.0], [7.0, 7.0, 7.0]]
VALID = [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
# aggregation, loss, weight of a token of row 0, of row 1.
# N = 4 tokens, B = 2 sequences, lengths 3 and 1.
AGGREGATES = [
    (pl.TokenMean(), 16 / 4, 1 / 4, 1 / 4),
    (pl.SeqMeanTokenMean(), (6 / 3 + 10) / 2, 1 / 6, 1 / 2),
    (pl.SeqMeanTokenSum(), (6 + 10) / 2, 1 / 2, 1 / 2),
    (pl.SeqMeanTokenSumNorm(5), (6 + 10) / 2 / 5, 1 / 10, 1 / 10),
    (pl.TokenSum(), 16, 1, 1),
    (pl.TokenSumNorm(5), 16 / 5, 1 / 5, 1 / 5),
    (pl.LengthWeighted(), (3 * 6 / 3 + 1 * 10) / 2, 1 / 2, 1 / 2),
    (pl.LocalTokenMean(), 16 / 4, 1 / 4, 1 / 4),
    (pl.LocalSeqMeanTokenMean(), (6 / 3 + 10) / 2, 1 / 6, 1 / 2),
]


def aggregate_case(aggregate, **others):
    spec = pl.LossSpec(trust=RATIO, aggregate=aggregate)
    return at_ratio(
        spec, [[1.0] * 3] * 3, -torch.tensor(LOSSES, dtype=torch.float64), mask=VALID, **others
    )


@walked(("aggregate", "loss", "first", "second"), AGGREGATES, ids=str)
def test_aggregate(aggregate, loss, first, second):
    # The gradient of −A·r at r = 1 is −A, times the token's weight.
    grad = [[first, 2 * first, 3 * first], [10 * second, 0, 0], [0, 0, 0]]
    assert_loss(aggregate_case(aggregate), loss, grad)


def test_prompt_mean():
    # Rows 0 and 1 are one prompt: its four tokens' mean, 16/4. Apart: (6/3 + 10/1)/2. The empty row
    # 2 is no prompt of its own.
    assert_loss(aggregate_case(pl.PromptMean(), group_ids=torch.tensor([7, 7, 3])), 4)
    result = aggregate_case(pl.PromptMean(), group_ids=torch.tensor([7, 3, 9]))
    assert_loss(result, 6, [[1 / 6, 2 / 6, 3 / 6], [10 / 2, 0, 0], [0, 0, 0]])


def test_totals_are_the_denominator():
    # A step of 8 tokens and 5 sequences on 2 ranks whose gradients are averaged:
    # ×2, ÷ the step's counts.
    totals = pl.Totals(tokens=8, sequences=5, groups=4, dp_size=2)
    for aggregate, loss in (
        (pl.TokenMean(), 2 * 16 / 8),
        (pl.SeqMeanTokenMean(), 2 * (2 + 10) / 5),
        (pl.SeqMeanTokenSum(), 2 * 16 / 5),
        (pl.SeqMeanTokenSumNorm(5), 2 * 16 / 25),
        (pl.TokenSum(), 2 * 16),
        (pl.TokenSumNorm(5), 2 * 16 / 5),
        (pl.LengthWeighted(), 2 * 16 / 5),
        (pl.LocalTokenMean(), 16 / 4),  # the local ones ignore the step, as their names say
        (pl.LocalSeqMeanTokenMean(), (2 + 10) / 2),
    ):
        assert_loss(aggregate_case(aggregate, totals=totals), loss)
    # Three groups in this call, of the step's 4: 2·(16/4 + 0)/4 and 2·(2 + 10)/4.
    assert_loss(
        aggregate_case(pl.PromptMean(), totals=totals, group_ids=torch.tensor([7, 7, 3])), 2
    )
    assert_loss(
        aggregate_case(pl.PromptMean(), totals=totals, group_ids=torch.tensor([7, 3, 9])), 6
    )


# --- Entropy bonus --------------------------------------------------------------------------------


def test_entropy_bonus():
    # Two valid tokens, A = 0: −0.1·(1 + 3)/2; each entropy's gradient is −0.1/2,
    # the masked one's 0.
    spec = pl.LossSpec(trust=RATIO, entropy_coef=0.1)
    result = evaluate(spec, [-1, -1, -1], [-1, -1, -1], [0, 0, 0], [1, 1, 0], entropy=[1, 3, 100])
    assert_loss(result, -0.2, [0, 0, 0])
    torch.testing.assert_close(
        result.entropy_grad,
        torch.tensor([[-0.05, -0.05, 0]], dtype=torch.float64),
        rtol=1e-14,
        atol=0,
    )
    # It is not multiplied by the correction's weight:
    # w = 4 doubles nothing but the policy term, 4·1 − 0.1·3.
    both = weighted(
        pl.LossSpec(trust=RATIO, correction=pl.Truncate(inf), entropy_coef=0.1), 4.0, entropy=3.0
    )
    assert_loss(both, 4 - 0.3, 4)


# --- Numerics -------------------------------------------------------------------------------------


def test_half_precision_is_upcast_before_the_subtraction():
    # −2⁻⁷ + 3 + 2⁻⁶ = 3 + 2⁻⁷, which bfloat16 (spacing 2⁻⁶ there) cannot hold:
    # subtracting first would round it to 3.
    near, far = (torch.tensor([[x]], dtype=torch.bfloat16) for x in (-(2.0**-7), -(3 + 2.0**-6)))
    expected = pytest.approx(-exp(3 + 2.0**-7), rel=1e-6)
    one = torch.ones(1, 1)
    ratio = pl.policy_loss(token(RATIO), near, far, one, one).loss
    weight = pl.policy_loss(
        token(RATIO, correction=pl.Truncate(inf)), near, near, one, one, rollout_logp=far
    ).loss
    assert ratio.dtype == weight.dtype == torch.float32
    assert ratio.item() == expected
    assert weight.item() == expected


@walked("garbage", [float("nan"), inf, -inf, 1e30])
def test_masked_garbage_is_replaced(garbage):
    # The second token is masked; whatever stands there, the first token's −2·1 and slope −2 are all
    # there is, in the metrics too.
    spec = pl.LossSpec(
        trust=RATIO, correction=pl.Truncate(inf), kl=pl.KL("k3", 1.0), entropy_coef=1.0
    )

    def with_masked(x):
        old = [-1 - LOG2, x]
        return evaluate(
            spec, [-1, x], old, [1, x], [1, 0], rollout_logp=old, ref_logp=[-1, x], entropy=[0, x]
        )

    result = with_masked(garbage)
    assert_loss(result, -2, [-2, 0])
    assert result.metrics == with_masked(0.0).metrics
