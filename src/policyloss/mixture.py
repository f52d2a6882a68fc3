"""`Mixture`: one step with several streams, each a loss on tokens of its own.

`loss = Σ weight · (the loss of the stream)`. Every stream has its own mask and divides by its own
counts of the whole step, so the sum depends on the split of the batch no more than its terms do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from policyloss.arguments import check_tensor, description
from policyloss.catalogue import PRESETS, as_spec, read_json
from policyloss.errors import InputError, PolicyLossError, SpecError, match_name
from policyloss.functional.exact import add
from policyloss.functional.masking import compute_dtype, count
from policyloss.inputs import DIFFERENTIATED, Inputs
from policyloss.metrics import Metrics
from policyloss.parts.data import check_depth, make_part
from policyloss.parts.kl import Divergence
from policyloss.parts.validate import Finite, LowerBound, Part
from policyloss.records import Invalid, Record, Sum
from policyloss.spec import LossSpec
from policyloss.tokens import as_mask
from policyloss.totals import Totals

REACHES: tuple[Literal["token", "sequence", "batch"], ...] = ("token", "sequence", "batch")


@dataclass(frozen=True)
class Stream(Part):
    """One term of a `Mixture`: a loss, its weight, and the tokens that it is computed on.

    loss: a `LossSpec`, or the name of a preset. mask: a key of the call's `extras`, a tensor of
    bool or 0/1: the stream trains on the tokens where both this tensor and the call's `mask` are
    True; None for all tokens of `mask`. advantage: one number for all tokens of the stream, instead
    of the call's advantages. With 1, `Unbounded("logp")` is the cross-entropy; with 0, a policy
    term that is proportional to the advantage vanishes, and the KL and entropy terms remain.
    """

    loss: Any
    weight: LowerBound = 1.0
    mask: str | None = None
    advantage: Finite | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "loss", as_spec(self.loss, "Stream.loss"))
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise SpecError(
                "Stream.mask must be None or the name of a tensor of extras, got "
                f"{description(self.mask)}."
            )

    def tokens(self, mask: Any, extras: Mapping[str, Tensor] | None) -> Tensor:
        """The mask of this stream: `mask`, set to 0 outside the stream's tokens."""
        check_tensor("mask", mask)
        if self.mask is None:
            return mask  # type: ignore[no-any-return]
        called = f"extras[{self.mask!r}]"
        if not isinstance(extras, Mapping) or extras.get(self.mask) is None:
            raise InputError(
                f"a stream trains on the tokens of {called}, which is missing; pass extras="
                f"{{{self.mask!r}: …}}, True at its tokens."
            )
        here = as_mask(extras[self.mask], mask, called, "mask")
        return mask.masked_fill(~here, 0)  # type: ignore[no-any-return]


class StreamCall(NamedTuple):
    """One stream of a call: its loss, tensors, totals (None if the call is the step), weight."""

    spec: LossSpec
    inputs: Inputs
    step: Totals | None
    weight: float


