"""Greedy evaluation: one completion per example, scored by the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from policyloss.errors import InputError
from policyloss.train.sampler import Sample, sample
from policyloss.train.tasks.base import SUCCESS, Example, Reward

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Result(NamedTuple):
    """What the model said to one example, by its id. length: tokens, with the end token."""

    example: int
    text: str
    score: float
    length: int


class Evaluation(NamedTuple):
    """Means over the examples, Σ_i x_i / n, and the results in the order of the examples.

    accuracy: the share whose score reaches the task's `success`.
    """

    accuracy: float
    score: float
    mean_length: float
    results: Sequence[Result]

    @classmethod
    def of(cls, results: Sequence[Result], success: float = SUCCESS) -> Evaluation:
        """The means of `results`, of all ranks. success: the score from which on one is right."""
        if not results:
            raise InputError("there is nothing to evaluate: 0 examples; give at least one.")
        n = len(results)
        accuracy = sum(r.score >= success for r in results) / n
        score, length = sum(r.score for r in results) / n, sum(r.length for r in results) / n
        return cls(accuracy, score, length, results)


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    score: Reward,
    **limits: Any,
) -> list[Result]:
    """The likeliest completion of each prompt, token by token, and its score; errors are raised.
    limits: `max_new_tokens`, `batch_tokens` and `stop` of `sample`.
    """
    rows = [(example.id, place, example.prompt) for place, example in enumerate(examples)]
    greedy: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "uniforms": None}
    samples = sample(model, tokenizer, rows, **greedy, **limits)
    return answered(examples, samples, score)


def answered(examples: Sequence[Example], samples: Sequence[Sample], score: Reward) -> list[Result]:
    """What was sampled for each example, scored."""
    return [
        Result(e.id, s.text, float(score(e, s.text)), len(s.completion_ids))
        for e, s in zip(examples, samples, strict=True)
    ]
