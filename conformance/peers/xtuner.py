"""xtuner's policy loss and ours, with the weights of tokens that it computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.engines import xtuner_loss

PRESETS = ("ppo", "dapo", "cispo", "gpg", "dro", "ppo_dual_clip")
OLD = "old_logp"
TOLERANCE = 1e-6  # its weights are float32
SPECS = {"pg_loss_fn": pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=3.0))}
NUMBERS = {"cliprange_low": 0.2, "cliprange_high": 0.28, "loss_type": "vanilla"}
IGNORED = -100
_loaded = SimpleNamespace()
_named: dict[str, Any] = {}  # xtuner's registry


def enter(folder: Path) -> None:
    """Load xtuner's policy loss, its registry, and its count of the step."""
    root = folder / "xtuner/v1/rl/loss"
    names = ("register_policy_loss", "get_policy_loss_fn", "check_config", "pg_loss_fn")
    known = {"POLICY_LOSS_REGISTRY": _named, "PolicyLossFn": Any}
    _loaded.find = load(root / "loss_fn.py", *names, **known).get_policy_loss_fn
    logger = SimpleNamespace(warning=lambda *_: None)
    counted = load(root / "grpo_loss.py", "build_batches", dist=dist, logger=logger, cast=_cast)
    _loaded.build = counted.build_batches
    _loaded.build = getattr(_loaded.build, "__func__", _loaded.build)  # of a static method


def _cast(kind: Any, x: Any) -> Any:
    return x


def weights(masks: list[Tensor]) -> list[Tensor]:
    """xtuner's weights of the tokens of each micro-batch, over all ranks."""
    config = SimpleNamespace(ignore_idx=IGNORED, use_kl_loss=False)
    contexts = [
        SimpleNamespace(
            loss_cfg=config,
            loss_kwargs=SimpleNamespace(
                shifted_labels=torch.where(mask.bool(), 1, IGNORED), old_logprobs=0, is_weights=None
            ),
        )
        for mask in masks
    ]
    return [context.loss_kwargs.policy_loss_weight for context in _loaded.build(contexts)]


def _inputs(batch: Batch, options: Options) -> Inputs:
    return {name: getattr(batch, name) for name in ("logp", "old_logp", "advantages", "mask")}


def _call(loss: str, inputs: Inputs) -> Outputs:
    tensors = [inputs[name] for name in ("logp", "old_logp", "advantages")]
    (shares,) = weights([inputs["mask"]])
    return {"loss": _loaded.find(loss)(*tensors, shares, NUMBERS)}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call("vanilla", inputs)


@cache
def _name(spec: pl.LossSpec) -> str:
    """The name by which xtuner finds this loss."""
    globals()[name := f"loss_{len(globals())}"] = xtuner_loss(spec)
    return f"{__name__}.{name}"


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(_name(SPECS["pg_loss_fn"]), inputs)


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates; xtuner sums gradients over ranks."""
    loss = _loaded.find(_name(spec))
    for rows, shares in zip(cut, weights([batch.mask[rows] for rows in cut]), strict=True):
        value = loss(logp[rows], batch.old_logp[rows], batch.advantages[rows], shares, NUMBERS)
        yield value * dist.get_world_size()


FUNCTIONS = [
    Function(
        "pg_loss_fn",
        [{}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=105,
        kinds=None,
    )
]
