"""Sampling engines that differ from the learner on purpose, for `--rollout module:factory`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from policyloss_train.config import TrainConfig
from policyloss_train.models import weights as weights_of
from policyloss_train.rollout.protocol import Completion, Prompt, Sampling, Weights
from policyloss_train.rollout.session import BuiltIn

INT8_MOST, FP8_MOST = 127.0, 448.0  # the largest numbers of the types
HOT = 1.25


class Changed(BuiltIn):
    """The built-in engine with changed weights, or with a temperature of its own. It reports the
    log-probabilities of the distribution that it samples from.
    """

    def __init__(
        self,
        config: TrainConfig,
        weights: Weights,
        change: Callable[[Tensor], Tensor] | None = None,
        heat: float = 1.0,
    ) -> None:
        model: Any = weights.model
        super().__init__(model, lambda: model, config.sampling_tokens, copied=True)
        self._change, self._heat = change, heat

    def update_weights(self, weights: Weights, version: int) -> None:
        """Copy the weights, and change the matrices of the copy."""
        super().update_weights(weights, version)
        if self._change is not None:
            for x in weights_of(self._model).values():
                if x.dim() > 1:
                    x.data.copy_(self._change(x.data))

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Completion]]:
        """Sample at this engine's temperature; greedy sampling stays greedy."""
        heated = replace(sampling, temperature=self._heat * sampling.temperature)
        return super().generate(prompts, heated)


def round_bf16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(torch.bfloat16).to(x.dtype)


def round_integers(x: Tensor, most: float = INT8_MOST) -> Tensor:
    """Round to integers of at most `most` with one scale per row."""
    scale = _row_scale(x, most)
    return (x / scale).round() * scale


def round_fp8(x: Tensor) -> Tensor:
    """Round to float8_e4m3 with one scale per row."""
    scale = _row_scale(x, FP8_MOST)
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _row_scale(x: Tensor, most: float) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / most


def bf16(config: TrainConfig, weights: Weights) -> Changed:
    """An engine whose weights are in bfloat16."""
    return Changed(config, weights, round_bf16)


def int8(config: TrainConfig, weights: Weights) -> Changed:
    """An engine whose weights have 8 bits."""
    return Changed(config, weights, round_integers)


def fp8(config: TrainConfig, weights: Weights) -> Changed:
    """An engine whose weights are in float8."""
    return Changed(config, weights, round_fp8)


def hot(config: TrainConfig, weights: Weights) -> Changed:
    """An engine that samples at a higher temperature than the learner's."""
    return Changed(config, weights, heat=HOT)
