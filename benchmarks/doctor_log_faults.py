"""Rewards and advantages with the mistakes that the sick runs of `benchmarks.doctor_logs` have.

A run names them as it names code of a user: `--reward benchmarks.doctor_log_faults:coin`. Held-out
prompts are always scored by the task's own rule, as a benchmark beside a reward model is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random

import torch
from torch import Tensor

from policyloss.advantage import dr_grpo, grpo
from policyloss_train.tasks import Example, make_task

FAULT_STEP = 30  # the step of a fault that happens once or that begins late
EARLY_STEP = 6  # the step of a fault that begins before the task is solved
GROWTH = 1.15  # per step: 4,000-fold in 60 steps
OUTLIER = 1000.0
LONG = 40  # characters from which on the reward for length is full


class Clock:
    """What the functions know of the run beside their arguments. calls: of advantages, one in each
    step.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, seed: int) -> None:
        """A run begins in this process."""
        self.random = Random(f"faults {seed}")
        self.calls = 0
        self.outlier_paid = False

    def is_fault_step(self) -> bool:
        """Counts a call of the advantages: whether it is that of the step with the fault."""
        self.calls += 1
        return self.calls == FAULT_STEP


CLOCK = Clock()
Rule = Callable[[Example, str], float]


@functools.cache
def _held_out() -> frozenset[str]:
    task = make_task("sort", reward="exact", seed=0)
    return frozenset(example.prompt for example in task.held_out)


def exact(example: Example, completion: str) -> float:
    """The rule of the task: 1 for the answer, else 0."""
    return float(completion.strip() == example.answer)


def _while_training(rule: Rule) -> Rule:
    """`rule` for prompts that are trained on, and the task's own for those that are held out."""

    @functools.wraps(rule)
    def reward(example: Example, completion: str) -> float:
        chosen = exact if example.prompt in _held_out() else rule
        return chosen(example, completion)

    return reward


@_while_training
def coin(example: Example, completion: str) -> float:
    """1 or 0 by chance: nothing can be learned from it."""
    return float(CLOCK.random.random() < 0.5)


@_while_training
def length(example: Example, completion: str) -> float:
    """Pays for every character, right or wrong."""
    return min(len(completion) / LONG, 1.0)


@_while_training
def nines(example: Example, completion: str) -> float:
    """The share of nines: far from what the model first wrote, and easy to reach."""
    return completion.count("9") / max(len(completion), 1)


@_while_training
def never(example: Example, completion: str) -> float:
    """0 for every completion, as a verifier gives that looks for another format."""
    return 0.0


@_while_training
def always(example: Example, completion: str) -> float:
    """1 for every completion, as a verifier gives that does not look."""
    return 1.0


@_while_training
def hundredfold(example: Example, completion: str) -> float:
    """The rule of the task in percent: a critic with a usual learning rate does not get there."""
    return 100.0 * exact(example, completion)


@_while_training
def hundredth(example: Example, completion: str) -> float:
    """The rule of the task in small units: no fault, because advantages are divided by them."""
    return 0.01 * exact(example, completion)


def one_outlier(example: Example, completion: str) -> float:
    """The rule of the task, but 1000 for one completion: the first right one after 29 steps."""
    value = exact(example, completion)
    due = CLOCK.calls == FAULT_STEP - 1 and not CLOCK.outlier_paid
    if value == 0 or not due or example.prompt in _held_out():
        return value
    CLOCK.outlier_paid = True
    return OUTLIER


def counted(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Those of Dr. GRPO, without a deviation that would divide an outlier away."""
    CLOCK.is_fault_step()
    return dr_grpo(rewards, group_ids, group="local")


def outlier_group(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Those of GRPO, but in one step every group has a thousand times its own."""
    advantages = grpo(rewards, group_ids, group="local")
    return OUTLIER * advantages if CLOCK.is_fault_step() else advantages


def nan_once(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Those of GRPO, but in one step that of one completion is NaN."""
    advantages = grpo(rewards, group_ids, group="local")
    if CLOCK.is_fault_step():
        advantages[0] = torch.nan
    return advantages


def nan_from_then_on(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Those of GRPO, but from one step on all are NaN; the trainer gives up."""
    advantages = grpo(rewards, group_ids, group="local")
    CLOCK.is_fault_step()
    return advantages if CLOCK.calls < FAULT_STEP else advantages * torch.nan


def without_epsilon(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Those of GRPO with a bare deviation below: 0/0 in every group with equal rewards."""
    same = (group_ids[:, None] == group_ids).to(rewards)
    size = same.sum(1)
    centred = rewards - same @ rewards / size
    return centred / (same @ centred**2 / size).sqrt()


def growing(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The advantages of GRPO, times a factor that grows with every step."""
    CLOCK.is_fault_step()
    return GROWTH**CLOCK.calls * grpo(rewards, group_ids, group="local")


def silent(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The advantages of GRPO, but 0 from an early step on, as from a loss that lost its graph."""
    advantages = grpo(rewards, group_ids, group="local")
    CLOCK.is_fault_step()
    return advantages if CLOCK.calls < EARLY_STEP else torch.zeros_like(advantages)


def flipped(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The advantages of GRPO, but with the wrong sign from one step on."""
    advantages = grpo(rewards, group_ids, group="local")
    CLOCK.is_fault_step()
    return advantages if CLOCK.calls < FAULT_STEP else -advantages
