"""The data of Tinker's client as the packed tensors of a loss, and its graph without tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from policyloss.arguments import tracing
from policyloss.errors import InputError
from policyloss.spec import LossSpec

# The argument of `policy_loss`, and the key of `loss_fn_inputs` that holds it.
KEYS = {
    "rollout_logp": "logprobs",
    "old_logp": "old_logprobs",
    "ref_logp": "ref_logprobs",
    "teacher_logp": "teacher_logprobs",
}
aten = torch.ops.aten
_CONSTANTS = (aten.scalar_tensor.default, aten.full.default)
_PLACES = ("device", "layout", "pin_memory")  # of the machine that traced the loss
Rows = Sequence[dict[str, Tensor]]


class Packed(NamedTuple):
    """Data end to end. logp: the current policy's, if known. tensors: the optional arguments of
    `policy_loss`.
    """

    logp: Any
    mask: Tensor
    cu_seqlens: Tensor
    advantages: Tensor
    old_logp: Tensor | None
    tensors: dict[str, Any]


def pack(spec: LossSpec, data: Sequence[Any], logprobs: Sequence[Tensor] | None) -> Packed:
    """Check the data and pack them. logprobs: the current policy's, whose lengths must fit."""
    rows = [{key: x.to_torch() for key, x in d.loss_fn_inputs.items()} for d in data]
    if not rows:
        raise InputError("data is empty; pass at least one datum.")
    shapes = [tuple(_values(row, "target_tokens", i).shape) for i, row in enumerate(rows)]
    if any(len(shape) != 1 for shape in shapes):
        raise InputError(
            f"target_tokens have the shapes {shapes}; a policy loss takes one target per position, "
            "[T]."
        )
    if logprobs is not None and [tuple(x.shape) for x in logprobs] != shapes:
        actual = [tuple(x.shape) for x in logprobs]
        raise InputError(f"logprobs must have the shapes of target_tokens, {shapes}, got {actual}.")
    keys = dict(KEYS)
    if "old_logprobs" not in rows[0]:
        if {"old_logp", "rollout_logp"} <= set(spec.reads):
            raise InputError(
                "this loss corrects for the difference between sampler and trainer, so it needs "
                "loss_fn_inputs['old_logprobs'], the trainer's log-probabilities before the first "
                "update (TrainingClient.forward), and not only the sampler's 'logprobs'."
            )
        keys["old_logp"] = "logprobs"
    tensors: dict[str, Any] = {
        name: _join(rows, key) for name, key in keys.items() if name in spec.reads or key in rows[0]
    }
    if "group_ids" in spec.reads:
        ids = torch.cat([_values(row, "group_id", i).reshape(-1) for i, row in enumerate(rows)])
        if len(ids) != len(rows):
            raise InputError("group_id must be one integer per datum.")
        tensors["group_ids"] = ids
    if "weights" in rows[0]:
        tensors["weights"] = _join(rows, "weights").unsqueeze(0)
    if "mask" in rows[0]:
        mask = _join(rows, "mask")
        if not ((mask == 0) | (mask == 1)).all():
            raise InputError("mask must hold 0 and 1, 1 where a token is trained on.")
    else:
        mask = _join(rows, "weights")
    ends = torch.tensor([0, *(n for (n,) in shapes)]).cumsum(0)
    logp = None if logprobs is None else torch.cat(list(logprobs))
    advantages, old_logp = _join(rows, "advantages", expand=True), tensors.pop("old_logp", None)
    return Packed(logp, mask != 0, ends, advantages, old_logp, tensors)


def _join(rows: Rows, key: str, expand: bool = False) -> Tensor:
    """The values of a key of all data end to end. expand: also take one number per datum."""
    parts = []
    for i, row in enumerate(rows):
        values, shape = _values(row, key, i), row["target_tokens"].shape
        if expand and values.numel() == 1:
            values = values.reshape(1).expand(shape)
        if values.shape != shape:
            raise InputError(
                f"datum {i} has loss_fn_inputs[{key!r}] of shape {tuple(values.shape)}; it must be "
                f"{tuple(shape)}, like target_tokens."
            )
        parts.append(values)
    return torch.cat(parts)


def _values(row: dict[str, Tensor], key: str, i: int) -> Tensor:
    if key not in row:
        has = ", ".join(row)
        raise InputError(
            f"datum {i} has no loss_fn_inputs[{key!r}], which this loss needs; it has {has}."
        )
    return row[key]


class _WithoutSelf(CodeGen):
    """Writes a graph as a plain function, the only kind that the SDK traces."""

    def gen_fn_def(self, *args: Any, **kwargs: Any) -> str:
        """The line of the function's name and parameters."""
        return super().gen_fn_def(*args, **kwargs).replace("self, ", "", 1)


def trace(
    function: Callable[..., Tensor], examples: Mapping[str, Tensor]
) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """`function` as torch operations alone, with the names of `examples` as parameters, and without
    metrics. Sizes are symbols. Constants are made on the device of the inputs, because a custom
    loss may hold no tensor of its own.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with tracing():
        module: GraphModule = make_fx(function, tracing_mode="symbolic")(*examples.values())
    nodes = list(module.graph.nodes)
    for node, name in zip(nodes, examples, strict=False):
        node.target = name
    for node in nodes:
        if node.target in _CONSTANTS:
            size, value = node.args if node.target is aten.full.default else ([], *node.args)
            node.target, node.args = aten.new_full.default, (nodes[0], size, value)
        node.kwargs = {key: x for key, x in node.kwargs.items() if key not in _PLACES}
    nodes[-1].args = ((*nodes[-1].args, {}),)
    module.graph.set_codegen(_WithoutSelf())
    module.recompile()
    return type(module).forward
