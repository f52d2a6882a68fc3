"""Hypothesis strategies over whole losses: every slot, every part, any legal number."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

import policyloss as pl
from cases import REJECTED, swapped
from policyloss.compat.parts import GuardedSeqMeanTokenMean
from policyloss.compat.trl.parts import RolloutProduct, WrittenKL

EPS = st.sampled_from([0.0, 3e-4, 0.05, 0.2, 0.28, 1.0, float("inf")])
LOG_CLAMP = st.sampled_from([20.0, 10.0, 0.5, (None, 20.0), (-18.0, 0.7)])
EPSILON = st.sampled_from([1e-8, 0.5])
LEVEL = st.sampled_from(["token", "turn", "geomean", "product"])


def _numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, width=32)


RATIOS = st.one_of(
    st.builds(
        pl.TokenRatio,
        anchor=st.sampled_from(["old", "rollout", "teacher", "current"]),
        log_clamp=LOG_CLAMP,
    ),
    st.builds(
        pl.SequenceRatio,
        grad=st.sampled_from(["sequence", "token"]),
        anchor=st.sampled_from(["old", "rollout"]),
        log_clamp=LOG_CLAMP,
    ),
    st.builds(
        pl.SequenceProduct,
        anchor=st.sampled_from(["old", "rollout"]),
        log_clamp=LOG_CLAMP,
        token_clamp=st.sampled_from([None, 20.0, 0.5]),
    ),
    st.builds(
        RolloutProduct,
        log_clamp=LOG_CLAMP,
        token_clamp=st.sampled_from([None, 20.0, 0.5]),
        outside=st.sampled_from(["truncate", "mask"]),
        low=_numbers(0, 0.9375),
        high=_numbers(1.0625, 5),
    ),
    st.builds(
        pl.MixedRatio,
        st.sampled_from(["arithmetic", "geometric"]),
        anchor=st.sampled_from(["old", "rollout", "ref"]),
        log_clamp=LOG_CLAMP,
    ),
    st.builds(pl.SegmentRatio, anchor=st.sampled_from(["old", "rollout"]), log_clamp=LOG_CLAMP),
)
TRUSTS = st.one_of(
    st.builds(pl.Clip, EPS, EPS, dual=st.none() | _numbers(1.125, 10)),
    st.builds(pl.TwoSidedClip, _numbers(1.125, 8), EPS, EPS),
    st.builds(
        pl.DetachedClip,
        _numbers(0, 1),
        _numbers(1, 8),
        st.sampled_from(["clip", "zero_by_sign", "zero"]),
    ),
    st.builds(
        pl.DetachedClip,
        _numbers(0, 1),
        _numbers(1, 8),
        st.sampled_from(["zero_by_sign", "zero"]),
        st.just("one"),
    ),
    st.builds(pl.SoftGate, _numbers(0.25, 4), _numbers(0.25, 4)),
    st.builds(
        pl.ProbabilityBand,
        st.sampled_from(["tv", "kl"]),
        _numbers(0, 0.5),
        _numbers(0, 0.5),
        st.sampled_from(["advantage", "both"]),
        st.sampled_from(["score", "ratio"]),
        _numbers(0.5, 20),
    ),
    st.builds(pl.GeometricClip, EPS, EPS),
    st.builds(
        pl.FutureKL,
        EPS,
        EPS,
        half_life=_numbers(0.25, 64),
        weight_min=_numbers(0, 1),
        weight_max=_numbers(1, 4),
        safe_ratio=_numbers(0.5, 4),
    ),
    st.builds(pl.GammaWeight, _numbers(0, 3), _numbers(0.5, 3), _numbers(0, 3), _numbers(0.5, 3)),
    st.builds(
        pl.CovClip,
        EPS,
        EPS,
        fraction=_numbers(0.0625, 0.75),
        cov_low=_numbers(-3, 0),
        cov_high=_numbers(1, 8),
        seed=st.integers(0, 99),
    ),
    st.builds(pl.CovKL, fraction=_numbers(0.0625, 0.75), coef=_numbers(0, 2)),
    st.builds(pl.Quadratic, _numbers(0.0625, 2)),
    st.builds(pl.Regression, _numbers(0.0625, 2)),
    st.builds(pl.TaperedNegative, _numbers(0.25, 2)),
    st.builds(pl.Unbounded, st.sampled_from(["ratio", "logp", "current"])),
    st.builds(
        pl.BySign,
        st.builds(pl.Unbounded, st.sampled_from(["ratio", "logp", "current"]))
        | st.builds(pl.SoftGate, _numbers(0.25, 4)),
        st.builds(pl.Clip, EPS, EPS, dual=st.none() | _numbers(1.125, 10))
        | st.builds(pl.Quadratic, _numbers(0.0625, 2)),
    ),
)
WEIGHTS = st.one_of(
    st.builds(pl.Truncate, _numbers(1, 4) | st.just(float("inf")), _numbers(0, 0.75), LEVEL),
    st.builds(pl.Band, _numbers(0, 0.9375), _numbers(1.0625, 5), LEVEL),
    st.builds(pl.TruncateRatio, _numbers(1, 4), _numbers(0, 0.9375)),
    st.builds(
        pl.SequenceMask,
        _numbers(0, 0.96875),
        _numbers(1.03125, 3),
        st.sampled_from(["geomean", "product"]),
        st.sampled_from(["token", "sequence"]),
    ),
    st.builds(
        pl.DivergenceMask,
        st.sampled_from(["kl", "tv"]),
        _numbers(0.015625, 0.25),
        level=st.sampled_from(["token", "sequence"]),
        direction=st.sampled_from(["forward", "both"]),
    ),
)
TESTS = st.one_of(
    st.builds(pl.MomentBudget, _numbers(0.015625, 0.25)),
    st.builds(
        pl.Reject,
        st.sampled_from(["k1", "k2", "k3"]),
        st.sampled_from(["token", "sum", "mean", "max"]),
        low=st.none() | _numbers(-0.5, -0.0625),
        high=_numbers(0.03125, 0.5),
    ),
    st.builds(pl.Veto, _numbers(0.5, 0.9375), st.none() | _numbers(1.0625, 2)),
    st.builds(pl.OPSM, _numbers(0, 0.25), st.sampled_from(["old", "rollout"])),
    st.builds(pl.SequenceMask, _numbers(0, 0.96875), _numbers(1.03125, 3), weight=st.none()),
    st.builds(pl.Stale, st.integers(0, 5) | st.just(float("inf")), _numbers(0.25, 1)),
)
KL_OPTIONS: tuple[st.SearchStrategy[Any], ...] = (
    st.sampled_from(["k1", "k2", "k3", "abs"]),
    _numbers(0, 1),
    st.sampled_from(["value", "k2", "score"]),
)
KL_BOUNDS: tuple[st.SearchStrategy[Any], ...] = (
    st.sampled_from([20.0, 0.5, None]),
    st.sampled_from([None, 10.0, 0.0625]),
    st.sampled_from(["ref", "old", "rollout", "teacher"]),
)
DIVERGENCES = st.builds(
    pl.Divergence,
    st.sampled_from(
        ["forward", "reverse", "jsd", "generalised", "skew_forward", "skew_reverse", "tv"]
    ),
    _numbers(0, 1),
    beta=_numbers(0, 1),
    weight=st.sampled_from([None, "ratio"]),
    clamp=st.sampled_from([None, 0.5, (None, 0.25), (0.125, None)]),
    rest=st.sampled_from(["entry", "drop", "renormalise"]),
)
KLS = st.one_of(
    DIVERGENCES,
    st.tuples(st.builds(pl.KL, *KL_OPTIONS), DIVERGENCES),
    st.builds(pl.KL, *KL_OPTIONS, st.sampled_from([None, "ratio"]), *KL_BOUNDS),
    st.builds(
        pl.KL,
        *KL_OPTIONS,
        st.just("detached_ratio"),
        *KL_BOUNDS,
        weight_max=st.none() | _numbers(0.5, 3),
    ),
    st.builds(
        WrittenKL,
        *KL_OPTIONS,
        st.none(),
        *KL_BOUNDS,
        ratio_level=st.sampled_from(["token", "sequence"]),
    ),
)
HORIZON = st.integers(1, 5000)
# The two that divide by the call's own counts are left out: they depend on the cut by design.
AGGREGATES = st.one_of(
    st.sampled_from(
        [
            pl.TokenMean(),
            pl.SeqMeanTokenMean(),
            pl.SeqMeanTokenSum(),
            pl.TokenSum(),
            pl.PromptMean(),
            pl.TurnMean(),
            pl.WeightMean(),
            pl.LengthWeighted(),
        ]
    ),
    st.builds(GuardedSeqMeanTokenMean, EPSILON),
    st.builds(pl.SeqMeanTokenSumNorm, HORIZON),
    st.builds(pl.TokenSumNorm, HORIZON),
)


@st.composite
def corrections(draw: st.DrawFn) -> tuple[Any, ...]:
    """Up to one weight and two tests, in any order, the weight perhaps self-normalised."""
    tests = st.lists(TESTS, max_size=2, unique_by=lambda p: isinstance(p, pl.MomentBudget) or id(p))
    parts: list[Any] = draw(tests)
    if draw(st.booleans()):
        parts.append(draw(WEIGHTS))
        if draw(st.booleans()):
            parts.append(pl.SelfNormalise(draw(st.sampled_from(["tokens", "sequences"]))))
    return tuple(draw(st.permutations(parts)))


@st.composite
def specs(draw: st.DrawFn) -> pl.LossSpec:
    """Any loss whose parts fit together."""
    trust = draw(TRUSTS)
    correction = draw(corrections())
    spec = swapped(
        pl.LossSpec(),
        ratio=pl.TokenRatio()
        if isinstance(trust, (pl.GeometricClip, pl.FutureKL))
        else draw(RATIOS),
        trust=trust,
        correction=correction,
        rejected=draw(st.sampled_from(REJECTED)) if correction else "keep",
        kl=draw(st.none() | KLS),
        entropy_coef=draw(st.just(0.0) | _numbers(-0.25, 0.25)),
        aggregate=draw(AGGREGATES),
    )
    assert spec is not None, "the strategy only draws parts that fit"
    return spec
