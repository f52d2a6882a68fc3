"""The options of a GRPOConfig that decide its loss, and what releases without them do."""

from __future__ import annotations

from typing import Any

from policyloss.compat.hooks import default_of
from policyloss.errors import SpecError

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
# What a release without the option does. Every release has the options that are not listed here, so
# they are required.
ABSENT: dict[str, Any] = {
    "epsilon_high": None,
    "delta": None,
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
    "vllm_importance_sampling_clip_max": None,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_cap": None,
    "steps_per_generation": None,
}


def option(config: Any, name: str) -> Any:
    """The value of an option; where the release lacks it, the value that describes the release."""
    if hasattr(config, name):
        return getattr(config, name)
    if name in ABSENT:
        return ABSENT[name]
    raise SpecError(
        f"the config has no {name!r}; give TRL's GRPOConfig, or an object with its attributes."
    )


def advantages_of(config: Any) -> str | None:
    """The estimator of `policyloss.advantage` that `scale_rewards` stands for, or None."""
    scale = getattr(config, "scale_rewards", "group")
    return {"group": "grpo", True: "grpo", "none": "dr_grpo", False: "dr_grpo"}.get(scale)


def is_set(config: Any, name: str) -> bool:
    """Whether the option differs from its default: the dataclass's, else that of `DEFAULTS`."""
    if not hasattr(config, name):
        return False
    return bool(getattr(config, name) != default_of(config, name, DEFAULTS[name]))
