"""A loss for `TrainingClient.forward_backward_custom`, and one for
`ServiceClient.create_custom_loss`: a graph of torch operations on one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.tinker.data import KEYS, count, only, pack, trace
from policyloss.errors import InputError
from policyloss.loss import policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.parts.trust import FutureKL
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# `logprobs` is the current policy's in a custom loss, so the sampler's need another key.
_KEYS = {**KEYS, "logp": "logprobs", "rollout_logp": "rollout_logprobs"}
_COUNTS = ("step_tokens", "step_sequences")
_EXAMPLE_LENGTH = 7  # differs from every size in a loss, so that the graph holds it as a symbol


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

    - `mask`: 1 where a token is trained on, else 0; and `weights`, which multiply the loss of each
      token. Either may be left out: without a mask, the tokens with a weight of 0 are masked;
    - `advantages`, `[T]` or one number;
    - `logprobs`: the sampler's, and the anchor of the ratio unless there are `old_logprobs`;
    - `old_logprobs`, `ref_logprobs`, `teacher_logprobs`, if the loss reads them;
    - `group_id`: an integer, the same for all sequences of a prompt, if the loss reads `group_ids`.
    """
    spec = ready_spec(spec)
    check_level(metrics)
    check_spec(spec)
    if data is not None and spec.needs_statistics:
        raise InputError(
            "this loss needs numbers of the whole step that depend on the current policy "
            "(survivors of a rejection, covariances or a mean weight): leave data= out, and pass "
            "all data of a step to one call of forward_backward_custom."
        )
    return StepLoss(spec, None if data is None else count(pack(spec, data)), metrics)


class StepLoss:
    """A function of `(data, logprobs)` that returns the loss and its metrics as floats.

    totals: the counts of the step; None if each call is a step. metrics: the metrics of all calls
    so far, merged.
    """

    def __init__(self, spec: LossSpec, totals: Totals | None, level: MetricsLevel) -> None:
        self.spec, self.totals, self.level = spec, totals, level
        self.metrics = Metrics()
        self._complete: dict[int, tuple[Any, Any]] = {}

    def bare(self, data: Sequence[Any]) -> list[Any]:
        """The data to pass to the client: without the inputs of the loss, which older SDKs refuse
        and no server needs. This object keeps them.
        """
        pairs = [(only(datum), datum) for datum in data]
        # The pair keeps the bare datum alive, so that its id stays its own.
        self._complete |= {id(pair[0]): pair for pair in pairs}
        return [bare for bare, _ in pairs]

    def complete(self, data: Sequence[Any]) -> list[Any]:
        """The data with the inputs of the loss; the inverse of `bare`."""
        return [self._complete.get(id(datum), (None, datum))[1] for datum in data]

    def __call__(
        self, data: Sequence[Any], logprobs: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """The share of `data` in the loss of the step. logprobs: `[T]` of each datum."""
        call = pack(self.spec, self.complete(data), logprobs)
        out = policy_loss(self.spec, totals=self.totals, metrics=self.level, **call)
        self.metrics = sum((self.metrics, out.metrics), Metrics())
        return out.loss, out.metrics.compute()


def check_spec(spec: LossSpec) -> None:
    """Raise if the loss reads numbers that a Tinker server does not return."""
    for name in ("entropy", "divergence"):
        if name in spec.reads:
            raise InputError(
                f"this loss reads the {name} of each token, which needs whole distributions; a "
                "Tinker server returns the log-probability of the target tokens alone."
            )


@dataclass(frozen=True)
class ExportedLoss:
    """A loss that a Tinker server can run, made by `export`.

    function: takes `logprobs` and the other inputs of one datum, and returns its share of the loss.
    input_ranks: the number of axes of each input.
    """

    spec: LossSpec
    function: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    input_ranks: dict[str, int]

    def prepare(self, data: Sequence[Any]) -> list[Any]:
        """The data of a whole step, as for `loss`, with the inputs that `function` takes."""
        step = pack(self.spec, data)
        weights = step.pop("weights", step["mask"])
        if not (weights == step["mask"]).all():
            raise InputError(
                "weights must be 1 where a token is trained on and 0 elsewhere: an exported loss "
                "takes no other weights; policyloss.compat.tinker.loss(spec) does."
            )
        totals, lengths = count(step), step["cu_seqlens"].diff().tolist()
        rows = {
            key: x.reshape(-1).float().split(lengths)
            for name, x in step.items()
            if (key := _KEYS.get(name, name)) in self.input_ranks
        }
        numbers = torch.tensor([totals.tokens, totals.sequences], dtype=torch.float32)
        counts = dict(zip(_COUNTS, numbers, strict=True))
        return [
            only(datum, **{key: x[i] for key, x in rows.items()}, **counts)
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
    sides = [getattr(spec.trust, name, None) for name in ("positive", "negative")]
    if any(isinstance(part, FutureKL) for part in (spec.trust, *sides)):
        raise InputError(
            "FutureKL sums over later tokens in as many steps as the length takes, and a graph has "
            "a fixed number; use policyloss.compat.tinker.loss(spec), which runs here."
        )
    tensors = ("logp", "mask", "advantages", *(name for name in KEYS if name in spec.reads))

    def one_sequence(*inputs: Tensor) -> Tensor:
        call: dict[str, Any] = {"old_logp": None}
        call |= {name: x.unsqueeze(0) for name, x in zip(tensors, inputs, strict=False)}
        call["mask"] = call["mask"] != 0
        totals = Totals(inputs[-2], inputs[-1])
        return policy_loss(spec, totals=totals, metrics="none", **call).loss

    examples = {_KEYS.get(x, x): torch.full((_EXAMPLE_LENGTH,), -0.5) for x in tensors}
    examples |= {name: torch.tensor(5.0) for name in _COUNTS}
    function = trace(one_sequence, examples)
    return ExportedLoss(spec, function, {name: x.dim() for name, x in examples.items()})
