"""The elementwise loss: `policy_loss(ppo_dual_clip)` with all its metrics, the basic ones and none,
forward and backward, against peers.

    python -m benchmarks.loss --device cpu|cuda [--peers peers]
        [--out benchmarks/results/loss_cpu.json]

Every provider is first checked against a float64 formula written out here. Then they are timed
interleaved, eager and compiled; peak extra memory is measured apart; last, the cost from 10⁴ to 10⁷
tokens. Figures are ratios within one run, with their targets.
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
from benchmarks.head_targets import target
from policyloss.compiled import compiled_loss

SHAPES = {"cpu": (64, 2048), "cuda": (512, 8192)}
FUSED, DIRECT, COATI = "policyloss, compiled_loss", "policyloss, value_and_gradient", "coati's form"
# By the level of their metrics: the default path, and the same operation by operation.
LEVELS = {"all": "policyloss", "basic": "policyloss, basic", "none": "policyloss, no metrics"}
EAGER = {"all": "eager", "basic": "eager, basic metrics", "none": "eager, no metrics"}
BY_OPERATIONS = {level: f"{name}, operation by operation" for level, name in LEVELS.items()}
REPEATS = 5  # calls of each provider per round, each timed: a single call would have cold caches
PEERS = ("verl", "openrlhf", COATI)
# Returns the loss and all metrics of the provider, so that a compiler cannot drop the metrics.
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


def coati_reference(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """ColossalChat's loss in float64: no dual bound, and the mean of each row's mean."""
    ratio, a = (logp.double() - old.double()).exp(), advantages.double()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    return torch.stack(
        [row[valid].mean() for row, valid in zip(loss, mask.bool(), strict=True)]
    ).mean()


def coati_form(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
    """ColossalChat's formula and its one metric, written out because its package cannot be
    installed together with this one.
    """
    ratio = ((logp - old) * mask).exp()
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    rows = (loss * mask).sum(1) / (mask.sum(1) + 1e-8)
    return rows.mean(), ratio.detach().max()


SPEC = pl.preset("ppo_dual_clip")


def ours(level: Any, by_operations: bool = False) -> Loss:
    """Our loss with the metrics of a level: on a GPU by two kernels, unless `by_operations`."""

    def loss(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Any]:
        if by_operations:
            with pl.unfused():
                out = pl.policy_loss(SPEC, logp, old, advantages, mask, metrics=level)
        else:
            out = pl.policy_loss(SPEC, logp, old, advantages, mask, metrics=level)
        return out.loss, out.metrics

    return loss


_COMPILED = compiled_loss(SPEC)


def ours_compiled(
    logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
) -> tuple[Tensor, Any]:
    """The same, fused."""
    out = _COMPILED(logp, old, advantages, mask)
    return out.loss, out.metrics


def direct_step(data: tuple[Tensor, Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """Loss, all metrics and the gradient, without autograd."""

    def step() -> Tensor:
        out, gradients = _COMPILED.value_and_gradient(*data)
        data[0].grad = gradients.logp
        return out.loss

    return step


def losses(folder: Path) -> dict[str, Loss]:
    """Ours, and each peer that can be loaded and computes the same thing with its usual metrics."""
    found: dict[str, Loss] = {name: ours(level) for level, name in LEVELS.items()}
    verl = peers.verl_policy_loss(folder)
    if verl is not None:
        found["verl"] = lambda lp, old, a, m: _parts(
            verl(old, lp, a, m, cliprange=0.2, clip_ratio_c=3.0)
        )
    openrlhf = peers.openrlhf_policy_loss(folder)
    if openrlhf is not None:
        module = openrlhf(clip_eps_low=0.2, clip_eps_high=0.2, dual_clip=3.0)
        found["openrlhf"] = lambda lp, old, a, m: _parts(module(lp, old, a, action_mask=m))
    return {**found, COATI: coati_form}


def _parts(result: Any) -> tuple[Tensor, Any]:
    return result[0], result[1:]


def steps(
    found: dict[str, Loss], data: tuple[Tensor, Tensor, Tensor, Tensor]
) -> dict[str, Callable[[], Tensor]]:
    """One forward and backward per call."""

    def make(loss: Loss) -> Callable[[], Tensor]:
        def step() -> Tensor:
            data[0].grad = None
            value, _ = loss(*data)
            value.backward()  # type: ignore[no-untyped-call]
            return value

        return step

    return {name: make(loss) for name, loss in found.items()}


def check(
    providers: dict[str, Callable[[], Tensor]], data: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """No figure without the right answer: loss and gradient of every provider against float64.

    A provider that fails to run is removed from `providers`.
    """
    logp, old, advantages, mask = data
    wide = logp.detach().double().requires_grad_()
    ratio = (wide.detach() - old.double()).exp()
    # At a bound float32 may round a ratio to the other side, where the slope differs: one token in
    # millions.
    clear = torch.stack([(ratio - bound).abs() > 1e-5 for bound in (0.8, 1.2, 3.0)]).all(0)
    wanted = {}
    for formula in (reference, coati_reference):
        loss = formula(wide, old, advantages, mask)
        wanted[formula] = loss.detach(), torch.autograd.grad(loss, wide)[0]
    for name, step in list(providers.items()):
        print(f"  checking {name}", flush=True)
        expected, gradient = wanted[coati_reference if name.startswith(COATI) else reference]
        try:
            value = step().double()
        except Exception as error:  # a failing compiler must not stop the other measurements
            print(f"  {name} is left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
            del providers[name]
            continue
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        assert logp.grad is not None
        torch.testing.assert_close(logp.grad.double()[clear], gradient[clear], rtol=1e-5, atol=1e-9)


def scaling(found: dict[str, Loss], device: str, most: int) -> list[dict[str, float]]:
    """Nanoseconds per token of every eager provider, from 10⁴ tokens up."""
    rows = []
    tokens = 10_000
    while tokens <= most:
        data = batch(tokens // 1000, 1000, device)
        times = time_interleaved(steps(found, data), 5, device, warmup=2)
        rows.append(
            {
                "tokens": float(tokens),
                **{name: t["median_ms"] * 1e6 / tokens for name, t in times.items()},
            }
        )
        tokens *= 10
    return rows


def targets(
    times: dict[str, dict[str, float]], memory: dict[str, int], device: str
) -> list[dict[str, Any]]:
    """T8 and T14 on a GPU, C2 on a CPU: the results of the run and their targets."""
    peers_here = [name for name in PEERS if name in times]

    def faster(name: str, others: list[str]) -> float | None:
        """How many times faster than the fastest of the others; None if one was not timed."""
        ms = [times[other]["median_ms"] for other in others if other in times]
        return min(ms) / times[name]["median_ms"] if ms and name in times else None

    if device == "cuda":
        lines = []
        for name, how in ((FUSED, "with backward()"), (DIRECT, "value_and_gradient")):
            eager, compiled = faster(name, ["verl"]), faster(name, ["verl, torch.compile"])
            lines += [
                target("T8", f"{how}: times faster than verl's eager function", ">=", 10, eager),
                target(
                    "T8",
                    f"{how}: times faster than verl's function under torch.compile",
                    ">=",
                    3,
                    compiled,
                ),
                target(
                    "T8",
                    f"{how}: milliseconds",
                    "<=",
                    0.17,
                    times[name]["median_ms"] if name in times else None,
                    0.05,
                ),
            ]
        return lines + _eager_targets(faster, peers_here)
    least = min((memory[name] for name in peers_here), default=None)
    lines = [
        target(
            "C2",
            "compiled_loss: times faster than the fastest eager peer",
            ">=",
            1,
            faster(FUSED, peers_here),
            3,
        )
    ]
    # coati's form has one metric, so the fair comparison is a level of few or no metrics.
    lines += [
        target("C2", f"{how}: times faster than {peer}", ">=", 1, faster(LEVELS[level], [peer]), 3)
        for level, how in EAGER.items()
        for peer in peers_here
        if level == "all" or peer == COATI
    ]
    for name, what in ((FUSED, "compiled_loss"), ("policyloss", "eager")):
        share = memory[name] / least if least else None
        lines.append(
            target("C2", f"{what}: peak memory / the least of the eager peers", "<=", 1, share)
        )
    return lines


def _eager_targets(
    faster: Callable[[str, list[str]], float | None], peers_here: list[str]
) -> list[dict[str, Any]]:
    """T14: a plain call of `policy_loss`, and one under the user's own torch.compile."""
    everything, basic = LEVELS["all"], LEVELS["basic"]
    compiled, theirs = f"{basic}, torch.compile", ["verl, torch.compile"]
    return [
        target(
            "T14",
            "eager, all metrics: times faster than verl's eager function",
            ">=",
            1,
            faster(everything, ["verl"]),
            2,
        ),
        target(
            "T14",
            "eager, basic metrics: times faster than the fastest eager peer",
            ">=",
            1,
            faster(basic, peers_here),
        ),
        target(
            "T14",
            "torch.compile, basic metrics: times faster than verl's function under torch.compile",
            ">=",
            1,
            faster(compiled, theirs),
        ),
    ]


