"""`explain_config`: what a GRPOConfig trains, which options decide that, and its traps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policyloss.compat.trl.config import (
    BESIDE,
    CLIPPED,
    SAPO,
    VESPO,
    VLLM,
    advantages_of,
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
_AVERAGES = {
    **dict.fromkeys(("grpo", "sapo"), _ROWS),
    "bnpo": "the sum over the valid tokens of each micro-batch, then the mean over micro-batches",
    "dr_grpo": "the sum over rows times max_completion_length, in each micro-batch",
    "luspo": "the sum of each row's tokens, mean over the rows of each micro-batch",
    **dict.fromkeys(("dapo", "cispo", "vespo"), _STEP),
}
_SURROGATES = {
    **dict.fromkeys(CLIPPED, "PPO's clip"),
    "cispo": "a capped, stopped ratio times logp",
    "sapo": "a sigmoid gate on the ratio",
    "vespo": "a smooth, stopped weight of the sequence's ratio times logp",
}
_BAND = "the band of the ratio, as distances from 1; epsilon_high=None means epsilon"
_CAP = "the largest ratio itself, not a distance from 1; None means epsilon"
_GATE = "the temperatures of the gate, by the sign of the advantage"
# The numbers of each surrogate, and what they are.
_NUMBERS = {
    **dict.fromkeys(CLIPPED, (("epsilon", "epsilon_high"), _BAND)),
    "cispo": (("epsilon_high",), _CAP),
    "sapo": (SAPO, _GATE),
    "vespo": (VESPO, "the shape of the weight"),
}


def explain_config(config: Any, *, release: str | None = None) -> str:
    """A page of plain text on the loss of a GRPOConfig: the options that decide it, those without
    effect, traps, then the loss.

    config, release: as in `spec_from_config`. Options beside the policy term (an entropy bonus, a
    token filter) are described, not refused.
    """
    spec = spec_from_config(config, release=release, handled=BESIDE)
    described = {
        "Options that decide it": _deciding,
        "Options beside the policy loss": _beside,
        "Options without effect": _silent,
    }
    sections = {
        title: [f"- {_shown(config, *names)}: {text}" for names, text in options(config)]
        for title, options in described.items()
    }
    sections["Traps of this config"] = [f"- {trap}" for trap in _traps(config)]
    lists = [section(title, lines) for title, lines in sections.items() if lines]
    return "\n\n".join(["The loss of a TRL GRPOConfig", *lists, str(explain(spec))])


def _shown(config: Any, *names: str) -> str:
    """`epsilon=0.2 (default)`."""
    return ", ".join(
        f"{name}={option(config, name)!r}{'' if is_set(config, name) else ' (default)'}"
        for name in names
    )


def _deciding(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    loss_type, level = option(config, "loss_type"), option(config, "importance_sampling_level")
    yield (
        ("loss_type",),
        f"the surrogate, {_SURROGATES[loss_type]}; and the average: {_AVERAGES[loss_type]}",
    )
    yield _NUMBERS[loss_type]
    if loss_type in CLIPPED and option(config, "delta") is not None:
        yield ("delta",), "the largest ratio, also where the advantage is negative"
    if loss_type != "vespo" or _weighted_kl(config):
        what = "the weight of the KL" if loss_type == "vespo" else "the ratio"
        whose = "each token's own" if level == "token" else "one per sequence, the geometric mean"
        yield ("importance_sampling_level",), f"{what}: {whose}"
    if option(config, "off_policy_mask_threshold") is not None:
        against = "vLLM's log-probabilities" if option(config, "use_vllm") else "the old ones"
        yield (
            ("off_policy_mask_threshold",),
            (
                "drops sequences with negative advantage that drifted further than this from "
                f"{against}"
            ),
        )
    if option(config, "beta") != 0.0:
        yield (
            ("beta", "use_bias_correction_kl"),
            "the KL to the reference model, and whether it is multiplied by the ratio",
        )
    if _corrects(config):
        names = tuple(name for name in VLLM if hasattr(config, name))
        yield names, "the weight for vLLM's mismatch with the trainer, and its bounds"


def _corrects(config: Any) -> bool:
    return bool(
        option(config, "use_vllm") and option(config, "vllm_importance_sampling_correction")
    )


def _weighted_kl(config: Any) -> bool:
    return bool(option(config, "beta") != 0.0 and option(config, "use_bias_correction_kl"))


def _beside(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if option(config, "top_entropy_quantile") < 1.0:
        yield (
            ("top_entropy_quantile",),
            "only this share of the tokens, those of highest entropy, keeps a policy term",
        )
    if option(config, "use_adaptive_entropy"):
        yield (
            ("entropy_coef", "use_adaptive_entropy"),
            "an entropy bonus whose coefficient follows a target",
        )
    elif option(config, "entropy_coef") != 0.0:
        yield (
            ("entropy_coef",),
            (
                "an entropy bonus: the mean over the tokens of each micro-batch, whatever "
                "loss_type averages"
            ),
        )


def _silent(config: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    loss_type = option(config, "loss_type")
    capped_by_epsilon = option(config, "epsilon_high") is None
    groups = {
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
        "vLLM's weights are not used": (_corrects(config), VLLM),
    }
    for why, (acts, names) in groups.items():
        yield from (((name,), why) for name in names if not acts and is_set(config, name))


def _traps(config: Any) -> Iterator[str]:
    loss_type, level = option(config, "loss_type"), option(config, "importance_sampling_level")
    if not is_set(config, "loss_type"):
        yield (
            "loss_type is 'dapo' unless it is set: a token mean over the step, not GRPO's mean of "
            "means."
        )
    if loss_type == "cispo" and option(config, "epsilon_high") is None:
        yield (
            f"epsilon_high=None caps every weight at epsilon={option(config, 'epsilon')!r}, far "
            "below 1, as the cap is a ratio; ScaleRL uses epsilon_high=5.0."
        )
    if loss_type == "bnpo":
        yield (
            "bnpo divides by each micro-batch's own tokens: the gradient depends on "
            "per_device_train_batch_size."
        )
    if loss_type == "dr_grpo" and advantages_of(config) != "dr_grpo":
        yield (
            f"scale_rewards={getattr(config, 'scale_rewards', 'group')!r}: Dr. GRPO's advantages "
            "are not divided by a standard deviation; set scale_rewards='none'."
        )
    if level == "sequence" and loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield (
            f"with importance_sampling_level='sequence', loss_type={loss_type!r} counts a sequence "
            "by its length; GSPO is 'grpo'."
        )
    if level == "token" and loss_type == "luspo":
        yield "LUSPO is a sequence-level loss: set importance_sampling_level='sequence'."
    if level == "sequence" and loss_type == "vespo":
        yield (
            "VESPO makes its own sequence ratio; importance_sampling_level acts on the KL's weight "
            "only."
        )
    if _corrects(config) and not any(is_set(config, name) for name in VLLM):
        yield (
            "with use_vllm=True a correction is on by default: a sequence whose product of weights "
            "exceeds 3 is dropped whole (sequence_mask), and the others are weighted by that "
            "product, which wanders far from 1 in long completions."
        )
    if _weighted_kl(config):
        yield (
            "the KL is multiplied by the ratio, with its gradient: beta means another pull than in "
            "releases before 1.10."
        )
        if loss_type in ("cispo", "vespo"):
            yield (
                "far from the old policy TRL loses the policy gradient in the rounding of that "
                "KL's two terms (log-ratio 30 in float32, 60 in float64); policyloss keeps it."
            )
    if loss_type in CLIPPED and option(config, "delta") is None:
        yield (
            "no log-ratio is clamped and delta is None: one token of log-ratio +30 with a negative "
            "advantage weighs 1e13."
        )
