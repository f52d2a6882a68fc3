"""Runs the user's step on pieces of the batch, and reads its gradient as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policyloss.check.cutting import CuttableBatch
from policyloss.errors import InputError
from policyloss.totals import data_parallel_group

StepFunction = Callable[[list[dict[str, Any]]], Any]


def flat_gradient(result: Any, called: str = "step_fn") -> tuple[Tensor, torch.dtype]:
    """The gradients in `result` as one float64 vector `[P]` on the CPU, and the coarsest dtype
    among them.

    result: a module or parameters, whose `.grad` is read (None counts as 0), or the gradients
    themselves: a tensor, a mapping or an iterable of tensors.
    """
    if isinstance(result, nn.Module):
        result = [p for p in result.parameters() if p.requires_grad]
    elif isinstance(result, Mapping):
        result = list(result.values())
    elif isinstance(result, Tensor):
        result = [result]
    if not isinstance(result, Iterable) or isinstance(result, str):
        raise InputError(
            f"{called} must give the gradients: the model, its parameters or tensors; got "
            f"{type(result).__name__}."
        )
    items = list(result)
    wrong = [type(x).__name__ for x in items if not isinstance(x, Tensor)]
    if wrong:
        raise InputError(
            f"{called} must give the gradients as tensors; there is a {wrong[0]} among them."
        )
    grads = [(p, p.grad if isinstance(p, nn.Parameter) else p) for p in items]
    if all(grad is None for _, grad in grads):
        raise InputError(
            f"{called} gave no gradient: every .grad is None. Does it call backward(), and zero "
            "the gradients before?"
        )
    if any(g is not None and not g.is_floating_point() for _, g in grads):
        raise InputError(f"{called} must give gradients, and there are integers among its tensors.")
    dtype = max((g.dtype for _, g in grads if g is not None), key=lambda d: torch.finfo(d).eps)
    return torch.cat([_plain(torch.zeros_like(p) if g is None else g) for p, g in grads]), dtype


def _plain(gradient: Tensor) -> Tensor:
    # A DTensor (FSDP2) holds a shard, and every rank gathers the complete tensor.
    full = getattr(gradient, "full_tensor", None)
    unsharded: Tensor = gradient if full is None else full()
    return unsharded.detach().reshape(-1).to("cpu", torch.float64)


class Ranks:
    """The data-parallel ranks that run the check together; one if there are no others."""

    def __init__(self, group: Any = None) -> None:
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "group= needs torch.distributed: call init_process_group first, or leave group out."
            )
        self.group = data_parallel_group(group, None)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)

    def agreed(self, number: float) -> float:
        """The first rank's `number`: ranks that run different things would wait for each other."""
        if self.size == 1:
            return number
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, number, group=self.group)
        return float(shares[0])

    def check_same(self, numbers: list[float], tolerance: float, otherwise: str) -> None:
        """Raise on every rank unless all ranks have the same `numbers`. This is a collective."""
        if self.size == 1:
            return
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, numbers, group=self.group)
        for other in shares[1:]:
            close = len(other) == len(shares[0]) and math.dist(
                other, shares[0]
            ) <= tolerance * math.hypot(*shares[0])
            if not close:
                raise InputError(otherwise)


class Steps:
    """The user's step on pieces of one batch; the tolerance follows from the gradient's dtype."""

    def __init__(
        self, step_fn: StepFunction, batch: CuttableBatch, ranks: Ranks, tolerance: float | None
    ) -> None:
        self._step_fn, self.batch, self.ranks = step_fn, batch, ranks
        self._alone: dict[tuple[int, ...], Tensor] = {}
        everything = list(range(batch.sequences.count))
        self.full_gradient, dtype = flat_gradient(step_fn([batch.take(everything)]))
        # Half of the digits: another order of sums changes far less, and a wrong denominator far
        # more.
        self.tolerance = math.sqrt(torch.finfo(dtype).eps) if tolerance is None else tolerance
        if not self.full_gradient.isfinite().all():
            raise InputError(
                "step_fn's gradient of the whole batch is not finite; a partition cannot be judged "
                "by it."
            )
        if not self.full_gradient.any():
            raise InputError(
                "step_fn's gradient of the whole batch is 0: are the advantages 0, or the mask "
                "False everywhere?"
            )
        self._check_repeatable(self.run([everything]))

    def _check_repeatable(self, again: Tensor) -> None:
        if self.distance(again, self.full_gradient) <= self.tolerance:
            return
        if self.distance(again, 2 * self.full_gradient) <= self.tolerance:
            raise InputError(
                "step_fn gave twice the gradient when it ran twice: zero the gradients at its "
                "start."
            )
        raise InputError(
            "step_fn gave another gradient when it ran twice on the same batch (relative "
            f"difference {self.distance(again, self.full_gradient):.1e}), so no cut can be "
            "judged: switch dropout off (model.eval()), seed what it samples, and leave the "
            "optimizer's step out."
        )

    def run(self, cut: Sequence[Sequence[int]]) -> Tensor:
        """The gradient `[P]` of one step over these micro-batches, each a list of sequences."""
        return self.run_on([self.batch.take(part) for part in cut])

    def run_on(self, micro_batches: list[dict[str, Any]]) -> Tensor:
        """The gradient `[P]` of one step over ready micro-batches."""
        gradient, _ = flat_gradient(self._step_fn(micro_batches))
        if gradient.shape != self.full_gradient.shape:
            expected = self.full_gradient.numel()
            raise InputError(
                f"step_fn gave {expected} numbers for the whole batch, {gradient.numel()} for a "
                "cut of it."
            )
        return gradient

    def alone(self, part: Sequence[int]) -> Tensor:
        """The gradient of a step that consists of this micro-batch alone, normalised as the trainer
        normalises it. Each micro-batch is run once.
        """
        key = tuple(part)
        if key not in self._alone:
            self._alone[key] = self.run([part])
        return self._alone[key]

    def distance(self, a: Tensor, b: Tensor) -> float:
        """`‖a − b‖ / ‖b‖`, the same on all ranks; inf if `a` is not finite."""
        gap = self.ranks.agreed(float((a - b).norm() / b.norm()))
        return gap if math.isfinite(gap) else math.inf
