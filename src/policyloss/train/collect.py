"""The completions of a step: prompts drawn in an order that follows from the seed, sampled,
scored, and filtered.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import PolicyLossError
from policyloss.train.completions import Completions
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks
from policyloss.train.models import parts
from policyloss.train.run.checkpoint import count_from, subtree
from policyloss.train.sampler import Sample, sample, uniforms
from policyloss.train.tasks import Example, Task
from policyloss.train.tasks.rewards import RewardError, scored


@dataclass
class Collector:
    """Draws prompts and samples completions.

    Its state: `cursor`, its place in the prompts; `draws`, how often it has sampled; and `queue`,
    the completions that wait for their step (`staleness`). unusable: the training prompts that are
    passed over; the others keep their places. at: told what begins.
    """

    config: TrainConfig
    task: Task
    model: Any
    tokenizer: Any
    ranks: Ranks
    warn: Callable[[str], None]
    cursor: int = 0
    draws: int = 0
    queue: deque[Completions] = field(default_factory=deque)
    unusable: frozenset[int] = frozenset()
    at: Callable[[str], None] = lambda where: None

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and numbers for a checkpoint, of all ranks together."""
        waiting = [
            Completions.merged(self.ranks.gather(completions)).state() for completions in self.queue
        ]
        numbers = {
            "cursor": self.cursor,
            "draws": self.draws,
            "queue": [numbers for _, numbers in waiting],
        }
        return {"queue": [tensors for tensors, _ in waiting]}, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, on any number of ranks."""
        self.cursor, self.draws = (count_from(numbers, name) for name in ("cursor", "draws"))
        self.queue.clear()
        for i, its_numbers in enumerate(numbers["queue"]):
            completions = Completions.from_state(subtree(tensors, f"queue/{i}"), its_numbers)
            completions.check(len(self.task.train), parts(self.model)[1].shape[0])
            self.queue.append(
                completions.share(self.ranks.rank, self.ranks.world, self.config.prompts)
            )

    def next_step(self) -> Completions:
        """The completions to train on now: those that were sampled `staleness` steps ago."""
        while len(self.queue) <= self.config.staleness:
            self.queue.append(self.collect())
        return self.queue.popleft()

    def collect(self) -> Completions:
        """Sample and score the completions of one step. Every rank has some of the groups, whole;
        together they are one batch.
        """
        config = self.config
        kept: list[Sample] = []
        wanted, groups, everything, failed = config.prompts, 0, [], 0
        for _ in range(config.dynamic_tries if config.dynamic_sampling else 1):
            drawn, errors = self._draw(first_group=groups)
            groups += config.prompts
            everything += drawn
            failed += errors
            kept += [
                s
                for group in _grouped(drawn)
                for s in group
                if not config.dynamic_sampling or _differ(group)
            ]
            if (
                len({g for share in self.ranks.gather([s.group for s in kept]) for g in share})
                >= wanted
            ):
                break
        # The first groups that were kept, of all ranks: as many as were asked for.
        chosen = set(
            sorted({g for share in self.ranks.gather([s.group for s in kept]) for g in share})[
                :wanted
            ]
        )
        samples = [s for s in kept if s.group in chosen]
        statistics = self._statistics(everything, len(chosen), failed)
        return Completions(
            samples, self._greedy(samples) if config.estimator == "remax" else None, statistics
        )

    def _draw(self, first_group: int) -> tuple[list[Sample], int]:
        """One draw of `prompts` groups, scored: this rank's share of it,
        and how many could not be scored.
        """
        config = self.config
        examples = [self._next() for _ in range(config.prompts)]
        rows = uniforms(
            config.seed, self.draws, config.prompts * config.group_size, config.max_new_tokens
        )
        self.draws += 1
        groups = range(self.ranks.rank, config.prompts, self.ranks.world)
        prompts = [
            (examples[i].id, first_group + i, examples[i].prompt)
            for i in groups
            for _ in range(config.group_size)
        ]
        places = [i * config.group_size + k for i in groups for k in range(config.group_size)]
        self.at("sampling")
        samples = sample(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            uniforms=rows[places],
            batch_tokens=config.sampling_tokens,
            stop=config.stop,
        )
        self.at("scoring")
        rewards = [self._reward(self.task.train[s.example], s) for s in samples]
        self.at("gathering the completions of all ranks")
        good = [
            dataclasses.replace(s, reward=r)
            for s, r in zip(samples, rewards, strict=True)
            if not math.isnan(r)
        ]
        return good, len(samples) - len(good)

    def _next(self) -> Example:
        """The next prompt: all of them in an order of their own in each pass,
        but for those that cannot be used.
        """
        size = len(self.task.train)
        while True:
            turn, place = divmod(self.cursor, size)
            self.cursor += 1
            chosen = _order(size, self.config.seed, turn)[place]
            if chosen not in self.unusable:
                return self.task.train[chosen]

    def _reward(self, example: Example, s: Sample) -> float:
        """The reward, or NaN where the task's function failed on this completion,
        which is told and left out.
        """
        if not s.finished and self.config.overlong == "penalise":
            return -1.0
        try:
            return scored(self.task, example, s.text, self.config.reward_timeout)
        except RewardError as error:
            self.warn(str(error))
            return math.nan

    def _greedy(self, samples: Sequence[Sample]) -> Tensor:
        """The reward of the greedy answer to the prompt of each."""
        examples = sorted({s.example for s in samples})
        prompts = [(i, 0, self.task.train[i].prompt) for i in examples]
        answers = sample(
            self.model,
            self.tokenizer,
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            uniforms=None,
            batch_tokens=self.config.sampling_tokens,
            stop=self.config.stop,
        )
        rewards = {s.example: self._reward(self.task.train[s.example], s) for s in answers}
        return torch.tensor(
            [0.0 if math.isnan(rewards[s.example]) else rewards[s.example] for s in samples]
        )

    def _statistics(self, samples: list[Sample], groups: int, failed: int) -> dict[str, float]:
        """Of all completions that were sampled, kept or not, on all ranks."""
        outcomes = [(s.reward, s.completion_ids.shape[0], s.finished) for s in samples]
        equal = sum(not _differ(group) for group in _grouped(samples))
        shares = self.ranks.gather((outcomes, equal, failed))
        rows = [row for share in shares for row in share[0]]
        if not rows:
            raise PolicyLossError(
                "the reward function failed on every completion of a step, so there is nothing to "
                "learn from; see the messages."
            )
        rewards = torch.tensor([r for r, _, _ in rows], dtype=torch.float64)
        lengths = torch.tensor([float(n) for _, n, _ in rows], dtype=torch.float64)
        return {
            "reward/mean": rewards.mean().item(),
            "reward/std": rewards.std(correction=0).item(),
            "reward/errors": float(sum(share[2] for share in shares)),
            "accuracy": (rewards >= self.task.success).double().mean().item(),
            "length/mean": lengths.mean().item(),
            "length/max": lengths.max().item(),
            "truncated": sum(not ended for _, _, ended in rows) / len(rows),
            "groups/zero_variance": float(sum(share[1] for share in shares)),
            "groups/kept": float(groups),
            "sequences": float(len(rows)),
            "tokens": lengths.sum().item(),
        }


def _order(size: int, seed: int, turn: int) -> list[int]:
    key = (size, seed, turn)
    if key not in _ORDERS:
        _ORDERS.clear()  # one pass over the prompts at a time is enough
        _ORDERS[key] = torch.randperm(
            size, generator=torch.Generator().manual_seed(seed * 7919 + turn)
        ).tolist()
    return _ORDERS[key]


_ORDERS: dict[tuple[int, int, int], list[int]] = {}


def _grouped(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    return iter(groups.values())


def _differ(group: list[Sample]) -> bool:
    """Whether the rewards of a group are not all equal."""
    return len({s.reward for s in group}) > 1
