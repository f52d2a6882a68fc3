"""`check_loss` passes right losses and names the faults of wrong ones."""

import itertools
import math

import pytest
import torch
from walk import in_shares, walked

import policyloss as pl
from policyloss.check.loss import FrozenStopGradients, _anchor

# The first preset with each pair of ratio and trust part.
FIRST = {(pl.preset(name).ratio, pl.preset(name).trust): name for name in reversed(pl.presets())}


@pytest.mark.parametrize(
    "name",
    [
        name if name in FIRST.values() else pytest.param(name, marks=pytest.mark.slow)
        for name in pl.presets()
    ],
)
def test_every_preset_passes_the_battery(name):
    report = pl.check_loss(pl.preset(name))
    assert report, str(report)


@walked(
    "part", [pl.Stale(1), pl.Stale(math.inf, 0.5), pl.TruncateRatio(1.1), pl.Truncate(1.1)], ids=str
)
def test_a_correction_of_async_training_passes_the_battery(part):
    spec = pl.LossSpec(ratio=pl.TokenRatio(anchor="rollout"), correction=part)
    for rejected in ("keep", "renormalise"):
        report = pl.check_loss(spec.replace(rejected=rejected))
        assert report, str(report)


def test_a_users_function_passes():
    report = pl.check_loss(lambda t: -t.advantages * t.ratio.clamp(max=2.0))
    assert report, str(report)
    assert "14 of 14" in str(report)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        return 0.5 * g


WRONG = {
    "runs": lambda t: (-t.advantages * t.ratio).sum(),
    "gradient": lambda t: -t.advantages * _WrongGradient.apply(t.log_ratio),
    "mask": lambda t: -t.advantages * (t.read("logp") - t.read("old_logp")).exp(),
    "row order": lambda t: -t.advantages * t.ratio * torch.arange(t.mask.shape[0])[:, None],
    "partition": lambda t: -t.advantages * t.ratio / t.mask.sum(),
    "dtype": lambda t: (
        -t.advantages * (t.logp.to(t.read("old_logp").dtype) - t.read("old_logp")).exp()
    ),
    "rerun": lambda t: -t.advantages * t.ratio * torch.rand(()),
}


CLIPS = (0.8, 1.2)


def pg(t):
    """The plain policy gradient."""
    return -t.advantages * t.ratio


def clipped(t, low=0.8, high=1.2):
    return -t.advantages * t.ratio.clamp(low, high)


def d(t, anchor="ref"):
    return t.log_ratio_to(anchor)


def corrected(weight):
    return pl.LossSpec(correction=lambda t: pl.Corrected(weight(t), None))


def pulled(penalty):
    return pl.LossSpec(kl=lambda t: 0.1 * penalty(t))


# By the check that is meant to catch it: losses that are wrong in nothing else.
TURNED = {
    "direction": {
        "the sign": lambda t: t.advantages * t.ratio,
        "the sign of a clip": lambda t: -pl.Clip(0.2, 0.2)(t).loss,
        "|advantages|": lambda t: -t.advantages.abs() * t.ratio,
        "swapped bounds": lambda t: torch.maximum(pg(t), clipped(t, 1.2, 0.8)),
        "swapped log-bounds": lambda t: torch.maximum(
            pg(t), -t.advantages * t.log_ratio.clamp(0.2, -0.2).exp()
        ),
    },
    "pessimism": {
        "min for max": lambda t: torch.minimum(pg(t), clipped(t)),
        "max for min": lambda t: -torch.maximum(-pg(t), -clipped(t)),
        "no max": clipped,
        "no max, asymmetric": lambda t: clipped(t, 0.8, 1.28),
        "no max, from below only": lambda t: -t.advantages * t.ratio.clamp(min=0.8),
        "no max, in logs": lambda t: -t.advantages * t.log_ratio.clamp(-0.2, 0.2).exp(),
    },
    "detach": {
        "a weight by the engine": corrected(lambda t: d(t, "rollout").exp().clamp(max=2.0)),
        "a weight by the old policy": corrected(lambda t: d(t, "old").exp()),
        "a weight that hides in a mean": corrected(
            lambda t: t.sequences.expand(t.sequence_mean(d(t, "old"))).exp()
        ),
        "with another correction": pl.LossSpec(
            correction=(pl.Veto(), lambda t: pl.Corrected(d(t, "rollout").exp(), None))
        ),
        "an average": pl.LossSpec(
            aggregate=lambda t: torch.where(t.mask, t.logp.exp(), 0) / t.totals.tokens.clamp(min=1)
        ),
    },
    "importance": {
        "engine over trainer": corrected(lambda t: (-t.log_weight()).exp()),
        "truncated": corrected(lambda t: (-t.log_weight()).exp().clamp(max=2.0)),
        "engine over the current policy": corrected(lambda t: (-d(t, "rollout")).exp().detach()),
        "of a sequence": corrected(
            lambda t: t.sequences.expand(t.sequence_mean(-t.log_weight())).exp()
        ),
        "as a score function": lambda t: -t.advantages * (1 / t.ratio).detach() * t.logp,
        "as a score function, truncated": lambda t: (
            -t.advantages * (1 / t.ratio).detach().clamp(max=2.0) * t.logp
        ),
    },
    "anchor": {
        "k1": pulled(lambda t: -d(t)),
        "k2": pulled(lambda t: -d(t).square()),
        "k3": pulled(lambda t: -((-d(t)).exp() - 1 + d(t))),
        "abs": pulled(lambda t: -d(t).abs()),
        "clamped": pulled(lambda t: -d(t).clamp(-0.5, 0.5).square()),
        "to a teacher": pulled(lambda t: -d(t, "teacher")),
        "to the old policy": pulled(lambda t: -d(t, "old").square()),
        "in the surrogate": lambda t: pg(t) - 0.1 * d(t).square(),
        "k1 in the surrogate": lambda t: pg(t) - 0.1 * d(t),
    },
}


