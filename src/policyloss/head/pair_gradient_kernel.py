"""The Triton kernel for the gradient of rows of two distributions: one program per row.

It is the `pair_gradient` of `pair_rows.py`. Legend: as in `pair_kernels.py`.
"""

# Triton has no types, and constants of a kernel are written in capitals.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.divergence import Measure
from policyloss.functional.triton_modules import on_device_of
from policyloss.head.kernels import BACKWARD, LN_2, LOG2_E, NOTHING, _shape
from policyloss.head.pair_kernels import (
    FORMS,
    FUSION,
    _scaled_tile,
    _to_mixture,
    biases,
    options,
    rates,
)
from policyloss.head.pair_rows import PairStatistics
from policyloss.head.softmax_rows import Scaling


@triton.jit
def _tile_gradient(
    ls,
    lt,
    base,
    bend,
    target,
    pull,
    total,
    beta,
    column,
    y,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """ds of one tile, times the temperature's rate: the policy's gradient and the divergence's.

    ls, lt: log-probabilities in powers of two.
    """
    p = tl.exp2(ls)
    d = p * (base + bend * tl.maximum(ls, NOTHING)) if ENTROPY else p * base
    d = tl.where(column == y, target, d)
    if FORM == 0:
        d += pull * (p - tl.exp2(lt))
    if FORM == 1:
        d += tl.where(p > 0, pull * p * (LN_2 * (ls - lt) - total), 0.0)
    if FORM == 2:
        to_student, _ = _to_mixture(lt - ls, beta)
        d -= tl.where(p > 0, pull * p * ((1 - beta) * LN_2 * to_student + total), 0.0)
    return d


@triton.jit
def _slope(s, scale, softcap):
    """The slope of the softcap at scaled logits."""
    bent = s / (scale * softcap)
    return 1 - bent * bent


@triton.jit
def _pair_gradient_kernel(
    z_ptr,
    u_ptr,
    out_ptr,
    ids_ptr,
    z_lse_ptr,
    u_lse_ptr,
    entropy_ptr,
    dlogp_ptr,
    dentropy_ptr,
    ddivergence_ptr,
    target_ptr,
    total_ptr,
    z_rate,
    u_rate,
    z_bias_ptr,
    u_bias_ptr,
    z_softcap,
    u_softcap,
    beta,
    z_stride,
    u_stride,
    out_stride,
    V,
    Z_PER_ROW: tl.constexpr,
    U_PER_ROW: tl.constexpr,
    Z_BIAS: tl.constexpr,
    U_BIAS: tl.constexpr,
    Z_SOFTCAP: tl.constexpr,
    U_SOFTCAP: tl.constexpr,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient dz of one row: `kernels._gradient_kernel`'s, and that of the divergence.

    The divergence adds `ddivergence·(slopes − p_s·total)` to ds: of the forward KL `p_s − p_t`, of
    the reverse `p_s·(ls − lt − total)`, of the JSD `p_s·((1−beta)·(ls − log m) − total)`.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    out_row = out_ptr + row.to(tl.int64) * out_stride
    within = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    g = tl.load(dlogp_ptr + row).to(tl.float32)
    h = tl.load(dentropy_ptr + row).to(tl.float32) if ENTROPY else 0.0
    weight = tl.load(ddivergence_ptr + row).to(tl.float32)
    if (g == 0) & (h == 0) & (weight == 0):
        zeros = tl.zeros([BLOCK], tl.float32).to(out_ptr.dtype.element_ty)
        for start in range(0, full, BLOCK):
            tl.store(out_row + start + within, zeros)
        if full < V:
            tl.store(out_row + full + within, zeros, mask=full + within < V)
    else:
        y = tl.load(ids_ptr + row)
        rate = tl.load(z_rate + row).to(tl.float32) if Z_PER_ROW else z_rate
        z_scale = rate * LOG2_E
        teacher_rate = tl.load(u_rate + row).to(tl.float32) if U_PER_ROW else u_rate
        u_scale = teacher_rate * LOG2_E
        z_lse = tl.load(z_lse_ptr + row) * LOG2_E
        u_lse = tl.load(u_lse_ptr + row) * LOG2_E
        target = rate * tl.load(target_ptr + row)
        pull = rate * weight
        total = tl.load(total_ptr + row)
        base = -rate * g
        bend = 0.0
        if ENTROPY:
            base = -rate * (g + h * tl.load(entropy_ptr + row))
            bend = -rate * h * LN_2
        for start in range(0, full, BLOCK):
            column = start + within
            s = _scaled_tile(
                z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, False
            )
            t = _scaled_tile(
                u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, False
            )
            d = _tile_gradient(
                s - z_lse,
                t - u_lse,
                base,
                bend,
                target,
                pull,
                total,
                beta,
                column,
                y,
                FORM,
                ENTROPY,
            )
            if Z_SOFTCAP:
                d *= _slope(s, z_scale, z_softcap)
            if NARROWING:
                tl.debug_barrier()
            tl.store(out_row + column, d.to(out_ptr.dtype.element_ty))
        if full < V:
            column = full + within
            s = _scaled_tile(
                z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, True
            )
            t = _scaled_tile(
                u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, True
            )
            d = _tile_gradient(
                s - z_lse,
                t - u_lse,
                base,
                bend,
                target,
                pull,
                total,
                beta,
                column,
                y,
                FORM,
                ENTROPY,
            )
            if Z_SOFTCAP:
                d *= _slope(s, z_scale, z_softcap)
            if NARROWING:
                tl.debug_barrier()
            tl.store(out_row + column, d.to(out_ptr.dtype.element_ty), mask=column < V)


def pair_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    lse: Tensor,
    entropy_value: Tensor | None,
    dlogp: Tensor,
    dentropy: Tensor | None,
    target: Tensor,
    scaling: Scaling,
    u: Tensor,
    teacher_scaling: Scaling,
    pair: PairStatistics,
    ddivergence: Tensor,
    measure: Measure,
    *,
    _block: int | None = None,
    _warps: int | None = None,
) -> None:
    """`pair_rows.pair_gradient` in one read of z and u and one write of `out`.

    `out` may lie over z as in `kernels.row_gradient`.
    """
    rows, vocabulary = z.shape
    if not rows:
        return
    with_entropy = entropy_value is not None and dentropy is not None
    block, warps = _shape(BACKWARD, z, _block, _warps)
    with on_device_of(z):
        _pair_gradient_kernel[(rows,)](
            z,
            u,
            out,
            ids.contiguous(),
            lse.contiguous(),
            pair.lse.contiguous(),
            entropy_value.contiguous() if with_entropy and entropy_value is not None else None,
            dlogp.contiguous(),
            dentropy.contiguous() if with_entropy and dentropy is not None else None,
            ddivergence.contiguous(),
            target.contiguous(),
            pair.total.contiguous(),
            *rates(scaling, teacher_scaling),
            *biases(scaling, teacher_scaling),
            float(measure.beta),
            z.stride(0),
            u.stride(0),
            out.stride(0),
            vocabulary,
            **options(scaling, teacher_scaling),
            FORM=FORMS[measure.form],
            ENTROPY=with_entropy,
            NARROWING=out.data_ptr() == z.data_ptr() and out.element_size() != z.element_size(),
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=FUSION,
        )
