"""The conditions of a bench: each adds one difficulty to the trainer's options."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any, NamedTuple

from policyloss_train.bench import engines
from policyloss_train.bench.tasks import TASKS
from policyloss_train.tasks import Example
from policyloss_train.tasks.rewards import make_reward

LR = 5e-4  # the trainer's default for the built-in models
FLIPPED = 0.2  # the share of rewards that `noisy` inverts
STEPS, EVERY, GOAL = 40, 5, 0.9
COMMON: Mapping[str, Any] = {
    "steps": STEPS,
    "eval_every": EVERY,
    "checkpoint_every": 0,
    "rollouts_every": 0,
    "max_new_tokens": 16,
    "reward_timeout": 0,  # the rewards are quick, and a limit takes longer than they do
    "device": "cpu",
}


class Condition(NamedTuple):
    """meaning: in words. options: of `TrainConfig`, in addition to `COMMON`. rate: a factor of the
    learning rate. task: the name of the only task that has this condition.
    """

    meaning: str
    options: Mapping[str, Any] = {}
    rate: float = 1.0
    task: str = ""


def _engine(name: str, meaning: str) -> Condition:
    return Condition(meaning, {"rollout": f"{engines.__name__}:{name}"})


CONDITIONS: Mapping[str, Condition] = {
    "on_policy": Condition("completions of the current policy"),
    **{f"stale_{n}": Condition(f"completions of age {n}", {"staleness": n}) for n in (1, 4, 16)},
    "bf16": _engine("bf16", "the sampler's weights in bfloat16"),
    "int8": _engine("int8", "the sampler's weights in 8-bit integers"),
    "fp8": _engine("fp8", "the sampler's weights in float8"),
    "hot": _engine("hot", f"the sampler's temperature {engines.HOT:g}, the learner's 1"),
    "top_p": Condition(
        "the sampler cuts at top-p 0.9, the learner does not",
        {"top_p": 0.9, "sampling_mask": False},
    ),
    "noisy": Condition(
        f"{FLIPPED:.0%} of the rewards inverted", {"reward": f"{__name__}:noisy_reward"}
    ),
    "long_tail": Condition("answers of 2 to 10 digits, long ones rare", task="long_tail"),
    "few_groups": Condition("4 prompts of 32 completions", {"prompts": 4, "group_size": 32}),
    "many_groups": Condition("64 prompts of 2 completions", {"prompts": 64, "group_size": 2}),
    **{f"lr_{x:g}": Condition(f"learning rate × {x:g}", rate=x) for x in (0.25, 0.5, 2, 4, 8)},
}


def noisy_reward(example: Example, completion: str) -> float:
    """The reward "exact", inverted for a share of the pairs of prompt and completion; held-out
    prompts are scored without noise.
    """
    score = make_reward("exact")(example, completion)
    if example.prompt in _held_out():
        return score
    drawn = int.from_bytes(sha256(f"{example.prompt}\n{completion}".encode()).digest()[:8], "big")
    return 1.0 - score if drawn < FLIPPED * 2**64 else score


@cache
def _held_out() -> frozenset[str]:
    tasks = (TASKS[name].make(0) for name in ("sort", "addition"))
    return frozenset(example.prompt for task in tasks for example in task.held_out)
