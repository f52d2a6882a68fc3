"""Sample completions from a Hugging Face causal LM with a key-value cache, and record their
log-probabilities.

Shapes: R prompts of a call, B rows of one batch (fewer as rows end), P prompt tokens, T = the most
new tokens, L tokens of a completion, V vocabulary entries. Token t of row r is a function of only
the model, the prompt and `uniforms[r, t]` (inverse CDF). So the samples do not depend on how the
rows are split into batches or over ranks, up to the rounding of the model's products.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss.hf.output_head import measuring
from policyloss_train.drawing import Kept, Pair, Rule, draw, first_tokens
from policyloss_train.tasks.base import Tool, is_text

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, eq=False)
class Sample:
    """One sampled completion, ragged, on the CPU; every tensor owns its memory.

    `rollout_logp` is `log softmax(logits / temperature)`, over all tokens or, if the rule is
    `processed`, over the tokens that top-p and top-k kept. At temperature 0 (greedy), it is the
    log-probability at temperature 1. `support`, `turn_ids`: as in `Completed`.
    """

    example: int  # Example.id
    group: int  # the prompt within the step: samples of one prompt share it
    prompt_ids: Tensor  # int64 [P]
    completion_ids: Tensor  # int64 [L], with the end token if there was one
    rollout_logp: Tensor  # float32 [L]
    finished: bool  # ended by an end token; False: cut at max_new_tokens
    text: str  # the completion without special tokens
    reward: float = math.nan
    version: int = 0  # of the weights that sampled it: the number of steps they had learned
    support: Pair | None = None
    turn_ids: Tensor | None = None
    turn_rewards: tuple[float, ...] = ()  # of each turn, with the sum `reward`; () if one turn


class Completed(NamedTuple):
    """The tokens of a completion, with the end token if there was one, and their log-probs `[L]`.

    support: the tokens from which each token was drawn; None if these are all tokens, or if they
    were not recorded. turn_ids: of a task in turns, the turn of each token, int64 `[L]`; −1 at the
    tokens that a tool wrote, whose log-probs are 0.
    """

    tokens: list[int]
    logp: Tensor
    support: Pair | None = None
    turn_ids: Tensor | None = None


def uniforms(seed: int, step: int, rows: int, width: int) -> Tensor:
    """`[rows, width]` float64 numbers in [0, 1). Each depends only on `seed`, `step` and its index,
    so that each rank can take its rows.
    """
    # torch's CPU generator keeps 32 bits of its seed; PCG64 mixes all bits of seed and step.
    generator = np.random.Generator(np.random.PCG64([seed, step]))
    return torch.from_numpy(generator.random((rows, width)))


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
    tool: Tool | None = None,
) -> list[Sample]:
    """One completion for each (example id, group, prompt text), in the order of the prompts.

    `temperature` 0 takes the likeliest token (`uniforms` may be None); `top_p` 1 and `top_k` 0 are
    off. `uniforms` is `[R, max_new_tokens]`. A batch holds at least one row, and as many as
    `batch_tokens` allows if each row has the longest prompt of the batch plus `max_new_tokens`.
    The model samples in eval mode without gradients; its modes are restored.
    """
    rule = Rule(temperature, top_p, top_k)
    ids = encode(tokenizer, [text for _, _, text in prompts])
    for i, reason in unusable_prompts(model, ids, max_new_tokens).items():
        raise InputError(f"the prompt of example {prompts[i][0]} ({prompts[i][2]!r:.80}) {reason}.")
    ends = end_ids(model, tokenizer)
    drawn = torch.zeros(len(ids), max_new_tokens) if uniforms is None else uniforms

    def go_on(rows: list[int], starts: list[list[int]], stops: list[int]) -> list[Completed]:
        written = [len(start) - len(ids[row]) for row, start in zip(rows, starts, strict=True)]
        stops = [*ends, *stops]
        return complete(model, starts, drawn[rows], stops, rule, batch_tokens, written=written)

    texts = [text for _, _, text in prompts]
    completions = take_turns(tool, tokenizer, texts, ids, max_new_tokens, go_on)
    samples = as_samples(tokenizer, [row[:2] for row in prompts], ids, completions, set(ends))
    return [cut_at_stop(tokenizer, s, stop) for s in samples]


def cut_at_stop(tokenizer: PreTrainedTokenizerBase, s: Sample, stop: Sequence[str]) -> Sample:
    """Cut the completion at the first of the texts `stop`: its tokens include the stop text, its
    text does not. Engines therefore need no support for stop texts.
    """
    begins = [place for place in (s.text.find(text) for text in stop) if place >= 0]
    if not begins:
        return s

    def contains_stop(n: int) -> bool:
        written = decode(tokenizer, s.completion_ids[:n])
        return any(text in written for text in stop)

    n = bisect_left(range(1, len(s.completion_ids)), True, key=contains_stop) + 1
    return replace(
        s,
        completion_ids=s.completion_ids[:n].clone(),
        rollout_logp=s.rollout_logp[:n].clone(),
        support=s.support and first_tokens(s.support, n),
        turn_ids=None if s.turn_ids is None else s.turn_ids[:n].clone(),
        finished=True,
        text=s.text[: min(begins)],
    )


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each prompt, with the special tokens that the tokenizer adds (e.g. BOS)."""
    distinct = list(dict.fromkeys(texts))
    if not distinct:
        return []
    try:
        ids = tokenizer(distinct, return_attention_mask=False)["input_ids"]
    except (TypeError, UnicodeEncodeError) as error:  # tokenizers reject half a surrogate pair
        bad = next((text for text in distinct if not is_text(text)), distinct[0])
        raise InputError(f"the tokenizer cannot read {bad!r} ({type(error).__name__}).") from error
    encoded = dict(zip(distinct, ids, strict=True))
    return [encoded[text] for text in texts]


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Tensor) -> str:
    """The text of some tokens, without special tokens."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)


def unusable_prompts(
    model: PreTrainedModel, ids: Sequence[list[int]], max_new_tokens: int
) -> dict[int, str]:
    """The index of each prompt that the model cannot continue, and the reason."""
    most: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    reasons: dict[int, str] = {}
    for i, prompt in enumerate(ids):
        if not prompt:
            reasons[i] = "has no token"
        elif most is not None and len(prompt) + max_new_tokens > most:
            reasons[i] = (
                f"has {len(prompt)} tokens, which with --max-new-tokens {max_new_tokens} are more "
                f"than {most} positions"
            )
    return reasons


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a completion: those of the model's generation_config and tokenizer."""
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
    """Completions with their texts. keys: their examples and groups. ids: their prompts."""
    samples = []
    for key, prompt, one in zip(keys, ids, completions, strict=True):
        finished = one.tokens[-1] in ends
        # Cut the end token here: the tokenizer may not mark it as special.
        text = decode(tokenizer, one.tokens[:-1] if finished else one.tokens)
        tokens = torch.tensor(prompt), torch.tensor(one.tokens), one.logp
        more: dict[str, Any] = {"support": one.support, "turn_ids": one.turn_ids}
        samples.append(Sample(*key, *tokens, finished, text, version=version, **more))
    return samples


