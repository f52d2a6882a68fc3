"""A head that PEFT adapts, as one product: `hidden @ weight.T + bias` with wider hidden states.

LoRA adds `s·B·A·x` to the logits `W·x`. Both together are the product of `[x, s·A·x]` with
`[W, B]`, in which a small update is not rounded away as it would be in a sum `W + s·B·A`, and
dropout is applied to x as PEFT does. The attributes that are looked at are those of PEFT, which is
not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from policyloss.hf.output_head import Matrices, UnknownHeadError, as_forward_of, plain_matrices

Product = Callable[[Tensor, Matrices], Tensor]


def with_matrices(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """`use(hidden, matrices)` with what the head multiplies; the gradient reaches all of its
    parameters.

    The modules in an adapted head that have the weights are called around `use`, so that what
    gathers a weight when its module is called (ZeRO-3) has gathered all of them.
    """
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return _of_copy(head, hidden, use)
    if hasattr(head, "base_layer") and hasattr(head, "disable_adapters"):
        return _of_adapters(head, hidden, use)
    return use(hidden, plain_matrices(head))


def _of_copy(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """Of a copy that is trained instead of the head."""
    active = [name for name in head.active_adapters if name in head.modules_to_save]
    off = head.disable_adapters or not active
    copy = head.original_module if off else head.modules_to_save[active[0]]
    return _inside([copy], hidden, lambda x: with_matrices(copy, x, use))


def _of_adapters(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """Of a head with products that are added to its own."""
    base = head.base_layer
    if head.disable_adapters and head.merged:
        head.unmerge()  # as PEFT does
    if head.disable_adapters or head.merged:
        return _inside([base], hidden, lambda x: use(x, plain_matrices(base)))
    names = _products(head)
    seconds = [head.lora_B[name] for name in names]
    wide = torch.cat([hidden, *(_first_product(head, name, hidden) for name in names)], -1)

    def used(wide: Tensor) -> Tensor:
        weight, bias = plain_matrices(base)
        columns = [second.weight.to(weight.dtype) for second in seconds]
        for name, second in zip(names, seconds, strict=True):
            if second.bias is not None:
                shift = second.bias * head.scaling[name]
                bias = shift if bias is None else bias + shift.to(bias.dtype)
        return use(wide, Matrices(torch.cat([weight, *columns], 1), bias))

    return _inside([base, *seconds], wide, used)


def _products(head: Any) -> list[str]:
    """The active adapters of a head, all of which must be LoRA's products."""
    first: Any = getattr(head, "lora_A", None)
    names = [] if first is None else [name for name in head.active_adapters if name in first]
    variants = [getattr(head, "lora_variant", {}).get(name) for name in names]
    odd = [type(x).__name__ for x in variants if x is not None]
    if first is None or odd or not all(isinstance(first[name], nn.Linear) for name in names):
        kind = odd[0] if odd else f"{type(head).__module__}.{type(head).__name__}"
        raise UnknownHeadError(
            f"the output head has an adapter of the kind {kind}, which does not add a product of "
            "two matrices to its logits; use plain LoRA on the head, leave the head out of "
            "target_modules, or pass head='logits'."
        )
    return names


def _first_product(head: Any, name: str, hidden: Tensor) -> Tensor:
    """`s·A·x` of one adapter, `[…, r]`."""
    first = head.lora_A[name]
    product: Tensor = first(head.lora_dropout[name](hidden.to(first.weight.dtype)))
    scaled: Tensor = product * head.scaling[name]
    return scaled.to(hidden.dtype)


def _inside(modules: list[Any], hidden: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(hidden)` inside calls of all these modules."""
    if not modules:
        return function(hidden)
    module, *others = modules
    with as_forward_of(module, lambda x: _inside(others, x, function)):
        out: Tensor = module(hidden)
    return out
