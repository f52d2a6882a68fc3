"""Triton kernels for rows of logits: one launch each, with one program per row.

They are the `row_partials` and `row_gradient` of `softmax_rows.py`.
Legend: R rows, V vocabulary entries, z raw logits `[R, V]`, ids `[R]`. A program walks its row in
tiles. Full tiles are read without a mask; what is left at the end is one masked tile. Nothing is
added across programs and nothing is tuned at run time, so the same input gives the same bits.
Exponentials are powers of two: `e^x = 2^(x·log2 e)`, one instruction on a GPU. Temperatures are
positive. Lists of arguments are wrapped by hand: one per line they would hide the programs.
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
Tile = tuple[int, int]
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
def _capped_tile(
    row, bias_ptr, softcap, column, V,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The logits of a tile, read once, after bias and cap. MASKED: the tile reaches past the row,
    where anything may stand.
    """
    if MASKED:
        z = tl.load(row + column, mask=column < V, other=0.0, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column, mask=column < V, other=0.0) if HAS_BIAS else z
    else:
        z = tl.load(row + column, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column) if HAS_BIAS else z
    return _capped(z, bias, softcap, HAS_BIAS, HAS_SOFTCAP)


@triton.jit
def _walk(
    z_row, bias_ptr, softcap, scale, V,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    GUARDED: tl.constexpr, K: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
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
        u = _capped_tile(z_row, bias_ptr, softcap, column, V, HAS_BIAS, HAS_SOFTCAP, False)
        top, total, moment = _merged(top, total, moment, u, scale, ENTROPY, GUARDED)
    if full < V:
        column = full + within
        u = _capped_tile(z_row, bias_ptr, softcap, column, V, HAS_BIAS, HAS_SOFTCAP, True)
        # The bound of a softcap is finite, so what lies past the row is taken out after it.
        u = tl.where(column < V, u, float("-inf"))
        top, total, moment = _merged(top, total, moment, u, scale, ENTROPY, True)
    row_top, back, decay = _row_decay(top)
    row_moment = 0.0
    if ENTROPY:
        row_moment = tl.sum((moment + total * tl.maximum(back, NOTHING)) * decay, axis=0)
    return row_top, tl.sum(total * decay, axis=0), row_moment


@triton.jit
def _row_decay(top):
    """The reference of the whole row, and what each lane's sums are multiplied by."""
    row_top = tl.max(top, axis=0)
    back = top - tl.where(row_top == float("-inf"), 0.0, row_top)
    return row_top, back, tl.exp2(back)


@triton.jit
def _store_student(
    out_ptr, row, row_top, row_total, z_row, ids_ptr, bias_ptr, softcap, scale, R, V,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write the maximum, the sum and the shifted target of one row."""
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


@triton.jit
def _partials_kernel(
    z_ptr, ids_ptr, inverse_temperature, bias_ptr, softcap, out_ptr, z_stride, R, V,
    PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr, K: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
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
    _store_student(
        out_ptr, row, row_top, row_total, z_row, ids_ptr, bias_ptr, softcap, scale, R, V,
        HAS_BIAS, HAS_SOFTCAP,
    )  # fmt: skip
    if ENTROPY:
        tl.store(out_ptr + 3 * R + row, row_moment * LN_2)


@triton.jit
def _tile_gradient(
    u, softcap, scale, lse2, base, bend, target, column, start, y,
    HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz of one tile: `target` at y, else `p·(base + bend·log2 p)`, times the softcap's slope.

    u: logits after the cap.
    """
    log2_p = u * scale - lse2
    p = tl.exp2(log2_p)
    d = p * (base + bend * tl.maximum(log2_p, NOTHING)) if ENTROPY else p * base
    # One tile of the row holds y; the others need not compare.
    if (y >= start) & (y < start + BLOCK):
        d = tl.where(column == y, target, d)
    if HAS_SOFTCAP:
        bent = u / softcap
        d *= 1 - bent * bent
    return d


@triton.jit
def _store_zeros(out_row, V, BLOCK: tl.constexpr):
    """Write 0 to a row without a derivative."""
    within = tl.arange(0, BLOCK)
    zeros = tl.zeros([BLOCK], tl.float32).to(out_row.dtype.element_ty)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        tl.store(out_row + start + within, zeros)
    if full < V:
        tl.store(out_row + full + within, zeros, mask=full + within < V)


@triton.jit
def _gradient_kernel(
    z_ptr, out_ptr, ids_ptr, lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr, target_ptr,
    inverse_temperature, bias_ptr, softcap, z_stride, out_stride, V,
    PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr, NARROWING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    g = tl.load(dlogp_ptr + row).to(tl.float32)
    h = tl.load(dentropy_ptr + row).to(tl.float32) if ENTROPY else 0.0
    if (g == 0) & (h == 0):
        _store_zeros(out_row, V, BLOCK)
    else:
        y = tl.load(ids_ptr + row)
        rate = tl.load(inverse_temperature + row).to(tl.float32) if PER_ROW else inverse_temperature
        lse2 = tl.load(lse_ptr + row) * LOG2_E
        scale = rate * LOG2_E
        target = rate * tl.load(target_ptr + row)
        base = -rate * g
        bend = 0.0
        if ENTROPY:
            base = -rate * (g + h * tl.load(entropy_ptr + row))
            bend = -rate * h * LN_2
        within = tl.arange(0, BLOCK)
        full = V // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            column = start + within
            u = _capped_tile(z_row, bias_ptr, softcap, column, V, HAS_BIAS, HAS_SOFTCAP, False)
            d = _tile_gradient(
                u, softcap, scale, lse2, base, bend, target, column, start, y,
                HAS_SOFTCAP, ENTROPY, BLOCK,
            )  # fmt: skip
            if NARROWING:
                tl.debug_barrier()
            tl.store(out_row + column, d.to(out_ptr.dtype.element_ty))
        if full < V:
            column = full + within
            u = _capped_tile(z_row, bias_ptr, softcap, column, V, HAS_BIAS, HAS_SOFTCAP, True)
            d = _tile_gradient(
                u, softcap, scale, lse2, base, bend, target, column, full, y,
                HAS_SOFTCAP, ENTROPY, BLOCK,
            )  # fmt: skip
            if NARROWING:
                tl.debug_barrier()
            tl.store(out_row + column, d.to(out_ptr.dtype.element_ty), mask=column < V)


def row_partials(
    z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool, *, _tile: Tile | None = None
) -> Partials:
    """`softmax_rows.row_partials` in one read of z.

    `[R, V]` (last dimension contiguous), `[R]` → four `[R]` in float32.
    """
    rows, vocabulary = z.shape
    out = torch.empty(4 if entropy else 3, rows, dtype=torch.float32, device=z.device)
    if rows:
        rate, per_row, softcap = launched(scaling)
        with on_device_of(z):
            _partials_kernel[(rows,)](
                z, ids.contiguous(), rate, scaling.bias, softcap, out, z.stride(0), rows,
                vocabulary, PER_ROW=per_row, HAS_BIAS=scaling.bias is not None,
                HAS_SOFTCAP=scaling.softcap is not None, ENTROPY=entropy,
                **lanes(z, _tile or FORWARD[z.element_size()]),
            )  # fmt: skip
    top, total, target, *moment = out.unbind()
    return Partials(top, total, moment[0] if entropy else None, target)


def row_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    lse: Tensor,
    entropy_value: Tensor | None,
    dlogp: Tensor,
    dentropy: Tensor | None,
    target: Tensor,
    scaling: Scaling,
    *,
    _tile: Tile | None = None,
) -> None:
    """`softmax_rows.row_gradient` in one read of z and one write of `out`.

    z, out: `[R, V]`, last dimension contiguous. entropy_value, dentropy: both or neither. target:
    `[R]`, the entry of each row's id, before the temperature. `out` may be `z` itself, or a
    narrower type over the same memory, each row starting at the byte where its row of z starts.
    """
    rows, vocabulary = z.shape
    if not rows:
        return
    block, warps = _tile or BACKWARD[z.element_size()]
    rate, per_row, softcap = launched(scaling)
    with on_device_of(z):
        _gradient_kernel[(rows,)](
            z, out, *contiguous(ids, lse, entropy_value, dlogp, dentropy, target), rate,
            scaling.bias, softcap, z.stride(0), out.stride(0), vocabulary,
            PER_ROW=per_row, HAS_BIAS=scaling.bias is not None,
            HAS_SOFTCAP=scaling.softcap is not None, ENTROPY=dentropy is not None,
            NARROWING=narrows(z, out), BLOCK=block, num_warps=warps,
        )  # fmt: skip


def launched(scaling: Scaling) -> tuple[Tensor | float, bool, float]:
    """The inverse temperature as kernels take it, whether there is one per row, and the softcap."""
    t, softcap = scaling.inverse_temperature, scaling.softcap
    rate = (t.contiguous(), True) if isinstance(t, Tensor) else (float(t), False)
    return *rate, 1.0 if softcap is None else float(softcap)


def lanes(z: Tensor, tile: Tile) -> dict[str, int]:
    """How a program of a forward kernel shares a tile of logits like z."""
    block, warps = tile
    threads, entries = 32 * warps, VECTOR_BYTES // z.element_size()
    steps = max(1, block // (threads * entries))
    return {"K": steps, "L": threads, "E": entries, "num_warps": warps}


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """One number per row each, as the kernels read them."""
    return [None if x is None else x.contiguous() for x in tensors]


def narrows(z: Tensor, out: Tensor) -> bool:
    """Whether `out` lies over z in a smaller type."""
    return out.data_ptr() == z.data_ptr() and out.element_size() != z.element_size()
