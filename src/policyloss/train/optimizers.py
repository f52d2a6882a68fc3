"""AdamW, AdamW for weights of half precision, and what becomes of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as adamw_step

from policyloss.train.config import TrainConfig


def adamw(module: nn.Module, lr: float, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over what requires a gradient; steps of half-precision weights add up in float32."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    options = {"lr": lr, "betas": config.betas, "weight_decay": config.weight_decay}
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
        return MasterAdamW(parameters, **options)
    return torch.optim.AdamW(parameters, fused=True, **options)  # type: ignore[arg-type]


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


def rate(config: TrainConfig, step: int) -> float:
    """The share of the learning rate at a step: a rise over `lr_warmup`, then the schedule."""
    if step < config.lr_warmup:
        return (step + 1) / config.lr_warmup
    done = (step - config.lr_warmup) / max(config.steps - config.lr_warmup, 1)
    return {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[
        config.schedule
    ]
