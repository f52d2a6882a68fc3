"""Coefficients that follow a target: hand numbers, exact resume, errors."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from walk import walked

import policyloss as pl


def test_adaptive_kl_by_hand():
    # kl / target − 1 = 1, held at 0.2; 0.2·50/100 = 0.1: 2·1.1
    controller = pl.AdaptiveKL(2.0, target=0.5, horizon=100)
    assert controller.after(1.0, 50).coef == 2.2
    # 0.55/0.5 − 1 = 0.1 is not held: 1 + 0.1·50/100 = 1.05
    assert math.isclose(controller.after(0.55, 50).coef, 2.1, rel_tol=1e-12)
    # −1, held at −0.2
    assert controller.after(0.0, 50).coef == 1.8
    assert controller.after(0.5, 50) == controller


def test_adaptive_entropy_by_hand():
    start = pl.AdaptiveEntropy(0.01, target=0.2, delta=0.005, most=0.016)
    assert start.applied == 0.0  # no entropy is known yet
    low = start.after(0.2)
    assert (low.coef, low.applied) == (0.015, 0.015)
    assert low.after(0.1).coef == 0.016  # held at the largest
    high = low.after(0.3)  # above the target: smaller, and not applied
    assert (high.coef, high.applied) == (0.015 - 0.005, 0.0)
    assert high.after(0.3).after(0.3).after(0.3).coef == 0.0  # held at the least


def test_metrics_are_taken_as_they_are():
    stat = pl.Stat(torch.tensor(3.0), torch.tensor(10.0))
    assert pl.AdaptiveEntropy(target=0.4).after(stat).entropy == pytest.approx(0.3)


@walked(
    ("controller", "step"),
    [
        (pl.AdaptiveKL(0.1, 0.03, 77.0), lambda c, x: c.after(abs(x), 13)),
        (pl.AdaptiveEntropy(0.1, 0.03, 0.0071), lambda c, x: c.after(x)),
    ],
)
def test_a_saved_controller_goes_on_with_the_same_bits(controller, step):
    whole = controller
    for i in range(40):
        if i == 17:
            controller = type(whole)(**json.loads(json.dumps(dataclasses.asdict(whole))))
            assert controller == whole
        whole = step(whole, math.sin(i) / 9)
        if i >= 17:
            controller = step(controller, math.sin(i) / 9)
            assert controller == whole
    assert whole.coef not in (0.1, 0.0, 1.0)


@walked(
    ("call", "words"),
    [
        (lambda: pl.AdaptiveKL(-1.0, 1.0), "AdaptiveKL.coef must be >= 0"),
        (lambda: pl.AdaptiveKL(1.0, 0.0), "AdaptiveKL.target must be > 0"),
        (lambda: pl.AdaptiveKL(1.0, 1.0, horizn=3), "unknown AdaptiveKL field 'horizn'"),
        (lambda: pl.AdaptiveKL(1.0, 1.0).after(math.nan, 1), "kl must be finite"),
        (lambda: pl.AdaptiveKL(1.0, 1.0, 10).after(1.0, 50), "sequences must be < 50"),
        (lambda: pl.AdaptiveEntropy(least=2.0), "least=2.0 is above most=1.0"),
        (lambda: pl.AdaptiveEntropy(delta=0.0), "AdaptiveEntropy.delta must be > 0"),
        (lambda: pl.AdaptiveEntropy().after(math.inf), "entropy must be finite"),
    ],
)
def test_errors_name_the_argument(call, words):
    with pytest.raises(pl.PolicyLossError) as error:
        call()
    assert words in str(error.value), str(error.value)
