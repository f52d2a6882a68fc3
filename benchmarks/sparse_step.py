"""The whole training step of `benchmarks.step` with the plan "sparse".

A random model's distributions are flat, so each token has a temperature that makes them as sure as
a policy's: medians and means of the entropies are stated. The tokens are random; a gradient costs
the same for every token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import step
from benchmarks.harness import time_interleaved
from benchmarks.sparse_cases import PLANS, SAMPLE, fit_sureness

MODEL, TOKENS = "1.7B", 65_536
GOAL = (0.50, 1.56)  # median and mean of the entropies
COMPARED = ("one_pass", "sparse, eps 1e-3")


@torch.no_grad()
def fit_temperatures(model: Any, batch: step.Batch) -> Tensor:
    """A temperature for each predicted token, `[B, T-1]`."""
    few = -(-SAMPLE // int(batch.mask[0].sum()))
    hidden = model.model(input_ids=batch.ids[:few], use_cache=False).last_hidden_state[:, :-1]
    live = hidden[batch.mask[:few]][:SAMPLE]
    logits = live.float() @ model.lm_head.weight.float().T
    g = torch.Generator(logits.device).manual_seed(0)
    draws = torch.randn(batch.mask.numel(), 1, device=logits.device, generator=g)
    sure = fit_sureness(logits, torch.zeros_like(logits), draws, GOAL)
    return (1 / sure).view(batch.mask.shape)


def run_step(plan: Any, warmth: Tensor, model: Any, batch: step.Batch) -> Tensor:
    """The loss of a batch."""
    return pl.hf.policy_loss(
        model,
        step.SPEC,
        batch.ids,
        old_logp=batch.old_logp,
        advantages=batch.advantages,
        mask=batch.mask,
        temperature=warmth,
        plan=plan,
    ).loss


def gradient(run: Any, model: Any, batch: step.Batch) -> tuple[float, list[Tensor]]:
    """The loss and the gradient of every weight."""
    loss = run(model, batch)
    loss.backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def measure_step(device: str, quick: bool, rounds: int) -> dict[str, Any]:
    """The body alone, "one_pass" and "sparse": times, peaks, and the distance of the gradients."""
    sizes = step.SMALL if quick else step.SIZES[device]
    name, tokens = (next(iter(sizes.models)), sizes.tokens[-1])
    if MODEL in sizes.models:
        name, tokens = MODEL, TOKENS
    model = step.make_model(sizes.models[name], sizes.vocabulary, sizes.length, device)
    batch = step.Batch.of(tokens // sizes.length, sizes.length, sizes.vocabulary, device)
    warmth = fit_temperatures(model, batch)
    with torch.no_grad():
        known = pl.hf.logprobs(model, batch.ids, mask=batch.mask, temperature=warmth, entropy=True)
    batch = replace(batch, old_logp=known.logp)
    assert known.entropy is not None
    entropy = known.entropy[batch.mask]
    runs = {plan: partial(run_step, PLANS[plan], warmth) for plan in COMPARED}
    (loss, exact), (other, drawn) = (gradient(run, model, batch) for run in runs.values())
    if abs(loss - other) > 1e-3:
        raise SystemExit(f"the loss is {loss} with one_pass, {other} with sparse; not timed.")
    apart = sum(float((a - b).float().square().sum()) for a, b in zip(drawn, exact, strict=True))
    length = sum(float(b.float().square().sum()) for b in exact)
    del exact, drawn
    every: dict[str, Any] = {step.BODY: step.body_alone, **runs}
    firsts = {who: step.first_step(run, model, batch) for who, run in every.items()}
    calls = {who: partial(step.forward_backward, run, model, batch) for who, run in every.items()}
    times = time_interleaved(calls, rounds, device, warmup=0)
    body = times[step.BODY]["median_ms"]
    rows = [
        {
            "head": who,
            **times[who],
            "added": times[who]["median_ms"] / body - 1,
            "peak_bytes": first and first.peak_bytes,
        }
        for who, first in firsts.items()
    ]
    for row in rows:
        print(row, flush=True)
    return {
        "model": name,
        "tokens": tokens,
        "entropy": {"median": float(entropy.median()), "mean": float(entropy.mean())},
        "gradient_error": (apart / length) ** 0.5,
        "rows": rows,
    }
