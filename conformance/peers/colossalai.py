"""ColossalChat's losses and ours. Its package is on no index:
the other side is 60 recorded cases, and there are no more.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch

from conformance.inputs import Batch
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import colossalai as ours
from policyloss.compiled.call import with_gradients

RECORDED = Path(__file__).resolve().parents[2] / "tests" / "golden" / "coati.json"
CLASSES: dict[str, Any] = {
    "coati.distributed.loss.PolicyLoss": ours.PolicyLoss,
    "coati.models.loss.PolicyLoss": ours.models.PolicyLoss,
    "coati.models.loss.ValueLoss": ours.models.ValueLoss,
}


@cache
def _cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(RECORDED.read_text())["cases"]
    return found


def _inputs(batch: Batch, options: Options) -> Inputs:
    """The recorded inputs, in the precision under test; the drawn batch is not used."""
    recorded: Inputs = _cases()[options["case"]]["inputs"]
    return {
        name: torch.tensor(x, dtype=batch.dtype) if isinstance(x, list) else x
        for name, x in recorded.items()
    }


def _leaf(inputs: Inputs) -> str:
    return "values" if "values" in inputs else "log_probs"


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    """The numbers that were recorded; the loss has the gradient that was recorded with it."""
    leaf = inputs[_leaf(inputs)]
    recorded: Outputs = _cases()[options["case"]]["outputs"]
    found: Outputs = {
        name: x if isinstance(x, bool) else torch.tensor(x, dtype=leaf.dtype)
        for name, x in recorded.items()
    }
    gradient = found.pop(f"grad_{_leaf(inputs)}")
    return {**found, "loss": with_gradients(found["loss"], [gradient], [leaf])}


def _ours(inputs: Inputs, options: Options) -> Outputs:
    case = _cases()[options["case"]]
    result = CLASSES[case["api"]](**case["init"])(**inputs)
    values = result if isinstance(result, tuple) else (result,)
    names = {1: ("loss",), 2: ("loss", "ratio_max"), 3: ("loss", "skip", "ratio_max")}[len(values)]
    return dict(zip(names, values, strict=True))


FUNCTIONS = [
    Function(
        api,
        [{"case": i} for i, case in enumerate(_cases()) if case["api"] == api],
        _inputs,
        _ours,
        _theirs,
        differentiate=(leaf,),
        kinds=("ragged",),  # one case each: the batch that is drawn is not used
    )
    for api, leaf in zip(CLASSES, ("log_probs", "log_probs", "values"), strict=True)
]
