"""ms-swift's GRPO loss and ours, in its method that computes loss and metrics."""

from __future__ import annotations

import sys
from collections import defaultdict
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
from policyloss.compat.engines import OF_SWIFT, swift_trainer

PRESETS = ("ppo", "dapo", "cispo", "tis", "gpg", "vespo", "dro", "ipo", "dppo_tv")
OLD = "old_logp"
_CLIP = pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28))
# ms-swift's settings of each case, and ours.
CASES: dict[str, tuple[Options, pl.LossSpec]] = {
    "DAPO": ({}, _CLIP),
    "delta": ({"delta": 1.5}, _CLIP.replace(trust=pl.Clip(0.2, 0.28, dual=1.5))),
    "KL": ({"beta": 0.05}, _CLIP.replace(kl=pl.KL("k3", 0.05, value_clamp=10.0))),
}
SPECS = {f"_compute_loss_and_metrics, {case}": spec for case, (_, spec) in CASES.items()}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load the methods of ms-swift's trainer, and make a trainer of them."""
    names = ("_compute_loss_and_metrics", "_undo_gradient_accumulation_scaling")
    module = load(
        folder / "swift/rlhf_trainers/grpo_trainer.py",
        *names,
        GRPOBatch=Any,
        WINDOW_NORMALIZED_LOSS_TYPES=["cispo", "dapo", "fipo"],
        gather_object=lambda x: x,
        nanmin=torch.min,
        nanmax=torch.max,
    )
    methods: dict[str, Any] = {name: getattr(module, name) for name in names}
    methods["_get_per_token_logps_and_entropies"] = lambda self, model, *_, **__: (model, None)
    _loaded.theirs = type("Theirs", (SimpleNamespace,), methods)
    trainers = SimpleNamespace(GRPOTrainer=_loaded.theirs)
    sys.modules["swift.rlhf_trainers.grpo_trainer"] = trainers  # type: ignore[assignment]


def trainer(kind: Any, ranks: int, calls: int, **settings: Any) -> Any:
    """A trainer without a model, on one of so many ranks."""
    numbers = {"epsilon_low": 0.2, "epsilon_high": 0.28, "beta": 0.0, "delta": None, **settings}
    off = ("compute_entropy", "overlong_filter", "kl_in_reward", "_has_teacher")
    more = ("log_rollout_offpolicy_metrics", "model_accepts_loss_kwargs")
    return kind(
        **OF_SWIFT,
        **dict.fromkeys((*off, *more), False),
        **numbers,
        args=SimpleNamespace(delta=numbers["delta"], gradient_accumulation_steps=calls),
        model=SimpleNamespace(training=True),
        compute_loss_func=None,
        disable_rollout_importance_sampling=True,
        current_gradient_accumulation_steps=calls,
        accelerator=SimpleNamespace(num_processes=ranks, gather_for_metrics=lambda x: x),
        _metrics=defaultdict(list),
    )


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "rollout_logp", "ref_logp", "advantages", "mask")
    return {name: getattr(batch, name) for name in names}


def _call(engine: Any, inputs: Inputs, count: Tensor) -> Tensor:
    """The loss that the Trainer divides by the number of micro-batches and differentiates."""
    batch = SimpleNamespace(
        completion_mask=inputs["mask"].bool(),
        truncated_mask=None,
        advantages=inputs["advantages"],
        num_items_in_batch=count,
        **{f"{name}_per_token_logps": inputs[f"{name}_logp"] for name in ("old", "rollout", "ref")},
    )
    loss: Tensor = engine._compute_loss_and_metrics(inputs["logp"], None, batch)[0]
    return loss


def _step(kind: Any, inputs: Inputs, settings: Options) -> Outputs:
    engine = trainer(kind, 2, 3, **settings)
    return {"loss": _call(engine, inputs, inputs["mask"].sum() + 3)}  # others have three


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _step(_loaded.theirs, inputs, CASES[options["case"]][0])


_ours_trainer = cache(swift_trainer)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _step(_ours_trainer(CASES[options["case"]][1]), inputs, CASES[options["case"]][0])


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates, with ms-swift's count of the whole window."""
    inputs = _inputs(batch, {}) | {"logp": logp}
    beta = 0.0 if spec.kl is None else 0.1
    engine = trainer(_ours_trainer(spec), dist.get_world_size(), len(cut), beta=beta)
    for rows in (rows for rows in cut if len(rows)):
        part = {name: x[rows] for name, x in inputs.items()}
        yield _call(engine, part, batch.mask.sum()) / len(cut)


FUNCTIONS = [
    Function(
        f"_compute_loss_and_metrics, {case}",
        [{"case": case}],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=40,
        kinds=(
            *("ragged", "full", "holes", "empty_rows", "single_token", "on_policy"),
            *("sequence_advantages", "no_advantage", "all_masked"),
        ),
    )
    for case in CASES
]
