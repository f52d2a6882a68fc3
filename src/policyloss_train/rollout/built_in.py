"""The built-in engine: the policy samples itself, or a copy of it does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from policyloss_train.distributed import gathered
from policyloss_train.drawing import Rule
from policyloss_train.models import load_weights
from policyloss_train.models import weights as weights_of
from policyloss_train.rollout.protocol import Completion, Engine, Prompt, Sampling, Weights
from policyloss_train.sampler import complete, uniforms


class BuiltIn(Engine):
    """Samples token by token with a key-value cache.

    copied: sample from a copy of the model, so that a thread may sample while the model learns. A
    sharded model has no copy: all ranks sample together. policy: a function that returns the
    sharded module.
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
            nullcontext() if self.concurrent else gathered(self._policy()),
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream),
        ):
            completed = complete(
                self._model,
                [p.ids for p, _ in rows],
                uniforms(sampling.seed, sampling.draw, count, width)[places],
                list(sampling.end_ids),
                rule,
                self._batch_tokens,
                supports=sampling.support,
            )
        ended = set(sampling.end_ids)
        each = iter(
            Completion(ids, logp, ids[-1] in ended, self._version, support)
            for ids, logp, support in completed
        )
        return [[next(each) for _ in range(p.number)] for p in prompts]

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy the weights, unless the policy itself samples."""
        if self._model is not self._live:
            load_weights(weights_of(self._model), weights_of(self._live))
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._model.device))
        self._version = version
