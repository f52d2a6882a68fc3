"""Triton kernels for the statistics and the gradient of rows of logits, one program per row.

They are the `row_partials` and the `row_gradient` of `softmax_rows.py`, one launch each.
Legend: R rows, V vocabulary entries, z raw logits `[R, V]`, ids `[R]`. A program walks its row in
tiles. Full tiles are read without a mask; the rest of the row is one masked tile. Nothing is
added across programs and nothing is tuned at run time, so the same input gives the same bits.
Exponentials are powers of two: `e^x = 2^(x·log2 e)`, one instruction on a GPU. Temperatures are
positive.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of
from policyloss.head.softmax_rows import Partials, Scaling

# Entries of a row that a program reads at once, and the warps that share them, by bytes of a logit.
# Plain constants measured on an H200, not an autotuner's choice.
FORWARD = {4: (8192, 4), 2: (2048, 4)}
BACKWARD = {4: (1024, 8), 2: (8192, 16)}
# Bytes that a thread reads at once in the forward.
VECTOR_BYTES = 16

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
# 2^x is 0 in float32 below this, so a shifted logit that is clamped here is finite, and its product
# with 2^x is still 0.
NOTHING: tl.constexpr = tl.constexpr(-1000.0)


@triton.jit
def _capped(z, bias, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """`softcap * tanh((z + bias) / softcap)` in float32; each part only if there is one."""
    u = z.to(tl.float32)
    if HAS_BIAS:
        u += bias.to(tl.float32)
    if HAS_SOFTCAP:
        u = softcap - 2 * softcap / (1 + tl.exp2(u * (2 * LOG2_E / softcap)))
    return u


@triton.jit
def _merged(top, total, moment, u, scale, ENTROPY: tl.constexpr, GUARDED: tl.constexpr):
    """The running reference, sum and moment of each lane `[L]` after the tile `u` `[L, K, E]`.

    All are in powers of two.
    `top` is `max(u)·scale` as rounded, and everything is measured from that very number, so its
    rounding costs nothing.
    """
    new_top = tl.maximum(top, tl.max(tl.max(u, axis=2), axis=1) * scale)
    # A lane that has met only −inf keeps 0 as its reference: −inf − (−inf) is NaN.
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    shift = u * scale - reference[:, None, None]
    e = tl.exp2(shift)
    back = top - reference
    decay = tl.exp2(back)
    if ENTROPY:
        moment = (moment + total * tl.maximum(back, NOTHING)) * decay
        moment += tl.sum(
            tl.sum(e * (tl.maximum(shift, NOTHING) if GUARDED else shift), axis=2), axis=1
        )
    total = total * decay + tl.sum(tl.sum(e, axis=2), axis=1)
    return new_top, total, moment


@triton.jit
def _walk(
    z_row,
    bias_ptr,
    softcap,
    scale,
    V,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    GUARDED: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """One pass over a row: its reference, sum and moment, in powers of two.

    GUARDED: logits may be −inf.
    """
    lane = tl.arange(0, L)[:, None, None] * E + tl.arange(0, E)[None, None, :]
    within = lane + tl.arange(0, K)[None, :, None] * (L * E)
    top = tl.full([L], float("-inf"), tl.float32)
    total = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    full = V // (K * L * E) * (K * L * E)
    for start in range(0, full, K * L * E):
        column = start + within
        z = tl.load(z_row + column, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column) if HAS_BIAS else z
        u = _capped(z, bias, softcap, HAS_BIAS, HAS_SOFTCAP)
        top, total, moment = _merged(top, total, moment, u, scale, ENTROPY, GUARDED)
    if full < V:
        column = full + within
        z = tl.load(z_row + column, mask=column < V, other=0.0, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column, mask=column < V, other=0.0) if HAS_BIAS else z
        # The bound of a softcap is finite, so entries past the row become −inf after it.
        u = tl.where(column < V, _capped(z, bias, softcap, HAS_BIAS, HAS_SOFTCAP), float("-inf"))
        top, total, moment = _merged(top, total, moment, u, scale, ENTROPY, True)
    row_top = tl.max(top, axis=0)
    back = top - tl.where(row_top == float("-inf"), 0.0, row_top)
    decay = tl.exp2(back)
    row_moment = 0.0
    if ENTROPY:
        row_moment = tl.sum((moment + total * tl.maximum(back, NOTHING)) * decay, axis=0)
    return row_top, tl.sum(total * decay, axis=0), row_moment


@triton.jit
def _partials_kernel(
    z_ptr,
    ids_ptr,
    inverse_temperature,
    bias_ptr,
    softcap,
    out_ptr,
    z_stride,
    R,
    V,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """The partials of one row: its maximum m, two sums, and the shifted target.

    With `s = scaled(z)` and `e = (s - m).exp()` they are `m`, `e.sum(-1)`, `(e * (s - m)).sum(-1)`
    and `s[id] - m`.
    A tile is `[L, K, E]`: L threads read E entries each, 16 bytes, K times. The K·E entries of a
    lane belong to one thread, which keeps a reference, a sum and a moment of its own. Threads meet
    once, at the end of the row.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    rate = tl.load(inverse_temperature + row).to(tl.float32) if PER_ROW else inverse_temperature
    scale = rate * LOG2_E
    row_top, row_total, row_moment = _walk(
        z_row, bias_ptr, softcap, scale, V, HAS_BIAS, HAS_SOFTCAP, ENTROPY, False, K, L, E
    )
    if ENTROPY:  # noqa: SIM102 (known when compiled, unlike the next)
        # Only 0·(−inf) makes the moment NaN where the sum is not: rare enough to walk such a row
        # again, with a guard per entry.
        if (row_moment != row_moment) & (row_total == row_total):
            row_top, row_total, row_moment = _walk(
                z_row, bias_ptr, softcap, scale, V, HAS_BIAS, HAS_SOFTCAP, ENTROPY, True, K, L, E
            )
    y = tl.load(ids_ptr + row)
    here = (y >= 0) & (y < V)
    z_y = tl.load(z_row + y, mask=here, other=0.0)
    bias_y = tl.load(bias_ptr + y, mask=here, other=0.0) if HAS_BIAS else z_y
    # A maximum may drop a NaN, a sum does not.
    tl.store(out_ptr + row, tl.where(row_total == row_total, row_top * LN_2, row_total))
    tl.store(out_ptr + R + row, row_total)
    shift_y = _capped(z_y, bias_y, softcap, HAS_BIAS, HAS_SOFTCAP) * scale - tl.where(
        row_top == float("-inf"), 0.0, row_top
    )
    tl.store(out_ptr + 2 * R + row, tl.where(here, shift_y * LN_2, 0.0))
    if ENTROPY:
        tl.store(out_ptr + 3 * R + row, row_moment * LN_2)


