"""Nothing in the loss path waits for the device:
no number is read back to the host, no shape depends on data.

Two proofs. On meta tensors there is no data to read, so a call that completes used none, and a copy
between devices would show as one. On real tensors a dispatch mode sees every operation, and fails
on those that make a GPU wait.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from walk import walked

import policyloss as pl
from cases import (
    AGGREGATES,
    BY_CORRECTION,
    PRESETS,
    Batch,
    label,
    layout_of,
    make_batch,
    step_totals,
)

READS_DATA = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "nonzero",
    "nonzero_static",
    "argwhere",
    "masked_select",
    "unique",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "bincount",
    "histc",
    "pin_memory",
)


def _devices(values: Iterable[Any]) -> set[str]:
    return {x.device.type for x in values if isinstance(x, torch.Tensor) and x.dim() > 0}


class Watch(TorchDispatchMode):
    """Counts operations by name, and keeps those that would make the host wait
    or move data between devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.seen[name] += 1
        inputs = tree_leaves((args, kwargs))
        mask_index = name in ("index", "index_put", "index_put_") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        # How long is the result?
        counts = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in READS_DATA or mask_index or counts:
            self.waits.append(str(func))
        elif name in ("_to_copy", "copy_", "to") and len(_devices(inputs) | _devices([out])) > 1:
            self.waits.append(f"{func} between devices")
        return out


def on_meta(batch: Batch) -> Batch:
    names = [
        f.name
        for f in dataclasses.fields(batch)
        if isinstance(getattr(batch, f.name), torch.Tensor)
    ]
    return batch.map(lambda x: x.to("meta"), *names)


CARRIED = ("logp", "entropy", "divergence")


def policy_call(spec: pl.LossSpec, batch: Batch, totals: Any = None) -> Callable[[], Any]:
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in CARRIED}
    arguments = {**batch.kwargs, **leaves, "totals": totals}

    def call() -> Any:
        out = pl.policy_loss(spec, **arguments)
        out.loss.backward()
        return out.metrics + out.metrics

    return call


def value_call(batch: Batch, **options: Any) -> Callable[[], Any]:
    values = batch.logp.clone().requires_grad_()
    layout = layout_of(batch)

    def call() -> Any:
        out = pl.value_loss(
            values, batch.advantages, batch.old_logp, batch.mask, **layout, **options
        )
        out.loss.backward()
        return out.metrics + out.metrics

    return call


def waits_of(call: Callable[[], Any]) -> list[str]:
    with Watch() as watch:
        call()
    assert watch.seen["mul"] + watch.seen["where"] > 0, "the watch saw nothing"
    return watch.waits


PADDED = make_batch(seed=8).map(lambda x: x.to(torch.float32))
LAYOUTS = {"padded": PADDED, "packed": PADDED.packed()}
SPECS = {
    **PRESETS,
    **{name: spec for name, spec in BY_CORRECTION.items() if name.endswith(":renormalise")},
}
every_layout = walked("layout", LAYOUTS)


@every_layout
@walked("name", SPECS)
def test_policy_loss_never_waits(name: str, layout: str) -> None:
    batch = LAYOUTS[layout]
    assert waits_of(policy_call(SPECS[name], batch)) == []
    assert waits_of(policy_call(SPECS[name], batch, step_totals(SPECS[name], batch))) == []


@every_layout
@walked("name", PRESETS)
def test_policy_loss_needs_no_data_on_the_host(name: str, layout: str) -> None:
    assert waits_of(policy_call(PRESETS[name], on_meta(LAYOUTS[layout]))) == []


@every_layout
@walked("aggregate", AGGREGATES, ids=label)
def test_no_aggregation_waits(aggregate: Any, layout: str) -> None:
    spec = pl.LossSpec(aggregate=aggregate)
    for batch in (LAYOUTS[layout], on_meta(LAYOUTS[layout])):
        assert waits_of(policy_call(spec, batch)) == []
        assert waits_of(value_call(batch, aggregate=aggregate)) == []


@every_layout
@walked("kind", ["mse", "huber"])
@walked("clip", [0.2, None])
def test_value_loss_never_waits(clip: float | None, kind: Any, layout: str) -> None:
    for batch in (LAYOUTS[layout], on_meta(LAYOUTS[layout])):
        assert waits_of(value_call(batch, clip=clip, kind=kind)) == []


@every_layout
def test_a_mismatch_never_waits(layout: str) -> None:
    def call(batch: Batch) -> Any:
        ages = torch.ones_like(batch.mask, dtype=torch.int64)
        logprobs = batch.old_logp, batch.rollout_logp, batch.mask
        one = pl.Mismatch.of(*logprobs, ages=ages, cu_seqlens=batch.kwargs.get("cu_seqlens"))
        return one + one

    for batch in (LAYOUTS[layout], on_meta(LAYOUTS[layout])):
        assert waits_of(partial(call, batch)) == []


@walked("name", ["ppo", "grpo", "tis", "clip_cov"])
def test_metrics_are_read_back_once(name: str) -> None:
    """`compute()` brings every metric to the host in one transfer,
    however many micro-batches were merged.
    """
    metrics = policy_call(PRESETS[name], PADDED)()
    with Watch() as watch:
        values = metrics.compute()
    assert len(values) >= 12
    assert watch.waits == []  # nothing but the one tolist(), which reads a whole tensor
    assert watch.seen["stack"] == 1


class ReadBacks:
    """Counts `Tensor.tolist` and `Tensor.item` calls, which dispatch does not see on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("tolist", "item", "__float__", "__int__", "__bool__", "numpy", "cpu"):
            monkeypatch.setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))

    def _counting(self, method: Any) -> Any:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(tensor, *args, **kwargs)

        return counted


@walked("name", PRESETS)
def test_the_only_read_back_is_the_one_in_compute(name: str) -> None:
    call = policy_call(PRESETS[name], PADDED)
    with pytest.MonkeyPatch.context() as monkeypatch:
        reads = ReadBacks(monkeypatch)
        metrics = call()
        assert reads.count == 0
        metrics.compute()
        assert reads.count == 1


@walked(
    "bad",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.detach().max()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x.masked_select(x > 0),
        lambda x: bool((x > 0).any()),
        lambda x: torch.repeat_interleave((x > 0).flatten().long()),
        lambda x: x.to("meta"),
    ],
    ids=[
        "item",
        "float",
        "boolean index",
        "nonzero",
        "unique",
        "masked_select",
        "bool",
        "repeat",
        "device copy",
    ],
)
def test_the_watch_sees_a_wait(bad: Callable[[torch.Tensor], Any]) -> None:
    def trust(t: pl.Tokens) -> torch.Tensor:
        bad(t.logp)
        return -t.advantages * t.ratio

    assert waits_of(policy_call(pl.LossSpec(trust=trust), PADDED)) != []
