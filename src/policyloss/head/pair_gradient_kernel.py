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
from policyloss.head.kernels import (
    BACKWARD,
    LN_2,
    LOG2_E,
    NOTHING,
    Tile,
    _store_zeros,
    contiguous,
    narrows,
)
from policyloss.head.pair_kernels import FORMS, FUSION, _scaled_tile, _to_mixture, of_both
from policyloss.head.pair_rows import PairStatistics
from policyloss.head.softmax_rows import Scaling


@triton.jit
def _tile_gradient(
    ls, lt, base, bend, target, pull, total, beta, column, y,
    FORM: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
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
    z_ptr, u_ptr, out_ptr, ids_ptr, z_lse_ptr, u_lse_ptr, entropy_ptr, dlogp_ptr, dentropy_ptr,
    ddivergence_ptr, target_ptr, total_ptr, z_rate, u_rate, z_bias_ptr, u_bias_ptr, z_softcap,
    u_softcap, beta, z_stride, u_stride, out_stride, V,
    Z_PER_ROW: tl.constexpr, U_PER_ROW: tl.constexpr, Z_BIAS: tl.constexpr, U_BIAS: tl.constexpr,
    Z_SOFTCAP: tl.constexpr, U_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient dz of one row: `kernels._gradient_kernel`'s, and that of the divergence.

    The divergence adds `ddivergence·(slopes − p_s·total)` to ds: of the forward KL `p_s − p_t`, of
    the reverse `p_s·(ls − lt − total)`, of the JSD `p_s·((1−beta)·(ls − log m) − total)`.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    out_row = out_ptr + row.to(tl.int64) * out_stride
    g = tl.load(dlogp_ptr + row).to(tl.float32)
    h = tl.load(dentropy_ptr + row).to(tl.float32) if ENTROPY else 0.0
    weight = tl.load(ddivergence_ptr + row).to(tl.float32)
    if (g == 0) & (h == 0) & (weight == 0):
        _store_zeros(out_row, V, BLOCK)
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
        within = tl.arange(0, BLOCK)
        full = V // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            _gradient_of_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale,
                u_scale, z_lse, u_lse, base, bend, target, pull, total, beta, start + within, y, V,
                Z_BIAS, U_BIAS, Z_SOFTCAP, U_SOFTCAP, FORM, ENTROPY, NARROWING, False,
            )  # fmt: skip
        if full < V:
            _gradient_of_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale,
                u_scale, z_lse, u_lse, base, bend, target, pull, total, beta, full + within, y, V,
                Z_BIAS, U_BIAS, Z_SOFTCAP, U_SOFTCAP, FORM, ENTROPY, NARROWING, True,
            )  # fmt: skip


@triton.jit
def _gradient_of_tile(
    z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, z_lse,
    u_lse, base, bend, target, pull, total, beta, column, y, V,
    Z_BIAS: tl.constexpr, U_BIAS: tl.constexpr, Z_SOFTCAP: tl.constexpr, U_SOFTCAP: tl.constexpr,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, NARROWING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Read one tile of both rows, and write its gradient."""
    s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, MASKED)
    t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, MASKED)
    d = _tile_gradient(
        s - z_lse, t - u_lse, base, bend, target, pull, total, beta, column, y, FORM, ENTROPY
    )
    if Z_SOFTCAP:
        d *= _slope(s, z_scale, z_softcap)
    if NARROWING:
        tl.debug_barrier()
    d = d.to(out_row.dtype.element_ty)
    if MASKED:
        tl.store(out_row + column, d, mask=column < V)
    else:
        tl.store(out_row + column, d)


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
    _tile: Tile | None = None,
) -> None:
    """`pair_rows.pair_gradient` in one read of z and u and one write of `out`.

    Arguments as of `kernels.row_gradient`, over whose z `out` may lie, too.
    """
    rows, vocabulary = z.shape
    if not rows:
        return
    block, warps = _tile or BACKWARD[z.element_size()]
    numbers, options = of_both(scaling, teacher_scaling)
    of_rows = contiguous(
        ids, lse, pair.lse, entropy_value, dlogp, dentropy, ddivergence, target, pair.total
    )
    with on_device_of(z):
        _pair_gradient_kernel[(rows,)](
            z, u, out, *of_rows, *numbers, float(measure.beta), z.stride(0), u.stride(0),
            out.stride(0), vocabulary, **options, FORM=FORMS[measure.form],
            ENTROPY=dentropy is not None, NARROWING=narrows(z, out), BLOCK=block, num_warps=warps,
            enable_fp_fusion=FUSION,
        )  # fmt: skip