def show(times: dict[str, dict[str, float]], memory: dict[str, int]) -> str:
    """A line per provider."""
    base = times.get("verl", times["policyloss"])["median_ms"]
    rows = [["provider", "median ms", "p20", "p80", "peak extra MB", "speed / verl eager"]]
    for name, t in times.items():
        numbers = [f"{t[k]:.3f}" for k in ("median_ms", "p20_ms", "p80_ms")]
        held = f"{memory[name] / 1e6:.2f}" if name in memory else "-"
        rows.append(
            [name, *numbers, held, f"{base / t['median_ms']:.2f}x" if "verl" in times else "-"]
        )
    return table(rows)


def show_scaling(rows: list[dict[str, float]], names: list[str]) -> str:
    """Nanoseconds per token, a line per size."""
    heading = ["tokens", *(f"{n}, ns/token" for n in names)]
    return table(
        [heading, *([f"{r['tokens']:.0e}", *(f"{r[n]:.1f}" for n in names)] for r in rows)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--peers", type=Path, default=Path("peers"), help="folder of unpacked peer packages"
    )
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, help="64 on a CPU, 512 on a GPU, if not given")
    parser.add_argument("--width", type=int, help="2048 on a CPU, 8192 on a GPU, if not given")
    parser.add_argument(
        "--most", type=int, default=10_000_000, help="largest token count of the scaling run"
    )
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads; torch's default if not given"
    )
    parser.add_argument(
        "--out", type=Path, help="benchmarks/results/loss_<device>.json if not given"
    )
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rows, width = args.rows or SHAPES[args.device][0], args.width or SHAPES[args.device][1]
    out = args.out or Path(f"benchmarks/results/loss_{args.device}.json")
    data = batch(rows, width, args.device)
    found = losses(args.peers)
    print(f"checking and timing {', '.join(found)}; compiling each once …", flush=True)
    print(pl.explain_path(SPEC, *data), flush=True)
    compiled = {
        f"{name}, torch.compile": torch.compile(loss, fullgraph=True)
        for name, loss in found.items()
        if name != LEVELS["none"]
    }
    plain = {name: ours(level, True) for level, name in BY_OPERATIONS.items()}
    plain = plain if args.device == "cuda" else {}  # where "policyloss" means another provider
    providers = {
        **steps({**found, **plain, FUSED: ours_compiled, **compiled}, data),
        DIRECT: direct_step(data),
    }
    check(providers, data)
    times = time_interleaved(providers, args.rounds, args.device, warmup=5, repeats=REPEATS)
    # On a CPU, the profiler misses some of the memory that torch.compile saves for its backward.
    kept = [*found, FUSED] if args.device == "cpu" else list(providers)
    measured = [name for name in kept if name in providers]
    memory = {name: peak_extra_bytes(providers[name], args.device) for name in measured}
    print(show(times, memory))
    scale = scaling(found, args.device, args.most)
    print(show_scaling(scale, list(found)))
    reached = targets(times, memory, args.device)
    print(
        table(
            [["target", "what", "reach", "measured"]]
            + [[str(t[k]) for k in ("id", "what", "reach", "measured")] for t in reached]
        )
    )
    result: dict[str, Any] = {
        "environment": environment(),
        "shape": [rows, width],
        "times": times,
        "targets": reached,
    }
    write_json(out, {**result, "peak_extra_bytes": memory, "scaling": scale})
    print(f"written to {out}")


if __name__ == "__main__":
    main()
