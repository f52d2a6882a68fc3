"""Triton kernels for rows of two distributions: one launch each, with one program per row.

They compute the sums and the gradient of `teacher/rows.py`, with the tiles, the powers of two and
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
    backward_options,
    lane_entries,
    load_logits,
    rate_of,
    row_decay,
    scaling_arguments,
    store_partials,
    store_tile,
    store_zeros,
    tile_of_lanes,
)
from policyloss.head.softmax_rows import Partials, Scaling, Spread, Statistics
from policyloss.head.teacher.rows import PairStatistics

# As in `head/kernels.py`: entries of a row that a program reads at once, and the warps that share
# them. A program holds two rows at a time, so its tiles are half as large.
PAIR_FORWARD = {4: (4096, 4), 2: (2048, 4)}
# A multiply-add that is rounded once would make two equal rows differ: `u·rate` is subtracted from
# `z·rate`, which is rounded. The kernels wait for memory in any case.
FUSION = False


@triton.jit
def _load_pair(
    z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, column, V,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of both rows after cap and temperature, in powers of two; −inf past them."""
    s = load_logits(z_row, z_bias_ptr, z_softcap, column, column < V, MASKED) * z_scale
    t = load_logits(u_row, u_bias_ptr, u_softcap, column, column < V, MASKED) * u_scale
    return s, t


@triton.jit
def _shift_tile(top, x):
    """The running reference of each lane after the tile x `[L, K, E]`; x − reference, the powers,
    and the factor of the sums so far.
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
def _add_tile(
    top_s, total_s, moment, top_t, total_t, cross,
    z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, column, V,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sums of each lane after a tile of both rows."""
    s, t = _load_pair(
        z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, column, V,
        MASKED,
    )  # fmt: skip
    top_s, shift, e_s, back, decay_s = _shift_tile(top_s, s)
    if ENTROPY:
        moment = (moment + total_s * tl.maximum(back, NOTHING)) * decay_s
        moment += _lane_sum(tl.where(e_s > 0, e_s * shift, 0.0))
    total_s = total_s * decay_s + _lane_sum(e_s)
    top_t, _, e_t, _, decay_t = _shift_tile(top_t, t)
    total_t = total_t * decay_t + _lane_sum(e_t)
    if FORM == 0:
        cross = cross * decay_t + _lane_sum(tl.where(e_t > 0, e_t * (t - s), 0.0))
    if FORM == 1:
        cross = cross * decay_s + _lane_sum(tl.where(e_s > 0, e_s * (s - t), 0.0))
    return top_s, total_s, moment, top_t, total_t, cross


