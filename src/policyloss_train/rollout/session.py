"""An engine in a run: it is given weights when they have changed, and its answers are checked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policyloss_train.decoding import Completed
from policyloss_train.models import parts
from policyloss_train.rollout.protocol import (
    Completion,
    Engine,
    Prompt,
    Sampling,
    Weights,
    checked,
)
from policyloss_train.sampler import Sample, as_samples, encode, end_ids, stopped


class Wanted(NamedTuple):
    """`number` completions of a prompt, the first of which is at `place` in the draw."""

    example: int
    group: int
    text: str
    number: int = 1
    place: int = 0


@dataclass
class Rollout:
    """stop: texts that end a completion, which the engine does not know. warn: told once if the
    log-probabilities of engine and learner are not over the same tokens, which is `mismatched`.
    version: that of the weights that the engine has; None where it has none, or sleeps.
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
        """Let the engine have the weights of now. version: how many steps they have learned."""
        if self.version != version:
            self.engine.wake()
            self.engine.update_weights(self.weights, version)
            self.version = version

    def rest(self) -> None:
        """Leave the memory to the learner, after which the weights are others in any case."""
        self.engine.sleep()
        self.version = None

    def samples(self, wanted: Sequence[Wanted], sampling: Sampling) -> list[Sample]:
        """The completions, prompt after prompt, not scored yet."""
        assert self.version is not None
        ids = encode(self.tokenizer, [one.text for one in wanted])
        prompts = [
            Prompt(tokens, one.number, one.place) for one, tokens in zip(wanted, ids, strict=True)
        ]
        completions = self.engine.generate(prompts, sampling)
        vocabulary = parts(self.model)[1].shape[0]
        engine = f"the rollout engine {self.name!r}"
        pairs = checked(engine, prompts, sampling, completions, vocabulary, self.version)
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
        return [stopped(self.tokenizer, s, self.stop) for s in samples]

    def _compare(self, sampling: Sampling, with_support: bool) -> None:
        """Say so if the engine's log-probabilities are over fewer tokens than the learner's."""
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
        """How to draw, with the tokens that end a completion of this model."""
        ends = tuple(end_ids(self.model, self.tokenizer))
        rule = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **rule}
        return Sampling(max_new_tokens, **rule, end_ids=ends, seed=seed, draw=draw)


def _completed(one: Completion, logp: Tensor, with_support: bool) -> Completed:
    """What the learner reads of a completion, on the CPU."""
    if one.support is None or not with_support:
        return Completed(list(one.ids), logp)
    ids, offsets = one.support
    return Completed(
        list(one.ids), logp, (ids.to("cpu", torch.int32), offsets.to("cpu", torch.int64))
    )
