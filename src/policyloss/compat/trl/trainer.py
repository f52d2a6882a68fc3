"""TRL's GRPOTrainer and AsyncGRPOTrainer with the policy loss of this library, and the checks of a
user's loss: the trainer provides every tensor that it reads, and every option set in the config has
an effect. `trainer_class` imports TRL, at the first use of `policyloss.compat.trl.GRPOTrainer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compat.arguments import at_least
from policyloss.compat.engines import PREFIX, fitting_spec, means, sampled_logp
from policyloss.compat.hooks import Parent, check_advantages, default_of
from policyloss.compat.trl.batch import batch_loss, head_loss, loss_mask
from policyloss.compat.trl.config import (
    EXTRA_OPTIONS,
    SAPO,
    VESPO,
    advantages_of,
    is_set,
    naming,
    option,
    spec_from_config,
    totals_for,
)
from policyloss.compat.trl.head import OnePass, in_one_pass, installed_head
from policyloss.compat.trl.parts import offsets_of, replace_term, step_totals
from policyloss.errors import SpecError, unknown_name
from policyloss.head.loss import HeadOutput
from policyloss.loss import LossOutput, policy_loss
from policyloss.metrics import Metrics
from policyloss.parts.aggregate import LocalSeqMeanTokenMean, LocalTokenMean, TokenMean
from policyloss.parts.kl import KL
from policyloss.spec import LossSpec
from policyloss.totals import Totals

ASYNC = "TRL's AsyncGRPOTrainer"
CONFIG_METRICS = ("clip_ratio/", "cispo_clip_ratio", "vespo/", "policy_loss")


@dataclass
class _Watched:
    """Intermediate results of TRL's loss.

    logp, entropy: of the tokens. keep: the tokens that keep a policy term; None for all.
    """

    logp: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    keep: Tensor | None = None


class WithOurLoss(Parent):  # type: ignore[misc]  # TRL has no types
    """TRL's GRPOTrainer with the policy loss of policyloss; everything else is TRL's.

    policy_loss: a `LossSpec`, the name of a preset, or None for the loss that the config describes
    (`spec_from_config`), with TRL's numbers. Generation, rewards, reference model, entropy bonus,
    router loss, evaluation and metrics remain TRL's. Metrics of this library are logged as
    "policyloss/…", exact over the micro-batches and processes of an optimizer step. Setting an
    option of the config that has no effect with `policy_loss` is an error.

    head: "fused" computes all log-probabilities, also of the old policy and the reference, with the
    head of this library, without logits. It computes the loss in the same pass unless an entropy
    bonus or top_entropy_quantile needs the log-probabilities first. None is TRL's own head.
    """

    def __init__(
        self,
        *args: Any,
        policy_loss: LossSpec | str | None = None,
        head: Literal["fused"] | None = None,
        **kwargs: Any,
    ) -> None:
        if head not in (None, "fused"):
            raise SpecError(unknown_name("head", head, ("fused",)))
        config = config_of(*args, **kwargs)
        if config is not None:  # before TRL loads models and starts engines
            checked_loss(policy_loss, config)
        self._watched: _Watched | None = None
        self._window: list[Metrics] = []
        self._evaluated: list[Metrics] = []
        self.head = head
        with nullcontext() if head is None else installed_head():
            super().__init__(*args, **kwargs)
        self.policy_loss = checked_loss(policy_loss, self.args)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._watched is None:
            return result
        self._watched.logp, self._watched.entropy, *rest = result
        return (self._watched.logp.detach(), self._watched.entropy, *rest)

    def get_high_entropy_mask(self, *args: Any, **kwargs: Any) -> Tensor:
        """TRL's mask of the tokens that keep a policy term; ours keeps the same tokens."""
        mask: Tensor = super().get_high_entropy_mask(*args, **kwargs)
        if self._watched is not None:
            self._watched.keep = mask
        return mask

    @contextmanager
    def _watching(self) -> Iterator[_Watched]:
        """Pass log-probabilities without gradient to TRL's policy term; ours has the gradient."""
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
            spec, watched.logp, inputs, totals=totals, entropy=watched.entropy, keep=watched.keep
        )
        if one_pass is not None and one_pass.loss is not None:
            out = LossOutput(one_pass.loss, out.metrics)
        self._record(out.metrics)
        if self.policy_loss is not None:
            _drop_config_metrics(self._metrics["train" if self.model.training else "eval"])
        if not (self._entropy_bonus_enabled or self.aux_loss_enabled):
            return out.loss
        return replace_term(
            total,
            out.loss if self.policy_loss is None else self._config_term(watched, inputs),
            out.loss,
        )

    def _one_pass(
        self, spec: LossSpec, totals: Any, inputs: Mapping[str, Any]
    ) -> AbstractContextManager[OnePass | None]:
        """Let the head compute our loss while TRL computes its own, if only our loss needs the
        gradients of log-probabilities and entropies.
        """
        between = self._entropy_bonus_enabled or self.top_entropy_quantile < 1.0
        if self.head is None or between or not torch.is_grad_enabled():
            return nullcontext()

        def score(hidden: Tensor, weight: Tensor, ids: Tensor, **options: Any) -> HeadOutput:
            return head_loss(spec, hidden, weight, ids, inputs, totals=totals, **options)

        return in_one_pass(self.model, score, inputs["completion_mask"].shape[1])

    def _config_spec(self, inputs: Mapping[str, Any]) -> LossSpec:
        engine = "sampling_per_token_logps" in inputs
        return spec_from_config(self.args, handled=EXTRA_OPTIONS, engine_logp=engine)

    def _config_term(self, watched: _Watched, inputs: Mapping[str, Any]) -> Tensor:
        """The policy term in TRL's total."""
        spec, totals = self._config_spec(inputs), self._config_totals(inputs)
        with torch.no_grad():
            return batch_loss(spec, watched.logp, inputs, totals=totals, keep=watched.keep).loss

    def _totals(self, spec: LossSpec, inputs: Mapping[str, Any]) -> Any:
        if self.policy_loss is None:
            return self._config_totals(inputs)
        if spec.needs_statistics:
            return "local"  # `checked_loss` has ensured that a step is one call
        calls = self.current_gradient_accumulation_steps
        generated = self.args.steps_per_generation
        if not self.model.training:
            calls = generated = 1
        mask, items = loss_mask(inputs), inputs["num_items_in_batch"]
        ranks = self.accelerator.num_processes
        return step_totals(mask, items, calls=calls, generated=generated, ranks=ranks)

    def _config_totals(self, inputs: Mapping[str, Any]) -> Any:
        return totals_for(
            self.args,
            loss_mask(inputs),
            inputs["num_items_in_batch"],
            gradient_accumulation_steps=self.current_gradient_accumulation_steps,
            num_processes=self.accelerator.num_processes,
            training=self.model.training,
        )

    def _record(self, metrics: Metrics) -> None:
        """Store the metrics of a micro-batch; merge and log them when the step is complete."""
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

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """TRL's log, with the metrics of all batches of an evaluation merged."""
        if self._evaluated and not self.model.training:
            values = sum(self._evaluated, Metrics()).compute()
            values.pop("loss")  # a sum over batches; TRL logs their mean as eval_loss
            self._log_as("eval", values)
            self._evaluated = []
        super().log(logs, *args, **kwargs)