@triton.jit
def _pair_partials_kernel(
    z_ptr, u_ptr, ids_ptr, out_ptr, z_stride, u_stride, R, V,
    z_rates, u_rates, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
    Z_PER_ROW: tl.constexpr, U_PER_ROW: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    K: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The partials of both rows (see `head.kernels._partials_kernel`), and the cross sum.

    With s and t the scaled logits and e_s, e_t their shifted exponentials, that is
    `(e_t * (t - s)).sum(-1)` for the forward KL and `(e_s * (s - t)).sum(-1)` for the reverse.
    """
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    z_scale = rate_of(z_rates, row, Z_PER_ROW) * LOG2_E
    u_scale = rate_of(u_rates, row, U_PER_ROW) * LOG2_E
    within = lane_entries(K, L, E)
    top_s = tl.full([L], float("-inf"), tl.float32)
    top_t = tl.full([L], float("-inf"), tl.float32)
    total_s = tl.zeros([L], tl.float32)
    total_t = tl.zeros([L], tl.float32)
    moment = tl.zeros([L], tl.float32)
    cross = tl.zeros([L], tl.float32)
    full = V // (K * L * E) * (K * L * E)
    for start in range(0, full, K * L * E):
        top_s, total_s, moment, top_t, total_t, cross = _add_tile(
            top_s, total_s, moment, top_t, total_t, cross, z_row, u_row, z_bias_ptr, u_bias_ptr,
            z_softcap, u_softcap, z_scale, u_scale, start + within, V, FORM, ENTROPY, False,
        )  # fmt: skip
    if full < V:
        top_s, total_s, moment, top_t, total_t, cross = _add_tile(
            top_s, total_s, moment, top_t, total_t, cross, z_row, u_row, z_bias_ptr, u_bias_ptr,
            z_softcap, u_softcap, z_scale, u_scale, full + within, V, FORM, ENTROPY, True,
        )  # fmt: skip
    top, back, decay = row_decay(top_s)
    total = tl.sum(total_s * decay, axis=0)
    y = tl.load(ids_ptr + row)
    store_partials(out_ptr, row, R, top, total, z_row, z_bias_ptr, z_softcap, z_scale, y, V)
    teacher_top, _, teacher_decay = row_decay(top_t)
    teacher_total = tl.sum(total_t * teacher_decay, axis=0)
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
def _mixture_terms(
    z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, z_lse, u_lse,
    column, V, beta, MASKED: tl.constexpr,
):  # fmt: skip
    """The term of each entry in KL(student‖m) and in KL(teacher‖m), in powers of two."""
    s, t = _load_pair(
        z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, column, V,
        MASKED,
    )  # fmt: skip
    ls, lt = s - z_lse, t - u_lse
    p_s, p_t = tl.exp2(ls), tl.exp2(lt)
    to_student, to_teacher = _to_mixture(lt - ls, beta)
    return tl.where(p_s > 0, -p_s * to_student, 0.0), tl.where(p_t > 0, -p_t * to_teacher, 0.0)


@triton.jit
def _mixture_kernel(
    z_ptr, u_ptr, z_lse_ptr, u_lse_ptr, out_ptr, z_stride, u_stride, R, V, beta,
    z_rates, u_rates, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
    Z_PER_ROW: tl.constexpr, U_PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`(p_s * (ls - log m)).sum(-1)` and `(p_t * (lt - log m)).sum(-1)` of one row."""
    row = tl.program_id(0)
    z_row = z_ptr + row.to(tl.int64) * z_stride
    u_row = u_ptr + row.to(tl.int64) * u_stride
    z_scale = rate_of(z_rates, row, Z_PER_ROW) * LOG2_E
    u_scale = rate_of(u_rates, row, U_PER_ROW) * LOG2_E
    z_lse = tl.load(z_lse_ptr + row) * LOG2_E
    u_lse = tl.load(u_lse_ptr + row) * LOG2_E
    within = tl.arange(0, BLOCK)
    of_student = tl.zeros([BLOCK], tl.float32)
    of_teacher = tl.zeros([BLOCK], tl.float32)
    full = V // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        here, there = _mixture_terms(
            z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale,
            z_lse, u_lse, start + within, V, beta, False,
        )  # fmt: skip
        of_student += here
        of_teacher += there
    if full < V:
        here, there = _mixture_terms(
            z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale,
            z_lse, u_lse, full + within, V, beta, True,
        )  # fmt: skip
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
) -> tuple[Partials, Partials, Tensor]:
    """The partials of both rows, and the cross sum (undefined for a JSD), in one read of each."""
    rows, vocabulary = z.shape
    out = torch.empty(7 if entropy else 6, rows, dtype=torch.float32, device=z.device)
    if rows:
        with on_device_of(z):
            _pair_partials_kernel[(rows,)](
                z, u, ids.contiguous(), out, z.stride(0), u.stride(0), rows, vocabulary,
                *scaling_arguments(scaling, teacher_scaling), FORM=kind.code, ENTROPY=entropy,
                **tile_of_lanes(PAIR_FORWARD, z), enable_fp_fusion=FUSION,
            )  # fmt: skip
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
) -> Tensor:
    """KL(student‖m) and KL(teacher‖m) of each row, over these entries. → `[2, R]`."""
    rows, vocabulary = z.shape
    out = torch.empty(2, rows, dtype=torch.float32, device=z.device)
    if rows:
        block, warps = BACKWARD[z.element_size()]
        with on_device_of(z):
            _mixture_kernel[(rows,)](
                z, u, lse.contiguous(), teacher_lse.contiguous(), out,
                z.stride(0), u.stride(0), rows, vocabulary, float(beta),
                *scaling_arguments(scaling, teacher_scaling),
                BLOCK=block, num_warps=warps, enable_fp_fusion=FUSION,
            )  # fmt: skip
    return out


