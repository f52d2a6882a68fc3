"""Completions sampled from a Hugging Face causal LM,
each with the log-probabilities it was sampled with.

Shapes: R prompts of the call, B rows of one batch (fewer as rows end), P prompt tokens, T =
max_new_tokens, V vocabulary. Token t of row r is a function of the model, the prompt and
`uniforms[r, t]` alone (inverse CDF). So the samples do not depend on how the rows are cut into
batches or dealt to ranks, up to the rounding of the model's own products.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from policyloss.errors import InputError

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled completion, ragged, on the CPU; every tensor owns its memory.

    `rollout_logp` is `log softmax(logits / temperature)` over the *whole* vocabulary, also when
    top-p or top-k cut the support. The trainer's own log-probs are over the whole vocabulary too;
    divided by the kept mass, the two would differ on every token, and the ratio of an unchanged
    policy would not be 1. At temperature 0 (greedy) it is the log-prob of temperature 1.
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


def complete(
    model: PreTrainedModel,
    ids: Sequence[list[int]],
    uniforms: Tensor,
    ends: list[int],
    rule: Rule,
    batch_tokens: int,
) -> list[tuple[list[int], Tensor]]:
    """Tokens and log-probabilities of one completion of each prompt, as `sample` draws them."""
    completions: dict[int, tuple[list[int], Tensor]] = {}
    with evaluating(model), torch.no_grad():
        for rows in _batches(ids, uniforms.shape[1], batch_tokens):
            tokens, logp = _complete(model, [ids[r] for r in rows], uniforms[rows], ends, rule)
            completions.update(zip(rows, _ragged(tokens, logp), strict=True))
    return [completions[r] for r in range(len(ids))]


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
        bad = next(
            (text for text in distinct if text != text.encode(errors="replace").decode()),
            distinct[0],
        )
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


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """`model` in eval mode (no dropout); afterwards each module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class Rule:
    """How the next token is chosen from the logits."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    def check(self) -> None:
        """Raise for numbers that mean nothing."""
        # Below, float32 would divide by 0.
        if self.temperature != 0 and not 1e-30 <= self.temperature < math.inf:
            raise InputError(
                f"temperature is {self.temperature}; give a finite number >= 1e-30, or 0 for the "
                "likeliest token."
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; give a number in (0, 1]; 1 turns it off.")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise InputError(
                f"top_k is {self.top_k}; give a whole number >= 1, or 0 to turn it off."
            )


def draw(logits: Tensor, uniform: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The next token of each row and its log-prob: `[B, V]`, `[B]` → int64 `[B]`, `[B]`.

    token = min{v : Σ_{w ≤ v} p_w > uniform · Σ_w p_w},
    p = softmax(logits / temperature) on its `support`, 0 elsewhere.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A tiny temperature must not overflow: the largest logit becomes 0 before the division.
    scaled = (logits - logits.amax(-1, keepdim=True)) / (rule.temperature or 1.0)
    logp = scaled.log_softmax(-1)
    if rule.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
    else:
        p = logp.exp()
        if rule.top_p < 1 or rule.top_k:
            p = p.where(support(p, rule.top_p, rule.top_k), 0.0)
        # In order of token ids, not of probability: a rounding
        # that swaps two near-equal tokens then changes no sample.
        cdf = p.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)
        # NaN logits end past the last token; _ragged reports them.
        token.clamp_(max=logits.shape[-1] - 1)
    return token.squeeze(-1), logp.gather(-1, token).squeeze(-1)


def support(p: Tensor, top_p: float, top_k: int) -> Tensor:
    """Which tokens may be drawn: bool `[B, V]`, at least one in each row;
    of equal tokens, the lower ids first.

    First the `top_k` likeliest (0: all). Of these, the smallest set of the likeliest whose share of
    their mass reaches `top_p`.
    """
    ranked = p.topk(min(top_k or p.shape[-1], p.shape[-1])).values
    above = ranked.cumsum(-1, dtype=torch.float64)
    if top_p < 1:
        count = (above - ranked < top_p * above[:, -1:]).sum(-1, keepdim=True).clamp_(min=1)
    else:
        count = torch.full_like(ranked[:, :1], ranked.shape[-1], dtype=torch.int64)
    least = ranked.gather(-1, count - 1)
    likelier, equal = p > least, p == least
    return likelier | (equal & (equal.cumsum(-1) <= count - likelier.sum(-1, keepdim=True)))


def _batches(
    ids: Sequence[list[int]], max_new_tokens: int, batch_tokens: int
) -> Iterator[list[int]]:
    """Row numbers, cut by the token budget: the longest prompts first,
    rows of one prompt side by side.
    """
    first = {tuple(prompt): row for row, prompt in reversed(list(enumerate(ids)))}
    order = sorted(range(len(ids)), key=lambda row: (-len(ids[row]), first[tuple(ids[row])]))
    while order:
        size = max(1, batch_tokens // (len(ids[order[0]]) + max_new_tokens))
        yield order[:size]
        order = order[size:]


def _complete(
    model: PreTrainedModel, prompts: list[list[int]], uniforms: Tensor, ends: list[int], rule: Rule
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[B, T]` (-1 after the end) and log-probs `[B, T]` of one batch.
    A row that ends leaves batch and cache.
    """
    device, (rows, limit), width = model.device, uniforms.shape, max(map(len, prompts))
    uniforms, stops = uniforms.to(device), torch.tensor(ends, dtype=torch.int64, device=device)
    from transformers import DynamicCache  # takes seconds, which a command's help need not wait for

    cache = DynamicCache(config=model.config)
    logits, mask, position = _prefill(model, cache, prompts, limit)
    tokens = torch.full((rows, limit), -1, dtype=torch.int64, device=device)
    logps = torch.zeros((rows, limit), device=device)
    alive = torch.arange(rows, device=device)
    for t in range(limit):
        token, logp = draw(logits, uniforms[alive, t], rule)
        tokens[alive, t], logps[alive, t] = token, logp.float()
        if t + 1 == limit:
            break
        # Its size is the one thing the host waits for.
        going = (~torch.isin(token, stops)).nonzero().squeeze(-1)
        if len(going) < len(alive):
            if not len(going):
                return tokens, logps
            cache.reorder_cache(going)  # selects rows by number, in every kind of layer
            alive, token, position = alive[going], token[going], position[going]
            mask = None if mask is None else mask[going]
        position = position + 1
        attended = None if mask is None else mask[:, : width + t + 1]
        logits = _next_logits(model, cache, token[:, None], attended, position[:, None])
    return tokens, logps


