"""The output head of a model: its module, its matrices, and the transformation of its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from policyloss.arguments import description, is_number
from policyloss.errors import InputError

# The options of a model's configuration by which it changes its logits. A scale is multiplied by
# or divided by (models differ), a cap is `cap·tanh(logits / cap)`.
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
OWN_LOGITS = "head='logits' uses the logits that the model makes itself."
PROBE_RANGE = 50.0  # beyond the usual caps of 15 to 30, so that a cap shows


class UnknownHeadError(InputError):
    """A model whose output head cannot be replaced; it can only be used with its own logits."""


def language_model(model: Any) -> Any:
    """The model inside its wrappers: DDP, FSDP, DeepSpeed, torch.compile and PEFT."""
    inside = model
    while not hasattr(inside, "get_output_embeddings"):
        wrapped = getattr(inside, "module", None) or getattr(inside, "_orig_mod", None)
        if wrapped is None:
            raise UnknownHeadError(
                f"model is a {type(model).__name__} without get_output_embeddings(), and so is "
                "its .module or ._orig_mod; pass a causal language model of Hugging Face."
            )
        inside = wrapped
    return inside.get_base_model() if hasattr(inside, "get_base_model") else inside


def output_head(model: Any) -> nn.Module:
    """The module that makes logits of hidden states."""
    inside = language_model(model)
    head = inside.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise UnknownHeadError(
            f"{type(inside).__name__}.get_output_embeddings() returns {type(head).__name__}, not a "
            f"module with a weight [V, D]; pass a model with a head. {OWN_LOGITS}"
        )
    return head


class Matrices(NamedTuple):
    """`logits = hidden @ weight.T + bias`. weight: `[V, D]`, bias: `[V]` or None."""

    weight: Tensor
    bias: Tensor | None

    def logits(self, hidden: Tensor) -> Tensor:
        """The product, in the dtype of the matrices."""
        return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)


def plain_matrices(head: Any) -> Matrices:
    """The matrices of a head without adapters."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UnknownHeadError(
            f"the output head, a {type(head).__name__}, needs a floating-point weight [V, D], and "
            f"its weight is {description(weight)}. {OWN_LOGITS}"
        )
    return Matrices(weight, getattr(head, "bias", None))


class Transformation(NamedTuple):
    """A model's change of the logits z of its head: `cap·tanh(scale·z/cap)`, or `scale·z`."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """The model's logits, from the logits of its head."""
        scaled = logits * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)

    def options(self, temperature: float | Tensor) -> dict[str, Any]:
        """As arguments of the head: `cap·tanh(s·z/cap)/T = c·tanh(z/c)·s/T` with `c = cap/s`."""
        softcap = None if self.cap is None else self.cap / self.scale
        return {"temperature": temperature / self.scale, "softcap": softcap}

    @classmethod
    def observed_in(cls, model: Any, before: Tensor, after: Any) -> Transformation:
        """The change of logits `before` into `after`, of the kinds that the config allows."""
        inside = language_model(model)
        right_shape = isinstance(after, Tensor) and after.shape == before.shape
        if right_shape:
            wide = after.double()
            changed = [(known, known(before.double())) for known in _candidates(inside)]
            gaps = [(float(_worst(logits, wide)), known) for known, logits in changed]
            gap, best = min(gaps, key=lambda pair: pair[0])
            if gap <= 4 * torch.finfo(after.dtype).eps:
                return best
        difference = f"{gap:.2g} of their size apart at best" if right_shape else "of another shape"
        raise UnknownHeadError(
            f"{type(inside).__name__} transforms the logits of its head in an unknown way: "
            f"a factor named {', '.join(SCALES)} and a cap named {', '.join(CAPS)} in its "
            f"configuration leave them {difference}. {OWN_LOGITS}"
        )