@triton.jit
def _write_tile(
    z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale,
    z_lse, u_lse, base, bend, target, pull, total, beta, start, y, V,
    FORM: tl.constexpr, ENTROPY: tl.constexpr, NARROWING: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dz of one tile: the policy's gradient (`head.kernels._write_tile`) and the divergence's."""
    column = start + tl.arange(0, BLOCK)
    s, t = _load_pair(
        z_row, u_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap, z_scale, u_scale, column, V,
        MASKED,
    )  # fmt: skip
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
    if z_softcap is not None:
        bent = s / (z_scale * z_softcap)
        d *= 1 - bent * bent
    store_tile(out_row, d, column, V, NARROWING, MASKED)


@triton.jit
def _pair_gradient_kernel(
    z_ptr, u_ptr, out_ptr, ids_ptr, z_lse_ptr, u_lse_ptr, total_ptr, target_ptr,
    dlogp_ptr, ddivergence_ptr, entropy_ptr, dentropy_ptr, z_stride, u_stride, out_stride, V, beta,
    z_rates, u_rates, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
    Z_PER_ROW: tl.constexpr, U_PER_ROW: tl.constexpr, FORM: tl.constexpr, ENTROPY: tl.constexpr,
    NARROWING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient dz of one row: that of `head.kernels._gradient_kernel`, and the divergence's.

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
        store_zeros(out_row, V, BLOCK)
    else:
        y = tl.load(ids_ptr + row)
        rate = rate_of(z_rates, row, Z_PER_ROW)
        z_scale = rate * LOG2_E
        u_scale = rate_of(u_rates, row, U_PER_ROW) * LOG2_E
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
        full = V // BLOCK * BLOCK
        for start in range(0, full, BLOCK):
            _write_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
                z_scale, u_scale, z_lse, u_lse, base, bend, target, pull, total, beta,
                start, y, V, FORM, ENTROPY, NARROWING, False, BLOCK,
            )  # fmt: skip
        if full < V:
            _write_tile(
                z_row, u_row, out_row, z_bias_ptr, u_bias_ptr, z_softcap, u_softcap,
                z_scale, u_scale, z_lse, u_lse, base, bend, target, pull, total, beta,
                full, y, V, FORM, ENTROPY, NARROWING, True, BLOCK,
            )  # fmt: skip


def pair_gradient(
    z: Tensor,
    out: Tensor,
    ids: Tensor,
    s: Statistics,
    dlogp: Tensor,
    spread: Spread | None,
    target: Tensor,
    scaling: Scaling,
    u: Tensor,
    teacher_scaling: Scaling,
    pair: PairStatistics,
    ddivergence: Tensor,
    measure: Measure,
) -> None:
    """`teacher.rows.pair_gradient` in one read of z and u and one write of `out`.

    `out` may lie over z as in `head.kernels.row_gradient`.
    """
    rows, vocabulary = z.shape
    if rows:
        of_rows = (ids, s.lse, pair.lse, pair.total, target, dlogp, ddivergence, *(spread or ()))
        with on_device_of(z):
            _pair_gradient_kernel[(rows,)](
                z, u, out, *(x.contiguous() for x in of_rows), *(() if spread else (None, None)),
                z.stride(0), u.stride(0), out.stride(0), vocabulary, float(measure.beta),
                *scaling_arguments(scaling, teacher_scaling), FORM=measure.computed_kind.code,
                **backward_options(z, out, spread), enable_fp_fusion=FUSION,
            )  # fmt: skip
