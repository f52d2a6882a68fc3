"""Advantages, shaping, masks and controllers against public trainers: numbers of their own code."""

from __future__ import annotations

import json

import torch
from conformance.public_controls import FUNCTIONS, RECORDED, SEEDS
from walk import walked

import policyloss as pl

CASES = json.loads(RECORDED.read_text())
# Trinity-RFT, OpenRLHF and AReaL compute these in float32.
IN_FLOAT32 = ("asymre", "soft_overlong")


def test_every_function_has_recorded_cases():
    assert {key: len(cases) for key, cases in CASES.items()} == dict.fromkeys(FUNCTIONS, SEEDS)


def tensors(case, dtype):
    """The lists of a case as tensors."""
    for name, x in case.items():
        if isinstance(x, list):
            plain = torch.tensor(x)
            x = torch.tensor(x, dtype=dtype) if plain.is_floating_point() else plain
        yield name, x


@walked("key", FUNCTIONS)
def test_the_function_gives_the_numbers_of_the_trainer(key):
    name = FUNCTIONS[key][1]
    dtype, tolerance = (torch.float32, 2e-7) if name in IN_FLOAT32 else (torch.float64, 1e-13)
    for case in CASES[key]:
        call = dict(tensors(case, dtype))
        expected = call.pop("result")
        if name == "AdaptiveKL":
            controller, found = pl.AdaptiveKL(call["coef"], call["target"], call["horizon"]), []
            for kl in call["kls"].tolist():
                controller = controller.after(kl, call["n"])
                found.append(controller.coef)
            found = torch.tensor(found, dtype=torch.float64)
        else:
            found = getattr(pl.advantage, name)(**call)
        assert expected.unique().numel() > 1
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
