"""Checks and metrics for engines that call a loss once per micro-batch or sample, and the adapters
of engines that need a few lines only: xtuner, RLinf, Trinity, twinkle and ms-swift.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compat.parts import denominator, guarded_mean
from policyloss.errors import SpecError
from policyloss.loss import policy_loss, ready_spec
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import (
    LengthWeighted,
    LocalSeqMeanTokenMean,
    LocalTokenMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    TokenMean,
    TokenSum,
    TurnMean,
)
from policyloss.records import Stat
from policyloss.spec import LossSpec
from policyloss.totals import Totals

PREFIX = "policyloss/"
# The averages that divide by the tokens or by the sequences of the step.
COUNTED = (
    *(TokenMean, SeqMeanTokenMean, SeqMeanTokenSum, SeqMeanTokenSumNorm),
    *(LengthWeighted, TurnMean),
)
# The averages of one call, which some engines add or average, and RLinf's names of them.
LOCAL = {LocalTokenMean: "masked_mean", LocalSeqMeanTokenMean: "seq_mean_token_mean"}


# The settings of ms-swift's own loss that must keep these values.
OF_SWIFT = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "rollout_importance_sampling_mode": None,
    "off_policy_sequence_mask_delta": None,
    "top_entropy_quantile": 1.0,
    "sdar_loss_coef": 0,
    "chord_sft_iterator": None,
}


def fitting_spec(
    engine: str,
    loss: AnyLoss,
    passes: Collection[str],
    averages: Collection[type],
    *,
    sampler_is_old: bool = False,
    single_tokens: bool = False,
) -> LossSpec:
    """The spec of `loss`; an error if the engine cannot run it.

    passes: the arguments of `policy_loss` that the engine has. averages: the aggregations whose
    denominators it counts. sampler_is_old: the sampler's log-probabilities are the only old ones.
    single_tokens: it packs sequences, and passes no bounds of them.
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
    if single_tokens and spec.reach != "token":
        raise SpecError(
            f"this loss reads other tokens of a sequence, but {engine} packs sequences and passes "
            "no bounds of them; use a TokenRatio and a trust region of single tokens."
        )
    return spec


def check_settings(
    engine: str, settings: Callable[[str, Any], Any], wanted: Mapping[str, Any]
) -> None:
    """Raise if a setting of the engine's own loss differs from the value that has no effect.

    settings: takes a name and a default, and returns the engine's value or this default.
    """
    for name, value in wanted.items():
        if (chosen := settings(name, value)) != value:
            raise SpecError(
                f"{name}={chosen!r} belongs to {engine}'s own loss and has no effect on this one; "
                f"set it to {value!r}, and put the term into the spec."
            )


def sampled_logp(spec: LossSpec, logp: Tensor) -> dict[str, Any]:
    """The sampler's log-probabilities, the only old ones, under the name that `spec` reads."""
    return {"old_logp": None, "rollout_logp" if "rollout_logp" in spec.reads else "old_logp": logp}


def mean_records(metrics: Metrics) -> dict[str, Stat]:
    """The metrics that are means, as "policyloss/…".

    An engine averages them over micro-batches, which would be wrong for counts, sums and extremes.
    """
    return {f"{PREFIX}{key}": x for key, x in metrics.items() if isinstance(x, Stat)}


def means(metrics: Metrics) -> dict[str, Tensor]:
    """The values of `mean_records`, 0-dim; 0 where nothing was counted."""
    return {key: guarded_mean(x, 1e-30) for key, x in mean_records(metrics).items()}


def xtuner_loss(loss: AnyLoss) -> Callable[..., Tensor]:
    """`loss` as a policy loss of xtuner, whose `loss_weights` hold the denominator.

    `my_loss = xtuner_loss(spec)` in a module of yours is a target of
    `policy_loss_cfg["loss_type"]`.
    """
    spec = fitting_spec("xtuner", loss, ("old_logp",), (TokenMean,), single_tokens=True)
    spec = spec.replace(aggregate=TokenSum())

    def loss_of_chunk(
        log_prob: Tensor,
        old_log_prob: Tensor,
        advantages: Tensor,
        loss_weights: Tensor,
        policy_loss_cfg: Mapping[str, Any],
    ) -> Tensor:
        weighted: dict[str, Any] = {"mask": loss_weights != 0, "weights": loss_weights}
        options: dict[str, Any] = {"totals": "local", "metrics": "none"}
        return policy_loss(spec, log_prob, old_log_prob, advantages, **weighted, **options).loss

    return loss_of_chunk


