"""Modules of Triton kernels, imported when first needed and only where Triton is installed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def kernels(module: str) -> Any:
    """The module of kernels of this name, or None without Triton."""
    return import_module(module) if find_spec("triton") is not None else None


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on the device of x."""
    elsewhere = x.is_cuda and x.get_device() != torch.cuda.current_device()
    return torch.cuda.device(x.device) if elsewhere else nullcontext()
