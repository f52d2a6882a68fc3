"""The completions of a step: prompts drawn in an order that follows from the seed, sampled, scored, and filtered."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import PolicyLossError
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks
from policyloss.train.sampler import Sample, sample, uniforms
from policyloss.train.tasks import Example, Task
from policyloss.train.tasks.rewards import RewardError, scored


@dataclass(frozen=True)
class Completions:
    """The scored completions of one step on this rank.

    greedy: the reward of the greedy answer to the prompt of each, for "remax". statistics: of all ranks, by name.
    """

    samples: list[Sample]
    greedy: Tensor | None = None
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The group of each completion, and which of the group it is."""
        seen: dict[int, int] = {}
        found = []
        for s in self.samples:
            found.append((s.group, seen.get(s.group, 0)))
            seen[s.group] = found[-1][1] + 1
        return found


@dataclass(frozen=True)
class Forgiving:
    """A task whose reward function may fail on a completion: that is told, and the completion counts as wrong."""

    task: Task
    warn: Callable[[str], None]
    seconds: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def score(self, example: Example, completion: str) -> float:
        """As the task scores it, or 0 where it cannot."""
        try:
            return scored(self.task, example, completion, self.seconds)
        except RewardError as error:
            self.warn(str(error))
            return 0.0


@dataclass
class Collector:
    """Draws prompts and samples completions. `cursor` and `draws` are all its state: where it is, and how often it has sampled.

    unusable: the training prompts that are passed over; the others keep their places. at: told what begins.
    """

    config: TrainConfig
    task: Task
    tokenizer: Any
    ranks: Ranks
    warn: Callable[[str], None]
    cursor: int = 0
    draws: int = 0
    unusable: frozenset[int] = frozenset()
    at: Callable[[str], None] = lambda where: None

    @property
    def forgiving(self) -> Any:
        """The task for an evaluation, which a failure of its reward function must not end."""
        return Forgiving(self.task, self.warn, self.config.reward_timeout)

    def collect(self, model: Any) -> Completions:
        """Sample and score the completions of one step. Every rank has some of the groups, whole; together they are one batch."""
        config = self.config
        kept: list[Sample] = []
        wanted, groups, everything, failed = config.prompts, 0, [], 0
        for _ in range(config.dynamic_tries if config.dynamic_sampling else 1):
            drawn, errors = self._draw(model, first_group=groups)
            groups += config.prompts
            everything += drawn
            failed += errors
            kept += [s for group in _grouped(drawn) for s in group if not config.dynamic_sampling or _differ(group)]
            if len({g for share in self.ranks.gather([s.group for s in kept]) for g in share}) >= wanted:
                break
        # The first groups that were kept, of all ranks: as many as were asked for.
        chosen = set(sorted({g for share in self.ranks.gather([s.group for s in kept]) for g in share})[:wanted])
        samples = [s for s in kept if s.group in chosen]
        statistics = self._statistics(everything, len(chosen), failed)
        return Completions(samples, self._greedy(model, samples) if config.estimator == "remax" else None, statistics)

    def _draw(self, model: Any, first_group: int) -> tuple[list[Sample], int]:
        """One draw of `prompts` groups, scored: this rank's share of it, and how many could not be scored."""
        config = self.config
        examples = [self._next() for _ in range(config.prompts)]
        rows = uniforms(config.seed, self.draws, config.prompts * config.group_size, config.max_new_tokens)
        self.draws += 1
        own = range(self.ranks.rank, config.prompts, self.ranks.world)
        prompts = [(examples[i].id, first_group + i, examples[i].prompt) for i in own for _ in range(config.group_size)]
        places = [i * config.group_size + k for i in own for k in range(config.group_size)]
        self.at("sampling")
        found = sample(
            model,
            self.tokenizer,
            prompts,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            uniforms=rows[places],
            batch_tokens=config.sampling_tokens,
        )
        self.at("scoring")
        rewards = [self._reward(self.task.train[s.example], s) for s in found]
        self.at("gathering the completions of all ranks")
        good = [dataclasses.replace(s, reward=r) for s, r in zip(found, rewards, strict=True) if not math.isnan(r)]
        return good, len(found) - len(good)

    def _next(self) -> Example:
        """The next prompt: all of them in an order of their own in each pass, but for those that cannot be used."""
        size = len(self.task.train)
        while True:
            turn, place = divmod(self.cursor, size)
            self.cursor += 1
            chosen = _order(size, self.config.seed, turn)[place]
            if chosen not in self.unusable:
                return self.task.train[chosen]

    def _reward(self, example: Example, s: Sample) -> float:
        """The reward, or NaN where the task's function failed on this completion, which is told and left out."""
        if not s.finished and self.config.overlong == "penalise":
            return -1.0
        try:
            return scored(self.task, example, s.text, self.config.reward_timeout)
        except RewardError as error:
            self.warn(str(error))
            return math.nan

    def _greedy(self, model: Any, samples: Sequence[Sample]) -> Tensor:
        """The reward of the greedy answer to the prompt of each."""
        examples = sorted({s.example for s in samples})
        prompts = [(i, 0, self.task.train[i].prompt) for i in examples]
        found = sample(
            model,
            self.tokenizer,
            prompts,
            max_new_tokens=self.config.max_new_tokens,
            temperature=0.0,
            top_p=1.0,
            top_k=0,
            uniforms=None,
            batch_tokens=self.config.sampling_tokens,
        )
        rewards = {s.example: self._reward(self.task.train[s.example], s) for s in found}
        return torch.tensor([0.0 if math.isnan(rewards[s.example]) else rewards[s.example] for s in samples])

    def _statistics(self, samples: list[Sample], groups: int, failed: int) -> dict[str, float]:
        """Of all completions that were sampled, kept or not, on all ranks."""
        own = [(s.reward, s.completion_ids.shape[0], s.finished) for s in samples]
        equal = sum(not _differ(group) for group in _grouped(samples))
        shares = self.ranks.gather((own, equal, failed))
        rows = [row for share in shares for row in share[0]]
        if not rows:
            raise PolicyLossError(
                "the reward function failed on every completion of a step, so there is nothing to learn from; see the messages."
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
        _ORDERS[key] = torch.randperm(size, generator=torch.Generator().manual_seed(seed * 7919 + turn)).tolist()
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
