"""SkyRL's policy losses and ours, through its registry and with the denominators that it puts into
the advantages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import skyrl

UTILS = "skyrl/backends/skyrl_train/utils"
LOSSES = (
    *("ppo_policy_loss", "sapo_policy_loss", "gspo_policy_loss", "compute_policy_loss_cispo"),
    "dppo_policy_loss",
)
REDUCTIONS: dict[str, Any] = {
    "token_mean": pl.TokenMean(),
    "sequence_mean": pl.SeqMeanTokenMean(),
    "seq_mean_token_sum_norm": pl.SeqMeanTokenSumNorm(16.0),
    "prompt_mean": pl.PromptMean(),
}
TRUST: dict[str, Any] = {
    "regular": pl.Clip(0.2, 0.28),
    "dual_clip": pl.Clip(0.2, 0.28, dual=3.0),
    "sapo": pl.SoftGate(1.0, 1.05),
    "gspo": pl.Clip(0.2, 0.28),
    "cispo": pl.DetachedClip(0.8, 1.28),
    "dppo": pl.ProbabilityBand("tv", 0.2, 0.28, form="ratio"),
}
NOT_CORRECTED = dict.fromkeys(skyrl.CORRECTIONS)
CORRECTIONS: dict[str, tuple[Options, Any]] = {
    "none": ({}, ()),
    "token TIS": (
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
        pl.Truncate(1.2),
    ),
    "sequence TIS": (
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.5},
        pl.Truncate(1.5, level="product"),
    ),
    "geometric mask": (
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
        pl.SequenceMask(0.9, 1.1, weight=None),
    ),
    "product mask": (
        {"sequence_mask_metric": "product", "product_mask_low": 0.6, "product_mask_high": 1.6},
        pl.SequenceMask(0.6, 1.6, level="product", weight=None),
    ),
}
PRESETS = (
    "ppo",
    "dapo",
    "gspo",
    "gspo_token",
    "sapo",
    "cispo",
    "dppo_tv",
    "tis",
    "dr_grpo",
    "vespo",
)
OLD = "old_logp"
_module = SimpleNamespace()  # SkyRL's ppo_utils, once it is loaded


def enter(folder: Path) -> None:
    """Load SkyRL's losses, registry and reductions, register ours, and keep both for the calls."""
    math = load(folder / UTILS / "torch_utils.py", "masked_mean", "safe_exp_delta")
    known = {name: getattr(math, name) for name in ("masked_mean", "safe_exp_delta")}
    correct = load(
        folder / UTILS / "off_policy_correction_utils.py",
        "off_policy_correction_enabled",
        "compute_tis_ratio",
        "compute_outlier_token_mask",
        "compute_token_mask",
        "compute_sequence_mask",
        "compute_off_policy_correction",
        "apply_off_policy_correction",
        **known,
    )
    module = load(
        folder / UTILS / "ppo_utils.py",
        *("BaseFunctionRegistry", "PolicyLossType", "PolicyLossRegistry", "register_policy_loss"),
        *(*LOSSES, "reduce_loss", "apply_loss_reduction_to_advantages_minibatch"),
        **known,
        StrEnum=import_module("enum").StrEnum,  # of Python 3.11
        wraps=wraps,
        ray=SimpleNamespace(is_initialized=lambda: False),
        apply_off_policy_correction=correct.apply_off_policy_correction,
        logger=SimpleNamespace(warning=lambda *_: None),
    )
    vars(_module).update(vars(module))
    sys.modules[skyrl.PPO_UTILS] = module
    sys.modules["loguru"] = module  # SkyRL imports its logger from there inside a loss
    ours = {name: _spec(options) for name, options in _named_options().items()}
    skyrl.register(ours)


def _config(options: Options) -> Any:
    correction = NOT_CORRECTED | CORRECTIONS[options.get("correction", "none")][0]
    return SimpleNamespace(
        policy_loss_type=options.get("loss", ""),
        loss_reduction=options["reduction"],
        max_seq_len=16,
        eps_clip_low=0.2,
        eps_clip_high=0.28,
        clip_ratio_c=3.0,
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.28),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.28),
        off_policy_correction=SimpleNamespace(**correction),
    )