def _prefill(
    model: PreTrainedModel, cache: DynamicCache, prompts: list[list[int]], limit: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Run each *distinct* prompt once; then give each row its copy:
    next logits `[B, V]`, mask, last position `[B]`.

    Left padding, so that every row's next token is the last column. The mask `[B, P + limit]`
    already covers the tokens to come; it is None when no row is padded, which lets the model take
    its faster path.
    """
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, distinct))
    # The padding is masked out, so any valid id does.
    padded = torch.tensor(
        [[*repeat(0, width - len(prompt)), *prompt] for prompt in distinct], device=model.device
    )
    padding = torch.tensor([width - len(prompt) for prompt in distinct], device=model.device)[
        :, None
    ]
    columns = torch.arange(width + limit, device=model.device)
    mask = (columns >= padding).long() if any(len(prompt) < width for prompt in distinct) else None
    position = (columns[:width] - padding).clamp_(min=0)
    logits = _next_logits(model, cache, padded, None if mask is None else mask[:, :width], position)
    owner = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=model.device)
    if len(distinct) < len(prompts):
        cache.reorder_cache(owner)
    return logits[owner], None if mask is None else mask[owner], position[owner, -1]


def _next_logits(
    model: PreTrainedModel, cache: DynamicCache, ids: Tensor, mask: Tensor | None, position: Tensor
) -> Tensor:
    """Feed `ids` `[B, n]` after what the cache holds (`mask` covers both);
    the logits `[B, V]` after the last of them.
    """
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    # Without it each token would be read as if it were the first.
    if getattr(out, "past_key_values", None) is None:
        raise InputError(
            f"{type(model).__name__} keeps no past_key_values; sampling needs a model with a "
            "key-value cache."
        )
    logits: Tensor = out.logits[:, -1]
    return logits


def _ragged(tokens: Tensor, logp: Tensor) -> list[tuple[list[int], Tensor]]:
    """Each row up to its end, on the CPU."""
    tokens, logp = tokens.cpu(), logp.cpu()
    if not torch.isfinite(logp).all():
        raise InputError(
            "the model gave NaN or infinite logits while sampling; check that its weights are "
            "finite."
        )
    lengths = (tokens >= 0).sum(-1).tolist()
    return [
        (row[:n], logp[r, :n].clone())
        for r, (row, n) in enumerate(zip(tokens.tolist(), lengths, strict=True))
    ]


def as_samples(
    tokenizer: PreTrainedTokenizerBase,
    keys: Sequence[tuple[int, int]],
    ids: Sequence[list[int]],
    completions: Sequence[tuple[list[int], Tensor]],
    ends: set[int],
    version: int = 0,
) -> list[Sample]:
    """Completions as text. keys: example and group of each. ids: the prompt of each."""
    finished = [tokens[-1] in ends for tokens, _ in completions]
    # An end token need not be marked special in the tokenizer: it is cut here.
    bodies = [
        tokens[:-1] if done else tokens
        for (tokens, _), done in zip(completions, finished, strict=True)
    ]
    texts = (
        tokenizer.batch_decode(bodies, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if bodies
        else []
    )
    return [
        Sample(*key, torch.tensor(prompt), torch.tensor(tokens), logp, done, text, version=version)
        for key, prompt, (tokens, logp), done, text in zip(
            keys, ids, completions, finished, texts, strict=True
        )
    ]


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
