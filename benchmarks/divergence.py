"""The divergence from a teacher: value and gradients from the hidden states of both models, against
other projects' heads, plain PyTorch and the four bare matmuls.

    python -m benchmarks.divergence --device cuda [--peers peers] [--out out/divergence_cuda.json]
        [--quick] [--rounds 15]

Every provider computes the mean divergence, d hidden and d weight. Each is first checked against
float64 autograd on the same inputs, with memory poisoned by NaN; a wrong provider is not timed, and
the result gives the reason. Then all are timed interleaved. Figures are ratios within one run.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import head_data, peers
from benchmarks import head_reference as reference
from benchmarks.harness import (
    environment,
    output_bytes,
    peak_extra_bytes,
    table,
    time_interleaved,
    write_json,
)
from benchmarks.head import QUICK, SHAPES, say, targets_table
from benchmarks.head_data import Case, Shape, block_rows
from benchmarks.head_targets import Figures, Groups, target

KINDS = {"forward": 0.0, "reverse": 1.0, "jsd": 0.5}
FOUR = "four bare matmuls"
ALONE = "policyloss, linear_divergence"
ONE_PASS = "policyloss, one pass"
WITH_POLICY = "policyloss, one pass with PPO's loss"
TRL, LIGER, EAGER = "TRL, chunked", "Liger, fused linear", "eager PyTorch"
PPO = pl.preset("ppo_dual_clip")
SLOW_ROUNDS = 5


class Result(NamedTuple):
    """The result of a provider: the mean over tokens and its gradients."""

    loss: Tensor
    d_hidden: Tensor
    d_weight: Tensor


Run = Callable[[], Result]
# Our error limits: the rounding of float32 logits for the loss, of bfloat16 for the gradients.
LIMITS = {"loss": 2e-5, "d_hidden": 3e-3, "d_weight": 3e-3}


@dataclass(frozen=True)
class Pair:
    """A student's batch, and a teacher that mostly agrees with it."""

    case: Case
    teacher: pl.Teacher

    @property
    def student(self) -> tuple[Tensor, Tensor]:
        """Hidden states `[N, D]` and weight `[V, D]`, both leaves."""
        return self.case.hidden.flatten(0, 1), self.case.weight


def make_pair(shape: Shape, device: str) -> Pair:
    """A peaked student, and a teacher of its width whose hidden states and weight are moved."""
    case = head_data.make(shape, device)["dense"]
    g = torch.Generator(device).manual_seed(7)

    def moved(x: Tensor, share: float) -> Tensor:
        noise = torch.randn(x.shape, dtype=x.dtype, device=device, generator=g)
        return x.detach() + share * x.detach().float().std().item() * noise

    return Pair(case, pl.Teacher(moved(case.hidden, 0.1), moved(case.weight, 0.05)))


