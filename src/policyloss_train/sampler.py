"""Completions sampled from a Hugging Face causal LM,
each with the log-probabilities it was sampled with.

Shapes: R prompts of the call, P prompt tokens, L tokens of a completion, K kept entries of all of
them together. Token t of row r is a function of the model, the prompt and
`uniforms[r, t]` alone (inverse CDF). So the samples do not depend on how the rows are cut into
batches or dealt to ranks, up to the rounding of the model's own products.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_train.decoding import Completed, complete
from policyloss_train.drawing import Pair, Rule, first_tokens
from policyloss_train.tasks.base import is_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled completion, ragged, on the CPU; every tensor owns its memory.

    `rollout_logp` is `log softmax(logits / temperature)`, over all tokens or, if the rule is
    `processed`, over those that top-p and top-k kept. At temperature 0 (greedy) it is the log-prob
    of temperature 1. `support` is what each token was drawn from, as in `Completed`.
    """

    example: int  # Example.id
    group: int  # the prompt within the step: samples of one prompt share it
    prompt_ids: Tensor  # int64 [P]
    completion_ids: Tensor  # int64 [L], with the end token if there was one
    rollout_logp: Tensor  # float32 [L]
    finished: bool  # ended by an end token; False: cut at max_new_tokens
    text: str  # the completion without special tokens
    reward: float = math.nan
    version: int = 0  # of the weights that sampled it: how many steps they had learned
    support: Pair | None = None


def uniforms(seed: int, step: int, rows: int, width: int) -> Tensor:
    """`[rows, width]` float64 numbers in [0, 1) that depend on `seed`, `step` and their place only:
    each rank takes its rows.
    """
    if min(seed, step, rows, width) < 0:
        raise InputError(
            f"uniforms needs numbers >= 0: seed={seed}, step={step}, rows={rows}, width={width}."
        )
    # torch's CPU generator keeps 32 bits of its seed; this one mixes all of seed and step.
    return torch.from_numpy(
        np.random.Generator(np.random.PCG64([seed, step])).random((rows, width))
    )


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[int, int, str]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    uniforms: Tensor | None,
    batch_tokens: int,
    stop: Sequence[str] = (),
) -> list[Sample]:
    """One completion for each (example id, group, prompt text), in the order given.

    `temperature` 0 takes the likeliest token (`uniforms` may be None); `top_p` 1 and `top_k` 0 are
    off. `uniforms` is `[R, max_new_tokens]`. A batch holds as many rows as `batch_tokens` allows,
    each counted as its longest prompt plus `max_new_tokens`, and at least one.
    The model samples in eval mode without gradients; its modes are restored.
    """
    rule = Rule(temperature, top_p, top_k)
    rule.check()
    _check_counts(max_new_tokens=max_new_tokens, batch_tokens=batch_tokens)
    drawn = _checked_uniforms(uniforms, len(prompts), max_new_tokens, rule)
    ids = encode(tokenizer, [text for _, _, text in prompts])
    _check_lengths(model, prompts, ids, max_new_tokens)
    ends = end_ids(model, tokenizer)
    completions = complete(model, ids, drawn, ends, rule, batch_tokens)
    samples = as_samples(tokenizer, [row[:2] for row in prompts], ids, completions, set(ends))
    return [stopped(tokenizer, s, stop) for s in samples]


def stopped(tokenizer: PreTrainedTokenizerBase, s: Sample, stop: Sequence[str]) -> Sample:
    """The completion up to the first of the texts `stop`: its tokens with those that write it, its
    text without it. What came after is as if it had never been sampled, so no engine needs to know.
    """
    begins = [place for place in (s.text.find(text) for text in stop) if place >= 0]
    if not begins:
        return s

    def ends_by(n: int) -> bool:
        written = tokenizer.decode(
            s.completion_ids[:n], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return any(text in written for text in stop)

    n = bisect_left(range(1, len(s.completion_ids)), True, key=ends_by) + 1
    return replace(
        s,
        completion_ids=s.completion_ids[:n].clone(),
        rollout_logp=s.rollout_logp[:n].clone(),
        support=s.support and first_tokens(s.support, n),
        finished=True,
        text=s.text[: min(begins)],
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each prompt, with the special tokens the tokenizer puts around a text (e.g.
    BOS).
    """
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        return []
    try:
        ids = tokenizer(distinct, return_attention_mask=False)["input_ids"]
    except (TypeError, UnicodeEncodeError) as error:  # tokenizers take no half of a surrogate pair
        bad = next((text for text in distinct if not is_text(text)), distinct[0])
        raise InputError(
            f"the prompt {bad!r} is no text that the tokenizer can read ({type(error).__name__})."
        ) from error
    encoded = dict(zip(distinct, ids, strict=True))
    return [encoded[text] for text in texts]


def longest(model: PreTrainedModel) -> int | None:
    """How many tokens the model has positions for; None where it does not say."""
    most: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return most


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion: the model's own (generation_config may name several)
    and the tokenizer's.
    """
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = set(named) if isinstance(named, (list, tuple)) else {named}
    return sorted(end for end in ids | {tokenizer.eos_token_id} if end is not None)


def as_samples(
    tokenizer: PreTrainedTokenizerBase,
    keys: Sequence[tuple[int, int]],
    ids: Sequence[list[int]],
    completions: Sequence[Completed],
    ends: set[int],
    version: int = 0,
) -> list[Sample]:
    """Completions as text. keys: example and group of each. ids: the prompt of each."""
    finished = [one.tokens[-1] in ends for one in completions]
    # An end token need not be marked special in the tokenizer: it is cut here.
    bodies = [
        one.tokens[:-1] if done else one.tokens
        for one, done in zip(completions, finished, strict=True)
    ]
    texts = (
        tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if bodies
        else []
    )
    samples = []
    for key, prompt, one, done, text in zip(keys, ids, completions, finished, texts, strict=True):
        tokens = torch.tensor(prompt), torch.tensor(one.tokens), one.logp
        samples.append(Sample(*key, *tokens, done, text, version=version, support=one.support))
    return samples


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise InputError(f"{name} is {count!r}; give a whole number >= 1.")


def _checked_uniforms(uniforms: Tensor | None, rows: int, width: int, rule: Rule) -> Tensor:
    if uniforms is None:
        if rule.temperature > 0:
            raise InputError(
                f"temperature is {rule.temperature}, so uniforms is needed: [{rows}, {width}], see "
                "sampler.uniforms."
            )
        return torch.zeros(rows, width)
    if uniforms.shape != (rows, width) or not uniforms.is_floating_point():
        raise InputError(
            f"uniforms is {uniforms.dtype} {list(uniforms.shape)}; give floats [prompts, "
            f"max_new_tokens] = [{rows}, {width}]."
        )
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise InputError(
            f"uniforms must be in [0, 1); seen {uniforms.min().item()} to {uniforms.max().item()}."
        )
    return uniforms


def _check_lengths(
    model: PreTrainedModel,
    prompts: Sequence[tuple[int, int, str]],
    ids: list[list[int]],
    max_new_tokens: int,
) -> None:
    most = longest(model)
    for (example, _, text), prompt in zip(prompts, ids, strict=True):
        if not prompt:
            raise InputError(
                f"the prompt of example {example} ({text!r}) has no token; give it text or a BOS."
            )
        if most is not None and len(prompt) + max_new_tokens > most:
            raise InputError(
                f"the prompt of example {example} has {len(prompt)} tokens; with "
                f"max_new_tokens={max_new_tokens} that is more than the model's {most} positions. "
                "Lower max_new_tokens or shorten the prompt."
            )