class WithOurAsyncLoss(Parent):  # type: ignore[misc]  # TRL has no types
    """TRL's AsyncGRPOTrainer with the loss `policy_loss`, a `LossSpec` or the name of a preset.

    Generation, packing, router loss and the other metrics remain TRL's. The sampler's
    log-probabilities are the anchor of the ratio. TRL counts the tokens of one micro-batch over
    all ranks, so the average must be `TokenMean`, and gradient_accumulation_steps 1.
    """

    def __init__(self, *args: Any, policy_loss: AnyLoss, **kwargs: Any) -> None:
        config = config_of(*args, **kwargs)
        if config is not None:  # before TRL loads models and starts engines
            checked_async_loss(policy_loss, config)
        super().__init__(*args, **kwargs)
        self.policy_loss = checked_async_loss(policy_loss, self.args)

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """The share of this rank in the loss of a micro-batch."""
        advantages, kept = inputs["advantages"], inputs["token_index"] >= 0
        scored: list[Tensor] = []

        def detached(**arguments: Any) -> Any:
            outputs = model(**arguments)
            scored.append(outputs.log_probs)
            outputs.log_probs = outputs.log_probs.detach()
            return outputs

        others: Tensor = super().compute_loss(
            detached, {**inputs, "advantages": torch.zeros_like(advantages)}
        )
        logp = scored[0].flatten()[inputs["token_index"][kept]]
        out = policy_loss(
            self.policy_loss,
            logp,
            **sampled_logp(self.policy_loss, inputs["old_log_probs"][kept]),
            advantages=advantages[kept].unsqueeze(0),
            mask=torch.ones_like(logp, dtype=torch.bool),
            cu_seqlens=offsets_of(inputs["segment_id"][kept]),
            totals=Totals(inputs["global_n_tokens"][0], 1, dp_size=self.accelerator.num_processes),
        )
        logs = self._metrics["train"]
        _drop_config_metrics(logs)
        for name, value in means(out.metrics).items():
            logs[name].append(value.item())
        return replace_term(others, torch.zeros_like(out.loss), out.loss)


