"""Mistakes that were made once here; each test names what went wrong."""

import math
import weakref

import pytest
import torch
from walk import walked

import policyloss as pl
from policyloss import loss as loss_module
from policyloss.check.batch import Batch
from policyloss.records import ExplainedVariance

BATCH = Batch.random(seed=11)


def test_self_normalise_after_renormalise_is_as_if_the_mask_had_been_false():
    """The mean weight once counted rejected tokens that the denominator no longer did:
    the loss was N/N_kept too large.
    """
    corrections = (pl.Band(0.99, 1.01), pl.SelfNormalise())
    spec = pl.LossSpec(correction=corrections, rejected="renormalise")
    loss, gradient = BATCH.loss(spec)
    keep = ((BATCH.old_logp - BATCH.rollout_logp).exp() - 1).abs() <= 0.01
    edited = Batch(**{**vars(BATCH), "mask": BATCH.mask & keep})
    expected, expected_gradient = edited.loss(
        pl.LossSpec(correction=(pl.Truncate(math.inf), pl.SelfNormalise()))
    )
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@walked("estimator", ["k1", "k2", "k3"])
def test_a_token_the_engine_calls_impossible_is_rejected_not_nan(estimator):
    """k3 of an infinite log-weight was inf − inf."""
    rollout = BATCH.rollout_logp.clone()
    rollout[0, 0] = -torch.inf
    spoiled = Batch(**{**vars(BATCH), "rollout_logp": rollout})
    spec = pl.LossSpec(correction=pl.Reject(estimator, "token", low=-0.5, high=0.5))
    loss, gradient = spoiled.loss(spec)
    assert loss.isfinite()
    # Nothing else moves: the token is rejected, and the others do not change.
    _, before = BATCH.loss(spec)
    assert gradient[0, 0] == 0
    before[0, 0] = 0
    assert torch.equal(gradient, before)


@walked("log_clamp", [None, (None, None), (-20.0, None), 1000.0, math.inf])
def test_a_clipped_token_that_overflows_keeps_gradient_zero(log_clamp):
    """Only log_clamp=None was guarded against 0·inf."""
    logp = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.1, -300.0]])
    spec = pl.LossSpec(ratio=pl.TokenRatio(log_clamp=log_clamp))
    pl.policy_loss(spec, logp, old, torch.ones(1), torch.ones(1, 2)).loss.backward()
    assert logp.grad[0, 1] == 0
    assert logp.grad[0, 0] < 0


def test_clip_cov_does_not_drop_a_nan_unseen():
    """A token with a NaN ratio was a candidate, and a dropped candidate's loss became 0."""
    spec = pl.LossSpec(trust=pl.CovClip(fraction=0.9, cov_low=-9, cov_high=9))
    for i, j in BATCH.mask.nonzero().tolist():
        old = BATCH.old_logp.clone()
        old[i, j] = torch.nan
        assert Batch(**{**vars(BATCH), "old_logp": old}).loss(spec)[0].isnan()


def test_a_veto_does_not_hide_a_nan_weight():
    rollout = BATCH.rollout_logp.clone()
    rollout[0, 0], rollout[0, 1] = torch.nan, BATCH.old_logp[0, 1] + 50
    assert (
        Batch(**{**vars(BATCH), "rollout_logp": rollout})
        .loss(pl.LossSpec(correction=pl.Veto()))[0]
        .isnan()
    )


def test_explained_variance_of_a_constant_target_is_undefined():
    """E[x²] − E[x]² left rounding residue, and the ratio was −1.9e16."""
    for value in (0.1, 0.3, 7.7, 1 / 3):
        target = torch.full((100,), value, dtype=torch.float64)
        error = target - torch.linspace(0, 1, 100, dtype=torch.float64)
        moments = (error.sum(), (error**2).sum(), target.sum(), (target**2).sum())
        assert math.isnan(ExplainedVariance(torch.tensor(100), *moments).item())


def test_a_group_that_was_not_counted_shows():
    """It took the count of its neighbour."""
    spec = pl.LossSpec(aggregate=pl.PromptMean())
    totals = pl.Totals.count(BATCH.mask, group_ids=torch.tensor([0, 0, 2, 2, 4, 4]))
    other = Batch(**{**vars(BATCH), "group_ids": torch.tensor([0, 0, 1, 1, 4, 4])})
    assert other.loss(spec, totals=totals)[0].isnan()


