"""Two gloo processes with an attachment, for `test_attach`; each writes down how its loop ended."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import policyloss_lab as lab
from policyloss_lab.runs.recorder import Recorder


def run(folder: Path, rank: int, broken: bool) -> str:
    """Six steps, examined at 1, 3 and 5; the old log-probabilities are late from step 3 on."""
    logging.disable(logging.WARNING)
    if broken and rank == 0:
        Recorder.step = lambda *_, **__: 1 / 0  # type: ignore[method-assign, assignment]
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    logp = torch.rand(8, 32, generator=torch.Generator().manual_seed(0)).clamp(0.01, 0.99).log()
    attached = lab.attach(out=folder / "run", every=2, halt_on="shift")
    try:
        for step in range(1, 7):
            late = logp if step < 3 else logp.roll(1, dims=1)
            attached.step({"reward": 1.0}, rollout_logp=logp, old_logp=late)
        return "ended"
    except lab.RunHaltedError as halt:
        return f"halted at {step} by {halt.cause}"
    finally:
        dist.barrier()
        dist.destroy_process_group()  # gloo's threads may abort a process that exits before them


if __name__ == "__main__":
    folder, rank, broken = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "broken"
    (folder / f"rank{rank}").write_text(run(folder, rank, broken))