@dataclass(frozen=True)
class Mixture(Part):
    """A loss of several named streams, `Σ weight · loss`; each one is a `Stream`.

        ce = pl.Stream("reinforce", weight=0.1, mask="demonstration", advantage=1.0)
        pl.Mixture({"rl": "dapo", "ce": ce})

    A spec or the name of a preset stands for `Stream(spec)`. `policy_loss`, `measure`,
    `accumulate`, `linear_policy_loss` and `hf.policy_loss` take a mixture as they take a spec. Each
    stream is averaged over its own tokens, which `accumulate` and `measure` count. The metrics of
    a stream are called "name/metric"; the metric `loss` is the weighted sum of the streams' losses.
    """

    streams: Mapping[str, Any]

    def __post_init__(self) -> None:
        streams: Any = self.streams
        named = isinstance(streams, Mapping) and all(isinstance(n, str) and n for n in streams)
        if not named or not streams:
            raise SpecError(
                'Mixture takes streams by their names, {"rl": …, "ce": …}, got '
                f"{description(streams)}."
            )
        streams = {n: s if isinstance(s, Stream) else Stream(s) for n, s in streams.items()}
        object.__setattr__(self, "streams", streams)
        if len({part.measure for part in self._divergences}) > 1:
            raise SpecError(
                "the streams compare with a teacher by different divergences, but a call carries "
                "one divergence per token: use one kind, beta, rest, top and k."
            )

    def __hash__(self) -> int:
        return hash(tuple(self.streams.items()))

    @property
    def specs(self) -> tuple[LossSpec, ...]:
        """Each stream's loss."""
        return tuple(stream.loss for stream in self.streams.values())

    @property
    def _divergences(self) -> list[Divergence]:
        return [spec.divergence for spec in self.specs if spec.divergence is not None]

    @property
    def divergence(self) -> Divergence | None:
        """The streams' first `Divergence`, or None; all must share kind, beta, rest, top, k."""
        return next(iter(self._divergences), None)

    @property
    def reads(self) -> tuple[str, ...]:
        """The arguments of `policy_loss` that streams read, except masks passed in `extras`."""
        return tuple(dict.fromkeys(name for spec in self.specs for name in spec.reads))

    @property
    def needs_statistics(self) -> bool:
        """Whether `measure` must compute the totals of some stream."""
        return any(spec.needs_statistics for spec in self.specs)

    @property
    def reach(self) -> Literal["token", "sequence", "batch"]:
        """The largest reach of a stream (see `LossSpec.reach`)."""
        return max((spec.reach for spec in self.specs), key=REACHES.index)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-ready): {"streams": {name: the fields of the stream}}."""
        streams = {
            name: {"loss": x.loss.to_dict(), "weight": x.weight, "mask": x.mask}
            | {"advantage": x.advantage}
            for name, x in self.streams.items()
        }
        return {"streams": streams}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Mixture:
        """The inverse of `to_dict`. The error for an unknown key or type lists the valid ones."""
        entries = data.get("streams") if isinstance(data, Mapping) and len(data) == 1 else None
        if not isinstance(entries, Mapping) or not all(
            isinstance(x, Mapping) for x in entries.values()
        ):
            raise SpecError(
                'data must be {"streams": {name: {…}}}, as Mixture.to_dict makes it, got '
                f"{description(data)}."
            )
        check_depth(data)
        streams = {}
        for name, fields in entries.items():
            loss = {"loss": LossSpec.from_dict(fields["loss"])} if "loss" in fields else {}
            streams[name] = make_part(Stream, {**fields, **loss})
        return cls(streams)

    def calls(self, inputs: Inputs, step: Totals | None) -> dict[str, StreamCall]:
        """By stream name: the stream's loss, totals, weight, and inputs with its own mask."""
        counted = None if step is None else step.streams or {}
        if counted is not None and set(counted) != set(self.streams):
            raise InputError(
                "this loss is a Mixture, whose streams have a denominator each, and the totals "
                f"count {', '.join(counted) or 'none of them'} (streams: "
                f"{', '.join(self.streams)}): make the totals with policyloss.accumulate(mixture, "
                "…) or policyloss.measure(mixture, …) on the step's tensors, or pass "
                'totals="local" if this call is the whole batch.'
            )
        check_tensor("logp", inputs.logp, "float")
        # Upcast once, so that the gradients of the streams add up before they are rounded.
        for name in ("logp", *DIFFERENTIATED):
            if isinstance(x := getattr(inputs, name), Tensor) and x.is_floating_point():
                inputs = inputs.replace(**{name: x.to(compute_dtype(x))})
        masks = {stream.mask for stream in self.streams.values()}
        extras = {n: x for n, x in (inputs.extras or {}).items() if n not in masks}
        calls = {}
        for name, stream in self.streams.items():
            tokens = stream.tokens(inputs.mask, inputs.extras)
            here = inputs.replace(mask=tokens, extras=extras or None)
            if stream.advantage is not None:
                constant = torch.full_like(inputs.logp, stream.advantage, requires_grad=False)
                # `[1, N]` marks one number per token of a pack.
                here = here.replace(advantages=constant if constant.dim() > 1 else constant[None])
            of_step = None if counted is None else counted[name]
            calls[name] = StreamCall(stream.loss, here, of_step, stream.weight)
        return calls

    def metrics(self, of_streams: Mapping[str, Metrics], mask: Tensor) -> Metrics:
        """The metrics of all streams by "stream/metric", their weighted `loss`, and `tokens`, the
        number of valid tokens of the call.
        """
        tokens = count(mask)

        def records() -> dict[str, Record]:
            merged: dict[str, Record] = {}
            for name, metrics in of_streams.items():
                for key, record in metrics.items():
                    of_call = key if isinstance(record, Invalid) else f"{name}/{key}"
                    merged[of_call] = record.merge(merged[of_call]) if of_call in merged else record
            losses = {name: merged.get(f"{name}/loss") for name in self.streams}
            shares = [self.streams[n].weight * x.parts[0] for n, x in losses.items() if x]
            summed = {"loss": Sum(reduce(add, shares)), "tokens": Sum(tokens)} if shares else {}
            return {**summed, **merged}

        return Metrics.of_call(records, mask)


def stream_calls(
    loss: LossSpec | Mixture, inputs: Inputs, step: Totals | None
) -> tuple[StreamCall, ...]:
    """The calls of a mixture's streams; of a spec, its one call."""
    if isinstance(loss, LossSpec):
        return (StreamCall(loss, inputs, step, 1.0),)
    return tuple(loss.calls(inputs, step).values())


def read_loss(name: str) -> LossSpec | Mixture | str:
    """`name` itself if it is a preset's, or the `LossSpec` or `Mixture` in the JSON file `name`."""
    if match_name(name, PRESETS) or not (Path(name).suffix == ".json" or os.path.isfile(name)):
        return name
    data = read_json(name)
    try:
        mixed = isinstance(data, dict) and "streams" in data
        return Mixture.from_dict(data) if mixed else LossSpec.from_dict(data)
    except PolicyLossError as error:
        raise PolicyLossError(f"{name}: {error}") from None