def take_turns(
    tool: Tool | None,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    ids: Sequence[list[int]],
    limit: int,
    go_on: Callable[[list[int], list[list[int]], list[int]], list[Completed]],
) -> list[Completed]:
    """One completion of at most `limit` tokens for each prompt, the tool's tokens included.

    go_on: takes some rows, their tokens so far and the tokens that end a call, and returns the next
    turn of each row. Without a tool, there is one turn. After each call, the tool's answer is
    appended, and the row goes on; a row without room for more than the answer ends with its call.
    """
    rows = list(range(len(ids)))
    if tool is None:
        return go_on(rows, list(ids), [])
    call, *more = tokenizer.encode(tool.end, add_special_tokens=False)
    if more:
        raise InputError(f"the tokenizer must read {tool.end!r}, the end of a call, as one token.")
    starts, turn = list(ids), 0
    parts: list[list[Completed]] = [[] for _ in ids]
    while rows:
        going = []
        for r, one in zip(rows, go_on(rows, [starts[r] for r in rows], [call]), strict=True):
            written = [one._replace(turn_ids=torch.full((len(one.tokens),), turn))]
            if one.tokens[-1] == call:
                text = tool.answer(texts[r], decode(tokenizer, one.tokens))
                answer = tokenizer.encode(text, add_special_tokens=False)
                if len(starts[r]) + len(one.tokens) + len(answer) < len(ids[r]) + limit:
                    written.append(_of_tool(answer))
                    going.append(r)
            parts[r] += written
            starts[r] = [*starts[r], *(token for part in written for token in part.tokens)]
        rows, turn = going, turn + 1
    return [_join(row) for row in parts]


def _of_tool(tokens: list[int]) -> Completed:
    """Tokens that a tool wrote: each is drawn from itself alone."""
    support = torch.tensor(tokens, dtype=torch.int32), torch.arange(len(tokens) + 1)
    return Completed(tokens, torch.zeros(len(tokens)), support, torch.full((len(tokens),), -1))


