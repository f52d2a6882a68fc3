"""Low-rank adapters (LoRA) by peft: only the adapters are trained, and the model without them is
the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from policyloss.errors import InputError

if TYPE_CHECKING:
    from policyloss_train.config import TrainConfig


def add_adapter(model: Any, config: TrainConfig) -> None:
    """Freeze the model and add adapters of rank `lora_rank` to its linear layers. An untrained
    adapter does not change the output. Its initial weights follow from the seed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise InputError("--lora-rank needs the package peft: pip install peft.") from error
    options = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or 2 * config.lora_rank,
        target_modules=list(config.lora_target) or "all-linear",
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        try:
            model.add_adapter(options)
        except ValueError as error:
            raise InputError(f"--lora-target {' '.join(config.lora_target)}: {error}") from error
    model.eval()


@contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Disable the adapters of the model, if it has any."""
    if not has_adapter(model):
        yield
        return
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@contextmanager
def saving_all_weights(model: Any) -> Iterator[None]:
    """Inside, transformers saves the complete model, not only its adapters."""
    adapted = has_adapter(model)
    model._hf_peft_config_loaded = False
    try:
        yield
    finally:
        model._hf_peft_config_loaded = adapted


def has_adapter(model: Any) -> bool:
    """Whether `add_adapter` was called."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextmanager
def base_trained(model: Any) -> Iterator[None]:
    """Inside, the base model is trained and its adapters are disabled."""
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    with without_adapter(model):
        if has_adapter(model):
            for name, p in model.named_parameters():
                p.requires_grad_(not _is_of_adapter(name))
        try:
            yield
        finally:
            for name, p in model.named_parameters():
                p.requires_grad_(trained[name])


@torch.no_grad()
def merged_weights(model: Any) -> dict[str, Tensor]:
    """State dict with the adapters merged, under the names of the base model."""
    merged: dict[str, Tensor] = {}
    for name, x in model.state_dict().items():
        if _is_of_adapter(name):
            continue
        layer, inside, rest = name.partition(".base_layer.")
        if inside and rest == "weight":
            x = x + model.get_submodule(layer).get_delta_weight("default").to(x.dtype)
        merged[f"{layer}.{rest}" if inside else name] = x
    return merged


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name
