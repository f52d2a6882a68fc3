"""What a checkpoint holds beside weights: the state of an optimizer, by parameter name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from policyloss.errors import InputError

# How a step is computed, not what it computes: these stay as the optimizer that continues was made.
HOW = ("foreach", "fused", "capturable", "differentiable")


def optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of `optimizer` as tensors named `parameter/key`, not copied, and numbers for JSON.

    Numbers: its class, the options of each group (lr, betas, …) with the names of its parameters,
    and state that is not a tensor. The names are those of `model.named_parameters()`, so the order
    in which parameters were given to the optimizer does not matter.
    """
    names = _names(model, optimizer)
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            elif value is None or isinstance(value, (bool, int, float, str)):
                plain.setdefault(name, {})[key] = value
            else:
                raise InputError(
                    f"{type(optimizer).__name__} keeps a {type(value).__name__} as {key!r} of "
                    f"{name}; a checkpoint holds tensors and numbers only. Use an optimizer such "
                    "as AdamW or SGD."
                )
    groups = [
        {"parameters": [names[p] for p in group["params"]], "options": _options(group)}
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": plain}


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
) -> None:
    """Give `optimizer` the state that `optimizer_state` returned, bit for bit.

    `optimizer.load_state_dict` would not do: it casts a float32 moment of a bfloat16 parameter to
    bfloat16.
    """
    names = _names(model, optimizer)
    _refuse_other_optimizer(optimizer, names, numbers)
    parameters = {name: parameter for parameter, name in names.items()}
    # A step count stays on the host, unless a fused or captured step reads it on the device.
    on_device = {
        names[p]
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    state: dict[Tensor, dict[str, Any]] = {}
    for name, plain in numbers["state"].items():
        state.setdefault(parameters[name], {}).update(plain)
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        if name not in parameters:
            raise InputError(
                f"the checkpoint holds {key!r} of {name!r}, which is not a parameter of the "
                "optimizer."
            )
        parameter = parameters[name]
        # An optimizer says itself what it holds in another shape or type than its parameters have.
        fits = getattr(optimizer, "fits", lambda *state: False)(parameter, key, value)
        _refuse_other_form(place, value, parameter, fits)
        device = "cpu" if key == "step" and name not in on_device else parameter.device
        state.setdefault(parameter, {})[key] = value.detach().to(device, copy=True)
    if len({frozenset(entries) for entries in state.values()}) > 1:
        raise InputError(
            "the checkpoint holds the optimizer's state of some parameters in part only."
        )
    optimizer.state.clear()
    optimizer.state.update(state)
    for group, saved in zip(optimizer.param_groups, numbers["groups"], strict=True):
        _set_options(group, saved["options"])


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        if key in group and not _same_kind(group[key], value):
            raise InputError(
                f"the checkpoint has {str(value)[:40]!r} as {key!r} of the optimizer, where "
                f"{group[key]!r} is one."
            )
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)  # a captured step reads this very tensor
        else:
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def _refuse_other_form(place: str, value: Tensor, parameter: Tensor, fits: bool) -> None:
    """Raise for a tensor at `place` that cannot be state of the parameter. fits: the optimizer says
    that shape and type can be.
    """
    if not fits and value.dim() and value.shape != parameter.shape:
        raise InputError(
            f"{place} in the checkpoint is {tuple(value.shape)}, but the parameter is "
            f"{tuple(parameter.shape)}."
        )
    if value.dim() and hasattr(parameter, "placements") != hasattr(value, "placements"):
        raise InputError(
            f"{place} is whole but its parameter is sharded, or the reverse; give `load` a layout "
            "for it."
        )
    if not fits and value.is_floating_point() != parameter.is_floating_point():
        raise InputError(
            f"{place} in the checkpoint is {value.dtype}, but the parameter is {parameter.dtype}."
        )


def _names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The name of each parameter of `optimizer`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    unknown = [tuple(p.shape) for p in parameters if p not in names]
    if unknown:
        raise InputError(
            f"the optimizer holds parameters of shapes {unknown} that the model does not have; "
            "give the model they are of."
        )
    return {p: names[p] for p in parameters}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in ("params", *HOW)}
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()
    }


def _same_kind(here: Any, saved: Any) -> bool:
    """Whether an option read from a file could be in the place of one that an optimizer has."""
    if isinstance(here, tuple):
        return (
            isinstance(saved, (list, tuple))
            and len(saved) == len(here)
            and all(map(_same_kind, here, saved))
        )
    if isinstance(here, (float, int, Tensor)) and not isinstance(here, bool):
        return isinstance(saved, (float, int)) and not isinstance(saved, bool) and abs(saved) < 1e30
    return type(here) is type(saved)


def _refuse_other_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str], numbers: Mapping[str, Any]
) -> None:
    if numbers["class"] != type(optimizer).__name__:
        raise InputError(
            f"the checkpoint holds the state of {numbers['class']}, but the optimizer is "
            f"{type(optimizer).__name__}."
        )
    if len(numbers["groups"]) != len(optimizer.param_groups):
        raise InputError(
            f"the checkpoint's optimizer had {len(numbers['groups'])} groups of parameters, but "
            f"this one has {len(optimizer.param_groups)}; make it as it was."
        )
    for i, (group, saved) in enumerate(zip(optimizer.param_groups, numbers["groups"], strict=True)):
        here, there = {names[p] for p in group["params"]}, set(saved["parameters"])
        if here != there:
            raise InputError(
                f"group {i} of the optimizer: {sorted(there - here)} are only in the checkpoint, "
                f"{sorted(here - there)} only here; use the model and the groups of the run."
            )
