"""prime-rl's losses and ours, in its loop over samples and through its custom loss."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import prime_rl

PRESETS = (
    *("ppo", "dapo", "bnpo", "cispo", "rollout_is", "dppo_tv", "gpg", "vespo", "prime_rl", "ipo"),
    "dro",
)
OLD = "rollout_logp"  # the sampler's
# prime-rl's configuration of each loss, and ours.
LOSSES: dict[str, tuple[str, Options, Options]] = {
    "default": (
        "DefaultLossConfig",
        {"dppo_mask_low": 0.1, "dppo_mask_high": 0.15, "adv_tau": 1.0, "kl_tau": 0.004},
        {"preset": "prime_rl", "low": 0.1, "high": 0.15, "coef": 0.008},  # of k2, which is d²/2
    ),
    "ipo": (
        "IPOLossConfig",
        {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 0.004},
        {"preset": "ipo", "low": 0.1, "high": 0.1, "coef": 0.008},
    ),
}
SPECS = {
    f"{loss}_loss_fn": pl.preset(**{"name" if n == "preset" else n: x for n, x in ours.items()})
    for loss, (_, _, ours) in LOSSES.items()
}
_loaded = SimpleNamespace()


def enter(folder: Path) -> None:
    """Load prime-rl's losses, its loop over samples, and its import of a custom loss."""
    importing = load(folder / "src/prime_rl/utils/utils.py", "import_object", importlib=importlib)
    configs = ("DefaultLossConfig", "IPOLossConfig", "CustomLossConfig")
    module = load(
        folder / "src/prime_rl/trainer/rl/loss.py",
        *("LossInputs", "LossOutputs", "_safe_mean", "compute_importance_ratio_and_mismatch_kl"),
        *("default_loss_fn", "ipo_loss_fn", "setup_rl_loss_fn", "compute_loss"),
        **{name: type(name, (SimpleNamespace,), {}) for name in configs},
        import_object=importing.import_object,
    )
    vars(_loaded).update(vars(module))
    sys.modules[prime_rl.LOSS] = module


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "rollout_logp", "ref_logp", "advantages", "mask")
    drawn = {name: getattr(batch, name) for name in names}
    if not options["weighted"]:
        return drawn
    weights = 2 * torch.rand(batch.mask.shape, generator=batch.generator(), dtype=torch.float64)
    dropped = torch.rand(batch.mask.shape, generator=batch.generator(1)) < 0.2
    return drawn | {"weights": torch.where(dropped, 0, weights).to(batch.dtype)}


def _step(loss_fn: Any, inputs: Inputs, scale: int) -> Tensor:
    """prime-rl's loss of packed samples, without their padding."""
    mask = inputs["mask"].bool()
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in mask]

    def samples(x: Tensor | None) -> list[Tensor] | None:
        return None if x is None else [row[:n] for row, n in zip(x, lengths, strict=True)]

    names = ("logp", "rollout_logp", "ref_logp", "advantages")
    tensors = [samples(inputs[name]) for name in names]
    weights = samples(inputs.get("weights"))
    value: Tensor = _loaded.compute_loss(
        *tensors, samples(mask), weights, None, None, loss_fn, scale, 1, 1
    )[0]
    return value


def _scale(inputs: Inputs) -> int:
    """prime-rl's count of the trained tokens."""
    mask = inputs["mask"].bool()
    return max(int((mask & (inputs["weights"] != 0) if "weights" in inputs else mask).sum()), 1)


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    config, numbers, _ = LOSSES[options["loss"]]
    loss_fn = _loaded.setup_rl_loss_fn(getattr(_loaded, config)(**numbers))
    return {"loss": _step(loss_fn, inputs, _scale(inputs))}


def _custom(kwargs: Options) -> Any:
    """The loss that `type = "custom"` builds."""
    config = _loaded.CustomLossConfig(import_path="policyloss.compat.prime_rl.loss", kwargs=kwargs)
    return _loaded.setup_rl_loss_fn(config)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    return {"loss": _step(_custom(LOSSES[options["loss"]][2]), inputs, _scale(inputs))}


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates; prime-rl counts the tokens of all ranks, and undoes
    the average over ranks.
    """
    count = batch.mask[torch.cat(cut)].sum()
    torch.distributed.all_reduce(count)
    loss_fn, inputs = prime_rl.loss_of(spec), _inputs(batch, {"weighted": False}) | {"logp": logp}
    for rows in (rows for rows in cut if len(rows)):
        share = _step(loss_fn, {name: x[rows] for name, x in inputs.items()}, int(count))
        yield share * torch.distributed.get_world_size()


# Not "extreme": prime-rl does not limit a log-ratio, and we do, at 20.
KINDS = (
    *("ragged", "full", "holes", "empty_rows", "single_token", "on_policy", "sequence_advantages"),
    *("no_advantage", "all_masked"),
)
FUNCTIONS = [
    Function(
        f"{loss}_loss_fn",
        [{"loss": loss, "weighted": weighted} for weighted in (False, True)],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=30,
        kinds=KINDS,
    )
    for loss in LOSSES
]
