"""A GRPOConfig of TRL 1.14 to 1.16 as a loss: `spec_from_config` translates its options to a
`LossSpec`, `totals_for` its denominators to `Totals`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from policyloss.arguments import check_choice
from policyloss.compat.hooks import default_of
from policyloss.compat.trl.parts import ROLLOUT_LOG_BOUNDS, RolloutProduct, WrittenKL, step_totals
from policyloss.errors import SpecError
from policyloss.parts import aggregate
from policyloss.parts.correction import OPSM, Band, SequenceMask, Truncate
from policyloss.parts.kl import KL
from policyloss.parts.ratio import SequenceProduct, SequenceRatio, TokenRatio
from policyloss.parts.trust import Clip, DetachedClip, GammaWeight, SoftGate, TwoSidedClip
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# GRPOConfig of TRL 1.16.0.
DEFAULTS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "max_completion_length": 512,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
}
SAPO = tuple(name for name in DEFAULTS if name.startswith("sapo_"))
VESPO = tuple(name for name in DEFAULTS if name.startswith("vespo_"))
VLLM = tuple(name for name in DEFAULTS if name.startswith("vllm_importance_sampling_"))


def option(config: Any, name: str) -> Any:
    """The value of an option."""
    if not hasattr(config, name):
        raise SpecError(
            f"the config has no {name!r}; pass TRL's GRPOConfig, or an object with its attributes."
        )
    return getattr(config, name)


def advantages_of(config: Any) -> str | None:
    """The estimator of `policyloss.advantage` that `scale_rewards` selects, or None."""
    scale = getattr(config, "scale_rewards", "group")
    return {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo"}.get(scale)


def is_set(config: Any, name: str) -> bool:
    """Whether the option differs from its default (of the dataclass, or else of `DEFAULTS`)."""
    if not hasattr(config, name):
        return False
    return bool(getattr(config, name) != default_of(config, name, DEFAULTS[name]))


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPED, "cispo", "sapo", "vespo")
TOKEN_MEANS = ("bnpo", "dapo", "cispo", "vespo")
LEVELS = ("token", "sequence")
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# Options of TRL's loss that a LossSpec cannot express; a trainer may implement them itself.
EXTRA_OPTIONS = ("top_entropy_quantile", "entropy_coef", "use_adaptive_entropy")


def spec_from_config(
    config: Any, *, handled: Collection[str] = (), engine_logp: bool | None = None
) -> LossSpec:
    """The loss that a GRPOConfig describes. With the totals of `totals_for`, its value and gradient
    are TRL's.

    config: TRL's GRPOConfig, or any object with its attributes. handled: the options of
    `EXTRA_OPTIONS` that the caller implements; the others raise an error unless they are off.
    engine_logp: whether the batches hold log-probabilities of the inference engine (None: if vLLM
    is used).

    The denominators are in the totals, not in the spec: "bnpo" and "dapo" are the same token mean,
    over the tokens of each micro-batch and over the tokens of the step. The router loss of an MoE
    model is not part of the policy loss.
    """
    loss_type, level = option(config, "loss_type"), option(config, "importance_sampling_level")
    check_choice("GRPOConfig.loss_type", loss_type, LOSS_TYPES, SpecError)
    check_choice("GRPOConfig.importance_sampling_level", level, LEVELS, SpecError)
    _refuse_extra_options(config, loss_type, handled)
    return LossSpec(
        ratio=_ratio(config, loss_type, level),
        trust=_trust(config, loss_type),
        correction=_corrections(config, loss_type, engine_logp),
        kl=_kl(config, loss_type, level),
        entropy_coef=0.0 if "entropy_coef" in handled else option(config, "entropy_coef"),
        aggregate=_aggregate(config, loss_type),
    )


def totals_for(
    config: Any,
    mask: Tensor,
    num_items_in_batch: Tensor | None = None,
    *,
    gradient_accumulation_steps: int | None = None,
    num_processes: int = 1,
    training: bool = True,
) -> Totals:
    """The denominators that TRL divides by, for one micro-batch.

    mask: `[B, T]`, the completion mask (times the tool mask). num_items_in_batch: TRL's count of
    valid tokens in the generation batch over all processes; None if this micro-batch is the
    complete batch. gradient_accumulation_steps: the micro-batches of this step (default: the
    config's). training: False in evaluation, where nothing is accumulated.

    TRL counts every row, also empty ones. "dapo", "cispo" and "vespo" divide by the tokens of the
    generation batch, scaled to one step; "bnpo" divides by the tokens of this micro-batch, averaged
    over the accumulation.
    """
    calls = generated = 1
    if training:
        calls = gradient_accumulation_steps or option(config, "gradient_accumulation_steps")
        generated = option(config, "steps_per_generation") or calls
    items = None if option(config, "loss_type") == "bnpo" else num_items_in_batch
    return step_totals(mask, items, calls=calls, generated=generated, ranks=num_processes)


@contextmanager
def naming(config: Any, *names: str) -> Iterator[None]:
    """Add the options of the config that caused an error to its message."""
    try:
        yield
    except SpecError as error:
        settings = ", ".join(f"{name}={option(config, name)!r}" for name in names)
        raise SpecError(f"GRPOConfig with {settings}: {error}") from error


def _refuse_extra_options(config: Any, loss_type: str, handled: Collection[str]) -> None:
    for name in handled:
        check_choice("option in handled", name, EXTRA_OPTIONS, SpecError)
    quantile, coef = option(config, "top_entropy_quantile"), option(config, "entropy_coef")
    if quantile < 1.0 and "top_entropy_quantile" not in handled:
        raise SpecError(
            f"top_entropy_quantile={quantile!r} keeps tokens by a quantile over all processes, "
            "which a LossSpec cannot express; use policyloss.compat.trl.GRPOTrainer, which applies "
            "TRL's own mask, or set it to 1.0."
        )
    if option(config, "use_adaptive_entropy") and "use_adaptive_entropy" not in handled:
        raise SpecError(
            "use_adaptive_entropy=True changes the entropy coefficient from step to step, which a "
            "LossSpec cannot express; use policyloss.compat.trl.GRPOTrainer, which keeps TRL's "
            "controller, or set entropy_coef alone."
        )
    if coef != 0.0 and loss_type != "bnpo" and "entropy_coef" not in handled:
        raise SpecError(
            f"entropy_coef={coef!r} with loss_type={loss_type!r}: TRL's bonus is the mean over the "
            "tokens of each micro-batch, the policy term another average, and a LossSpec has "
            "only one; use policyloss.compat.trl.GRPOTrainer, which keeps TRL's bonus, or "
            "loss_type='bnpo'."
        )


def _ratio(config: Any, loss_type: str, level: str) -> Any:
    if loss_type != "vespo":
        return TokenRatio(log_clamp=None) if level == "token" else SequenceRatio(log_clamp=None)
    mode = engine_mode(config)
    if mode is None:
        return SequenceProduct(log_clamp=ROLLOUT_LOG_BOUNDS, token_clamp=20.0)
    if mode not in ("token_truncate", "token_mask"):
        raise SpecError(
            f"vllm_importance_sampling_mode={mode!r}: loss_type='vespo' multiplies token weights "
            "itself and needs 'token_truncate' or 'token_mask'."
        )
    low, high = _weight_bounds(config)
    if not low <= 1 <= high:
        raise SpecError(
            f"vllm_importance_sampling_clip_min={low!r}, "
            f"vllm_importance_sampling_clip_max={high!r} with loss_type='vespo': TRL then adds a "
            "term for every padded position, which a LossSpec cannot express; choose bounds that "
            "contain 1."
        )
    outside: Any = "truncate" if mode == "token_truncate" else "mask"
    return RolloutProduct(
        log_clamp=ROLLOUT_LOG_BOUNDS, token_clamp=20.0, outside=outside, low=low, high=high
    )


def _trust(config: Any, loss_type: str) -> Any:
    low, high = option(config, "epsilon"), option(config, "epsilon_high")
    high = low if high is None else high
    if loss_type in CLIPPED:
        delta = option(config, "delta")
        with naming(config, "epsilon", "epsilon_high", "delta"):
            return Clip(low, high) if delta is None else TwoSidedClip(delta, low, high)
    if loss_type == "cispo":
        with naming(config, "loss_type", "epsilon", "epsilon_high"):
            return DetachedClip(0.0, high)  # the cap itself, not 1 + epsilon_high
    if loss_type == "sapo":
        with naming(config, *SAPO):
            return SoftGate(*(_round(option(config, name)) for name in SAPO))
    numbers = [_round(option(config, name)) for name in VESPO]
    k_positive, decay_positive, k_negative, decay_negative = numbers
    least = _round(1e-4)
    with naming(config, *VESPO):
        return GammaWeight(
            k_positive, max(decay_positive, least), k_negative, max(decay_negative, least)
        )


def _round(number: float) -> float:
    """`number` in torch's default dtype, to which TRL's `torch.where` rounds it."""
    return torch.tensor(float(number)).item()


def engine_mode(config: Any) -> str | None:
    """The bounds of the weights for vLLM's mismatch (one of `MODES`); None if they are not used."""
    if not (option(config, "use_vllm") and option(config, "vllm_importance_sampling_correction")):
        return None
    mode = option(config, "vllm_importance_sampling_mode")
    check_choice("GRPOConfig.vllm_importance_sampling_mode", mode, MODES, SpecError)
    return str(mode)


def _weight_bounds(config: Any) -> tuple[float, float]:
    low = option(config, "vllm_importance_sampling_clip_min")
    high = option(config, "vllm_importance_sampling_clip_max")
    cap = option(config, "vllm_importance_sampling_cap")  # the bound's older name, which wins
    high = high if cap is None else cap
    if low is not None and high is not None and low >= high:
        raise SpecError(
            f"vllm_importance_sampling_clip_min={low!r} must be less than "
            f"vllm_importance_sampling_clip_max={high!r}."
        )
    if low is None and high is None and str(engine_mode(config)).endswith("truncate"):
        raise SpecError(
            "vllm_importance_sampling_clip_min and vllm_importance_sampling_clip_max are both "
            "None: a '*_truncate' mode needs one."
        )
    return 0.0 if low is None else low, math.inf if high is None else high


def _corrections(config: Any, loss_type: str, engine_logp: bool | None) -> tuple[Any, ...]:
    parts: list[Any] = []
    threshold = option(config, "off_policy_mask_threshold")
    if threshold is not None:
        engine = option(config, "use_vllm") if engine_logp is None else engine_logp
        with naming(config, "off_policy_mask_threshold"):
            parts.append(OPSM(threshold, source="rollout" if engine else "old"))
    mode = engine_mode(config)
    if mode is not None and loss_type != "vespo":
        bounds = _weight_bounds(config)
        with naming(
            config, "vllm_importance_sampling_clip_min", "vllm_importance_sampling_clip_max"
        ):
            parts.append(_bounded_weight(mode, *bounds))
    return tuple(parts)


def _bounded_weight(mode: str, low: float, high: float) -> Any:
    if mode == "sequence_mask":
        return SequenceMask(low, high, level="product", weight="sequence", log_clamp=None)
    if mode == "token_mask":
        return Band(low, high, log_clamp=None)
    level: Literal["token", "product"] = "token" if mode == "token_truncate" else "product"
    return Truncate(high, low, level=level, log_clamp=None)


def _kl(config: Any, loss_type: str, level: str) -> KL | None:
    beta = option(config, "beta")
    if beta == 0.0:
        return None
    weighted: dict[str, Any] = {}
    if option(config, "use_bias_correction_kl"):
        # VESPO's ratio is a product over the sequence, but its KL is weighted by the ratio of the
        # other loss types.
        weighted = {"ratio_level": level} if loss_type == "vespo" else {"weight": "ratio"}
    with naming(config, "beta"):
        return WrittenKL("k3", beta, clamp=None, **weighted)


def _aggregate(config: Any, loss_type: str) -> Any:
    if loss_type in TOKEN_MEANS:
        return aggregate.TokenMean()
    if loss_type == "luspo":
        return aggregate.LengthWeighted()
    if loss_type == "dr_grpo":
        with naming(config, "loss_type", "max_completion_length"):
            spec = LossSpec(aggregate=aggregate.SeqMeanTokenSumNorm())
            return spec.with_horizon(option(config, "max_completion_length")).aggregate
    return aggregate.SeqMeanTokenMean()
