"""Warm-up: a short supervised start, so that the first samples of a fresh model are not noise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import policyloss as pl
from policyloss.errors import InputError
from policyloss_train.models import logit_form, parts
from policyloss_train.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

WARMUP_STEPS = 200  # for the model "tiny" on the task "sort": six seconds of one core
BATCH, LR = 32, 3e-3


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    *,
    steps: int = WARMUP_STEPS,
    seed: int,
    progress: Callable[[int, float], object] | None = None,
) -> None:
    """`steps` AdamW steps on `−mean log p(completion, end | prompt)` of the task's demonstrations,
    in eval mode. Only training prompts are seen. progress: called as `progress(done, loss)`.
    """
    rng = Random(f"warm-up {seed}")
    rows = [example for example in task.train if task.demonstration(example, Random(0)) is not None]
    if not rows:
        raise InputError(
            f"the task {task.name} has no answers to warm up on; train without warm-up "
            "(--warmup-steps 0)."
        )
    device = parts(model)[1].device
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        chosen = rng.sample(rows, min(BATCH, len(rows)))
        texts = [(example.prompt, task.demonstration(example, rng) or "") for example in chosen]
        for group in optimizer.param_groups:
            # The first steps of AdamW are large whatever the gradient.
            group["lr"] = LR * min(1.0, (step + 1) / 10)
        loss = _loss(model, *_tensors(tokenizer, texts, device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress(step + 1, loss.item())
    optimizer.zero_grad()


def _tensors(
    tokenizer: PreTrainedTokenizerBase, texts: list[tuple[str, str]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and targets int64 `[B, T]`, and a mask: True where the target is part of a completion or
    its end token. Padding is on the right, where a causal model needs no attention mask.
    """
    prompts = tokenizer([prompt for prompt, _ in texts])["input_ids"]
    answers = tokenizer([answer for _, answer in texts], add_special_tokens=False)["input_ids"]
    rows = [
        [*prompt, *answer, tokenizer.eos_token_id]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    width = max(map(len, rows))
    ids = torch.tensor(
        [[*row, *[tokenizer.pad_token_id] * (width - len(row))] for row in rows], device=device
    )
    places = torch.arange(width - 1, device=device)
    starts = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=device)
    ends = torch.tensor([[len(row) - 1] for row in rows], device=device)
    return ids[:, :-1], ids[:, 1:], (places >= starts) & (places < ends)


def _loss(model: PreTrainedModel, ids: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """−mean log p(target) where `mask`; a scalar."""
    body, weight, bias = parts(model)
    scale, softcap = logit_form(model)
    hidden = body(input_ids=ids, use_cache=False).last_hidden_state[mask] * scale
    logp = pl.linear_logprobs(hidden, weight, targets[mask], bias, softcap=softcap).logp
    return -logp.mean()
