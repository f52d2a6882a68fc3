"""Log-probabilities that were stored in 16 bits: they lie on the grid of the type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from policyloss_lab.diagnosis.hypothesis import Case, Fit
from policyloss_lab.diagnosis.order import on_grid

TYPES = {"logp_bf16": torch.bfloat16, "logp_fp16": torch.float16}


@dataclass(frozen=True)
class StoredLogProbs:
    """One side's log-probabilities, or both, were rounded to bf16 or fp16 after the softmax."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """A fit for each type on whose grid all numbers of a side lie."""
        pairs = case.pairs
        telling = (pairs.trainer < -1e-3) & (pairs.rollout < -1e-3)
        if int(telling.sum()) < 8:
            return
        for cause, dtype in TYPES.items():
            rollout = bool(on_grid(pairs.rollout, dtype)[telling].all())
            trainer = bool(on_grid(pairs.trainer, dtype)[telling].all())
            name = str(dtype).removeprefix("torch.")
            if rollout and trainer:
                step = torch.finfo(dtype).eps * pairs.trainer.abs()
                prediction = pairs.difference.clamp(-step, step)
                yield Fit(cause, f"both are rounded to {name}", prediction, freedom=0)
            elif rollout:
                prediction = pairs.trainer.to(dtype).double() - pairs.trainer
                yield Fit(cause, f"rollout_logp is rounded to {name}", prediction, freedom=0)
            elif trainer:
                prediction = pairs.rollout - pairs.rollout.to(dtype).double()
                yield Fit(cause, f"old_logp is rounded to {name}", prediction, freedom=0)
