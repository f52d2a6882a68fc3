"""A tiny evaluator of printed formulas, written from their vocabulary alone: it shares no code with
the library but the draw.

Only the valid tokens exist here: every name is a float64 vector with one entry per valid token, and
`row` and `column` remember where each came from. Counts and sums follow the name `mask`, which a
formula may narrow.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from policyloss.explanations.formula import Formula
from policyloss.functional.trust import draws


class Evaluator:
    """The lines of a formula, run one after the other on a padded batch."""

    def __init__(self, formula: Formula, batch: Any, **constants: float) -> None:
        valid = batch.mask
        self.valid = valid
        self.row, self.column = valid.nonzero(as_tuple=True)
        self.group_ids = batch.group_ids
        leaf = batch.logp[valid].detach().clone().requires_grad_()
        entropy = batch.entropy[valid].detach().clone().requires_grad_()
        self.leaf, self.entropy = leaf, entropy
        self.names: dict[str, Any] = {
            **constants,
            "logp": leaf,
            "entropy": entropy,
            "divergence": batch.divergence[valid] + 4 * (entropy - entropy.detach()),
            "mask": torch.ones(len(self.row), dtype=torch.bool),
            "weights": batch.weights[valid],
            "ages": batch.ages[valid].double(),
            **{
                name: getattr(batch, name)[valid]
                for name in ("old_logp", "rollout_logp", "ref_logp", "teacher_logp", "advantages")
            },
        }
        for line in formula.lines:
            self.names[line.name] = self.evaluate(line.expression)

    @property
    def mask(self) -> Tensor:
        return self.names["mask"]

    def evaluate(self, expression: str) -> Any:
        counts = {
            "N": self.count(),
            "n": self.count(),
            "B": self.rows(),
            "b": self.rows(),
            "G": self.groups(),
            "inf": math.inf,
            "W": self.names["weights"][self.mask].sum() or 1,
            "L_turn": self.by(self.run(), self.ones()).clamp(min=1),
            "K": self.seq_sum(1 / self.by(self.run(), self.ones()).clamp(min=1)).clamp(min=1),
        }
        for name, key in (("L", self.row), ("N_group", self.group_ids[self.row])):
            # A token outside the mask may have no peers left.
            counts[name] = self.by(key, self.ones()).clamp(min=1)
        functions = {name: getattr(self, name) for name in dir(self) if name in FUNCTIONS}
        return eval(
            expression, {"__builtins__": {}}, {**PLAIN, **functions, **counts, **self.names}
        )

    def ones(self) -> Tensor:
        return torch.ones(len(self.row), dtype=torch.float64)

    def count(self) -> int:
        return max(int(self.mask.sum()), 1)

    def rows(self) -> int:
        return max(len(set(self.row[self.mask].tolist())), 1)

    def groups(self) -> int:
        return max(len(set(self.group_ids[self.row][self.mask].tolist())), 1)

    def by(self, key: Tensor, x: Tensor) -> Tensor:
        """Sum of x over the tokens of the mask with the same key, given back to each token."""
        same = (key[:, None] == key[None, :]) & self.mask[None, :]
        return torch.where(same, x[None, :], 0).sum(1)

    def seq_sum(self, x: Tensor) -> Tensor:
        return self.by(self.row, x)

    def seq_mean(self, x: Tensor) -> Tensor:
        return self.seq_sum(x) / self.seq_sum(self.ones()).clamp(min=1)

    def seq_max(self, x: Tensor) -> Tensor:
        same = (self.row[:, None] == self.row[None, :]) & self.mask[None, :]
        return torch.where(same, x[None, :], -math.inf).amax(1)

    def seq_any(self, c: Tensor) -> Tensor:
        return self.seq_sum(c.double()) > 0

    def seq_all(self, c: Tensor) -> Tensor:
        return ~self.seq_any(~c)

    def run(self) -> Tensor:
        """The number of the unbroken run of the mask that holds each token."""
        runs, number = [], 0
        here = [
            (int(r), int(c), bool(m))
            for r, c, m in zip(self.row, self.column, self.mask, strict=True)
        ]
        previous = None
        for r, c, m in here:
            if m and previous != (r, c - 1):
                number += 1
            previous = (r, c) if m else previous
            runs.append(number if m else -1)
        return torch.tensor(runs)

    def run_mean(self, x: Tensor) -> Tensor:
        run = self.run()
        return self.by(run, x) / self.by(run, self.ones()).clamp(min=1)

    def run_all(self, c: Tensor) -> Tensor:
        return self.by(self.run(), (~c).double()) == 0

    def sum(self, x: Tensor) -> Tensor:
        return x[self.mask].sum()

    def token_mean(self, x: Tensor) -> Tensor:
        return self.sum(x) / self.count()

    def kth_largest(self, x: Tensor, k: float) -> Tensor:
        ordered = x[self.mask].detach().sort(descending=True).values
        return ordered[min(int(k), len(ordered)) - 1] if len(ordered) else torch.tensor(0)

    def budget_bound(self, x: Tensor, budget: float) -> Tensor:
        ordered = x[self.mask].sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
        kept = int((means < budget).sum())
        return torch.tensor(math.inf) if kept == len(ordered) else ordered[kept]

    def future_sum(self, x: Tensor, gamma: float) -> Tensor:
        same = (self.row[:, None] == self.row[None, :]) & self.mask[None, :]
        place = self.mask.cumsum(0)
        distance = place[None, :] - place[:, None]
        decay = torch.where(same & (distance >= 0), gamma ** distance.clamp(min=0).double(), 0)
        return decay @ x.detach()

    def padded(self, x: Tensor) -> Tensor:
        """A vector over the valid tokens as `[B, T]`, 0 elsewhere."""
        return torch.zeros(self.valid.shape, dtype=x.dtype).masked_scatter(self.valid, x)


def _number(x: Any) -> Any:
    return (
        x
        if isinstance(x, Tensor)
        else torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)
    )


def _elementwise(torch_function: Any) -> Any:
    def apply(a: Any, b: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            return max(a, b) if torch_function is torch.maximum else min(a, b)
        return torch_function(*torch.broadcast_tensors(*(_number(x) for x in (a, b))))

    return apply


def _where(c: Tensor, a: Any, b: Any) -> Tensor:
    return torch.where(c, _number(a), _number(b))


FUNCTIONS = (
    "seq_sum",
    "seq_mean",
    "seq_max",
    "seq_any",
    "seq_all",
    "run_mean",
    "run_all",
    "sum",
    "token_mean",
    "kth_largest",
    "budget_bound",
    "future_sum",
)
PLAIN = {
    "sg": lambda x: x.detach(),
    "exp": torch.exp,
    "log": torch.log,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "clip": lambda x, low, high: x.clamp(low, high),
    "max": _elementwise(torch.maximum),
    "min": _elementwise(torch.minimum),
    "where": _where,
    "floor": math.floor,
    "draw": draws,
}