def probe_logits(size: int, like: Tensor) -> Tensor:
    """A row of logits `[1, 1, V]` in which every factor and every cap shows."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    row = torch.linspace(-PROBE_RANGE, PROBE_RANGE, size, dtype=dtype, device=like.device)
    return row.view(1, 1, size)


def _worst(a: Tensor, b: Tensor) -> Tensor:
    """The largest relative difference."""
    return ((a - b).abs() / b.abs().clamp(min=1e-30)).where(a != b, torch.zeros_like(a)).max()


def _candidates(model: Any) -> Iterator[Transformation]:
    config: Any = getattr(model, "config", None)
    texts = [config, config.get_text_config() if hasattr(config, "get_text_config") else None]
    factors = [x for x in _numbers(texts, SCALES) if x > 0]
    scales = dict.fromkeys([1.0, *factors, *(1 / x for x in factors)])
    caps = dict.fromkeys(x for x in _numbers(texts, CAPS) if x > 0)
    for scale in scales:
        yield Transformation(scale)
        for cap in caps:
            yield Transformation(scale, cap)
            yield Transformation(scale, scale * cap)  # capped first, then scaled


def _numbers(configs: list[Any], names: tuple[str, ...]) -> list[float]:
    values: list[Any] = [getattr(config, name, None) for config in configs for name in names]
    return [float(x) for x in values if is_number(x)]


@contextmanager
def as_forward_of(module: nn.Module, function: Callable[..., Tensor]) -> Iterator[None]:
    """Let `function` be the forward of this one module, inside its hooks."""
    before = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """A context without dropout and gradients. At its end, every module has its old mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


# A head that PEFT adapts, as one product: `hidden @ weight.T + bias` with wider hidden states. LoRA
# adds `s·B·A·x` to the logits `W·x`. Both together are the product of `[x, s·A·x]` with `[W, B]`,
# in which a small update is not rounded away as it would be in a sum `W + s·B·A`, and dropout is
# applied to x as PEFT does. The attributes read here are PEFT's, which is not imported.
Product = Callable[[Tensor, Matrices], Tensor]


def with_matrices(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """`use(hidden, matrices)` with the hidden states and matrices that the head multiplies.

    The gradient reaches all parameters of the head. The modules that hold the weights of an adapted
    head are called around `use`, so that an engine that gathers a weight when its module is called
    (ZeRO-3) has gathered all weights.
    """
    if hasattr(head, "modules_to_save") and hasattr(head, "original_module"):
        return _of_copy(head, hidden, use)
    if hasattr(head, "base_layer") and hasattr(head, "disable_adapters"):
        return _of_adapters(head, hidden, use)
    return use(hidden, plain_matrices(head))


def _of_copy(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """`with_matrices` for a copy that is trained instead of the head."""
    active = [name for name in head.active_adapters if name in head.modules_to_save]
    off = head.disable_adapters or not active
    copy = head.original_module if off else head.modules_to_save[active[0]]
    return _inside([copy], hidden, lambda x: with_matrices(copy, x, use))


def _of_adapters(head: Any, hidden: Tensor, use: Product) -> Tensor:
    """`with_matrices` for a head to whose product LoRA's products are added."""
    base = head.base_layer
    if head.disable_adapters and head.merged:
        head.unmerge()  # as PEFT does
    if head.disable_adapters or head.merged:
        return _inside([base], hidden, lambda x: use(x, plain_matrices(base)))
    names = _products(head)
    seconds = [head.lora_B[name] for name in names]
    wide = torch.cat([hidden, *(_first_product(head, name, hidden) for name in names)], -1)

    def use_wide(wide: Tensor) -> Tensor:
        weight, bias = plain_matrices(base)
        columns = [second.weight.to(weight.dtype) for second in seconds]
        for name, second in zip(names, seconds, strict=True):
            if second.bias is not None:
                shift = second.bias * head.scaling[name]
                bias = shift if bias is None else bias + shift.to(bias.dtype)
        return use(wide, Matrices(torch.cat([weight, *columns], 1), bias))

    return _inside([base, *seconds], wide, use_wide)


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
