"""A batch that is cut between sequences, cuts that show a wrong denominator, a step on pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from policyloss.errors import InputError
from policyloss.functional.segments import Sequences
from policyloss.tokens import as_mask
from policyloss.totals import data_parallel_group

Cut = list[list[int]]  # the micro-batches, each a list of sequences


class CuttableBatch:
    """The mapping that a trainer trains on, as S sequences that can be cut.

    mask: `[B, T]` rows, or `[N]` with `cu_seqlens`. Tensors with a dimension of rows (`[B, …]`), of
    tokens of a pack (`[N, …]`, `[1, N, …]`) or of its sequences (`[S, …]`) are cut; everything else
    is passed through.
    lengths: the number of valid tokens of each sequence. positions: the number of all its
    positions, masked ones included. Both are `[S]`, float64.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        if not isinstance(batch, Mapping):
            raise InputError(
                f"batch must be a mapping of names to tensors, got {type(batch).__name__}."
            )
        if not isinstance(batch.get("mask"), Tensor):
            names = sorted(map(str, batch))
            raise InputError(f"batch needs a tensor 'mask', True where trained on; it has {names}.")
        self.batch = dict(batch)
        self.cu_seqlens: Tensor | None = self.batch.get("cu_seqlens")
        mask = self.batch["mask"]
        self.sequences = Sequences.of(mask, self.cu_seqlens)
        valid = as_mask(mask, mask)
        self.lengths = self.sequences.sum(valid).to("cpu", torch.float64)
        self.positions = self.sequences.sum(torch.ones_like(valid)).to("cpu", torch.float64)

    def take(self, chosen: Sequence[int]) -> dict[str, Any]:
        """The micro-batch of the `chosen` sequences, in that order; one may be chosen twice."""
        index = torch.tensor(list(chosen), dtype=torch.int64)
        if self.cu_seqlens is None:
            by_size = {self.sequences.shape[0]: index}
            return {name: _pick(x, by_size) for name, x in self.batch.items()}
        offsets = self.cu_seqlens.to("cpu", torch.int64)
        spans = [torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in chosen]
        tokens, n = torch.cat(spans), self.sequences.shape[0]
        by_size = {self.sequences.count: index, n: tokens}  # if N = S, a tensor is per token
        micro = {name: _pick(x, by_size) for name, x in self.batch.items()}
        for name, x in self.batch.items():
            if isinstance(x, Tensor) and x.shape[:2] == (1, n):
                micro[name] = x[:, tokens.to(x.device)]
        lengths = torch.tensor([len(span) for span in spans])
        micro["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(self.cu_seqlens)
        return micro

    def mask_half(self, sequence: int) -> dict[str, Any]:
        """One sequence alone, with the later half of its valid tokens masked."""
        micro = self.take([sequence])
        valid = micro["mask"] != 0
        keep = int(self.lengths[sequence]) // 2
        early = valid.reshape(-1).cumsum(0).reshape(valid.shape) <= keep
        micro["mask"] = torch.where(early, micro["mask"], torch.zeros_like(micro["mask"]))
        return micro

    def check_cuts(self, cuts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, Cut]:
        """The user's cuts, if each has every sequence once and no empty micro-batch."""
        if not isinstance(cuts, Mapping) or not cuts:
            raise InputError(f"cuts must map a name to a list of micro-batches; got {cuts!r}.")
        every = list(range(self.sequences.count))
        for name, cut in cuts.items():
            if sorted(i for part in cut for i in part) != every:
                wrong = f"{len(every)} sequences once, got {list(map(list, cut))}"
                raise InputError(f"cut {name!r} must hold each of the {wrong}.")
            if any(not self.lengths[list(part)].any() for part in cut):
                parts = list(map(list, cut))
                raise InputError(f"cut {name!r} has a micro-batch without a valid token: {parts}.")
        return {str(name): [list(part) for part in cut] for name, cut in cuts.items()}

    def default_cuts(self) -> dict[str, Cut]:
        """Halves, single sequences, one and the rest, short and long; equal cuts appear once."""
        present = self.lengths.nonzero().flatten().tolist()
        by_length = sorted(present, key=lambda i: float(self.lengths[i]))
        half = len(present) // 2
        cuts = {
            "two halves": [present[:half], present[half:]],
            "one sequence each": [[i] for i in present],
            "one and the rest": [present[:1], present[1:]],
            "short and long": [sorted(by_length[:half]), sorted(by_length[half:])],
        }
        distinct: dict[str, Cut] = {}
        for name, cut in cuts.items():
            if sorted(cut) not in [sorted(other) for other in distinct.values()]:
                distinct[name] = cut
        return {name: self._with_empty(cut) for name, cut in distinct.items()}

    def over_ranks(self, ranks: int) -> Cut:
        """One uneven share per rank: each a short sequence, and the last rank gets the rest."""
        present = self.lengths.nonzero().flatten().tolist()
        present.sort(key=lambda i: float(self.lengths[i]))
        if len(present) < ranks:
            few = f"{len(present)} sequences with valid tokens, too few"
            raise InputError(f"batch has {few} to share among {ranks} ranks.")
        return self._with_empty([*([i] for i in present[: ranks - 1]), present[ranks - 1 :]])

    def _with_empty(self, cut: Cut) -> Cut:
        """`cut` with the sequences without a valid token in its last part: alone they are 0/0."""
        return [*cut[:-1], [*cut[-1], *(self.lengths == 0).nonzero().flatten().tolist()]]


def _pick(x: Any, by_size: dict[int, Tensor]) -> Any:
    """`x` at the indices for the size of its first dimension; other values are unchanged."""
    index = by_size.get(x.shape[0]) if isinstance(x, Tensor) and x.dim() else None
    return x if index is None else x[index.to(x.device)]


StepFunction = Callable[[list[dict[str, Any]]], Any]


def flat_gradient(result: Any, called: str = "step_fn") -> tuple[Tensor, torch.dtype]:
    """The gradients in `result` as one float64 vector `[P]` on the CPU, and their coarsest dtype.

    result: a module or parameters with `.grad` (None counts as 0), or the gradients themselves: a
    tensor, a mapping or an iterable of tensors. called: the name of the function in errors.
    """
    if isinstance(result, nn.Module):
        result = [p for p in result.parameters() if p.requires_grad]
    elif isinstance(result, Mapping):
        result = list(result.values())
    elif isinstance(result, Tensor):
        result = [result]
    if not isinstance(result, Iterable) or isinstance(result, str):
        kind = type(result).__name__
        forms = "the model, its parameters or tensors"
        raise InputError(f"{called} must give the gradients: {forms}; got {kind}.")
    items = list(result)
    wrong = [type(x).__name__ for x in items if not isinstance(x, Tensor)]
    if wrong:
        raise InputError(f"{called} must give tensors; there is a {wrong[0]} among them.")
    grads = [(p, p.grad if isinstance(p, nn.Parameter) else p) for p in items]
    if all(grad is None for _, grad in grads):
        why = "every .grad is None. Does it call backward(), and zero the gradients before?"
        raise InputError(f"{called} gave no gradient: {why}")
    if any(g is not None and not g.is_floating_point() for _, g in grads):
        raise InputError(f"{called} must give gradients, and there are integers among its tensors.")
    dtype = max((g.dtype for _, g in grads if g is not None), key=lambda d: torch.finfo(d).eps)
    return torch.cat([_plain(torch.zeros_like(p) if g is None else g) for p, g in grads]), dtype


def _plain(gradient: Tensor) -> Tensor:
    # A DTensor (FSDP2) holds a shard, and every rank gathers the complete tensor.
    full = getattr(gradient, "full_tensor", None)
    unsharded: Tensor = gradient if full is None else full()
    return unsharded.detach().reshape(-1).to("cpu", torch.float64)


class Peers:
    """The data-parallel ranks that run the check together; one if there are no others."""

    def __init__(self, group: Any = None) -> None:
        if group is not None and not (dist.is_available() and dist.is_initialized()):
            raise InputError("group= needs torch.distributed: call init_process_group first.")
        self.group = data_parallel_group(group, None)
        self.size = 1 if self.group is None else dist.get_world_size(self.group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)

    def agree(self, number: float) -> float:
        """The first rank's `number`, because ranks that take different branches would deadlock."""
        return number if self.size == 1 else float(self._gather(number)[0])

    def check_same(self, numbers: list[float], tolerance: float, otherwise: str) -> None:
        """Raise on every rank unless all ranks have the same `numbers`. This is a collective."""
        if self.size == 1:
            return
        first, *others = self._gather(numbers)
        most = tolerance * math.hypot(*first)
        for other in others:
            if len(other) != len(first) or not math.dist(other, first) <= most:
                raise InputError(otherwise)

    def _gather(self, x: Any) -> list[Any]:
        shares: list[Any] = [None] * self.size
        dist.all_gather_object(shares, x, group=self.group)
        return shares


class Steps:
    """The user's step on pieces of one batch; the tolerance follows from the gradient's dtype."""

    def __init__(
        self, step_fn: StepFunction, batch: CuttableBatch, ranks: Peers, tolerance: float | None
    ) -> None:
        self._step_fn, self.batch, self.ranks = step_fn, batch, ranks
        self._alone: dict[tuple[int, ...], Tensor] = {}
        everything = list(range(batch.sequences.count))
        self.full_gradient, dtype = flat_gradient(step_fn([batch.take(everything)]))
        # Half of the digits: another order of sums changes far less, and a wrong denominator far
        # more.
        self.tolerance = math.sqrt(torch.finfo(dtype).eps) if tolerance is None else tolerance
        if not self.full_gradient.isfinite().all():
            raise InputError("step_fn's gradient of the whole batch is not finite.")
        if not self.full_gradient.any():
            why = "are the advantages 0, or the mask False everywhere?"
            raise InputError(f"step_fn's gradient of the whole batch is 0: {why}")
        again = self.run([everything])
        apart = self.distance(again, self.full_gradient)
        if apart > self.tolerance:
            if self.distance(again, 2 * self.full_gradient) <= self.tolerance:
                raise InputError("step_fn gave twice the gradient in a rerun: zero the gradients.")
            raise InputError(
                "step_fn gave another gradient when it ran twice on the same batch (relative "
                f"difference {apart:.1e}), so no cut can be judged: switch dropout off "
                "(model.eval()), seed its sampling, and leave the optimizer's step out."
            )

    def run(self, cut: Sequence[Sequence[int]]) -> Tensor:
        """The gradient `[P]` of one step over these micro-batches, each a list of sequences."""
        return self.run_on([self.batch.take(part) for part in cut])

    def run_on(self, micro_batches: list[dict[str, Any]]) -> Tensor:
        """The gradient `[P]` of one step over ready micro-batches."""
        gradient, _ = flat_gradient(self._step_fn(micro_batches))
        if gradient.shape != self.full_gradient.shape:
            expected = self.full_gradient.numel()
            counts = f"{expected} numbers for the whole batch, {gradient.numel()} for a cut of it"
            raise InputError(f"step_fn gave {counts}.")
        return gradient

    def alone(self, part: Sequence[int]) -> Tensor:
        """The gradient of a step with this micro-batch alone; each is run once."""
        key = tuple(part)
        if key not in self._alone:
            self._alone[key] = self.run([part])
        return self._alone[key]

    def distance(self, a: Tensor, b: Tensor) -> float:
        """`‖a − b‖ / ‖b‖`, the same on all ranks; inf if `a` is not finite."""
        gap = self.ranks.agree(float((a - b).norm() / b.norm()))
        return gap if math.isfinite(gap) else math.inf
