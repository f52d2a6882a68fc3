"""The Triton kernel for the gradient of rows of logits: one launch, with one program per row.

It is the `row_gradient` of `softmax_rows.py`, and shares the tiles, the powers of two and the
determinism of `kernels.py`. Legend: as there.
"""

# Triton has no types, and constants of a kernel are written in capitals.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of
from policyloss.head.kernels import BACKWARD, LN_2, LOG2_E, NOTHING, _capped, _rate, _shape
from policyloss.head.softmax_rows import Scaling


@triton.jit
def _complement(x):
    """`1 - e^x` of x ≤ 0, to the last digits also where e^x is near 1."""
    # Eight terms of the series are exact in float32 there.
    near = 1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))
    near = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * near)))
    return tl.where(x > -0.35, near, 1 - tl.exp2(x * LOG2_E))


@triton.jit
def _write_tile(
    z_row,
    out_row,
    bias_ptr,
    softcap,
    scale,
    lse2,
    base,
    bend,
    target,
    start,
    y,
    V,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz of one tile: `target` at y, else `p·(base + bend·log2 p)`, times the softcap's slope."""
    column = start + tl.arange(0, BLOCK)
    if MASKED:
        z = tl.load(z_row + column, mask=column < V, other=0.0, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column, mask=column < V, other=0.0) if HAS_BIAS else z
    else:
        z = tl.load(z_row + column, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column) if HAS_BIAS else z
    u = _capped(z, bias, softcap, HAS_BIAS, HAS_SOFTCAP)
    log2_p = u * scale - lse2
    p = tl.exp2(log2_p)
    d = p * (base + bend * tl.maximum(log2_p, NOTHING)) if ENTROPY else p * base
    # One tile of the row holds y; the others need not compare.
    if (y >= start) & (y < start + BLOCK):
        d = tl.where(column == y, target, d)
    if HAS_SOFTCAP:
        bent = u / softcap
        d *= 1 - bent * bent
    if NARROWING:
        tl.debug_barrier()
    if MASKED:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty), mask=column < V)
    else:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty))


@triton.jit
def _gradient_kernel(
    z_ptr,
    out_ptr,
    ids_ptr,
    lse_ptr,
    entropy_ptr,
    dlogp_ptr,
    dentropy_ptr,
    logp_ptr,
    inverse_temperature,
    bias_ptr,
    softcap,
    z_stride,
    out_stride,
    V,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient dz of one row.

    `dz = ds · (1 − (u/softcap)²) / temperature`, with
    `ds = dlogp·(onehot(id) − p) − dentropy·p·(log p + entropy)`.
    NARROWING: out lies over z in a smaller type, row on row. What a tile writes then covers bytes
    of this tile and of those before it, so it is enough that no thread writes a tile before every
    thread has read it.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    out_row = out_ptr + row.to(tl.int64) * out_stride
    within = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    g = tl.load(dlogp_ptr + row).to(tl.float32)
    h = tl.load(dentropy_ptr + row).to(tl.float32) if ENTROPY else 0.0
    if (g == 0) & (h == 0):
        zeros = tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
        for start in range(0, full, BLOCK):
            tl.store(out_row + start + within, zeros)
        if full < V:
            tl.store(out_row + full + within, zeros, mask=full + within < V)
    else:
        y = tl.load(ids_ptr + row)
        rate = tl.load(inverse_temperature + row).to(tl.float32) if PER_ROW else inverse_temperature
        lse2 = tl.load(lse_ptr + row) * LOG2_E
        scale = rate * LOG2_E
        # The entry of y is `target_gradient` of the row's log-probability.
        logp = tl.load(logp_ptr + row)
        target = rate * g * _complement(logp)
        base = -rate * g
        bend = 0.0
        if ENTROPY:
            entropy = tl.load(entropy_ptr + row)
            target -= rate * h * tl.exp2(logp * LOG2_E) * (logp + entropy)
            base = -rate * (g + h * entropy)
            bend = -rate * h * LN_2
        for start in range(0, full, BLOCK):
            _write_tile(
                z_row, out_row, bias_ptr, softcap, scale, lse2, base, bend, target, start, y, V,
                HAS_BIAS, HAS_SOFTCAP, ENTROPY, NARROWING, False, BLOCK,
            )  # fmt: skip
        if full < V:
            _write_tile(
                z_row, out_row, bias_ptr, softcap, scale, lse2, base, bend, target, full, y, V,
                HAS_BIAS, HAS_SOFTCAP, ENTROPY, NARROWING, True, BLOCK,
            )  # fmt: skip


def row_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    lse: Tensor,
    entropy_value: Tensor | None,
    dlogp: Tensor,
    dentropy: Tensor | None,
    logp: Tensor,
    scaling: Scaling,
    *,
    _block: int | None = None,
    _warps: int | None = None,
) -> None:
    """`softmax_rows.row_gradient` in one read of z and one write of `out`.

    z, out: `[R, V]`, last dimension contiguous. logp: `[R]`, of each row's id. `out` may be `z`
    itself, or a narrower type over the same memory, each row starting at the byte where its row of
    z starts.
    """
    rows, vocabulary = z.shape
    with_entropy = entropy_value is not None and dentropy is not None
    rate, per_row = _rate(scaling)
    if not rows:
        return
    block, warps = _shape(BACKWARD, z, _block, _warps)
    with on_device_of(z):
        _gradient_kernel[(rows,)](
            z,
            out,
            ids.contiguous(),
            lse.contiguous(),
            entropy_value.contiguous() if with_entropy and entropy_value is not None else None,
            dlogp.contiguous(),
            dentropy.contiguous() if with_entropy and dentropy is not None else None,
            logp.contiguous(),
            rate,
            scaling.bias,
            1.0 if scaling.softcap is None else float(scaling.softcap),
            z.stride(0),
            out.stride(0),
            vocabulary,
            PER_ROW=per_row,
            HAS_BIAS=scaling.bias is not None,
            HAS_SOFTCAP=scaling.softcap is not None,
            ENTROPY=with_entropy,
            NARROWING=out.data_ptr() == z.data_ptr() and out.element_size() != z.element_size(),
            BLOCK=block,
            num_warps=warps,
        )
