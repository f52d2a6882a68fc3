"""Matrix products with sums and results in float32, whatever the type of the operands.

Products of bfloat16 numbers are exact in float32, so these logits equal float32 arithmetic on the
same inputs; rounded to bfloat16, a logit near 30 would be off by up to 0.06.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from policyloss.functional.masking import compute_dtype

WIDE_BYTES = 64 << 20  # of float32 sums that are not yet rounded
CPU_BYTES = 63 << 20  # of logits, in any plan; with the blocks they are worked on in, 64 MiB


def sums_half_in_float32(a: Tensor) -> bool:
    """Whether the device multiplies half precision into float32: CUDA, since torch 2.8."""
    return a.device.type == "cuda" and hasattr(torch.ops.aten.mm, "dtype_out")


def _needs_alignment(a: Tensor) -> bool:
    """Whether sizes that are not a multiple of 8 make products slow: for half precision on CUDA.

    Such products take up to eight times as long.
    """
    return a.device.type == "cuda" and a.element_size() == 2


def _cut(size: int) -> tuple[slice, slice] | None:
    """The largest multiple of 64 within `size`, and the rest; None where a cut gains nothing."""
    most = size // 64 * 64
    return None if size % 8 == 0 or size < 64 else (slice(0, most), slice(most, size))


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a @ b`, `[m, k]`, `[k, n]` → `[m, n]`.

    The sums have the precision of `out`, or float32 for half-precision operands. A vocabulary of
    50257 entries is multiplied as 50240 and 17.
    """
    if _needs_alignment(a):
        if (cut := _cut(a.shape[0])) is not None:
            for part in cut:
                product(a[part], b, out[part])
            return
        if (cut := _cut(b.shape[1])) is not None:
            for part in cut:
                product(a, b[:, part], out[:, part])
            return
        if (cut := _cut(a.shape[1])) is not None:
            product(a[:, cut[1]], b[cut[1]], out)
            add_product(out, a[:, cut[0]], b[cut[0]])
            return
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    elif sums_half_in_float32(a) and out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    elif a.element_size() < out.element_size():
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        out.copy_(torch.mm(a, b))


def rounded_product(a: Tensor, b: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """`out = (a @ b)·scale`, summed in float32 and rounded once.

    Where the device cannot do so, it is computed some rows at a time.
    """
    # A product of bfloat16 on CUDA is rounded once, unless `product` would add two parts.
    half = a.dtype == out.dtype == torch.bfloat16 and a.device.type == "cuda"
    rounds_once = half and _cut(a.shape[1]) is None
    if scale == 1 and (out.dtype == compute_dtype(out) or rounds_once):
        with _sums_in_float32():
            product(a, b, out)
        return
    step = max(1, WIDE_BYTES // (4 * max(out.shape[1], 1)))
    for start in range(0, out.shape[0], step):
        part = out[start : start + step]
        wide = torch.empty_like(part, dtype=compute_dtype(out))
        product(a[start : start + step], b, wide)
        part.copy_(wide.mul_(scale) if scale != 1 else wide)


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Forbid the device to add parts of a long sum in bfloat16, which torch allows by default."""
    flags = torch.backends.cuda.matmul
    allowed = flags.allow_bf16_reduced_precision_reduction
    if not allowed:
        yield
        return
    flags.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        flags.allow_bf16_reduced_precision_reduction = allowed


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """`total += (a @ b)·scale` in total's precision."""
    if _needs_alignment(a):
        if (cut := _cut(a.shape[0])) is not None:
            for part in cut:
                add_product(total[part], a[part], b, scale)
            return
        if (cut := _cut(a.shape[1])) is not None:
            for part in cut:
                add_product(total, a[:, part], b[part], scale)
            return
    if a.dtype == total.dtype:
        total.addmm_(a, b, alpha=scale)
    elif sums_half_in_float32(a) and total.dtype == torch.float32:
        torch.addmm(total, a, b, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype), alpha=scale)


class Room:
    """Memory for one window of logits, which their gradient then overwrites.

    The logits are not needed once their gradient exists. Each row starts at a multiple of 256
    bytes, whatever the vocabulary.
    """

    def __init__(self, rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> None:
        self.memory = torch.empty(rows, -(-columns // 64) * 64, device=like.device, dtype=dtype)

    def logits(self, rows: int, columns: int) -> Tensor:
        """`[rows, columns]`, not yet written."""
        return self.memory[:rows, :columns]

    def gradient(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """The same rows in a type that is no wider; each starts at the byte of its logits."""
        return self.memory.view(dtype)[:rows, :columns]
