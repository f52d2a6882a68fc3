"""slime's policy loss and ours, through its dispatch of losses, with its averages and over
context-parallel ranks. Only the log-probabilities are given instead of computed from logits.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch
from conformance.public_losses import load
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import slime

PRESETS = ("dapo", "ppo", "bnpo", "gspo", "gspo_token", "sapo", "cispo", "tis", "vespo", "dro")
OLD = "old_logp"
PROMPT = 3
CASES: dict[str, tuple[Options, pl.LossSpec]] = {
    "PPO": ({}, pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28))),
    "dual clip": (
        {"eps_clip_c": 3.0},
        pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.Clip(0.2, 0.28, dual=3.0)),
    ),
    "GSPO": (
        {"advantage_estimator": "gspo"},
        pl.LossSpec(pl.SequenceRatio(log_clamp=None), pl.Clip(0.2, 0.28)),
    ),
    "CISPO": (
        {"advantage_estimator": "cispo"},
        pl.LossSpec(pl.TokenRatio(log_clamp=None), pl.DetachedClip(0.8, 1.28)),
    ),
}
SPECS = {f"policy_loss_function, {case}": spec for case, (_, spec) in CASES.items()}
_loaded = SimpleNamespace()
_named_losses = ModuleType("named_losses")  # a module of a user


def enter(folder: Path) -> None:
    """Load slime's losses, averages and slices; Megatron's groups are those of this process."""
    root = folder / "slime"
    parallel: Any = ModuleType(slime.PARALLEL)
    parallel.get_context_parallel_world_size = ranks
    parallel.get_context_parallel_rank = rank
    parallel.get_context_parallel_group = lambda: dist.group.WORLD
    parallel.get_data_parallel_world_size = lambda with_context_parallel: ranks()
    averages = load(
        root / "backends/megatron_utils/cp_utils.py",
        *("get_logits_and_tokens_offset_with_cp", "get_sum_of_sample_mean"),
        *("slice_log_prob_with_cp", "all_gather_with_cp"),
        mpu=parallel,
        dist=dist,
        Callable=Callable,
    )
    names = ("compute_policy_loss", "compute_cispo_loss", "compute_gspo_kl", "compute_approx_kl")
    losses = load_uncompiled(root / "utils/ppo_utils.py", *names)
    functions = load(root / "utils/misc.py", "load_function", importlib=importlib, cache=cache)
    module = load(
        root / "backends/megatron_utils/loss.py",
        *("policy_loss_function", "loss_function", "get_rollout_top_p_logprob_kwargs"),
        **{name: getattr(losses, name) for name in names},
        mpu=parallel,
        get_sum_of_sample_mean=averages.get_sum_of_sample_mean,
        all_gather_with_cp=averages.all_gather_with_cp,
        load_function=functions.load_function,
        get_log_probs_and_entropy=given,
        _maybe_capture_log_probs=lambda *_: None,
    )
    sys.modules |= {slime.LOSS: module, slime.PARALLEL: parallel}
    keep(slime.loss_of, module.loss_function, averages.slice_log_prob_with_cp)


def keep(loss_of: Any, loss_function: Any, cut: Any) -> None:
    """Keep an adapter and its engine's functions for the calls."""
    _loaded.loss_of, _loaded.loss, _loaded.cut = loss_of, loss_function, cut
    _named.cache_clear()  # of another engine


def load_uncompiled(path: Path, *names: str) -> Any:
    """Functions of a file without `torch.compile`, which would take minutes."""
    compile_, torch.compile = torch.compile, lambda **_: lambda f: f  # type: ignore[assignment]
    module = load(path, *names)
    torch.compile = compile_
    return module


def ranks() -> int:
    """The number of context-parallel ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """The number of the context-parallel rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def given(logits: Any, **_: Any) -> Any:
    """The log-probabilities of each sample: here, they take the place of the logits."""
    rows = list(logits.rows)
    return None, {"log_probs": rows, "entropy": [torch.zeros_like(row) for row in rows]}


