"""`check_loss` passes what is right and names what is wrong."""

import pytest
import torch

import policyloss as pl
from policyloss.check.loss import FrozenStopGradients

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


def test_a_users_function_passes():
    report = pl.check_loss(lambda t: -t.advantages * t.ratio.clamp(max=2.0))
    assert report, str(report)
    assert "11 of 11" in str(report)


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
TURNED = {
    "the sign": ("direction", lambda t: t.advantages * t.ratio),
    "the sign of a clip": ("direction", lambda t: -pl.Clip(0.2, 0.2)(t).loss),
    "|advantages|": ("direction", lambda t: -t.advantages.abs() * t.ratio),
    "min for max": (
        "pessimism",
        lambda t: torch.minimum(-t.advantages * t.ratio, -t.advantages * t.ratio.clamp(*CLIPS)),
    ),
    "max for min": (
        "pessimism",
        lambda t: -torch.maximum(t.advantages * t.ratio, t.advantages * t.ratio.clamp(*CLIPS)),
    ),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_loss_that_was_turned_round_is_caught(name):
    """By the one check that is meant to, and by no other: everything else about it is right."""
    check, turned = TURNED[name]
    assert {r.name for r in pl.check_loss(turned).results if not r.passed} == {check}


@pytest.mark.parametrize(
    "name", sorted(name for name in FIRST.values() if not pl.preset(name).needs_statistics)
)
def test_every_trust_part_of_a_preset_passes_as_a_callable(name):
    spec = pl.preset(name)
    report = pl.check_loss(lambda t: spec.trust(t), base=spec)
    assert report, str(report)


LIMITED_OTHERWISE = {
    "from above only": lambda t: -t.advantages * t.ratio.clamp(max=2.0),
    "on both sides": lambda t: -t.advantages * t.ratio.clamp(*CLIPS),
    "where the advantage is positive": lambda t: torch.where(
        t.advantages > 0,
        torch.maximum(-t.advantages * t.ratio, -t.advantages * t.ratio.clamp(max=1.2)),
        -t.advantages * t.ratio,
    ),
    "good tokens only": lambda t: -t.advantages.clamp(min=0) * t.logp,
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


def test_frozen_stop_gradients_replay_what_they_recorded():
    frozen = FrozenStopGradients()
    # x·sg[x] at 2 is 2·2; away from there the second factor stays 2.
    product = frozen.function(lambda x: x * x.detach(), torch.tensor(2.0))
    assert frozen.base.item() == 4.0
    assert product(torch.tensor(5.0)).item() == 10.0
