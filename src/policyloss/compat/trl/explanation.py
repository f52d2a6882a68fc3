"""`explain_config`: the loss of a GRPOConfig, the options that decide it, and its traps."""

from __future__ import annotations

from typing import Any

from policyloss.compat.trl.config import (
    CLIPPED,
    EXTRA_OPTIONS,
    SAPO,
    VESPO,
    VLLM,
    advantages_of,
    engine_mode,
    is_set,
    option,
    spec_from_config,
)
from policyloss.explanations import explain
from policyloss.output import section

_ROWS = (
    "the mean over rows of each row's token mean, in each micro-batch; an empty row counts as a row"
)
_STEP = "the sum over the valid tokens of the generation batch, scaled to one optimizer step"
_BAND = "the band of the ratio, as distances from 1; epsilon_high=None means epsilon"
_CAP = "the largest ratio itself, not a distance from 1; None means epsilon"
_CLIP = ("PPO's clip", ("epsilon", "epsilon_high"), _BAND)
_CALL = "the sum over the valid tokens of each micro-batch, then the mean over micro-batches"
_GATE = (SAPO, "the temperatures of the gate, by the sign of the advantage")
_WEIGHT = "a smooth, stopped weight of the sequence's ratio times logp"
# By loss_type: the surrogate, the options with its numbers, their meaning, and the average.
_LOSSES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "grpo": (*_CLIP, _ROWS),
    "bnpo": (*_CLIP, _CALL),
    "dr_grpo": (*_CLIP, "the sum over rows times max_completion_length, in each micro-batch"),
    "dapo": (*_CLIP, _STEP),
    "luspo": (*_CLIP, "the sum of each row's tokens, mean over the rows of each micro-batch"),
    "cispo": ("a capped, stopped ratio times logp", ("epsilon_high",), _CAP, _STEP),
    "sapo": ("a sigmoid gate on the ratio", *_GATE, _ROWS),
    "vespo": (_WEIGHT, VESPO, "the shape of the weight", _STEP),
}
# Lines of the page by their text: whether a line applies to the config, and its options.
_Lines = dict[str, tuple[Any, tuple[str, ...]]]


def explain_config(config: Any) -> str:
    """A page of plain text on the loss of a GRPOConfig: the options that decide it, options without
    effect, traps, and the loss itself.

    config: as in `spec_from_config`. Options for other terms than the policy term (an entropy
    bonus, a token filter) are described, not refused.
    """
    spec = spec_from_config(config, handled=EXTRA_OPTIONS)
    described = {
        "Options that decide it": _deciding(config),
        "Options besides the policy loss": _extra(config),
    }
    sections = {
        title: [f"- {_show(config, *names)}: {text}" for text, (ok, names) in lines.items() if ok]
        for title, lines in described.items()
    }
    sections["Options without effect"] = [
        f"- {_show(config, name)}: {why}"
        for why, (acts, names) in _acting(config).items()
        for name in names
        if not acts and is_set(config, name)
    ]
    sections["Traps of this config"] = [f"- {text}" for text, ok in _traps(config).items() if ok]
    lists = [section(title, lines) for title, lines in sections.items() if lines]
    return "\n\n".join(["The loss of a TRL GRPOConfig", *lists, str(explain(spec))])


def _show(config: Any, *names: str) -> str:
    """`epsilon=0.2 (default)`."""
    return ", ".join(
        f"{name}={option(config, name)!r}{'' if is_set(config, name) else ' (default)'}"
        for name in names
    )


def _deciding(config: Any) -> _Lines:
    loss_type, level = option(config, "loss_type"), option(config, "importance_sampling_level")
    surrogate, numbers, meaning, average = _LOSSES[loss_type]
    weighed = "the weight of the KL" if loss_type == "vespo" else "the ratio"
    whose = "each token's own" if level == "token" else "one per sequence, the geometric mean"
    against = "vLLM's log-probabilities" if option(config, "use_vllm") else "the old ones"
    threshold, beta = option(config, "off_policy_mask_threshold"), option(config, "beta")
    clips_twice = loss_type in CLIPPED and option(config, "delta") is not None
    return {
        f"the surrogate, {surrogate}; and the average: {average}": (True, ("loss_type",)),
        meaning: (True, numbers),
        "the largest ratio, also where the advantage is negative": (clips_twice, ("delta",)),
        f"{weighed}: {whose}": (
            loss_type != "vespo" or _weighs_kl(config),
            ("importance_sampling_level",),
        ),
        f"drops sequences with negative advantage that drifted further than this from {against}": (
            threshold is not None,
            ("off_policy_mask_threshold",),
        ),
        "the KL to the reference model, and whether it is multiplied by the ratio": (
            beta != 0.0,
            ("beta", "use_bias_correction_kl"),
        ),
        "the weight for vLLM's mismatch with the trainer, and its bounds": (
            engine_mode(config) is not None,
            VLLM,
        ),
    }


