"""The cost of the same bits: the head and the loss within `pl.exact()` and by default.

`python -m benchmarks.bits --device cuda` (or cpu) first compares bits: a call with all rows, with
the rows in another order, with some of them, with one, and with other windows. Only then both modes
are timed, in turns, and the ratio is printed. `--tile` and `--parts` try other sizes of a tile of
rows and numbers of parts of the vocabulary. Figures go to benchmarks/results/bits_<device>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import policyloss as pl
from benchmarks.harness import environment, peak_extra_bytes, time_interleaved, write_json
from benchmarks.head_data import Case, Shape, make
from benchmarks.head_targets import target
from policyloss.head import tiles

SHAPES = {"cuda": Shape(32, 512, 151_936, 4096), "cpu": Shape(4, 128, 32_000, 1024)}
SPEC = pl.preset("ppo")
RESULTS = Path(__file__).resolve().parent / "results"


class Rows(NamedTuple):
    """Some rows of a case, flat; the first result has the rows of the whole step."""

    hidden: Tensor
    ids: Tensor
    old_logp: Tensor
    advantages: Tensor


def rows_of(case: Case, index: Tensor | slice) -> Rows:
    """The rows of `case` at `index`; the hidden states are a leaf."""
    flat = (case.ids, case.old_logp, case.token_advantages)
    ids, old, advantages = (x.reshape(-1)[index] for x in flat)
    hidden = case.hidden.detach().flatten(0, 1)[index].requires_grad_()
    return Rows(hidden, ids, old, advantages)


Work = Callable[[Rows, Tensor, str | pl.Plan], tuple[Tensor, ...]]


def forward(rows: Rows, weight: Tensor, plan: str | pl.Plan) -> tuple[Tensor, ...]:
    """Log-probabilities and entropies, without a gradient."""
    with torch.no_grad():
        out = pl.linear_logprobs(rows.hidden, weight, rows.ids, entropy=True, plan=plan)
    assert out.entropy is not None
    return out.logp, out.entropy


def loss(rows: Rows, weight: Tensor, plan: str | pl.Plan) -> tuple[Tensor, ...]:
    """Log-probabilities, entropies and the gradient of the hidden states, by head and loss."""
    out = pl.linear_policy_loss(
        SPEC,
        rows.hidden,
        weight,
        rows.ids,
        rows.old_logp,
        rows.advantages.unsqueeze(0),
        torch.ones_like(rows.ids, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, rows.ids.shape[0]], device=rows.ids.device),
        totals=pl.Totals(float(1 << 14), 32),
        plan=plan,
    )
    gradient, _ = torch.autograd.grad(out.loss, (rows.hidden, weight))
    return out.logp, out.entropy, gradient


WORK: dict[str, tuple[Work, str]] = {
    "logp and entropy, forward": (forward, "forward"),
    "loss and gradients, one_pass": (loss, "one_pass"),
    "loss and gradients, recompute": (loss, "recompute"),
}


def wrong_bits(work: Work, name: str, case: Case) -> dict[str, int]:
    """For each other way to call `work`, how many rows have other bits than in one call."""
    n, weight = case.ids.numel(), case.weight
    device = weight.device
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).to(device)
    every = torch.arange(n, device=device)
    expected = [x.clone() for x in work(rows_of(case, every), weight, "auto")]
    calls: dict[str, tuple[Tensor, str | pl.Plan]] = {
        "in another order": (order, "auto"),
        "a third of the rows": (order[: n // 3], "auto"),
        "one row": (order[:1], "auto"),
        "other windows": (every, pl.Plan(name, 1 + n // 5, 0)),
    }
    wrong = {}
    for what, (index, plan) in calls.items():
        results = work(rows_of(case, index), weight, plan)
        differs = torch.zeros(index.shape[0], dtype=torch.bool, device=device)
        for x, e in zip(results, expected, strict=True):
            differs |= (x != e[index]).reshape(index.shape[0], -1).any(-1)
        wrong[what] = int(differs.sum())
    return wrong


def measured(work: Work, name: str, case: Case, rounds: int) -> dict[str, Any]:
    """The bits of both modes, and the time and memory of each."""
    rows = rows_of(case, slice(None))

    def run(on: bool) -> Callable[[], object]:
        def call() -> object:
            with pl.exact(on):
                return work(rows, case.weight, "auto" if name != "recompute" else name)

        return call

    bits = {}
    for on in (False, True):
        with pl.exact(on):
            bits["exact" if on else "default"] = wrong_bits(work, name, case)
    if any(bits["exact"].values()):
        return {"bits": bits}
    providers = {"default": run(False), "exact": run(True)}
    times = time_interleaved(providers, rounds, case.device)
    extra = {mode: peak_extra_bytes(call, case.device) for mode, call in providers.items()}
    ratio = times["exact"]["median_ms"] / times["default"]["median_ms"]
    return {"bits": bits, "times": times, "extra_bytes": extra, "ratio": ratio}


def line(what: str, result: dict[str, Any]) -> str:
    """One result in words."""
    text = f"{what}\n"
    for mode, wrong in result["bits"].items():
        rows = ", ".join(f"{n} ({name})" for name, n in wrong.items())
        text += f"  {mode}: rows with other bits: {rows}\n"
    if "times" not in result:
        return text + "  NOT TIMED: the exact mode does not hold its promise here"
    for mode, t in result["times"].items():
        text += (
            f"  {mode}: {t['median_ms']:.2f} ms ({t['p20_ms']:.2f}–{t['p80_ms']:.2f}), "
            f"{result['extra_bytes'][mode] / 2**20:.0f} MiB\n"
        )
    return text + f"  exact / default: {result['ratio']:.3f}"


def targets(results: dict[str, dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """T15: how much longer a call takes within `exact()`; not measured where bits differ."""
    reach = 1.03 if device == "cuda" else 1.10
    return [
        target("T15", f"{what}: exact / default", "<=", reach, result.get("ratio"), 1.0)
        for what, result in results.items()
    ]


def main(argv: list[str] | None = None) -> int:
    """Print bits and ratios; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", type=int, nargs=4, metavar=("B", "T", "V", "D"))
    parser.add_argument("--tile", type=int, help="rows of a tile")
    parser.add_argument("--parts", type=int, help="parts of the vocabulary, a power of two")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    if options.tile:
        tiles.GPU_ROWS = tiles.CPU_ROWS = options.tile
    if options.parts:
        tiles.PARTS = options.parts
    shape = Shape(*options.shape) if options.shape else SHAPES[options.device]
    case = make(shape, options.device)["dense"]
    results = {}
    for what, (work, name) in WORK.items():
        results[what] = measured(work, name, case, options.rounds)
        print(line(what, results[what]), flush=True)
    rows = tiles.GPU_ROWS if options.device == "cuda" else tiles.CPU_ROWS
    data = {
        "environment": environment(),
        "shape": list(shape),
        "tile": rows,
        "parts": tiles.PARTS,
        "cases": results,
        "targets": targets(results, options.device),
    }
    out = options.out or RESULTS / f"bits_{options.device}.json"
    write_json(out, data)
    print(f"written to {out}")
    return int(any("times" not in result for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