class Logits:
    """Log-probabilities by sample, in the place of logits."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows, self.device = rows, rows[0].device


def _step(batch: Inputs, rows: Tensor, size: int, micro: int, **settings: Any) -> Any:
    """slime's scaled loss and its normaliser of these rows."""
    lengths = [int(r.nonzero().max()) + 1 if r.any() else 1 for r in batch["mask"][rows]]
    totals = [n + PROMPT for n in lengths]
    masks = [row[:n] for row, n in zip(batch["mask"][rows], lengths, strict=True)]

    def sliced(name: str) -> list[Tensor]:
        whole = [row[:n] for row, n in zip(batch[name][rows], lengths, strict=True)]
        return [_loaded.cut(*x) for x in zip(whole, totals, lengths, strict=True)]

    data = {
        "log_probs": sliced("old_logp"),
        "rollout_log_probs": sliced("rollout_logp"),
        "advantages": sliced("advantages"),
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "response_lengths": lengths,
        "total_lengths": totals,
        "unconcat_tokens": None,
    }
    off = ("use_tis", "use_opsm", "use_kl_loss", "use_unbiased_kl", "use_rollout_logprobs")
    more = ("get_mismatch_metrics", "recompute_loss_function", "allgather_cp")
    numbers = {"eps_clip": 0.2, "eps_clip_high": 0.28, "eps_clip_c": None, "entropy_coef": 0.0}
    args: Options = {**dict.fromkeys((*off, *more), False), **numbers, "rollout_top_p": 1.0}
    args |= {"advantage_estimator": "grpo", "loss_type": "policy_loss", **settings}
    loss, normaliser, _ = _loaded.loss(
        SimpleNamespace(**args), data, micro, size, Logits(sliced("logp"))
    )
    return loss, normaliser


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "rollout_logp", "advantages", "mask")
    return {name: getattr(batch, name) for name in names}


def _whole(inputs: Inputs, options: Options, **settings: Any) -> Outputs:
    rows = torch.arange(len(inputs["logp"]))
    settings["calculate_per_token_loss"] = options["per_token"]
    loss, normaliser = _step(inputs, rows, len(rows), 1, **settings)
    return {"loss": loss / normaliser}  # as Megatron divides it


def _theirs(inputs: Inputs, options: Options) -> Outputs:
    return _whole(inputs, options, **CASES[options["case"]][0])


def _ours(inputs: Inputs, options: Options) -> Outputs:
    average = pl.TokenMean() if options["per_token"] else pl.SeqMeanTokenMean()
    path = _named(CASES[options["case"]][1].replace(aggregate=average))
    return _whole(inputs, options, loss_type="custom_loss", custom_loss_function_path=path)


@cache
def _named(spec: pl.LossSpec) -> str:
    """The path by which slime loads this loss."""
    name = f"loss_{len(vars(_named_losses))}"
    setattr(_named_losses, name, _loaded.loss_of(spec))
    sys.modules[_named_losses.__name__] = _named_losses
    return f"{_named_losses.__name__}.{name}"


def losses(spec: pl.LossSpec, batch: Batch, logp: Tensor, cut: list[Tensor]) -> Iterator[Tensor]:
    """The losses that a rank differentiates: its tokens of every row, in two micro-batches.
    Megatron divides by their number and averages over ranks, or divides by the tokens and sums.
    """
    inputs = _inputs(batch, {}) | {"logp": logp}
    settings = {"loss_type": "custom_loss", "custom_loss_function_path": _named(spec)}
    per_token = isinstance(spec.aggregate, pl.TokenMean)
    count = batch.mask.sum() * ranks()  # every context-parallel rank reports its tokens
    for rows in (torch.arange(len(logp))[micro::2] for micro in range(2)):
        loss, _ = _step(inputs, rows, len(logp), 2, calculate_per_token_loss=per_token, **settings)
        yield loss * ranks() / count if per_token else loss / 2


def compared(case: str, seeds: int) -> Function:
    """The comparison of one case."""
    return Function(
        f"policy_loss_function, {case}",
        [{"case": case, "per_token": per_token} for per_token in (False, True)],
        _inputs,
        _ours,
        _theirs,
        differentiate=("logp",),
        seeds=seeds,
        kinds=(
            *("ragged", "full", "holes", "empty_rows", "single_token", "on_policy"),
            *("sequence_advantages", "no_advantage", "all_masked"),
        ),
    )


FUNCTIONS = [compared(case, seeds=18) for case in CASES]
