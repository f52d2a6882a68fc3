"""AdamW: torch's own, one for weights of half precision, and one with 8-bit moments; their state in
checkpoints, and the schedule of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw as adamw_step

from policyloss.errors import InputError

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig

BLOCK = 256  # moments that share one scale


def adamw(module: nn.Module, lr: float, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of `config` for all parameters that require a gradient. Steps on half-precision
    parameters are added up in float32.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    options: dict[str, Any] = {
        "lr": lr,
        "betas": config.betas,
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw8bit":
        return AdamW8bit(parameters, **options)
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
        return MasterAdamW(parameters, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


class MasterAdamW(torch.optim.Optimizer):
    """AdamW that keeps a float32 copy of each weight of the model.

    A step of 1e-6 on a weight of 1 is lost in bfloat16, because the next number is 0.0078 away. In
    the float32 copy such steps add up. The copy and both moments are the optimizer's state.
    """

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on the float32 copies, which are then rounded into the weights."""
        assert closure is None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in weights]
            masters = [state["master"] for state in states]
            adamw_step(
                masters,
                [p.grad.float() for p in weights],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                foreach=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=1e-8,
                maximize=False,
            )
            torch._foreach_copy_(weights, masters)

    def _state_of(self, weight: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            master = weight.detach().float()
            state["step"] = torch.zeros(())
            state["master"] = master.clone()
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(master) for _ in range(2))
        return state


class AdamW8bit(torch.optim.Optimizer):
    """AdamW by torchao, with moments of 8 bits: a code for each number, and a scale for each block
    of 256. It keeps a float32 copy of half-precision weights, as `MasterAdamW` does.

    torchao keeps moments in a tensor subclass, which only pickle could store. Here the state holds
    their plain tensors: `exp_avg` and `exp_avg_sq` are the codes, `…_scale` the scales. The moments
    of a small weight stay float32, and have no scales.
    """

    _MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # name, and whether it may be negative

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, options)
        self._library, self._moments_of_8_bits = torchao()
        self._maps: dict[tuple[torch.device, bool], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step with torchao's optimizer on this optimizer's state."""
        assert closure is None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            masters = [self._master(p) for p in weights]
            options = {name: group[name] for name in ("lr", "betas", "weight_decay")}
            inner = self._library(masters, **options)
            for p, master in zip(weights, masters, strict=True):
                master.grad = p.grad if master is p else p.grad.float()
                if "step" in self.state[p]:
                    inner.state[master] = self._wrapped(self.state[p])
            # On a CPU a compiled step is no faster, and compiling takes a minute.
            on_cpu = all(master.device.type == "cpu" for master in masters)
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                inner.step()
            for p, master in zip(weights, masters, strict=True):
                self.state[p].update(self._unwrapped(inner.state[master]))
                if master is not p:
                    master.grad = None
                    p.copy_(master)

    def fits(self, parameter: Tensor, key: str, value: Tensor) -> bool:
        """Whether a stored tensor could be `key` of the state of a parameter."""
        if key.endswith("_scale"):
            return value.dtype == torch.float32 and value.numel() in (
                0,
                parameter.numel() // BLOCK,
            )
        return value.shape == parameter.shape and value.dtype in (torch.uint8, torch.float32)

    def _master(self, weight: Tensor) -> Tensor:
        """The tensor that a step changes: the weight, or its float32 copy."""
        if weight.dtype == torch.float32:
            return weight
        state = self.state[weight]
        if "master" not in state:
            state["master"] = weight.detach().float().clone()
        master: Tensor = state["master"]
        return master

    def _wrapped(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a weight for torchao, which writes into the tensors of `state`."""
        wrapped = {"step": state["step"]}
        for name, signed in self._MOMENTS:
            codes, scale = state[name], state[f"{name}_scale"]
            wrapped[name] = codes
            if scale.numel():
                key = codes.device, signed
                if key not in self._maps:
                    zeros = self._moments_of_8_bits.zeros((BLOCK,), signed, BLOCK, codes.device)
                    self._maps[key] = zeros.qmap
                wrapped[name] = self._moments_of_8_bits(
                    codes, scale, self._maps[key], signed, torch.float32
                )
        return wrapped

    def _unwrapped(self, state: dict[str, Any]) -> dict[str, Tensor]:
        """The plain tensors inside torchao's."""
        plain = {"step": state["step"]}
        for name, _ in self._MOMENTS:
            moment = state[name]
            coded = isinstance(moment, self._moments_of_8_bits)
            plain[name] = moment.codes if coded else moment
            plain[f"{name}_scale"] = moment.scale if coded else moment.new_empty(0)
        return plain


def torchao() -> tuple[Any, Any]:
    """torchao's optimizer and its 8-bit tensor; raises an error with the install command."""
    try:
        from torchao.optim import AdamW8bit as Library
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise InputError(
            "--optimizer adamw8bit needs the package torchao: pip install "
            f"'policyloss-train[optimizers]', or leave it out ({error})."
        ) from error
    return Library, OptimState8bit


def rate(config: TrainConfig, step: int) -> float:
    """The factor of the learning rate at a step: a rise over `lr_warmup`, then the schedule."""
    if step < config.lr_warmup:
        return (step + 1) / config.lr_warmup
    done = (step - config.lr_warmup) / max(config.steps - config.lr_warmup, 1)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        config.schedule
    ]


# Options of the implementation, not of the result: the new optimizer keeps its own values.
HOW = ("foreach", "fused", "capturable", "differentiable")


def optimizer_state(
    model: nn.Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of `optimizer` as tensors named `parameter/key`, not copied, and numbers for JSON.

    Numbers: its class, and the options of each group (lr, betas, …) with the names of its
    parameters. Names come from `model.named_parameters()`, so the order of the parameters in the
    optimizer does not matter.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors = {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    groups = [
        {"parameters": [names[p] for p in group["params"]], "options": _options(group)}
        for group in optimizer.param_groups
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "state": {}}


def load_optimizer_state(
    model: nn.Module,
    optimizer: Optimizer,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
) -> None:
    """Load the state that `optimizer_state` returned, bit for bit.

    `optimizer.load_state_dict` would cast a float32 moment of a bfloat16 parameter to bfloat16.
    """
    parameters = dict(model.named_parameters())
    names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
    _refuse_other_optimizer(optimizer, names, numbers)
    # A step count stays on the host, unless a fused or captured step reads it on the device.
    on_device = {
        names[p]
        for group in optimizer.param_groups
        for p in group["params"]
        if group.get("fused") or group.get("capturable")
    }
    state: dict[Tensor, dict[str, Any]] = {}
    for place, value in tensors.items():
        name, _, key = place.rpartition("/")
        parameter = parameters[name]
        # The state of `AdamW8bit` differs from its parameters in shape or type.
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
    """Raise for a tensor at `place` that cannot be state of the parameter. fits: whether the
    optimizer accepts its shape and type.
    """
    if not fits and value.dim() and value.shape != parameter.shape:
        raise InputError(
            f"{place} in the checkpoint is {tuple(value.shape)}, but the parameter is "
            f"{tuple(parameter.shape)}."
        )
    if not fits and value.is_floating_point() != parameter.is_floating_point():
        raise InputError(
            f"{place} in the checkpoint is {value.dtype}, but the parameter is {parameter.dtype}."
        )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in ("params", *HOW)}
    return {
        key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()
    }


def _same_kind(here: Any, saved: Any) -> bool:
    """Whether an option from a file may replace an optimizer's current value."""
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
