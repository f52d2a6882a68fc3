"""Engines that no environment here installs, against the adapters that run our losses in them.

    python -m conformance.engines skyrl areal nemo_rl=SRC …

SRC: the folder of an unpacked wheel, or of a checkout at the commit in `ENGINES`; without it, pip
unpacks the wheel of the release. Only the named functions of a file are loaded, so that nothing
else of the engine must be installed. First the
engine's own losses are compared with the adapter, then presets run through the adapter and the
engine's denominators in two processes, and the gradient is compared with that of the whole batch.
The command writes conformance/results/engines.json; the results of the other engines stay.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import policyloss as pl
from conformance import one, report
from conformance.environments import HOME
from conformance.inputs import Batch, draw
from conformance.runner import run_function

RESULTS = Path(__file__).resolve().parent / "results" / "engines.json"
TRIED, CALLED, READ = "tried for real", "called as the engine calls it", "read, not run"


@dataclass(frozen=True)
class Engine:
    """An engine: the release or commit that its adapter is compared with, how far its hook was
    tried (`tried`) and by which of its parts (`hook`), and its source: the name of its package, or
    a repository on GitHub if it has no wheel.
    """

    release: str
    tried: str
    hook: str
    source: str


ENGINES = {
    "skyrl": Engine("0.4.0", CALLED, "its registry holds and returns our loss", "skyrl"),
    "nemo_rl": Engine("7ea279ab (2026-08-22)", READ, "`loss_fn` of `grpo_train`", "NVIDIA-NeMo/RL"),
    "prime_rl": Engine(
        "559b4477 (2026-08-21)",
        CALLED,
        "its `setup_rl_loss_fn` imports and calls our loss",
        "PrimeIntellect-ai/prime-rl",
    ),
    "slime": Engine(
        "624b824a (2026-08-21)",
        CALLED,
        "its `loss_function` calls our loss; context-parallel ranks",
        "THUDM/slime",
    ),
    "miles": Engine(
        "0.0.2", CALLED, "its `loss_function` calls our loss; context-parallel ranks", "miles-rl"
    ),
    "torchtitan": Engine("0.3.0", CALLED, "its `Config.build` makes our loss", "torchtitan"),
    "areal": Engine(
        "1.0.4", CALLED, "the step of its FSDP engine calls our loss and weight", "areal"
    ),
    "trl_async": Engine("1.16.0", CALLED, "its `compute_loss` runs inside ours", "trl"),
    "swift": Engine(
        "4.6.0", CALLED, "its `_compute_loss_and_metrics` runs inside ours", "ms-swift"
    ),
    "xtuner": Engine(
        "b934f462 (2026-08-21)",
        CALLED,
        "its `get_policy_loss_fn` imports our loss",
        "InternLM/xtuner",
    ),
    "rlinf": Engine("0.3.0", CALLED, "its `policy_loss` finds and calls our loss", "rlinf"),
    "trinity": Engine(
        "0.6.0", CALLED, "its base class reads the arguments of our loss", "trinity-rft"
    ),
    "twinkle": Engine(
        "0.5.1", TRIED, "training steps with `set_loss` (`conformance.twinkle_run`)", "twinkle-kit"
    ),
}
MINIMUM = 2000
BATCHES, RANKS, HORIZON = 12, 2, 16


def compare(engine: str, folder: Path) -> report.Result:
    """The result of one engine, as `conformance.one` writes those of the frameworks."""
    peer = import_module(f"conformance.peers.{engine}")
    peer.enter(folder)
    return {
        "peer": engine,
        "release": ENGINES[engine].release,
        "tried": ENGINES[engine].tried,
        "hook": ENGINES[engine].hook,
        "pinned": True,
        "minimum": MINIMUM,
        "seed": 0,
        "environment": {"python": platform.python_version(), "torch": torch.__version__},
        "functions": [one.describe(run_function(function)) for function in peer.FUNCTIONS],
        "partition": partition(engine, folder),
    }


def partition(engine: str, folder: Path) -> dict[str, Any]:
    """The presets that were run over two processes, and the worst difference of a gradient; no
    preset if the engine averages each micro-batch alone.
    """
    peer = import_module(f"conformance.peers.{engine}")
    counts = {
        "ranks": RANKS,
        "batches": BATCHES,
        "tolerance": getattr(peer, "TOLERANCE", 1e-12),
    }
    if not peer.PRESETS:
        return {"presets": [], **counts, "worst": 0.0}
    with tempfile.TemporaryDirectory() as scratch:
        spawn(_rank, (engine, str(folder), scratch), nprocs=RANKS)  # type: ignore[no-untyped-call]
        differences: dict[str, float] = json.loads(Path(scratch, "result").read_text())
    worst = max(differences.values())
    return {"presets": list(differences), **counts, "worst": worst}


def _rank(rank: int, engine: str, folder: str, scratch: str) -> None:
    """One process: its rows of every batch, each in two micro-batches."""
    torch.set_num_threads(1)
    peer = import_module(f"conformance.peers.{engine}")
    peer.enter(Path(folder))
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting", rank=rank, world_size=RANKS
    )
    found: dict[str, float] = {}
    for name in peer.PRESETS:
        spec = pl.preset(name).for_run(HORIZON)
        for seed in range(BATCHES):
            batch = draw(seed, ("ragged", "holes", "sequence_advantages")[seed % 3], torch.float64)
            logp = batch.logp.clone().requires_grad_()
            cut = [torch.arange(len(logp))[rank + RANKS * micro :: 2 * RANKS] for micro in range(2)]
            for loss in peer.losses(spec, batch, logp, cut):
                loss.backward()
            gradient = torch.zeros_like(logp) if logp.grad is None else logp.grad
            dist.all_reduce(gradient)
            gradient /= RANKS  # as DDP and FSDP do
            expected = _whole_gradient(spec, batch, peer.OLD)
            apart = ((gradient - expected).abs() / expected.abs().clamp(min=1)).max()
            found[name] = max(found.get(name, 0.0), float(apart))
    if rank == 0:
        Path(scratch, "result").write_text(json.dumps(found))
    dist.destroy_process_group()


def _whole_gradient(spec: pl.LossSpec, batch: Batch, old: str) -> Tensor:
    """The gradient of the whole batch in one call. old: the anchor of the ratio."""
    logp = batch.logp.clone().requires_grad_()
    out = pl.policy_loss(
        spec,
        logp,
        getattr(batch, old),
        batch.advantages,
        batch.mask,
        rollout_logp=batch.rollout_logp,
        ref_logp=batch.ref_logp,
        group_ids=batch.group_ids,
        totals="local",
    )
    return torch.autograd.grad(out.loss, logp)[0]


def unpacked(name: str) -> Path:
    """The folder of the engine's wheel, which pip downloads if it is not there."""
    engine = ENGINES[name]
    if "/" in engine.source:
        commit = engine.release.split()[0]
        sys.exit(f"{name} has no wheel; check out {engine.source} at {commit}: {name}=SRC.")
    target = HOME / "releases" / f"{engine.source}-{engine.release}"
    if not target.is_dir():
        options = ("--quiet", "--no-deps", "--no-compile", "--ignore-requires-python")
        wanted = ("--target", str(target), f"{engine.source}=={engine.release}")
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], check=True)
    return target