def _spec(options: Options) -> pl.LossSpec:
    by_sequence = options["loss"] == "gspo"
    anchor = "rollout" if options["loss"] == "dppo" else "old"
    ratio = pl.SequenceRatio(grad="token") if by_sequence else pl.TokenRatio(anchor=anchor)  # type: ignore[arg-type]
    _, correction = CORRECTIONS[options["correction"]]
    aggregate = REDUCTIONS[options["reduction"]]
    return pl.LossSpec(ratio, TRUST[options["loss"]], correction, aggregate=aggregate)


def _options() -> list[Options]:
    plain = product(TRUST, REDUCTIONS, ("none",))
    corrected = product(("regular",), ("token_mean",), list(CORRECTIONS)[1:])
    names = ("loss", "reduction", "correction")
    return [dict(zip(names, chosen, strict=True)) for chosen in (*plain, *corrected)]


def _named_options() -> dict[str, Options]:
    return {"/".join(options.values()): options for options in _options()}


def scaled_advantages(batch: Inputs, reduction: str) -> Tensor:
    """SkyRL's advantages: divided by the denominator of the whole mini-batch."""
    ids = batch["group_ids"].tolist()
    bounds = [(ids.index(g), len(ids) - ids[::-1].index(g)) for g in dict.fromkeys(ids)]
    scaled: Tensor = _module.apply_loss_reduction_to_advantages_minibatch(
        batch["advantages"], batch["mask"], reduction, len(ids), 16, bounds
    )
    return scaled


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "mask", "group_ids")
    return {name: getattr(batch, name) for name in names}


def _call(loss: str, inputs: Inputs, options: Options, config: Any) -> Outputs:
    reads_rollout = options["loss"] == "dppo" or options["correction"] != "none"
    value, _ = _module.PolicyLossRegistry.get(loss)(
        inputs["logp"],
        inputs["old_logp"],
        scaled_advantages(inputs, options["reduction"]),
        config=config,
        loss_mask=inputs["mask"],
        rollout_logprobs=inputs["rollout_logp"] if reads_rollout else None,
    )
    return {"loss": value}


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _call(options["loss"], inputs, options, _config(options))


def _ours(inputs: Inputs, options: Options) -> Outputs:
    config = _config(options | {"correction": "none"})
    return _call(f"policyloss/{'/'.join(options.values())}", inputs, options, config)


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a worker differentiates, one for each micro-batch of rows in `cut`; SkyRL
    multiplies them by the number of ranks.
    """
    reduction = skyrl.REDUCTIONS[type(spec.aggregate)]
    advantages = scaled_advantages(_inputs(batch, {}), reduction)
    for rows in cut:
        loss, _ = skyrl.SkyRLLoss("preset", spec)(
            logp[rows],
            batch.old_logp[rows],
            advantages[rows],
            _config({"reduction": reduction}),
            batch.mask[rows],
            batch.rollout_logp[rows],
        )
        yield loss * torch.distributed.get_world_size()


# Not "extreme" for gspo: SkyRL limits the log-ratio from above alone, at 10.
KINDS = ("ragged", "full", "holes", "single_token", "on_policy", "sequence_advantages")
SPECS = {
    loss: _spec({"loss": loss, "reduction": "token_mean", "correction": "none"}) for loss in TRUST
}
MORE = ("empty_rows", "no_advantage", "all_masked")

FUNCTIONS = [
    Function(
        loss,
        [options for options in _options() if options["loss"] == loss],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=8,
        kinds=(*KINDS, *MORE) if loss == "gspo" else (*KINDS, *MORE, "extreme"),
        # The others exponentiate in float32.
        dtypes=None if loss in ("gspo", "sapo") else ("float32",),
    )
    for loss in TRUST
]
