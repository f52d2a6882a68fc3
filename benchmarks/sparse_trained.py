"""A trained model's distributions: the large model of `benchmarks.evidence_large` after a short
training on real text.

The text is Python: a part of the installed torch, which every machine with this benchmark has. A
token is a word, a number, a sign, or the beginning of a line with its spaces; the vocabulary has
the most frequent ones. The model sees its text several times, so it is sure of most tokens of that
text, and less sure of files that it has not seen; both are measured. Its hidden size is small: a
matmul is then cheap beside a pass over the logits. So its hidden states are also measured after
zeros, and its head after random numbers, have filled them up to a larger hidden size, which
changes no logit.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import evidence_large
from benchmarks.evidence_large import Size
from benchmarks.head_data import Case
from benchmarks.sparse_cases import draw_case, measure

TOKEN = re.compile(r" ?[A-Za-z_]\w*| ?\d+|\n *| ?[^\w\s]|\s")


@dataclass(frozen=True)
class Training:
    """Sizes. text_bytes: of the files that the model learns from. sequences, length: of a batch,
    in training and when measured. wide: the hidden size that is filled up.
    """

    size: Size
    text_bytes: int
    sequences: int
    length: int
    wide: int
    rate: float = 1e-3


FULL = Training(replace(evidence_large.FULL, dtype="float32"), 8_000_000, 32, 512, 4096)
QUICK = Training(evidence_large.QUICK, 40_000, 4, 32, 64)


def read_texts(how: Training, device: str) -> tuple[Tensor, Tensor]:
    """The ids of the text to learn, and of other files for as many tokens as are measured."""
    files = sorted(Path(torch.__file__).parent.rglob("*.py"))
    needed = how.sequences * how.length + 1
    words: tuple[list[str], list[str]] = ([], [])
    taken = 0
    for i, path in enumerate(files):
        held_out = i % 3 == 2
        if len(words[1]) >= needed if held_out else taken >= how.text_bytes:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        taken += 0 if held_out else len(text)
        words[held_out].extend(TOKEN.findall(text))
    frequent = Counter(words[0]).most_common(how.size.vocabulary - 1)
    known = {word: i + 1 for i, (word, _) in enumerate(frequent)}
    learned, other = (torch.tensor([known.get(w, 0) for w in x], device=device) for x in words)
    return learned, other


def train_model(how: Training, text: Tensor, seconds: float) -> tuple[Any, dict[str, Any]]:
    """The model after so many seconds of next-token training, and a record of the training."""
    device = text.device.type
    model: Any = evidence_large.make_model(how.size).to(text.device)
    optimizer = torch.optim.AdamW(model.parameters(), how.rate, betas=(0.9, 0.95))
    g = torch.Generator().manual_seed(0)
    losses: list[Tensor] = []
    start = time.monotonic()
    while (spent := time.monotonic() - start) < seconds:
        warm = min(1.0, (len(losses) + 1) / 50)
        optimizer.param_groups[0]["lr"] = how.rate * warm * max(0.05, 1 - spent / seconds)
        places = torch.randint(len(text) - how.length, (how.sequences, 1), generator=g)
        batch = text[(places + torch.arange(how.length)).to(text.device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = -pl.hf.logprobs(model, batch).logp.mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if len(losses) % 20 == 0:  # the clock counts work that is done
            losses[-1].item()
    return model.eval(), {
        "seconds": time.monotonic() - start,
        "steps": len(losses),
        "tokens": len(losses) * how.sequences * how.length,
        "text_tokens": len(text),
        "weights": sum(p.numel() for p in model.parameters()),
        "first_loss": float(losses[0]),
        "last_loss": float(torch.stack(losses[-20:]).mean()),
    }


@torch.no_grad()
def make_case(how: Training, model: Any, text: Tensor, hidden_size: int) -> Case:
    """The model's hidden states of the beginning of `text`, and its head, as a batch."""
    g = torch.Generator(text.device).manual_seed(0)
    ids = text[: how.sequences * how.length].view(how.sequences, how.length)
    with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.float()
    weight = model.lm_head.weight.detach().clone()
    more = hidden_size - hidden.shape[-1]
    noise = torch.randn(len(weight), more, device=text.device, generator=g) / math.sqrt(hidden_size)
    hidden = torch.nn.functional.pad(hidden, (0, more))
    return draw_case(hidden, torch.cat([weight, noise], 1), g)


def measure_trained(device: str, quick: bool, seconds: float, rounds: int) -> dict[str, Any]:
    """Train, and measure on both texts and with both hidden sizes."""
    how = QUICK if quick else FULL
    learned, other = read_texts(how, device)
    model, record = train_model(how, learned, seconds)
    print(record, flush=True)
    cases = []
    for name, text in {"learned text": learned, "other text": other}.items():
        for size in (how.size.hidden, how.wide):
            found = measure(make_case(how, model, text, size), rounds)
            cases.append({"name": f"{name}, hidden size {size}", **found})
    return {"training": record, "cases": cases}
