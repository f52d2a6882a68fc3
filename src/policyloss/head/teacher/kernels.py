"""Triton kernels for rows of two distributions: one launch each, with one program per row.

They are the sums and the gradient of `teacher/rows.py`, and share the tiles, the powers of two and
the determinism of `head/kernels.py`.
Legend: R rows, V vocabulary entries, z the student's raw logits `[R, V]`, u the teacher's; ls and
lt log-probabilities, p_s and p_t probabilities, m = (1−beta)·p_s + beta·p_t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from policyloss.functional.divergence import Kind, Measure
from policyloss.functional.triton_modules import on_device_of
from policyloss.head.kernels import (
    BACKWARD,
    LN_2,
    LOG2_E,
    NOTHING,
    VECTOR_BYTES,
    _capped,
    _rate,
    _shape,
)
from policyloss.head.softmax_rows import Partials, Scaling
from policyloss.head.teacher.rows import PairStatistics

# As in `kernels.py`: entries of a row that a program reads at once, and the warps that share them.
# A program holds two rows at a time, so its tiles are half as large.
PAIR_FORWARD = {4: (4096, 4), 2: (2048, 4)}
# A multiply-add that is rounded once would make two equal rows differ: `u·rate` is subtracted from
# `z·rate`, which is rounded. The kernels wait for memory in any case.
FUSION = False


@triton.jit
def _scaled_tile(
    row,
    bias_ptr,
    softcap,
    scale,
    column,
    V,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Logits of a tile after cap and temperature, in powers of two; −inf past the row."""
    if MASKED:
        z = tl.load(row + column, mask=column < V, other=0.0, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column, mask=column < V, other=0.0) if HAS_BIAS else z
    else:
        z = tl.load(row + column, eviction_policy="evict_first")
        bias = tl.load(bias_ptr + column) if HAS_BIAS else z
    x = _capped(z, bias, softcap, HAS_BIAS, HAS_SOFTCAP) * scale
    # The bound of a softcap is finite, so what lies past the row is taken out after it.
    return tl.where(column < V, x, float("-inf")) if MASKED else x


@triton.jit
def _shifted(top, x):
    """The running reference of each lane after the tile x `[L, K, E]`; x − reference, the powers,
    and what the sums so far are multiplied by.
    """
    new_top = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=1))
    reference = tl.where(new_top == float("-inf"), 0.0, new_top)
    shift = x - reference[:, None, None]
    back = top - reference
    return new_top, shift, tl.exp2(shift), back, tl.exp2(back)


@triton.jit
def _lane_sum(x):
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def _added(
    top_s, total_s, moment, top_t, total_t, cross, s, t, FORM: tl.constexpr, ENTROPY: tl.constexpr
):
    """The sums of each lane after a tile of both rows, s and t in powers of two."""
    top_s, shift, e_s, back, decay_s = _shifted(top_s, s)
    if ENTROPY:
        moment = (moment + total_s * tl.maximum(back, NOTHING)) * decay_s
        moment += _lane_sum(tl.where(e_s > 0, e_s * shift, 0.0))
    total_s = total_s * decay_s + _lane_sum(e_s)
    top_t, _, e_t, _, decay_t = _shifted(top_t, t)
    total_t = total_t * decay_t + _lane_sum(e_t)
    if FORM == 0:
        cross = cross * decay_t + _lane_sum(tl.where(e_t > 0, e_t * (t - s), 0.0))
    if FORM == 1:
        cross = cross * decay_s + _lane_sum(tl.where(e_s > 0, e_s * (s - t), 0.0))
    return top_s, total_s, moment, top_t, total_t, cross


@triton.jit
def _row_decay(top):
    """The reference of the whole row, and what each lane's sums are multiplied by."""
    row_top = tl.max(top, axis=0)
    back = top - tl.where(row_top == float("-inf"), 0.0, row_top)
    return row_top, back, tl.exp2(back)


