"""The completions of a step: drawn, sampled, scored and filtered; the answers of an evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from policyloss.errors import PolicyLossError
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Ranks, Say
from policyloss_train.drawing import problem_of
from policyloss_train.models import vocabulary_size
from policyloss_train.rollout.protocol import Sampling
from policyloss_train.rollout.session import Rollout, Wanted
from policyloss_train.run.checkpoint import count_from, subtree
from policyloss_train.sampler import Sample, decode, end_ids
from policyloss_train.tasks import Example, Task
from policyloss_train.tasks.base import Reward
from policyloss_train.tasks.rewards import tolerant_reward
from policyloss_train.time_limit import many_calls

_RAGGED = ("prompt_ids", "completion_ids", "rollout_logp")
_SUPPORT = ("support_ids", "support_offsets")  # stored if recorded, like the ids of turns
_STORED = (*_RAGGED, *_SUPPORT, "turn_ids")


@dataclass(frozen=True)
class Completions:
    """The scored completions of one step on this rank.

    greedy: for "remax", the reward of the greedy answer to the prompt of each completion.
    statistics: by name, over all ranks.
    """

    samples: list[Sample]
    greedy: Tensor | None = None
    statistics: dict[str, float] = field(default_factory=dict)

    @property
    def keys(self) -> list[tuple[int, int]]:
        """The group of each completion, and its index in the group."""
        sizes: dict[int, int] = {}
        keys = []
        for s in self.samples:
            keys.append((s.group, sizes.get(s.group, 0)))
            sizes[s.group] = keys[-1][1] + 1
        return keys

    @classmethod
    def merge(cls, shares: Sequence[Completions]) -> Completions:
        """The completions of all ranks, sorted by group, as if one process had sampled them."""
        rows = [(s.group, i, s, one.greedy) for one in shares for i, s in enumerate(one.samples)]
        rows.sort(key=lambda row: row[:2])
        greedy = [row[3][row[1]] for row in rows if row[3] is not None]
        rewards = torch.stack(greedy) if greedy else None
        return cls([row[2] for row in rows], rewards, shares[0].statistics)

    def share(self, rank: int, world: int, prompts: int) -> Completions:
        """The groups that one of `world` ranks would have sampled, in steps of `prompts` groups."""
        places = [i for i, s in enumerate(self.samples) if s.group % prompts % world == rank]
        greedy = None if self.greedy is None else self.greedy[places]
        return Completions([self.samples[i] for i in places], greedy, self.statistics)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and numbers for a checkpoint: concatenated ragged lists, and their lengths."""
        ragged = [_tensors_of(s) for s in self.samples]
        tensors = {
            name: torch.cat([tensors[name] for tensors in ragged])
            for name in (ragged[0] if ragged else ())
        }
        plain = [f.name for f in fields(Sample) if f.name not in (*_STORED, "support")]
        numbers = {
            "samples": [{name: getattr(s, name) for name in plain} for s in self.samples],
            "lengths": [[x.shape[0] for x in tensors.values()] for tensors in ragged],
            "statistics": self.statistics,
        }
        return tensors if self.greedy is None else {**tensors, "greedy": self.greedy}, numbers

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> Completions:
        """The inverse of `state`."""
        lengths = numbers["lengths"]
        names = [name for name in _STORED if name in tensors]
        ragged = {
            name: iter(torch.split(tensors[name], [row[i] for row in lengths]) if lengths else ())
            for i, name in enumerate(names)
        }
        samples = []
        for row in numbers["samples"]:
            tokens: dict[str, Any] = {name: next(ragged[name]).clone() for name in names}
            pair = tuple(tokens.pop(name) for name in _SUPPORT if name in tokens)
            rewards = tuple(row.get("turn_rewards", ()))
            samples.append(
                Sample(**{**row, **tokens, "support": pair or None, "turn_rewards": rewards})
            )
        return cls(samples, tensors.get("greedy"), dict(numbers["statistics"]))

    def check(self, examples: int, vocabulary: int) -> None:
        """Raise a `TypeError` for unknown examples or tokens, and for values of wrong type."""
        for name, x in {"tokens": None, **self.statistics}.items():
            if not isinstance(x, (int, float)) or abs(x) > 1e300:
                raise TypeError(f"the statistics of completions say {name} = {str(x)[:40]}")
        for s in self.samples:
            counts = (s.example, s.group, s.version)
            integers = {*map(type, counts)} == {int} and 0 <= s.group < 2**63
            if not integers or not 0 <= s.example < examples:
                raise TypeError(f"a completion of example {s.example!r}, group {s.group!r}")
            if (type(s.reward), type(s.text), type(s.finished)) != (float, str, bool):
                raise TypeError(
                    f"a completion with the reward {s.reward!r}, the text {s.text!r:.40}, finished "
                    f"{s.finished!r}"
                )
            ids, logp = torch.cat([s.prompt_ids, s.completion_ids]), s.rollout_logp
            there = ids.dtype == torch.int64 and bool(((ids >= 0) & (ids < vocabulary)).all())
            if not there or not logp.is_floating_point():
                raise TypeError(f"tokens that the model does not have, {ids.dtype}")
            if not len(s.prompt_ids) or not 0 < len(s.completion_ids) == len(logp):
                raise TypeError("a completion without tokens, or without their log-probabilities")
            turns, of_turns = s.turn_ids, s.turn_rewards
            if turns is not None and (
                {*turns.tolist()} - {-1} != {*range(len(of_turns))}
                or len(turns) != len(logp)
                or not all(isinstance(x, float) for x in of_turns)
            ):
                raise TypeError(f"a completion with the turns {turns} and rewards {of_turns!r:.80}")
            wrong = problem_of(s.support, s.completion_ids, vocabulary)
            if wrong is not None:
                raise TypeError(f"a completion with an invalid support: {wrong}")


