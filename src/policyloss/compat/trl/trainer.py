"""TRL's GRPOTrainer with the policy loss of this library, and the checks of a user's loss: the
trainer has everything that it reads, and every option of the config that is set has an effect.
`trainer_class` imports TRL, at the first use of `policyloss.compat.trl.GRPOTrainer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compat.hooks import check_advantages
from policyloss.compat.trl.batch import batch_loss, head_loss, loss_mask
from policyloss.compat.trl.config import (
    BESIDE,
    SAPO,
    VESPO,
    advantages_of,
    is_set,
    naming,
    option,
    spec_from_config,
    step_totals,
    totals_for,
)
from policyloss.compat.trl.head import OnePass, in_one_pass, installed_head
from policyloss.compat.trl.parts import exchanged
from policyloss.errors import SpecError, unknown_name
from policyloss.head.loss import HeadOutput
from policyloss.loss import LossOutput
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import LocalSeqMeanTokenMean, LocalTokenMean
from policyloss.parts.kl import KL
from policyloss.spec import LossSpec

if TYPE_CHECKING:
    _Parent = Any
else:
    _Parent = object  # TRL's trainer stands behind it in the class that `trainer_class` makes

PREFIX = "policyloss/"
# Metrics in which TRL describes the config's policy loss. With another loss they would be wrong.
OF_THE_CONFIG = ("clip_ratio/", "cispo_clip_ratio", "vespo/", "policy_loss")


@dataclass
class _Watched:
    """Intermediate results of TRL's loss: the model's log-probabilities and entropies, and the
    tokens that it keeps (None: all).
    """

    logp: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    keep: Tensor | None = None


class WithOurLoss(_Parent):  # type: ignore[misc]  # TRL has no types
    """TRL's GRPOTrainer with the policy loss of policyloss; everything else is TRL's.

    policy_loss: a `LossSpec`, the name of a preset, or None for the loss the config describes
    (`spec_from_config`), with the numbers TRL has for it. TRL's generation, rewards, reference
    model, entropy bonus, router loss, evaluation and metrics stay as they are; metrics of this
    library are logged beside them as "policyloss/…", exact over the micro-batches and processes
    of an optimizer step. It is an error to set an option of the config that has no effect with
    `policy_loss`.

    head: "fused" computes log-probabilities, those of the old policy and of the reference too,
    by the head of this library, without logits. The loss is computed in the same pass where
    nothing stands between log-probabilities and loss (an entropy bonus and
    top_entropy_quantile do). None is TRL's own head.
    """

    trl_release: str

    def __init__(
        self,
        *args: Any,
        policy_loss: LossSpec | str | None = None,
        head: Literal["fused"] | None = None,
        **kwargs: Any,
    ) -> None:
        if head not in (None, "fused"):
            raise SpecError(unknown_name("head", head, ("fused",)))
        config = inspect.signature(super().__init__).bind(*args, **kwargs).arguments.get("args")
        if config is not None:  # before TRL loads models and starts engines
            checked_loss(policy_loss, config, self.trl_release)
        if getattr(config, "use_liger_kernel", False) and hasattr(self, "compute_liger_loss"):
            raise SpecError(
                "use_liger_kernel=True: this TRL computes the loss inside Liger's kernel; set "
                "it to False."
            )
        self._watched: _Watched | None = None
        self._window: list[Metrics] = []
        self._evaluated: list[Metrics] = []
        self.head = head
        with nullcontext() if head is None else installed_head():
            super().__init__(*args, **kwargs)
        self.policy_loss = checked_loss(policy_loss, self.args, self.trl_release)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._watched is None:
            return result
        self._watched.logp, self._watched.entropy, *rest = result
        return (self._watched.logp.detach(), self._watched.entropy, *rest)

    def get_high_entropy_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's mask of the tokens whose policy term is kept; ours is kept for the same."""
        mask: Tensor = super().get_high_entropy_mask(*args, **kwargs)
        if self._watched is not None:
            self._watched.keep = mask
        return mask

    @contextmanager
    def _watching(self) -> Iterator[_Watched]:
        """Give TRL's policy term log-probabilities without gradient; ours keeps it."""
        self._watched = _Watched()
        try:
            yield self._watched
        finally:
            self._watched = None

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        spec = self.policy_loss or self._config_spec(inputs)
        totals = self._totals(spec, inputs)
        with self._watching() as watched, self._one_pass(spec, totals, inputs) as one_pass:
            total: Tensor = super()._compute_loss(model, inputs)
        out = batch_loss(
            spec,
            watched.logp,
            inputs,
            totals=totals,
            entropy=watched.entropy,
            keep=watched.keep,
        )
        if one_pass is not None and one_pass.loss is not None:
            out = LossOutput(one_pass.loss, out.metrics)
        self._record(out.metrics)
        if self.policy_loss is not None:
            self._drop_metrics_of_the_config()
        if not (
            getattr(self, "_entropy_bonus_enabled", False)
            or getattr(self, "aux_loss_enabled", False)
        ):
            return out.loss
        return exchanged(
            total,
            out.loss if self.policy_loss is None else self._config_term(watched, inputs),
            out.loss,
        )

    def _one_pass(
        self, spec: LossSpec, totals: Any, inputs: Mapping[str, Any]
    ) -> AbstractContextManager[OnePass | None]:
        """While TRL computes its loss, let the head compute ours: where it is ours alone that
        carries the gradient of the log-probabilities and entropies.
        """
        between = getattr(self, "_entropy_bonus_enabled", False) or (
            getattr(self, "top_entropy_quantile", 1.0) < 1.0
        )
        if self.head is None or between or not torch.is_grad_enabled():
            return nullcontext()

        def score(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> HeadOutput:
            return head_loss(spec, hidden, weight, ids, inputs, totals=totals, **options)

        return in_one_pass(self.model, score, inputs["completion_mask"].shape[1])

    def _config_spec(self, inputs: Mapping[str, Any]) -> LossSpec:
        engine = "sampling_per_token_logps" in inputs
        return spec_from_config(
            self.args, release=self.trl_release, handled=BESIDE, engine_logp=engine
        )

    def _config_term(self, watched: _Watched, inputs: Mapping[str, Any]) -> Tensor:
        """The policy term that TRL's total contains."""
        totals = self._config_totals(inputs)
        with torch.no_grad():
            return batch_loss(
                self._config_spec(inputs),
                watched.logp,
                inputs,
                totals=totals,
                keep=watched.keep,
            ).loss

    def _totals(self, spec: LossSpec, inputs: Mapping[str, Any]) -> Any:
        if self.policy_loss is None:
            return self._config_totals(inputs)
        if spec.needs_statistics:
            return "local"  # checked_loss made sure that a step is one call
        calls = self.current_gradient_accumulation_steps
        generated = self.args.steps_per_generation
        if not self.model.training:
            calls = generated = 1
        ranks = self.accelerator.num_processes
        return step_totals(
            loss_mask(inputs),
            inputs["num_items_in_batch"],
            calls=calls,
            generated=generated,
            ranks=ranks,
        )

    def _config_totals(self, inputs: Mapping[str, Any]) -> Any:
        return totals_for(
            self.args,
            loss_mask(inputs),
            inputs["num_items_in_batch"],
            gradient_accumulation_steps=self.current_gradient_accumulation_steps,
            num_processes=self.accelerator.num_processes,
            training=self.model.training,
            release=self.trl_release,
        )

    def _record(self, metrics: Metrics) -> None:
        """Keep a micro-batch's metrics; log them, merged, when the step is complete."""
        if not self.model.training:
            self._evaluated.append(metrics.all_reduce())
            return
        self._window.append(metrics)
        if self.accelerator.sync_gradients:
            self._log_as("train", sum(self._window, Metrics()).all_reduce().compute())
            self._window = []

    def _log_as(self, mode: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics[mode][f"{PREFIX}{name}"].append(value)

    def _drop_metrics_of_the_config(self) -> None:
        mode = "train" if self.model.training else "eval"
        for name in [n for n in self._metrics[mode] if n.startswith(OF_THE_CONFIG)]:
            del self._metrics[mode][name]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log, with the metrics of an evaluation's batches together."""
        if self._evaluated and not self.model.training:
            values = sum(self._evaluated, Metrics()).compute()
            values.pop("loss")  # a sum over batches; TRL's eval_loss is their mean
            self._log_as("eval", values)
            self._evaluated = []
        super().log(logs, *args, **kwargs)


@cache
def trainer_class() -> type[Any]:
    """A subclass of the installed TRL's GRPOTrainer."""
    try:
        trl = import_module("trl")
    except ModuleNotFoundError as error:
        raise ImportError(
            "policyloss.compat.trl.GRPOTrainer is a subclass of TRL's and needs it: pip install "
            "trl."
        ) from error
    described = {"__doc__": WithOurLoss.__doc__, "__module__": __name__}
    bases = (WithOurLoss, trl.GRPOTrainer)
    return type("GRPOTrainer", bases, {**described, "trl_release": trl.__version__})


# The slots that an option acts on. It has no effect if `policy_loss` has other parts in all of
# them.
_SLOTS = {
    "loss_type": ("trust", "aggregate"),
    "importance_sampling_level": ("ratio",),
    "use_bias_correction_kl": ("kl",),
    **dict.fromkeys(("epsilon", "epsilon_high", "delta", *SAPO, *VESPO), ("trust",)),
    "off_policy_mask_threshold": ("correction",),
    **{
        f"vllm_importance_sampling_{name}": ("correction", "ratio")
        for name in ("mode", "clip_max", "clip_min")
    },
}


def checked_loss(
    policy_loss: AnyLoss | None, config: Any, release: str | None = None
) -> LossSpec | None:
    """`policy_loss` as a `LossSpec` that the trainer can run with `config`; None for the loss that
    the config describes, which is checked too.
    """
    config_spec = spec_from_config(config, release=release, handled=BESIDE)
    if policy_loss is None:
        return None
    spec = as_spec(policy_loss, "policy_loss")
    if spec.needs_horizon:
        with naming(config, "max_completion_length"):
            spec = spec.with_horizon(option(config, "max_completion_length"))
    _check_options(spec, config_spec, config)
    _check_reference(spec, config)
    _check_engine(spec, config)
    _check_batching(spec, config)
    _check_advantages(policy_loss if isinstance(policy_loss, str) else spec, config)
    return spec


def _check_advantages(policy_loss: LossSpec | str, config: Any) -> None:
    fixes = {"grpo": "set scale_rewards='group'", "dr_grpo": "set scale_rewards='none'"}
    called = f"policy_loss={policy_loss!r}" if isinstance(policy_loss, str) else "policy_loss"
    setting = f"GRPOConfig(scale_rewards={getattr(config, 'scale_rewards', 'group')!r})"

    def fix(advantage: str) -> str:
        return fixes.get(advantage, "TRL's GRPOTrainer cannot make them")

    check_advantages(called, policy_loss, advantages_of(config), setting, fix)


def _check_options(spec: LossSpec, config_spec: LossSpec, config: Any) -> None:
    silent = [
        f"{name}={option(config, name)!r}"
        for name, slots in _SLOTS.items()
        if is_set(config, name)
        and all(getattr(spec, slot) != getattr(config_spec, slot) for slot in slots)
    ]
    if silent:
        raise SpecError(
            f"policy_loss has parts of its own, so {', '.join(silent)} of the GRPOConfig would "
            "have no effect; leave them at their defaults, or build the loss from the config: "
            "policy_loss=spec_from_config(args).replace(…)."
        )
    if spec.entropy_coef:
        raise SpecError(
            f"policy_loss.entropy_coef={spec.entropy_coef!r}: the trainer has an entropy bonus of "
            f"its own; set GRPOConfig(entropy_coef={spec.entropy_coef!r}) and leave the loss's "
            "at 0."
        )


def _check_reference(spec: LossSpec, config: Any) -> None:
    beta, reads = option(config, "beta"), "ref_logp" in spec.reads
    coef = spec.kl.coef if isinstance(spec.kl, KL) else None
    if reads and beta == 0.0:
        raise SpecError(
            "policy_loss reads ref_logp, and TRL keeps a reference model only if beta is not 0; "
            f"set beta={coef or 'coef'}."
        )
    if reads and coef is not None and coef != beta:
        raise SpecError(
            f"policy_loss.kl.coef={coef!r} but GRPOConfig.beta={beta!r}; give both the same value."
        )
    if not reads and beta != 0.0:
        raise SpecError(
            f"beta={beta!r} would have no effect: policy_loss reads no ref_logp; set beta=0.0, or "
            "give it a kl part."
        )


def _check_engine(spec: LossSpec, config: Any) -> None:
    vllm = option(config, "use_vllm")
    if not vllm and "rollout_logp" in spec.reads:
        raise SpecError(
            "policy_loss reads rollout_logp, the inference engine's log-probabilities, and TRL has "
            "none without vLLM: set use_vllm=True, or take a loss without a rollout correction."
        )
    if (
        vllm
        and option(config, "vllm_importance_sampling_correction")
        and "rollout_logp" not in spec.reads
    ):
        raise SpecError(
            "vllm_importance_sampling_correction=True would have no effect: policy_loss has no "
            "part that reads rollout_logp. Add correction=spec_from_config(args).correction, or "
            "set vllm_importance_sampling_correction=False."
        )


def _check_batching(spec: LossSpec, config: Any) -> None:
    calls = option(config, "gradient_accumulation_steps")
    several = calls > 1 or getattr(config, "world_size", 1) > 1
    if "group_ids" in spec.reads:
        raise SpecError(
            f"aggregate={spec.aggregate!r} reads group_ids, which TRL's batches do not hold; use "
            "another average."
        )
    if spec.needs_statistics and several:
        raise SpecError(
            "policy_loss needs numbers of the whole step (rejected= other than 'keep', "
            "SelfNormalise, CovClip, CovKL), and the trainer sees one micro-batch at a time: "
            f"gradient_accumulation_steps={calls!r} on {getattr(config, 'world_size', 1)} "
            "process(es); use 1 and 1, or another loss."
        )
    if isinstance(spec.aggregate, (LocalTokenMean, LocalSeqMeanTokenMean)) and calls > 1:
        raise SpecError(
            f"aggregate={spec.aggregate!r} does not know gradient_accumulation_steps={calls!r}, so "
            "the step's sum would be so many times too large; use TokenMean or SeqMeanTokenMean, "
            "or loss_type='bnpo'."
        )
