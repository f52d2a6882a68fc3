"""Engines that no environment here installs, against the adapters that run our losses in them.

    python -m conformance.engines skyrl=SRC nemo_rl=SRC prime_rl=SRC …

SRC: the folder of an unpacked wheel, or of a checkout at the commit in `ENGINES`. Only the named
functions of a file are loaded, so that nothing else of the engine must be installed. First the
engine's own losses are compared with the adapter, then presets run through the adapter and the
engine's denominators in two processes, and the gradient is compared with that of the whole batch.
The command writes conformance/results/engines.json; the results of the other engines stay.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

import policyloss as pl
from conformance import one, report
from conformance.inputs import Batch, draw
from conformance.runner import run_function

RESULTS = Path(__file__).resolve().parent / "results" / "engines.json"
# The release or the commit that each adapter is compared with, and how its hook was tried.
ENGINES = {
    "skyrl": ("0.4.0", "its registry holds and returns our loss"),
    "nemo_rl": ("7ea279ab (2026-08-22)", "read, not run: `loss_fn` of `grpo_train`"),
    "prime_rl": ("559b4477 (2026-08-21)", "its `setup_rl_loss_fn` imports and calls our loss"),
    "slime": (
        "624b824a (2026-08-21)",
        "its `loss_function` calls our loss; context-parallel ranks",
    ),
    "miles": ("0.0.2", "its `loss_function` calls our loss; context-parallel ranks"),
    "torchtitan": ("0.3.0", "its `Config.build` makes our loss"),
    "xtuner": ("b934f462 (2026-08-21)", "its `get_policy_loss_fn` imports our loss"),
    "rlinf": ("0.3.0", "its registry holds our loss, and its `policy_loss` calls it"),
    "trinity": ("0.6.0", "its base class reads the arguments of our loss and passes them"),
    "twinkle": ("0.5.1", "a subclass of its `GRPOLoss` is called as `set_loss` would"),
    "trl_async": ("1.16.0", "its `compute_loss` runs inside ours, with a model of given numbers"),
    "swift": ("4.6.0", "its `_compute_loss_and_metrics` runs inside ours, with given numbers"),
    "areal": ("1.0.4", "the loss and weight of its FSDP engine's `train_batch`"),
}
MINIMUM = 2000
BATCHES, RANKS, HORIZON = 12, 2, 16


def compare(engine: str, folder: Path) -> report.Result:
    """The result of one engine, as `conformance.one` writes those of the frameworks."""
    peer = import_module(f"conformance.peers.{engine}")
    peer.enter(folder)
    return {
        "peer": engine,
        "release": ENGINES[engine][0],
        "hook": ENGINES[engine][1],
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


def main(arguments: list[str]) -> int:
    """Compare the named engines; the exit status is 1 if anything differs."""
    folders = {name: Path(path) for name, path in (a.split("=", 1) for a in arguments)}
    if not folders or set(folders) - set(ENGINES):
        sys.exit(f"name engines as engine=SRC; there are {', '.join(ENGINES)}.")
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