def _drop_config_metrics(logs: dict[str, Any]) -> None:
    """Delete TRL's metrics of the config's policy loss, which would be wrong for another loss."""
    for name in [name for name in logs if name.startswith(CONFIG_METRICS)]:
        del logs[name]


# Our class, the module that holds TRL's, and the oldest supported release, by the name of both.
TRAINERS: dict[str, tuple[type[Any], str, str]] = {
    "GRPOTrainer": (WithOurLoss, "trl", "1.14"),
    "AsyncGRPOTrainer": (WithOurAsyncLoss, "trl.experimental.async_grpo", "1.16"),
}


@cache
def trainer_class(name: str) -> type[Any]:
    """A subclass of this trainer of the installed TRL."""
    ours, module, oldest = TRAINERS[name]
    try:
        trl = import_module("trl")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"policyloss.compat.trl.{name} is a subclass of TRL's trainer: pip install trl."
        ) from error
    if not at_least(trl.__version__, oldest):
        raise ImportError(
            f"TRL {trl.__version__} is older than {oldest}, the oldest supported release."
        )
    if any("Unsloth" in base.__name__ for base in trl.GRPOTrainer.__mro__):
        raise ImportError(
            "unsloth has replaced TRL's GRPOTrainer by its own, which computes the loss in "
            "compute_loss, so the loss of policyloss would never run: train without unsloth, or "
            "with unsloth's trainer and its losses."
        )
    described = {"__doc__": ours.__doc__, "__module__": __name__}
    return type(name, (ours, getattr(import_module(module), name)), described)


def config_of(
    model: Any = None, reward_funcs: Any = None, args: Any = None, *_: Any, **__: Any
) -> Any:
    """The config among the arguments of a trainer; its class may take them as `*args`."""
    return args


# The slots that an option acts on. It has no effect if all of them differ in `policy_loss`.
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


def checked_loss(policy_loss: AnyLoss | None, config: Any) -> LossSpec | None:
    """`policy_loss` as a `LossSpec` that the trainer can run with `config`.

    None stands for the loss that the config describes, which is checked too.
    """
    config_spec = spec_from_config(config, handled=EXTRA_OPTIONS)
    if policy_loss is None:
        return None
    spec = as_spec(policy_loss, "policy_loss")
    if spec.needs_horizon:
        with naming(config, "max_completion_length"):
            spec = spec.with_horizon(option(config, "max_completion_length"))
    for problem, applies in _problems(spec, config_spec, config).items():
        if applies:
            raise SpecError(problem)
    _check_advantages(policy_loss if isinstance(policy_loss, str) else spec, config)
    return spec


def _check_advantages(policy_loss: LossSpec | str, config: Any) -> None:
    fixes = {"grpo": "set scale_rewards='group'", "dr_grpo": "set scale_rewards='none'"}
    called = f"policy_loss={policy_loss!r}" if isinstance(policy_loss, str) else "policy_loss"
    setting = f"GRPOConfig(scale_rewards={getattr(config, 'scale_rewards', 'group')!r})"

    def fix(advantage: str) -> str:
        return fixes.get(advantage, "TRL's GRPOTrainer cannot compute them")

    check_advantages(called, policy_loss, advantages_of(config), setting, fix)


