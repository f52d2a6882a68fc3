"""A loss for `TrainingClient.forward_backward_custom`, and the built-in losses as specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.errors import InputError, unknown_name
from policyloss.loss import policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import TokenSum
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Unbounded
from policyloss.parts.trust_clips import Clip, DetachedClip
from policyloss.parts.trust_weights import Quadratic
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# The argument of `policy_loss`, and the key of `loss_fn_inputs` that holds it.
KEYS = {
    "rollout_logp": "logprobs",
    "old_logp": "old_logprobs",
    "ref_logp": "ref_logprobs",
    "teacher_logp": "teacher_logprobs",
}


def loss(
    spec: AnyLoss, data: Sequence[Any] | None = None, metrics: MetricsLevel = "all"
) -> StepLoss:
    """`spec` as the `loss_fn` of `forward_backward_custom`.

        step = tinker.loss("dapo", data)
        client.forward_backward_custom(step.bare(data[:64]), step)
        client.forward_backward_custom(step.bare(data[64:]), step)
        client.optim_step(…)
        step.metrics.compute()

    data: the data of the whole optimizer step, which every average divides by. Without it, each
    call is a whole step. metrics: as in `policy_loss`.

    Each datum is one sequence. Its `loss_fn_inputs` hold, `[T]` like `target_tokens`:

    - `mask`, or `weights` of 0 and 1: True where a token is trained on;
    - `advantages`, `[T]` or one number;
    - `logprobs`: the sampler's, and the anchor of the ratio unless there are `old_logprobs`;
    - `old_logprobs`, `ref_logprobs`, `teacher_logprobs`, if the loss reads them;
    - `group_id`: an integer, the same for all sequences of a prompt, if the loss reads `group_ids`.
    """
    spec = ready_spec(spec)
    check_level(metrics)
    check_spec(spec)
    if data is None:
        return StepLoss(spec, None, metrics)
    if spec.needs_statistics:
        raise InputError(
            "this loss needs numbers of the whole step that depend on the current policy "
            "(survivors of a rejection, covariances or a mean weight): leave data= out, and pass "
            "all data of a step to one call of forward_backward_custom."
        )
    step = pack(spec, data, None)
    totals = Totals.count(
        step.mask, cu_seqlens=step.cu_seqlens, group_ids=step.tensors.get("group_ids"), dp_size=1
    )
    return StepLoss(spec, totals, metrics)


class StepLoss:
    """A function of `(data, logprobs)` that returns the loss and its metrics as floats.

    totals: the counts of the step; None if each call is a step. metrics: the metrics of all calls
    so far, merged.
    """

    def __init__(self, spec: LossSpec, totals: Totals | None, level: MetricsLevel) -> None:
        self.spec = spec
        self.totals = totals
        self.level = level
        self.metrics = Metrics()
        self._whole: dict[int, tuple[Any, Any]] = {}

    def bare(self, data: Sequence[Any]) -> list[Any]:
        """The data to pass to the client: without the inputs of the loss, which older SDKs refuse
        and no server needs. This object keeps them.
        """
        bare = [
            dataclasses.replace(
                datum, loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"]}
            )
            for datum in data
        ]
        # The pair keeps the bare datum alive, so that its id stays its own.
        self._whole |= {id(mine): (mine, datum) for mine, datum in zip(bare, data, strict=True)}
        return bare

    def __call__(
        self, data: Sequence[Any], logprobs: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """The share of `data` in the loss of the step. logprobs: `[T]` of each datum."""
        data = [self._whole.get(id(datum), (None, datum))[1] for datum in data]
        call = pack(self.spec, data, logprobs)
        out = policy_loss(
            self.spec,
            torch.cat(list(logprobs)),
            call.old_logp,
            call.advantages.unsqueeze(0),
            call.mask,
            cu_seqlens=call.cu_seqlens,
            totals=self.totals,
            metrics=self.level,
            **call.tensors,
        )
        self.metrics = self.metrics + out.metrics
        return out.loss, out.metrics.compute()


class Packed(NamedTuple):
    """Data end to end. tensors: the optional arguments of `policy_loss`."""

    mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    old_logp: Tensor | None
    tensors: dict[str, Any]


def pack(spec: LossSpec, data: Sequence[Any], logprobs: Sequence[Tensor] | None) -> Packed:
    """Check the data and pack them. logprobs: the current policy's, whose lengths must fit."""
    if not data:
        raise InputError("data is empty; pass at least one datum.")
    rows = [dict(datum.loss_fn_inputs) for datum in data]
    lengths = [_length(rows[i], i) for i in range(len(rows))]
    if logprobs is not None:
        actual = [tuple(x.shape) for x in logprobs]
        if actual != [(length,) for length in lengths]:
            raise InputError(
                f"logprobs must hold one number per target token, shapes {lengths}, got {actual}."
            )
    named = {
        argument: _tokens(rows, key, lengths)
        for argument, key in KEYS.items()
        if argument in spec.reads or any(key in row for row in rows)
        if not (argument == "old_logp" and _samples_are_old(spec, rows))
    }
    old_logp = named.pop("old_logp", named.get("rollout_logp"))
    if old_logp is None and "old_logp" in spec.reads:
        old_logp = _tokens(rows, KEYS["rollout_logp"], lengths)
    tensors: dict[str, Any] = dict(named)
    if "group_ids" in spec.reads:
        ids = [_values(row, "group_id", i).reshape(-1) for i, row in enumerate(rows)]
        if any(len(x) != 1 for x in ids):
            raise InputError("group_id must be one integer per datum.")
        tensors["group_ids"] = torch.cat(ids).to(torch.int64)
    masked_by = "mask" if any("mask" in row for row in rows) else "weights"
    mask = _tokens(rows, masked_by, lengths)
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError(f"{masked_by} must hold 0 and 1, True where a token is trained on.")
    advantages = _tokens(rows, "advantages", lengths, expand=True)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Packed(mask != 0, ends, advantages, old_logp, tensors)


