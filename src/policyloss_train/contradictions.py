"""Options of a run that cannot be together: each problem is a sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policyloss.advantage import ESTIMATORS
from policyloss.errors import unknown_name
from policyloss.spec import LossSpec
from policyloss_train.user_code import is_reference

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig

ENGINES = ("built-in", "vllm")
BY_COMPARISON = ("grpo", "dr_grpo", "rloo", "grpo_loo", "opo", "maxrl", "gpg")  # within a group
WITHOUT_GROUPS = ("gae", "reinforce_pp", "remax")  # equal rewards leave them a gradient
# Estimators that take rewards and groups of one step and nothing that a run does not have.
ADVANTAGES = tuple(name for name in ESTIMATORS if name not in ("gdpo", "optimal_token_baseline"))


def sampling_problems(config: TrainConfig) -> Iterator[str]:
    """What cannot be sampled, or not with these options."""
    completions, name = config.prompts * config.group_size, config.rollout
    tokens = completions * config.max_new_tokens
    if tokens >= 2**31:
        yield (
            f"--prompts × --group-size × --max-new-tokens is {tokens} tokens in a step; it must be "
            "below 2**31."
        )
    if config.minibatches > completions:
        yield (
            f"--minibatches {config.minibatches} is more than the {completions} completions of a "
            "step (--prompts × --group-size)."
        )
    if name not in ENGINES and "://" not in name and not is_reference(name):
        valid = f"{', '.join(ENGINES)}, addresses of servers (http://host:port), or module:factory"
        yield f"--rollout must be one of {valid}; got {name!r}."
    if config.rollout_logp == "raw" and config.replays_support:
        yield (
            "--rollout-logp raw is over all tokens, and the learner's log-probabilities would be "
            "over those that --top-p and --top-k kept; add --no-sampling-mask, or leave it out."
        )
    if config.rollout_logp == "raw" and (name == "vllm" or "://" in name):
        yield (
            f"--rollout {name} gives processed log-probabilities; --rollout-logp raw is for the "
            "built-in sampler and for engines of your own."
        )
    if config.dtype == "float64" and name != ENGINES[0]:
        yield f"--rollout {name} samples in float32 or bfloat16, not --dtype float64."
    if config.dynamic_sampling and config.teacher is not None:
        yield (
            "--dynamic-sampling drops groups whose rewards are equal, but a --teacher judges them, "
            "too; leave one of the two out."
        )
    if "" in config.stop:
        yield "--stop must be texts that are not empty."
    if config.task.endswith(".jsonl") and config.reward is None:
        yield f"--task {config.task} needs --reward exact, math or module:function."
    if config.extend is not None and not config.resume:
        yield (
            f"--extend {config.extend} continues a run, so it needs --resume; a new run takes "
            "--steps."
        )
    if not config.lora_rank and (config.lora_alpha is not None or config.lora_target):
        yield "--lora-alpha and --lora-target need --lora-rank."
    if config.optimizer == "adamw8bit" and config.parallel == "fsdp":
        yield (
            "--optimizer adamw8bit keeps its moments in blocks, which --parallel fsdp would cut; "
            "use ddp, or adamw, whose moments fsdp shards."
        )
    if config.optimizer == "adamw8bit" and config.dtype == "float64":
        yield "--optimizer adamw8bit computes in float32, not --dtype float64."


def advantage_problems(config: TrainConfig) -> Iterator[str]:
    """Advantages that do not exist, or that would be 0; nothing before they are known."""
    if config.advantage is None:
        return
    if config.advantage not in ADVANTAGES and not is_reference(config.advantage):
        yield unknown_name("advantage", config.advantage, ADVANTAGES)
    alone = config.group_size == 1 and config.reward_share
    if alone and config.reward_estimator in BY_COMPARISON:
        yield (
            f"--group-size 1 leaves the advantage {config.estimator!r} nobody to compare a "
            "completion with: all would be 0. Use several completions per prompt, "
            "--advantage gae (with a critic), remax or reinforce_pp."
        )
    if config.estimator == "passk_combinatorial" and config.passk >= config.group_size:
        yield (
            f"--passk {config.passk} must be below --group-size {config.group_size}: where a "
            "subset holds all completions, every advantage is 0."
        )
    if config.dynamic_sampling and config.estimator in WITHOUT_GROUPS:
        yield (
            "--dynamic-sampling drops groups whose rewards are equal, but with the advantage "
            f"{config.estimator!r} they have a gradient; use it with a group advantage such as "
            "grpo."
        )


def loss_problems(config: TrainConfig, spec: LossSpec) -> Iterator[str]:
    """Options that contradict the loss."""
    if spec.needs_horizon:
        yield (
            f"the loss {config.loss!r} divides by a horizon, which is not set; with these options "
            f"it is spec.with_horizon({config.max_new_tokens}), the longest completion."
        )
    if "rollout_logp" in spec.reads and "old_logp" in spec.reads and config.old_logp == "rollout":
        yield (
            f"the loss {config.loss!r} compares old_logp with rollout_logp, and with --old-logp "
            "rollout they are the same numbers; use --old-logp recompute."
        )
    if spec.divergence is not None and config.replays_support:
        yield (
            f"the loss {config.loss!r} compares whole distributions with a teacher, and with "
            "--top-p or --top-k the learner's is over the tokens that they kept; add "
            "--no-sampling-mask --rollout-logp raw, which makes both be over all tokens."
        )
    taught = any(getattr(part, "teaches", False) for part in spec.kl_parts)
    if config.teacher is None and (taught or config.reads_teacher):
        yield (
            f"the loss {config.loss!r} with the advantage {config.estimator!r} reads a teacher: "
            "give the folder of one, --teacher DIR."
        )
