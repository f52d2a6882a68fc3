"""RLinf's actor loss and ours, through its registry."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.engines import LOCAL, rlinf_loss

PRESETS = ()  # it counts nothing over micro-batches or ranks
_CLIP = pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28, dual=3.0))
_AVERAGES: dict[str, Any] = {average: kind() for kind, average in LOCAL.items()}
SPECS = {name: _CLIP.replace(aggregate=average) for name, average in _AVERAGES.items()}
_loaded = SimpleNamespace()
_registry: dict[str, Any] = {}


def enter(folder: Path) -> None:
    """Load RLinf's losses, averages and registry, and register ours."""
    root = folder / "rlinf"
    averages = load(root / "utils/utils.py", "masked_mean", "masked_mean_ratio", *SPECS)
    vars(_loaded).update(vars(averages))
    names = ("register_policy_loss", "get_policy_loss", "policy_loss")
    path = root / "algorithms/registry.py"
    registry = load(path, *names, wraps=wraps, LOSS_REGISTRY=_registry)
    load(
        root / "algorithms/losses.py",
        *("compute_ppo_actor_loss", "compute_grpo_actor_loss_fn"),
        Callable=Any,
        register_policy_loss=registry.register_policy_loss,
        masked_mean=averages.masked_mean,
        masked_mean_ratio=averages.masked_mean_ratio,
    )
    for average, spec in SPECS.items():
        registry.register_policy_loss(f"policyloss_{average}")(rlinf_loss(spec))
    _loaded.policy_loss = registry.policy_loss


def _inputs(batch: Batch, options: Options) -> Inputs:
    return {name: getattr(batch, name) for name in ("logp", "old_logp", "advantages", "mask")}


def _call(loss_type: str, inputs: Inputs, options: Options) -> Outputs:
    loss, _ = _loaded.policy_loss(
        task_type="reasoning",
        loss_type=loss_type,
        loss_agg_func=getattr(_loaded, options["average"]),
        logprobs=inputs["logp"],
        old_logprobs=inputs["old_logp"],
        advantages=inputs["advantages"],
        loss_mask=inputs["mask"].bool(),
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
    )
    return {"loss": loss}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call("actor", inputs, options)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(f"policyloss_{options['average']}", inputs, options)


FUNCTIONS = [
    Function(
        average,
        [{"average": average}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=170,
        # Not "empty_rows": it divides 0 by 0.
        kinds=("ragged", "full", "holes", "on_policy", "sequence_advantages", "no_advantage"),
        dtypes=("float32",),  # it refuses others
    )
    for average in SPECS
]
