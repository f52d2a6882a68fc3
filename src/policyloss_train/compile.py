"""`--compile`: the blocks of a model's body, compiled for learning.

One block is compiled and not the body, because all blocks share its code: a body takes minutes.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch import nn

# What a block is told when it samples. Its shapes change with every token, so it stays as it is.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


def compile_blocks(body: nn.Module) -> None:
    """Let the repeated blocks of a body run compiled code wherever they are not sampled from.

    A block gets a class of its own and keeps its weights, their names, and its copies: a function
    in the block would be shared with them, and use the weights of the original.
    """
    for module in body.children():
        if isinstance(module, nn.ModuleList):
            for block in module:
                kind: Any = type(block)
                block.__class__ = _compiled(kind)
        else:
            compile_blocks(module)


@cache
def _compiled(block: Any) -> Any:
    """The class of a block with a compiled forward."""
    plain, compiled = block.forward, torch.compile(block.forward, dynamic=True)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        samples = any(kwargs.get(name) is not None for name in _CACHES)
        return (plain if samples else compiled)(self, *args, **kwargs)

    return type(block.__name__, (block,), {"forward": forward, "__module__": block.__module__})
