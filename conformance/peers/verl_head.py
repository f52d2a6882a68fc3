"""verl's fused heads and ours: `FusedLinearForPPO`, and `linear_cross_entropy`, whose kernels need
a GPU, so that its numbers are compared with those of verl's torch backend.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from conformance.inputs import Batch
from conformance.suite import Defect, Function, Inputs, Options, Outputs
from policyloss.compat import verl as ours

TORCH = "verl.utils.experimental.torch_functional"
VOCABULARY, HIDDEN = 23, 16
KINDS = ("ragged", "full", "single_token")
OPTIONS: list[Options] = [{"temperature": t, "chunk_size": n} for t in (1.0, 0.6) for n in (3, 512)]


def inputs(batch: Batch, options: Options) -> Inputs:
    """Hidden states and weights, and tokens; small, because float32 products are added up in
    another order on each side.
    """
    g = batch.generator(5)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=g, dtype=torch.float64) / 2
    hidden = torch.randn(*batch.logp.shape, HIDDEN, generator=g, dtype=torch.float64) / 8
    return {
        "hidden": hidden.to(batch.dtype),
        "weight": weight.to(batch.dtype),
        "ids": torch.randint(0, VOCABULARY, batch.logp.shape, generator=g),
    }


def _outputs(logp: torch.Tensor, entropy: torch.Tensor) -> Outputs:
    # The gradient reaches the weights through both.
    return {"log_probs": logp, "entropy": entropy, "loss": logp + 0.3 * entropy}


def module(cls: Any, i: Inputs, o: Options) -> Outputs:
    """A call of `FusedLinearForPPO`."""
    head = cls(chunk_size=o["chunk_size"])
    return _outputs(*head(i["hidden"], i["weight"], i["ids"], temperature=o["temperature"]))


def _installed(i: Inputs, o: Options) -> Outputs:
    ours.install_head()
    try:
        return module(import_module(TORCH).FusedLinearForPPO, i, o)
    finally:
        ours.uninstall_head()


def _theirs(i: Inputs, o: Options) -> Outputs:
    return module(import_module(TORCH).FusedLinearForPPO, i, o)


def _flat(outputs: Outputs) -> Outputs:
    return {name: x.reshape(-1) for name, x in outputs.items()}


def _cross_entropy(i: Inputs, o: Options) -> Outputs:
    out = ours.linear_cross_entropy(i["hidden"], i["weight"], i["ids"], o["temperature"], "none")
    return _outputs(*out)


def in_float32(options: Options, i: Inputs) -> Defect | None:
    """Logits are float32 in verl whatever the inputs are."""
    if i["hidden"].dtype != torch.float64:
        return None
    return Defect("logits are rounded to float32, whatever the inputs are", "float64 logits")


_SHARED: dict[str, Any] = {
    "inputs": inputs,
    "differentiate": ("hidden", "weight"),
    "kinds": KINDS,
    "seeds": 3,
    "defect": in_float32,
    "releases": ("0.9.1", "0.9.0"),
}
FUNCTIONS = [
    Function(
        "FusedLinearForPPO",
        OPTIONS,
        ours=lambda i, o: module(ours.FusedLinearForPPO, i, o),
        theirs=_theirs,
        **_SHARED,
    ),
    Function(
        "install_head(): FusedLinearForPPO", OPTIONS[:1], ours=_installed, theirs=_theirs, **_SHARED
    ),
    Function(
        "linear_cross_entropy",
        OPTIONS[:2],
        ours=_cross_entropy,
        theirs=lambda i, o: _flat(_theirs(i, o)),
        **_SHARED,
    ),
]
