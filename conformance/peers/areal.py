"""AReaL's GRPO loss and ours, packed, with its weights of micro-batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
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
from policyloss.compat import areal

PRESETS = (
    *("ppo", "dapo", "gspo", "gspo_token", "sapo", "cispo", "tis", "icepop", "decoupled_ppo"),
    *("dr_grpo", "luspo", "vespo", "dro"),
)
OLD = "old_logp"
TOLERANCE = 1e-6  # AReaL divides the weights in float32
_PPO = pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.2))


def _filter(**changes: Any) -> Options:
    numbers = {"level": "token", "action": "clamp", "metric": "ratio", "agg": "mean"}
    return {"rejection_sampling": {**numbers, "lower": 0.8, "upper": 1.2, **changes}}


# AReaL's settings of each case, and ours.
CASES: dict[str, tuple[Options, pl.LossSpec]] = {
    "PPO": ({}, _PPO),
    "two bounds": ({"eps_clip_higher": 0.28}, _PPO.replace(trust=pl.Clip(0.2, 0.28))),
    "dual clip": ({"c_clip": 1.5}, _PPO.replace(trust=pl.Clip(0.2, 0.2, dual=1.5))),
    "SAPO": (
        {"use_sapo_loss": True},
        _PPO.replace(trust=pl.SoftGate(1.0, 1.05)),
    ),
    "sequence": (
        {"importance_sampling_level": "sequence"},
        _PPO.replace(ratio=pl.SequenceRatio(log_clamp=None)),
    ),
    "clamped weights": (
        _filter(),
        _PPO.replace(correction=pl.Truncate(1.2, 0.8, log_clamp=None)),
    ),
    "masked tokens": (
        _filter(action="mask"),
        _PPO.replace(correction=pl.Band(0.8, 1.2, log_clamp=None)),
    ),
}
SPECS = {f"grpo_loss_fn, {case}": spec for case, (_, spec) in CASES.items()}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load AReaL's loss, its sum of weights, and the step of its FSDP engine."""
    root = folder / "areal"
    logs = SimpleNamespace(denominator=_nothing, stat=_nothing, scalar=_nothing)
    losses = load(
        root / "utils/functional/functional.py",
        *("_compute_sequence_level_ratio_and_advantages", "RejectionSamplingResult"),
        *("_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn", "sapo_loss_fn"),
    )
    actor = load(
        root / "trainer/ppo/actor.py",
        *("grpo_loss_fn", "_resolve_proximal_logp"),
        ppo_actor_loss_fn=losses.ppo_actor_loss_fn,
        sapo_loss_fn=losses.sapo_loss_fn,
        stats_tracker=logs,
        infer_token_denominator=_nothing,
        _log_proximal_approximation_stats=_nothing,
        PROX_LOGP_METHOD_RECOMPUTE="recompute",
        PROX_LOGP_METHOD_LOGLINEAR="loglinear",
        PROX_LOGP_METHOD_METRICS="metrics",
    )
    _loaded.loss = actor.grpo_loss_fn
    path, name = root / "engine/core/train_engine.py", "compute_total_loss_weight"
    _loaded.total = getattr(load(path, name, dist=dist), name)
    path, name = root / "engine/fsdp_engine.py", "_compute_logprobs_and_loss"
    _loaded.scaled = getattr(load(path, name), name)
    sys.modules[areal.TRACKER] = logs  # type: ignore[assignment]


def _nothing(*_: Any, **__: Any) -> None:
    """Nothing is logged."""


def _packed(batch: Inputs, rows: Tensor) -> dict[str, Any]:
    """AReaL's data of these rows: packed without padding, masks as floats."""
    ends = [int(row.nonzero().max()) + 2 if row.any() else 1 for row in batch["mask"][rows]]
    kept = torch.arange(batch["mask"].shape[1]) < torch.tensor(ends).unsqueeze(1)
    names = {"prox_logp": "old_logp", "logprobs": "rollout_logp", "loss_mask": "mask"}
    tensors = {"logp": "logp", "advantages": "advantages", **names}
    offsets = kept.sum(1).cumsum(0).to(torch.int32)
    return {
        "cu_seqlens": torch.nn.functional.pad(offsets, (1, 0)),
        **{key: batch[name][rows][kept] for key, name in tensors.items()},
    }


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "mask")
    drawn = {name: getattr(batch, name) for name in names}
    # SAPO reads the log-probabilities of the sampler, which are the old ones there.
    return drawn | ({"rollout_logp": batch.old_logp} if options["case"] == "SAPO" else {})


def _call(loss_fn: Any, inputs: Inputs) -> Outputs:
    data = _packed(inputs, torch.arange(len(inputs["mask"])))
    logp = data.pop("logp")
    return {"loss": loss_fn(logp, torch.zeros_like(logp), data)}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    settings: Options = {"eps_clip": 0.2, "eps_clip_higher": None, "c_clip": None}
    settings |= CASES[options["case"]][0]
    if "rejection_sampling" in settings:
        settings["rejection_sampling"] = SimpleNamespace(**settings["rejection_sampling"])
    return _call(partial(_loaded.loss, **settings), inputs)


class Engine:
    """The step of AReaL's FSDP engine, with log-probabilities in the place of logits."""

    config, enable_tree_training = SimpleNamespace(is_critic=False), False

    def _compute_logprobs_entropy(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return logits, torch.zeros_like(logits)

    def _get_vocab_min_max_logits(self, logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return logits, logits

    def train_batch(self, mbs: list[Any], loss_fn: Any, loss_weight_fn: Any) -> list[Tensor]:
        """The losses that a rank differentiates, one for each micro-batch."""
        functions, ranks = (loss_fn, loss_weight_fn), dist.get_world_size()
        total = _loaded.total(SimpleNamespace(mbs=mbs), loss_weight_fn, dist.group.WORLD)
        layout = {"model_inputs": None, "ulysses_pad_size": 0, "pad_length": 0}
        contexts = [SimpleNamespace(mb_input=mb, **layout) for mb in mbs]
        return [
            _loaded.scaled(self, c.mb_input["logp"], c, *functions, total, ranks) for c in contexts
        ]


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates, by an actor of AReaL with our loss."""
    actor = type("Actor", (areal.WithOurLoss, Engine), {"policy_loss": spec})()
    inputs = _inputs(batch, {"case": ""}) | {"logp": logp}
    yield from actor.train_batch([_packed(inputs, rows) for rows in cut], None, None)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(areal.ArealLoss(CASES[options["case"]][1]).loss_fn, inputs)


KINDS = (
    *("ragged", "full", "holes", "empty_rows", "single_token", "on_policy", "sequence_advantages"),
    *("no_advantage", "all_masked"),
)
FUNCTIONS = [
    Function(
        f"grpo_loss_fn, {case}",
        [{"case": case}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=180 if case == "sequence" else 20,
        # It averages the advantages of a sequence.
        kinds=("sequence_advantages",) if case == "sequence" else KINDS,
        # It compares weights in float32.
        dtypes=("float32",) if "rejection_sampling" in settings else None,
    )
    for case, (settings, _) in CASES.items()
]
