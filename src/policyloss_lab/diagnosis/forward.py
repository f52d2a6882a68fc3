"""Runs the trainer's model on some sequences, unchanged or with one change."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

LOGIT_BYTES = 2**28  # logits in memory: 1,024 tokens of a vocabulary of 65,536
BATCH_TOKENS = 8192  # tokens of one forward, padding included


@dataclass(frozen=True)
class Scorer:
    """A model and the sequences that it scores.

    prompts, completions: the token ids of each row. scored: `[n, 2]`, the row of each scored token
    and its index in the completion, row by row.
    """

    model: Any
    prompts: Sequence[list[int]]
    completions: Sequence[list[int]]
    scored: Tensor
    ids: Tensor
    cache: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def logits(self) -> Tensor:
        """`[n, V]` float32: the logits of every scored token."""
        return self.forward()

    @cached_property
    def logp(self) -> Tensor:
        """`[n]` float64: the log-probability of every scored token."""
        return self.of_ids(self.logits)

    def of_ids(self, logits: Tensor) -> Tensor:
        """The log-probabilities of the scored tokens under these logits."""
        return logits.gather(1, self.ids[:, None])[:, 0].double() - logits.double().logsumexp(1)

    def effect(self, name: str, logits: Callable[[], Tensor]) -> Tensor:
        """The change of the log-probabilities under other logits, `[n]`; cached by name."""
        if name not in self.cache:
            self.cache[name] = self.of_ids(logits()) - self.logp
        return self.cache[name]

    def half_precision(self, part: str) -> Tensor:
        """`[n]`: the effect of rounding the model to bf16 and running it in bf16 ("bf16"), or the
        effect of the arithmetic alone, with rounded weights on both sides ("bf16 noise").
        """
        if part not in self.cache:
            half = self.with_model(copy.deepcopy(self.model).bfloat16())
            logp = half.of_ids(half.forward())
            self.cache["bf16"] = logp - self.logp
            self.cache["bf16 noise"] = logp - self.with_model(half.model.float()).logp
        return self.cache[part]

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return getattr(self.model, "config", None)

    def with_model(self, model: Any) -> Scorer:
        """The same sequences and another model."""
        return replace(self, model=model, cache={})

    def select(self, chosen: Tensor) -> Scorer:
        """Some of the tokens, with their cached effects."""
        part = replace(
            self,
            scored=self.scored[chosen],
            ids=self.ids[chosen],
            cache={name: x[chosen] for name, x in self.cache.items()},
        )
        vars(part)["logits"] = self.logits[chosen]
        return part

    def forward(
        self,
        prompts: Sequence[list[int]] | None = None,
        *,
        padding: str = "right",
        positions: bool = True,
        attend_padding: bool = False,
        train: bool = False,
        window: int | None = None,
        cached: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`[n, V]` float32 logits.

        prompts: used instead of the prompts of all rows. padding: the padded side, "left" or
        "right". positions: whether position ids skip padding. attend_padding: omit the attention
        mask. train: run the model in training mode, with dropout. window: the number of tokens that
        every layer attends to. cached: a change of keys and values, as a cache makes it.
        """
        model = self.model
        device = next(model.parameters()).device
        starts = prompts or self.prompts
        rows = [[*p, *c] for p, c in zip(starts, self.completions, strict=True)]
        where = self.scored[:, 1] - 1 + torch.tensor([len(p) for p in starts])[self.scored[:, 0]]
        longest = max(map(len, rows))
        out: list[Tensor] = []
        was_training = model.training
        model.train(train)
        try:
            for batch in _batches([len(row) for row in rows], self.scored[:, 0]):
                width = longest if padding == "left" else max(len(rows[i]) for i in batch)
                ids, mask, position = _pad_rows([rows[i] for i in batch], width, padding, device)
                arguments: dict[str, Any] = {"attention_mask": mask, "position_ids": position}
                if attend_padding:
                    del arguments["attention_mask"]
                if not positions:
                    arguments["position_ids"] = torch.arange(width, device=device).expand(ids.shape)
                if window is not None:
                    arguments["attention_mask"] = _window(len(batch), width, window, model)
                if cached is not None:
                    arguments["past_key_values"] = _changing_cache(cached)
                with torch.no_grad():
                    logits = model(input_ids=ids, **arguments, use_cache=cached is not None).logits
                for k, i in enumerate(batch):
                    shift = width - len(rows[i]) if padding == "left" else 0
                    places = where[self.scored[:, 0] == i] + shift
                    out.append(logits[k, places.to(device)].float().cpu())
        finally:
            model.train(was_training)
        return torch.cat(out)


def _batches(lengths: list[int], row_of_token: Tensor) -> Iterator[list[int]]:
    """Rows with a scored token, in order, a bounded number of tokens at a time."""
    batch: list[int] = []
    for i in torch.unique_consecutive(row_of_token).tolist():
        if batch and (len(batch) + 1) * max(lengths[j] for j in (*batch, i)) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _pad_rows(
    rows: list[list[int]], width: int, side: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention mask and positions, `[B, T]` each."""
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for k, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[k, place] = torch.tensor(row, dtype=torch.long)
        mask[k, place] = 1
    position = (mask.cumsum(1) - 1).clamp(min=0)
    return ids.to(device), mask.to(device), position.to(device)


def _window(rows: int, width: int, window: int, model: Any) -> Tensor:
    """The mask of scores `[B, 1, T, T]` for rows that are padded on the right."""
    weight = next(model.parameters())
    gap = torch.arange(width, device=weight.device)[:, None] - torch.arange(width).to(weight.device)
    scores = torch.zeros_like(gap, dtype=weight.dtype)
    scores = scores.masked_fill((gap < 0) | (gap >= window), torch.finfo(weight.dtype).min)
    return scores.expand(rows, 1, -1, -1)


def _changing_cache(change: Callable[[Tensor], Tensor]) -> Any:
    """A cache of transformers that changes keys and values before they are used."""
    plain: Any = import_module("transformers").DynamicCache

    class Changing(plain):  # type: ignore[misc]
        def update(self, keys: Tensor, values: Tensor, *more: Any, **options: Any) -> Any:
            return super().update(change(keys), change(values), *more, **options)

    return Changing()


@contextmanager
def replace_attributes(owners: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Some attributes replaced: (object, name, value) of each."""
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
    try:
        for owner, name, value in owners:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


@contextmanager
def alter_weights(
    model: nn.Module, change: Callable[[str, Tensor], Tensor | None]
) -> Iterator[None]:
    """The model with some weights replaced: `change(name, weight)` returns them, or None."""
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                new = change(name, weight.detach())
                if new is not None:
                    kept.append((weight, weight.detach().clone()))
                    weight.copy_(new)
        yield
    finally:
        with torch.no_grad():
            for changed, before in kept:
                changed.copy_(before)


def routers(model: nn.Module) -> set[str]:
    """The names of the weights that choose experts."""
    return {
        name
        for name, w in model.named_parameters()
        if w.dim() == 2 and {"gate", "router"} & set(name.split("."))
    }
