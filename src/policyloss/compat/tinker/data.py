"""Tinker's data as arguments of `policy_loss`, its graphs, and its built-in losses as specs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen

from policyloss.arguments import tracing
from policyloss.errors import InputError, unknown_name
from policyloss.parts.aggregate import TokenSum
from policyloss.parts.ratio import TokenRatio
from policyloss.parts.trust import Quadratic, Unbounded
from policyloss.parts.trust_clips import Clip, DetachedClip
from policyloss.spec import LossSpec
from policyloss.totals import Totals

# The argument of `policy_loss`, and the key of `loss_fn_inputs` that holds it.
KEYS = {
    "rollout_logp": "logprobs",
    "old_logp": "old_logprobs",
    "ref_logp": "ref_logprobs",
    "teacher_logp": "teacher_logprobs",
}
_aten = torch.ops.aten
_CONSTANTS = (_aten.scalar_tensor.default, _aten.full.default)
_PLACES = ("device", "layout", "pin_memory")  # of the machine that traced the loss


def pack(
    spec: LossSpec, data: Sequence[Any], logprobs: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """Check the data and join them: the arguments of `policy_loss`, with `logp` if known."""
    rows = [{key: x.to_torch() for key, x in d.loss_fn_inputs.items()} for d in data]
    if not rows:
        raise InputError("data is empty; pass at least one datum.")
    shapes = [tuple(_values(row, "target_tokens", i).shape) for i, row in enumerate(rows)]
    if any(len(shape) != 1 for shape in shapes):
        raise InputError(f"target_tokens must be [T], one target per position; got {shapes}.")
    keys = dict(KEYS)
    if "old_logprobs" not in rows[0]:
        if {"old_logp", "rollout_logp"} <= set(spec.reads):
            raise InputError(
                "this loss compares trainer and sampler, so it needs loss_fn_inputs['old_logprobs']"
                " of the trainer before the first update (TrainingClient.forward)."
            )
        keys["old_logp"] = "logprobs"
    step: dict[str, Any] = {"old_logp": None}
    if logprobs is not None:
        actual = [tuple(x.shape) for x in logprobs]
        if actual != shapes:
            raise InputError(f"logprobs must have the shapes of target_tokens, not {actual}.")
        step["logp"] = torch.cat(list(logprobs))
    step |= {name: _join(rows, x) for name, x in keys.items() if name in spec.reads or x in rows[0]}
    if "group_ids" in spec.reads:
        ids = torch.cat([_values(row, "group_id", i).reshape(-1) for i, row in enumerate(rows)])
        if len(ids) != len(rows):
            raise InputError("group_id must be one integer per datum.")
        step["group_ids"] = ids
    if "weights" in rows[0]:
        step["weights"] = _join(rows, "weights").unsqueeze(0)
    if "mask" in rows[0]:
        mask = _join(rows, "mask")
        if not ((mask == 0) | (mask == 1)).all():
            raise InputError("mask must hold 0 and 1, 1 where a token is trained on.")
    else:
        mask = _join(rows, "weights")
    advantages = _join(rows, "advantages", expand=True).unsqueeze(0)
    ends = torch.tensor([0, *(n for (n,) in shapes)]).cumsum(0)
    return {**step, "advantages": advantages, "mask": mask != 0, "cu_seqlens": ends}


def count(step: dict[str, Any]) -> Totals:
    """The counts of a packed step."""
    optional = {name: step.get(name) for name in ("cu_seqlens", "group_ids", "weights")}
    return Totals.count(step["mask"], **optional, dp_size=1)


def only(datum: Any, **inputs: Any) -> Any:
    """The datum with its target tokens and these inputs alone."""
    tokens = datum.loss_fn_inputs["target_tokens"]
    return replace(datum, loss_fn_inputs={"target_tokens": tokens, **inputs})


def _join(rows: Sequence[dict[str, Tensor]], key: str, expand: bool = False) -> Tensor:
    """The values of a key of all data, joined. expand: also take one number per datum."""
    parts = []
    for i, row in enumerate(rows):
        values, shape = _values(row, key, i), row["target_tokens"].shape
        if expand and values.numel() == 1:
            values = values.reshape(1).expand(shape)
        if values.shape != shape:
            raise InputError(
                f"datum {i}: {key!r} has shape {tuple(values.shape)}; it must be {tuple(shape)}."
            )
        parts.append(values)
    return torch.cat(parts)


def _values(row: dict[str, Tensor], key: str, i: int) -> Tensor:
    if key not in row:
        raise InputError(f"datum {i} has no loss_fn_inputs[{key!r}]; it has {', '.join(row)}.")
    return row[key]


def trace(function: Callable[..., Tensor], examples: Mapping[str, Tensor]) -> Any:
    """`function` as torch operations alone, with the names of `examples` as parameters, and without
    metrics. Sizes are symbols. Constants are created on the device of the inputs, because a custom
    loss may hold no tensor of its own.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    class WithoutSelf(CodeGen):  # a plain function, the only kind that the SDK traces
        def gen_fn_def(self, *args: Any, **kwargs: Any) -> str:
            return super().gen_fn_def(*args, **kwargs).replace("self, ", "", 1)

    with tracing():
        module: GraphModule = make_fx(function, tracing_mode="symbolic")(*examples.values())
    nodes = list(module.graph.nodes)
    for node, name in zip(nodes, examples, strict=False):
        node.target = name
    for node in nodes:
        if node.target in _CONSTANTS:
            size, value = node.args if node.target is _aten.full.default else ([], *node.args)
            node.target, node.args = _aten.new_full.default, (nodes[0], size, value)
        node.kwargs = {key: x for key, x in node.kwargs.items() if key not in _PLACES}
    nodes[-1].args = ((*nodes[-1].args, {}),)
    module.graph.set_codegen(WithoutSelf())
    module.recompile()
    return type(module).forward


def built_in(name: str, **config: float) -> LossSpec:
    """A built-in loss of Tinker as a spec, with the keys of its `loss_fn_config`.

        tinker.built_in("ppo", clip_low_threshold=0.8, clip_high_threshold=1.28)

    All are sums over tokens, anchored at the sampler; `cross_entropy` weighs by the advantages.
    """
    if name not in _TRUST:
        raise InputError(unknown_name("built-in loss", name, _TRUST))
    try:
        trust = _TRUST[name](**config)
    except TypeError as error:
        raise InputError(f"loss_fn_config of {name}: {error}.") from None
    return LossSpec(ratio=TokenRatio(anchor="rollout"), trust=trust, aggregate=TokenSum())


_TRUST: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda: Unbounded("logp"),
    "importance_sampling": lambda: Unbounded("ratio"),
    "ppo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: Clip(
        1 - clip_low_threshold, clip_high_threshold - 1
    ),
    "cispo": lambda clip_low_threshold=0.8, clip_high_threshold=1.2: DetachedClip(
        clip_low_threshold, clip_high_threshold
    ),
    "dro": lambda beta: Quadratic(beta),
}
