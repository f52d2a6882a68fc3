"""What two gloo processes compute, for `test_preference_ranks`. Nothing is asserted here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import policyloss as pl
from policyloss.preference import preference_totals

NAMES = ("dpo", "ipo", "apo_down", "mpo", "orpo")


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, ref_logp and mask of four pairs `[8, 6]`."""
    g = torch.Generator().manual_seed(1)
    logp, ref = -0.05 - torch.rand(2, 8, 6, generator=g, dtype=torch.float64)
    mask = torch.rand(8, 6, generator=g) < 0.7
    mask[:, 0] = True
    return logp, ref, mask


def results(name: str, tensors: Any, **others: Any) -> dict[str, Any]:
    """The loss, its gradient in logp, and the metrics of all ranks."""
    logp, ref, mask = tensors
    leaf = logp.clone().requires_grad_()
    out = pl.preference_loss(name, leaf, ref, mask, **others)
    (grad,) = torch.autograd.grad(out.loss, leaf)
    return {"loss": out.loss.item(), "grad": grad, "metrics": out.metrics.all_reduce().compute()}


def work(rank: int, folder: str) -> None:
    """Half of the pairs of each loss, counted together; then half of the tokens of every answer."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    rows, columns = slice(4 * rank, 4 * rank + 4), slice(3 * rank, 3 * rank + 3)
    of_rows, of_columns = ([x[at] for x in batch()] for at in (rows, (slice(None), columns)))
    cp: Any = {"cp_group": dist.group.WORLD}
    answers = {}
    for name in NAMES:
        answers[name] = {
            "data": results(name, of_rows, totals=preference_totals(of_rows[2])),
            "context": results(name, of_columns, totals="local", **cp),
            "counted": results(
                name, of_columns, totals=preference_totals(of_columns[2], **cp), **cp
            ),
        }
    torch.save(answers, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
