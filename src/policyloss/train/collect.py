"""The completions of a step: prompts drawn in an order that follows from the seed, sampled,
scored, and filtered.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import PolicyLossError
from policyloss.train.completions import Completions
from policyloss.train.config import TrainConfig
from policyloss.train.distributed import Ranks
from policyloss.train.models import parts
from policyloss.train.rollout.protocol import Sampling
from policyloss.train.rollout.session import Rollout, Wanted
from policyloss.train.run.checkpoint import count_from, subtree
from policyloss.train.sampler import Sample
from policyloss.train.tasks import Example, Task
from policyloss.train.tasks.rewards import RewardError, scored


@dataclass
class Collector:
    """Draws prompts and samples completions.

    Its state: `cursor`, its place in the prompts; `draws`, how often it has sampled; and `queue`,
    the completions that wait for their step (`staleness`). unusable: the training prompts that are
    passed over; the others keep their places. at: told what begins. ahead: what `thread` samples
    while the policy learns; there is nothing between two steps, when a checkpoint is written.
    """

    config: TrainConfig
    task: Task
    rollout: Rollout
    ranks: Ranks
    warn: Callable[[str], None]
    cursor: int = 0
    draws: int = 0
    queue: deque[Completions] = field(default_factory=deque)
    unusable: frozenset[int] = frozenset()
    at: Callable[[str], None] = lambda where: None
    ahead: Future[list[Sample]] | None = None
    thread: ThreadPoolExecutor | None = None

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
            completions.check(len(self.task.train), parts(self.rollout.model)[1].shape[0])
            self.queue.append(
                completions.share(self.ranks.rank, self.ranks.world, self.config.prompts)
            )

    def next_step(self, version: int) -> Completions:
        """The completions to train on now: those that were sampled `staleness` steps ago.

        version: that of the weights of now, with which those of the step `staleness` later are
        sampled: until `finish`, in a thread, if the engine can sample while the policy learns.
        """
        staleness = self.config.staleness
        self.at("giving the weights to the engine")
        self.rollout.ready(version)
        while len(self.queue) < max(staleness, 1):
            self.queue.append(self.collect())
        if staleness and self.rollout.engine.concurrent:
            thread = self.thread = self.thread or ThreadPoolExecutor(1, "policyloss-rollout")
            self.ahead = thread.submit(self.rollout.samples, *self._plan(first_group=0))
        elif staleness:
            self.queue.append(self.collect())
        else:
            self.rollout.rest()
        return self.queue.popleft()

    def finish(self) -> None:
        """Wait for the completions that are being sampled, and score them."""
        if self.ahead is not None:
            self.queue.append(self.collect())

    def close(self) -> None:
        """Wait for what is being sampled, and end the engine."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
        self.rollout.engine.close()

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

    def _plan(self, first_group: int) -> tuple[list[Wanted], Sampling]:
        """The next draw of `prompts` groups: this rank's share of it."""
        config = self.config
        examples = [self._next() for _ in range(config.prompts)]
        sampling = self._sampling(
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            logp=config.rollout_logp,
            support=config.replays_support,
        )
        self.draws += 1
        n = config.group_size
        mine = range(self.ranks.rank, config.prompts, self.ranks.world)
        return (
            [
                Wanted(examples[i].id, first_group + i, examples[i].prompt, number=n, place=i * n)
                for i in mine
            ],
            sampling,
        )

    def _sampling(self, **rule: Any) -> Sampling:
        limit, seed = self.config.max_new_tokens, self.config.seed
        return self.rollout.sampling(draw=self.draws, seed=seed, max_new_tokens=limit, **rule)

    def _draw(self, first_group: int) -> tuple[list[Sample], int]:
        """One draw, scored: this rank's share of it, and how many could not be scored. One that is
        being sampled already comes first.
        """
        self.at("sampling")
        if self.ahead is not None:
            running, self.ahead = self.ahead, None
            samples = running.result()
        else:
            samples = self.rollout.samples(*self._plan(first_group))
        self.at("scoring")
        rewards = [self._reward(self.task.train[s.example], s) for s in samples]
        self.at("gathering the completions of all ranks")
        good = [
            dataclasses.replace(s, reward=r)
            for s, r in zip(samples, rewards, strict=True)
            if not math.isnan(r)
        ]
        return good, len(samples) - len(good)

    def answers(self, examples: Sequence[Example]) -> list[Sample]:
        """The likeliest completion of each prompt, token by token."""
        wanted = [Wanted(e.id, place, e.prompt) for place, e in enumerate(examples)]
        return self.rollout.samples(wanted, self._sampling())

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
        rewards = {
            s.example: self._reward(self.task.train[s.example], s)
            for s in self.answers([self.task.train[i] for i in examples])
        }
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
