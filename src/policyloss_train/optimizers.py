"""AdamW: torch's own, one on float32 copies of weights of half precision, and one with 8-bit
moments; their state in checkpoints, and the schedule of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from policyloss.errors import InputError

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig

BLOCK = 256  # 8-bit moments that share one scale
_ADAMW = partial(torch.optim.AdamW, foreach=True)


def adamw(module: nn.Module, lr: float, config: TrainConfig) -> Optimizer:
    """The optimizer of `config` for all trained parameters; half precision adds up in float32."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    options: Any = {"lr": lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if config.optimizer == "adamw8bit":
        return MasterAdamW(parameters, torchao()[0], **options)
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
        return MasterAdamW(parameters, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)


class MasterAdamW(Optimizer):
    """AdamW that keeps a float32 copy of each weight of half precision.

    A step of 1e-6 on a weight of 1 is lost in bfloat16, because the next number is 0.0078 away. In
    the float32 copy such steps add up. The copy and both moments are the optimizer's state.
    library: makes the AdamW that steps on the copies, torch's or torchao's.
    """

    def __init__(
        self, params: list[nn.Parameter], library: Callable[..., Optimizer] = _ADAMW, **options: Any
    ) -> None:
        super().__init__(params, options)
        self._library = library

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on the float32 copies, which are then rounded into the weights."""
        assert closure is None
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            masters = [self._master(p) for p in weights]
            options = {name: group[name] for name in ("lr", "betas", "weight_decay")}
            inner = self._library(masters, **options)
            for p, master in zip(weights, masters, strict=True):
                master.grad = p.grad.float()
                moments = {key: x for key, x in self.state[p].items() if key != "master"}
                inner.state[master] = moments
            # torchao compiles its step. On a CPU that is no faster, and compiling takes a minute.
            on_cpu = masters[0].device.type == "cpu"
            with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                inner.step()
            for p, master in zip(weights, masters, strict=True):
                self.state[p].update(inner.state[master])
                if master is not p:
                    master.grad = None
            torch._foreach_copy_(weights, masters)

    def _master(self, weight: Tensor) -> Tensor:
        """The tensor that a step changes: the weight, or its float32 copy."""
        if weight.dtype == torch.float32:
            return weight
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["master"] = weight.detach().float().clone()
        return state["master"]


def torchao() -> tuple[Any, Any]:
    """torchao's optimizer and its 8-bit tensor; raises an error with the install command."""
    try:
        from torchao.optim import AdamW8bit
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise InputError(
            "--optimizer adamw8bit needs the package torchao: pip install "
            f"'policyloss-train[optimizers]', or leave it out ({error})."
        ) from error
    return AdamW8bit, OptimState8bit


def rate(config: TrainConfig, step: int) -> float:
    """The factor of the learning rate at a step: a rise over `lr_warmup`, then the schedule."""
    if step < config.lr_warmup:
        return (step + 1) / config.lr_warmup
    done = (step - config.lr_warmup) / max(config.steps - config.lr_warmup, 1)
    shares = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return shares[config.schedule]


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of `optimizer` as tensors named `parameter/key`, not copied. Names come from
    `model.named_parameters()`. An 8-bit moment is two tensors: its codes, and `key_scale`.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{names[parameter]}/{key}"
            if hasattr(value, "codes"):
                tensors |= {place: value.codes, f"{place}_scale": value.scale}
            else:
                tensors[place] = value
    return tensors


def load_optimizer_state(
    model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Load the state that `optimizer_state` returned, bit for bit.

    `optimizer.load_state_dict` would cast a float32 moment of a bfloat16 parameter to bfloat16.
    """
    parameters = dict(model.named_parameters())
    # A step count stays on the host, unless a fused step reads it on the device.
    fused = {p for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
    state: dict[Tensor, dict[str, Any]] = {}
    for place, value in tensors.items():
        if place.endswith("_scale"):
            continue
        name, _, key = place.rpartition("/")
        parameter, scale = parameters[name], tensors.get(f"{place}_scale")
        if scale is None:
            fits = value.is_floating_point() and value.shape in ((), parameter.shape)
        else:
            form = (value.dtype, value.shape, scale.dtype, scale.numel())
            blocks = parameter.numel() // BLOCK
            fits = form == (torch.uint8, parameter.shape, torch.float32, blocks)
        if not fits:
            raise InputError(
                f"{place} in the checkpoint is {value.dtype} {tuple(value.shape)}, but the "
                f"parameter is {parameter.dtype} {tuple(parameter.shape)}."
            )
        device = "cpu" if key == "step" and parameter not in fused else parameter.device
        copied = value.detach().to(device, copy=True)
        if scale is not None:
            copied = _moment(key, copied, scale.to(device, copy=True))
        state.setdefault(parameter, {})[key] = copied
    dtypes = {parameter.dtype for parameter in state}
    if len({frozenset(entries) for entries in state.values()}) > len(dtypes):
        raise InputError("the checkpoint holds the optimizer's state of some parameters in part.")
    optimizer.state.clear()
    optimizer.state.update(state)


def _moment(key: str, codes: Tensor, scale: Tensor) -> Tensor:
    """torchao's tensor of 8-bit numbers. Only the first moment may be negative."""
    kind, signed = torchao()[1], key == "exp_avg"
    numbers = kind.zeros((BLOCK,), signed, BLOCK, codes.device).qmap
    moment: Tensor = kind(codes, scale, numbers, signed, torch.float32)
    return moment
