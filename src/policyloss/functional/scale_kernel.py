"""A Triton kernel for `out = x * factor`, with a factor that is one number on the device.

`out` may be of a narrower type. torch's product reads such a factor again for every element, and
takes three times as long.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of

BLOCK, WARPS = 4096, 8


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, n, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `x * factor` of one block to `out`; in place, a factor of 1 leaves nothing to write."""
    if IN_PLACE:  # noqa: SIM102 (the first is known to the compiler, the second is not)
        if tl.load(factor_ptr).to(tl.float32) == 1:
            return
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr).to(tl.float32)
    x = tl.load(x_ptr + at, mask=at < n, eviction_policy="evict_first")
    tl.store(out_ptr + at, (x.to(tl.float32) * factor).to(out_ptr.dtype.element_ty), mask=at < n)


def write_scaled(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `x * factor` to `out`: contiguous, of one size, at most float32; factor 0-dim."""
    n = x.numel()
    if n:
        in_place = x.data_ptr() == out.data_ptr()
        with on_device_of(x):
            _scale_kernel[(triton.cdiv(n, BLOCK),)](
                x, factor, out, n, IN_PLACE=in_place, BLOCK=BLOCK, num_warps=WARPS
            )
