"""A loss for `TrainingClient.forward_backward_custom`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss
from policyloss.compat.tinker.data import count, only, pack
from policyloss.errors import InputError
from policyloss.loss import policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.spec import LossSpec
from policyloss.totals import Totals


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