@triton.jit
def _pair_partials_kernel(
    z_ptr,
    u_ptr,
    ids_ptr,
    z_rate,
    u_rate,
    z_bias_ptr,
    u_bias_ptr,
    z_softcap,
    u_softcap,
    out_ptr,
    z_stride,
    u_stride,
    R,
    V,
    Z_PER_ROW: tl.constexpr,
    U_PER_ROW: tl.constexpr,
    Z_BIAS: tl.constexpr,
    U_BIAS: tl.constexpr,
    Z_SOFTCAP: tl.constexpr,
    U_SOFTCAP: tl.constexpr,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """The partials of both rows (see `kernels._partials_kernel`), and the cross sum.

    With s and t the scaled logits and e_s, e_t their shifted exponentials, that is
    `(e_t * (t - s)).sum(-1)` for the forward KL and `(e_s * (s - t)).sum(-1)` for the reverse.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    rate = tl.load(z_rate + row).to(tl.float32) if Z_PER_ROW else z_rate
    z_scale = rate * LOG2_E
    teacher_rate = tl.load(u_rate + row).to(tl.float32) if U_PER_ROW else u_rate
    u_scale = teacher_rate * LOG2_E
    lane = tl.arange(0, L)[:, None, None] * E + tl.arange(0, E)[None, None, :]
    within = lane + tl.arange(0, K)[None, :, None] * (L * E)
    top_s = tl.full([L], float("-inf"), tl.float32)
    top_t = tl.full([L], float("-inf"), tl.float32)
    total_s = tl.zeros([L], tl.float32)
    total_t = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    cross = tl.zeros([L], tl.float32)
    full = V // (K * L * E) * (K * L * E)
    for start in range(0, full, K * L * E):
        column = start + within
        s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, False)
        t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, False)
        top_s, total_s, moment, top_t, total_t, cross = _added(
            top_s, total_s, moment, top_t, total_t, cross, s, t, FORM, ENTROPY
        )
    if full < V:
        column = full + within
        s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, True)
        t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, True)
        top_s, total_s, moment, top_t, total_t, cross = _added(
            top_s, total_s, moment, top_t, total_t, cross, s, t, FORM, ENTROPY
        )
    row_top, back, decay = _row_decay(top_s)
    row_total = tl.sum(total_s * decay, axis=0)
    teacher_top, _, teacher_decay = _row_decay(top_t)
    teacher_total = tl.sum(total_t * teacher_decay, axis=0)
    y = tl.load(ids_ptr + row)
    here = (y >= 0) & (y < V)
    z_y = tl.load(z_row + y, mask=here, other=0.0)
    bias_y = tl.load(z_bias_ptr + y, mask=here, other=0.0) if Z_BIAS else z_y
    shift_y = _capped(z_y, bias_y, z_softcap, Z_BIAS, Z_SOFTCAP) * z_scale - tl.where(
        row_top == float("-inf"), 0.0, row_top
    )
    # A maximum may drop a NaN, a sum does not.
    tl.store(out_ptr + row, tl.where(row_total == row_total, row_top * LN_2, row_total))
    tl.store(out_ptr + R + row, row_total)
    tl.store(out_ptr + 2 * R + row, tl.where(here, shift_y * LN_2, 0.0))
    teacher_max = tl.where(teacher_total == teacher_total, teacher_top * LN_2, teacher_total)
    tl.store(out_ptr + 3 * R + row, teacher_max)
    tl.store(out_ptr + 4 * R + row, teacher_total)
    if FORM == 0:
        tl.store(out_ptr + 5 * R + row, tl.sum(cross * teacher_decay, axis=0) * LN_2)
    if FORM == 1:
        tl.store(out_ptr + 5 * R + row, tl.sum(cross * decay, axis=0) * LN_2)
    if ENTROPY:
        row_moment = tl.sum((moment + total_s * tl.maximum(back, NOTHING)) * decay, axis=0)
        tl.store(out_ptr + 6 * R + row, row_moment * LN_2)


@triton.jit
def _to_mixture(gap, beta):
    """`log2 m − log2 p_s` and `log2 m − log2 p_t` of `gap = log2 p_t − log2 p_s`; 0 where it is."""
    share = tl.where(gap > 0, 1 - beta, beta)
    nearer = tl.log2(1 + share * (tl.exp2(-tl.abs(gap)) - 1))
    return nearer + tl.maximum(gap, 0.0), nearer - tl.minimum(gap, 0.0)


@triton.jit
def _mixture_terms(ls, lt, beta):
    """What each entry adds to KL(student‖m) and to KL(teacher‖m), in powers of two."""
    p_s, p_t = tl.exp2(ls), tl.exp2(lt)
    to_student, to_teacher = _to_mixture(lt - ls, beta)
    return tl.where(p_s > 0, -p_s * to_student, 0.0), tl.where(p_t > 0, -p_t * to_teacher, 0.0)


@triton.jit
def _mixture_kernel(
    z_ptr,
    u_ptr,
    z_lse_ptr,
    u_lse_ptr,
    z_rate,
    u_rate,
    z_bias_ptr,
    u_bias_ptr,
    z_softcap,
    u_softcap,
    out_ptr,
    beta,
    z_stride,
    u_stride,
    R,
    V,
    Z_PER_ROW: tl.constexpr,
    U_PER_ROW: tl.constexpr,
    Z_BIAS: tl.constexpr,
    U_BIAS: tl.constexpr,
    Z_SOFTCAP: tl.constexpr,
    U_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`(p_s * (ls - log m)).sum(-1)` and `(p_t * (lt - log m)).sum(-1)` of one row."""
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    rate = tl.load(z_rate + row).to(tl.float32) if Z_PER_ROW else z_rate
    z_scale = rate * LOG2_E
    teacher_rate = tl.load(u_rate + row).to(tl.float32) if U_PER_ROW else u_rate
    u_scale = teacher_rate * LOG2_E
    z_lse = tl.load(z_lse_ptr + row) * LOG2_E
    u_lse = tl.load(u_lse_ptr + row) * LOG2_E
    within = tl.arange(0, BLOCK)
    of_student = tl.zeros([BLOCK], tl.float32)
    of_teacher = tl.zeros([BLOCK], tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        column = start + within
        s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, False)
        t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, False)
        here, there = _mixture_terms(s - z_lse, t - u_lse, beta)
        of_student += here
        of_teacher += there
    if full < V:
        column = full + within
        s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, True)
        t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, True)
        here, there = _mixture_terms(s - z_lse, t - u_lse, beta)
        of_student += here
        of_teacher += there
    # A NaN is dropped by the comparisons above; the normalisers hold it.
    nan = (z_lse - z_lse) + (u_lse - u_lse)
    tl.store(out_ptr + row, tl.sum(of_student, axis=0) * LN_2 + nan)
    tl.store(out_ptr + R + row, tl.sum(of_teacher, axis=0) * LN_2 + nan)


