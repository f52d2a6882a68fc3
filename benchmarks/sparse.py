"""The plan "sparse" against "one_pass" and three bare matmuls, on peaked distributions.

    python -m benchmarks.sparse --device cuda [--out benchmarks/results/sparse.json]

Every row of logits has one likely token, more or less sure, above a tail of Zipf's law. Loss and
log-probabilities must equal those of "one_pass" before anything is timed; the table shows the
distance of the gradients (of hidden states, of the weight) from those of "one_pass".
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import head_providers
from benchmarks.harness import (
    environment,
    kernel_ms,
    peak_extra_bytes,
    table,
    time_interleaved,
    write_json,
)
from benchmarks.head_data import Case, Shape, Statistics

# Median and mean of the entropies of the rows.
POLICIES = ((0.50, 1.56), (0.23, 0.76))
SPREADS = (0.02, 0.06, 0.08, 0.1, 0.12, 0.13, 0.14, 0.16, 0.2, 0.3, 0.4)
SHAPES = {"cuda": Shape(8, 2048, 151936, 4096), "cpu": Shape(4, 128, 16384, 1024)}
PLANS: dict[str, Any] = {
    "one_pass": "one_pass",
    "sparse, eps 1e-3": pl.Plan("sparse", eps=1e-3),
    "sparse, eps 1e-4": pl.Plan("sparse", eps=1e-4),
}
FLOOR = "three bare matmuls"
SAMPLE = 512  # rows that the entropies are fitted on


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
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    ids, logp, entropy = draw_tokens(hidden, weight, g)
    grid = (shape.sequences, shape.length)
    return Case(
        "dense",
        hidden.view(*grid, d).requires_grad_(),
        weight.requires_grad_(),
        ids.view(grid),
        (logp - 0.1 * draw(n)).view(grid),
        draw(shape.sequences),
        torch.ones(grid, dtype=torch.bool, device=device),
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


def measure(case: Case, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row for each plan."""
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
    times = time_interleaved(calls, rounds, device)
    floor = calls.pop(FLOOR)
    of_floor = kernel_ms(floor, device)
    del floor
    for row in found:
        name = row["plan"]
        row["ms"] = times[name]["median_ms"]
        row["of_three_matmuls"] = row["ms"] / times[FLOOR]["median_ms"]
        kernels = kernel_ms(calls[name], device)
        row["kernels_of_three_matmuls"] = kernels and of_floor and kernels / of_floor
        row["extra_gib"] = peak_extra_bytes(calls[name], device) / 2**30
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both policies and print a table of each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(argv)
    results = []
    for goal in POLICIES:
        case = make_case(SHAPES[options.device], options.device, goal)
        entropy = case.statistics.entropy
        of_policy = {"median": float(entropy.median()), "mean": float(entropy.mean())}
        rows = measure(case, options.device, options.rounds)
        results.append({"entropy": of_policy, "rows": rows})
        print("entropies: median {median:.2f}, mean {mean:.2f}".format(**of_policy))
        heads = [
            "plan",
            "ms",
            "/ three matmuls",
            "kernels",
            "GiB",
            "entries",
            "dense rows",
            "error",
        ]
        lines = [heads]
        for r in rows:
            kernels = r["kernels_of_three_matmuls"]
            lines.append(
                [
                    r["plan"],
                    f"{r['ms']:.2f}",
                    f"{r['of_three_matmuls']:.3f}",
                    f"{kernels:.3f}" if kernels else "-",
                    f"{r['extra_gib']:.2f}",
                    f"{r.get('sparse_entries', 0):.1f}",
                    f"{r.get('sparse_dense_rows', 1):.1%}",
                    " ".join(f"{e:.1e}" for e in r["errors"]),
                ]
            )
        print(table(lines), flush=True)
    if options.out is not None:
        write_json(options.out, {"environment": environment(), "results": results})


if __name__ == "__main__":
    main()
