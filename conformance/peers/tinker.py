"""Losses through Tinker's SDK: its client calls, traces, encodes and runs them, and only the server
is missing. The other side is `policy_loss` on the same padded batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from conformance.inputs import Batch, draw
from conformance.suite import Function, Inputs, Options, Outputs
from policyloss.compat import tinker
from policyloss.compiled.call import with_gradients
from policyloss.errors import InputError

KEYS = {"logprobs": "rollout_logp", "old_logprobs": "old_logp", "ref_logprobs": "ref_logp"}
CALLS = 3  # the calls that a step is cut into


def _inputs(batch: Batch, options: Options) -> Inputs:
    names = ("logp", "old_logp", "rollout_logp", "ref_logp", "advantages", "mask", "group_ids")
    return {name: getattr(batch, name) for name in names}


def _spec(options: Options) -> pl.LossSpec:
    return pl.preset(options["preset"]).for_run(16)


def _ours(inputs: Inputs, options: Options) -> Outputs:
    spec = _spec(options)
    if spec.divergence is not None:
        raise InputError("a server returns no distributions")
    if options.get("exported") and (spec.needs_statistics or isinstance(spec.trust, pl.FutureKL)):
        raise InputError("a server runs an exported loss on one sequence at a time")
    arguments = {name: x for name, x in inputs.items() if name != "logp"}
    out = pl.policy_loss(spec, inputs["logp"], teacher_logp=inputs["ref_logp"], **arguments)
    return {"loss": out.loss}


def _data(inputs: Inputs) -> list[Any]:
    """One datum per row, without the padding at its end."""
    types = import_module("tinker.types")
    data = []
    for i, mask in enumerate(inputs["mask"]):
        valid = mask.nonzero()
        n = int(valid.max()) + 1 if len(valid) else 1
        tokens = {key: inputs[name][i, :n].detach() for key, name in KEYS.items()}
        tokens |= {"mask": mask[:n], "advantages": inputs["advantages"][i, :n]}
        tokens |= {"teacher_logprobs": tokens["ref_logprobs"]}
        ids = {"target_tokens": torch.arange(n), "group_id": inputs["group_ids"][i]}
        model_input = types.ModelInput.from_ints(list(range(n)))
        data.append(types.Datum(model_input=model_input, loss_fn_inputs={**tokens, **ids}))
    return data


def _called(inputs: Inputs, options: Options) -> Outputs:
    """`forward_backward_custom`, in several calls if the loss can be counted before."""
    spec, data = _spec(options), _data(inputs)
    step = tinker.loss(spec, None if spec.needs_statistics else data)
    size = len(data) if spec.needs_statistics else -(-len(data) // CALLS)
    return _sent(
        inputs, data, [(step.bare(data[i : i + size]), step) for i in range(0, len(data), size)]
    )


def _exported(inputs: Inputs, options: Options) -> Outputs:
    """`create_custom_loss`: the graph as the SDK traces, checks and encodes it."""
    custom, data = import_module("tinker.lib.public_interfaces.custom_loss"), _data(inputs)
    exported = _export(options["preset"])
    handle = custom.trace_loss(exported.function, exported.input_ranks, session_id="session")
    custom.encode_graph(handle)
    return _sent(inputs, data, [(exported.prepare(data), handle)])


@cache
def _export(name: str) -> tinker.ExportedLoss:
    return tinker.export(pl.preset(name).for_run(16))


def _sent(inputs: Inputs, data: list[Any], calls: list[tuple[list[Any], Any]]) -> Outputs:
    """The loss of all calls, with the gradient that the client sends to the server."""
    lengths = [len(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
    rows = [row[:n].detach() for row, n in zip(inputs["logp"], lengths, strict=True)]
    client, sent = client_without_server(rows)
    losses = []
    for share, loss_fn in calls:
        # Older releases report the server's loss alone, so a function returns its own as a metric.
        metrics = client.forward_backward_custom(share, loss_fn).result().metrics
        losses.append(metrics["loss"] if "loss" in metrics else metrics["loss:sum"])
    gradient = torch.zeros_like(inputs["logp"])
    for row, weights in zip(gradient, sent, strict=True):
        row[: len(weights)] = -weights
    loss = torch.tensor(sum(losses), dtype=gradient.dtype)
    return {"loss": with_gradients(loss, [gradient], [inputs["logp"]])}


class _Future:
    """A result that is there already, for callers that wait and for those that await."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self, timeout: float | None = None) -> Any:
        return self.value

    async def result_async(self, timeout: float | None = None) -> Any:
        return self.value


def client_without_server(logp: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """The SDK's TrainingClient, whose server returns `logp`, one after another; and the list that
    collects the weights of the cross entropy by which it sends a gradient.
    """
    module = import_module("tinker.lib.public_interfaces.training_client")
    types = import_module("tinker.types")
    rows, sent = iter(logp), list[Tensor]()

    async def forward(data: list[Any], *_: Any) -> Any:
        outputs = [{"logprobs": types.TensorData.from_torch(next(rows))} for _ in data]
        return _Future(SimpleNamespace(loss_fn_outputs=outputs))

    async def backward(data: list[Any], *_: Any) -> Any:
        sent.extend(datum.loss_fn_inputs["weights"].to_torch() for datum in data)
        return _Future(SimpleNamespace(metrics={"loss:sum": 0.0}))

    client = object.__new__(module.TrainingClient)
    client.holder = SimpleNamespace(
        get_session_id=lambda: "session",
        run_coroutine_threadsafe=lambda coroutine: _Future(asyncio.run(coroutine)),
    )
    client.forward_async, client.forward_backward_async = forward, backward
    return client, sent


def names_on_the_page() -> dict[str, Any]:
    """The names that the code on the page of frameworks uses."""
    inputs = _inputs(draw(0, "ragged", torch.float32), {})
    data = _data(inputs)
    lengths = [len(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
    rows = [row[:n] for row, n in zip(inputs["logp"], lengths, strict=True)]
    client, _ = client_without_server([*rows, *rows])
    custom = import_module("tinker.lib.public_interfaces.custom_loss")
    service = SimpleNamespace(
        create_custom_loss=lambda fn, ranks: _Future(custom.trace_loss(fn, ranks, "session"))
    )
    return {"client": client, "service": service, "data": data}


def _function(name: str, theirs: Any, **options: Any) -> Function:
    return Function(
        name,
        [{"preset": preset, **options} for preset in pl.presets()],
        _inputs,
        _ours,
        theirs,
        differentiate=("logp",),
        seeds=5,
        kinds=("ragged", "full", "holes", "empty_rows", "single_token", "on_policy"),
        dtypes=("float32",),  # the only one that the SDK sends
        releases=("0.36.0",) if options else None,
    )


FUNCTIONS = [
    _function("forward_backward_custom", _called),
    _function("create_custom_loss", _exported, exported=True),
]
