"""Masked GAE: the scan of `policyloss.gae` against a plain loop over time.

    python -m benchmarks.gae --device cpu|cuda [--rows 64] [--width 2048] [--rounds 15]
        [--threads N] [--out FILE]

The loop is the form that verl, OpenRLHF and TRL's PPO use: one step per token position, all rows at
once, masked tokens carried over. Each case is first checked against that loop in float64; then both
are timed interleaved. Figures are ratios within one run, with their targets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks.harness import Provider, environment, table, time_interleaved, write_json
from benchmarks.head_targets import target

WIDTHS = {"cpu": 2048, "cuda": 8192}
LOOP, LOOP_ROUNDS = "loop over time", 5  # a second per call on a GPU
REPEATS = 10  # of ours per round
GAMMA, LAM = 0.99, 0.95


@dataclass(frozen=True)
class Case:
    """Padded `[B, T]` inputs; `tokens` selects the tokens of the pack (None: a padded batch)."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    tokens: Tensor | None = None

    def astype(self, dtype: torch.dtype) -> Case:
        """The same numbers in another precision."""
        return Case(self.rewards.to(dtype), self.values.to(dtype), self.mask, self.tokens)


def cases(rows: int, width: int, device: str) -> dict[str, Case]:
    """Ragged rows; the same with tool output in the middle (masked spans to bridge);
    the ragged rows as one pack.
    """
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(rows, width, generator=generator).to(device) for _ in range(2))
    lengths = torch.randint(width // 8, width + 1, (rows, 1), generator=generator).to(device)
    position = torch.arange(width, device=device)
    inside = position < lengths
    turns = inside & (position // 64 % 3 != 1)
    return {
        "padded": Case(rewards, values, inside),
        "padded, multi-turn": Case(rewards, values, turns),
        "packed": Case(rewards, values, inside, tokens=inside),
    }


def loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns, one time step after the other, from the end."""
    keep = mask.to(values.dtype)
    advantage = next_value = torch.zeros_like(values[:, 0])
    steps = []
    for t in reversed(range(values.shape[1])):
        m = keep[:, t]
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        advantage = m * (delta + GAMMA * LAM * advantage) + (1 - m) * advantage
        next_value = m * values[:, t] + (1 - m) * next_value
        steps.append(advantage)
    advantages = torch.stack(steps[::-1], dim=1) * keep
    return advantages, advantages + values * keep


def providers(case: Case) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """Ours and the loop, on the same tokens; for a pack,
    the loop's figure includes the padding and unpadding it needs.
    """
    if case.tokens is None:
        return {
            "policyloss": lambda: pl.gae(case.rewards, case.values, case.mask, GAMMA, LAM),
            LOOP: lambda: loop(case.rewards, case.values, case.mask),
        }
    where = case.tokens
    rewards, values, mask = case.rewards[where], case.values[where], case.mask[where]
    cu_seqlens = torch.nn.functional.pad(where.sum(1).cumsum(0), (1, 0))

    def padded_loop() -> tuple[Tensor, Tensor]:
        r, v, m = (
            torch.zeros(where.shape, dtype=x.dtype, device=x.device)
            for x in (rewards, values, mask)
        )
        r[where], v[where], m[where] = rewards, values, mask
        advantages, returns = loop(r, v, m)
        return advantages[where], returns[where]

    return {
        "policyloss": lambda: pl.gae(rewards, values, mask, GAMMA, LAM, cu_seqlens=cu_seqlens),
        LOOP: padded_loop,
    }


def check(case: Case) -> dict[str, float]:
    """The largest difference from the float64 loop, in float64 and in float32;
    raise if it is more than rounding.
    """
    exact = providers(case.astype(torch.float64))[LOOP]()
    errors = {}
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        ours = providers(case.astype(dtype))["policyloss"]()
        error = max((a.double() - b).abs().max().item() for a, b in zip(ours, exact, strict=True))
        if not error <= limit:
            raise SystemExit(
                f"gae differs from the loop by {error:.1e} in {dtype}, more than {limit:.0e}: not "
                "timed."
            )
        errors[str(dtype).removeprefix("torch.")] = error
    return errors


def targets(ratios: dict[str, float], device: str) -> list[dict[str, Any]]:
    """T9 on a GPU, C3 on a CPU: how many times faster than the loop."""
    name, reach, stretch = ("T9", 5000, 20_000) if device == "cuda" else ("C3", 20, 100)
    return [
        target(name, f"{case}: times faster than the loop", ">=", reach, ratio, stretch)
        for case, ratio in ratios.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, help="2048 on a CPU, 8192 on a GPU, if not given")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads; torch's default if not given"
    )
    parser.add_argument(
        "--out", type=Path, help="benchmarks/results/gae_<device>.json if not given"
    )
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    width = args.width or WIDTHS[args.device]
    out = args.out or Path(f"benchmarks/results/gae_{args.device}.json")
    rows = [["case", "provider", "median ms", "p20", "p80", "loop / ours"]]
    results: dict[str, Any] = {}
    for name, case in cases(args.rows, width, args.device).items():
        errors = check(case)
        found: dict[str, Provider] = dict(providers(case))
        times = time_interleaved(
            found, args.rounds, args.device, warmup=2, few={LOOP: LOOP_ROUNDS}, repeats=REPEATS
        )
        ratio = times[LOOP]["median_ms"] / times["policyloss"]["median_ms"]
        results[name] = {"times": times, "ratio": ratio, "max_error": errors}
        for provider, t in times.items():
            numbers = [f"{t[k]:.3f}" for k in ("median_ms", "p20_ms", "p80_ms")]
            rows.append(
                [name, provider, *numbers, f"{ratio:.0f}x" if provider == "policyloss" else ""]
            )
    print(table(rows))
    reached = targets({name: r["ratio"] for name, r in results.items()}, args.device)
    write_json(
        out,
        {
            "environment": environment(),
            "shape": [args.rows, width],
            "cases": results,
            "targets": reached,
        },
    )
    print(f"written to {out}")


if __name__ == "__main__":
    main()