def _tensors_of(s: Sample) -> dict[str, Tensor]:
    """The tensors of a completion, by their names in a checkpoint."""
    support = dict(zip(_SUPPORT, s.support, strict=True)) if s.support is not None else {}
    turns = {} if s.turn_ids is None else {"turn_ids": s.turn_ids}
    return {name: getattr(s, name) for name in _RAGGED} | support | turns


@dataclass
class Collector:
    """Draws prompts and samples completions.

    Its state: `cursor`, the position in the order of prompts; `draws`, the number of draws so far;
    and `queue`, the completions that wait for their step (`staleness`). unusable: the training
    prompts that are skipped; the others keep their indices. at: progress callback. ahead: the
    pending prefetch of `thread`, empty at checkpoints.
    """

    config: TrainConfig
    task: Task
    rollout: Rollout
    ranks: Ranks
    warn: Say
    cursor: int = 0
    draws: int = 0
    queue: deque[Completions] = field(default_factory=deque)
    unusable: frozenset[int] = frozenset()
    at: Callable[[str], None] = lambda where: None
    ahead: Future[list[Sample]] | None = None
    thread: ThreadPoolExecutor | None = None

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Tensors and numbers for a checkpoint, of all ranks together."""
        waiting = [Completions.merge(self.ranks.gather(one)).state() for one in self.queue]
        queue = [numbers for _, numbers in waiting]
        numbers = {"cursor": self.cursor, "draws": self.draws, "queue": queue}
        return {"queue": [tensors for tensors, _ in waiting]}, numbers

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Load the result of `state`, on any number of ranks."""
        self.cursor, self.draws = (count_from(numbers, name) for name in ("cursor", "draws"))
        self.queue.clear()
        for i, its_numbers in enumerate(numbers["queue"]):
            completions = Completions.from_state(subtree(tensors, f"queue/{i}"), its_numbers)
            completions.check(len(self.task.train), vocabulary_size(self.rollout.model))
            prompts = self.config.prompts
            self.queue.append(completions.share(self.ranks.rank, self.ranks.world, prompts))

    def next_step(self, version: int) -> Completions:
        """The completions to train on now, which were sampled `staleness` steps ago.

        version: the number of the current weights. They sample the completions for `staleness`
        steps later, in a thread until `finish` if the engine can sample while the policy learns.
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
        """Wait for the running draw, and close the engine."""
        if self.thread is not None:
            self.thread.shutdown(cancel_futures=True)
        self.rollout.engine.close()

    def collect(self) -> Completions:
        """Sample and score the completions of one step. Every rank has complete groups."""
        config = self.config
        kept: list[Sample] = []
        everything: list[Sample] = []
        failed = 0
        for attempt in range(config.dynamic_tries if config.dynamic_sampling else 1):
            drawn, errors = self._draw(first_group=attempt * config.prompts)
            everything += drawn
            failed += errors
            for group in _group_samples(drawn):
                kept += group if not config.dynamic_sampling or _differ(group) else []
            # The first `prompts` groups that were kept, over all ranks.
            groups = {g for share in self.ranks.gather([s.group for s in kept]) for g in share}
            chosen = sorted(groups)[: config.prompts]
            if len(chosen) == config.prompts:
                break
        samples = [s for s in kept if s.group in chosen]
        statistics = self._statistics(everything, len(chosen), failed)
        greedy = self._greedy(samples) if config.estimator == "remax" else None
        return Completions(samples, greedy, statistics)

    def _plan(self, first_group: int) -> tuple[list[Wanted], Sampling]:
        """The share of this rank in the next draw of `prompts` groups."""
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
        mine = list(enumerate(examples))[self.ranks.rank :: self.ranks.world]
        return [Wanted(e.id, first_group + i, e.prompt, n, place=i * n) for i, e in mine], sampling

    def _sampling(self, **rule: Any) -> Sampling:
        """The sampling options of the next draw; by default, those of greedy answers."""
        config, ends = self.config, end_ids(self.rollout.model, self.rollout.tokenizer)
        rule = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **rule}
        now: Any = {"end_ids": tuple(ends), "seed": config.seed, "draw": self.draws}
        return Sampling(config.max_new_tokens, **rule, **now)

    def _draw(self, first_group: int) -> tuple[list[Sample], int]:
        """One scored draw of this rank, a running one first; and the number of failed rewards."""
        self.at("sampling")
        if self.ahead is not None:
            running, self.ahead = self.ahead, None
            samples = running.result()
        else:
            samples = self.rollout.samples(*self._plan(first_group))
        self.at("scoring")
        with many_calls():
            samples = [self._score(self.task.train[s.example], s) for s in samples]
        self.at("gathering the completions of all ranks")
        good = [s for s in samples if not math.isnan(s.reward)]
        return good, len(samples) - len(good)

    def answers(self, examples: Sequence[Example]) -> list[Sample]:
        """The likeliest completion of each prompt, token by token."""
        wanted = [Wanted(e.id, place, e.prompt) for place, e in enumerate(examples)]
        return self.rollout.samples(wanted, self._sampling())

    def _next(self) -> Example:
        """The next usable prompt; each pass over the prompts has its own order."""
        size = len(self.task.train)
        while True:
            turn, place = divmod(self.cursor, size)
            self.cursor += 1
            chosen = _order(size, self.config.seed, turn)[place]
            if chosen not in self.unusable:
                return self.task.train[chosen]

    def _score(self, example: Example, s: Sample) -> Sample:
        """The sample with its reward. The reward of a turn is the growth of the score from the end
        of the turn before, with the tool's answer, to its own.
        """
        reward = self._reward(example, s)
        if s.turn_ids is None:
            return replace(s, reward=reward)
        ids, scores = s.turn_ids, [0.0]
        for begin in ((ids[1:] >= 0) & (ids[:-1] < 0)).nonzero().flatten().tolist():
            text = decode(self.rollout.tokenizer, s.completion_ids[: begin + 1])
            scores.append(self._reward(example, replace(s, text=text, finished=True)))
        scores.append(reward)
        rewards = [after - before for before, after in pairwise(scores)]
        failed = any(map(math.isnan, scores))
        return replace(s, reward=math.nan if failed else reward, turn_rewards=tuple(rewards))

    def _reward(self, example: Example, s: Sample) -> float:
        """The reward, or NaN and a warning where the task's function failed on this completion."""
        if not s.finished and self.config.overlong == "penalise":
            return -1.0
        score = tolerant_reward(self.task, self.config.reward_timeout, self.warn, failed=math.nan)
        return score(example, s.text)

    def _greedy(self, samples: Sequence[Sample]) -> Tensor:
        """The reward of the greedy answer to the prompt of each sample."""
        examples = [self.task.train[i] for i in sorted({s.example for s in samples})]
        answers = zip(examples, self.answers(examples), strict=True)
        rewards = {e.id: self._reward(e, s) for e, s in answers}
        return torch.tensor([rewards[s.example] for s in samples]).nan_to_num(nan=0.0)

    def _statistics(self, samples: list[Sample], groups: int, failed: int) -> dict[str, float]:
        """Statistics of all sampled completions, kept or not, on all ranks."""
        outcomes = [(s.reward, s.completion_ids.shape[0], s.finished) for s in samples]
        equal = sum(not _differ(group) for group in _group_samples(samples))
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


@lru_cache(maxsize=1)  # one pass over the prompts at a time is enough
def _order(size: int, seed: int, turn: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 7919 + turn)
    return torch.randperm(size, generator=generator).tolist()


def _group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    return list(groups.values())


def _differ(group: list[Sample]) -> bool:
    """Whether the rewards of a group are not all equal."""
    return len({s.reward for s in group}) > 1


def score_answers(
    examples: Sequence[Example], samples: Sequence[Sample], score: Reward
) -> list[Sample]:
    """The sampled answer to each example, with its score as the reward."""
    pairs = zip(examples, samples, strict=True)
    return [replace(s, reward=float(score(e, s.text))) for e, s in pairs]


def mean_outcomes(outcomes: Sequence[tuple[float, int]], success: float) -> dict[str, float]:
    """Means over answers. outcomes: (score, number of tokens). success: the least right score."""
    return {
        "accuracy": sum(score >= success for score, _ in outcomes) / len(outcomes),
        "reward": sum(score for score, _ in outcomes) / len(outcomes),
        "length": sum(length for _, length in outcomes) / len(outcomes),
    }
