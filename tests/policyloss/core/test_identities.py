"""Equations between losses: parts at the edges of their fields, and equal parts with two names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf

import torch
from walk import walked

import policyloss as pl
from cases import (
    PRESETS,
    TRUSTS,
    Batch,
    assert_same,
    assert_same_result,
    label,
    make_batch,
    run,
    unweighted,
)
from policyloss import functional

RATIO = pl.Unbounded("ratio")
BATCH = unweighted(make_batch(seed=11))


def on_policy(batch: Batch) -> Batch:
    """The same batch before the first step: old_logp is logp, bit for bit."""
    return replace(batch, old_logp=batch.logp.clone())


def matched(batch: Batch) -> Batch:
    """The same batch from a perfect engine: rollout_logp is old_logp, bit for bit."""
    return replace(batch, rollout_logp=batch.old_logp.clone())


def one_token(batch: Batch) -> Batch:
    """The first column of a batch as sequences of one token, all to be trained on."""
    short = batch.map(lambda x: x[:, :1], *batch.token_shaped)
    rows = len(batch.lengths)
    return replace(
        short,
        mask=torch.ones(rows, 1, dtype=torch.bool),
        lengths=torch.ones(rows, dtype=torch.int64),
        width=1,
    )


def same_loss(a: pl.LossSpec, b: pl.LossSpec, batch: Batch, tol: float = 1e-12) -> None:
    """Loss and gradients agree; metrics may differ, since they report what each spec did."""
    x, y = run(a, batch), run(b, batch)
    assert_same(x.loss, y.loss, tol, "loss")
    assert_same(x.dlogp, y.dlogp, tol, "gradient")


def differ(a: pl.LossSpec, b: pl.LossSpec, batch: Batch) -> bool:
    return (run(a, batch).dlogp - run(b, batch).dlogp).abs().max().item() > 1e-3


# --- Ratio 1 --------------------------------------------------------------------------------------

# GeometricClip's ratio is the sequence's: its gradient is −A only on average over the sequence.
# CovClip and CovKL choose tokens: a dropped one has gradient 0, a penalised one has |log_ratio| at
# its kink, where the gradient is taken as 0. Regression's gradient is −2·beta·A. Two forms of
# Unbounded weight the gradient by the probability (`test_mixture` has their numbers).
NOT_MINUS_A = (pl.GeometricClip, pl.CovClip, pl.Regression)
WEIGHTED = (pl.Unbounded("probability"), pl.Unbounded("uncertainty"))
MINUS_A = [t for t in TRUSTS if not isinstance(t, NOT_MINUS_A) and t not in WEIGHTED]


@walked("trust", MINUS_A, ids=label)
def test_gradient_at_ratio_one_is_minus_advantage(trust):
    batch = on_policy(BATCH)
    result = run(pl.LossSpec(trust=trust, aggregate=pl.TokenSum()), batch)
    assert_same(result.dlogp, torch.where(batch.mask, -batch.advantages, 0))
    mean = run(pl.LossSpec(trust=trust), batch)
    assert_same(mean.dlogp, torch.where(batch.mask, -batch.advantages, 0) / batch.mask.sum())


def test_cov_clip_at_ratio_one_is_minus_advantage_or_dropped():
    batch = on_policy(BATCH)
    trust = pl.CovClip(fraction=0.2, cov_low=-1.0, cov_high=5.0)
    grad = run(pl.LossSpec(trust=trust, aggregate=pl.TokenSum()), batch).dlogp
    kept = grad != 0
    assert_same(grad[kept], -batch.advantages[kept])
    assert int((batch.mask & ~kept).sum()) == int(0.2 * batch.mask.sum())


def test_geometric_clip_at_ratio_one_is_minus_the_mean_advantage():
    batch = on_policy(BATCH)
    grad = run(pl.LossSpec(trust=pl.GeometricClip(0.4, 0.4), aggregate=pl.TokenSum()), batch).dlogp
    total = torch.where(batch.mask, batch.advantages, 0).sum(-1, keepdim=True) / batch.mask.sum(
        -1, keepdim=True
    ).clamp(min=1)
    assert_same(grad, torch.where(batch.mask, -total, 0))


def test_gmpo_as_a_function_is_its_part():
    """The part takes its mean in one all-reduce, so it does not call the function."""
    mask, sequences = BATCH.mask, functional.Sequences.of(BATCH.mask)
    logp = BATCH.logp.detach().clone().requires_grad_()
    log_ratio = functional.difference(logp, BATCH.old_logp, mask, logp.dtype)
    advantages = functional.fill(BATCH.advantages, mask)
    losses = functional.geometric_clipped(
        log_ratio, advantages, 0.1, 0.3, sequences.sum(mask), sequences
    )
    loss = functional.fill(losses, mask).sum()
    loss.backward()
    part = run(pl.LossSpec(trust=pl.GeometricClip(0.1, 0.3), aggregate=pl.TokenSum()), BATCH)
    assert_same(loss.detach(), part.loss)
    assert_same(logp.grad, part.dlogp)


@walked("name", sorted(n for n, s in PRESETS.items() if not s.correction and s.kl is None))
def test_presets_at_ratio_one_agree_with_reinforce(name):
    """With one advantage per sequence, one token per row and every engine alike,
    each loss has REINFORCE's gradient.
    """
    spec = PRESETS[name]
    batch = on_policy(one_token(BATCH))
    batch = replace(batch, rollout_logp=batch.logp, ref_logp=batch.logp)
    if isinstance(spec.trust, pl.CovClip):
        spec = spec.replace(trust=replace(spec.trust, cov_low=100.0, cov_high=101.0))
    same = pl.LossSpec(trust=pl.Unbounded("logp"), aggregate=spec.aggregate)
    scale = 2 * spec.trust.beta if isinstance(spec.trust, pl.Regression) else 1
    assert_same(run(spec, batch).dlogp, scale * run(same, batch).dlogp)


ARITHMETIC = partial(pl.MixedRatio, "arithmetic")
KINDS = [pl.TokenRatio, pl.SequenceRatio, pl.SequenceProduct, pl.SegmentRatio, ARITHMETIC]


@walked("kind", KINDS, ids=str)
def test_current_anchor_is_exactly_on_policy(kind):
    spec = pl.LossSpec(ratio=kind(anchor="current"), trust=RATIO)
    result = run(spec, BATCH)
    assert (
        result.metrics["ratio_max"]
        == result.metrics["ratio_min"]
        == result.metrics["ratio_mean"]
        == 1.0
    )
    old = run(spec.replace(ratio=kind()), on_policy(BATCH))
    assert_same(result.loss, old.loss, 0)
    assert_same(result.dlogp, old.dlogp, 0)


# --- Edges of the trust regions -------------------------------------------------------------------

EDGES = {
    "eps=inf is no clip": (pl.Clip(inf, inf), RATIO),
    "dual=inf is no dual clip": (pl.Clip(0.2, 0.28, dual=inf), pl.Clip(0.2, 0.28)),
    "delta=inf is no second side": (pl.TwoSidedClip(inf, 0.2, 0.28), pl.Clip(0.2, 0.28)),
    "two-sided is dual clip": (pl.TwoSidedClip(1.5, 0.2, 0.28), pl.Clip(0.2, 0.28, dual=1.5)),
    "two-sided at 1 + eps_high": (pl.TwoSidedClip(1.28, 0.2, 0.28), pl.Clip(0.2, 0.28, dual=1.28)),
    "a band of 1 is no band": (pl.ProbabilityBand("tv", 1.0, 1.0, form="ratio"), RATIO),
    "an infinite kl band is no band": (pl.ProbabilityBand("kl", inf, inf, form="ratio"), RATIO),
    "CISPO held at 1 is REINFORCE": (pl.DetachedClip(1.0, 1.0), pl.Unbounded("logp")),
    "KL-Cov without a coefficient": (pl.CovKL(0.2, coef=0.0), RATIO),
    "Clip-Cov with an empty window": (pl.CovClip(cov_low=1e6, cov_high=2e6), pl.Clip(0.2, 0.2)),
}


@walked("name", EDGES)
def test_edge(name):
    a, b = (pl.LossSpec(trust=trust) for trust in EDGES[name])
    same_loss(a, b, BATCH)


@walked("outside", ["clip", "zero", "zero_by_sign"])
def test_unclipped_cispo_has_the_gradient_of_the_ratio(outside):
    # sg[r]·∇logp = ∇r, so without bounds CISPO and importance sampling move alike,
    # though their values differ.
    cispo = run(pl.LossSpec(trust=pl.DetachedClip(0.0, inf, outside=outside)), BATCH)
    assert_same(cispo.dlogp, run(pl.LossSpec(trust=RATIO), BATCH).dlogp)


def test_two_sided_below_the_clip_is_not_dual_clip():
    assert differ(
        pl.LossSpec(trust=pl.TwoSidedClip(1.05, 0.2, 0.28)),
        pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=1.05)),
        BATCH,
    )


@walked("rho", [1.05, 2.0])
def test_aipo_is_the_ratio_held_from_above(rho):
    """−min(ρ, rho)·A for either sign, from Clip(∞, rho − 1, dual=rho)."""
    spec = pl.preset("aipo").replace(trust=pl.Clip(inf, rho - 1, dual=rho))
    batch = unweighted(make_batch(seed=4, spread=1.0))
    logp = batch.logp.clone().requires_grad_()
    surrogate = -(logp - batch.rollout_logp).exp().clamp(max=rho) * batch.advantages
    naive = surrogate[batch.mask].mean()
    (grad,) = torch.autograd.grad(naive, logp)
    held = (logp - batch.rollout_logp).exp().detach() > rho
    assert all(((batch.advantages * sign > 0) & held & batch.mask).any() for sign in (1, -1)), (
        "the bound never binds"
    )
    result = run(spec, batch)
    assert_same(result.loss, naive.detach())
    assert_same(result.dlogp, grad)


# --- Ratios that are one --------------------------------------------------------------------------


SEQUENCE_LEVEL = (
    pl.SequenceRatio(),
    pl.SequenceRatio(grad="token"),
    pl.SequenceProduct(),
    pl.SegmentRatio(),
)


@walked("kind", SEQUENCE_LEVEL, ids=label)
def test_a_one_token_sequence_has_one_ratio(kind):
    clip = pl.Clip(0.2, 0.28)
    same_loss(pl.LossSpec(ratio=kind, trust=clip), pl.LossSpec(trust=clip), one_token(BATCH))


def test_one_run_makes_segments_sequences():
    whole = replace(BATCH, mask=BATCH.inside)
    spec = pl.LossSpec(
        ratio=pl.SegmentRatio(), trust=pl.Clip(0.01, 0.01), aggregate=pl.SeqMeanTokenMean()
    )
    same_loss(spec, spec.replace(ratio=pl.SequenceRatio()), whole)
    assert differ(spec, spec.replace(ratio=pl.SequenceRatio()), BATCH), (
        "with holes in the mask they are two things"
    )


def test_gspo_is_gspo_token_when_the_advantage_is_constant():
    constant = replace(BATCH, advantages=BATCH.advantages[:, :1].expand_as(BATCH.logp).clone())
    for trust in (pl.Clip(3e-4, 4e-4), pl.Clip(0.05, 0.05, dual=1.1), RATIO):
        gspo = pl.LossSpec(ratio=pl.SequenceRatio(), trust=trust, aggregate=pl.SeqMeanTokenMean())
        own = gspo.replace(ratio=pl.SequenceRatio(grad="token"))
        same_loss(gspo, own, constant)
    assert differ(gspo, own, BATCH), "with token advantages the gradients must differ"
    assert_same(run(gspo, BATCH).loss, run(own, BATCH).loss, 1e-12, "and the value must not")


# --- Corrections without effect -------------------------------------------------------------------

SILENT = [
    (pl.Truncate(2.0),),
    (pl.Truncate(2.0, low=0.5, level="geomean"),),
    (pl.Truncate(1.0, level="product"),),
    (pl.Band(0.5, 5.0),),
    (pl.Band(1.0, 1.0, level="product"),),
    (pl.SequenceMask(0.999, 1.002),),
    (pl.SequenceMask(1.0, 1.0, level="product", weight="sequence"),),
    (pl.SequenceMask(0.9, 1.1, weight=None),),
    (pl.Reject("k1", low=-0.1, high=0.1),),
    (pl.Reject("k2", "sum", high=0.0),),
    (pl.Reject("k3", "mean", high=0.0),),
    (pl.Reject("k1", "max", high=0.0),),
    (pl.Veto(),),
    (pl.Truncate(2.0), pl.Veto(), pl.Reject("k3", high=0.1)),
    (pl.Truncate(2.0), pl.SelfNormalise()),
]


@walked("rejected", ["keep", "renormalise", "drop_sequence"])
@walked("parts", SILENT, ids=label)
def test_weight_one_is_no_correction_bitwise(parts, rejected):
    batch = matched(BATCH)
    for base in (pl.preset("grpo"), pl.preset("gspo"), pl.preset("cispo")):
        plain, silent = (
            run(base, batch),
            run(base.replace(correction=parts, rejected=rejected), batch),
        )
        assert_same(silent.loss, plain.loss, 0)
        assert_same(silent.dlogp, plain.dlogp, 0)


def test_opsm_drops_only_negative_advantages():
    batch = unweighted(make_batch(seed=5))
    spec = pl.LossSpec(trust=RATIO, correction=pl.OPSM(0.0), aggregate=pl.TokenSum())
    lost = run(spec, batch).dlogp - run(spec.replace(correction=()), batch).dlogp
    drift = torch.where(batch.mask, batch.old_logp - batch.logp, 0).sum(-1, keepdim=True)
    dropped = batch.mask & (batch.advantages < 0) & (drift > 0)
    assert dropped.any()
    assert not (dropped | ~batch.mask).all()
    assert torch.equal(lost != 0, dropped)


def test_self_normalised_weights_have_mean_one():
    for over in ("tokens", "sequences"):
        spec = pl.LossSpec(trust=RATIO, correction=(pl.Truncate(inf), pl.SelfNormalise(over)))
        batch = on_policy(replace(BATCH, advantages=-torch.ones_like(BATCH.logp)))
        weights = run(spec.replace(aggregate=pl.TokenSum()), batch).dlogp
        lengths = batch.mask.sum(-1)
        per_row = weights.sum(-1)[lengths > 0] / lengths[lengths > 0]
        mean = weights.sum() / lengths.sum() if over == "tokens" else per_row.mean()
        assert_same(mean, torch.tensor(1.0, dtype=torch.float64))


# --- Aggregations that are one --------------------------------------------------------------------


@walked("name", ["grpo", "gspo", "gmpo"])
def test_length_weighted_is_the_sequence_sum(name):
    spec = pl.preset(name)
    weighted, summed = (
        run(spec.replace(aggregate=a), BATCH) for a in (pl.LengthWeighted(), pl.SeqMeanTokenSum())
    )
    assert_same_result(weighted, summed, 0)


def test_equal_lengths_make_the_means_one():
    equal = replace(BATCH, mask=torch.ones_like(BATCH.mask))
    spec = pl.preset("grpo")
    for aggregate in (
        pl.TokenMean(),
        pl.PromptMean(),
        pl.SeqMeanTokenSumNorm(BATCH.width),
        pl.LocalTokenMean(),
    ):
        if isinstance(aggregate, pl.PromptMean):
            equal = replace(equal, group_ids=torch.arange(len(equal.lengths)))
        same_loss(
            spec.replace(aggregate=aggregate), spec.replace(aggregate=pl.SeqMeanTokenMean()), equal
        )
        assert differ(
            spec.replace(aggregate=aggregate), spec.replace(aggregate=pl.SeqMeanTokenMean()), BATCH
        )


def test_one_group_makes_the_prompt_mean_a_token_mean():
    one = replace(BATCH, group_ids=torch.full_like(BATCH.group_ids, 5))
    spec = pl.preset("grpo")
    same_loss(spec.replace(aggregate=pl.PromptMean()), spec.replace(aggregate=pl.TokenMean()), one)


# --- KL gradients ---------------------------------------------------------------------------------


def kl_gradient(kl: pl.KL) -> torch.Tensor:
    """The gradient of the penalty alone, per token."""
    batch = replace(BATCH, advantages=torch.zeros_like(BATCH.logp))
    return run(pl.LossSpec(trust=RATIO, kl=kl, aggregate=pl.TokenSum()), batch).dlogp


def test_kl_gradients():
    d = torch.where(BATCH.mask, BATCH.logp - BATCH.ref_logp, 0)
    one = BATCH.mask.to(d.dtype)
    values = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": torch.expm1(-d) + d}
    own = {"k1": one, "abs": d.sign(), "k2": d, "k3": -torch.expm1(-d)}
    for estimator, value in values.items():
        assert_same(kl_gradient(pl.KL(estimator, 1.0)), own[estimator], what=estimator)
        assert_same(
            kl_gradient(pl.KL(estimator, 1.0, grad="k2")), d, what=f"{estimator} straight through"
        )
        assert_same(
            kl_gradient(pl.KL(estimator, 1.0, grad="score")),
            own[estimator] + value,
            what=f"{estimator} with score",
        )


def test_kl_ratio_weight_on_policy_is_the_score_form():
    """At ratio 1, r·k has the value of k and its gradient plus k: the same as the score form."""
    batch = on_policy(replace(BATCH, advantages=torch.zeros_like(BATCH.logp)))
    weighted, score = (
        pl.LossSpec(trust=RATIO, kl=kl)
        for kl in (pl.KL("k3", 1.0, weight="ratio"), pl.KL("k3", 1.0, grad="score"))
    )
    same_loss(weighted, score, batch)


# --- Choices by covariance ------------------------------------------------------------------------


def covariances(batch: Batch) -> torch.Tensor:
    a, logp = batch.advantages[batch.mask], batch.logp[batch.mask]
    return (batch.advantages - a.mean()) * (batch.logp - logp.mean())


@walked("fraction", [1e-6, 0.1, 0.5, 1.0])
def test_cov_kl_penalises_the_highest_covariances(fraction):
    spec = pl.LossSpec(trust=pl.CovKL(fraction, coef=1.0), aggregate=pl.TokenSum())
    extra = run(spec, BATCH).dlogp - run(spec.replace(trust=RATIO), BATCH).dlogp
    chosen = extra != 0
    n = int(BATCH.mask.sum())
    assert int(chosen.sum()) == max(1, int(fraction * n))
    cov = torch.where(BATCH.mask, covariances(BATCH), -inf)
    assert cov[chosen].min() >= torch.where(chosen, -inf, cov).max()
    assert_same(extra[chosen], (BATCH.logp - BATCH.old_logp).sign()[chosen])


def test_tied_covariances_do_not_exceed_the_fraction():
    """Without advantages every covariance is 0, and still no more than the fraction
    of the tokens is held back.
    """
    batch = replace(BATCH, advantages=torch.zeros_like(BATCH.advantages))
    n = int(batch.mask.sum())
    held = run(pl.LossSpec(trust=pl.CovKL(0.25)), batch).metrics["clip_fraction_upper"] * n
    assert round(held) == int(0.25 * n)


def dropped_by(seed: int, batch: Batch) -> torch.Tensor:
    """The advantages of the tokens Clip-Cov drops, sorted: which tokens, wherever they stand."""
    spec = pl.LossSpec(
        trust=pl.CovClip(inf, inf, fraction=0.2, cov_low=-5.0, cov_high=5.0, seed=seed),
        aggregate=pl.TokenSum(),
    )
    lost = run(spec, batch).dlogp - run(spec.replace(trust=RATIO), batch).dlogp
    return batch.as_rows(batch.advantages)[lost != 0].sort().values


def test_cov_clip_draw_depends_on_seed_and_token_only():
    first = dropped_by(0, BATCH)
    assert len(first) == int(0.2 * BATCH.mask.sum())
    assert torch.equal(first, dropped_by(0, BATCH))
    assert torch.equal(first, dropped_by(0, BATCH.packed()))
    assert torch.equal(first, dropped_by(0, BATCH.rows([6, 1, 3, 0, 5, 2, 4])))
    padded = BATCH.map(lambda x: torch.nn.functional.pad(x, (0, 5)), *BATCH.token_shaped)
    padded = replace(padded, width=BATCH.width + 5)
    assert torch.equal(first, dropped_by(0, padded))
    others = [dropped_by(seed, BATCH) for seed in range(1, 8)]
    assert sum(not torch.equal(first, other) for other in others) >= 6
