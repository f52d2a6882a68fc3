"""The tensors of a batch under the names that different trainers give them."""

from __future__ import annotations

from typing import Any

from policyloss.errors import InputError
from policyloss_lab.diagnosis.diagnosis import Diagnosis
from policyloss_lab.diagnosis.tokens import doctor

# Ours, verl's, TRL's, OpenRLHF's, prime-rl's.
COLUMNS: dict[str, tuple[str, ...]] = {
    "rollout_logp": (
        "rollout_logp",
        "rollout_log_probs",
        "sampling_per_token_logps",
        "rollout_logprobs",
        "inference_logprobs",
    ),
    "old_logp": (
        "old_logp",
        "old_log_probs",
        "old_per_token_logps",
        "action_log_probs",
        "trainer_logprobs",
    ),
    "logp": ("logp", "log_probs"),
    "ids": ("ids", "responses", "completion_ids", "token_ids"),
    "mask": ("mask", "response_mask", "completion_mask", "action_mask", "loss_mask"),
    "entropy": ("entropy", "entropys"),
    "prompts": ("prompts", "prompt_ids", "prompt_token_ids"),
}


def columns_of(names: Any) -> dict[str, str]:
    """Which of these names holds which argument; an `InputError` if a side is missing."""
    known = list(names)
    columns = {
        argument: name
        for argument, others in COLUMNS.items()
        if (name := next((other for other in others if other in known), None)) is not None
    }
    for side, needed in (("engine", ("rollout_logp",)), ("trainer", ("old_logp", "logp"))):
        if not any(argument in columns for argument in needed):
            wanted = [name for argument in needed for name in COLUMNS[argument]]
            raise InputError(
                f"the {side}'s log-probabilities are missing: there is none of "
                f"{', '.join(wanted)} among {', '.join(map(str, known[:20])) or 'no columns'}."
            )
    return columns


def doctor_batch(batch: Any, **options: Any) -> Diagnosis:
    """Call `doctor` on a batch of a framework: verl's `DataProto` or its `batch`, the inputs of
    TRL's trainer, OpenRLHF's `Experience`, or any mapping of tensors.

    options: those of `doctor`, such as `model`. Prompts are taken from the options alone.
    """
    batch = getattr(batch, "batch", batch)
    if not hasattr(batch, "keys"):
        batch = {name: x for name, x in vars(batch).items() if x is not None}
    columns = columns_of(batch.keys())
    arguments = {
        argument: batch[name]
        for argument, name in columns.items()
        if argument != "prompts" and batch[name] is not None
    }
    rows = arguments["rollout_logp"].shape[-1]
    if "ids" in arguments and arguments["ids"].shape[-1] != rows:
        del arguments["ids"]  # some hold prompt and completion together
    return doctor(**{**arguments, **options})
