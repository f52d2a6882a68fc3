"""A loss for `ServiceClient.create_custom_loss`: a graph of torch operations on one sequence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.tinker.data import KEYS, pack, trace
from policyloss.compat.tinker.losses import check_spec
from policyloss.errors import InputError
from policyloss.loss import policy_loss, ready_spec
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# `logprobs` is the current policy's in a custom loss, so the sampler's need another key.
_KEYS = {**KEYS, "rollout_logp": "rollout_logprobs"}
_EXAMPLE_LENGTH = 7  # differs from every size in a loss, so that the graph holds it as a symbol


@dataclasses.dataclass(frozen=True)
class ExportedLoss:
    """A loss that a Tinker server can run, made by `export`.

    function: takes `logprobs` and the other inputs of one datum, and returns its share of the loss.
    input_ranks: the number of axes of each input.
    """

    spec: LossSpec
    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    input_ranks: dict[str, int]

    def prepare(self, data: Sequence[Any]) -> list[Any]:
        """The data of a whole step with the inputs of this loss, the counts of the step among them.

        data: as for `policyloss.compat.tinker.loss`.
        """
        step = pack(self.spec, data, None)
        weights = step.tensors.pop("weights", None)
        if weights is not None and not (weights == step.mask).all():
            raise InputError(
                "weights must be 1 where a token is trained on and 0 elsewhere: an exported loss "
                "takes no other weights; policyloss.compat.tinker.loss(spec) does."
            )
        totals = Totals.count(step.mask, cu_seqlens=step.cu_seqlens, dp_size=1)
        tokens = {"mask": step.mask, "advantages": step.advantages, "old_logprobs": step.old_logp}
        tokens |= {_KEYS[name]: x for name, x in step.tensors.items()}
        lengths = step.cu_seqlens.diff().tolist()
        inputs: dict[str, Sequence[Tensor]] = {
            key: torch.split(x.to(torch.float32), lengths)
            for key, x in tokens.items()
            if x is not None
        }
        for name in ("tokens", "sequences"):
            count = torch.as_tensor(getattr(totals, name)).float()
            inputs[f"step_{name}"] = [count for _ in data]
        return [
            dataclasses.replace(
                datum,
                loss_fn_inputs={
                    "target_tokens": datum.loss_fn_inputs["target_tokens"],
                    **{key: inputs[key][i] for key in self.input_ranks if key != "logprobs"},
                },
            )
            for i, datum in enumerate(data)
        ]


def export(spec: AnyLoss) -> ExportedLoss:
    """`spec` for `ServiceClient.create_custom_loss`, which sums it over the data of a step.

        exported = tinker.export("dapo")
        handle = service.create_custom_loss(exported.function, exported.input_ranks).result()
        client.forward_backward_custom(exported.prepare(data), handle)

    The graph holds torch operations alone and fits sequences of any length. A loss is refused if a
    token's loss depends on other sequences, or on whole distributions.
    """
    spec = ready_spec(spec)
    check_spec(spec)
    counted = {"group_ids", "weights"} & set(spec.reads)
    if spec.needs_statistics or counted or spec.reach == "batch":
        raise InputError(
            "this loss compares sequences with each other, and a server runs an exported loss on "
            "one sequence at a time; use policyloss.compat.tinker.loss(spec), which runs here."
        )
    tensors = [name for name in _KEYS if name in spec.reads]
    keys = ("mask", "advantages", *(_KEYS[name] for name in tensors))
    counts = ("step_tokens", "step_sequences")

    def one_sequence(logprobs: Tensor, *inputs: Tensor) -> Tensor:
        named = dict(zip((*keys, *counts), inputs, strict=True))
        rows: dict[str, Any] = {name: named[_KEYS[name]].unsqueeze(0) for name in tensors}
        return policy_loss(
            spec,
            logprobs.unsqueeze(0),
            rows.pop("old_logp", None),
            named["advantages"].unsqueeze(0),
            named["mask"].unsqueeze(0) != 0,
            totals=Totals(named["step_tokens"], named["step_sequences"]),
            metrics="none",
            **rows,
        ).loss

    examples = {name: torch.full((_EXAMPLE_LENGTH,), -0.5) for name in ("logprobs", *keys)}
    examples |= {name: torch.tensor(5.0) for name in counts}
    ranks = {name: example.dim() for name, example in examples.items()}
    return ExportedLoss(spec, trace(one_sequence, examples), ranks)