@pytest.mark.parametrize("check", TURNED)
def test_a_loss_that_was_turned_round_is_caught(check):
    """By the one check that is meant to, and by no other: everything else about it is right."""
    failed = {
        name: {r.name for r in pl.check_loss(turned).results if not r.passed}
        for name, turned in TURNED[check].items()
    }
    assert failed == {name: {check} for name in failed}


def test_a_problem_is_described_in_words():
    said = {
        "no detach": TURNED["detach"]["a weight by the engine"],
        "nothing depends on logp": lambda t: -t.advantages * t.anchor_logp("old"),
        "swapped": TURNED["direction"]["swapped bounds"],
        "torch.maximum": clipped,
        "upside down": TURNED["importance"]["truncated"],
        "away from its anchor": TURNED["anchor"]["k3"],
    }
    assert {words: words in str(pl.check_loss(loss)) for words, loss in said.items()} == (
        dict.fromkeys(said, True)
    )


def test_every_kl_of_the_library_pulls_to_its_anchor():
    failed = {}
    for estimator, grad, weight, anchor, clamp in itertools.product(
        ("k1", "k2", "k3", "abs"),
        ("value", "k2", "score"),
        (None, "ratio", "detached_ratio"),
        ("ref", "old"),
        (20.0, 0.5),
    ):
        part = pl.KL(estimator, 0.1, grad=grad, weight=weight, anchor=anchor, clamp=clamp)
        if problem := _anchor(pl.LossSpec(kl=part), None):
            failed[part] = problem
    assert not failed


@in_shares(2)
def test_every_trust_part_of_a_preset_passes_as_a_callable(share):
    names = sorted(name for name in FIRST.values() if not pl.preset(name).needs_statistics)
    specs = {name: pl.preset(name) for name in names[share::2]}
    reports = {n: pl.check_loss(lambda t, s=s: s.trust(t), base=s) for n, s in specs.items()}
    assert [str(report) for report in reports.values() if not report] == []


LIMITED_OTHERWISE = {
    "from above only": lambda t: -t.advantages * t.ratio.clamp(max=2.0),
    "dropped on both sides": lambda t: (
        -t.advantages * torch.where((t.ratio - 1).abs() < 0.2, t.ratio, 0)
    ),
    "held from above": lambda t: torch.maximum(pg(t), clipped(t)).minimum(3 * t.advantages.abs()),
    "where the advantage is positive": lambda t: torch.where(
        t.advantages > 0,
        torch.maximum(-t.advantages * t.ratio, -t.advantages * t.ratio.clamp(max=1.2)),
        -t.advantages * t.ratio,
    ),
    "good tokens only": lambda t: -t.advantages.clamp(min=0) * t.logp,
    "bad tokens only": lambda t: -t.advantages.clamp(max=0) * t.ratio,
    "a KL that is weighed by the ratio": lambda t: pg(t) + 0.1 * t.ratio * d(t),
    "the forward KL": lambda t: pg(t) - 0.1 * (-d(t)).exp() * d(t),
    "scaled": lambda t: -2 * t.advantages * t.ratio,
}


@pytest.mark.parametrize("name", LIMITED_OTHERWISE)
def test_other_limits_are_no_mistake(name):
    report = pl.check_loss(LIMITED_OTHERWISE[name])
    assert report, str(report)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_function_is_caught_by_the_check_that_is_meant_to(name):
    report = pl.check_loss(WRONG[name])
    failed = {r.name for r in report.results if not r.passed}
    assert name in failed, str(report)


def test_packing_catches_a_function_that_assumes_rows():
    report = pl.check_loss(lambda t: -t.advantages * t.ratio * t.ratio.mean(-1, keepdim=True))
    assert "packing" in {r.name for r in report.results if not r.passed}


def test_an_empty_batch_must_cost_nothing():
    def restless(t):
        return torch.where(t.mask.any(), -t.advantages * t.ratio, float("nan"))

    spec = pl.LossSpec(
        trust=restless, aggregate=lambda t: torch.where(t.mask.any(), 1.0, float("nan"))
    )
    assert "empty batch" in {r.name for r in pl.check_loss(spec).results if not r.passed}


def test_an_error_in_the_function_is_reported_not_raised():
    def broken(t):
        raise RuntimeError("no such thing")

    report = pl.check_loss(broken)
    assert not report
    assert "RuntimeError: no such thing" in str(report)


def test_a_detached_result_is_named():
    assert "detached" in str(
        pl.check_loss(lambda t: (-t.advantages * t.ratio).detach() + 0 * t.ratio)
    )


def test_frozen_stop_gradients_replay_recorded_values():
    frozen = FrozenStopGradients()
    # x·sg[x] at 2 is 2·2; away from there the second factor stays 2.
    product = frozen.function(lambda x: x * x.detach(), torch.tensor(2.0))
    assert frozen.base.item() == 4.0
    assert product(torch.tensor(5.0)).item() == 10.0
