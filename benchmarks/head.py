"""The head: loss and gradients from hidden states, against other projects' heads,
plain PyTorch and the bare matmuls.

    python -m benchmarks.head --device cuda [--peers peers] [--out out/head_cuda.json]
        [--only T1,T6] [--quick]

Every provider is first checked against float64 on the same inputs, with memory poisoned by NaN; a
wrong provider is not timed, and the result gives the reason. Then all are timed interleaved,
forward and backward; peak memory is measured apart. Figures are ratios within one run.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import policyloss as pl
from benchmarks import head_data, head_logits, head_providers
from benchmarks import head_reference as reference
from benchmarks.harness import (
    environment,
    kernel_ms,
    output_bytes,
    peak_extra_bytes,
    table,
    time_interleaved,
    write_json,
)
from benchmarks.head_data import Case, Shape
from benchmarks.head_providers import QUARTER, SPECS, THREE, Entry, Run
from benchmarks.head_targets import Groups, cpu_targets, cuda_targets

SHAPES = {"cuda": Shape(8, 2048, 151936, 4096), "cpu": Shape(4, 128, 32000, 1024)}
QUICK = {"cuda": Shape(8, 512, 50257, 1024), "cpu": Shape(4, 32, 4001, 128)}
SLOW_ROUNDS = 5
BEGIN = time.perf_counter()


def say(text: str) -> None:
    """One line of progress."""
    print(f"[{time.perf_counter() - BEGIN:5.0f} s] {text}", flush=True)


class Bench:
    """One run: the providers that were measured, and the refused ones with the reason."""

    def __init__(self, cases: dict[str, Case], folder: Path, rounds: int) -> None:
        self.cases, self.folder, self.rounds = cases, folder, rounds
        self.device = cases["dense"].device
        self.groups: Groups = {}
        self.failures: list[dict[str, str]] = []

    def run(self, entries: list[Entry]) -> None:
        """Check all, then measure time and memory of those that passed, group by group."""
        for group in dict.fromkeys(entry.group for entry in entries):
            members = [entry for entry in entries if entry.group == group]
            say(f"{group}: checking {len(members)} providers against float64")
            self.groups[group] = {}
            admitted = self.check(members)
            say(f"{group}: timing {len(admitted)}")
            self.measure(group, admitted, {entry.name for entry in members if entry.slow})

    def check(self, entries: list[Entry]) -> dict[str, Run]:
        """The providers that give the right answer, by name, in the order of `entries`."""
        admitted: dict[str, Run] = {}
        for question in dict.fromkeys((entry.case, entry.loss) for entry in entries):
            case, loss = self.cases[question[0]], question[1]
            answer, yardstick = self.answer(case, loss)
            for entry in entries:
                if (entry.case, entry.loss) == question:
                    self.admit(entry, case, answer, yardstick, admitted)
            del answer
            self.clear()
        return {entry.name: admitted[entry.name] for entry in entries if entry.name in admitted}

    def answer(
        self, case: Case, loss: str | None
    ) -> tuple[reference.Exact | None, dict[str, float]]:
        """The float64 answer, and the errors that the plain line in the dtype
        of the inputs makes.
        """
        if loss is None:
            return None, {}
        backward = loss != "forward"
        answer = reference.exact(case, loss) if backward else reference.forward_only(case)
        yardstick = reference.errors(reference.plain_line(case, loss, backward), answer, case)
        self.clear()
        return answer, yardstick

    def admit(
        self,
        entry: Entry,
        case: Case,
        answer: reference.Exact | None,
        yardstick: dict[str, float],
        admitted: dict[str, Run],
    ) -> None:
        """Put the provider among the admitted, or its reason among the failures."""
        record: dict[str, Any] = {"kind": entry.kind, "chunked": entry.chunked, "errors": {}}
        try:
            if entry.plan is not None:
                record["plan"] = _plan(entry, case)
            run = entry.make(case.gathered() if entry.gathered else case, self.folder)
            reason = None
            if answer is not None:
                if entry.kind == "peer":
                    run()  # its kernels may tune themselves on the first call, which does not count
                with reference.poisoned(self.device):
                    result = run()
                skipped = (
                    case.token_advantages.flatten() == 0 if entry.skips_zero_advantage else None
                )
                record["errors"] = reference.errors(result, answer, case, skipped)
                # A head may return an entropy where the plain line has none: its limit is then that
                # of logp.
                known = {"entropy": yardstick.get("logp", 0.0), **yardstick}
                reason = reference.refusal(
                    record["errors"],
                    reference.limits(known, entry.kind == "ours", case.hidden.dtype),
                )
                if entry.kind == "ours":
                    record["same_bits"] = _same_bits(result, run())
                del result
        except Exception as problem:
            reason = f"{type(problem).__name__}: {str(problem)[:600]}"
        if reason is not None:
            gc.collect()  # the frames of a failed call hold its tensors in a cycle
        self.clear()
        if reason is None:
            admitted[entry.name] = run
            self.groups[entry.group][entry.name] = record
            shown = ", ".join(f"{name} {error:.1e}" for name, error in record["errors"].items())
            say(f"  {entry.name}: {shown or 'nothing to check'}")
        else:
            self.failures.append({"group": entry.group, "provider": entry.name, "reason": reason})
            say(f"  {entry.name}: NOT TIMED. {reason}")

    def measure(self, group: str, admitted: dict[str, Run], slow: set[str]) -> None:
        """Times, interleaved; then memory, one by one."""
        if not admitted:
            return
        few = {name: min(SLOW_ROUNDS, self.rounds) for name in slow}
        found = self.groups[group]
        for name, measured in time_interleaved(
            admitted, self.rounds, self.device, warmup=1, few=few
        ).items():
            found[name] |= measured
            found[name]["rounds"] = few.get(name, self.rounds)
        say(f"{group}: memory")
        for name, run in admitted.items():
            peak, outputs = peak_extra_bytes(run, self.device), output_bytes(run)
            found[name] |= {
                "peak_bytes": peak,
                "output_bytes": outputs,
                "extra_bytes": max(0, peak - outputs),
            }
            if group == head_providers.FORWARD and self.device == "cuda":
                found[name]["kernel_ms"] = kernel_ms(run, self.device)
        # A group prints in the order of its providers, not of the checks.
        self.groups[group] = {name: found[name] for name in admitted}

    def clear(self) -> None:
        """Release cached memory."""
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _plan(entry: Entry, case: Case) -> str:
    assert entry.loss is not None
    tensors = (case.hidden, case.weight, case.ids, case.old_logp, case.advantages, case.mask)
    return str(
        pl.explain_plan(
            SPECS[entry.loss],
            *tensors,
            plan=entry.plan or "auto",
            skip_zero_advantage=entry.skips_zero_advantage,
        )
    )


def _same_bits(a: Iterable[object], b: Iterable[object]) -> bool:
    return all(
        x is y
        or (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


def live_share(case: Case) -> float:
    """The share of three matmuls that the rows of a case need: (2·F + 4·ρ) / 6, F the share of
    tokens that count, ρ the share with a gradient.
    """
    counted = case.mask.double().mean().item()
    moved = (case.mask & (case.token_advantages != 0)).double().mean().item()
    return (2 * counted + 4 * moved) / 6


def described(cases: dict[str, Case]) -> dict[str, float]:
    """A description of the inputs."""
    dense = cases["dense"]
    ratio = (dense.statistics.logp - dense.old_logp.flatten()).exp()
    shares = {
        "below_clip": ratio < 1 - head_data.EPS,
        "above_clip": ratio > 1 + head_data.EPS,
        "above_dual": ratio > head_data.DUAL,
    }
    return {
        "mean_entropy": dense.statistics.entropy.mean().item(),
        "mean_logp": dense.statistics.logp.mean().item(),
        **{name: share.double().mean().item() for name, share in shares.items()},
    }


def chosen(device: str, only: set[str], use_peers: bool) -> list[Entry]:
    """The providers of this run."""
    found = [
        e
        for e in head_providers.entries()
        if device in e.devices and (not only or only & set(e.targets))
    ]
    return (
        found
        if use_peers
        else [
            e
            for e in found
            if e.kind != "peer" or e.make in (head_providers.eager, head_providers.eager_forward)
        ]
    )


def report(groups: Groups) -> str:
    """The tables."""
    parts = []
    for group, providers in groups.items():
        floor = providers.get(THREE, {}).get("median_ms") or providers.get(
            head_providers.ONE, {}
        ).get("median_ms")
        rows = [
            [
                group,
                "median ms",
                "p20",
                "p80",
                "/ floor",
                "peak GiB",
                "of it outputs",
                "logp",
                "d hidden",
                "d weight",
            ]
        ]
        for name, p in providers.items():
            times = [f"{p[k]:.2f}" for k in ("median_ms", "p20_ms", "p80_ms")]
            sizes = [
                f"{p[k] / 2**30:.3f}" if k in p else "-" for k in ("peak_bytes", "output_bytes")
            ]
            off = [
                f"{p['errors'][k]:.1e}" if k in p["errors"] else "-"
                for k in ("logp", "d_hidden", "d_weight")
            ]
            rows.append(
                [name, *times, f"{p['median_ms'] / floor:.3f}" if floor else "-", *sizes, *off]
            )
        parts.append(table(rows))
    return "\n\n".join(parts)


def targets_table(targets: list[dict[str, Any]]) -> str:
    """The targets and the results."""
    rows = [["target", "what", "reach", "stretch", "measured", "met"]]
    for t in targets:
        measured = "-" if t["measured"] is None else f"{t['measured']:.4g}"
        stretch = "-" if t["stretch"] is None else f"{t['stretch']:g}"
        met = {None: "-", True: "yes", False: "NO"}[t["met"]]
        rows.append([t["id"], t["what"], f"{t['sense']} {t['reach']:g}", stretch, measured, met])
    return table(rows)


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--peers", type=Path, default=Path("peers"), help="folder of unpacked peer packages"
    )
    parser.add_argument(
        "--no-peers", action="store_true", help="only ours, plain PyTorch and the matmuls"
    )
    parser.add_argument(
        "--only",
        default="",
        help="comma-separated targets, for example T1,T6; everything if not given",
    )
    parser.add_argument("--quick", action="store_true", help="a small shape and three rounds")
    parser.add_argument("--shape", default="", help="sequences,length,vocabulary,hidden")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads; torch's default if not given"
    )
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    args.out = args.out or Path(f"out/head_{args.device}.json")
    args.rounds = args.rounds or (3 if args.quick else 15)
    return args


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; exit status 1 if a provider of ours was refused."""
    args = parsed(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shape = (
        Shape(*map(int, args.shape.split(",")))
        if args.shape
        else (QUICK if args.quick else SHAPES)[args.device]
    )
    only = {name.strip().upper() for name in args.only.split(",") if name.strip()}
    say(
        f"inputs: {shape.tokens} tokens, vocabulary {shape.vocabulary}, hidden size "
        f"{shape.hidden}, on {args.device}"
    )
    cases = head_data.make(shape, args.device)
    inputs = described(cases)
    say(", ".join(f"{name} {value:.3g}" for name, value in inputs.items()))
    bench = Bench(cases, args.peers, args.rounds)
    bench.run(chosen(args.device, only, not args.no_peers))
    if not only or "T7" in only:
        say("from logits")
        found = head_logits.run_logits(
            cases["dense"], None if args.no_peers else args.peers, args.rounds
        )
        bench.groups[head_logits.GROUP] = found.providers
        bench.failures += found.failures
    targets = (
        cuda_targets(bench.groups)
        if args.device == "cuda"
        else cpu_targets(bench.groups, live_share(cases[QUARTER]))
    )
    targets = [t for t in targets if not only or t["id"] in only]
    print(report(bench.groups), targets_table(targets), sep="\n\n")
    for failure in bench.failures:
        print(f"not timed: {failure['provider']} ({failure['group']}): {failure['reason']}")
    result: dict[str, Any] = {
        "environment": environment(),
        "device": args.device,
        "shape": shape._asdict(),
    }
    result |= {
        "dtype": str(cases["dense"].hidden.dtype).removeprefix("torch."),
        "inputs": inputs,
        "rounds": args.rounds,
    }
    write_json(
        args.out, {**result, "groups": bench.groups, "failures": bench.failures, "targets": targets}
    )
    say(f"written to {args.out}")
    return (
        1 if any(failure["provider"].startswith("policyloss") for failure in bench.failures) else 0
    )


if __name__ == "__main__":
    sys.exit(main())
