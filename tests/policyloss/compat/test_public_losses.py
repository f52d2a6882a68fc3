"""Specs against the losses of public trainers: numbers that the trainers' own code computed."""

from __future__ import annotations

import torch
from conformance.public_losses import GRADIENT_ALONE, KLS, SEEDS, SPECS, evaluate, read_cases
from walk import walked

import policyloss as pl

CASES = read_cases()


def test_every_spec_has_recorded_cases():
    counts = {key: len(cases) for key, cases in CASES.items()}
    assert counts == {**dict.fromkeys(SPECS, SEEDS), KLS: 2}


@walked("key", SPECS)
def test_the_spec_gives_the_numbers_of_the_trainer(key):
    for case in CASES[key]:
        loss, gradient = evaluate(key, case)
        expected = torch.tensor(case["gradient"], dtype=torch.float64)
        if key not in GRADIENT_ALONE:
            torch.testing.assert_close(loss.item(), case["loss"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
        assert expected.abs().max() > 0


@walked("case", CASES[KLS], ids=lambda case: case["options"]["kind"])
def test_the_divergence_is_that_of_the_trainer(case):
    logits = torch.tensor(case["logits"], requires_grad=True)
    value = pl.divergence(logits, torch.tensor(case["teacher"]), **case["options"])
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    # The trainer computes in float32.
    expected = {name: torch.tensor(case[name]) for name in ("value", "gradient")}
    torch.testing.assert_close(value, expected["value"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected["gradient"], rtol=1e-5, atol=1e-6)