def row_partials(
    z: Tensor,
    ids: Tensor,
    scaling: Scaling,
    entropy: bool,
    *,
    _block: int | None = None,
    _warps: int | None = None,
) -> Partials:
    """`softmax_rows.row_partials` in one read of z.

    `[R, V]` (last dimension contiguous), `[R]` → four `[R]` in float32.
    """
    rows, vocabulary = z.shape
    out = torch.empty(4 if entropy else 3, rows, dtype=torch.float32, device=z.device)
    if rows:
        block, warps = _shape(FORWARD, z, _block, _warps)
        entries = VECTOR_BYTES // z.element_size()
        lanes = 32 * warps
        rate, per_row = _rate(scaling)
        with on_device_of(z):
            _partials_kernel[(rows,)](
                z,
                ids.contiguous(),
                rate,
                scaling.bias,
                1.0 if scaling.softcap is None else float(scaling.softcap),
                out,
                z.stride(0),
                rows,
                vocabulary,
                PER_ROW=per_row,
                HAS_BIAS=scaling.bias is not None,
                HAS_SOFTCAP=scaling.softcap is not None,
                ENTROPY=entropy,
                K=max(1, block // (lanes * entries)),
                L=lanes,
                E=entries,
                num_warps=warps,
            )
    top, total, target, *moment = out.unbind()
    return Partials(top, total, moment[0] if entropy else None, target)


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
    NARROWING: out lies over z in a smaller type, row on row. A tile then writes over
    itself and earlier tiles only, so it is enough that no thread writes a tile before every thread
    has read it.
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


def _shape(
    table: dict[int, tuple[int, int]], z: Tensor, block: int | None, warps: int | None
) -> tuple[int, int]:
    """How many entries and warps a program has for logits like z; block and warps override them."""
    entries, threads = table[z.element_size()]
    return entries if block is None else block, threads if warps is None else warps


def _rate(scaling: Scaling) -> tuple[Tensor | float, bool]:
    """The inverse temperature as the kernels take it, and whether there is one per row."""
    t = scaling.inverse_temperature
    return (t.contiguous(), True) if isinstance(t, Tensor) else (float(t), False)