def per_token(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """GKD's divergence of two rows of logits `[R, V]`, as a person would write it."""
    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return beta * (t.exp() * (t - m)).sum(-1) + (1 - beta) * (s.exp() * (s - m)).sum(-1)


def exact(pair: Pair, beta: float) -> Result:
    """The float64 answer by autograd, some rows at a time."""
    x, w = (tensor.detach() for tensor in pair.student)
    w, u = w.double(), pair.teacher.weight.double()
    others = pair.teacher.hidden.flatten(0, 1)
    d_hidden, d_weight = torch.empty_like(x, dtype=torch.float64), torch.zeros_like(w)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    step = max(1, block_rows(w.shape[0], x.device.type) // 4)
    for start in range(0, x.shape[0], step):
        part = slice(start, start + step)
        z = (x[part].double() @ w.T).requires_grad_()
        value = per_token(z, others[part].double() @ u.T, beta).sum() / x.shape[0]
        (dz,) = torch.autograd.grad(value, z)
        total += value.detach()
        d_hidden[part], d_weight = dz @ w, d_weight.addmm_(dz.T, x[part].double())
    return Result(total, d_hidden, d_weight)


def with_policy(pair: Pair, answer: Result) -> Result:
    """The same answer with PPO's loss on top."""
    policy = reference.exact(pair.case, "dual clip")
    return Result(
        answer.loss + policy.loss,
        answer.d_hidden + policy.d_hidden,
        answer.d_weight + policy.d_weight,
    )


def gradients(pair: Pair, loss: Tensor) -> Result:
    """A loss and its gradients."""
    d_hidden, d_weight = torch.autograd.grad(loss, (pair.case.hidden, pair.case.weight))
    return Result(loss.detach(), d_hidden.flatten(0, 1), d_weight)


# Providers ----------------------------------------------------------------------------------------


def four_matmuls(pair: Pair) -> Run:
    """Two logits, d hidden, d weight with nothing between them."""
    x, w = (tensor.detach() for tensor in pair.student)
    others, u = pair.teacher.hidden.flatten(0, 1), pair.teacher.weight
    z = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    d_hidden, d_weight = torch.empty_like(x), torch.empty_like(w)

    def run() -> Result:
        torch.mm(others, u.t(), out=z)
        torch.mm(x, w.t(), out=z)
        torch.mm(z, w, out=d_hidden)
        torch.mm(z.t(), x, out=d_weight)
        return Result(z[0, 0], d_hidden, d_weight)

    return run


def alone(pair: Pair, kind: str, beta: float) -> Run:
    """`linear_divergence`, averaged."""

    def run() -> Result:
        case = pair.case
        each = pl.linear_divergence(case.hidden, case.weight, pair.teacher, kind=kind, beta=beta)  # type: ignore[arg-type]
        return gradients(pair, each.mean())

    return run


def one_pass(pair: Pair, kind: str, beta: float, policy: bool) -> Run:
    """`linear_policy_loss`: the divergence with PPO's loss, or with advantages of zero."""
    spec = PPO.replace(kl=pl.Divergence(kind, 1.0, beta=beta))  # type: ignore[arg-type]
    case = pair.case
    advantages = case.advantages if policy else torch.zeros_like(case.advantages)

    def run() -> Result:
        tensors = (case.hidden, case.weight, case.ids, case.old_logp, advantages, case.mask)
        out = pl.linear_policy_loss(spec, *tensors, teacher=pair.teacher, plan="one_pass")
        return gradients(pair, out.loss)

    return run


def eager(pair: Pair, beta: float) -> Run:
    """All logits of both models in float32, and autograd."""

    def run() -> Result:
        x, w = pair.student
        with torch.no_grad():
            teacher = (pair.teacher.hidden.flatten(0, 1) @ pair.teacher.weight.T).float()
        return gradients(pair, per_token((x @ w.T).float(), teacher, beta).mean())

    return run


def trl(pair: Pair, beta: float, folder: Path) -> Run:
    """TRL's `ChunkedDivergenceFunction`; its student entropy is made too, as its trainer has it."""
    function = peers.trl_chunked_divergence(folder)

    def run() -> Result:
        teacher = (pair.teacher.hidden.flatten(0, 1), pair.teacher.weight, None)
        x, w = pair.student
        return gradients(pair, function.apply(x, w, None, *teacher, beta)[0].mean())

    return run


def liger(pair: Pair, beta: float, folder: Path) -> Run:
    """Liger's fused linear JSD loss, its soft part alone, without `torch.compile` in it."""
    loss = peers.liger_jsd_loss(folder)(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )

    def run() -> Result:
        x, w = pair.student
        teacher = (pair.teacher.hidden.flatten(0, 1), pair.teacher.weight)
        return gradients(pair, loss(x, w, *teacher, pair.case.ids.flatten()))

    return run


def providers(pair: Pair, kind: str, folder: Path | None) -> dict[str, Callable[[], Run]]:
    """The providers of one kind, by name, in the order of the tables. folder None: no peers."""
    beta = KINDS[kind]
    ours: dict[str, Callable[[], Run]] = {
        FOUR: lambda: four_matmuls(pair),
        ONE_PASS: lambda: one_pass(pair, kind, beta, policy=False),
        WITH_POLICY: lambda: one_pass(pair, kind, beta, policy=True),
        ALONE: lambda: alone(pair, kind, beta),
        EAGER: lambda: eager(pair, beta),
    }
    if folder is None:
        return ours
    return {
        **ours,
        TRL: lambda: trl(pair, beta, folder),
        LIGER: lambda: liger(pair, beta, folder),
    }


# One run ------------------------------------------------------------------------------------------


def errors(result: Result, answer: Result) -> dict[str, float]:
    """Absolute of the loss, relative of the gradients."""
    return {
        "loss": (result.loss.double() - answer.loss).abs().item(),
        "d_hidden": reference.relative(result.d_hidden, answer.d_hidden),
        "d_weight": reference.relative(result.d_weight, answer.d_weight),
    }


def kind_of(name: str) -> str:
    """The kind of a provider: "ours", "peer" or, for the bare matmuls, "floor"."""
    return "floor" if name == FOUR else "ours" if name.startswith("policyloss") else "peer"


class Bench:
    """One run: the providers that were measured, and the refused ones with the reason."""

    def __init__(self, pair: Pair, folder: Path | None, rounds: int) -> None:
        self.pair, self.folder, self.rounds = pair, folder, rounds
        self.groups: Groups = {}
        self.failures: list[dict[str, str]] = []

    def run(self, kind: str) -> None:
        """Check all providers of a kind, then measure time and memory of those that passed."""
        answer = exact(self.pair, KINDS[kind])
        answers = {WITH_POLICY: with_policy(self.pair, answer)}
        half = self.pair.case.hidden.dtype == torch.bfloat16
        admitted: dict[str, Run] = {}
        group = self.groups.setdefault(kind, {})
        for name, make in providers(self.pair, kind, self.folder).items():
            found: dict[str, float] = {}
            try:
                run = make()
                reason = None
                if name != FOUR:
                    run()
                    with reference.poisoned(self.pair.case.device):
                        found = errors(run(), answers.get(name, answer))
                    # A peer may have the error of bfloat16 logits.
                    factor = 1.0 if kind_of(name) == "ours" and half else 40.0
                    wrong = {k: v for k, v in found.items() if not v <= factor * LIMITS[k]}
                    reason = f"errors {wrong}" if wrong else None
            except Exception as problem:
                reason = f"{type(problem).__name__}: {str(problem)[:600]}"
            if reason is not None:
                gc.collect()  # the frames of a failed call hold its tensors in a cycle
            if self.pair.case.device == "cuda":
                torch.cuda.empty_cache()
            if reason is None:
                admitted[name], group[name] = run, {"kind": kind_of(name), "errors": found}
                say(f"  {kind}, {name}: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
            else:
                self.failures.append({"group": kind, "provider": name, "reason": reason})
                say(f"  {kind}, {name}: NOT TIMED. {reason}")
        del answer, answers
        self.measure(group, admitted)

    def measure(self, group: dict[str, dict[str, Any]], admitted: dict[str, Run]) -> None:
        """Times, interleaved; then memory, one by one."""
        device = self.pair.case.device
        few = {name: min(SLOW_ROUNDS, self.rounds) for name in (LIGER, EAGER)}
        timed = time_interleaved(admitted, self.rounds, device, warmup=1, few=few)
        for name, run in admitted.items():
            peak, outputs = peak_extra_bytes(run, device), output_bytes(run)
            group[name] |= timed[name] | {"extra_bytes": max(0, peak - outputs)}


def targets(groups: Groups) -> list[dict[str, Any]]:
    """T11 and T12 of each kind."""
    f, lines = Figures(groups), []
    for kind in groups:
        most, against = (1.25, 1.8) if kind == "jsd" else (1.18, 1.45)
        lines += [
            target(
                "T11",
                f"{kind}: time / four matmuls",
                "<=",
                most,
                f.ratio(kind, ONE_PASS, FOUR),
                1.10,
            ),
            target("T11", f"{kind}: TRL / ours", ">=", against, f.ratio(kind, TRL, ONE_PASS)),
            target(
                "T12",
                f"{kind}: with PPO's loss / without",
                "<=",
                1.05,
                f.ratio(kind, WITH_POLICY, ONE_PASS),
                1.0,
            ),
        ]
    return lines


def report(groups: Groups) -> str:
    """The tables."""
    parts = []
    for kind, found in groups.items():
        floor = found.get(FOUR, {}).get("median_ms")
        rows = [[kind, "median ms", "p20", "p80", "/ floor", "extra GiB", "d hidden", "d weight"]]
        for name, p in found.items():
            times = [f"{p[k]:.2f}" for k in ("median_ms", "p20_ms", "p80_ms")]
            off = [
                f"{p['errors'][k]:.1e}" if p["errors"] else "-" for k in ("d_hidden", "d_weight")
            ]
            share = f"{p['median_ms'] / floor:.3f}" if floor else "-"
            rows.append([name, *times, share, f"{p['extra_bytes'] / 2**30:.3f}", *off])
        parts.append(table(rows))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; exit status 1 if a provider of ours was refused."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.divergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="unpacked peer packages")
    parser.add_argument("--no-peers", action="store_true", help="only ours, PyTorch, the matmuls")
    parser.add_argument("--quick", action="store_true", help="a small shape and three rounds")
    parser.add_argument("--shape", default="", help="sequences,length,vocabulary,hidden")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    default = (QUICK if args.quick else SHAPES)[args.device]
    shape = Shape(*map(int, args.shape.split(","))) if args.shape else default
    say(f"inputs: {shape} on {args.device}")
    pair = make_pair(shape, args.device)
    rounds = args.rounds or (3 if args.quick else 15)
    bench = Bench(pair, None if args.no_peers else args.peers, rounds)
    for kind in KINDS:
        bench.run(kind)
    found = targets(bench.groups)
    print(report(bench.groups), targets_table(found), sep="\n\n")
    data = {
        "environment": environment(),
        "shape": shape._asdict(),
        "dtype": str(pair.case.hidden.dtype).removeprefix("torch."),
        "rounds": rounds,
        "groups": bench.groups,
        "targets": found,
        "failures": bench.failures,
    }
    write_json(args.out or Path(f"out/divergence_{args.device}.json"), data)
    return any(kind_of(failure["provider"]) == "ours" for failure in bench.failures)


if __name__ == "__main__":
    sys.exit(main())
