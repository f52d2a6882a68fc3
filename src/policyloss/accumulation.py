"""`accumulate`: the micro-batches of one optimizer step, each with the totals of the whole step.

A loss divided by the counts of its own micro-batch depends on how the batch was split. Here the
step is counted first, over all micro-batches and all ranks, and every micro-batch divides by that
count, so the gradients of the micro-batches add up to the gradient of the whole batch.

Legend: N tokens and S sequences of all micro-batches of a rank, one after another (a padded row is
a sequence as long as the row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss.arguments import check_group, check_tensor
from policyloss.catalogue import AnyLoss
from policyloss.errors import InputError, unknown_name
from policyloss.functional.collectives import all_gather
from policyloss.functional.segments import Sequences
from policyloss.inputs import TOKEN_SHAPED
from policyloss.loss import measure, policy_loss, ready_loss
from policyloss.metrics import Metrics
from policyloss.mixture import Mixture
from policyloss.policy_metrics import MetricsLevel, check_level
from policyloss.records import Invalid
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask, check_group_ids, expand_advantages
from policyloss.totals import GroupTokens, Totals, data_parallel_group, group_tokens, sum_weights

# The step was counted with the first tensors, so no call may replace them. A call may replace the
# others, which are per token or passed through.
_COUNTED = ("mask", "cu_seqlens", "group_ids", "weights")
_PER_TOKEN = (*TOKEN_SHAPED, "turn_ids", "ages", "positions")
_REPLACEABLE = (*_PER_TOKEN, "advantages", "extras")
_PER_SEQUENCE = ("advantages", "weights")  # per token or per sequence


def accumulate(
    spec: AnyLoss | Mixture,
    micro_batches: Sequence[Mapping[str, Any]],
    *,
    group: Any = None,
    cp_group: Any = None,
    dp_size: int | None = None,
    logp: Callable[[MicroBatch], Tensor] | None = None,
    metrics: MetricsLevel = "all",
) -> Accumulation:
    """Count the tokens of one optimizer step, and return its micro-batches with these totals.

        step = pl.accumulate(spec, micro_batches, group=data_parallel_group)
        for micro in step:
            micro.loss(logp_of(model, micro["ids"])).backward()
        optimizer.step()
        print(step.reduce_metrics().compute())

    micro_batches: this rank's share of the step, a list of mappings. Each mapping holds `mask` and
    the tensors that `spec` reads, under the names of `policy_loss` (`old_logp`, `advantages`,
    `rollout_logp`, `ref_logp`, `cu_seqlens`, `group_ids`, `weights`, …), padded `[B, T]` or packed
    `[N]`; the loss ignores other entries, such as "ids". On a rank with fewer micro-batches than
    other ranks of `group`, the iteration yields the last one again, with an all-False mask, which
    adds nothing: so the forward of a sharded model, a collective, runs equally often on every rank.
    With a `Mixture`, each mapping's `extras` holds the masks that the streams name; the
    tokens of all streams are counted.
    group, cp_group, dp_size: as in `Totals.count`. Counting takes one collective over `cp_group`,
    one over `group`, and a second one over `group` if there are `group_ids`. A loss that divides by
    weights (`WeightMean`) takes one more over `cp_group` and one more over `group`.
    logp: a function that takes a micro-batch and returns its current log-probabilities, in the
    shape of its mask. It is required if `spec.needs_statistics`: `accumulate` then calls it once
    for every micro-batch, without gradient, and computes the totals from the results.
    metrics: which metrics `micro.loss` computes, as in `policy_loss`.
    """
    spec = ready_loss(spec)
    check_level(metrics)
    check_micro_batches(micro_batches)
    check_group("group", group)
    check_group("cp_group", cp_group)
    if spec.needs_statistics and not callable(logp):
        raise InputError(
            "this loss needs numbers of the whole step that its mask does not give (survivors of a "
            "rejection, covariances or a mean weight): pass logp=, a function that returns a "
            "micro-batch's current log-probabilities; or take a spec without them "
            '(rejected="keep", no SelfNormalise, MomentBudget, CovClip or CovKL).'
        )
    group = data_parallel_group(group, cp_group)
    weighted = "weights" in spec.reads
    counts, number = count_step(micro_batches, group, cp_group, dp_size, weighted)
    if isinstance(spec, Mixture):
        of_streams = {}
        for name, stream in spec.streams.items():
            theirs = [
                {**x, "mask": stream.tokens(x["mask"], x.get("extras"))} for x in micro_batches
            ]
            weighted = "weights" in stream.loss.reads
            of_streams[name] = count_step(theirs, group, cp_group, dp_size, weighted)[0]
        counts = replace(counts, streams=of_streams)
    step = Accumulation(spec, counts, counts, group, cp_group, metrics)
    last = micro_batches[-1]
    empty = {**last, "mask": torch.zeros_like(last["mask"], dtype=torch.bool)}
    shares = [*micro_batches, *[empty] * (number - len(micro_batches))]
    step._micro_batches = [MicroBatch(step, data, i == number - 1) for i, data in enumerate(shares)]
    for micro in step._micro_batches[len(micro_batches) :]:
        micro.is_used = True  # it holds nothing of the step
    if spec.needs_statistics and logp is not None:
        step.totals = _measure_step(step, logp)
    return step


@dataclass(eq=False, repr=False)
class Accumulation:
    """One optimizer step, made by `accumulate`. Iterate over it once, calling every `micro.loss`.

        for micro in step:
            micro.loss(logp_of(model, micro["ids"])).backward()

    totals: the counts that the loss divides by, which `micro.loss` passes to `policy_loss`. counts:
    the numbers of valid tokens and sequences in the masks, for `value_loss(…, totals=step.counts)`;
    the same object as `totals`, unless the loss needs numbers that the masks do not give (see
    `measure`). group, cp_group: the data-parallel and context-parallel process groups. level:
    passed to `policy_loss` as `metrics`. The attribute `metrics` holds this rank's metrics, merged
    over the losses computed so far.
    """

    spec: LossSpec | Mixture
    totals: Totals
    counts: Totals
    group: Any = None
    cp_group: Any = None
    level: MetricsLevel = "all"
    metrics: Metrics = field(default_factory=Metrics, init=False)
    _micro_batches: list[MicroBatch] = field(default_factory=list, init=False)
    _iterated: bool = field(default=False, init=False)

    def __len__(self) -> int:
        """The number of micro-batches, the same on every rank of `group`."""
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[MicroBatch]:
        if self._iterated:
            raise InputError(
                "this step was iterated already, and a second time would add its gradients again; "
                "call policyloss.accumulate again for the next optimizer step, even on the same "
                "micro-batches."
            )
        self._iterated = True
        return iter(self._micro_batches)

    def add(self, metrics: Metrics) -> None:
        """Merge metrics of a policy loss computed without `micro.loss`: `step.add(out.metrics)`.

        Metrics of `value_loss` have the same names: add them up separately.
        """
        self.metrics = self.metrics + metrics

    def reduce_metrics(self) -> Metrics:
        """The metrics merged over all ranks: `step.reduce_metrics().compute()`. A collective.

        Raises an `InputError` if a micro-batch of some rank was never used or, with a process
        group, if an input held invalid values (see `Metrics.compute`).
        """
        metrics = self.metrics
        unused = sum(not micro.is_used for micro in self._micro_batches)
        if unused:
            devices = (part.device for r in metrics.values() for part in r.parts)
            number = torch.tensor(unused, device=next(devices, torch.device("cpu")))
            metrics = metrics + Metrics({"unused_micro_batches": Invalid(number)})
        for group in (self.group, self.cp_group):
            metrics = metrics if group is None else metrics.all_reduce(group)
        if unused or self.group is not None or self.cp_group is not None:
            metrics.refuse_invalid()  # on every rank alike, and where the host has waited already
        return metrics


class MicroBatch(Mapping[str, Any]):
    """A micro-batch of an `Accumulation`; `micro["ids"]` reads an entry of your mapping.

        with contextlib.nullcontext() if micro.is_last else model.no_sync():
            micro.loss(logp_of(model, micro["ids"])).backward()

    is_last: whether this is the rank's last micro-batch of the step. Run the backward of the last
    one outside of `no_sync`: DDP then averages the gradients of the ranks, as `loss` expects.
    is_used: whether `loss` or `arguments` was called.
    """

    def __init__(self, step: Accumulation, data: Mapping[str, Any], is_last: bool) -> None:
        self.is_last = is_last
        self.is_used = False
        self._has_loss = False
        self._step = step
        self._data = data

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return f"MicroBatch({', '.join(map(str, self._data))})"

    def arguments(self, **tensors: Tensor | None) -> dict[str, Any]:
        """Keyword arguments for a loss function: the micro-batch's tensors, the step's totals and
        `cp_group`.

            out = pl.linear_policy_loss(spec, hidden, weight, ids, **micro.arguments())
            step.add(out.metrics)

        If you use `index` of `linear_policy_loss`, the mask and all other tensors have one entry
        for each entry of `index`; pass `index=micro["index"]` yourself, like the ids.
        tensors: more tensors, or replacements of the micro-batch's tensors (`entropy=…`).
        `old_logp` is in the result even if it is None.
        """
        for name in tensors:
            if name in _COUNTED:
                counted = "the step was counted with the micro-batch's own."
                raise InputError(f"{name} cannot be replaced now: {counted}")
            if name not in _REPLACEABLE:
                raise InputError(unknown_name("tensor", name, _REPLACEABLE))
        arguments = {name: self._data.get(name) for name in _COUNTED + _REPLACEABLE} | tensors
        if arguments["advantages"] is None:
            names = ", ".join(map(str, self._data))
            raise InputError(f"the micro-batch has no advantages (it has {names}); put them there.")
        always = ("old_logp", "advantages", "mask")
        present = {name: x for name, x in arguments.items() if x is not None or name in always}
        self.is_used = True
        return {**present, "totals": self._step.totals, "cp_group": self._step.cp_group}

    def loss(self, logp: Tensor, **tensors: Tensor | None) -> Tensor:
        """The micro-batch's share of the step's loss, to call `backward()` on. Its metrics are
        merged into `step.metrics`.

            micro.loss(logp, entropy=entropy).backward()

        logp: `[B, T]` or `[N]`, in the shape of the mask. tensors: as in `arguments`.
        """
        if self._has_loss:
            raise InputError(
                "the loss of this micro-batch was taken already, and a second one would add its "
                "gradient and metrics again; keep the first, or call policyloss.policy_loss(spec, "
                "logp, **micro.arguments()) to inspect it."
            )
        step, arguments = self._step, self.arguments(**tensors)
        out = policy_loss(step.spec, logp, **arguments, metrics=step.level)
        self._has_loss = True
        step.add(out.metrics)
        return out.loss


def _measure_step(step: Accumulation, logp: Callable[[MicroBatch], Tensor]) -> Totals:
    """`measure` on all micro-batches as one pack.

    Micro-batches without valid tokens are run too: other ranks may wait for their forward.
    """
    micro_batches = step._micro_batches
    pack = StepPack.of(micro_batches)
    flat: dict[str, list[Tensor]] = {}
    old_logp: str | None = None  # the word that stands for it
    for i, (micro, sequences) in enumerate(zip(micro_batches, pack.layouts, strict=True)):
        used = micro.is_used
        with torch.no_grad():
            tensors = {**micro.arguments(), "logp": logp(micro)}
        micro.is_used = used  # to measure it trains nothing
        for name in _PER_SEQUENCE:
            if isinstance(x := tensors.get(name), Tensor):
                tensors[name] = expand_advantages(x, sequences, name)
        tensors |= {f"extras.{name}": x for name, x in (tensors.get("extras") or {}).items()}
        if isinstance(tensors.get("old_logp"), str):
            old_logp = tensors.pop("old_logp")
        for name, x in tensors.items():
            per_token = name in (*_PER_SEQUENCE, *_PER_TOKEN) or name.startswith("extras.")
            if name == "logp" or (per_token and x is not None):
                flat.setdefault(name, []).append(_flat(name, x, i, sequences))
    number = len(micro_batches)
    joined = {name: torch.cat(parts) for name, parts in flat.items() if len(parts) == number}
    named: dict[str, Any] = {name: x for name, x in joined.items() if "." not in name}
    named["extras"] = {name.removeprefix("extras."): x for name, x in joined.items() if "." in name}
    for name in _PER_SEQUENCE:  # in a pack of single tokens, `[N]` could also mean one per sequence
        if name in named:
            named[name] = named[name].unsqueeze(0)
    layout = {"cu_seqlens": pack.cu_seqlens, "group_ids": pack.group_ids, "cp_group": step.cp_group}
    named.setdefault("old_logp", old_logp)
    return measure(
        step.spec, mask=pack.mask, **named, **layout, group=step.group, dp_size=step.counts.dp_size
    )


def _flat(name: str, x: Any, i: int, sequences: Sequences) -> Tensor:
    """The token-shaped tensor `x` of micro-batch `i`, flattened for the pack."""
    if not isinstance(x, Tensor) or tuple(x.shape) != sequences.shape:
        actual = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise InputError(
            f"{name} of micro_batches[{i}] must be a tensor of its mask's shape {sequences.shape}, "
            f"got {actual}."
        )
    return x.reshape(-1)


def check_micro_batches(micro_batches: Any) -> None:
    """Raise unless `micro_batches` is a sequence of mappings that hold a mask."""
    if not isinstance(micro_batches, Sequence):
        raise InputError(
            f"micro_batches must be a list of mappings, got {type(micro_batches).__name__}; the "
            "step is counted before it begins: collect an iterator's by list(…), and put a "
            "single micro-batch in a list."
        )
    for i, data in enumerate(micro_batches):
        if not isinstance(data, Mapping):
            raise InputError(
                f"micro_batches[{i}] must be a mapping of names to tensors, got "
                f"{type(data).__name__}."
            )
        if data.get("mask") is None:
            names = ", ".join(map(str, data)) or "nothing"
            raise InputError(f"micro_batches[{i}] has no mask (it has {names}); put it there.")
    for name in ("group_ids", "weights"):
        present = [data.get(name) is not None for data in micro_batches]
        if any(present) and not all(present):
            raise InputError(
                f"micro_batches[{present.index(False)}] has no {name}, but others have; give all "
                "of them or none."
            )


@dataclass(frozen=True)
class StepPack:
    """All micro-batches of a rank as one pack. Shapes: `[N]`, `[S+1]`, `[S]`, and weights `[1, N]`.

    layouts: the sequences of each micro-batch.
    """

    mask: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor | None
    weights: Tensor | None
    layouts: list[Sequences]

    @classmethod
    def of(cls, micro_batches: Sequence[Mapping[str, Any]]) -> StepPack:
        """Check and pack one micro-batch or more."""
        layouts, masks, lengths, groups, weights = [], [], [], [], []
        for i, data in enumerate(micro_batches):
            mask, group_ids = data["mask"], data.get("group_ids")
            try:
                check_tensor("mask", mask)
                _check_values("mask", mask)
                masks.append(as_mask(mask, mask).reshape(-1))
                sequences = Sequences.of(mask, data.get("cu_seqlens"), called="mask")
                if group_ids is not None:
                    check_group_ids(group_ids, sequences)
                    _check_values("group_ids", group_ids)
                    groups.append(group_ids.to(mask.device))
                if data.get("weights") is not None:
                    like = ("mask", mask)
                    each = expand_advantages(data["weights"], sequences, "weights", like)
                    weights.append(each.reshape(1, -1))
            except InputError as error:
                raise InputError(f"micro_batches[{i}]: {error}") from None
            layouts.append(sequences)
            rows = torch.full(mask.shape[:1], mask.shape[-1], device=mask.device)
            ends = sequences.offsets
            lengths.append(rows if ends is None else ends.diff().to(torch.int64))
        offsets = torch.nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        ids = torch.cat(groups) if groups else None
        all_weights = torch.cat(weights, 1) if weights else None
        return cls(torch.cat(masks), offsets, ids, all_weights, layouts)


def _check_values(name: str, x: Tensor) -> None:
    if x.is_meta:
        where = "the device 'meta', which holds no values to count"
        raise InputError(f"{name} is on {where}; move it to the loss's device.")


def count_step(
    micro_batches: Sequence[Mapping[str, Any]],
    group: Any,
    cp_group: Any,
    dp_size: int | None,
    weighted: bool = False,
) -> tuple[Totals, int]:
    """The counts of the step, and the largest number of micro-batches on any rank of `group`.

    weighted: whether to sum up the weights, too.
    """
    if group is None:
        _check_numbers([len(micro_batches)])
        pack = StepPack.of(micro_batches)
        layout = {"cu_seqlens": pack.cu_seqlens, "group_ids": pack.group_ids, "cp_group": cp_group}
        weights = pack.weights if weighted else None
        counts = Totals.count(pack.mask, **layout, weights=weights, dp_size=dp_size)
        return counts, len(micro_batches)
    pack_here = StepPack.of(micro_batches) if micro_batches else None
    share, members = _share(pack_here, len(micro_batches), cp_group)
    shares = torch.stack(all_gather(share, group))
    tokens, sequences, numbers, with_ids, with_weights = shares.unbind(1)
    number_of_each, members_of_each = numbers.tolist(), with_ids.tolist()
    _check_numbers(number_of_each)
    groups = _groups(members, members_of_each, group) if max(members_of_each) >= 0 else None
    weight_total = None
    if weighted:
        _refuse_missing("weights", with_weights.tolist())
        assert pack_here is not None
        assert pack_here.weights is not None
        weight_total = sum_weights(pack_here.weights.reshape(-1), pack_here.mask, cp_group, group)
    ranks = len(number_of_each) * (1 if cp_group is None else dist.get_world_size(cp_group))
    size = ranks if dp_size is None else dp_size
    counts = Totals(tokens.sum(), sequences.sum(), groups, size, weights=weight_total)
    return counts, max(number_of_each)


def _share(pack: StepPack | None, number: int, cp_group: Any) -> tuple[Tensor, Tensor]:
    """Count this rank's tokens, sequences, micro-batches and group ids; also return its groups.

    The counts are `[5]`: the number of group ids is −1 without ids, and the fifth number is 1 if
    there are weights. The groups are the ids and the lengths of the sequences, `[2, S]`, empty
    without ids.
    """
    if pack is None:
        return torch.tensor([0, 0, 0, -1, 0]), torch.zeros(2, 0, dtype=torch.int64)
    lengths = Sequences.of(pack.mask, pack.cu_seqlens, cp_group).sum(pack.mask)
    ids = pack.group_ids
    members = -1 if ids is None else ids.shape[0]
    has_weights = int(pack.weights is not None)
    numbers = torch.tensor([number, members, has_weights], device=lengths.device)
    counts = torch.cat([torch.stack([lengths.sum(), (lengths > 0).sum()]), numbers])
    if ids is None:
        return counts, lengths.new_zeros(2, 0)
    return counts, torch.stack([ids.to(torch.int64), lengths])


def _check_numbers(numbers: list[int]) -> None:
    """Raise on every rank if some rank has no micro-batch for a sharded model's forward."""
    if 0 in numbers:
        raise InputError(
            f"rank {numbers.index(0)} of {len(numbers)} has no micro-batch; every rank needs "
            "one in micro_batches, to run its forward on: give it one with an all-False mask, "
            "which adds nothing."
        )


def _refuse_missing(name: str, present: Sequence[bool]) -> None:
    """Raise on every rank if one of them lacks the tensor `name`, which others have."""
    if not all(present):
        missing = [bool(x) for x in present].index(False)
        raise InputError(
            f"rank {missing} of the group has no {name}, but others have; give them on all ranks "
            "or on none."
        )


def _groups(members: Tensor, members_of_each: list[int], group: Any) -> GroupTokens:
    """The tokens of each group over all ranks. members: this rank's ids and lengths `[2, S]`."""
    _refuse_missing("group_ids", [members >= 0 for members in members_of_each])
    missing = (0, max(members_of_each) - members.shape[1])
    shares = all_gather(torch.nn.functional.pad(members, missing), group)
    there = [share[:, :n] for share, n in zip(shares, members_of_each, strict=True)]
    return group_tokens(*torch.cat(there, dim=1))