def _problems(spec: LossSpec, config_spec: LossSpec, config: Any) -> dict[str, Any]:
    """Error messages, and whether each applies to a loss in this config."""
    without_effect = [
        f"{name}={option(config, name)!r}"
        for name, slots in _SLOTS.items()
        if is_set(config, name)
        and all(getattr(spec, slot) != getattr(config_spec, slot) for slot in slots)
    ]
    beta, reads_ref = option(config, "beta"), "ref_logp" in spec.reads
    coef = spec.kl.coef if isinstance(spec.kl, KL) else None
    vllm, reads_rollout = option(config, "use_vllm"), "rollout_logp" in spec.reads
    corrects = vllm and option(config, "vllm_importance_sampling_correction")
    calls = option(config, "gradient_accumulation_steps")
    processes = getattr(config, "world_size", 1)
    local = isinstance(spec.aggregate, (LocalTokenMean, LocalSeqMeanTokenMean))
    return {
        f"policy_loss has parts of its own, so {', '.join(without_effect)} of the GRPOConfig would "
        "have no effect; leave them at their defaults, or build the loss from the config: "
        "policy_loss=spec_from_config(args).replace(…).": without_effect,
        f"policy_loss.entropy_coef={spec.entropy_coef!r}: the trainer has its own entropy bonus; "
        f"set GRPOConfig(entropy_coef={spec.entropy_coef!r}) and leave that of the loss at 0.": (
            spec.entropy_coef
        ),
        "policy_loss reads ref_logp, but TRL keeps a reference model only if beta is not 0; set "
        f"beta={coef or 'coef'}.": reads_ref and beta == 0.0,
        f"policy_loss.kl.coef={coef!r} but GRPOConfig.beta={beta!r}; set both to the same value.": (
            reads_ref and coef is not None and coef != beta
        ),
        f"beta={beta!r} would have no effect: policy_loss does not read ref_logp; set beta=0.0, or "
        "add a kl part to the loss.": not reads_ref and beta != 0.0,
        "policy_loss reads rollout_logp, the inference engine's log-probabilities, which TRL has "
        "only with vLLM: set use_vllm=True, or choose a loss without a rollout correction.": (
            reads_rollout and not vllm
        ),
        "vllm_importance_sampling_correction=True would have no effect: no part of policy_loss "
        "reads rollout_logp. Add correction=spec_from_config(args).correction, or set "
        "vllm_importance_sampling_correction=False.": corrects and not reads_rollout,
        f"aggregate={spec.aggregate!r} reads group_ids, which TRL's batches do not hold; use "
        "another average.": "group_ids" in spec.reads,
        "correction reads ages, which TRL's batches do not hold; leave Stale out.": (
            "ages" in spec.reads
        ),
        "policy_loss needs statistics of the complete step (rejected= other than 'keep', "
        "SelfNormalise, MomentBudget, CovClip, CovKL), but the trainer computes one micro-batch at "
        f"a time: gradient_accumulation_steps={calls!r} on {processes} process(es); use 1 and 1, "
        "or another loss.": spec.needs_statistics and (calls > 1 or processes > 1),
        f"aggregate={spec.aggregate!r} ignores gradient_accumulation_steps={calls!r}, so the sum "
        "of the step would be that many times too large; use TokenMean or SeqMeanTokenMean, or "
        "loss_type='bnpo'.": local and calls > 1,
    }


def checked_async_loss(policy_loss: AnyLoss, config: Any) -> LossSpec:
    """The spec of `policy_loss`; an error if the trainer cannot run it with `config`."""
    passes = ("old_logp", "rollout_logp")
    spec = fitting_spec(ASYNC, policy_loss, passes, (TokenMean,), sampler_is_old=True)
    calls = config.gradient_accumulation_steps
    if calls != 1:
        raise SpecError(
            f"{ASYNC} divides every micro-batch by its own tokens, so that "
            f"gradient_accumulation_steps={calls} would not average over the tokens of the step; "
            "use 1, and token_budget for the size of a step."
        )
    for name in ("epsilon", "epsilon_high"):
        value = getattr(config, name)
        if value != default_of(config, name, value):
            raise SpecError(
                f"policy_loss has its own bounds, so {name}={value!r} would have no effect; leave "
                "it at its default, and change the bounds of the loss."
            )
    return spec
