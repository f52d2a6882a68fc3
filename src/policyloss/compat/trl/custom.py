"""Checks whether a user's loss fits TRL's GRPOTrainer: the trainer has what it reads, and every
option of the config that is set has an effect.
"""

from __future__ import annotations

from typing import Any

from policyloss.catalogue import AnyLoss, as_spec
from policyloss.compat.hooks import check_advantages
from policyloss.compat.trl.config import BESIDE, naming, spec_from_config
from policyloss.compat.trl.options import SAPO, VESPO, advantages_of, is_set, option
from policyloss.errors import SpecError
from policyloss.parts.aggregate import LocalSeqMeanTokenMean, LocalTokenMean
from policyloss.parts.kl import KL
from policyloss.spec import LossSpec

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