def test_whitening_far_from_zero_is_centred():
    """The mean was rounded to float32 before it was subtracted."""
    x = 10000 + 0.01 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    white = pl.whiten(x, torch.ones_like(x, dtype=torch.bool))
    assert abs(white.double().mean().item()) < 1e-6
    assert torch.equal(pl.whiten(torch.full((8,), 0.1), torch.ones(8), eps=0.0), torch.zeros(8))


def test_a_part_must_return_one_number_per_token():
    """A 0-dim result was broadcast to a plausible loss."""
    with pytest.raises(
        pl.InputError,
        match=r"trust part must return one number per token, shape \(6, 9\); got shape \(\)",
    ):
        BATCH.loss(pl.LossSpec(trust=lambda t: t.advantages.sum()))
    with pytest.raises(pl.InputError, match="kl part must return one number per token"):
        BATCH.loss(pl.LossSpec(kl=lambda t: t.logp.sum()))
    with pytest.raises(pl.InputError, match="Corrected"):
        BATCH.loss(pl.LossSpec(correction=lambda t: t.mask))


def test_a_custom_penalty_is_not_multiplied_by_an_attribute():
    class Half:
        coef = 0.5

        def __call__(self, t):
            return self.coef * t.logp

    def plain(t):
        return 0.5 * t.logp

    assert torch.equal(BATCH.loss(pl.LossSpec(kl=Half()))[0], BATCH.loss(pl.LossSpec(kl=plain))[0])


@walked(
    "aggregate", [pl.TokenMean(), pl.SeqMeanTokenMean()], ids=["shared weight", "weight per token"]
)
def test_compiled_half_precision_is_rounded_after_the_backward_scales_it(aggregate):
    """The gradient was rounded to float16 before a loss scale of 65536 was applied,
    and became 0.
    """
    g = torch.Generator().manual_seed(0)
    logp = (-torch.rand(2, 8, generator=g)).half()
    old = logp.float() + 0.01
    spec, totals = pl.LossSpec(aggregate=aggregate), pl.Totals(320_000_000, 40_000_000)

    def gradient(function):
        leaf = logp.clone().requires_grad_()
        (
            function(spec, leaf, old, torch.ones(2), torch.ones(2, 8), totals=totals).loss * 65536
        ).backward()
        return leaf.grad

    compiled = gradient(torch.compile(pl.policy_loss, fullgraph=True, backend="aot_eager"))
    assert compiled.abs().min() > 0
    torch.testing.assert_close(compiled, gradient(pl.policy_loss), rtol=2e-3, atol=1e-6)


def test_compiled_a_learned_parameter_in_a_users_part_keeps_its_gradient():
    """The compiled path once asked for the gradient of logp only."""
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    spec = pl.LossSpec(trust=lambda t: -t.advantages * t.ratio * weight)

    def loss(logp):
        return pl.policy_loss(spec, logp, **BATCH.others()).loss

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        weight.grad = None
        function(BATCH.logp.clone().requires_grad_()).backward()
        grads.append(weight.grad.clone())
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=1e-12)


def test_metrics_all_reduce_without_process_group_is_the_same_metrics():
    out = pl.policy_loss(pl.preset("ppo"), BATCH.logp, **BATCH.others())
    assert out.metrics.all_reduce().compute() == out.metrics.compute()
    assert (pl.Metrics() + out.metrics).compute() == out.metrics.compute()


def test_the_ratio_is_gone_when_the_metrics_are_taken(monkeypatch):
    """The counts of the call, which the loss divides by, once kept every tensor of it alive."""
    ratios, alive = [], []
    exponential, measure = loss_module.bounded_exp, loss_module.policy_metrics

    def bounded_exp(*arguments):
        value = exponential(*arguments)
        ratios.append(weakref.ref(value))
        return value

    def policy_metrics(*arguments):
        alive.append(ratios[-1]() is not None)
        return measure(*arguments)

    monkeypatch.setattr(loss_module, "bounded_exp", bounded_exp)
    monkeypatch.setattr(loss_module, "policy_metrics", policy_metrics)
    logp = BATCH.logp.clone().requires_grad_()
    pl.policy_loss(pl.preset("ppo"), logp, **BATCH.others()).loss.backward()
    assert alive == [False]
