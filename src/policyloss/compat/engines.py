"""Checks and metrics for engines that call a loss once per micro-batch or sample."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compat.parts import guarded_mean
from policyloss.errors import SpecError
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import (
    LengthWeighted,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TurnMean,
)
from policyloss.records import Stat
from policyloss.spec import LossSpec

PREFIX = "policyloss/"
# The averages that divide by the tokens or by the sequences of the step.
COUNTED = (
    *(TokenMean, SeqMeanTokenMean, SeqMeanTokenSum, SeqMeanTokenSumNorm),
    *(LengthWeighted, TurnMean),
)


def fitting_spec(
    engine: str,
    loss: AnyLoss,
    passes: Collection[str],
    averages: Collection[type],
    *,
    sampler_is_old: bool = False,
) -> LossSpec:
    """The spec of `loss`; an error if the engine cannot run it.

    passes: the arguments of `policy_loss` that the engine has. averages: the aggregations whose
    denominators it counts. sampler_is_old: the sampler's log-probabilities are the only old ones.
    """
    spec = as_spec(loss)
    if missing := [name for name in spec.reads if name not in passes]:
        raise SpecError(
            f"this loss reads {', '.join(missing)}, which {engine} does not pass to a loss. Use a "
            "spec without that term, such as spec.replace(kl=None, entropy_coef=0.0); a KL or an "
            f"entropy bonus of {engine}'s own is one of its settings."
        )
    if sampler_is_old and {"old_logp", "rollout_logp"} <= set(spec.reads):
        raise SpecError(
            f"this loss compares trainer and sampler, but {engine} passes the sampler's "
            "log-probabilities alone; the ratio is anchored at them, so use "
            "spec.replace(correction=())."
        )
    if spec.needs_statistics:
        raise SpecError(
            "this loss needs numbers of the whole step that depend on the current policy "
            f"(survivors of a rejection, covariances or a mean weight), but {engine} calls a loss "
            "with a part of the step; use rejected='keep' or another part."
        )
    if type(spec.aggregate) not in averages:
        names = ", ".join(sorted(average.__name__ for average in averages))
        raise SpecError(
            f"{engine} does not count the denominator of {spec.aggregate!r}; use spec.replace("
            f"aggregate=…) with {names}."
        )
    return spec


def means(metrics: Metrics) -> dict[str, Tensor]:
    """The metrics that are means, as "policyloss/…", 0-dim; 0 where nothing was counted. An engine
    averages them over micro-batches, which would be wrong for counts, sums and extremes.
    """
    stats = {key: record for key, record in metrics.items() if isinstance(record, Stat)}
    return {f"{PREFIX}{key}": guarded_mean(record, 1e-30) for key, record in stats.items()}
