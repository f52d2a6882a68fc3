"""AdamW: torch's own, one for weights of half precision, and one whose moments have 8 bits; and
what becomes of the learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from policyloss.errors import InputError
from policyloss_train.config import TrainConfig

BLOCK = 256  # moments that share one scale


def adamw(module: nn.Module, lr: float, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of `config`, over what requires a gradient. Where that is half precision, steps
    are added up in float32.
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
    """AdamW that keeps each weight in float32 beside the one that the model computes with.

    A step of 1e-6 on a weight of 1 is nothing in bfloat16, whose next number is 0.0078 away; in the
    float32 copy such steps add up. The copy and both moments are the optimizer's state.
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
    of 256. Beside weights of half precision it keeps a float32 copy, as `MasterAdamW` does.

    torchao keeps moments in tensors of its own kind, which only pickle could store. Here the state
    is what they are made of: `exp_avg` and `exp_avg_sq` hold the codes, `…_scale` the scales. The
    moments of a small weight stay float32, and have no scales.
    """

    _MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))  # and whether one may be negative

    def __init__(self, parameters: list[nn.Parameter], **options: Any) -> None:
        super().__init__(parameters, options)
        self._library, self._moments_of_8_bits = torchao()
        self._maps: dict[tuple[torch.device, bool], Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step of torchao's optimizer around the state that is held here."""
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
            # On a CPU a compiled step is no faster, and a minute late.
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
        """What a step changes: the weight, or its float32 copy."""
        if weight.dtype == torch.float32:
            return weight
        state = self.state[weight]
        if "master" not in state:
            state["master"] = weight.detach().float().clone()
        master: Tensor = state["master"]
        return master

    def _wrapped(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of a weight as torchao has it, which writes into the tensors that are here."""
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
        """What the tensors of torchao are made of."""
        plain = {"step": state["step"]}
        for name, _ in self._MOMENTS:
            moment = state[name]
            coded = isinstance(moment, self._moments_of_8_bits)
            plain[name] = moment.codes if coded else moment
            plain[f"{name}_scale"] = moment.scale if coded else moment.new_empty(0)
        return plain


def torchao() -> tuple[Any, Any]:
    """torchao's optimizer, and its tensor of 8 bits; an error that says how to get it."""
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
    """The share of the learning rate at a step: a rise over `lr_warmup`, then the schedule."""
    if step < config.lr_warmup:
        return (step + 1) / config.lr_warmup
    done = (step - config.lr_warmup) / max(config.steps - config.lr_warmup, 1)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        config.schedule
    ]
