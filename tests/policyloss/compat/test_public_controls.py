"""Advantages, shaping, masks and controllers against public trainers: numbers of their own code."""

from __future__ import annotations

import json

import torch
from conformance.public_controls import FUNCTIONS, IN_FLOAT32, RECORDED, SEEDS, evaluate
from walk import walked

CASES = json.loads(RECORDED.read_text())


def test_every_function_has_recorded_cases():
    assert {key: len(cases) for key, cases in CASES.items()} == dict.fromkeys(FUNCTIONS, SEEDS)


@walked("key", FUNCTIONS)
def test_the_function_gives_the_numbers_of_the_trainer(key):
    tolerance = 2e-7 if FUNCTIONS[key][1] in IN_FLOAT32 else 1e-13
    for case in CASES[key]:
        found, expected = evaluate(key, case)
        assert expected.unique().numel() > 1
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
