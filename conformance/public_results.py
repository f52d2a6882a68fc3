"""Compares the recorded numbers of public trainers with this library, for the catalogue page.

`python -m conformance.public_results` writes conformance/results/public.json: for each loss or
function of a trainer the number of recorded cases, and the worst difference relative to
max(1, |value|), of values and of gradients.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance import public_controls, public_losses, turns
from conformance.one import write_json

RESULTS = Path(__file__).parent / "results" / "public.json"
Result = dict[str, Any]


def _difference(found: Tensor, expected: Tensor) -> float:
    a, b = found.double(), expected.double()
    return float(((a - b).abs() / b.abs().clamp(min=1)).max())


def _losses() -> dict[str, Result]:
    results = {}
    recorded = public_losses.read_cases()
    for key in public_losses.SPECS:
        values, gradients = [], []
        for case in recorded[key]:
            loss, gradient = public_losses.evaluate(key, case)
            values.append(_difference(loss, torch.tensor(case["loss"], dtype=torch.float64)))
            expected = torch.tensor(case["gradient"], dtype=torch.float64)
            gradients.append(_difference(gradient, expected))
        worst = None if key in public_losses.GRADIENT_ALONE else max(values)
        results[key] = {"cases": len(values), "values": worst, "gradients": max(gradients)}
    both = []
    for case in recorded[public_losses.KLS]:
        logits = torch.tensor(case["logits"], requires_grad=True)
        value = pl.divergence(logits, torch.tensor(case["teacher"]), **case["options"])
        (gradient,) = torch.autograd.grad(value.sum(), logits)
        pairs = (value.detach(), case["value"]), (gradient, case["gradient"])
        both.append([_difference(x, torch.tensor(y)) for x, y in pairs])
    worst_of_both = [max(differences) for differences in zip(*both, strict=True)]
    pair = dict(zip(("values", "gradients"), worst_of_both, strict=True))
    return {**results, public_losses.KLS: {"cases": len(both), **pair}}


def _functions() -> dict[str, Result]:
    results = {}
    for key, cases in json.loads(public_controls.RECORDED.read_text(encoding="utf-8")).items():
        worst = max(_difference(*public_controls.evaluate(key, case)) for case in cases)
        results[key] = {"cases": len(cases), "values": worst, "gradients": None}
    names = {"areal": "areal-main 2026-08-22 turn-level GAE", "trinity": "trinity-rft 0.6.0 gigpo"}
    for trainer, cases in json.loads(turns.RECORDED.read_text(encoding="utf-8")).items():
        pairs = [pair for case in cases for pair in turns.evaluate(trainer, case)]
        worst = max(_difference(*pair) for pair in pairs)
        results[names[trainer]] = {"cases": len(cases), "values": worst, "gradients": None}
    return results


def compare_all() -> dict[str, Result]:
    """Every recorded loss and function, by trainer, release and name."""
    return {**_losses(), **_functions()}


if __name__ == "__main__":
    write_json(RESULTS, compare_all())