def pair_partials(
    z: Tensor,
    ids: Tensor,
    scaling: Scaling,
    u: Tensor,
    teacher_scaling: Scaling,
    kind: Kind,
    entropy: bool,
    *,
    _block: int | None = None,
    _warps: int | None = None,
) -> tuple[Partials, Partials, Tensor]:
    """The partials of both rows, and the cross sum (undefined for a JSD), in one read of each."""
    rows, vocabulary = z.shape
    out = torch.empty(7 if entropy else 6, rows, dtype=torch.float32, device=z.device)
    if rows:
        block, warps = _shape(PAIR_FORWARD, z, _block, _warps)
        lanes, entries = 32 * warps, VECTOR_BYTES // z.element_size()
        with on_device_of(z):
            _pair_partials_kernel[(rows,)](
                z,
                u,
                ids.contiguous(),
                *rates(scaling, teacher_scaling),
                *biases(scaling, teacher_scaling),
                out,
                z.stride(0),
                u.stride(0),
                rows,
                vocabulary,
                **options(scaling, teacher_scaling),
                FORM=kind.code,
                ENTROPY=entropy,
                K=max(1, block // (lanes * entries)),
                L=lanes,
                E=entries,
                num_warps=warps,
                enable_fp_fusion=FUSION,
            )
    top, total, target, teacher_top, teacher_total, cross, *moment = out.unbind()
    student = Partials(top, total, moment[0] if entropy else None, target)
    return student, Partials(teacher_top, teacher_total, None, torch.zeros_like(top)), cross


def mixture_sums(
    z: Tensor,
    lse: Tensor,
    scaling: Scaling,
    u: Tensor,
    teacher_lse: Tensor,
    teacher_scaling: Scaling,
    beta: float,
    *,
    _block: int | None = None,
    _warps: int | None = None,
) -> Tensor:
    """KL(student‖m) and KL(teacher‖m) of each row, over these entries. → `[2, R]`."""
    rows, vocabulary = z.shape
    out = torch.empty(2, rows, dtype=torch.float32, device=z.device)
    if rows:
        block, warps = _shape(BACKWARD, z, _block, _warps)
        with on_device_of(z):
            _mixture_kernel[(rows,)](
                z,
                u,
                lse.contiguous(),
                teacher_lse.contiguous(),
                *rates(scaling, teacher_scaling),
                *biases(scaling, teacher_scaling),
                out,
                float(beta),
                z.stride(0),
                u.stride(0),
                rows,
                vocabulary,
                **options(scaling, teacher_scaling),
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=FUSION,
            )
    return out


def rates(*scalings: Scaling) -> list[Tensor | float]:
    """The inverse temperatures of student and teacher as the kernels take them."""
    return [_rate(scaling)[0] for scaling in scalings]


def biases(*scalings: Scaling) -> list[Tensor | float | None]:
    """Biases, then softcaps, of student and teacher."""
    softcaps = [1.0 if x.softcap is None else float(x.softcap) for x in scalings]
    return [*(x.bias for x in scalings), *softcaps]


def options(student: Scaling, teacher: Scaling) -> dict[str, bool]:
    """Flags for the optional arguments."""
    both = {"Z": student, "U": teacher}
    return {
        option: value
        for name, x in both.items()
        for option, value in (
            (f"{name}_PER_ROW", _rate(x)[1]),
            (f"{name}_BIAS", x.bias is not None),
            (f"{name}_SOFTCAP", x.softcap is not None),
        )
    }


@triton.jit
def _write_tile(
    z_row,
    u_row,
    out_row,
    z_bias_ptr,
    u_bias_ptr,
    z_softcap,
    u_softcap,
    z_scale,
    u_scale,
    z_lse,
    u_lse,
    base,
    bend,
    target,
    pull,
    total,
    beta,
    start,
    y,
    V,
    Z_BIAS: tl.constexpr,
    U_BIAS: tl.constexpr,
    Z_SOFTCAP: tl.constexpr,
    U_SOFTCAP: tl.constexpr,
    FORM: tl.constexpr,
    ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dz of one tile: the policy's gradient (`head.kernels._write_tile`) and the divergence's."""
    column = start + tl.arange(0, BLOCK)
    s = _scaled_tile(z_row, z_bias_ptr, z_softcap, z_scale, column, V, Z_BIAS, Z_SOFTCAP, MASKED)
    t = _scaled_tile(u_row, u_bias_ptr, u_softcap, u_scale, column, V, U_BIAS, U_SOFTCAP, MASKED)
    ls, lt = s - z_lse, t - u_lse
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
    if Z_SOFTCAP:
        bent = s / (z_scale * z_softcap)
        d *= 1 - bent * bent
    if NARROWING:
        tl.debug_barrier()
    if MASKED:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty), mask=column < V)
    else:
        tl.store(out_row + column, d.to(out_row.dtype.element_ty))


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
            _write_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
                z_scale, u_scale, z_lse, u_lse, base, bend, target, pull, total, beta,
                start, y, V, Z_BIAS, U_BIAS, Z_SOFTCAP, U_SOFTCAP, FORM, ENTROPY,
                NARROWING, False, BLOCK,
            )  # fmt: skip
        if full < V:
            _write_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
                z_scale, u_scale, z_lse, u_lse, base, bend, target, pull, total, beta,
                full, y, V, Z_BIAS, U_BIAS, Z_SOFTCAP, U_SOFTCAP, FORM, ENTROPY,
                NARROWING, True, BLOCK,
            )  # fmt: skip


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
            FORM=measure.computed_kind.code,
            ENTROPY=with_entropy,
            NARROWING=out.data_ptr() == z.data_ptr() and out.element_size() != z.element_size(),
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=FUSION,
        )