def _weighs_kl(config: Any) -> bool:
    return bool(option(config, "beta") != 0.0 and option(config, "use_bias_correction_kl"))


def _extra(config: Any) -> _Lines:
    adaptive, coef = option(config, "use_adaptive_entropy"), option(config, "entropy_coef")
    return {
        "only this share of the tokens, those of highest entropy, keeps a policy term": (
            option(config, "top_entropy_quantile") < 1.0,
            ("top_entropy_quantile",),
        ),
        "an entropy bonus whose coefficient follows a target": (
            adaptive,
            ("entropy_coef", "use_adaptive_entropy"),
        ),
        "an entropy bonus: the mean over the tokens of each micro-batch, for every loss_type": (
            not adaptive and coef != 0.0,
            ("entropy_coef",),
        ),
    }


def _acting(config: Any) -> _Lines:
    """Whether options act, by the reason why they do not."""
    loss_type = option(config, "loss_type")
    capped_by_epsilon = option(config, "epsilon_high") is None
    return {
        "loss_type clips nothing with it": (loss_type in CLIPPED, ("delta",)),
        "loss_type has no band of the ratio": (
            loss_type in (*CLIPPED, "cispo"),
            ("epsilon", "epsilon_high"),
        ),
        "loss_type has no lower bound, and epsilon_high is set": (
            loss_type != "cispo" or capped_by_epsilon,
            ("epsilon",),
        ),
        "only loss_type='sapo' reads it": (loss_type == "sapo", SAPO),
        "only loss_type='vespo' reads it": (loss_type == "vespo", VESPO),
        "beta is 0": (option(config, "beta") != 0.0, ("use_bias_correction_kl",)),
        "vLLM's weights are not used": (engine_mode(config) is not None, VLLM),
    }


def _traps(config: Any) -> dict[str, bool]:
    """Texts, and whether each applies to the config."""
    loss_type = option(config, "loss_type")
    by_sequence = option(config, "importance_sampling_level") == "sequence"
    by_default = engine_mode(config) is not None and not any(is_set(config, n) for n in VLLM)
    return {
        "loss_type is 'dapo' unless it is set: a token mean over the step, not GRPO's mean of "
        "means.": not is_set(config, "loss_type"),
        f"epsilon_high=None caps every weight at epsilon={option(config, 'epsilon')!r}, far below "
        "1, as the cap is a ratio; ScaleRL uses epsilon_high=5.0.": (
            loss_type == "cispo" and option(config, "epsilon_high") is None
        ),
        "bnpo divides by each micro-batch's own tokens: the gradient depends on "
        "per_device_train_batch_size.": loss_type == "bnpo",
        f"scale_rewards={getattr(config, 'scale_rewards', 'group')!r}: Dr. GRPO's advantages are "
        "not divided by a standard deviation; set scale_rewards='none'.": (
            loss_type == "dr_grpo" and advantages_of(config) != "dr_grpo"
        ),
        f"with importance_sampling_level='sequence', loss_type={loss_type!r} counts a sequence by "
        "its length; GSPO is 'grpo'.": (
            by_sequence and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo")
        ),
        "LUSPO is a sequence-level loss: set importance_sampling_level='sequence'.": (
            not by_sequence and loss_type == "luspo"
        ),
        "VESPO computes its own sequence ratio; importance_sampling_level acts on the weight of "
        "the KL only.": by_sequence and loss_type == "vespo",
        "with use_vllm=True a correction is on by default: a sequence whose product of weights "
        "exceeds 3 is dropped (sequence_mask), and the others are weighted by that product, which "
        "is far from 1 in long completions.": by_default,
        "the KL is multiplied by the ratio, with its gradient, so beta has another effect than in "
        "releases before 1.10.": _weighs_kl(config),
        "far from the old policy TRL loses the policy gradient in the rounding of that KL's two "
        "terms (log-ratio 30 in float32, 60 in float64); policyloss keeps it.": (
            _weighs_kl(config) and loss_type in ("cispo", "vespo")
        ),
        "no log-ratio is clamped and delta is None: one token of log-ratio +30 with a negative "
        "advantage weighs 1e13.": loss_type in CLIPPED and option(config, "delta") is None,
    }
