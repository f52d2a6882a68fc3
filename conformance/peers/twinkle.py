"""twinkle's GRPO and PPO losses and ours, with ragged inputs, and its division by counts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.engines import twinkle_loss

PRESETS = (
    "ppo",
    "grpo",
    "dapo",
    "dr_grpo",
    "gspo",
    "sapo",
    "cispo",
    "gpg",
    "vespo",
    "luspo",
    "dro",
)
OLD = "old_logp"
_CLIP = pl.LossSpec(trust=pl.Clip(0.2, 0.28))
# twinkle's settings of each class, and our spec.
CASES: dict[str, tuple[Options, pl.LossSpec]] = {
    "GRPOLoss": (
        {"epsilon_high": 0.28, "beta": 0.05},
        _CLIP.replace(kl=pl.KL("k3", 0.05, clamp=None), aggregate=pl.SeqMeanTokenMean()),
    ),
    "PPOLoss": ({"epsilon_high": 0.28}, _CLIP),
    "GSPOLoss": (
        {"epsilon_high": 0.28},
        _CLIP.replace(ratio=pl.SequenceRatio(), aggregate=pl.SeqMeanTokenMean()),
    ),
    "SAPOLoss": (
        {},
        _CLIP.replace(trust=pl.SoftGate(1.0, 1.0), aggregate=pl.SeqMeanTokenMean()),
    ),
}
SPECS = {case: spec for case, (_, spec) in CASES.items()}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load twinkle's losses."""
    base = load(folder / "twinkle/loss/base.py", "Loss").Loss
    module = load(folder / "twinkle/loss/grpo.py", *CASES, Loss=base, LossOutput=dict, np=np)
    vars(_loaded).update(vars(module))
    sys.modules["twinkle.loss.grpo"] = module


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "ref_logp", "advantages", "mask")
    return {name: getattr(batch, name) for name in names}


def _call(loss: Any, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """A sum and a count, or a mean and 0. The old log-probabilities are those of trained tokens
    alone, in lists of unequal lengths.
    """
    mask = inputs["mask"].bool()
    out = loss(
        {"labels": torch.where(mask, 1, -100)},
        {"logps": inputs["logp"]},
        old_logps=[row[kept] for row, kept in zip(inputs["old_logp"], mask, strict=True)],
        ref_logps=inputs["ref_logp"],
        advantages=inputs["advantages"],
    )
    return out["loss"], out["num_tokens"]


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    loss = getattr(_loaded, options["case"])(**CASES[options["case"]][0])
    return {"loss": _call(loss, inputs)[0]}


_ours_loss = cache(twinkle_loss)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    total, count = _call(_ours_loss(SPECS[options["case"]]), inputs)
    return {"loss": total / count}


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates, as twinkle's `calculate_loss` counts them: the
    averaged gradient is divided by the counts of all ranks over the number of ranks.
    """
    inputs = _inputs(batch, {}) | {"logp": logp}
    parts = [{name: x[rows] for name, x in inputs.items()} for rows in cut if len(rows)]
    called = [_call(_ours_loss(spec), part) for part in parts]
    count = sum((count for _, count in called), torch.zeros((), dtype=torch.long))
    dist.all_reduce(count)
    for total, _ in called:
        yield total / (count / dist.get_world_size())


FUNCTIONS = [
    Function(
        case,
        [{"case": case}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=40,
        # Not "empty_rows": its mean over sequences counts them.
        kinds=(
            *("ragged", "full", "holes", "single_token", "on_policy", "sequence_advantages"),
            "no_advantage",
        ),
    )
    for case in CASES
]