def check_spec(spec: LossSpec) -> None:
    """Raise if the loss reads numbers that a Tinker server does not return."""
    for name in ("entropy", "divergence"):
        if name in spec.reads:
            raise InputError(
                f"this loss reads the {name} of each token, which needs whole distributions; a "
                "Tinker server returns the log-probability of the target tokens alone."
            )


def _samples_are_old(spec: LossSpec, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the sampler's log-probabilities are the old policy's; raise if that hides a term."""
    if any("old_logprobs" in row for row in rows):
        return False
    if {"old_logp", "rollout_logp"} <= set(spec.reads):
        raise InputError(
            "this loss corrects for the difference between sampler and trainer, so it needs "
            "loss_fn_inputs['old_logprobs'], the trainer's log-probabilities before the first "
            "update (TrainingClient.forward), besides the sampler's 'logprobs'."
        )
    return True


def _length(row: dict[str, Any], i: int) -> int:
    ids = _values(row, "target_tokens", i)
    if ids.dim() != 1:
        raise InputError(
            f"datum {i} has target_tokens of shape {tuple(ids.shape)}; a policy loss takes one "
            "target per position, [T]."
        )
    return len(ids)


def _tokens(
    rows: Sequence[dict[str, Any]], key: str, lengths: Sequence[int], expand: bool = False
) -> Tensor:
    """The values of a key of all data end to end. expand: also take one number per datum."""
    parts = []
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        values = _values(row, key, i)
        if expand and values.numel() == 1:
            values = values.reshape(1).expand(length)
        if tuple(values.shape) != (length,):
            raise InputError(
                f"datum {i} has loss_fn_inputs[{key!r}] of shape {tuple(values.shape)}; it must be "
                f"({length},), like target_tokens."
            )
        parts.append(values)
    return torch.cat(parts)


def _values(row: dict[str, Any], key: str, i: int) -> Tensor:
    if key not in row:
        raise InputError(
            f"datum {i} has no loss_fn_inputs[{key!r}], which this loss needs; it has "
            f"{', '.join(row)}."
        )
    values: Tensor = row[key].to_torch()
    return values


def built_in(name: str, **config: float) -> LossSpec:
    """A built-in loss of Tinker as a spec, with the keys of its `loss_fn_config`.

        tinker.built_in("ppo", clip_low_threshold=0.8, clip_high_threshold=1.28)

    All are sums over tokens, anchored at the sampler. The weights of `cross_entropy` are this
    spec's advantages. `dro` has the gradient of Tinker's, and a value without its constant.
    """
    if name not in _TRUST:
        raise InputError(unknown_name("built-in loss", name, _TRUST))
    try:
        trust = _TRUST[name](**config)
    except TypeError as error:
        raise InputError(f"loss_fn_config of {name}: {error}.") from None
    return LossSpec(ratio=TokenRatio(anchor="rollout"), trust=trust, aggregate=TokenSum())


_TRUST: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda: Unbounded("logp"),
    "importance_sampling": lambda: Unbounded("ratio"),
    "ppo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: Clip(
        1 - clip_low_threshold, clip_high_threshold - 1
    ),
    "cispo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: DetachedClip(
        clip_low_threshold, clip_high_threshold
    ),
    "dro": lambda beta: Quadratic(beta),
}
