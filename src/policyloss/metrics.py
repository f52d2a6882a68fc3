"""Metrics that add up over any number of micro-batches and ranks: each is a record of sums.

A mean of means over uneven micro-batches is not the mean. Here only `compute()` divides the sums
and copies them from the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from policyloss import notebook
from policyloss.arguments import check_group, description, is_compiling
from policyloss.errors import InputError, unknown_name
from policyloss.functional.collectives import all_max, collective_device, outside_level
from policyloss.functional.exact import arithmetic, as_limbs
from policyloss.functional.masking import accumulator_dtype
from policyloss.records import KINDS, Invalid, Record

# The errors of `Metrics.compute` for counts that are not 0; n is the count.
REFUSED = {
    "invalid_mask_values": (
        "mask held {n} values that are neither 0 nor 1 (1 = train on this token), and each of "
        "them was trained on. Give a bool mask (labels != -100, attention_mask == 1); to weight "
        "tokens, pass weights=."
    ),
    "tokens_without_turn": (
        "turn_ids held {n} negative numbers where mask is True; −1 marks tokens that the "
        "environment wrote, which the policy is not trained on. Mask them, too."
    ),
    "negative_ages": (
        "ages held {n} negative numbers where mask is True. An age is the version of the current "
        "weights minus that of the weights that sampled the token."
    ),
    "negative_weights": (
        "weights held {n} negative numbers, and each of them turned the loss of its token around, "
        "KL and entropy included. Give weights of 0 or more."
    ),
    "invalid_cu_seqlens": (
        "cu_seqlens of {n} calls did not rise from 0 to the number of packed tokens, and their "
        "losses took all tokens for one sequence. For lengths L use "
        "torch.nn.functional.pad(L.cumsum(0), (1, 0))."
    ),
    "unused_micro_batches": (
        "{n} micro-batches of this step were never used: the step was counted with them, so the "
        "gradient is too small. Take micro.loss(logp) of each, or pass micro.arguments() to "
        "another loss function and add its metrics by step.add."
    ),
}
POSITIVE_LOGP = (
    "more than half of the valid tokens have a positive log-probability, which no token can have: "
    "were probabilities, entropies or negative log-likelihoods passed as logp, old_logp, "
    "rollout_logp or ref_logp? See the metric positive_logp_tokens."
)
ZERO_LOGP = (
    "every valid token has a log-probability of exactly 0, so that it was certain: was a tensor of "
    "zeros passed as logp, old_logp, rollout_logp, ref_logp or teacher_logp, and never filled? See "
    "the metric zero_logp_tokens."
)
BEYOND_TOTALS = (
    "a call has more than its totals count for the whole step (metric beyond_totals): the average "
    "divided by too small a count. Count all micro-batches of the step, "
    "policyloss.Totals.count(mask_of_the_whole_step); for a plain sum use TokenSum."
)


def refuse_invalid(counts: Mapping[str, Tensor | float]) -> None:
    """Raise if one of these counts, by the names of `REFUSED`, is not 0."""
    for name, number in counts.items():
        if float(number) != 0:
            raise InputError(REFUSED[name].format(n=f"{float(number):g}"))


class RecordPlaces:
    """The indices of the records of a `Metrics` in one tensor `[K]`.

    The tensor holds a number that several records share (a count) once.
    """

    def __init__(self, metrics: Metrics) -> None:
        places = {part: place for place, part in enumerate(_parts_by_id(metrics))}
        # Tuples, which a compiler can read where it holds them as constants.
        self.records = tuple(
            (name, type(r), tuple(places[id(part)] for part in r.parts))
            for name, r in metrics.items()
        )

    @staticmethod
    def pack(metrics: Metrics, *more: Tensor) -> Tensor:
        """Every number of the records once, then the 0-dim numbers `more`, as one tensor `[K]`.

        The dtype is wide enough that counts stay exact.
        """
        parts = [*_parts_by_id(metrics).values(), *more]
        return torch.stack([part.to(accumulator_dtype(part.device)) for part in parts])


class Metrics(Mapping[str, Record]):
    """The metrics of a loss by name, each as sums that can be merged.

    `a + b` merges micro-batches, `.all_reduce(group)` returns the merge of all ranks, and
    `.compute()` returns floats.
    """

    def __init__(self, records: dict[str, Record] | None = None) -> None:
        values = list(records.values()) if isinstance(records, dict) else [None]
        if records is not None and [r for r in values if not isinstance(r, Record)]:
            raise InputError(f"records must be a dict of records, got {description(records)}.")
        self._unpacked: dict[str, Record] | None = records or {}
        self._packed: tuple[RecordPlaces, Tensor] | None = None
        self._make: Callable[[], dict[str, Record]] | None = None

    @classmethod
    def from_packed(cls, places: RecordPlaces, values: Tensor) -> Metrics:
        """Metrics whose numbers are in `values` `[K]`, at `places`; built when one is read."""
        metrics = cls()
        metrics._unpacked, metrics._packed = None, (places, values)
        return metrics

    @classmethod
    def of_call(cls, make: Callable[[], dict[str, Record]], tokens: Tensor) -> Metrics:
        """The metrics that `make` returns. It is called when a metric is first read, or at once
        under `torch.compile` or CUDA-graph capture. tokens: a tensor on the device of the loss.
        """
        if is_compiling() or (tokens.is_cuda and torch.cuda.is_current_stream_capturing()):
            return cls(make())
        metrics = cls()
        metrics._unpacked, metrics._make = None, make
        return metrics

    @property
    def _records(self) -> dict[str, Record]:
        if self._unpacked is None and self._make is not None:
            with torch.no_grad():
                self._unpacked = self._make()
        elif self._unpacked is None:
            assert self._packed is not None
            places, packed = self._packed
            parts = packed.unbind()
            self._unpacked = {n: kind(*[parts[i] for i in at]) for n, kind, at in places.records}
        return self._unpacked

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy or pickle: the records, which are computed if they were not yet."""
        return {"_unpacked": self._records, "_packed": None, "_make": None}

    def __getitem__(self, name: str) -> Record:
        try:
            return self._records[name]
        except KeyError:
            raise KeyError(unknown_name("metric", name, self._records)) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self._records)})"

    def _repr_html_(self) -> str:
        """For a notebook: every metric and its value (one host sync)."""
        rows = [(name, f"{x:.10g}") for name, x in self.compute().items()]
        return notebook.table(("metric", "value"), rows)

    def __add__(self, other: Metrics) -> Metrics:
        if not isinstance(other, Metrics):
            return NotImplemented
        merged = dict(self._records)
        for name, record in other._records.items():
            merged[name] = merged[name].merge(record) if name in merged else record
        return Metrics(merged)

    def __radd__(self, other: object) -> Metrics:
        """`0 + metrics` is `metrics`, so `sum(list_of_metrics)` works."""
        return self if other == 0 else NotImplemented

    def compute(self) -> dict[str, float]:
        """All values as Python floats, with one host sync for all of them together.

        Raises an `InputError` if a count of invalid inputs, such as `invalid_mask_values`, is not
        0; the result leaves these counts out. Likely mistakes (`positive_logp_tokens`,
        `zero_logp_tokens`, `beyond_totals`) cause a warning.
        """
        if self._packed is not None and self._packed[1].device.type != "cpu":
            places, packed = self._packed
            # One copy to the host, and the quotients there.
            return Metrics.from_packed(places, packed.cpu()).compute()
        if not self._records:
            return {}
        values = [record.value for record in self._records.values()]
        wide = accumulator_dtype(values[0].device)
        together = torch.stack([v.to(wide) for v in values]).tolist()
        numbers = dict(zip(self._records, together, strict=True))
        invalid = [name for name, record in self._records.items() if isinstance(record, Invalid)]
        refuse_invalid({name: numbers.pop(name) for name in invalid})
        for name in [n for n in numbers if n.rpartition("/")[2] == "tokens"]:
            tokens, stream = numbers[name], name.removesuffix("tokens")
            if numbers.get(f"{stream}positive_logp_tokens", 0) > tokens / 2:
                warnings.warn(POSITIVE_LOGP, stacklevel=outside_level())
            if tokens and numbers.get(f"{stream}zero_logp_tokens") == tokens:
                warnings.warn(ZERO_LOGP, stacklevel=outside_level())
            if numbers.get(f"{stream}beyond_totals", 0) > 0:
                warnings.warn(BEYOND_TOTALS, stacklevel=outside_level())
        return numbers

    def refuse_invalid(self) -> None:
        """Raise an `InputError` if a count of invalid inputs is not 0. Waits for the device."""
        if self._unpacked is None and self._packed is not None:
            places, packed = self._packed
            invalid = {n: packed[at[0]] for n, kind, at in places.records if kind is Invalid}
        else:
            invalid = {n: r.value for n, r in self._records.items() if isinstance(r, Invalid)}
        refuse_invalid(invalid)

    def all_reduce(self, group: Any = None) -> Metrics:
        """The metrics of all ranks of `group` together: one all-reduce of sums and one of extremes.

        This is a collective: every rank must call it, even a rank without metrics. Ranks may hold
        metrics of different names; the names are exchanged first. Without `torch.distributed`, the
        metrics are returned unchanged.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return self
        check_group("group", group)
        kinds = self._kinds_of_all_ranks(group)
        if not kinds:
            return self
        device = next(
            (p.device for r in self._records.values() for p in r.parts),
            collective_device(group, torch.device("cpu")),
        )
        wide = accumulator_dtype(device)
        mine = self._records
        records = {n: mine.get(n) or kind.nothing(device, wide) for n, kind in kinds.items()}
        flat = [(part, record.op) for record in records.values() for part in record.parts]
        # All as limbs: in the exact mode a rank without metrics has plain numbers.
        numbers = torch.stack([as_limbs(p.to(wide)) for p, _ in flat])
        is_sum = torch.tensor([op == "sum" for _, op in flat], device=numbers.device)
        # A minimum is a maximum with the sign turned, so extremes need one collective, not two.
        signs = [-1.0 if op == "min" else 1.0 for _, op in flat]
        sign = torch.tensor(signs, dtype=wide, device=numbers.device)
        sums = torch.where(is_sum.unsqueeze(-1), numbers, 0)
        dist.all_reduce(sums, group=group)
        has_limbs = any(p.dim() for p, _ in flat)
        extremes = all_max(numbers[:, 0] * sign, group) * sign
        parts = iter(
            (total if has_limbs else arithmetic().record_sum(total)) if op == "sum" else extreme
            for (_, op), total, extreme in zip(flat, sums, extremes, strict=True)
        )
        return Metrics({n: type(r)(*(next(parts) for _ in r.parts)) for n, r in records.items()})

    def _kinds_of_all_ranks(self, group: Any) -> dict[str, type[Record]]:
        """The name and kind of every metric that some rank holds, in one order on all ranks."""
        shares: list[Any] = [None] * dist.get_world_size(group)
        here = [(name, type(r).__name__) for name, r in self._records.items()]
        dist.all_gather_object(shares, here, group=group)
        return {name: KINDS[kind] for share in shares for name, kind in share}


def _parts_by_id(metrics: Metrics) -> dict[int, Tensor]:
    return {id(part): part for record in metrics.values() for part in record.parts}
