"""miles's policy loss and ours, as `conformance.peers.slime` compares those of slime."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist

from conformance.peers import slime
from conformance.peers.slime import OLD, PRESETS, losses
from conformance.public_losses import load
from policyloss.compat import miles

__all__ = ["FUNCTIONS", "OLD", "PRESETS", "SPECS", "enter", "losses"]

# Its policy loss reads neither a dual clip nor CISPO.
FUNCTIONS = [slime.compared(case, seeds=32) for case in ("PPO", "GSPO")]
SPECS = {function.name: slime.SPECS[function.name] for function in FUNCTIONS}


def _state() -> Any:
    """miles's description of the groups of this process: all ranks are context-parallel."""
    ranks = SimpleNamespace(rank=slime.rank(), size=slime.ranks(), group=dist.group.WORLD)
    alone = SimpleNamespace(rank=0, size=1, group=None)
    return SimpleNamespace(cp=ranks, intra_dp_cp=ranks, intra_dp=alone, tp=alone)


def enter(folder: Path) -> None:
    """Load miles's losses, averages and slices."""
    root = folder / "miles"
    known: dict[str, Any] = {"get_parallel_state": _state, "dist": dist, "Callable": Callable}
    sliced = (
        *("get_logits_and_tokens_offset_with_cp", "_slice_loss_mask_for_local_cp"),
        *("slice_loss_masks_for_local_cp", "get_sum_of_sample_mean", "all_gather_with_cp"),
        *("get_local_response_loss_masks", "slice_log_prob_with_cp"),
    )
    averages = load(root / "backends/training_utils/cp_utils.py", *sliced, **known)
    known |= {name: getattr(averages, name) for name in sliced}
    names = ("compute_policy_loss", "compute_gspo_kl", "compute_approx_kl")
    computed = slime.load_uncompiled(root / "utils/ppo_utils.py", *names)
    path = root / "utils/misc.py"
    functions = load(path, "load_function", importlib=importlib, function_registry={})
    module = load(
        root / "backends/training_utils/loss.py",
        *("policy_loss_function", "loss_function", "compute_ess_ratio_contribution"),
        **known,
        **{name: getattr(computed, name) for name in names},
        load_function=functions.load_function,
        get_log_probs_and_entropy=lambda logits, **_: slime.given(logits)[1],
    )
    parallel: Any = ModuleType(miles.PARALLEL)
    parallel.get_parallel_state = _state
    sys.modules |= {miles.LOSS: module, miles.PARALLEL: parallel}

    def loss_function(args: Any, batch: Any, micro: int, size: int, logits: Any) -> Any:
        numbers = {"global_batch_size": size, "use_dynamic_global_batch_size": False}
        vars(args).update(numbers, qkv_format="thd", true_on_policy_mode=False)
        return module.loss_function(args, batch, micro, logits, apply_megatron_loss_scaling=True)

    slime.keep(miles.loss_of, loss_function, averages.slice_log_prob_with_cp)
