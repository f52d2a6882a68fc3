"""Checks beyond signatures: OpenRLHF's two families of constructor arguments, and the fields of
TRL's GRPOConfig.
"""

from __future__ import annotations

import dataclasses
import inspect
from importlib import import_module
from typing import Any

# A value other than the default for each parameter of OpenRLHF's PolicyLoss, in either family.
OTHER_VALUES: dict[str, Any] = {
    "clip_eps_low": 0.1,
    "clip_eps_high": 0.3,
    "dual_clip": 2.5,
    "token_level_loss": False,
    "policy_loss_type": "ppo",
    "is_correction_level": "seq",
    "is_correction_mode": "mask",
    "is_correction_gating": "tv",
    "is_correction_threshold": (0.0, 0.4),
    "enable_vllm_is_correction": True,
    "vllm_is_truncated_threshold": [0.4, 4.0],
    "vllm_is_correction_type": "icepop",
}

# The fields of GRPOConfig that do not affect the policy loss: sampling, scoring and display of
# completions, other training options, and devices. A field that is neither here nor read by
# spec_from_config is new, and fails.
# fmt: off
NOT_OF_THE_LOSS = (
    "model_init_kwargs", "trust_remote_code", "router_aux_loss_coef", "disable_dropout",
    "cast_lm_head_to_fp32", "num_generations", "num_generations_eval", "ds3_gather_for_generation",
    "shuffle_dataset", "pad_to_multiple_of", "generation_batch_size", "steps_per_generation",
    "temperature", "top_p", "top_k", "min_p", "generation_kwargs", "chat_template_kwargs",
    "repetition_penalty", "cache_implementation", "vllm_mode", "vllm_model_impl",
    "vllm_enable_sleep_mode", "vllm_structured_outputs_regex", "vllm_server_base_url",
    "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port",
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
    "num_iterations", "reward_weights", "multi_objective_aggregation", "scale_rewards",
    "mask_truncated_completions", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target",
    "max_tool_calling_iterations", "log_completions", "log_multimodal", "num_completions_to_print",
    "log_unique_prompts", "log_completions_hub_repo", "use_transformers_continuous_batching",
    "transformers_continuous_batching_config", "use_transformers_paged",
)
# fmt: on


def openrlhf_constructor(release: str) -> list[str]:
    """Our PolicyLoss takes this release's arguments by place and by name, has its defaults, and
    keeps them as its attributes.
    """
    theirs = import_module("openrlhf.models.loss").PolicyLoss
    return constructor_problems(_defaults(theirs), release)


def constructor_problems(defaults: dict[str, Any], release: str) -> list[str]:
    """The problems of our PolicyLoss with a constructor that has these parameters, in this order,
    with these defaults.
    """
    ours = import_module("policyloss.compat.openrlhf").PolicyLoss
    if unknown := [name for name in defaults if name not in OTHER_VALUES]:
        return [f"PolicyLoss has a new argument: {', '.join(unknown)}"]
    others = {name: OTHER_VALUES[name] for name in defaults}
    made = {
        "without arguments": (ours(release=release), defaults),
        "by name": (ours(**others, release=release), others),
        "by place": (ours(*others.values(), release=release), others),
    }
    problems = []
    for how, (loss, expected) in made.items():
        seen = {name: getattr(loss, name) for name in expected}
        problems += [
            f"PolicyLoss {how}: {name} is {seen[name]!r}, not {x!r}"
            for name, x in expected.items()
            if seen[name] != x
        ]
    return problems


def trl_fields() -> dict[str, Any]:
    """The fields of TRL's installed GRPOConfig that not every trainer has, with their defaults."""
    config, general = (
        import_module("trl").GRPOConfig,
        import_module("transformers").TrainingArguments,
    )
    inherited = {field.name for field in dataclasses.fields(general)}
    return {
        field.name: field.default
        for field in dataclasses.fields(config)
        if field.name not in inherited
    }


def field_problems(fields: dict[str, Any]) -> list[str]:
    """Fields of a GRPOConfig that are not listed here, fields of ours that it lacks, and defaults
    that differ from ours.
    """
    ours = import_module("policyloss.compat.trl.config").DEFAULTS
    new = [
        f"GRPOConfig.{name} is new: does it make the loss?"
        for name in fields
        if name not in ours and name not in NOT_OF_THE_LOSS
    ]
    gone = [
        f"GRPOConfig.{name} is gone"
        for name in {**ours, **dict.fromkeys(NOT_OF_THE_LOSS)}
        if name not in fields
    ]
    changed = [
        f"GRPOConfig.{name} is {fields[name]!r} by default, ours {x!r}"
        for name, x in ours.items()
        if fields.get(name, x) != x
    ]
    return new + gone + changed


def _defaults(cls: Any) -> dict[str, Any]:
    return {
        name: p.default
        for name, p in inspect.signature(cls.__init__).parameters.items()
        if name != "self"
    }