def main(arguments: list[str]) -> int:
    """Compare the named engines; the exit status is 1 if anything differs."""
    given = {name: path for name, _, path in (a.partition("=") for a in arguments)}
    if not given or set(given) - set(ENGINES):
        sys.exit(f"name engines, as engine or engine=SRC; there are {', '.join(ENGINES)}.")
    folders = {name: Path(path) if path else unpacked(name) for name, path in given.items()}
    torch.set_num_threads(1)
    results = [compare(name, folder) for name, folder in folders.items()]
    print(report.table(results))
    if listed := report.defects(results):
        print(f"\nDefects of the engines, listed and not compared:\n{listed}")
    wrong = report.problems(results)
    for r in results:
        seen = r["partition"]
        print(f"{r['peer']}: {len(seen['presets'])} presets over two ranks, {seen['worst']:.1e}")
        if not seen["worst"] <= seen["tolerance"]:
            wrong.append(f"{r['peer']}: a gradient over two ranks differs by {seen['worst']}.")
    print(
        "\n".join(["FAILED", *wrong] if wrong else ["all within 1e-12 (float64), 1e-6 (float32)"])
    )
    kept = json.loads(RESULTS.read_text())["results"] if RESULTS.is_file() else []
    by_name = {r["peer"]: r for r in [*kept, *results]}
    order = [by_name[name] for name in ENGINES if name in by_name]
    one.write_json(RESULTS, {"results": order})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
