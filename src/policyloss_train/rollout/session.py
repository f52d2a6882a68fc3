"""The rollout engine in a run: update its weights, and check its completions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig
from policyloss_train.models import vocabulary_size
from policyloss_train.rollout.built_in import BuiltIn
from policyloss_train.rollout.protocol import (
    Completion,
    Engine,
    Prompt,
    Sampling,
    Weights,
    check_completions,
)
from policyloss_train.rollout.servers import Servers
from policyloss_train.rollout.vllm_engine import VLLM, TopLogprobs
from policyloss_train.rollout.weights import PolicyWeights
from policyloss_train.sampler import Completed, Sample, as_samples, cut_at_stop, encode, end_ids
from policyloss_train.setup import Setup
from policyloss_train.tinker.learner import ServerLearner, ServerSampler
from policyloss_train.user_code import load_code


class Wanted(NamedTuple):
    """`number` completions of a prompt. place: the index of the first of them in the draw."""

    example: int
    group: int
    text: str
    number: int = 1
    place: int = 0


@dataclass
class Rollout:
    """stop: texts that end a completion; this class, not the engine, cuts the completion at them.
    warn: called once if the log-probabilities of engine and learner are over different tokens; then
    `mismatched` is True. version: of the engine's weights; None if the engine has none, or sleeps.
    """

    name: str
    engine: Engine
    weights: Weights
    model: Any
    tokenizer: Any
    stop: tuple[str, ...] = ()
    warn: Callable[[str], None] = warnings.warn
    mismatched: bool = False
    version: int | None = None

    def ready(self, version: int) -> None:
        """Pass the current weights to the engine. version: the number of learned steps."""
        if self.version != version:
            self.engine.wake()
            self.engine.update_weights(self.weights, version)
            self.version = version

    def rest(self) -> None:
        """Free GPU memory for the learner; the weights are reloaded afterwards."""
        self.engine.sleep()
        self.version = None

    def samples(self, wanted: Sequence[Wanted], sampling: Sampling) -> list[Sample]:
        """The completions, prompt after prompt, without rewards."""
        assert self.version is not None
        ids = encode(self.tokenizer, [one.text for one in wanted])
        prompts = [
            Prompt(tokens, one.number, one.place) for one, tokens in zip(wanted, ids, strict=True)
        ]
        completions = self.engine.generate(prompts, sampling)
        vocabulary = vocabulary_size(self.model)
        engine = f"the rollout engine {self.name!r}"
        pairs = check_completions(engine, prompts, sampling, completions, vocabulary, self.version)
        self._compare(sampling, any(one.support is not None for one, _ in pairs))
        rows = [
            (one.example, one.group, tokens)
            for one, tokens in zip(wanted, ids, strict=True)
            for _ in range(one.number)
        ]
        samples = as_samples(
            self.tokenizer,
            [row[:2] for row in rows],
            [row[2] for row in rows],
            [_completed(one, logp, sampling.support) for one, logp in pairs],
            set(sampling.end_ids),
            self.version,
        )
        return [cut_at_stop(self.tokenizer, s, self.stop) for s in samples]

    def _compare(self, sampling: Sampling, with_support: bool) -> None:
        """Warn if the engine's log-probabilities are over fewer tokens than the learner's."""
        same = not sampling.cuts or sampling.logp == "raw" or (sampling.support and with_support)
        if same or self.mismatched:
            return
        self.mismatched = True
        why = (
            f"--rollout {self.name} does not say which"
            if sampling.support
            else "--no-sampling-mask was named"
        )
        self.warn(
            "the sampler's log-probabilities are over the tokens that --top-p and --top-k keep, "
            f"and the learner's over all tokens, because {why}. So the ratio of an unchanged "
            "policy is not 1, but about the probability of what was kept (docs/train.md); "
            "`policyloss doctor` on rollouts.jsonl shows by how much."
        )

    def sampling(self, *, draw: int, seed: int, max_new_tokens: int, **rule: Any) -> Sampling:
        """The sampling options, with the tokens that end a completion of this model."""
        ends = tuple(end_ids(self.model, self.tokenizer))
        rule = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **rule}
        return Sampling(max_new_tokens, **rule, end_ids=ends, seed=seed, draw=draw)


def _completed(one: Completion, logp: Tensor, with_support: bool) -> Completed:
    """The tensors of a completion that the learner reads, on the CPU."""
    if one.support is None or not with_support:
        return Completed(list(one.ids), logp)
    ids, offsets = one.support
    return Completed(
        list(one.ids), logp, (ids.to("cpu", torch.int32), offsets.to("cpu", torch.int64))
    )


def make_rollout(config: TrainConfig, setup: Setup, warn: Callable[[str], None]) -> Rollout:
    """The engine that `--rollout` names, for a run."""
    weights = PolicyWeights(setup.model, setup.tokenizer, setup.learner.ranks)
    engine = _engine(config, setup, weights, warn)
    return Rollout(config.rollout, engine, weights, setup.model, setup.tokenizer, config.stop, warn)


def _engine(
    config: TrainConfig, setup: Setup, weights: PolicyWeights, warn: Callable[[str], None]
) -> Engine:
    name, learner, ranks = config.rollout, setup.learner, setup.learner.ranks
    if isinstance(learner, ServerLearner):
        return ServerSampler(learner)
    if name == "built-in":
        sharded = ranks.world > 1 and config.parallel == "fsdp"
        return BuiltIn(
            setup.model,
            lambda: learner.policy,
            config.sampling_tokens,
            copied=bool(config.staleness) and not sharded,
        )
    if "://" not in name and name != "vllm":
        factory = load_code(name, "the rollout engine")
        if not callable(factory):
            raise InputError(f"the rollout engine {name!r} is no function of config and weights.")
        engine: Engine = factory(config, weights)
        return engine
    report = TopLogprobs.of(config, vocabulary_size(setup.model))
    if name == "vllm":
        if ranks.world > 1:
            raise InputError(
                "--rollout vllm is an engine in one process; under torchrun, start servers and "
                "give their addresses: --rollout http://host:port."
            )
        prompts = [e.prompt for e in (*setup.task.train, *setup.task.held_out)]
        longest = max(map(len, encode(setup.tokenizer, prompts)))
        return VLLM(config, weights, longest, report, warn)
    return Servers(config, ranks, report, warn)