def _join(parts: list[Completed]) -> Completed:
    """The turns of a completion, and the tool's answers, as one completion."""
    support = None
    if parts[0].support is not None:
        pairs = [part.support for part in parts if part.support is not None]
        sizes = torch.cat([offsets.diff() for _, offsets in pairs])
        offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
        support = torch.cat([kept for kept, _ in pairs]), offsets
    return Completed(
        [token for part in parts for token in part.tokens],
        torch.cat([part.logp for part in parts]),
        support,
        torch.cat([part.turn_ids for part in parts if part.turn_ids is not None]),
    )


def complete(
    model: PreTrainedModel,
    ids: Sequence[list[int]],
    uniforms: Tensor,
    ends: list[int],
    rule: Rule,
    batch_tokens: int,
    *,
    supports: bool = False,
    written: Sequence[int] = (),
) -> list[Completed]:
    """One completion of each prompt, as in `sample`. supports: record the support of each token, if
    the rule leaves out some tokens. written: the number of tokens of the completion that the end of
    each prompt already holds, if any; the next token is drawn with the next column of `uniforms`.
    """
    # The longest prompts come first, and rows of one prompt are adjacent.
    first = {tuple(prompt): row for row, prompt in reversed(list(enumerate(ids)))}
    order = sorted(range(len(ids)), key=lambda row: (-len(ids[row]), first[tuple(ids[row])]))
    completions: dict[int, Completed] = {}
    begin = torch.tensor(written or [0] * len(ids), dtype=torch.int64)
    with measuring(model):
        while order:
            size = max(1, batch_tokens // (len(ids[order[0]]) + uniforms.shape[1]))
            rows, order = order[:size], order[size:]
            kept, prompts = Kept(len(rows)) if supports else None, [ids[r] for r in rows]
            columns = uniforms[rows], begin[rows]
            tokens, logp = _complete_batch(model, prompts, *columns, ends, rule, kept)
            tokens, logp = tokens.cpu(), logp.cpu()
            if not torch.isfinite(logp).all():
                raise InputError("the model gave NaN or infinite logits; are its weights finite?")
            pairs = [None] * len(rows) if kept is None else kept.pairs()
            for i, (r, row, support) in enumerate(zip(rows, tokens.tolist(), pairs, strict=True)):
                n = len(row) - row.count(-1)
                kept_ids = support and first_tokens(support, n)
                completions[r] = Completed(row[:n], logp[i, :n].clone(), kept_ids)
    return [completions[r] for r in range(len(ids))]


def _complete_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniforms: Tensor,
    column: Tensor,
    ends: list[int],
    rule: Rule,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[B, T]` (-1 after the end) and log-probs `[B, T]` of one batch.
    A row that ends leaves batch and cache. column: of the first of the `uniforms` to use, `[B]`.
    kept: collects the support of each token.
    """
    device, (rows, limit), width = model.device, uniforms.shape, max(map(len, prompts))
    uniforms, column = uniforms.to(device), column.to(device)
    stops = torch.tensor(ends, dtype=torch.int64, device=device)
    from transformers import DynamicCache  # slow to import, and a command's help must be fast

    cache = DynamicCache(config=model.config)
    logits, mask, position = _prefill(model, cache, prompts, limit)
    tokens = torch.full((rows, limit), -1, dtype=torch.int64, device=device)
    logps = torch.zeros((rows, limit), device=device)
    alive = torch.arange(rows, device=device)
    for t in range(limit):
        token, logp, support = draw(logits, uniforms[alive, column[alive] + t], rule)
        tokens[alive, t], logps[alive, t] = token, logp.float()
        if kept is not None and support is not None:
            kept.add(alive, support)
        # The host waits only for the size of `going`.
        cut = column[alive] + t + 1 == limit
        going = (~torch.isin(token, stops) & ~cut).nonzero().squeeze(-1)
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
    """Run each *distinct* prompt once; then copy the result for each of its rows:
    next logits `[B, V]`, mask, last position `[B]`.

    Padding is on the left, so that every row's next token is in the last column. The mask
    `[B, P + limit]` already covers future tokens; it is None when no row is padded, which lets the
    model take its faster path.
    """
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, distinct))
    # Padding is masked, so any valid id will do.
    padded = torch.tensor(
        [[*repeat(0, width - len(prompt)), *prompt] for prompt in distinct], device=model.device
    )
    lengths = torch.tensor([[len(prompt)] for prompt in distinct], device=model.device)
    padding = width - lengths
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
    """Run the model on `ids` `[B, n]` after the tokens in the cache (`mask` covers cache and ids);
    returns the logits `[B, V]` after the last id.
    """
    out = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    # Without a cache, the model would read each token as the first.
    if getattr(out, "past_key_values", None) is None:
        raise InputError(f"{type(model).__name__} keeps no past_key_values; sampling needs them.")
    logits: Tensor = out.logits[:, -1]
    return logits
