"""TRL's AsyncGRPOTrainer and ours: `compute_loss` on fixed log-probabilities and packed rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
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
from policyloss.compat.trl.trainer import WithOurAsyncLoss, checked_async_loss

PRESETS = ("ppo", "dapo", "cispo", "rollout_is", "dppo_tv", "gpg", "vespo", "ipo", "dro")
OLD = "rollout_logp"  # the sampler's
_CLIP = pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28))
SPECS = {"compute_loss": _CLIP}
AUX = 0.5
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load TRL's `compute_loss`, and make a trainer of it and one with our loss."""
    path, name = folder / "trl/experimental/async_grpo/async_grpo_trainer.py", "compute_loss"
    extremes = {"nanmin": torch.min, "nanmax": torch.max}
    method = getattr(load(path, name, time=time, **extremes), name)
    _loaded.theirs = type("Theirs", (SimpleNamespace,), {name: method})
    _loaded.ours = type("Ours", (WithOurAsyncLoss, _loaded.theirs), {"__init__": _set})


def _set(self: Any, **attributes: Any) -> None:
    """The attributes of a trainer, without its model."""
    vars(self).update(attributes)


def trainer(kind: Any, policy_loss: pl.LossSpec, ranks: int = 1, aux: bool = False) -> Any:
    """A trainer without a model, on one of so many ranks."""
    accelerator = SimpleNamespace(
        num_processes=ranks, reduce=lambda x, reduction: x, gather=lambda x: x
    )
    config = SimpleNamespace(gradient_accumulation_steps=1, epsilon=0.2, epsilon_high=0.28)
    steps = ("forward_tokens", "trained_tokens", "seq_len_weighted", "samples", "forward_s")
    return kind(
        policy_loss=checked_async_loss(policy_loss, config),
        accelerator=accelerator,
        current_gradient_accumulation_steps=1,
        epsilon_low=0.2,
        epsilon_high=0.28,
        aux_loss_enabled=aux,
        router_aux_loss_coef=AUX,
        _metrics={"train": defaultdict(list)},
        **{f"_step_{name}": 0.0 for name in steps},
    )


def row(batch: Inputs, rows: Tensor, count: float) -> tuple[Any, dict[str, Tensor]]:
    """A model of the given log-probabilities, and TRL's packed row: every trained token once, in an
    order that is not that of the row, as in a tree.
    """
    mask = batch["mask"][rows].bool()
    (size,) = batch["logp"][rows][mask].shape
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    places = torch.empty_like(order)
    places[order] = torch.arange(size)
    lengths = mask.sum(1)
    data = {
        "token_index": places,
        "old_log_probs": batch["rollout_logp"][rows][mask],
        "advantages": batch["advantages"][rows][mask],
        "segment_id": torch.arange(len(rows)).repeat_interleave(lengths),
    }
    blank = {"token_index": -1, "segment_id": -1}
    # A row ends with padding.
    data = {
        name: torch.nn.functional.pad(x, (0, 2), value=blank.get(name, 0)).unsqueeze(0)
        for name, x in data.items()
    }
    tokens = ("input_ids", "position_ids", "shift_labels", "attention_mask")
    data |= {name: torch.ones(1, size, dtype=torch.long) for name in tokens}
    tree = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    data |= {name: torch.zeros(1, 1, dtype=torch.long) for name in tree}
    data["tree_max_seqlens"] = torch.ones(1, 2, dtype=torch.long)
    counts = ("global_n_tokens", "global_n_forward_tokens", "mean_seq_len")
    data |= {name: torch.tensor([count]) for name in counts}
    logp = batch["logp"][rows][mask][order].unsqueeze(0)

    def model(**_: Any) -> Any:
        aux = (logp * logp).sum()
        return SimpleNamespace(log_probs=logp, entropy=torch.zeros_like(logp), aux_loss=aux)

    return model, data


def _inputs(batch: Batch, options: Options) -> Inputs:
    return {name: getattr(batch, name) for name in ("logp", "rollout_logp", "advantages", "mask")}


def _call(kind: Any, inputs: Inputs, options: Options) -> Outputs:
    rows = torch.arange(len(inputs["mask"]))
    model, data = row(inputs, rows, float(inputs["mask"].sum()) + 3)  # others have three
    engine = trainer(kind, _CLIP, options["ranks"], options["aux"])
    loss = engine.compute_loss(model, data)
    logs = engine._metrics["train"]
    return {"loss": loss, "ratio": logs["ratio"][0], "kl": logs["kl"][0]}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call(_loaded.theirs, inputs, options)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return _call(_loaded.ours, inputs, options)


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The loss that a rank differentiates: one row, with TRL's count over all ranks."""
    rows = torch.cat(cut)
    count = batch.mask[rows].sum()
    dist.all_reduce(count)
    if len(rows):
        model, data = row(_inputs(batch, {}) | {"logp": logp}, rows, float(count))
        yield trainer(_loaded.ours, spec, dist.get_world_size()).compute_loss(model, data)


FUNCTIONS = [
    Function(
        "compute_loss",
        [{"ranks": ranks, "aux": aux} for ranks in (1, 3) for aux in (False, True)],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=80,
        kinds=(
            *("ragged", "full", "holes", "empty_rows", "single_token", "sequence_advantages"),
            "no_advantage",
        ),
        dtypes=("float32",),  # it divides counts in float32
    )
]