def rlinf_loss(loss: AnyLoss) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """`loss` for RLinf's `register_policy_loss(name)(rlinf_loss(spec))`. RLinf averages the means
    of micro-batches, so the spec's average must be a local one.
    """
    spec = fitting_spec("RLinf", loss, ("old_logp",), LOCAL)
    wanted = LOCAL[type(spec.aggregate)]

    def actor_loss(
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        loss_agg_func: Callable[..., Tensor] | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        average = getattr(loss_agg_func, "__name__", None)
        if average != wanted:
            raise SpecError(
                f"this loss is averaged by {spec.aggregate!r}, RLinf's {wanted}, but RLinf passes "
                f"loss_agg_func={average}; set algorithm.loss_agg_func. Embodied tasks have none."
            )
        out = policy_loss(spec, logprobs, old_logprobs, advantages, loss_mask, totals="local")
        return out.loss, means(out.metrics)

    return actor_loss


def trinity_loss(loss: AnyLoss) -> type[Any]:
    """`loss` as a policy loss of Trinity, which adds the means of micro-batches, so that the spec's
    average must be a local one.

    `MyLoss = trinity_loss(spec)` in a module of yours is a target of `algorithm.policy_loss_fn`.
    """
    spec = fitting_spec("Trinity", loss, ("old_logp",), LOCAL)
    module = import_module("trinity.algorithm.policy_loss_fn.policy_loss_fn")

    class PolicyLoss(module.PolicyLossFn):  # type: ignore[misc,name-defined]  # it has no types
        # Trinity reads the names of these arguments.
        def __call__(
            self, logprob: Tensor, old_logprob: Tensor, action_mask: Tensor, advantages: Tensor
        ) -> tuple[Tensor, dict[str, float]]:
            out = policy_loss(spec, logprob, old_logprob, advantages, action_mask, totals="local")
            return out.loss, {key: x.item() for key, x in means(out.metrics).items()}

        @classmethod
        def default_args(cls) -> dict[str, Any]:
            return {}

    return PolicyLoss


def twinkle_loss(loss: AnyLoss) -> Any:
    """`loss` for twinkle's `model.set_loss(twinkle_loss(spec))`. It returns a sum and a count;
    twinkle divides by the counts of all ranks.
    """
    spec = fitting_spec("twinkle", ready_spec(loss), ("old_logp", "ref_logp", "entropy"), COUNTED)
    module = import_module("twinkle.loss.grpo")

    class PolicyLoss(module.GRPOLoss):  # type: ignore[misc,name-defined]  # it has no types
        def __call__(self, inputs: Any, outputs: Any, **samples: Any) -> Any:
            if samples.get("advantages") is None:  # a forward alone
                return super().__call__(inputs, outputs, **samples)
            labels, logp = inputs["labels"], outputs["logps"]
            mask = (labels if labels.dim() > 1 else labels.unsqueeze(0)) != self.ignore_index
            named = {"old_logp": "old_logps", "ref_logp": "ref_logps", "advantages": "advantages"}
            tensors: dict[str, Any] = {
                name: self._pad_and_align_to_batch(samples[key], mask, logp.device, logp.dtype)
                for name, key in named.items()
                if samples.get(key) is not None
            }
            tensors = {"old_logp": "current", **tensors, "entropy": outputs.get("entropies")}
            out = policy_loss(spec, logp, mask=mask, totals=Totals(1, 1), metrics="none", **tensors)
            count = denominator(spec.aggregate, mask)
            return module.LossOutput(loss=out.loss, num_tokens=count)

    return PolicyLoss(entropy_coef=spec.entropy_coef)


def swift_trainer(loss: AnyLoss) -> type[Any]:
    """ms-swift's GRPOTrainer with `loss`, and with ms-swift's own metrics.

    `Trainer = swift_trainer(spec)` in a plugin of yours is a target of
    `TrainerFactory.TRAINER_MAPPING["grpo"]`.
    """
    reads = ("old_logp", "rollout_logp", "ref_logp")
    spec = fitting_spec("ms-swift", loss, reads, (TokenMean,))
    module = import_module("swift.rlhf_trainers.grpo_trainer")

    class GRPOTrainer(module.GRPOTrainer):  # type: ignore[misc,name-defined]  # it has no types
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            self.scored, entropies = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.scored.detach(), entropies

        def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, batch: Any) -> Any:
            _check_swift(spec, self)
            _, metrics = super()._compute_loss_and_metrics(model, model_inputs, batch)
            keys = {"rollout_logp": "rollout_per_token_logps", "ref_logp": "ref_per_token_logps"}
            tensors = {name: getattr(batch, key) for name, key in keys.items()}
            old = batch.old_per_token_logps
            tensors["old_logp"] = "current" if old is None else old
            totals = Totals(batch.num_items_in_batch, 1, dp_size=self.accelerator.num_processes)
            tensors |= {"advantages": batch.advantages, "mask": metrics["completion_mask"]}
            out = policy_loss(spec, self.scored, totals=totals, metrics="none", **tensors)
            return self._undo_gradient_accumulation_scaling(out.loss), metrics

    return GRPOTrainer


def _check_swift(spec: LossSpec, trainer: Any) -> None:
    """Raise if the settings of ms-swift's trainer contradict the spec."""
    check_settings("ms-swift", partial(getattr, trainer), OF_SWIFT)
    if bool(trainer.beta and not trainer.kl_in_reward) != (spec.kl is not None):
        raise SpecError(
            f"beta={trainer.beta} with kl_in_reward={trainer.kl_in_reward}, but the spec has "
            f"kl={spec.kl!r}; ms-swift runs the reference model by beta, and the spec decides the "
            "term."
        )
