"""Matrix products that accumulate, and leave their result, in float32 whatever the operands are.

Products of bfloat16 numbers are exact in float32, so logits made this way are those of float32 arithmetic on the same inputs;
rounded to bfloat16 they would be off by up to 0.1 where they are near 30.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mixed(a: Tensor) -> bool:
    """Whether the device multiplies half precision into float32 by itself (CUDA, since torch 2.8)."""
    return a.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype_out")


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b` in out's precision. `[m, k]`, `[k, n]` → `[m, n]`."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif mixed(a) and out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif a.element_size() < out.element_size():
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        out.copy_(torch.mm(a, b))


def scaled_product(a: Tensor, b: Tensor, out: Tensor, scale: float) -> None:
    """`out = (a @ b)·scale`, scaled before it is rounded to out's precision."""
    if scale == 1:
        product(a, b, out)
        return
    wide = torch.empty_like(out, dtype=torch.float32)
    product(a, b, wide)
    out.copy_(wide.mul_(scale))


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """`total += (a @ b)·scale` in total's precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=scale)
    elif mixed(a) and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=scale)


class Room:
    """Memory for one window of logits, and for their gradient in the same place: logits are not needed once it exists.

    Rows are laid out so that each starts at a multiple of 256 bytes, whatever the vocabulary.
    """

    def __init__(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> None:
        self.memory = torch.empty(rows, -(-columns // 64) * 64, device=like.device, dtype=dtype)

    def logits(self, rows: int, columns: int) -> Tensor:
        """`[rows, columns]`, not yet written."""
        return self.memory[:rows, :columns]

    def gradient(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The same rows in a type that is no wider: row r starts at the byte where its logits start."""
        return self.memory.view(dtype)[:rows, :columns]
