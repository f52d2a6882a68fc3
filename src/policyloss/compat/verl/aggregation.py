"""verl's averages `agg_loss` and `compute_value_loss` and its `kl_penalty`
(verl/trainer/ppo/core_algos.py), and their names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_choice, description
from policyloss.compat.arguments import drop_in
from policyloss.compat.parts import (
    GuardedSeqMeanTokenMean,
    as_count,
    as_share,
    guard,
    guarded_mean,
    mask_or_all,
)
from policyloss.errors import InputError, unknown_name
from policyloss.inputs import Inputs
from policyloss.loss import aggregate_tokens
from policyloss.parts import aggregate
from policyloss.parts.kl import KL
from policyloss.totals import Totals
from policyloss.value import value_loss

__all__ = ["AGG_MODES", "agg_loss", "compute_value_loss", "kl_penalty", "kl_penalty_forward"]

# The averages by verl's names, and verl's names by the averages.
AVERAGES: dict[str, Any] = {
    "token-mean": aggregate.TokenMean,
    "token-sum": aggregate.TokenSum,
    "seq-mean-token-sum": aggregate.SeqMeanTokenSum,
    "seq-mean-token-mean": aggregate.SeqMeanTokenMean,
    "seq-mean-token-sum-norm": aggregate.SeqMeanTokenSumNorm,
}
MODES = {average: mode for mode, average in AVERAGES.items()}
AGG_MODES = tuple(AVERAGES)


class NotOfferedError(InputError, NotImplementedError):
    """An option of verl that this library lacks.

    It is a NotImplementedError as in verl, and a ValueError as every error here.
    """


def aggregation(
    loss_agg_mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: Any = None,
    global_batch_size: Any = None,
    loss_scale_factor: Any = None,
) -> tuple[Any, Totals]:
    """The arguments of `agg_loss` as an aggregation and its counts. `mask` is `[B, T]`."""
    check_choice("loss_agg_mode", loss_agg_mode, AGG_MODES)
    dp_size = int(dp_size)
    needed = {
        "token-mean": ("batch_num_tokens", batch_num_tokens),
        "token-sum": ("dp_size", dp_size),
    }
    name, count = needed.get(loss_agg_mode, ("global_batch_size", global_batch_size))
    if dp_size > 1 and count is None:
        raise InputError(
            f"{name} is required when dp_size > 1 (got dp_size={dp_size}): pass the count of the "
            "complete step."
        )
    counts = Totals.of_call(mask, dp_size)
    if batch_num_tokens is not None:
        counts = replace(counts, tokens=as_count(batch_num_tokens))
    if global_batch_size is not None:
        counts = replace(counts, sequences=as_count(global_batch_size))
    if loss_agg_mode == "seq-mean-token-sum-norm":
        scale = mask.shape[-1] if loss_scale_factor is None else float(loss_scale_factor)
        return aggregate.SeqMeanTokenSumNorm(scale), counts
    if loss_agg_mode == "seq-mean-token-mean":
        return GuardedSeqMeanTokenMean(guard(mask)), counts
    return AVERAGES[loss_agg_mode](), counts


@drop_in
def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    """verl's `agg_loss`: the average of a `[B, T]` loss, 0-dim. Without a valid token it is 0
    (verl: NaN). See `aggregation`.
    """
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    part, totals = aggregation(loss_agg_mode, loss_mask, *counts)
    return aggregate_tokens(loss_mat, loss_mask, part, totals=totals)


@drop_in
def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """verl's `compute_value_loss`: `(vf_loss, vf_clipfrac)`, with its factor one half."""
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    part, totals = aggregation(loss_agg_mode, response_mask, *counts)
    clip = float(cliprange_value)
    out = value_loss(
        vpreds, returns, values, response_mask, clip, boundary="half", aggregate=part, totals=totals
    )
    return out.loss, mean(out.metrics["clip_fraction"], response_mask)


# verl's name for each estimator, and ours.
KL_ESTIMATORS: dict[str, Literal["k1", "k2", "k3", "abs"]] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def kl_part(kl_penalty: str) -> KL:
    """The KL part with this name in verl; a name that ends with "+" has the gradient of k2."""
    if not isinstance(kl_penalty, str):
        raise InputError(
            f"kl_penalty must be the name of an estimator, got {description(kl_penalty)}."
        )
    name = kl_penalty.removesuffix("+")
    if name == "full":
        raise NotOfferedError(
            'kl_penalty="full" needs the logits of all vocabulary entries; use an estimator.'
        )
    if name not in KL_ESTIMATORS:
        raise NotOfferedError(unknown_name("kl_penalty", kl_penalty, [*KL_ESTIMATORS, "k3+"]))
    estimator = KL_ESTIMATORS[name]
    clamp, value_clamp = (20.0, 10.0) if estimator == "k3" else (None, None)
    grad: Literal["k2", "value"] = "k2" if name != kl_penalty else "value"
    return KL(estimator, 1.0, grad=grad, clamp=clamp, value_clamp=value_clamp)


def _kl_of_tokens(logprob: Tensor, ref_logprob: Tensor, part: KL) -> Tensor:
    # verl takes tensors of any shape.
    x, ref = (y.reshape(-1, y.shape[-1] if y.dim() else 1) for y in (logprob, ref_logprob))
    zeros = torch.zeros_like(x, requires_grad=False)
    tokens = Inputs(logp=x, advantages=zeros, mask=mask_or_all(None, x), ref_logp=ref).tokens()
    return part(tokens).reshape(logprob.shape)


@drop_in
def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """verl's `kl_penalty`: one estimate per log-probability; "+" forms have the gradient of k2."""
    return _kl_of_tokens(logprob, ref_logprob, kl_part(kl_penalty))


@drop_in
def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """verl's `kl_penalty_forward`: `kl_penalty` without the "+" forms."""
    if isinstance(kl_penalty, str) and kl_penalty.endswith("+"):
        raise NotOfferedError(
            f"kl_penalty={kl_penalty!r}: kl_penalty_forward has no + forms; use kl_penalty."
        )
    return _kl_of_tokens(logprob, ref_logprob, kl_part(kl_penalty))


def mean(record: Any, mask: Tensor) -> Tensor:
    """A share with verl's guard in the denominator: 0 if nothing is valid."""
    return as_share(guarded_mean(record, guard(mask)), mask)
