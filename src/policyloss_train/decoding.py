"""Tokens sampled from a Hugging Face causal LM, with a key-value cache.

Shapes: B rows of one batch (fewer as rows end), P prompt tokens, T = the most new tokens, L those
of a completion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from policyloss.errors import InputError
from policyloss_train.drawing import Kept, Pair, Rule, draw, first_tokens

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel


class Completed(NamedTuple):
    """The tokens of a completion, with the end token if there was one, and their log-probs `[L]`.

    support: what each token was drawn from; None if that is all tokens, or nobody asked.
    """

    tokens: list[int]
    logp: Tensor
    support: Pair | None = None


def complete(
    model: PreTrainedModel,
    ids: Sequence[list[int]],
    uniforms: Tensor,
    ends: list[int],
    rule: Rule,
    batch_tokens: int,
    *,
    supports: bool = False,
) -> list[Completed]:
    """One completion of each prompt, as `sample` draws them. supports: record what each token was
    drawn from, if the rule leaves out some tokens.
    """
    completions: dict[int, Completed] = {}
    with evaluating(model), torch.no_grad():
        for rows in _batches(ids, uniforms.shape[1], batch_tokens):
            kept, prompts = Kept(len(rows)) if supports else None, [ids[r] for r in rows]
            tokens, logp = _complete(model, prompts, uniforms[rows], ends, rule, kept)
            completions.update(zip(rows, _ragged(tokens, logp, kept), strict=True))
    return [completions[r] for r in range(len(ids))]


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
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniforms: Tensor,
    ends: list[int],
    rule: Rule,
    kept: Kept | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens int64 `[B, T]` (-1 after the end) and log-probs `[B, T]` of one batch.
    A row that ends leaves batch and cache. kept: takes what each token is drawn from.
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
        token, logp, support = draw(logits, uniforms[alive, t], rule)
        tokens[alive, t], logps[alive, t] = token, logp.float()
        if kept is not None and support is not None:
            kept.add(alive, support)
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


def _ragged(tokens: Tensor, logp: Tensor, kept: Kept | None) -> list[Completed]:
    """Each row up to its end, on the CPU."""
    tokens, logp = tokens.cpu(), logp.cpu()
    if not torch.isfinite(logp).all():
        raise InputError(
            "the model gave NaN or infinite logits while sampling; check that its weights are "
            "finite."
        )
    lengths = (tokens >= 0).sum(-1).tolist()
    supports = [None] * len(lengths) if kept is None else kept.pairs()
    return [
        Completed(row[:n], logp[r, :n].clone(), support and first_tokens(support, n))
        for r, (row, n, support) in enumerate(zip(tokens.tolist(), lengths, supports, strict=True))
    ]
