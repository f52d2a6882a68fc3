"""The inputs of the benchmark of the plan "sparse", and the measurement of one of them.

Every row of logits of a made-up policy has one likely token, more or less sure, above a tail of
Zipf's law.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import head_providers
from benchmarks.harness import kernel_ms, peak_extra_bytes, time_interleaved
from benchmarks.head_data import Case, Shape, Statistics

SPREADS = (0.02, 0.06, 0.08, 0.1, 0.12, 0.13, 0.14, 0.16, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
PLANS: dict[str, Any] = {
    "one_pass": "one_pass",
    "sparse, eps 1e-3": pl.Plan("sparse", eps=1e-3),
    "sparse, eps 1e-4": pl.Plan("sparse", eps=1e-4),
}
FLOOR = "three bare matmuls"
SAMPLE = 4096  # rows that the entropies are fitted on


def fit_sureness(towards: Tensor, across: Tensor, draws: Tensor, goal: Sequence[float]) -> Tensor:
    """The strength of each row's likely token, `strength · exp(spread · draws)`, that gives about
    the wanted median and mean of the entropies.

    towards, across: the logits of some rows, of the likely token's direction and of the rest.
    """
    found = []
    for spread in SPREADS:
        sure = (spread * draws).exp()
        low, high = 0.0, 60.0
        for _ in range(10):
            middle = (low + high) / 2
            log_p = (across + middle * sure[: len(across)] * towards).log_softmax(-1)
            entropy = -(log_p.exp() * log_p).sum(-1)
            low, high = (middle, high) if entropy.median() > goal[0] else (low, middle)
        found.append((abs(float(entropy.mean()) - goal[1]), spread, high * sure))
    return min(found, key=lambda x: x[:2])[2]


def make_case(shape: Shape, device: str, goal: Sequence[float]) -> Case:
    """A batch of such a policy. One hidden number carries the logits of the tail."""
    g = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=g)
    n, v, d = shape.tokens, shape.vocabulary, shape.hidden
    weight = draw(v, d).div_(d**0.5)
    weight[:, -1] = -torch.randperm(v, device=device, generator=g).add(1).log()
    centre = weight[torch.randint(v, (n,), device=device, generator=g)]
    rest = draw(n, d)
    centre[:, -1], rest[:, -1] = 0.0, 1.0
    towards, across = (x[:SAMPLE] @ weight.T for x in (centre, rest))
    hidden = fit_sureness(towards, across, draw(n, 1), goal) * centre + rest
    return draw_case(hidden.view(shape.sequences, shape.length, d), weight, g)


def draw_case(hidden: Tensor, weight: Tensor, g: torch.Generator) -> Case:
    """A batch with these hidden states `[B, T, D]` and this head, in bfloat16 on a GPU, and with
    tokens that are drawn from it.
    """
    dtype = torch.bfloat16 if hidden.is_cuda else torch.float32
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    ids, logp, entropy = draw_tokens(hidden.flatten(0, 1), weight, g)
    grid = hidden.shape[:2]
    draw = partial(torch.randn, device=hidden.device, generator=g)
    return Case(
        "dense",
        hidden.requires_grad_(),
        weight.requires_grad_(),
        ids.view(grid),
        (logp - 0.1 * draw(len(logp))).view(grid),
        draw(grid[0]),
        torch.ones(grid, dtype=torch.bool, device=hidden.device),
        Statistics(logp, entropy, entropy),
    )


def draw_tokens(hidden: Tensor, weight: Tensor, g: torch.Generator) -> tuple[Tensor, ...]:
    """Tokens drawn from the policy, with the logp and the entropy of each row."""
    parts = []
    for start in range(0, hidden.shape[0], 1024):
        rows = hidden[start : start + 1024]
        log_p = (rows.float() @ weight.float().T).log_softmax(-1)
        p = log_p.exp()
        ids = torch.multinomial(p, 1, generator=g)
        parts.append((ids[:, 0], log_p.gather(1, ids)[:, 0], -(p * log_p).sum(-1)))
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def run_plan(case: Case, plan: Any) -> tuple[Any, Tensor, Tensor]:
    """The output of the loss, and the gradients of hidden states and weight."""
    tensors = (case.hidden, case.weight, case.ids, case.old_logp, case.advantages, case.mask)
    out = pl.linear_policy_loss(pl.preset("ppo_dual_clip"), *tensors, plan=plan)
    d_hidden, d_weight = torch.autograd.grad(out.loss, (case.hidden, case.weight))
    return out, d_hidden, d_weight


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """The entropies of the batch, and one row for each plan.

    Loss and log-probabilities must equal those of "one_pass" before anything is timed. errors: the
    distance of the gradients of hidden states and weight from those of "one_pass". beyond_gib:
    memory beyond one window of logits and the gradient of the weight.
    """
    device, entropy = case.device, case.statistics.entropy
    full, *exact = run_plan(case, "one_pass")
    found: list[dict[str, Any]] = []
    for name, plan in PLANS.items():
        out, *gradients = run_plan(case, plan)
        if not torch.equal(out.loss, full.loss) or not torch.equal(out.logp, full.logp):
            raise SystemExit(f"{name}: loss or logp differ from one_pass; not timed.")
        errors = [
            float((a - b).float().norm() / b.float().norm())
            for a, b in zip(gradients, exact, strict=True)
        ]
        metrics = {k: v for k, v in out.metrics.compute().items() if k.startswith("sparse_")}
        found.append({"plan": name, "errors": errors, **metrics})
    del full, exact, out, gradients
    calls: dict[str, Any] = {name: partial(run_plan, case, plan) for name, plan in PLANS.items()}
    calls[FLOOR] = head_providers.three_matmuls(case, Path())
    timed = time_interleaved(calls, rounds, device) if device == "cuda" else {}
    times = {name: timed[name]["median_ms"] for name in timed} or processor_ms(calls, rounds)
    floor = calls.pop(FLOOR)
    of_floor = kernel_ms(floor, device)
    del floor
    for row in found:
        name = row["plan"]
        row["ms"] = times[name]
        row["of_three_matmuls"] = row["ms"] / times[FLOOR]
        kernels = kernel_ms(calls[name], device)
        row["kernels_of_three_matmuls"] = kernels and of_floor and kernels / of_floor
        extra = peak_extra_bytes(calls[name], device)
        row["extra_gib"] = extra / 2**30
        row["beyond_gib"] = (extra - window_and_gradient_bytes(case, PLANS[name])) / 2**30
    return {
        "shape": [*case.hidden.shape[:2], *case.weight.shape],
        "entropy": {"median": float(entropy.median()), "mean": float(entropy.mean())},
        "rows": found,
    }


def processor_ms(calls: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Milliseconds of processor time of each call, the median of rounds after a first one.

    A machine that does other work at the same time slows a call down, but hardly changes this.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.process_time()
            call()
            samples[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(x[1:]) for name, x in samples.items()}


def window_and_gradient_bytes(case: Case, plan: Any) -> int:
    """The bytes of one window of float32 logits, and of the gradient of the weight."""
    tensors = (case.hidden, case.weight, case.ids, case.old_logp, case.advantages, case.mask)
    rows = pl.explain_plan(pl.preset("ppo_dual_clip"), *tensors, plan=plan).rows
    window = min(rows, case.ids.numel()) * case.weight.shape[0] * 4
    return window + case.weight.numel() * case.weight.element_size()
