"""Triton kernels for the statistics and the gradient of rows of logits, one program per row.

They are the `row_partials` and the `row_gradient` of `softmax_rows.py`, one launch each.
Legend: R rows, V vocabulary entries, z raw logits `[R, V]`, ids `[R]`. A program walks its row in
tiles. Full tiles are read without a mask; the rest of the row is one masked tile. Nothing is
added across programs and nothing is tuned at run time, so the same input gives the same bits.
Exponentials are powers of two: `e^x = 2^(x·log2 e)`, one instruction on a GPU. Temperatures are
positive. A bias or a softcap may be None.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.triton_modules import on_device_of
from policyloss.head.softmax_rows import Partials, Scaling, Spread, Statistics

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
def load_logits(z_row, bias_ptr, softcap, column, inside, MASKED: tl.constexpr):
    """`softcap * tanh((z + bias) / softcap)` in float32.

    MASKED: entries that are not `inside` the row are −inf; otherwise all entries are inside.
    """
    if MASKED:
        z = tl.load(z_row + column, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        z = tl.load(z_row + column, eviction_policy="evict_first")
    u = z.to(tl.float32)
    if bias_ptr is not None:
        if MASKED:
            u += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        else:
            u += tl.load(bias_ptr + column).to(tl.float32)
    if softcap is not None:
        u = softcap - 2 * softcap / (1 + tl.exp2(u * (2 * LOG2_E / softcap)))
    # The bound of a softcap is finite, so entries past the row become −inf after it.
    return tl.where(inside, u, float("-inf")) if MASKED else u


@triton.jit
def rate_of(rates, row, PER_ROW: tl.constexpr):
    """The inverse temperature of a row. rates: one of each row, or one number."""
    rate = tl.load(rates + row).to(tl.float32) if PER_ROW else rates
    return rate  # noqa: RET504 (as a variable, Triton's interpreter rounds it to float32 too)


@triton.jit
def lane_entries(K: tl.constexpr, L: tl.constexpr, E: tl.constexpr):
    """The entries of a tile `[L, K, E]`: L threads read E entries each, 16 bytes, K times.

    The K·E entries of a lane belong to one thread, which keeps a reference and sums of its own.
    Threads meet once, at the end of the row.
    """
    lane = tl.arange(0, L)[:, None, None] * E + tl.arange(0, E)[None, None, :]
    return lane + tl.arange(0, K)[None, :, None] * (L * E)


@triton.jit
def row_decay(top):
    """The reference of the row, and for each lane its distance from it and its factor."""
    row_top = tl.max(top, axis=0)
    back = top - tl.where(row_top == float("-inf"), 0.0, row_top)
    return row_top, back, tl.exp2(back)


@triton.jit
def store_partials(out_ptr, row, R, top, total, z_row, bias_ptr, softcap, scale, y, V):
    """Write maximum, sum and shifted target of a row."""
    here = (y >= 0) & (y < V)
    u = load_logits(z_row, bias_ptr, softcap, y, here, True)
    shift = u * scale - tl.where(top == float("-inf"), 0.0, top)
    # A maximum may drop a NaN, a sum does not.
    tl.store(out_ptr + row, tl.where(total == total, top * LN_2, total))
    tl.store(out_ptr + R + row, total)
    tl.store(out_ptr + 2 * R + row, tl.where(here, shift * LN_2, 0.0))


@triton.jit
def _merge_tile(top, total, moment, u, scale, ENTROPY: tl.constexpr, GUARDED: tl.constexpr):
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
    z_row, bias_ptr, softcap, scale, V, ENTROPY: tl.constexpr, GUARDED: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """One pass over a row: its reference, sum and moment, in powers of two.

    GUARDED: logits may be −inf.
    """
    within = lane_entries(K, L, E)
    top = tl.full([L], float("-inf"), tl.float32)
    total = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    full = V // (K * L * E) * (K * L * E)
    for start in range(0, full, K * L * E):
        column = start + within
        u = load_logits(z_row, bias_ptr, softcap, column, column < V, False)
        top, total, moment = _merge_tile(top, total, moment, u, scale, ENTROPY, GUARDED)
    if full < V:
        column = full + within
        u = load_logits(z_row, bias_ptr, softcap, column, column < V, True)
        top, total, moment = _merge_tile(top, total, moment, u, scale, ENTROPY, True)
    row_top, back, decay = row_decay(top)
    row_moment = 0.0
    if ENTROPY:
        row_moment = tl.sum((moment + total * tl.maximum(back, NOTHING)) * decay, axis=0)
    return row_top, tl.sum(total * decay, axis=0), row_moment


@triton.jit
def _partials_kernel(
    z_ptr, ids_ptr, out_ptr, z_stride, R, V,
    rates, bias_ptr, softcap, PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr, K: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The partials of one row: its maximum m, two sums, and the shifted target.

    With `s = scaled(z)` and `e = (s - m).exp()` they are `m`, `e.sum(-1)`, `(e * (s - m)).sum(-1)`
    and `s[id] - m`.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    scale = rate_of(rates, row, PER_ROW) * LOG2_E
    top, total, moment = _walk(z_row, bias_ptr, softcap, scale, V, ENTROPY, False, K, L, E)
    if ENTROPY:  # noqa: SIM102 (known when compiled, unlike the next)
        # Only 0·(−inf) makes the moment NaN where the sum is not: rare enough to walk such a row
        # again, with a guard per entry.
        if (moment != moment) & (total == total):
            top, total, moment = _walk(z_row, bias_ptr, softcap, scale, V, ENTROPY, True, K, L, E)
    y = tl.load(ids_ptr + row)
    store_partials(out_ptr, row, R, top, total, z_row, bias_ptr, softcap, scale, y, V)
    if ENTROPY:
        tl.store(out_ptr + 3 * R + row, moment * LN_2)


def scaling_arguments(*scalings: Scaling) -> list[Any]:
    """Rates, biases, softcaps, and whether each row has a rate, as the kernels take them."""
    rates = [x.inverse_temperature for x in scalings]
    per_row = [isinstance(t, Tensor) for t in rates]
    return [
        *(t.contiguous() if isinstance(t, Tensor) else float(t) for t in rates),
        *(x.bias for x in scalings),
        *(None if x.softcap is None else float(x.softcap) for x in scalings),
        *per_row,
    ]


def tile_of_lanes(table: dict[int, tuple[int, int]], z: Tensor) -> dict[str, int]:
    """The sizes of a tile `[L, K, E]` of logits like z, and the number of warps."""
    block, warps = table[z.element_size()]
    lanes, entries = 32 * warps, VECTOR_BYTES // z.element_size()
    return {"K": max(1, block // (lanes * entries)), "L": lanes, "E": entries, "num_warps": warps}


def row_partials(z: Tensor, ids: Tensor, scaling: Scaling, entropy: bool) -> Partials:
    """`softmax_rows.row_partials` in one read of z.

    `[R, V]` (last dimension contiguous), `[R]` → four `[R]` in float32.
    """
    rows, vocabulary = z.shape
    out = torch.empty(4 if entropy else 3, rows, dtype=torch.float32, device=z.device)
    if rows:
        with on_device_of(z):
            _partials_kernel[(rows,)](
                z, ids.contiguous(), out, z.stride(0), rows, vocabulary,
                *scaling_arguments(scaling), ENTROPY=entropy, **tile_of_lanes(FORWARD, z),
            )  # fmt: skip
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
def store_tile(out_row, d, column, V, NARROWING: tl.constexpr, MASKED: tl.constexpr):
    """Write the gradient of one tile.

    NARROWING: out lies over z in a smaller type, row on row. A tile then writes over itself and
    earlier tiles only, so it is enough that no thread writes a tile before every thread has read
    it.
    """
    if NARROWING:
        tl.debug_barrier()
    if MASKED:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty), mask=column < V)
    else:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty))


@triton.jit
def store_zeros(out_row, V, BLOCK: tl.constexpr):
    """Write the gradient of a row without derivatives, whatever its logits are."""
    zeros = tl.zeros([BLOCK], tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        store_tile(out_row, zeros, start + tl.arange(0, BLOCK), V, False, False)
    if full < V:
        store_tile(out_row, zeros, full + tl.arange(0, BLOCK), V, False, True)


@triton.jit
def _write_tile(
    z_row, out_row, bias_ptr, softcap, scale, lse2, base, bend, target, start, y, V,
    ENTROPY: tl.constexpr, NARROWING: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz of one tile: `target` at y, else `p·(base + bend·log2 p)`, times the softcap's slope."""
    column = start + tl.arange(0, BLOCK)
    u = load_logits(z_row, bias_ptr, softcap, column, column < V, MASKED)
    log2_p = u * scale - lse2
    p = tl.exp2(log2_p)
    d = p * (base + bend * tl.maximum(log2_p, NOTHING)) if ENTROPY else p * base
    # One tile of the row holds y; the others need not compare.
    if (y >= start) & (y < start + BLOCK):
        d = tl.where(column == y, target, d)
    if softcap is not None:
        bent = u / softcap
        d *= 1 - bent * bent
    store_tile(out_row, d, column, V, NARROWING, MASKED)


