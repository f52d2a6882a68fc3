"""Trinity's PPO loss and ours, through its metaclass, which renames verl's tensors."""

from __future__ import annotations

import inspect
import sys
from abc import ABC, ABCMeta, abstractmethod
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat.engines import trinity_loss

PRESETS = ()  # it counts nothing over micro-batches or ranks
NUMBERS = {"clip_range_low": 0.2, "clip_range_high": 0.28}
_CLIP = pl.LossSpec(trust=pl.Clip(0.2, 0.28, dual=3.0), aggregate=pl.LocalTokenMean())
SPECS = {
    "token-mean": _CLIP,
    "seq-mean-token-mean": _CLIP.replace(aggregate=pl.LocalSeqMeanTokenMean()),
}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load Trinity's PPO loss, its base class and its names of verl's tensors."""
    root = folder / "trinity/algorithm"
    mapper = load(root / "key_mapper.py", "KeyMapper").KeyMapper
    base = load(
        root / "policy_loss_fn/policy_loss_fn.py",
        *("PolicyLossFnMeta", "PolicyLossFn"),
        inspect=inspect,
        ABC=ABC,
        ABCMeta=ABCMeta,
        abstractmethod=abstractmethod,
        ALL_MAPPERS={
            "verl": mapper({"old_log_probs": "old_logprob", "response_mask": "action_mask"})
        },
    )
    sums = load(root / "utils.py", "aggregate_loss", "masked_sum", "masked_mean")
    known = {"masked_mean": sums.masked_mean, "aggregate_loss": sums.aggregate_loss}
    path, name = root / "policy_loss_fn/ppo_policy_loss.py", "PPOPolicyLossFn"
    _loaded.ppo = getattr(load(path, name, PolicyLossFn=base.PolicyLossFn, **known), name)
    sys.modules["trinity.algorithm.policy_loss_fn.policy_loss_fn"] = base


def _inputs(batch: Batch, options: Options) -> Inputs:
    return {name: getattr(batch, name) for name in ("logp", "old_logp", "advantages", "mask")}


def _call(loss: Any, inputs: Inputs) -> Outputs:
    names = {"old_log_probs": "old_logp", "response_mask": "mask", "advantages": "advantages"}
    assert set(loss.select_keys) == set(names)  # the tensors that Trinity passes
    tensors = {key: inputs[name] for key, name in names.items()}
    # float32, in which Trinity's 1e-8 beside a count rounds away.
    tensors["response_mask"] = tensors["response_mask"].float()
    return {"loss": loss(logprob=inputs["logp"], **tensors)[0]}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call(_loaded.ppo(loss_agg_mode=options["average"], **NUMBERS), inputs)


@cache
def _class(average: str) -> Any:
    return trinity_loss(SPECS[average])


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(_class(options["average"])(**_class(options["average"]).default_args()), inputs)


FUNCTIONS = [
    Function(
        average,
        [{"average": average}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=90,
        # Not "empty_rows": its mean over sequences counts them.
        kinds=(
            *("ragged", "full", "holes", "single_token", "on_policy", "sequence_advantages"),
            *("no_advantage", "extreme"),
        ),
    )
    for average in SPECS
]
