"""torchtitan's DAPO loss and ours, from logits, in chunks and with its count of the step."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import torchtitan

PRESETS = ("ppo", "dapo", "bnpo", "cispo", "rollout_is", "dppo_tv", "gpg", "ipo", "dro")
OLD = "rollout_logp"  # the sampler's
TOLERANCE = 1e-6  # torchtitan computes log-probabilities in float32
SPECS = {"DAPOLoss": pl.LossSpec(pl.TokenRatio(log_clamp=10.0), pl.Clip(0.2, 0.28))}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load torchtitan's loss, its base class and its log-probabilities."""
    root = folder / "torchtitan"
    config = load(
        root / "config/configurable.py",
        "Configurable",
        fields=dataclasses.fields,
        replace=dataclasses.replace,
        dataclasses=dataclasses,
        sl=SimpleNamespace(log_trace_span=nullcontext, log_trace_scalar=lambda *_: None),
    )
    module = load(
        root / "components/loss.py",
        *("BaseLoss", "compute_logprobs"),
        ABC=ABC,
        abstractmethod=abstractmethod,
        Configurable=config.Configurable,
        DTensor=DTensor,
        get_spmd_backend=lambda: "",
        IGNORE_INDEX=-100,
    )
    sys.modules[torchtitan.LOSS] = module
    known = {"BaseLoss": module.BaseLoss, "compute_logprobs": module.compute_logprobs}
    path = root / "experiments/rl/losses/dapo.py"
    _loaded.dapo = load(path, "DAPOLoss", **known, _MAX_LOG_RATIO=10.0).DAPOLoss


@cache
def _ours_loss(spec: pl.LossSpec) -> Any:
    """Our loss, built from a configuration that names the spec's file."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(spec.to_dict()))
        file.flush()
        return torchtitan.PolicyLoss.Config(loss=file.name).build()


def _inputs(batch: Batch, options: Options) -> Inputs:
    shape, g = batch.mask.shape, batch.generator()
    sampled = batch.rollout_logp.clone()
    if options["lost"]:  # log-probabilities that the generator did not return
        sampled[torch.rand(shape, generator=g) < 0.2] = float("nan")
    return {
        "logits": torch.randn(*shape, 6, generator=g, dtype=torch.float64).to(batch.dtype),
        "labels": torch.randint(0, 6, shape, generator=g),
        "generator_logprobs": sampled,
        "advantages": batch.advantages,
        "loss_mask": batch.mask.bool(),
    }


def _call(loss: Any, inputs: Inputs) -> Outputs:
    count = (inputs["loss_mask"] & inputs["generator_logprobs"].isfinite()).sum()
    value, metrics = loss(global_valid_tokens=int(count) + 3, **inputs)  # others have three
    return {"loss": value, "mean": metrics["loss/mean"]}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    numbers = {"ratio_clip_low": options["low"], "ratio_clip_high": options["high"]}
    return _call(_loaded.dapo.Config(**numbers).build(), inputs)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    trust = pl.Clip(options["low"], options["high"])
    return _call(_ours_loss(pl.LossSpec(pl.TokenRatio(log_clamp=10.0), trust)), inputs)


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates. torchtitan sums gradients over ranks, and its
    controller counts the tokens of the step.
    """
    loss, count = _ours_loss(spec), int(batch.mask.sum())
    for rows in cut:
        # Two tokens, the first with this log-probability.
        other = torch.log1p(-logp[rows].exp())
        value, _ = loss(
            torch.stack([logp[rows], other], -1),
            torch.zeros_like(logp[rows], dtype=torch.long),
            count,
            generator_logprobs=batch.rollout_logp[rows],
            advantages=batch.advantages[rows],
            loss_mask=batch.mask[rows].bool(),
        )
        yield value * torch.distributed.get_world_size()


FUNCTIONS = [
    Function(
        "DAPOLoss",
        [
            {"low": low, "high": high, "lost": lost}
            for low, high in ((0.2, 0.28), (0.2, 0.2), (0.1, 3.0))
            for lost in (False, True)
        ],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logits",),
        seeds=40,
        dtypes=("float32",),
    )
]
