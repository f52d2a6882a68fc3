"""Hypotheses about weights: a precision, or an adapter that is missing or merged with rounding.

Each is simulated: the model runs once more with those weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policyloss_lab.diagnosis.forward import altered
from policyloss_lab.diagnosis.hypothesis import Case, Fit

FP8_MAX = 448.0  # of float8_e4m3fn


def rounded(dtype: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    """Rounding of a weight to a 16-bit type."""
    return lambda w, axis: w.to(dtype).to(w.dtype)


def int8(w: Tensor, axis: int, steps: float = 127.0) -> Tensor:
    """Symmetric 8-bit integers with a scale for each output channel."""
    scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-12) / steps
    return (w / scale).round().clamp(-128, 127) * scale


def int8_wide(w: Tensor, axis: int) -> Tensor:
    """The same with all 256 values in use, as torchao has it."""
    return int8(w, axis, 127.5)


def fp8(w: Tensor, axis: int) -> Tensor:
    """e4m3 with a scale for each output channel."""
    scale = w.abs().amax(axis, keepdim=True).clamp(min=1e-12) / FP8_MAX
    return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale


def fp8_tensor(w: Tensor, axis: int) -> Tensor:
    """e4m3 with one scale for a whole matrix."""
    scale = w.abs().amax().clamp(min=1e-12) / FP8_MAX
    return (w / scale).to(torch.float8_e4m3fn).to(w.dtype) * scale


ROUNDINGS: dict[str, tuple[tuple[str, Callable[[Tensor, int], Tensor], bool], ...]] = {
    "weights_bf16": (("bfloat16", rounded(torch.bfloat16), True),),
    "weights_fp16": (("float16", rounded(torch.float16), True),),
    "weights_int8": (("int8", int8, False), ("int8 of 256 values", int8_wide, False)),
    "weights_fp8": (
        ("fp8 by channel", fp8, False),
        ("fp8 by matrix", fp8_tensor, False),
    ),
}


@dataclass(frozen=True)
class RoundedWeights:
    """The weights of one side are rounded: all to 16 bits, or those of the matrices to 8."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """One fit for each rounding, with and without that of the head."""
        if case.scorer is None:
            return
        scorer, model = case.scorer, case.scorer.model
        one_side = len(case.sides) == 1  # where both run in bf16, neither of them is the odd one
        for side, sign in case.sides if one_side else ():
            yield Fit(
                "weights_bf16",
                f"the model behind {side} is rounded to bfloat16 and runs in it",
                sign * scorer.half_precision(),
                share="fixed",
                details={"rounding": "bfloat16", "side": side},
            )
        axes = matrices(model)
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        head_weight = getattr(head, "weight", None)
        for cause, variants in ROUNDINGS.items():
            for name, rounding, every in variants if one_side or cause != "weights_bf16" else ():
                for with_head in (True,) if every else (True, False):

                    def change(
                        weight_name: str,
                        w: Tensor,
                        every: bool = every,
                        rounding: Callable[[Tensor, int], Tensor] = rounding,
                        with_head: bool = with_head,
                    ) -> Tensor | None:
                        axis = axes.get(weight_name)
                        if not every and (
                            axis is None or (not with_head and w.data_ptr() == _place(head_weight))
                        ):
                            return None
                        return rounding(w, 1 if axis is None else axis)

                    def logits(change: Callable[[str, Tensor], Tensor | None] = change) -> Tensor:
                        with altered(model, change):
                            return scorer.forward()

                    effect = scorer.effect(f"{name} {with_head}", logits)
                    tail = "" if with_head else ", but for the head"
                    for side, sign in case.sides:
                        yield Fit(
                            cause,
                            f"the weights behind {side} are rounded to {name}{tail}",
                            sign * effect,
                            freedom=0 if every else 1,
                            share="fixed",
                            details={"rounding": name, "side": side},
                        )


def _place(weight: Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


def matrices(model: nn.Module) -> dict[str, int]:
    """The weights of linear layers by name, with the axis that a scale of an output channel runs
    over: 1, or 0 where a layer keeps its weight transposed.
    """
    axes = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() == 2:
            if isinstance(module, nn.Linear):
                axes[f"{name}.weight"] = 1
            elif type(module).__name__ == "Conv1D":
                axes[f"{name}.weight"] = 0
    return axes


@dataclass(frozen=True)
class Adapter:
    """The model has an adapter that one side leaves out, or merges into rounded weights."""

    def fit(self, case: Case) -> Iterator[Fit]:
        """Both, for a model with `disable_adapter` and `merge_and_unload`, as peft's have."""
        if case.scorer is None or not hasattr(case.scorer.model, "disable_adapter"):
            return
        scorer, model = case.scorer, case.scorer.model

        def without() -> Tensor:
            with model.disable_adapter():
                return scorer.forward()

        def merged() -> Tensor:
            merged_model = copy.deepcopy(model).merge_and_unload()
            with altered(merged_model, lambda name, w: w.bfloat16().to(w.dtype)):
                return scorer.with_model(merged_model).forward()

        for cause, what, logits in (
            ("adapter_missing", "is that of the model without its adapter", without),
            ("adapter_merged", "is that of an adapter merged into bf16 weights", merged),
        ):
            effect = scorer.effect(cause, logits)
            for side, sign in case.sides:
                yield Fit(
                    cause, f"{side} {what}", sign * effect, share="fixed", details={"side": side}
                )
