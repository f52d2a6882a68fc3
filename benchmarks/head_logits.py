"""From existing logits: logp and entropy, and the gradient in the logits' own memory, against a
copy and TRL's pair.

Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from benchmarks import peers
from benchmarks.harness import Provider, kernel_ms, time_interleaved
from benchmarks.head_data import Case
from benchmarks.head_reference import exact_logits, limits, poisoned, refusal, relative

GROUP = "from logits"
# Calls of a fast provider per round, each timed: a single call would have cold caches.
REPEATS = 3
COPY = "copy of the logits"
FORWARD, BACKWARD = "policyloss, forward", "policyloss, backward in place"
TRL_TORCH, TRL_KERNEL = "TRL pair, plain torch, forward", "TRL pair, its Triton kernel, forward"


@dataclass
class LogitsRun:
    """The results of this group."""

    providers: dict[str, dict[str, Any]] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)


class Rows:
    """Logits [R, V] in the dtype of the inputs, their ids,
    and the gradients of logp and entropy [R].
    """

    def __init__(self, case: Case) -> None:
        rows = max(4, case.mask.numel() // 4 * 4)
        hidden = case.hidden.detach().flatten(0, 1)[:rows]
        self.original = hidden @ case.weight.detach().T
        self.logits = self.original.clone().requires_grad_()
        self.ids = case.ids.flatten()[:rows].contiguous()
        generator = torch.Generator(hidden.device).manual_seed(1)
        self.g, self.h = (
            torch.randn(rows, device=hidden.device, generator=generator) for _ in range(2)
        )
        self.out: Any = None

    def restore(self) -> None:
        """The logits as they were before a backward wrote over them."""
        self.out = None
        with torch.no_grad():
            self.logits.copy_(self.original)

    def ours(self) -> tuple[Tensor, Tensor]:
        """Forward without gradient."""
        with torch.no_grad():
            out = pl.logprobs(self.logits, self.ids, entropy=True)
        assert out.entropy is not None
        return out.logp, out.entropy

    def prepare_backward(self) -> None:
        """A forward whose backward may overwrite the logits."""
        self.restore()
        self.out = pl.logprobs(self.logits, self.ids, entropy=True, overwrite_logits=True)

    def backward(self) -> Tensor:
        """The gradient of the logits, in their own memory."""
        (gradient,) = torch.autograd.grad(
            (self.out.logp, self.out.entropy), self.logits, (self.g, self.h)
        )
        return gradient

    def pair(self, folder: Path, kernel: bool) -> Callable[[], tuple[Tensor, Tensor]]:
        """TRL's two functions, on logits shaped as its trainer has them."""
        logp_of, entropy_of = peers.trl_pair(folder, kernel)
        batch, ids = self.logits.detach().view(4, -1, self.logits.shape[1]), self.ids.view(4, -1)

        def run() -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return logp_of(batch, ids), entropy_of(batch)

        return run


def run_logits(case: Case, folder: Path | None, rounds: int) -> LogitsRun:
    """Check and time this group; against peers in `folder`, if there is one."""
    rows, result = Rows(case), LogitsRun({COPY: {"kind": "floor", "errors": {}}})
    logp, entropy, gradient = exact_logits(rows.original, rows.ids, rows.g, rows.h)
    scratch = torch.empty_like(rows.original)
    runs: dict[str, Provider] = {COPY: lambda: scratch.copy_(rows.original)}

    def admit(
        name: str,
        make: Callable[[], Callable[[], Any]],
        allowed: dict[str, float],
        errors_of: Callable[[Any], dict[str, float]],
    ) -> None:
        try:
            run = make()
            with poisoned(case.device):
                errors = errors_of(run())
        except Exception as problem:
            reason: str | None = f"{type(problem).__name__}: {problem}"
        else:
            reason = refusal(errors, allowed)
            if reason is None:
                runs[name] = run
                result.providers[name] = {
                    "kind": "ours" if name in (FORWARD, BACKWARD) else "peer",
                    "errors": errors,
                }
        if reason is not None:
            result.failures.append({"group": GROUP, "provider": name, "reason": reason})

    def rms(found: tuple[Tensor, Tensor]) -> dict[str, float]:
        pairs = {"logp": (found[0], logp), "entropy": (found[1], entropy)}
        return {
            name: (a.flatten().double() - b).square().mean().sqrt().item()
            for name, (a, b) in pairs.items()
        }

    def backward() -> Callable[[], Tensor]:
        rows.prepare_backward()
        return rows.backward

    dtype = rows.original.dtype
    line = rows.original.log_softmax(-1)
    yardstick = rms((line.gather(-1, rows.ids[:, None]), -(line.exp() * line).sum(-1)))
    del line
    ours = {"logp": 2e-5, "entropy": 5e-5}
    admit(FORWARD, lambda: rows.ours, ours, rms)
    # The gradient is rounded once, to the dtype of the logits.
    slack = {"d_logits": 3e-3 if dtype == torch.bfloat16 else 1e-5}
    admit(BACKWARD, backward, slack, lambda found: {"d_logits": relative(found, gradient)})
    rows.restore()
    if folder is not None:
        admit(
            TRL_TORCH, lambda: rows.pair(folder, kernel=False), limits(yardstick, False, dtype), rms
        )
    if folder is not None and case.device == "cuda":
        admit(
            TRL_KERNEL, lambda: rows.pair(folder, kernel=True), limits(yardstick, False, dtype), rms
        )
    prepare = {name: rows.restore for name in runs if name != COPY} | {
        BACKWARD: rows.prepare_backward
    }
    times = time_interleaved(runs, rounds, case.device, warmup=2, prepare=prepare, repeats=REPEATS)
    for name, measured in times.items():
        result.providers[name] |= measured | _bandwidth(
            name, measured["median_ms"], times[COPY]["median_ms"]
        )
    for name, run in runs.items():
        alone = kernel_ms(run, case.device, prepare.get(name))
        if alone is not None:
            result.providers[name]["kernel_ms"] = alone
    return result


def _bandwidth(name: str, milliseconds: float, copy: float) -> dict[str, float]:
    """The share of the copy's bandwidth: a forward reads the logits once, a copy and an in-place
    backward read and write them.
    """
    moved = {FORWARD: 0.5, BACKWARD: 1.0}.get(name)
    return {} if moved is None else {"share_of_copy_bandwidth": moved * copy / milliseconds}