@triton.jit
def _gradient_kernel(
    z_ptr, out_ptr, ids_ptr, lse_ptr, logp_ptr, dlogp_ptr, entropy_ptr, dentropy_ptr, source_ptr,
    z_stride, out_stride, V, rates, bias_ptr, softcap, PER_ROW: tl.constexpr,
    ENTROPY: tl.constexpr, NARROWING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient dz of one row, or of the row of z that `source` names for it.

    `dz = ds · (1 − (u/softcap)²) / temperature`, with
    `ds = dlogp·(onehot(id) − p) − dentropy·p·(log p + entropy)`.
    """
    row = tl.program_id(0)
    of_z = row.to(tl.int64) if source_ptr is None else tl.load(source_ptr + row)
    z_row = z_ptr + of_z * z_stride
    out_row = out_ptr + row.to(tl.int64) * out_stride
    g = tl.load(dlogp_ptr + row).to(tl.float32)
    h = tl.load(dentropy_ptr + row).to(tl.float32) if ENTROPY else 0.0
    if (g == 0) & (h == 0):
        store_zeros(out_row, V, BLOCK)
    else:
        y = tl.load(ids_ptr + row)
        rate = rate_of(rates, row, PER_ROW)
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
        full = V // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            _write_tile(
                z_row, out_row, bias_ptr, softcap, scale, lse2, base, bend, target, start, y, V,
                ENTROPY, NARROWING, False, BLOCK,
            )  # fmt: skip
        if full < V:
            _write_tile(
                z_row, out_row, bias_ptr, softcap, scale, lse2, base, bend, target, full, y, V,
                ENTROPY, NARROWING, True, BLOCK,
            )  # fmt: skip


def backward_options(z: Tensor, out: Tensor, spread: Spread | None) -> dict[str, Any]:
    """The constants of a kernel that writes the gradient of z to `out`."""
    block, warps = BACKWARD[z.element_size()]
    narrowing = out.data_ptr() == z.data_ptr() and out.element_size() != z.element_size()
    return {
        "ENTROPY": spread is not None, "NARROWING": narrowing, "BLOCK": block, "num_warps": warps
    }  # fmt: skip


def row_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    dlogp: Tensor,
    spread: Spread | None,
    scaling: Scaling,
    source: Tensor | None = None,
) -> None:
    """`softmax_rows.row_gradient` in one read of z and one write of `out`.

    z, out: `[R, V]`, last dimension contiguous. spread: the rows' entropy and its derivative, None
    if it has none. `out` may be `z` itself, or a narrower type over the same memory, each row
    starting at the byte where its row of z starts.
    """
    rows, vocabulary = out.shape
    if rows:
        of_rows = (ids, s.lse, s.logp, dlogp, *(spread or ()))
        with on_device_of(z):
            _gradient_kernel[(rows,)](
                z, out, *(x.contiguous() for x in of_rows), *(() if spread else (None, None)),
                source, z.stride(0), out.stride(0), vocabulary,
                *scaling_arguments(scaling), **backward_options(z, out, spread),
            )  # fmt: skip
