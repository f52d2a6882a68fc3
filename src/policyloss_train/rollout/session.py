"""The rollout engine in a run: update its weights, and check its completions; and the built-in
engine, in which the policy samples itself, or a copy of it does.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from policyloss.errors import InputError
from policyloss_train import sampler
from policyloss_train.config import TrainConfig
from policyloss_train.distributed import Say, gather_parameters
from policyloss_train.drawing import Rule
from policyloss_train.models import load_weights, vocabulary_size
from policyloss_train.models import weights as weights_of
from policyloss_train.rollout import protocol
from policyloss_train.rollout.protocol import Completion, Engine, Prompt, Sampling, Weights
from policyloss_train.rollout.servers import Servers
from policyloss_train.rollout.vllm_engine import VLLM, TopLogprobs
from policyloss_train.sampler import Completed, Sample
from policyloss_train.setup import Setup
from policyloss_train.tasks.base import Tool
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
    tool: of the task.
    """

    name: str
    engine: Engine
    weights: Weights
    model: Any
    tokenizer: Any
    stop: tuple[str, ...] = ()
    warn: Say = warnings.warn
    mismatched: bool = False
    version: int | None = None
    tool: Tool | None = None

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
        ids = sampler.encode(self.tokenizer, [one.text for one in wanted])
        rows = [
            (one, tokens, one.place + i)
            for one, tokens in zip(wanted, ids, strict=True)
            for i in range(one.number)
        ]
        keys = [(one.example, one.group) for one, _, _ in rows]
        starts = [tokens for _, tokens, _ in rows]

        def go_on(chosen: list[int], starts: list[list[int]], ends: list[int]) -> list[Completed]:
            turns = [
                Prompt(start, 1, rows[i][2], len(start) - len(rows[i][1]))
                for i, start in zip(chosen, starts, strict=True)
            ]
            every = (*sampling.end_ids, *ends)
            return self._complete(turns, replace(sampling, end_ids=every))

        if self.tool is None:
            pairs = zip(wanted, ids, strict=True)
            prompts = [Prompt(tokens, one.number, one.place) for one, tokens in pairs]
            completed = self._complete(prompts, sampling)
        else:
            texts, limit = [one.text for one, _, _ in rows], sampling.max_new_tokens
            completed = sampler.take_turns(self.tool, self.tokenizer, texts, starts, limit, go_on)
        self._compare(sampling, any(one.support is not None for one in completed))
        ends = set(sampling.end_ids)
        samples = sampler.as_samples(self.tokenizer, keys, starts, completed, ends, self.version)
        return [sampler.cut_at_stop(self.tokenizer, s, self.stop) for s in samples]

    def _complete(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Completed]:
        """The completions of the engine, checked."""
        assert self.version is not None
        completions = self.engine.generate(prompts, sampling)
        name, size = f"the rollout engine {self.name!r}", vocabulary_size(self.model)
        return protocol.check_completions(name, prompts, sampling, completions, size, self.version)

    def _compare(self, sampling: Sampling, with_support: bool) -> None:
        """Warn if the engine's log-probabilities are over fewer tokens than the learner's."""
        cuts = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)
        same = not cuts or sampling.logp == "raw" or (sampling.support and with_support)
        if same or self.mismatched:
            return
        self.mismatched = True
        why = (
            f"--rollout {self.name} does not return these tokens"
            if sampling.support
            else "--no-sampling-mask was named"
        )
        self.warn(
            "the sampler's log-probabilities are over the tokens that --top-p and --top-k keep, "
            f"and the learner's over all tokens, because {why}. So the ratio of an unchanged "
            "policy is not 1, but about the probability of the kept tokens (docs/train.md); "
            "`policyloss doctor` on rollouts.jsonl shows by how much."
        )


class BuiltIn(Engine):
    """Samples token by token with a key-value cache.

    copied: sample from a copy of the model, so that a thread may sample while the model is
    trained. A sharded model is not copied: all ranks sample together from the model itself.
    policy: a function that returns the sharded module.
    """

    def __init__(
        self, model: Any, policy: Callable[[], nn.Module], batch_tokens: int, *, copied: bool
    ) -> None:
        self.concurrent, self._version = copied, 0
        self._policy, self._batch_tokens = policy, batch_tokens
        self._live, self._model = model, copy.deepcopy(model) if copied else model
        cuda = copied and self._model.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._model.device) if cuda else None  # type: ignore[no-untyped-call]

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Sample; a completion depends only on weights, prompt, seed, draw and place."""
        rows = [(p, p.place + i) for p in prompts for i in range(p.number)]
        places = [place for _, place in rows]
        count, width = max(places, default=-1) + 1, sampling.max_new_tokens
        processed = sampling.logp == "processed"
        rule = Rule(sampling.temperature, sampling.top_p, sampling.top_k, processed)
        # Gather all weights; on a GPU, use a separate stream that does not wait for training.
        with (
            nullcontext() if self.concurrent else gather_parameters(self._policy()),
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream),
        ):
            completed = sampler.complete(
                self._model,
                [p.ids for p, _ in rows],
                sampler.uniforms(sampling.seed, sampling.draw, count, width)[places],
                list(sampling.end_ids),
                rule,
                self._batch_tokens,
                supports=sampling.support,
                written=[p.written for p, _ in rows],
            )
        ended = set(sampling.end_ids)
        each = iter(
            Completion(ids, logp, ids[-1] in ended, self._version, support)
            for ids, logp, support, _ in completed
        )
        return [[next(each) for _ in range(p.number)] for p in prompts]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy the weights, unless the policy itself samples."""
        if self._model is not self._live:
            load_weights(weights_of(self._model), weights_of(self._live))
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        self._version = version


def make_rollout(config: TrainConfig, setup: Setup, warn: Say) -> Rollout:
    """The engine that `--rollout` names, for a run."""
    model = (setup.model, setup.tokenizer)
    weights = Weights(*model, setup.learner.ranks)
    engine = _engine(config, setup, weights, warn)
    return Rollout(config.rollout, engine, weights, *model, config.stop, warn, tool=setup.task.tool)


def _engine(config: TrainConfig, setup: Setup, weights: Weights, warn: Say) -> Engine:
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
        longest = max(map(len, sampler.encode(setup.tokenizer, prompts)))
        return VLLM(config, weights, longest, report, warn)
    return Servers(config, ranks, report, warn)
