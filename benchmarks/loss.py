"""The elementwise loss: `policy_loss(ppo_dual_clip)` with all its metrics, forward and backward, against peers.

    python -m benchmarks.loss --device cpu [--peers peers] [--out out/loss.json]

Every provider is first checked against a float64 formula written out here. Then they are timed interleaved, eager and compiled;
peak extra memory is measured apart; last, the cost from 10⁴ to 10⁷ tokens. Figures are ratios within one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import peers
from benchmarks.harness import environment, peak_extra_bytes, table, time_interleaved, write_json

# Returns the loss and everything the provider reports beside it, so that a compiler cannot drop the metrics.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Any]]


def batch(rows: int, width: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp (leaf), old_logp, advantages, mask: ragged rows, ratios on both sides of every bound.

    The mask is float32, as frameworks pass it.
    """
    generator = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(rows, width, generator=generator)
    old = logp + 0.3 * torch.randn(rows, width, generator=generator)
    advantages = torch.randn(rows, width, generator=generator)
    lengths = torch.randint(width // 8, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).float()
    logp, old, advantages, mask = (x.to(device) for x in (logp, old, advantages, mask))
    return logp.requires_grad_(), old, advantages, mask


def reference(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The same loss in float64, as the papers write it."""
    ratio = (logp.double() - old.double()).clamp(-20, 20).exp()
    a = advantages.double()
    clipped = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    loss = torch.where(a < 0, torch.minimum(clipped, -3 * a), clipped)
    return loss[mask.bool()].sum() / mask.sum()


SPEC = pl.preset("ppo_dual_clip")


def ours(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """Our loss with all its metrics."""
    out = pl.policy_loss(SPEC, logp, old, advantages, mask)
    return out.loss, out.metrics


def ours_with_verls_metrics(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """Our loss with the three metrics verl returns; a compiler drops the work of the others."""
    out = pl.policy_loss(SPEC, logp, old, advantages, mask)
    return out.loss, [out.metrics[name] for name in ("clip_fraction", "kl_old_k1", "clip_fraction_dual")]


def losses(folder: Path) -> dict[str, Loss]:
    """Ours, and each peer that can be loaded and computes the same thing with its usual metrics."""
    found: dict[str, Loss] = {"policyloss": ours}
    verl = peers.verl_policy_loss(folder)
    if verl is not None:
        found["verl"] = lambda lp, old, a, m: _parts(verl(old, lp, a, m, cliprange=0.2, clip_ratio_c=3.0))
    openrlhf = peers.openrlhf_policy_loss(folder)
    if openrlhf is not None:
        module = openrlhf(clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0)
        found["openrlhf"] = lambda lp, old, a, m: _parts(module(lp, old, a, action_mask=m))
    return found


def _parts(result: Any) -> tuple[Tensor, Any]:
    return result[0], result[1:]


def steps(found: dict[str, Loss], data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """One forward and backward per call."""

    def make(loss: Loss) -> Callable[[], Tensor]:
        def step() -> Tensor:
            data[0].grad = None
            value, _ = loss(*data)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return step

    return {name: make(loss) for name, loss in found.items()}


def check(providers: dict[str, Callable[[], Tensor]], data: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    """No figure without the right answer: loss and gradient of every provider against float64."""
    logp, old, advantages, mask = data
    wide = logp.detach().double().requires_grad_()
    expected = reference(wide, old, advantages, mask)
    (gradient,) = torch.autograd.grad(expected, wide)
    ratio = (wide.detach() - old.double()).exp()
    # At a bound float32 may round a ratio to the other side, where the slope is another; one token in millions.
    clear = torch.stack([(ratio - bound).abs() > 1e-5 for bound in (0.8, 1.2, 3.0)]).all(0)
    for name, step in providers.items():
        print(f"  checking {name}", flush=True)
        value = step()
        torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-6)
        assert logp.grad is not None
        torch.testing.assert_close(logp.grad.double()[clear], gradient[clear], rtol=1e-5, atol=1e-9)


def scaling(found: dict[str, Loss], device: str, most: int) -> list[dict[str, float]]:
    """Nanoseconds per token of every eager provider, from 10⁴ tokens up."""
    rows = []
    tokens = 10_000
    while tokens <= most:
        data = batch(tokens // 1000, 1000, device)
        times = time_interleaved(steps(found, data), 5, device, warmup=2)
        rows.append({"tokens": float(tokens), **{name: t["median_ms"] * 1e6 / tokens for name, t in times.items()}})
        tokens *= 10
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of unpacked peer packages")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--most", type=int, default=10_000_000, help="largest token count of the scaling run")
    parser.add_argument("--out", type=Path, default=Path("out/loss.json"))
    args = parser.parse_args()
    data = batch(args.rows, args.width, args.device)
    found = losses(args.peers)
    print(f"checking and timing {', '.join(found)}; compiling each once …", flush=True)
    same = {"policyloss with verl's metrics": ours_with_verls_metrics}
    compiled = {f"{name}, compiled": torch.compile(loss, fullgraph=True) for name, loss in {**found, **same}.items()}
    providers = steps({**found, **compiled}, data)
    check(providers, data)
    times = time_interleaved(providers, args.rounds, args.device, warmup=5)
    # Compiled code allocates where the CPU profiler does not see all of it, so memory is measured for eager code only.
    memory = {name: peak_extra_bytes(providers[name], args.device) for name in found}
    base = times["verl"]["median_ms"] if "verl" in times else times["policyloss"]["median_ms"]
    rows = [["provider", "median ms", "p20", "p80", "peak extra MB", "speed / verl eager"]]
    for name, t in times.items():
        ratio = f"{base / t['median_ms']:.2f}x" if "verl" in times else "-"
        numbers = [f"{t[k]:.2f}" for k in ("median_ms", "p20_ms", "p80_ms")]
        rows.append([name, *numbers, f"{memory[name] / 1e6:.2f}" if name in memory else "-", ratio])
    print(table(rows))
    scale = scaling(found, args.device, args.most)
    print(
        table(
            [["tokens", *(f"{n}, ns/token" for n in found)]]
            + [[f"{r['tokens']:.0e}", *(f"{r[n]:.1f}" for n in found)] for r in scale]
        )
    )
    result: dict[str, Any] = {"environment": environment(), "shape": [args.rows, args.width], "times": times}
    write_json(args.out, {**result, "peak_extra_bytes": memory, "scaling": scale})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
